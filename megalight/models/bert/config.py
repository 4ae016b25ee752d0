"""What a BERT is: sizes and choices, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalight.models.config import DropoutConfig as DropoutConfig
from megalight.models.config import InitConfig as InitConfig
from megalight.models.config import from_plain, require, to_plain
from megalight.nn.mlp import is_gated


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Which implementation each op uses; ``auto`` takes the best that can serve (``megalight doctor`` lists them)."""

    attention: str = "auto"
    norm: str = "auto"
    activation: str = "auto"
    cross_entropy: str = "auto"


def _flat_init() -> InitConfig:
    return InitConfig(scale_residual=False)


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """A bidirectional encoder with post-norm layers (https://arxiv.org/abs/1810.04805).

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream, ``h``.
        num_heads: attention heads.
        vocab_size: token ids, ``V``.
        max_sequence_length: the longest sequence it takes, in tokens: positions are learned.
        ffn_hidden_size: width inside the MLP; 0: ``4 hidden_size``.
        num_token_types: segments that a token may be of.
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS` without a gate.
        norm_eps: added to the variance.
        sentence_order: whether the model also judges the order of the two segments, from its first token.
        tie_embeddings: the masked-LM head's weight is the word embedding's.

    Raises:
        ConfigurationError: sizes that do not divide, values out of range.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_sequence_length: int = 512
    ffn_hidden_size: int = 0
    num_token_types: int = 2
    activation: str = "gelu"
    norm_eps: float = 1e-12
    sentence_order: bool = True
    tie_embeddings: bool = True
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    init: InitConfig = field(default_factory=_flat_init)
    backends: BackendConfig = field(default_factory=BackendConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_sequence_length", "ffn_hidden_size")
        for name in (*sizes, "num_token_types"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(
            self.hidden_size % self.num_heads == 0,
            f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one of them.",
        )
        require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; it must be above 0.")
        require(
            not is_gated(self.activation),
            f"activation is {self.activation!r}, which gates; BERT takes a plain one, such as gelu.",
        )

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.hidden_size // self.num_heads

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return self.init.residual_std(self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, fit for JSON and YAML."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BertConfig:
        """The configuration that :meth:`to_dict` described.

        Raises:
            ConfigurationError: an unknown key (the nearest known one is named), a missing one, or a bad value.
        """
        config: BertConfig = from_plain(cls, values)
        return config
