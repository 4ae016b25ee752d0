"""Layers of two GPUs from graphs, with every way to send: losses of eager steps, and no wait for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalight.callbacks import CUDAGraph
from megalight.parallel.tensor.overlap import symmetric
from megalight.parallel.tensor.overlap.spec import TensorOptions
from tests.strategies.test_layouts_gpu import Strict
from tests.strategies.training import CONFIGS, fit
from tests.support.nccl import runs_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

CONFIG = replace(CONFIGS["gqa"], num_layers=4, hidden_size=128, ffn_hidden_size=256)
LAYOUT: dict[str, Any] = {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True}
STEPS = 9
CASES = [("layer", "auto"), ("layer", "pipelined"), ("layer", "plain"), ("attention", "symmetric")]


def _losses(scope: Any, warmup: int, overlap: str) -> tuple[list[float], int, bool]:
    callback = CUDAGraph(scope, warmup_steps=warmup, on_refusal="error")
    torch.manual_seed(0)
    gathered = []
    own = symmetric.Symmetric.gather_product

    def gather_product(self: Any, *args: Any, **kwargs: Any) -> Any:
        gathered.append(self)
        return own(self, *args, **kwargs)

    symmetric.Symmetric.gather_product = gather_product  # type: ignore[method-assign]
    try:
        found = fit(
            CONFIG,
            STEPS,
            trainer_options={"accelerator": "cuda", "precision": "bf16-mixed", "log_every_n_steps": 1000},
            extra_callbacks=[callback, Strict()],
            tensor=TensorOptions(overlap=overlap),
            **LAYOUT,
        )
    finally:
        symmetric.Symmetric.gather_product = own  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("default")
    return found["losses"], callback.replays, bool(gathered)


def _compare(scope: str, overlap: str) -> Any:
    symmetric.LEAST_BYTES = 0  # in a process of the test's own
    eagerly = "symmetric" if overlap == "auto" else overlap
    return _losses(scope, 1000, eagerly), _losses(scope, 2, overlap)


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(_compare, case) for case in CASES]


@pytest.mark.parametrize(("scope", "overlap"), CASES)
def test_recorded_layers_send_as_eager_ones(scope: str, overlap: str) -> None:
    (expected, none, _), (found, replays, copies) = runs_of(jobs, 2).outcome((scope, overlap))
    assert none == 0
    assert replays == (STEPS - 2) * 2 * CONFIG.num_layers
    assert copies == (overlap in ("auto", "symmetric"))
    np.testing.assert_allclose(found, expected, rtol=2e-5)
