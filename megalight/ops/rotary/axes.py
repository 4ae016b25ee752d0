"""Rotary embedding over several axes: which pair of features turns with the position on which axis."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.errors import ConfigurationError


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
