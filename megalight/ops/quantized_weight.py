"""Frozen weights stored quantized: QLoRA (https://arxiv.org/abs/2305.14314), and generation.

A weight ``[out, in]`` is cut into blocks of features along each row. Each block has one scale, and each element a code:

- ``int8``: ``w = scale * data``, data from -127 to 127, the scale is the block's largest magnitude / 127;
- ``nf4``: ``w = scale * LEVELS[data]``, two values in a byte, the scale is the block's largest magnitude. The
  levels are quantiles of a normal distribution, as in the paper;
- ``fp8``: ``w = scale * data``, data in e4m3, float32 scales: the block's largest magnitude / 448, or those that come
  with published weights. A block may be the whole row;
- ``nvfp4``: ``w = second * scale * E2M1[data]``, two values in a byte, blocks of 16. Scales are FP8 (E4M3),
  and ``second`` is one float32 for the weight, so that the largest scale is 448. Values are those of ModelOpt's
  ``NVFP4QTensor``.

Other scales have the weight's own dtype, and quantized values are chosen for the rounded scale. Products read the
decoded weight, which exists for one product at a time; few tokens of inference read ``fp8`` itself
(:mod:`megalight.ops.linear.weight_only`, :mod:`megalight.ops.grouped_linear.few_rows`). Gradients go through it to the
input, and the weight has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.errors import ConfigurationError, MegalightError
from megalight.ops.common import fp8_why_not, serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.parameter import ParameterState, state_of
from megalight.ops.quantize.formats import LARGEST, to_fp8
from megalight.registry import Backend, BackendRegistry, choose

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels of ``nf4`` (appendix E of the paper)."""


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of ``nvfp4``: floating-point numbers of four bits, of which the highest is the sign."""


def reference_decode(data: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """See :func:`megalight.ops.quantized_weight.decode`."""
    if form == "int8":
        # One pass over memory: the product reads quantized values and writes weights.
        found = torch.mul(data, scales[..., None])
    elif form == "fp8":
        found = data.to(scales.dtype) * scales[..., None]
    else:
        # A byte is looked up once, for both of its quantized values.
        found = _pairs(form, scales.dtype, data.device)[data.int()].flatten(-2).mul_(scales[..., None])
    return found.flatten(1).to(dtype)


@lru_cache
def levels_of(dtype: torch.dtype, device: torch.device, form: str = "nf4") -> Tensor:
    """Return the level of each of the 16 quantized values."""
    levels = LEVELS if form == "nf4" else (*E2M1, *(-level for level in E2M1))
    return torch.tensor(levels, dtype=dtype, device=device)


@lru_cache
def _pairs(form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two levels of each byte, ``[256, 2]``; the high half comes first."""
    byte = torch.arange(256, device=device)
    return levels_of(dtype, device, form)[torch.stack([byte >> 4, byte & 15], -1)]


BLOCK = 4096
"""Elements that a program decodes."""


