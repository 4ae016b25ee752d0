"""Styles: one file each, with the options that a plan declares, and how the style splits a module."""

from megalight.parallel.styles.attention import ContextRegion as ContextRegion
from megalight.parallel.styles.attention import DraftAttentionRegion as DraftAttentionRegion
from megalight.parallel.styles.attention import HeadExchange as HeadExchange
from megalight.parallel.styles.attention import HeadRegion as HeadRegion
from megalight.parallel.styles.attention import RowExchange as RowExchange
from megalight.parallel.styles.attention import WholeSequences as WholeSequences
from megalight.parallel.styles.boundaries import AllRows as AllRows
from megalight.parallel.styles.boundaries import Boundary as Boundary
from megalight.parallel.styles.boundaries import SequenceRegion as SequenceRegion
from megalight.parallel.styles.boundaries import SharedSlice as SharedSlice
from megalight.parallel.styles.embedding_and_head import ComparisonStyle as ComparisonStyle
from megalight.parallel.styles.embedding_and_head import SharedHeadStyle as SharedHeadStyle
from megalight.parallel.styles.embedding_and_head import Vocab as Vocab
from megalight.parallel.styles.embedding_and_head import VocabHeadStyle as VocabHeadStyle
from megalight.parallel.styles.experts import Expert as Expert
from megalight.parallel.styles.experts import Routing as Routing
from megalight.parallel.styles.linear import Channels as Channels
from megalight.parallel.styles.linear import Column as Column
from megalight.parallel.styles.linear import NormGroups as NormGroups
from megalight.parallel.styles.linear import Row as Row
from megalight.parallel.styles.style import STYLES as STYLES
from megalight.parallel.styles.style import Attributes as Attributes
from megalight.parallel.styles.style import Dropout as Dropout
from megalight.parallel.styles.style import Replicated as Replicated
from megalight.parallel.styles.style import Style as Style
from megalight.parallel.styles.style import register as register
