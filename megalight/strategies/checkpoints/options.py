"""How a strategy writes checkpoints, as an option."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.checkpoint import SCHEMES
from megalight.checkpoint.manifest import FULLY_RESHARDABLE
from megalight.errors import ConfigurationError, nearest


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """How checkpoints are written.

    Attributes:
        format: ``fully_reshardable``: any layout resumes from any other. ``dp_reshardable``: optimizer state as it lies
            in flat shards; the split of the weights (tensor and expert parallelism) must stay the same.
            ``fsdp_dtensor``: as the first, in files that ``torch.distributed.checkpoint.load`` reads. A run resumes
            from each, whatever it writes.

    Raises:
        ConfigurationError: there is no such format.
    """

    format: str = FULLY_RESHARDABLE

    def __post_init__(self) -> None:
        if self.format not in SCHEMES:
            raise ConfigurationError(
                f"checkpoints.format is {self.format!r}; it must be one of {', '.join(SCHEMES)}."
                + nearest(self.format, SCHEMES)
            )
