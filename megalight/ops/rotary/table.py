"""The angles of rotary embedding, with the frequency scalings of long-context models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryScaling:
    """Scales rotary frequencies for contexts that are longer than in the original training.

    Attributes:
        kind: ``linear`` divides every frequency by ``factor`` (Chen et al. 2023). ``llama3`` (Llama 3.1) divides only
            frequencies whose wavelength exceeds ``original_length / low_frequency_factor``, keeps those whose
            wavelength is below ``original_length / high_frequency_factor``, and interpolates between them.
        factor: the factor by which the context becomes longer.
        low_frequency_factor: see ``kind``.
        high_frequency_factor: see ``kind``.
        original_length: context length of the original training, in tokens.
    """

    kind: Literal["linear", "llama3"] = "llama3"
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rotary scaling kind is {self.kind!r}; choose linear or llama3.")
        if self.factor < 1:
            raise ValueError(f"rotary scaling factor is {self.factor}; it must be at least 1 (1 changes nothing).")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor is {self.low_frequency_factor} and high_frequency_factor is "
                f"{self.high_frequency_factor}; the first must be above 0 and below the second. Llama 3.1 uses 1 and 4."
            )

    def apply(self, frequencies: Tensor) -> Tensor:
        """Return the scaled ``frequencies`` (radians per token)."""
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_length * frequencies / (2 * math.pi)  # full turns within the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


def rotary_table(
    positions: Tensor, dim: int, base: float, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles ``position * base^(-2i/dim)`` (Su et al. 2021).

    Args:
        positions: ``[T]`` integers, or float64 for a float64 table.
        dim: number of features that are rotated; even.
        base: theta.
        scaling: scaling of the frequencies.

    Returns:
        ``cos, sin``, each ``[T, dim/2]`` float32. Angles are computed in float64, because float32 loses the fraction of
        a turn at long contexts.

    Raises:
        ValueError: ``dim`` is odd.
    """
    if dim % 2:
        raise ValueError(f"rotary dim is {dim}; it must be even, because features are rotated in pairs.")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    frequencies = float(base) ** -exponents
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    angles = positions.to(torch.float64)[:, None] * frequencies
    dtype = torch.float64 if torch.float64 in (positions.dtype, torch.get_default_dtype()) else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)
