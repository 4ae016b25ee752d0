"""How a vision transformer reads images of any size."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.models.config import require


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Images keep their shape, and nearly their size; positions of patches are rotary, by row and column (Qwen2.5-VL).

    See https://arxiv.org/abs/2502.13923; for towers with a table instead, https://arxiv.org/abs/2502.14786 (SigLIP2).

    Attributes:
        min_pixels, max_pixels: images with fewer or more pixels are enlarged or shrunk.
        patches: images are enlarged or shrunk to nearly so many patches, and never more, in place of these limits
            (NaFlex, SigLIP2). 0: the limits hold.
        frames: how often an image occurs in a patch. Towers that also read videos have patches of several frames.
        window: side of the windows, in pixels, inside of which attention stays. 0: there are none.
        full_layers: layers without windows, whose attention spans the image.
        rotary: whether patches have rotary positions.
        base: of the rotary frequencies.
        table: side of a learned table of positions, which is laid over each image: a patch reads between its entries
            (Qwen3-VL). 0: there is none.
        table_cells: whether table and image have the same edges, and a patch that is larger than an entry reads the
            mean of those that it covers (SigLIP2). If not, the outer patches are the outer entries.

    Raises:
        ConfigurationError: a value is out of range.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patches: int = 0
    frames: int = 2
    window: int = 0
    full_layers: tuple[int, ...] = ()
    rotary: bool = True
    base: float = 10000.0
    table: int = 0
    table_cells: bool = False

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "full_layers", tuple(self.full_layers))
        require(
            1 <= self.min_pixels <= self.max_pixels,
            f"vision.dynamic.min_pixels is {self.min_pixels} and max_pixels {self.max_pixels}; they must be at least "
            "1, and in this order.",
        )
        require(self.frames >= 1, f"vision.dynamic.frames is {self.frames}; it must be at least 1.")
        require(self.window >= 0, f"vision.dynamic.window is {self.window}; it must be at least 0 pixels.")
        require(
            self.window > 0 or not self.full_layers,
            f"vision.dynamic.full_layers is {list(self.full_layers)} without a window; set vision.dynamic.window, or "
            "leave them out.",
        )
        require(self.table >= 0, f"vision.dynamic.table is {self.table}; it must be a side, or 0.")
        require(self.patches >= 0, f"vision.dynamic.patches is {self.patches}; it must be a number of patches, or 0.")
        require(
            self.table > 0 or (self.rotary and not self.table_cells),
            "vision.dynamic.table is 0 without vision.dynamic.rotary, or with table_cells; patches would have no "
            "position. Set table to the side of a table.",
        )
        require(self.base > 1, f"vision.dynamic.base is {self.base}; it must be above 1.")

    def has_window(self, layer: int) -> bool:
        """Return whether attention of the layer with this index stays inside of windows."""
        return self.window > 0 and layer not in self.full_layers
