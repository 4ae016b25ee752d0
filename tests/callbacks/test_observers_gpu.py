"""Everything that looks into a step, on a GPU at once: no step waits for the device, and losses are as without."""

from __future__ import annotations

import gzip
import json

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.callbacks import NVTX, GarbageCollection, ProfilerWindow, Throughput
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from tests.callbacks.rows import Rows
from tests.strategies.test_gpu import Batches, Watch
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You defined a `validation_step`")]


def fit(callbacks, logger=False, strict=False):
    watch = Watch(strict)
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=MegatronStrategy(micro_batch_size=1),
        precision="bf16-mixed",
        max_steps=12,
        gradient_clip_val=CLIP,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        log_every_n_steps=12,
        callbacks=[*callbacks, watch],
    )
    try:
        module = GPTModule(CONFIGS["tied"], optimizer=ADAM, seed=SEED)
        trainer.fit(module, DataLoader(Batches(12), batch_size=None, pin_memory=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(loss) for loss in watch.losses]


def test_no_step_waits_for_the_device_and_losses_are_as_without(tmp_path):
    logger = Rows()
    callbacks = [
        NVTX(), Throughput(timers=2, stragglers=1.15, every_n_steps=2), GarbageCollection(2),
        ProfilerWindow(tool="memory", dirpath=str(tmp_path)),
    ]  # fmt: skip
    np.testing.assert_array_equal(fit(callbacks, logger, strict=True), fit([]))
    row = logger.starting("time/")[-1][1]
    parts = sum(row[f"time/{name}_s"] for name in ("forward", "backward", "finish_gradients", "optimizer"))
    assert 0 < parts < row["time/step_s"]
    assert logger.starting("straggler/")


def test_windows(tmp_path):
    profiler = ProfilerWindow(2, 4, dirpath=str(tmp_path))
    fit([NVTX(), profiler, ProfilerWindow(6, 8, "nsys")])
    (trace,) = profiler.traces
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("forward chunk=0 micro_batch=0") == 2
    assert names.count("optimizer") == 2
