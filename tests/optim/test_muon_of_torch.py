"""A run goes on from a file of Lightning with the state of ``torch.optim.Muon``."""

from __future__ import annotations

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


def _trained(kind: type[OfTorch], steps: int, path: str) -> dict[str, Any]:
    module = kind(BASE, seed=SEED)
    # torch's Newton-Schulz casts to bfloat16, which turns the least singular vectors of square matrices.
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        under_lightning(module, steps, path)
    assert isinstance(module.model, nn.Module)
    return whole(module.model)


def _resumed(path: str, options: dict[str, Any]) -> dict[str, Any]:
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    runner = trainer(strategy, max_steps=SAVED + 1, use_distributed_sampler=False, limit_val_batches=0)
    module = WholeBatches(BASE, optimizer=CONFIG, seed=SEED + 1)
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


def test_a_file_with_other_matrices_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run(_trained, 1, OfTorch, SAVED, path)
    saved = torch.load(path, weights_only=False)
    saved["optimizer_states"][0]["param_groups"][0]["params"].pop()
    torch.save(saved, path)
    with pytest.raises((CheckpointError, AssertionError), match="parameters in a group, and this run has"):
        run(_resumed, 1, path, {})
