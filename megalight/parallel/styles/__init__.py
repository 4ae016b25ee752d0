"""Styles: one file each, with the options that a plan declares, and how the style splits a module."""

from megalight.parallel.styles.all_rows import AllRows as AllRows
from megalight.parallel.styles.attributes import Attributes as Attributes
from megalight.parallel.styles.boundary import Boundary as Boundary
from megalight.parallel.styles.channels import Channels as Channels
from megalight.parallel.styles.column import Column as Column
from megalight.parallel.styles.comparison import Comparison as Comparison
from megalight.parallel.styles.context_region import ContextRegion as ContextRegion
from megalight.parallel.styles.dropout import Dropout as Dropout
from megalight.parallel.styles.expert import Expert as Expert
from megalight.parallel.styles.head_exchange import HeadExchange as HeadExchange
from megalight.parallel.styles.head_region import HeadRegion as HeadRegion
from megalight.parallel.styles.lineage_region import LineageRegion as LineageRegion
from megalight.parallel.styles.norm_groups import NormGroups as NormGroups
from megalight.parallel.styles.replicated import Replicated as Replicated
from megalight.parallel.styles.routing import Routing as Routing
from megalight.parallel.styles.row import Row as Row
from megalight.parallel.styles.row_exchange import RowExchange as RowExchange
from megalight.parallel.styles.sequence_region import SequenceRegion as SequenceRegion
from megalight.parallel.styles.shared_head import SharedHead as SharedHead
from megalight.parallel.styles.style import STYLES as STYLES
from megalight.parallel.styles.style import Style as Style
from megalight.parallel.styles.style import register as register
from megalight.parallel.styles.vocab import Vocab as Vocab
from megalight.parallel.styles.vocab_head import VocabHead as VocabHead
from megalight.parallel.styles.whole_sequences import WholeSequences as WholeSequences
