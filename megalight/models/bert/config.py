"""The configuration of a BERT: sizes and options, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalight.models.config import InitConfig, ModelConfig, check_heads, require
from megalight.nn.mlp import is_gated


@dataclass(frozen=True, kw_only=True)
class BertBackendConfig:
    """The backend of each op. ``auto`` takes the best available one (``megalight doctor --all`` lists them).

    Attributes:
        attention, norm, activation, cross_entropy: a backend's name.
    """

    attention: str = "auto"
    norm: str = "auto"
    activation: str = "auto"
    cross_entropy: str = "auto"


def _flat_init() -> InitConfig:
    # BERT draws all weights alike: norms after each addition keep the stream's variance.
    return InitConfig(scale_residual=False)


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """A bidirectional encoder with post-norm layers (https://arxiv.org/abs/1810.04805).

    Attributes:
        max_sequence_length: length of the longest sequence in tokens, as positions are learned.
        num_token_types: number of token types (segments).
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS` without a gate.
        norm_eps: added to the variance in norms.
        sentence_order: whether the model also predicts the order of the two segments, from the first token.
        tie_embeddings: whether the masked-LM head and the word embedding share one weight.
        head: ``pretraining``: masked tokens, and the order of segments. ``pooler``: a row for each sequence, from its
            first token. ``none``: hidden states alone. The last two are encoders that others train on.

    Raises:
        ConfigurationError: sizes do not divide, or a value is out of range.
    """

    max_sequence_length: int = 512
    num_token_types: int = 2
    activation: str = "gelu"
    # The eps of the first published models, which their weights need.
    norm_eps: float = 1e-12
    sentence_order: bool = True
    tie_embeddings: bool = True
    head: Literal["pretraining", "pooler", "none"] = "pretraining"
    init: InitConfig = field(default_factory=_flat_init)
    backends: BertBackendConfig = field(default_factory=BertBackendConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("num_token_types")
        check_heads(self.hidden_size, self.num_heads)
        require(
            self.head in ("pretraining", "pooler", "none"),
            f"head is {self.head!r}; it must be pretraining, pooler or none.",
        )
        require(
            self.head == "pretraining" or not self.sentence_order,
            f"sentence_order=True needs head='pretraining', and head is {self.head!r}; set sentence_order=False.",
        )
        require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; it must be above 0.")
        require(
            # The published models have plain activations, and their weights have no gate.
            not is_gated(self.activation),
            f"activation is {self.activation!r}, which is gated; BERT needs one that is not, such as gelu.",
        )

    @property
    def head_dim(self) -> int:
        """Number of features per head."""
        return self.hidden_size // self.num_heads


# Parameters and FLOPs


MASKED = 0.15
"""Fraction of the tokens that the masked-LM head processes."""


def _layer_matmul_parameters(config: BertConfig) -> int:
    """Return the number of weights in the projections of one layer."""
    return config.hidden_size * (4 * config.hidden_size + 2 * config.ffn_hidden_size)


def num_parameters(config: BertConfig) -> int:
    """Return the number of all parameters. A tied weight counts once."""
    h, norm = config.hidden_size, 2 * config.hidden_size
    rows = config.vocab_size + config.max_sequence_length + config.num_token_types
    # Biases of attention and MLP are the term in brackets.
    layer = _layer_matmul_parameters(config) + (4 * h + config.ffn_hidden_size + h) + 2 * norm
    dense = (h + 1) * h
    if config.head != "pretraining":
        return rows * h + norm + config.num_layers * layer + (dense if config.head == "pooler" else 0)
    head = dense + norm + config.vocab_size * (1 if config.tie_embeddings else h + 1)
    order = dense + 2 * (h + 1) if config.sentence_order else 0
    return rows * h + norm + config.num_layers * layer + head + order


def flops_per_token(config: BertConfig, sequence_length: int) -> float:
    """Return floating-point operations of forward and backward per token, in sequences of ``sequence_length`` tokens.

    Each weight of the projections counts six operations. Weights of the masked-LM head count six for each masked token.
    Attention counts twelve for each query feature and key, as every token sees its whole sequence. Not counted:
    embeddings (look-ups), the head that reads only first tokens, and recomputation.
    """
    h = config.hidden_size
    # Only masked tokens pass the head. They are chosen before it.
    head = MASKED * (h * h + config.vocab_size * h) if config.head == "pretraining" else 0.0
    matmul = config.num_layers * _layer_matmul_parameters(config) + head
    return 6.0 * matmul + 12.0 * config.num_layers * h * sequence_length
