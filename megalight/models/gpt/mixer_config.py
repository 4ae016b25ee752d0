"""Options of the mixers of a GPT: attention, latent attention, positions, Gated DeltaNet and Mamba-2."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Literal

from megalight.models.config import require, require_choice
from megalight.ops.rotary import RotaryAxes, RotaryScaling

# Attention


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


# Positions


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """How the model encodes positions.

    Attributes:
        kind: ``rope`` (rotary), ``learned`` (an embedding per position) or ``none``.
        base: the slowest rotary pair has a wavelength of about ``2 pi base`` tokens.
        scaling: how rotary frequencies are scaled for contexts longer than in the first training.
        fraction: fraction of a head's features that are rotated.
        interleaved: whether the features of a rotary pair are neighbors instead of half a head apart.
        pattern: which layers rotate, repeated over the depth: ``[true, true, true, false]`` means that every fourth
            layer has no positions (https://arxiv.org/abs/2501.18795).
        local_base: base of layers with a window or chunks, whose frequencies are not scaled (Gemma-3). None: as of
            the others.
        axes: which rotary pair turns with the position on which axis: time, height or width of images (Qwen-VL). Text
            has the same position on all. None: there is one axis.
    """

    kind: Literal["rope", "learned", "none"] = "rope"
    base: float = 10000.0
    scaling: RotaryScaling | None = None
    fraction: float = 1.0
    interleaved: bool = False
    pattern: tuple[bool, ...] = (True,)
    local_base: float | None = None
    axes: RotaryAxes | None = None

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "pattern", tuple(self.pattern))
        require(
            any(self.pattern),
            f"position.pattern is {list(self.pattern)}; at least one entry must be true. For no rotation at all, set "
            "position.kind=none.",
        )
        require(
            self.kind == "rope" or all(self.pattern),
            f"position.pattern is {list(self.pattern)} with position.kind={self.kind}; it chooses layers that rotate. "
            "Set position.kind=rope, or leave the pattern out.",
        )
        require_choice("position.kind", self.kind, ("rope", "learned", "none"))
        require(self.base > 1, f"position.base is {self.base}; it must be above 1.")
        self._check_unrotated()
        require(
            self.local_base is None or (self.local_base > 1 and self.kind == "rope"),
            f"position.local_base is {self.local_base} with position.kind={self.kind}; it must be above 1, with rope.",
        )
        require(
            self.axes is None or self.kind == "rope",
            f"position.axes is set with position.kind={self.kind}; only rope has axes. Leave it out.",
        )
        require(0 < self.fraction <= 1, f"position.fraction is {self.fraction}; it must be above 0 and at most 1.")

    def _check_unrotated(self) -> None:
        """Refuse settings of a rotation without one."""
        default = {"base": 10000.0, "scaling": None, "fraction": 1.0, "interleaved": False}
        stated = [f"position.{name}" for name, value in default.items() if getattr(self, name) != value]
        require(
            self.kind == "rope" or not stated,
            f"{', '.join(stated)} with position.kind={self.kind}; only rope rotates. Set position.kind=rope, or leave "
            "it out.",
        )

    def rotates(self, layer: int) -> bool:
        """Return whether the layer with this index rotates queries and keys."""
        return self.kind == "rope" and self.pattern[layer % len(self.pattern)]


# Gated DeltaNet


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Sizes of Gated DeltaNet (https://arxiv.org/abs/2412.06464).

    Attributes:
        num_heads: value heads, ``H``.
        num_key_heads: heads of queries and keys, ``G``; ``H / G`` value heads share each. 0: ``num_heads``.
        head_dim: features of a value head, ``V``.
        key_dim: features of a query and key head, ``K``; a head's state is a matrix ``[K, V]``.
        conv_kernel: number of tokens that the convolution sees.
        step_range: range of the initial step sizes, by which states decay.
        step_floor: least initial step size.
    """

    num_heads: int
    num_key_heads: int = 0
    head_dim: int = 128
    key_dim: int = 128
    conv_kernel: int = 4
    step_range: tuple[float, float] = (1e-3, 0.1)
    step_floor: float = 1e-4

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "step_range", tuple(self.step_range))
        object.__setattr__(self, "num_key_heads", self.num_key_heads or self.num_heads)
        for name in ("num_heads", "num_key_heads", "head_dim", "key_dim"):
            require(getattr(self, name) >= 1, f"delta.{name} is {getattr(self, name)}; it must be at least 1.")
        require(
            self.num_heads % self.num_key_heads == 0,
            f"delta.num_heads {self.num_heads} is not a multiple of delta.num_key_heads {self.num_key_heads}; each key "
            "head serves the same number of value heads, so choose a divisor.",
        )
        require(self.conv_kernel >= 2, f"delta.conv_kernel is {self.conv_kernel}; it must be at least 2.")
        require(
            len(self.step_range) == 2 and 0 < self.step_range[0] <= self.step_range[1] and self.step_floor > 0,
            f"delta.step_range is {list(self.step_range)} and delta.step_floor {self.step_floor}; give two numbers in "
            "order, and all must be above 0.",
        )

    @property
    def inner_size(self) -> int:
        """Features of all value heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: values, queries and keys."""
        return self.inner_size + 2 * self.num_key_heads * self.key_dim


# Mamba-2


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of Mamba-2 (https://arxiv.org/abs/2405.21060).

    Attributes:
        num_heads: number of heads, ``H``.
        head_dim: features of a head, ``P``.
        state_size: ``N``; a head's state is a matrix ``[P, N]``.
        num_groups: ``G``; ``H / G`` heads share the projections to and from the state.
        conv_kernel: number of tokens that the convolution sees.
        conv_bias: whether the convolution has a bias.
        norm_groups: groups of features that the norm after the scan treats on their own. 0: ``num_groups``.
        norm_eps: eps of that norm. None: that of the model's other norms.
        step_range: range of the initial step sizes.
        step_floor: least initial step size.
    """

    num_heads: int
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 8
    conv_kernel: int = 4
    conv_bias: bool = True
    norm_groups: int = 0
    norm_eps: float | None = None
    step_range: tuple[float, float] = (1e-3, 0.1)
    step_floor: float = 1e-4

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "step_range", tuple(self.step_range))
        object.__setattr__(self, "norm_groups", self.norm_groups or self.num_groups)
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "norm_groups"):
            require(getattr(self, name) >= 1, f"mamba.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("num_groups", "norm_groups"):
            count = getattr(self, name)
            # A group's projections serve whole heads: a rest would have none.
            require(
                self.num_heads % count == 0,
                f"mamba.num_heads {self.num_heads} is not a multiple of mamba.{name} {count}; each group serves the "
                "same number of heads, so choose a divisor.",
            )
        require(self.norm_eps is None or self.norm_eps > 0, f"mamba.norm_eps is {self.norm_eps}; it must be above 0.")
        require(self.conv_kernel >= 2, f"mamba.conv_kernel is {self.conv_kernel}; it must be at least 2.")
        require(
            len(self.step_range) == 2 and 0 < self.step_range[0] <= self.step_range[1] and self.step_floor > 0,
            f"mamba.step_range is {list(self.step_range)} and mamba.step_floor {self.step_floor}; give two numbers in "
            "order, and all must be above 0.",
        )

    @property
    def inner_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        # The convolution runs over the heads' input and over both projections of the state.
        return self.inner_size + 2 * self.num_groups * self.state_size
