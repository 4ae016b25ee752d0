"""Rotary position embedding (RoPE): the rotation of heads or of a packed projection, and its backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalight.errors import ConfigurationError, nearest
from megalight.ops.common import choose_measured, lazy, serve_all, triton_why_not, wide
from megalight.registry import Backend, BackendRegistry


@dataclass(frozen=True)
class RotaryAxes:
    """Divides the rotated pairs over axes, such as time, height and width (https://arxiv.org/abs/2409.12191).

    A token has a position on each axis. Text has the same on all of them, so that its rotation is the usual one.

    Attributes:
        sections: number of pairs of each axis: ``(16, 24, 24)`` in Qwen2.5-VL (``mrope_section``).
        interleaved: the axes take turns, pair by pair, as long as each has pairs left; the pairs behind belong to the
            first axis (Qwen3-VL). False: the first axis has the first pairs, and so on.
        restart: the frequencies of each axis start over, as if its pairs were all (towers of Qwen2.5-VL). False: they
            go on from axis to axis.

    Raises:
        ConfigurationError: an axis has no pair, or axes that take turns do not fit.
    """

    sections: tuple[int, ...] = (16, 24, 24)
    interleaved: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "sections", tuple(self.sections))
        if len(self.sections) < 2 or min(self.sections) < 1:
            raise ConfigurationError(
                f"sections of rotary axes are {list(self.sections)}; give at least two, each at least 1."
            )
        if self.interleaved and max(self.sections[1:]) > self.sections[0]:
            raise ConfigurationError(
                f"sections of interleaved rotary axes are {list(self.sections)}; the first must be the largest, "
                "because each turn begins with its axis."
            )
        if self.interleaved and self.restart:
            raise ConfigurationError(
                "rotary axes are interleaved and restart their frequencies; only axes with neighboring pairs can."
            )
        turns = len(self.sections)
        ends = [(count - 1) * turns + axis for axis, count in enumerate(self.sections) if axis]
        if self.interleaved and max(ends) >= sum(self.sections):
            raise ConfigurationError(
                f"sections of interleaved rotary axes are {list(self.sections)}, which sum to {sum(self.sections)}, "
                f"but an axis would take pair {max(ends)} in its last turn; make the sections less different."
            )

    @property
    def of_pairs(self) -> tuple[int, ...]:
        """The axis of each pair."""
        axes = range(len(self.sections))
        if not self.interleaved:
            return tuple(axis for axis in axes for _ in range(self.sections[axis]))
        pairs = [0] * sum(self.sections)
        for axis in axes[1:]:
            for turn in range(self.sections[axis]):
                pairs[turn * len(axes) + axis] = axis
        return tuple(pairs)


@dataclass(frozen=True)
class RotaryScaling:
    """Scales rotary frequencies for contexts that are longer than in the original training.

    ``linear`` (https://arxiv.org/abs/2306.15595) divides every frequency by ``factor``.

    ``ntk`` multiplies the base by ``factor^(d / (d - 2))``: the fastest pair of features stays, and the slowest is
    divided by ``factor``.

    ``dynamic`` (https://arxiv.org/abs/2309.00071) is ``ntk`` with a factor that grows with sequences longer than the
    model's ``max_sequence_length``. Those are refused here, so it changes nothing and is only kept for exports.

    ``llama3`` (Llama 3.1) divides only frequencies whose wavelength exceeds ``original_length /
    low_frequency_factor``, keeps those whose wavelength is below ``original_length / high_frequency_factor``, and
    interpolates between them.

    ``yarn`` (https://arxiv.org/abs/2309.00071) keeps pairs that turn more than ``beta_fast`` times within
    ``original_length`` tokens, divides those that turn less than ``beta_slow`` times, and interpolates between them,
    linearly in the index of the pair. It also multiplies queries and keys by :attr:`concentration`.

    Attributes:
        kind: see above.
        factor: the factor by which the context becomes longer.
        low_frequency_factor: of ``llama3``.
        high_frequency_factor: of ``llama3``.
        original_length: context length of the original training, in tokens; of ``llama3`` and ``yarn``.
        beta_fast: of ``yarn``.
        beta_slow: of ``yarn``.
        mscale: of ``yarn``: weight of ``ln(factor)`` in the concentration, with ``mscale_all_dim`` (DeepSeek).
        mscale_all_dim: of ``yarn``: its weight in :attr:`score_factor`; the concentration is divided by the same.
        round_range: of ``yarn``: whether the interpolated pairs begin and end at whole indices.

    Raises:
        ConfigurationError: a value is out of range.
    """

    kind: Literal["linear", "ntk", "dynamic", "llama3", "yarn"] = "llama3"
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    round_range: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise ConfigurationError(
                f"rotary scaling kind is {self.kind!r}; choose {known}." + nearest(self.kind, KINDS)
            )
        if not self.factor >= 1:
            raise ConfigurationError(
                f"rotary scaling factor is {self.factor}; it must be at least 1 (1 changes nothing)."
            )
        if self.original_length < 1:
            raise ConfigurationError(f"original_length is {self.original_length}; it must be at least 1 token.")
        # Llama 4 has two equal ones: then no frequency lies between
        if not 0 < self.low_frequency_factor <= self.high_frequency_factor:
            raise ConfigurationError(
                f"low_frequency_factor is {self.low_frequency_factor} and high_frequency_factor is "
                f"{self.high_frequency_factor}; the first must be above 0 and at most the second. Llama 3.1 uses 1 "
                "and 4."
            )
        # Kimi-K2 has two equal ones: then one pair alone lies between
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ConfigurationError(
                f"beta_slow is {self.beta_slow} and beta_fast is {self.beta_fast}; the first must be above 0 and at "
                "most the second. The paper uses 1 and 32."
            )
        for field in fields(self)[2:]:
            if field.name not in USED[self.kind] and getattr(self, field.name) != field.default:
                users = " and ".join(kind for kind, used in USED.items() if field.name in used)
                raise ConfigurationError(
                    f"{field.name} is {getattr(self, field.name)} with rotary scaling kind {self.kind!r}, which does "
                    f"not use it; {users} do. Leave it out, or choose the kind."
                )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name} is {value}; it must be above 0, or null.")

    def frequencies(self, dim: int, base: float, device: torch.device | str = "cpu") -> Tensor:
        """Return the scaled frequencies of ``dim / 2`` pairs, in radians per token, float64."""
        return KINDS[self.kind](self, dim, base, device)

    @property
    def concentration(self) -> float:
        """The factor of cosines and sines; scores get its square. 1 except for ``yarn``."""
        if self.kind != "yarn":
            return 1.0
        if self.mscale is None or self.mscale_all_dim is None:
            return self._magnitude(1.0)
        # DeepSeek puts one part of the factor into the scores, where it reaches features
        # that are not rotated, too.
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """The factor of the scores of attention that rotates a part of each head only (DeepSeek). Mostly 1."""
        if self.kind != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return self._magnitude(self.mscale_all_dim) ** 2

    def correction_range(self, dim: int, base: float) -> tuple[float, float]:
        """Return the indices of the first and the last interpolated pair of ``yarn``."""

        def index(turns: float) -> float:
            """Return the index of the pair that turns so many times within the original context."""
            return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.round_range:
            low, high = math.floor(low), math.ceil(high)
        # The upper limit is dim - 1, although there are dim / 2 pairs: published models were trained with it. Both ends
        # have both limits, because a range that ends before it begins would scale the wrong pairs.
        return min(max(low, 0), dim - 1), min(max(high, 0), dim - 1)

    def _magnitude(self, weight: float) -> float:
        # The formula of the YaRN paper, with its fit of 0.1.
        return 0.1 * weight * math.log(self.factor) + 1.0


def unscaled(dim: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """Return ``base^(-2i/dim)``, ``[dim / 2]`` in float64."""
    # float64: positions up to millions multiply these, and an error of a fraction grows with them.
    return float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def _linear(scaling: RotaryScaling, dim: int, base: float, device: torch.device | str) -> Tensor:
    return unscaled(dim, base, device) / scaling.factor


def _ntk(scaling: RotaryScaling, dim: int, base: float, device: torch.device | str) -> Tensor:
    if dim == 2:
        raise ValueError("rotary scaling ntk needs at least 4 rotated features: it keeps the first of several pairs.")
    # The base grows so that the slowest pair alone is divided by the whole factor.
    return unscaled(dim, base * scaling.factor ** (dim / (dim - 2)), device)


def _dynamic(scaling: RotaryScaling, dim: int, base: float, device: torch.device | str) -> Tensor:
    return unscaled(dim, base, device)


def _llama3(scaling: RotaryScaling, dim: int, base: float, device: torch.device | str) -> Tensor:
    frequencies = unscaled(dim, base, device)
    turns = scaling.original_length * frequencies / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # Linear in the number of turns between both limits, as in Meta's code.
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns > low).to(turns.dtype)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(scaling: RotaryScaling, dim: int, base: float, device: torch.device | str) -> Tensor:
    frequencies = unscaled(dim, base, device)
    low, high = scaling.correction_range(dim, base)
    high += 0.001 if low == high else 0.0  # a step, without a division by 0
    ramp = ((torch.arange(len(frequencies), dtype=torch.float64, device=device) - low) / (high - low)).clamp(0, 1)
    # A weighted mean: pairs before the ramp keep their frequency, those after it are divided.
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


KINDS: dict[str, Callable[[RotaryScaling, int, float, torch.device | str], Tensor]] = {
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Kind -> function that computes the scaled frequencies."""
USED: dict[str, set[str]] = {
    "linear": set(),
    "ntk": set(),
    "dynamic": set(),
    "llama3": {"low_frequency_factor", "high_frequency_factor", "original_length"},
    "yarn": {"original_length", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "round_range"},
}
"""Kind -> the fields that it uses, beside the factor."""


def rotary_table(
    positions: Tensor, dim: int, base: float, scaling: RotaryScaling | None = None, axes: RotaryAxes | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles ``position * base^(-2i/dim)`` (Su et al. 2021).

    Args:
        positions: ``[T]`` integers, or float64 for a float64 table; with ``axes`` also ``[A, T]``, one row per axis.
        dim: number of features that are rotated; even.
        base: theta.
        scaling: scaling of the frequencies. Its concentration multiplies cosines and sines.
        axes: the axis of each pair. None: there is one axis.

    Returns:
        ``cos, sin``, each ``[T, dim/2]`` float32. Angles are computed in float64, because float32 loses the fraction of
        a turn at long contexts.

    Raises:
        ValueError: ``dim`` is odd, or too small for the scaling; axes do not agree with ``dim``, the positions or the
            scaling.
    """
    if dim % 2:
        raise ValueError(f"rotary dim is {dim}; it must be even, because features are rotated in pairs.")
    device = positions.device
    frequencies = unscaled(dim, base, device) if scaling is None else scaling.frequencies(dim, base, device)
    if axes is not None and sum(axes.sections) != dim // 2:
        raise ValueError(
            f"sections of rotary axes are {list(axes.sections)}, which sum to {sum(axes.sections)}; {dim} rotated "
            f"features have {dim // 2} pairs."
        )
    if axes is not None and axes.restart:
        if scaling is not None:
            raise ValueError("rotary axes that restart their frequencies have no scaling; leave it out.")
        frequencies = torch.cat([unscaled(2 * pairs, base, device) for pairs in axes.sections])
    places = positions.to(torch.float64)
    angles = (places[:, None] if places.dim() == 1 else _of_pairs(places, axes)) * frequencies
    dtype = torch.float64 if torch.float64 in (positions.dtype, torch.get_default_dtype()) else torch.float32
    # a factor of both is a factor of the rotated features, in forward and backward of every backend
    factor = 1.0 if scaling is None else scaling.concentration
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _of_pairs(places: Tensor, axes: RotaryAxes | None) -> Tensor:
    """``[A, T] -> [T, dim/2]``: the position that turns each pair."""
    if axes is None or len(axes.sections) != len(places):
        expected = "one axis" if axes is None else f"{len(axes.sections)} axes"
        raise ValueError(f"positions have {len(places)} rows, one per axis, but the rotary embedding has {expected}.")
    # Rows, stacked on the device: an index tensor would be copied from the host for each micro-batch.
    return torch.stack([places[axis] for axis in axes.of_pairs], dim=-1)


def reference_apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` features of ``x [T, H, D]``. Half types are computed in float32."""
    half = cos.shape[-1]
    dtype = wide(x.dtype)
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    # The two members of each pair: neighbors, or features half the rotated width apart.
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else torch.split(rotated, half, -1)
    # `[T, 1, r/2]`: all heads of a token turn by the same angles.
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def reference_rotate_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and rotate its queries and keys."""
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    return reference_apply_rotary(q, cos, sin, interleaved), reference_apply_rotary(k, cos, sin, interleaved), v


class RotarySpec(NamedTuple):
    """A request to a rotation: device type, dtype of the heads, dtype of the table."""

    device: str
    dtype: torch.dtype
    table_dtype: torch.dtype


APPLY_ROTARY: BackendRegistry[RotarySpec, Callable[..., Tensor]] = BackendRegistry("apply_rotary")
ROTATE_QKV: BackendRegistry[RotarySpec, Callable[..., tuple[Tensor, Tensor, Tensor]]] = BackendRegistry("rotate_qkv")
REGISTRIES: tuple[BackendRegistry[RotarySpec, Any], ...] = (APPLY_ROTARY, ROTATE_QKV)
EXAMPLE = RotarySpec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: RotarySpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.table_dtype)


_TRITON = "megalight.ops.rotary.triton"
APPLY_ROTARY.register(Backend("triton", lazy(_TRITON, "apply_rotary"), 20, _triton_why_not))
APPLY_ROTARY.register(Backend("reference", reference_apply_rotary, 0, serve_all))
# Measuring saves a pass: the cast to 8 bits needs the largest magnitude of the gradient.
ROTATE_QKV.register(Backend("triton", lazy(_TRITON, "rotate_qkv", measures=True), 20, _triton_why_not))
ROTATE_QKV.register(Backend("reference", reference_rotate_qkv, 0, serve_all))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backend: str = "auto") -> Tensor:
    """Rotate the first ``r = 2 * cos.shape[-1]`` features of every head.

    Args:
        x: ``[T, H, D]``.
        cos: ``[T, r/2]``, from :func:`rotary_table`.
        sin: ``[T, r/2]``.
        interleaved: whether pairs are neighbors ``(2i, 2i+1)`` (GPT-J) instead of ``(i, i + r/2)`` (Llama, NeoX).
        backend: name of a backend.
    """
    out: Tensor = choose_measured(APPLY_ROTARY, RotarySpec(x.device.type, x.dtype, cos.dtype), backend)(
        x, cos, sin, interleaved
    )
    return out


def rotate_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and rotate its queries and keys in one pass.

    Args:
        qkv: ``[T, (Hq + 2 Hkv) * D]``: all query heads, then key heads, then value heads.
        num_heads: ``Hq``.
        num_kv_heads: ``Hkv``.
        head_dim: ``D``.
        cos: ``[T, r/2]``.
        sin: ``[T, r/2]``.
        interleaved: as in :func:`apply_rotary`.
        backend: name of a backend. A :func:`~megalight.ops.common.measuring` one also finds the largest magnitude of
            the gradient of ``qkv``.

    Returns:
        ``q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]``.
    """
    fn = choose_measured(ROTATE_QKV, RotarySpec(qkv.device.type, qkv.dtype, cos.dtype), backend)
    out: tuple[Tensor, Tensor, Tensor] = fn(qkv, num_heads, num_kv_heads, head_dim, cos, sin, interleaved)
    return out
