"""A run goes on from a file of Lightning with the state of ``torch.optim.Muon``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from megalight.errors import CheckpointError
from megalight.optim import AdamConfig, MuonConfig
from megalight.strategies import MegatronStrategy
from tests.strategies.test_single_file import WholeBatches, under_lightning
from tests.strategies.training import BASE, SEED, gathered, whole
from tests.support.environment import trainer
from tests.support.workers import run

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")

SAVED = 2
MUON = MuonConfig(lr=0.02, weight_decay=0.1, ns_dtype="float32")
CONFIG = AdamConfig(lr=0.0, weight_decay=0.0, muon=MUON)  # Adam changes nothing, as nothing in the file does
ADAM = replace(CONFIG, lr=1e-2)


class OfTorch(WholeBatches):
    """Hidden matrices by torch's Muon; nothing else is updated."""

    named = False

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        taken = [(name, p) for name, p in self.model.named_parameters() if MUON.takes(name, p)]
        params: Any = [("model." + name, p) for name, p in reversed(taken)] if self.named else [p for _, p in taken]
        return torch.optim.Muon(params, 0.02, 0.1, adjust_lr_fn="match_rms_adamw")


class Named(OfTorch):
    """With names of parameters in the file, and in another order."""

    named = True


class BesideAdam(OfTorch):
    """Two optimizers, as torch needs them for a whole model."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        muon, named = super().configure_optimizers(), list(self.model.named_parameters())
        rest = [("model." + name, p) for name, p in reversed(named) if not MUON.takes(name, p)]
        return [muon, torch.optim.AdamW(rest, ADAM.lr, ADAM.betas, ADAM.eps, weight_decay=0.0)]

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        muon, adam = self.optimizers()  # type: ignore[misc]
        muon.zero_grad()
        adam.zero_grad()
        self.manual_backward(loss)
        muon.step()
        adam.optimizer.step()  # Lightning counts one step, not two


def _trained(kind: type[OfTorch], steps: int, path: str) -> dict[str, Any]:
    module = kind(BASE, seed=SEED)
    # torch's Newton-Schulz casts to bfloat16, which turns the least singular vectors of square matrices.
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        under_lightning(module, steps, path)
    assert isinstance(module.model, nn.Module)
    return whole(module.model)


def _resumed(path: str, options: dict[str, Any], optimizer: AdamConfig = CONFIG) -> dict[str, Any]:
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    runner = trainer(strategy, max_steps=SAVED + 1, use_distributed_sampler=False, limit_val_batches=0)
    module = WholeBatches(BASE, optimizer=optimizer, seed=SEED + 1)
    runner.fit(module, ckpt_path=path)
    return gathered(strategy, module)


@pytest.mark.parametrize(("kind", "options"), [(OfTorch, {}), (Named, {"tensor_parallel": 2})])
def test_its_momentum_goes_on(kind: type[OfTorch], options: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    before = run(_trained, 1, kind, SAVED, path)[0]
    after = run(_trained, 1, kind, SAVED + 1, str(tmp_path / "after.ckpt"))[0]
    found = run(_resumed, options.get("tensor_parallel", 1), path, options)[0]
    for name in before:
        # torch orthogonalizes fused weights as one matrix.
        if name.endswith(("proj.weight", "down.weight")):
            expected = after[name] - before[name]
            error = np.linalg.norm(found[name] - after[name]) / np.linalg.norm(expected)
            assert error < 1e-4, f"{name}: {error:.6f} of the step"
        elif "embed" in name or "head" in name:
            np.testing.assert_array_equal(found[name], before[name])


def test_moments_of_the_adamw_beside_it_go_on(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    before = run(_trained, 1, BesideAdam, SAVED, path)[0]
    after = run(_trained, 1, BesideAdam, SAVED + 1, str(tmp_path / "after.ckpt"))[0]
    found = run(_resumed, 2, path, {"tensor_parallel": 2}, ADAM)[0]
    theirs = [name for name in before if "embed" in name or "head" in name or "norm" in name]
    assert len(theirs) == 2 + 2 * BASE.num_layers + 1
    for name in theirs:
        # Gradients of this step are those of the saved weights, whatever Muon then does to the others.
        np.testing.assert_allclose(found[name] - before[name], after[name] - before[name], rtol=1e-6, atol=1e-12)
        assert np.abs(after[name] - before[name]).max() > 1e-3


def test_a_file_with_other_matrices_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run(_trained, 1, OfTorch, SAVED, path)
    saved = torch.load(path, weights_only=False)
    saved["optimizer_states"][0]["param_groups"][0]["params"].pop()
    torch.save(saved, path)
    with pytest.raises((CheckpointError, AssertionError), match="parameters in a group, and this run has"):
        run(_resumed, 1, path, {})
