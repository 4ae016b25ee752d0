"""Types that all import levels share: packed sequences, token batches, losses."""

from megalight.types.batch import BaseStates as BaseStates
from megalight.types.batch import Loss as Loss
from megalight.types.batch import Opaque as Opaque
from megalight.types.batch import TokenBatch as TokenBatch
from megalight.types.batch import TopTokens as TopTokens
from megalight.types.batch import Totals as Totals
from megalight.types.batch import WithResults as WithResults
from megalight.types.batch import inverse as inverse
from megalight.types.batch import mean as mean
from megalight.types.packed_sequences import AttentionSpan as AttentionSpan
from megalight.types.packed_sequences import ContextShare as ContextShare
from megalight.types.packed_sequences import PackedSequences as PackedSequences
from megalight.types.packed_sequences import Pages as Pages
from megalight.types.packed_sequences import to_device as to_device
