"""Types that all floors share: packed sequences, token batches, losses."""

from megalight.types.base_states import BaseStates as BaseStates
from megalight.types.batch import TokenBatch as TokenBatch
from megalight.types.loss import Loss as Loss
from megalight.types.loss import Totals as Totals
from megalight.types.loss import inverse as inverse
from megalight.types.loss import mean as mean
from megalight.types.opaque import Opaque as Opaque
from megalight.types.packed import ContextShare as ContextShare
from megalight.types.packed import PackedSequences as PackedSequences
from megalight.types.packed import to_device as to_device
from megalight.types.results import WithResults as WithResults
from megalight.types.top_tokens import TopTokens as TopTokens
