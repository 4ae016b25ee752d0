"""Rows of :mod:`benchmarks.vlm`: what is measured, how, and on how many GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.image_text.shapes import FROZEN_TOWER, Shape, shape_of, tiny
from benchmarks.step import Step
from megalight.models.vlm.module import Trained

WAYS = (("megalight", "bf16"), ("megalight", "fp8"), ("transformers", "bf16"))

USUAL = 2
"""Micro-batches of a step, if nothing else is said."""


@dataclass(frozen=True)
class Row:
    """A row to measure.

    Attributes:
        shape: name of the shape.
        way: ``megalight`` or ``transformers``.
        precision: ``bf16`` or ``fp8``; on the CPU ``bf16`` means float32.
        gpus: ranks, of data parallelism.
        level: what they shard, as in ``DataParallelOptions``.
        sharding: further options of ``DataParallelOptions``, as ``gathers:auto``.
        trained: whether the tower is trained.
        divisor: the language model has this part of its layers.
        mbs: rows of a micro-batch. None: what an H200 has room for.
        micro: micro-batches of a step.
        small: whether this is a tiny model on the CPU.
        unchecked: whether no twin is trained before.
        breakdown: whether a step is profiled.
        graph: what is recorded as CUDA graphs, as in ``CUDAGraph``; "": nothing.
        recipe: of FP8, as in ``LowPrecisionOptions``.
        recompute: modules of the language model whose outputs the backward pass computes again.
    """

    shape: str
    way: str
    precision: str
    gpus: int = 1
    level: str = "optim"
    sharding: tuple[str, ...] = ()
    trained: bool = False
    divisor: int = 2
    mbs: int | None = None
    micro: int = USUAL
    small: bool = False
    unchecked: bool = False
    breakdown: bool = False
    graph: str = ""
    recipe: str = "tensorwise"
    recompute: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in results. Several ranks have a level."""
        level = f", {self.level}" if self.gpus > 1 else ""
        recipe = f" {self.recipe}" if self.recipe != "tensorwise" else ""
        graph = f", graph={self.graph}" if self.graph else ""
        micro = f", micro={self.micro}" if self.micro != USUAL else ""
        recompute = f", recompute={'+'.join(self.recompute)}" if self.recompute else ""
        return f"{self.shape}, {self.way} {self.precision}{recipe}{level}{graph}{micro}{recompute}"

    @property
    def device(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def arithmetic(self) -> str:
        """The precision that is computed in."""
        return "fp32" if self.small and self.precision == "bf16" else self.precision

    @property
    def freeze(self) -> tuple[str, ...]:
        """Patterns of frozen parameters."""
        return () if self.trained else ("*.tower.*",)

    @property
    def passes(self) -> Trained:
        """What counts as work."""
        return Trained() if self.trained else FROZEN_TOWER

    def made(self) -> Shape:
        """Return the model and its batches."""
        shape = replace(shape_of(self.shape, self.divisor, self.trained, self.mbs), micro=self.micro)
        return tiny(shape) if self.small else shape

    def timing(self) -> Step:
        """Return what the meter asks of a step."""
        if self.small:
            return Step(device="cpu", steps=2, warmup=1)
        return Step(device="cuda", steps=5, warmup=3)

    def record(self) -> dict[str, Any]:
        """Return the values for a call of another process."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Row:
        return cls(**record | {name: tuple(record[name]) for name in ("sharding", "recompute")})
