"""How a GPT encodes positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalight.models.config import require, require_choice
from megalight.ops.rotary import RotaryAxes, RotaryScaling


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
