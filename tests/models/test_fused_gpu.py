"""Fused ops of models of ``transformers`` with their kernels, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.callbacks import CUDAGraph, FusedOps
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_fused_ops import Chat
from tests.models.test_fused import batch, distance, models

pytestmark = pytest.mark.gpu
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def trained(model: Any) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(**{name: value.cuda() for name, value in batch().items()}).loss
    loss.backward()
    return float(loss.detach()), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_kernels_are_no_less_exact(kind: str) -> None:
    """Against the model in float32: as near as ``transformers`` is."""
    model, fused = (one.cuda() for one in models(kind, **WIDE))
    loss, gradients = trained(model)
    errors = []
    for one in (model, fused):
        with torch.autocast("cuda", torch.bfloat16):
            found, own = trained(one)
        assert abs(found - loss) < 1e-2 * loss
        errors.append(distance(own, gradients))
    assert errors[1] < 2 * errors[0], errors


def test_steps_are_recorded() -> None:
    seen = []
    for graphs in ([], [CUDAGraph(warmup_steps=3, on_refusal="error")]):
        module = Chat()
        data = torch.randint(53, (32, 12), generator=torch.Generator().manual_seed(1))
        trainer = pl.Trainer(
            accelerator="gpu", devices=1, strategy=MegatronStrategy(), precision="bf16-mixed", max_epochs=1,
            callbacks=[FusedOps(), *graphs], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
        seen.append(module.seen)
    assert graphs[0].replays == 5
    assert torch.allclose(*map(torch.tensor, seen), rtol=2e-2)
