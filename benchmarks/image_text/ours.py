"""Megalight's training step of a vision-language model, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, Dataset

from benchmarks.image_text.shapes import Shape
from benchmarks.peers import world_size
from benchmarks.peers.megalight import Steps
from megalight.callbacks import CUDAGraph
from megalight.data.multimodal.batch import ImageTextBatch
from megalight.models.vlm.module import VLMModule
from megalight.parallel.precision import LowPrecisionOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import MegatronStrategy


class Same(Dataset[ImageTextBatch]):
    """One batch, over and over."""

    def __init__(self, batch: ImageTextBatch, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> ImageTextBatch:
        return self.batch


class OneBatch(VLMModule):
    """Trains on this rank's share of one batch, over and over."""

    whole: ImageTextBatch
    steps: int

    def train_dataloader(self) -> DataLoader[ImageTextBatch]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        own = self.whole.split(len(self.whole) // share["num_replicas"])[share["rank"]]
        pinned = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(Same(own, self.steps), batch_size=None, pin_memory=pinned)


def options_of(precision: str, recipe: str, device: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a precision, and a recipe of FP8. On CPU, products in FP8 are emulated."""
    if precision != "fp8":
        return {"precision": "bf16-mixed" if precision == "bf16" else "32-true"}
    modules = ["attention.*", "mlp.*", "tower.attention.*", "tower.mlp.*"]
    low = LowPrecisionOptions(recipe, towers=("language", "vision"), modules=modules, emulate=device == "cpu")
    return {"plugins": [MegatronLowPrecision(low)]}


def train(
    shape: Shape,
    rows: int,
    strategy: MegatronStrategy,
    precision: str,
    device: str,
    steps: int,
    tick: Callable[[Any], None],
    begin: Callable[[], None] = lambda: None,
    freeze: Sequence[str] = (),
    graph: str = "",
    recipe: str = "tensorwise",
    **options: Any,
) -> None:
    """Train a model on ``rows`` rows of all ranks together, with ``tick(strategy)`` after each step.

    Args:
        graph: what is recorded as CUDA graphs after two steps; "": nothing.
        recipe: of FP8, as in ``LowPrecisionOptions``.
        options: further arguments of the module.

    Raises:
        ConfigurationError: something cannot be recorded.
    """
    module = OneBatch(shape.config, freeze=freeze, **options)
    module.whole, _ = shape.batch(1, rows)
    module.steps = steps
    trainer = pl.Trainer(
        accelerator=device,
        devices=world_size(),
        strategy=strategy,
        **options_of(precision, recipe, device),
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[
            Steps(begin, tick),
            *([CUDAGraph(graph, warmup_steps=2, on_refusal="error")] if graph else []),  # type: ignore[arg-type]
        ],
    )
    trainer.fit(module)
