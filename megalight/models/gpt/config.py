"""What a GPT is: sizes and choices, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalight.models.config import DropoutConfig as DropoutConfig
from megalight.models.config import InitConfig as InitConfig
from megalight.models.config import ModelConfig, require, require_choice
from megalight.nn.mlp import is_gated
from megalight.ops.rotary import RotaryScaling

MIXERS = ("attention", "conv")
"""How a layer may mix tokens."""


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norms before attention, before the MLP, and before the head.

    Attributes:
        kind: ``rms`` or ``layer`` (with bias).
        eps: added to the mean square.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require_choice("norm.kind", self.kind, ("rms", "layer"))
        require(self.eps > 0, f"norm.eps is {self.eps}; it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """How the model knows where a token is.

    Attributes:
        kind: ``rope`` (rotary), ``learned`` (an embedding per position) or ``none``.
        base: the slowest rotary pair turns once in about ``2 pi base`` tokens.
        scaling: how rotary frequencies are stretched for contexts longer than those first trained on.
        fraction: of a head's features that turn.
        interleaved: rotary pairs are neighbours instead of half a head apart.
    """

    kind: Literal["rope", "learned", "none"] = "rope"
    base: float = 10000.0
    scaling: RotaryScaling | None = None
    fraction: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        require_choice("position.kind", self.kind, ("rope", "learned", "none"))
        require(self.base > 1, f"position.base is {self.base}; it must be above 1.")
        require(0 < self.fraction <= 1, f"position.fraction is {self.fraction}; it must be above 0 and at most 1.")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What attention does beside the plain form.

    Attributes:
        qkv_bias: biases in the projection to queries, keys and values.
        proj_bias: a bias in the projection back.
        qk_norm: normalise each query and key head's features.
        scale: of the scores; None is ``1 / sqrt(head_dim)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        window: in windowed layers, how many tokens before itself a token may see; None: no layer is windowed.
        window_pattern: which layers are windowed, repeated over the depth: ``[true, false]`` is every other one.
    """

    qkv_bias: bool = False
    proj_bias: bool = False
    qk_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_pattern", tuple(self.window_pattern))
        require(self.scale is None or self.scale > 0, f"attention.scale is {self.scale}; it must be above 0, or null.")
        require(
            self.softcap is None or self.softcap > 0,
            f"attention.softcap is {self.softcap}; it must be above 0, or null.",
        )
        require(
            self.window is None or self.window >= 0,
            f"attention.window is {self.window}; it must be at least 0, or null.",
        )
        require(
            bool(self.window_pattern), "attention.window_pattern is empty; give one entry per layer of the pattern."
        )

    def window_of(self, layer: int) -> int | None:
        """The window of a layer by its index, or None."""
        return self.window if self.window_pattern[layer % len(self.window_pattern)] else None


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Which implementation each op uses; ``auto`` takes the best that can serve (``megalight doctor`` lists them)."""

    attention: str = "auto"
    norm: str = "auto"
    rotary: str = "auto"
    activation: str = "auto"
    cross_entropy: str = "auto"


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A decoder-only language model.

    Attributes:
        num_kv_heads: key-value heads; 0: as many as query heads.
        head_dim: features per head; 0: ``hidden_size / num_heads``.
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS`.
        mlp_bias: biases in the MLP.
        tie_embeddings: the head's weight is the word embedding's.
        embedding_multiplier: scales the word embedding.
        mixer_pattern: how layers mix tokens, repeated over the depth: ``attention``, or ``conv`` (a gated short
            convolution). ``[conv, conv, attention]`` is two of one kind and then one of the other.
        conv_kernel: tokens that a convolution sees.
        logit_softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them.

    Raises:
        ConfigurationError: sizes that do not divide, values out of range.
    """

    num_kv_heads: int = 0
    head_dim: int = 0
    activation: str = "swiglu"
    mlp_bias: bool = False
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logit_softcap: float | None = None
    mixer_pattern: tuple[str, ...] = ("attention",)
    conv_kernel: int = 3
    norm: NormConfig = field(default_factory=NormConfig)
    position: PositionConfig = field(default_factory=PositionConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    backends: BackendConfig = field(default_factory=BackendConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_dim:
            require(
                self.hidden_size % self.num_heads == 0,
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                "change one of them, or give head_dim.",
            )
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)
        self._require_positive("num_kv_heads", "head_dim")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; each key-value head "
            "serves equally many query heads, so choose a divisor.",
        )
        require(
            self.position.kind != "rope" or self.rotary_dim >= 2,
            f"position.fraction {self.position.fraction} of head_dim {self.head_dim} is less than two features; "
            "raise either, or choose position.kind none.",
        )
        require(
            self.logit_softcap is None or self.logit_softcap > 0,
            f"logit_softcap is {self.logit_softcap}; it must be above 0, or null.",
        )
        is_gated(self.activation)
        object.__setattr__(self, "mixer_pattern", tuple(self.mixer_pattern))
        require(bool(self.mixer_pattern), "mixer_pattern is empty; give one entry per layer of the pattern.")
        for mixer in self.mixer_pattern:
            require_choice("an entry of mixer_pattern", mixer, MIXERS)
        require(self.conv_kernel >= 2, f"conv_kernel is {self.conv_kernel}; it must be at least 2.")

    def mixer_of(self, layer: int) -> str:
        """How a layer mixes tokens, by its index."""
        return self.mixer_pattern[layer % len(self.mixer_pattern)]

    @property
    def rotary_dim(self) -> int:
        """Features of a head that turn: an even number."""
        return int(self.head_dim * self.position.fraction) // 2 * 2
