"""Frozen weights stored as narrow codes: QLoRA (https://arxiv.org/abs/2305.14314).

A weight ``[out, in]`` is cut into blocks of features along each row. Each block has one scale, and each element a code:

- ``int8``: ``w = scale * code``, codes from -127 to 127, the scale is the block's largest magnitude / 127;
- ``nf4``: ``w = scale * LEVELS[code]``, two codes in a byte, the scale is the block's largest magnitude. The levels are
  quantiles of a normal distribution, as in the paper.

Scales have the weight's own dtype, and codes are chosen for the rounded scale. Products read the decoded weight, which
exists for one product at a time. Gradients go through it to the input, and the weight has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.parameter import ParameterState, state_of
from megalight.ops.stored import reference
from megalight.ops.stored.reference import levels_of
from megalight.registry import Backend, BackendRegistry, remembered

FORMATS = ("int8", "nf4")


class Spec(NamedTuple):
    """A request to decode: device type, dtype of the scales."""

    device: str
    dtype: torch.dtype


DECODE: BackendRegistry[Spec, Callable[[Tensor, Tensor, str], Tensor]] = BackendRegistry("decode")
REGISTRIES = (DECODE,)
EXAMPLE = Spec("cpu", torch.bfloat16)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


DECODE.register(Backend("triton", lazy("megalight.ops.stored.triton", "decode"), 20, _triton_why_not))
DECODE.register(Backend("reference", reference.decode, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[[Tensor, Tensor, str], Tensor]:
    return DECODE.select(spec, backend).fn


def decode(data: Tensor, scales: Tensor, form: str, backend: str = "auto") -> Tensor:
    """Return the weight ``[out, in]`` of codes, in the dtype of the scales.

    Args:
        data: ``[out, in / block, block]`` int8 for ``int8``; ``[out, in / block, block / 2]`` uint8 for ``nf4``.
        scales: ``[out, in / block]``.
        form: ``int8`` or ``nf4``.
        backend: name of a backend.
    """
    return _choose(Spec(data.device.type, scales.dtype), backend)(data, scales, form)


class Codes:
    """A frozen weight as codes.

    Args:
        weight: ``[out, in]``, floating point, not NaN.
        form: ``int8`` or ``nf4``.
        block: number of features with one scale; it divides ``in``.

    Raises:
        ConfigurationError: the block does not divide the features, or the format is unknown.
    """

    def __init__(self, weight: Tensor, form: str, block: int) -> None:
        check(weight.shape[-1], form, block)
        self.form, self.shape = form, weight.shape
        blocks = weight.detach().reshape(weight.shape[0], -1, block)
        largest = blocks.abs().amax(-1)
        wide = torch.promote_types(weight.dtype, torch.float32)
        # A block of zeros has any scale: its codes are 0.
        scale = torch.where(largest > 0, largest, torch.ones_like(largest)).to(wide)
        self.scales = (scale / 127 if form == "int8" else scale).to(weight.dtype)
        parts = blocks.to(wide) / self.scales.to(wide)[..., None]
        if form == "int8":
            self.data = parts.round_().clamp_(-127, 127).to(torch.int8)
        else:
            levels = levels_of(wide, weight.device)
            # the nearest level: the number of midpoints below
            nearest = torch.bucketize(parts, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
            self.data = nearest[..., ::2] << 4 | nearest[..., 1::2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + self.scales.nbytes

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded weight ``[out, in]``, in the dtype of the scales or another."""
        found = decode(self.data, self.scales, self.form)
        return found if dtype is None else found.to(dtype)


def check(features: int, form: str, block: int) -> None:
    """Raise if rows of ``features`` cannot be stored in this way.

    Raises:
        ConfigurationError: says the rule.
    """
    if form not in FORMATS:
        raise ConfigurationError(f"there is no format {form!r} of stored weights; choose one of {', '.join(FORMATS)}.")
    if block < 2 or block % 2:
        raise ConfigurationError(f"block={block} must be even and at least 2; 64 is usual.")
    if features % block:
        raise ConfigurationError(
            f"rows of {features} features cannot be cut into blocks of {block}: the block must divide the features "
            "that a rank holds. Choose another block."
        )


def store(weight: Tensor, form: str, block: int) -> Codes:
    """Store a frozen parameter as codes, and free its own memory; it keeps shape and dtype, and reads NaN."""
    codes = Codes(weight, form, block)
    state_of(weight).stored = codes
    # Strides of 0: one element serves the whole shape.
    weight.data = weight.new_full((1,) * weight.ndim, torch.nan).expand(weight.shape)
    return codes


# Layers call these several times per pass, so each reads the attribute itself and saves function calls.


def stored_of(parameter: Tensor) -> Codes | None:
    """Return the codes of a parameter, or None."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.stored


def readable(weight: Tensor) -> Tensor:
    """Return a weight, decoded if it is stored as codes."""
    state: ParameterState | None = getattr(weight, "megalight", None)
    return weight if state is None or state.stored is None else state.stored.values()
