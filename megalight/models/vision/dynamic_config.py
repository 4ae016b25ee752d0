"""How a vision transformer reads images of any size."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.models.config import require


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Images keep their shape, and nearly their size; positions of patches are rotary, by row and column (Qwen2.5-VL).

    See https://arxiv.org/abs/2502.13923.

    Attributes:
        min_pixels, max_pixels: images with fewer or more pixels are enlarged or shrunk.
        frames: how often an image occurs in a patch. Towers that also read videos have patches of several frames.
        window: side of the windows, in pixels, inside of which attention stays. 0: there are none.
        full_layers: layers without windows, whose attention spans the image.
        base: of the rotary frequencies.
        table: side of a learned table of positions, which is laid over each image: a patch reads between its entries
            (Qwen3-VL). 0: there is none.

    Raises:
        ConfigurationError: a value is out of range.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    frames: int = 2
    window: int = 0
    full_layers: tuple[int, ...] = ()
    base: float = 10000.0
    table: int = 0

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
        require(self.base > 1, f"vision.dynamic.base is {self.base}; it must be above 1.")

    def has_window(self, layer: int) -> bool:
        """Return whether attention of the layer with this index stays inside of windows."""
        return self.window > 0 and layer not in self.full_layers
