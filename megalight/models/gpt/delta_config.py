"""Sizes of the Gated DeltaNet mixers of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.models.config import require


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
