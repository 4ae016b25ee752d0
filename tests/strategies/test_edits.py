"""Hooks that edit ``checkpoint["state_dict"]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight import checkpoint
from megalight.errors import CheckpointError, ConfigurationError
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row
from megalight.strategies import MegatronStrategy
from tests.strategies.regression import Plain, batches, fit, strategy, weights
from tests.strategies.test_plain import Wide
from tests.support.environment import trainer
from tests.support.workers import run


class Saving(Plain):
    """Leaves a tensor out, changes one and adds one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["net.0.bias"]
        state["net.2.bias"] = torch.full_like(state["net.2.bias"], 7)
        state["extra"] = torch.arange(3)


def _saved(path: str) -> tuple[list[str], list[float]]:
    module = Saving()
    fit(module, batches(8, 2)).save_checkpoint(path, weights_only=True)
    names = [name.removeprefix("model.") for name in checkpoint.open(path).tensors if name.startswith("model.")]
    return sorted(names), module.net[2].bias.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [1, 2])
def test_edits_of_a_save_are_saved(tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "edited.ckpt")
    for names, bias in run(_saved, ranks, path):
        assert names == ["extra", "net.0.weight", "net.2.bias", "net.2.weight"]
        assert bias != [7, 7], "the model itself is unchanged"
    assert run(_read, 1, path) == [([7.0, 7.0], [0, 1, 2])]


class Loading(Plain):
    """Looks at the loaded tensors; ``edit`` then changes them."""

    def __init__(self, edit: str = "nothing") -> None:
        super().__init__()
        self.edit = edit
        self.seen: dict[str, Tensor] = {}
        self.strict_loading = edit != "loose"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if self.edit == "nothing":
            assert sorted(state) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
        elif self.edit == "values":
            state["net.0.bias"] *= 0
            state["net.2.bias"] = state["net.2.bias"] + 1
        elif self.edit == "replaced":
            checkpoint["state_dict"] = {key: value * 2 for key, value in state.items()}
        elif self.edit in ("loose", "lost"):
            del state["net.0.weight"]
        else:
            self.seen = dict(state)


def _read(path: str) -> tuple[list[float], list[int]]:
    module = Loading("seen")
    with pytest.raises(CheckpointError):  # a tensor is missing and one too many
        trainer(strategy()).validate(module, batches(4, 4), ckpt_path=path, verbose=False)
    return module.seen["net.2.bias"].tolist(), module.seen["extra"].tolist()


def _loaded(path: str, edit: str, resumes: bool) -> tuple[list[list[float]], list[list[float]]]:
    first = Plain("SGD")
    fit(first, batches(8, 2)).save_checkpoint(path)
    second = Loading(edit)
    second.optimizer = "SGD"
    runner = trainer(strategy(), max_steps=-1, max_epochs=1, limit_val_batches=0)
    if resumes:
        runner.fit(second, batches(8, 2), ckpt_path=path)
    else:
        runner.validate(second, batches(4, 4), ckpt_path=path, verbose=False)
    return weights(first), weights(second)


@pytest.mark.parametrize(("resumes", "ranks"), [(False, 1), (True, 1), (True, 2)])
def test_edits_of_a_load_reach_the_model(tmp_path: Path, resumes: bool, ranks: int) -> None:
    path = str(tmp_path / "plain.ckpt")
    for saved, found in run(_loaded, ranks, path, "nothing", resumes):
        assert found == saved
    for saved, found in run(_loaded, ranks, path, "values", resumes):
        assert found == [saved[0], [0.0] * 7, saved[2], [value + 1 for value in saved[3]]]
    for saved, found in run(_loaded, ranks, path, "replaced", resumes):
        assert found == [[value * 2 for value in values] for values in saved]


def test_tensors_that_a_hook_removes_are_missed_unless_loading_is_loose(tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    (saved, found) = run(_loaded, 1, path, "loose", False)[0]
    assert found[1:] == saved[1:]
    assert found[0] == weights(Plain())[0] or torch.tensor(found[0]).allclose(torch.tensor(weights(Plain())[0]))
    with pytest.raises(AssertionError, match=r"\['net\.0\.weight'\] is missing, none is not in the model"):
        run(_loaded, 1, path, "lost", False)


class Split(Wide):
    """Writes an entry of its own; with ``edits``, it also replaces a tensor that is split over ranks."""

    edits = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 3
        if self.edits:
            checkpoint["state_dict"]["net.0.weight"] = torch.zeros(1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == 3
        with pytest.raises(ConfigurationError, match="each rank reads only its part of the model"):
            checkpoint["state_dict"]["net.0.weight"]


def _parts(path: str) -> None:
    def how() -> MegatronStrategy:
        return strategy(tensor_parallel=2, plan=ParallelizePlan({"net.0": Column(), "net.3": Row()}))

    module = Split(0)
    runner = fit(module, batches(8, 2), how())
    runner.save_checkpoint(path)
    trainer(how(), max_steps=-1, max_epochs=2, limit_val_batches=0).fit(Split(0), batches(8, 2), ckpt_path=path)
    module.edits = True
    with pytest.raises(ConfigurationError, match=r"net\.0\.weight.*holds only its part of the model.*tp"):
        runner.save_checkpoint(path)


def test_parts_of_a_model_are_not_edited(tmp_path: Path) -> None:
    run(_parts, 2, str(tmp_path / "parts.ckpt"))
