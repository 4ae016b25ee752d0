"""Modules written for one device."""

from megalight.nn.attention import Attention as Attention
from megalight.nn.attention import InnerAttention as InnerAttention
from megalight.nn.canonical import Section as Section
from megalight.nn.context import LayerContext as LayerContext
from megalight.nn.embedding import Embedding as Embedding
from megalight.nn.embedding import TokenEmbedding as TokenEmbedding
from megalight.nn.head import LMHead as LMHead
from megalight.nn.layer import TransformerLayer as TransformerLayer
from megalight.nn.linear import Linear as Linear
from megalight.nn.masked_lm import MaskedLMHead as MaskedLMHead
from megalight.nn.mlp import MLP as MLP
from megalight.nn.mlp import Activation as Activation
from megalight.nn.norm import LayerNorm as LayerNorm
from megalight.nn.norm import RMSNorm as RMSNorm
from megalight.nn.pooler import Pooler as Pooler
from megalight.nn.pooler import SequenceHead as SequenceHead
from megalight.nn.post_norm import PostNormLayer as PostNormLayer
from megalight.nn.rotary import Rotary as Rotary
from megalight.nn.rotary import RotaryTable as RotaryTable
from megalight.nn.short_conv import CausalConv as CausalConv
from megalight.nn.short_conv import ShortConv as ShortConv
from megalight.nn.stack import run_layers as run_layers
from megalight.nn.state import KeysAndValues as KeysAndValues
from megalight.nn.state import SequenceRows as SequenceRows
from megalight.nn.state import Slots as Slots
from megalight.nn.state import TokenRows as TokenRows
