"""How a vision transformer for squares reads images of any shape, in tiles."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.models.config import require


@dataclass(frozen=True, kw_only=True)
class AnyResConfig:
    """An image is the whole in one square, and then a grid of tiles without the borders that made it fit (LLaVA-NeXT).

    See https://llava-vl.github.io/blog/2024-01-30-llava-next and https://arxiv.org/abs/2408.03326. The tokens of the
    grid lie in its rows, and a newline ends each of them.

    Attributes:
        grids: rows and columns of tiles of each grid. An image takes the one that keeps most of its pixels, and of
            these the smallest.
        most: a grid with the features of more than 1.21 times so many tiles is shrunk to about as many, by means of
            four neighbors. 0: none is.
        alone: whether only an image that is the only one of its conversation has tiles (LLaVA-OneVision). Others are
            one square, by ``vision.resize``.

    Raises:
        ConfigurationError: a value is out of range.
    """

    grids: tuple[tuple[int, int], ...]
    most: int = 0
    alone: bool = False

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "grids", tuple(map(tuple, self.grids)))
        require(
            bool(self.grids) and all(len(grid) == 2 and min(grid) >= 1 for grid in self.grids),
            f"vision.anyres.grids is {list(self.grids)}; give at least one pair of rows and columns, such as (2, 1).",
        )
        require(self.most >= 0, f"vision.anyres.most is {self.most}; it must be at least 1, or 0.")
