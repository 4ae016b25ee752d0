"""Sizes of the Mamba-2 mixers of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.models.config import require


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
