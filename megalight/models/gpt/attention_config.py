"""Options of the attention of a GPT, and sizes of latent attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Literal

from megalight.models.config import require, require_choice


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """Queries of layers without rotation grow with their position ``t`` (Llama 4).

    The factor is ``1 + scale ln(1 + floor((t + 1) / length))``.

    Attributes:
        length: see above, in tokens.
        scale: see above.
    """

    length: int = 8192
    scale: float = 0.1

    def __post_init__(self) -> None:
        require(self.length >= 1, f"attention.temperature.length is {self.length}; it must be at least 1.")
        require(self.scale > 0, f"attention.temperature.scale is {self.scale}; it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Options of attention.

    Attributes:
        qkv_bias: whether the projection to queries, keys and values has biases.
        proj_bias: whether the projection back has a bias.
        qk_norm: whether to normalize the features of each query and key head.
        qk_norm_whole: normalize the features of all query heads together, and those of all key heads (OLMoE).
        qk_l2_norm: normalize the features of each query and key head without weights, in layers that rotate (Llama 4).
        scale: factor of the scores. None means ``1 / sqrt(head_dim)``.
        softcap: if set, scores become ``softcap * tanh(scores / softcap)``.
        window: how many earlier tokens a token sees in layers with a window. None: no layer has a window.
        chunk: in place of a window: a token sees only earlier tokens of its own chunk of so many (Llama 4).
        window_pattern: which layers have a window, or chunks, repeated over the depth: ``[true, false]`` means every
            other layer. A number ``n`` means all but each ``n``-th.
        softmax: ``vanilla``; ``off-by-one`` (the denominator has one more term, 1); ``learnable`` (each head has a
            learned one, a sink, as in GPT-OSS).
        output_gate: multiply the output of attention, before the projection back, by the sigmoid of one more projection
            of the input.
        temperature: scales queries of layers without rotation by their position. None: it does not.
    """

    qkv_bias: bool = False
    proj_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_l2_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    window_pattern: tuple[bool, ...] | int = (True,)
    softmax: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    output_gate: bool = False
    temperature: TemperatureConfig | None = None

    def __post_init__(self) -> None:
        every = self.window_pattern
        if isinstance(every, int):
            require(every >= 1, f"attention.window_pattern is {every}; it must be at least 1, or a list.")
            # The last one of each `n` layers sees all tokens.
            object.__setattr__(self, "window_pattern", (True,) * (every - 1) + (False,))
        require_choice("attention.softmax", self.softmax, ("vanilla", "off-by-one", "learnable"))
        # From a number or a list to a tuple: configurations must be hashable.
        object.__setattr__(self, "window_pattern", tuple(self.windowed))
        require(
            self.qk_norm or not self.qk_norm_whole,
            "attention.qk_norm_whole=true without attention.qk_norm; set both, or neither.",
        )
        require(self.scale is None or self.scale > 0, f"attention.scale is {self.scale}; it must be above 0, or null.")
        require(
            self.softcap is None or 0 < self.softcap < inf,
            f"attention.softcap is {self.softcap}; it must be above 0 and finite, or null.",
        )
        require(
            self.window is None or (isinstance(self.window, int) and self.window >= 0),
            f"attention.window is {self.window}; it must be a whole number, at least 0, or null.",
        )
        require(bool(self.windowed), "attention.window_pattern is empty; give one entry per layer of the pattern.")
        require(
            self.chunk is None or (isinstance(self.chunk, int) and self.chunk >= 1),
            f"attention.chunk is {self.chunk}; it must be a whole number, at least 1, or null.",
        )
        require(
            self.window is None or self.chunk is None,
            f"attention.window is {self.window} and attention.chunk is {self.chunk}; a layer has one of them. Leave "
            "out the other.",
        )
        require(
            all(self.windowed) or self.window is not None or self.chunk is not None,
            f"attention.window_pattern is {list(self.windowed)} without a window; set attention.window or "
            "attention.chunk, or leave the pattern out.",
        )
        require(
            not (self.qk_norm and self.qk_l2_norm),
            "attention.qk_norm and attention.qk_l2_norm are two norms of the same heads; set one of them.",
        )

    def window_of(self, layer: int) -> int | None:
        """Return the window of the layer with this index, or None."""
        # By the global index, which does not depend on how layers are divided.
        return self.window if self.windowed[layer % len(self.windowed)] else None

    def chunk_of(self, layer: int) -> int | None:
        """Return the size of the chunks of the layer with this index, or None."""
        return self.chunk if self.windowed[layer % len(self.windowed)] else None

    def is_local(self, layer: int) -> bool:
        """Return whether the layer with this index has a window or chunks."""
        return self.window_of(layer) is not None or self.chunk_of(layer) is not None

    @property
    def windowed(self) -> tuple[bool, ...]:
        """The pattern as entries, also where it was a number."""
        assert not isinstance(self.window_pattern, int)
        return self.window_pattern


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention (MLA, https://arxiv.org/abs/2405.04434), in features.

    Attributes:
        kv_rank: the latent of keys and values.
        q_rank: the latent of queries. None: queries have none.
        head_dim: part of a query and key head that is not rotated.
        rotary_dim: part that is rotated; all key heads have the same.
        value_dim: a value head.
        norm_eps: eps of the norms of the latents.
    """

    kv_rank: int
    q_rank: int | None = None
    head_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(value is None or value > 0, f"latent.{name} is {value}; it must be above 0.")
        require(
            self.rotary_dim % 2 == 0,
            f"latent.rotary_dim is {self.rotary_dim}; it must be even, for pairs.",
        )