@jit
def _decode(
    data: Value, scales: Value, levels: Value, out: Value, size: Value,
    FEATURES: constexpr, HALVES: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < size
    scale = tl.load(scales + place // FEATURES, mask=here, other=0.0).to(tl.float32)
    if HALVES:
        byte = tl.load(data + place // 2, mask=here, other=0).to(tl.int32)
        # The high half of a byte comes first.
        code = (byte >> (4 * (1 - place % 2)).to(tl.int32)) & 15
        value = tl.load(levels + code).to(tl.float32)
    else:
        value = tl.load(data + place, mask=here, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale).to(out.dtype.element_ty), mask=here)


def triton_decode(data: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """See :func:`megalight.ops.quantized_weight.decode`."""
    halves = form not in WHOLE_BYTES
    features = data.shape[2] * (2 if halves else 1)
    out = torch.empty(data.shape[0], data.shape[1] * features, dtype=dtype, device=data.device)
    _decode[(cdiv(out.numel(), BLOCK),)](
        data, scales, levels_of(scales.dtype, data.device, form if halves else "nf4"), out, out.numel(),
        FEATURES=features, HALVES=halves, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


FORMATS = ("int8", "nf4", "fp8", "nvfp4")
WHOLE_BYTES = ("int8", "fp8")
"""Formats with a byte for each value."""
NVFP4_BLOCK = 16
NVFP4_SCALES = 2.0**-9, 448.0
"""Smallest and largest scale of a block in FP8."""


class DequantizeSpec(NamedTuple):
    """A request to decode: device type, dtype of the scales, and whether values are of e4m3."""

    device: str
    dtype: torch.dtype
    fp8: bool = False


Decode: TypeAlias = Callable[[Tensor, Tensor, str, torch.dtype], Tensor]
DECODE: BackendRegistry[DequantizeSpec, Decode] = BackendRegistry("decode")
REGISTRIES = (DECODE,)
EXAMPLE = DequantizeSpec("cpu", torch.bfloat16)


def _triton_why_not(spec: DequantizeSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype) or (fp8_why_not(spec.device) if spec.fp8 else None)


DECODE.register(Backend("triton", triton_decode, 20, _triton_why_not))
DECODE.register(Backend("reference", reference_decode, 0, serve_all))


def decode(data: Tensor, scales: Tensor, form: str, dtype: torch.dtype | None = None, backend: str = "auto") -> Tensor:
    """Return the weight ``[out, in]`` of quantized values.

    Args:
        data: ``[out, in / block, block]`` int8 or e4m3; ``[out, in / block, block / 2]`` uint8 for formats of 4 bits.
        scales: ``[out, in / block]``.
        form: one of the formats.
        dtype: of the weight; None: that of the scales.
        backend: name of a backend.
    """
    spec = DequantizeSpec(data.device.type, scales.dtype, form == "fp8")
    return choose(DECODE, spec, backend)(data, scales, form, dtype or scales.dtype)


class QuantizedWeight:
    """A frozen weight quantized.

    Args:
        weight: ``[out, in]``, or a stack of them ``[E, out, in]``; floating point, not NaN.
        form: one of the formats.
        block: number of features with one scale; it divides ``in``.
        largest: for ``nvfp4``: the largest magnitude, 0-dim, or ``[E]`` for a stack, if ranks hold parts of the
            weight; None: that of ``weight``.
        scales: for ``fp8``: ``[out, in / block]``, of a stack ``[E out, in / block]``, those of weights that were
            published so; what they multiply comes back unchanged, also from weights that were rounded to bfloat16.
            None: by the largest magnitudes.

    Attributes:
        away: they have no memory now: other units use it, and this rank keeps a shard of them.

    Raises:
        ConfigurationError: the block does not divide the features, or the format is unknown.
    """

    def __init__(
        self, weight: Tensor, form: str, block: int, largest: Tensor | None = None, scales: Tensor | None = None
    ) -> None:
        check(weight.shape[-1], form, block)
        self.form, self.shape, self.dtype = form, weight.shape, weight.dtype
        self.second: Tensor | None = None
        self.away = False
        if form == "nvfp4":
            self._round_twice(weight, largest_of(weight) if largest is None else largest)
            return
        # matrices of a stack one below the other
        blocks = weight.detach().reshape(weight.shape[:-1].numel(), -1, block)
        if form == "fp8":
            if scales is None:
                largest = blocks.abs().amax(-1).float()
                scales = torch.where(largest > 0, largest, torch.ones_like(largest)) / LARGEST["e4m3"]
            self.scales = scales
            self.data = to_fp8(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None], "e4m3")
            return
        largest = blocks.abs().amax(-1)
        wide = torch.promote_types(weight.dtype, torch.float32)
        # A block of zeros has any scale: its quantized values are 0.
        scale = torch.where(largest > 0, largest, torch.ones_like(largest)).to(wide)
        self.scales = (scale / 127 if form == "int8" else scale).to(weight.dtype)
        parts = blocks.to(wide) / self.scales.to(wide)[..., None]
        if form == "int8":
            self.data = parts.round_().clamp_(-127, 127).to(torch.int8)
        else:
            levels = levels_of(wide, weight.device)
            # the nearest level: the number of midpoints below
            nearest = torch.bucketize(parts, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
            self.data = _paired(nearest)

    def _round_twice(self, weight: Tensor, largest: Tensor) -> None:
        """Choose scales of blocks in FP8, then quantized values for the rounded scales."""
        low, high = NVFP4_SCALES
        # A weight of zeros has any scale.
        second = torch.where(largest > 0, largest, torch.ones_like(largest)).float() / (E2M1[-1] * high)
        # of each row
        self.second = second if second.ndim == 0 else second.repeat_interleave(weight.shape[1])[:, None]
        blocks = weight.detach().reshape(weight.shape[:-1].numel(), -1, NVFP4_BLOCK)
        steps = blocks.abs().amax(-1).float() / (E2M1[-1] * self.second)
        steps = torch.where(steps > 0, steps, torch.ones_like(steps)).clamp(low, high)
        self.scales = steps.to(torch.float8_e4m3fn)
        parts = blocks.to(torch.promote_types(weight.dtype, torch.float32)) / self._steps[..., None]
        levels = parts.new_tensor(E2M1)
        middles = (levels[1:] + levels[:-1]) / 2
        sizes = parts.abs()
        # Ties go to the even code: those below an even one go up.
        nearest = torch.bucketize(sizes, middles) + torch.isin(sizes, middles[1::2])
        self.data = _paired((nearest + 8 * (parts < 0)).to(torch.uint8))

    @property
    def _steps(self) -> Tensor:
        """What multiplies the levels of each block."""
        return self.scales if self.second is None else self.scales.float() * self.second

    @property
    def nbytes(self) -> int:
        """Bytes of quantized values and scales."""
        return self.data.nbytes + self.scales.nbytes + (0 if self.second is None else self.second.nbytes)

    def parts(self) -> dict[str, Tensor]:
        """Return what has memory, by name: ``data``, ``scales``, and ``second`` for ``nvfp4``."""
        found = {"data": self.data, "scales": self.scales}
        return found if self.second is None else {**found, "second": self.second}

    def place(self, parts: Mapping[str, Tensor] | None) -> None:
        """Let data and scales be these tensors with their values; None: they have no memory until they come back."""
        self.away = parts is None
        for name, part in self.parts().items():
            setattr(self, name, part.new_empty(0) if parts is None else parts[name])

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded weight, in its own dtype or another.

        Raises:
            MegalightError: they are sharded over data-parallel ranks, and not gathered now.
        """
        if self.away:
            raise MegalightError(
                f"a weight {tuple(self.shape)} that is stored quantized ({self.form}) was read while only shards "
                "of it are here. Its unit gathers them when it computes; elsewhere read it inside full_parameters()."
            )
        found = decode(self.data, self._steps, self.form, self.dtype).view(self.shape)
        return found if dtype is None else found.to(dtype)


def largest_of(weight: Tensor) -> Tensor:
    """Return the largest magnitude of a weight, 0-dim; of a stack, those of its matrices ``[E]``."""
    sizes = weight.detach().abs()
    return sizes.amax() if weight.ndim == 2 else sizes.amax((1, 2))


def _paired(data: Tensor) -> Tensor:
    """Put two quantized values in a byte; the high half comes first."""
    return data[..., ::2] << 4 | data[..., 1::2]


def check(features: int, form: str, block: int) -> None:
    """Raise if rows of ``features`` cannot be stored in this way.

    Raises:
        ConfigurationError: says the rule.
    """
    if form not in FORMATS:
        raise ConfigurationError(f"there is no format {form!r} of stored weights; choose one of {', '.join(FORMATS)}.")
    if block < 2 or block % 2:
        raise ConfigurationError(f"block={block} must be even and at least 2; 64 is usual.")
    if form == "nvfp4" and block != NVFP4_BLOCK:
        raise ConfigurationError(f"block={block}, and nvfp4 has one scale for {NVFP4_BLOCK} features. Leave block out.")
    if features % block:
        raise ConfigurationError(
            f"rows of {features} features cannot be cut into blocks of {block}: the block must divide the features "
            "that a rank holds. Choose another block."
        )


def store(
    weight: Tensor, form: str, block: int, largest: Tensor | None = None, scales: Tensor | None = None
) -> QuantizedWeight:
    """Store a frozen parameter quantized, and free its own memory; it keeps shape and dtype, and reads NaN."""
    data = QuantizedWeight(weight, form, block, largest, scales)
    state_of(weight).stored = data
    # Strides of 0: one element serves the whole shape.
    weight.data = weight.new_full((1,) * weight.ndim, torch.nan).expand(weight.shape)
    return data


# Layers call these several times per pass, so each reads the attribute itself and saves function calls.


def stored_of(parameter: Tensor) -> QuantizedWeight | None:
    """Return the quantized values of a parameter, or None."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.stored


def readable(weight: Tensor) -> Tensor:
    """Return a weight, decoded if it is quantized."""
    state: ParameterState | None = getattr(weight, "megalight", None)
    return weight if state is None or state.stored is None else state.stored.values()
