"""Parts that a run froze are trained by the next one, which begins with its weights, also in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.errors import CheckpointError
from megalight.strategies import MegatronStrategy
from tests.models.test_vlm_strategy import SP, WithData
from tests.models.vlm_samples import CONFIG
from tests.strategies.test_checkpoint_formats import contents
from tests.strategies.training import ADAM, SEED, Losses
from tests.support.environment import trainer
from tests.support.workers import run

ALL_BUT_THE_PROJECTOR = ("*.tower.*", "model.layers.*", "model.head.*", "model.embed.word.*")


def _stage(
    steps: int,
    save: str,
    freeze: tuple[str, ...] = (),
    *,
    weights: str | None = None,
    resume: str | None = None,
    layout: dict[str, Any] | None = None,
) -> list[float] | str:
    """Train, save, and return losses, or why it is refused."""
    module = WithData(CONFIG, optimizer=ADAM, seed=SEED, freeze=freeze, weights=weights)
    losses = Losses()
    runner = trainer(
        MegatronStrategy(**(layout or {})), callbacks=[losses], max_steps=steps, use_distributed_sampler=False
    )
    try:
        runner.fit(module, ckpt_path=resume)
    except CheckpointError as error:
        return str(error)
    runner.save_checkpoint(save)
    return losses.losses


def stage(ranks: int, *arguments: Any, **options: Any) -> Any:
    return run(_named, ranks, arguments, options)[0]


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> list[float] | str:
    return _stage(*arguments, **options)


def changed(before: Path, after: Path) -> set[str]:
    """The parts of the model whose weights are others."""
    old, new = contents(before), contents(after)
    names = {name for name in old if name.startswith("model.") and not torch.equal(old[name], new[name])}
    return {next(part for part in ("tower", "projector", "word", "layers", "head") if f".{part}." in n) for n in names}


def test_stages_follow_each_other(tmp_path: Path) -> None:
    first, second, third, alone = (tmp_path / name for name in ("first", "second", "third", "alone"))
    stage(1, 2, str(first), ALL_BUT_THE_PROJECTOR)
    told = stage(1, 3, str(second), ("*.tower.*",), resume=str(first))
    assert "optimizer tensors that this run needs" in told
    assert "Freeze the same ones, or start another run with its weights alone (--model.weights)." in told
    expected = stage(1, 1, str(alone), ("*.tower.*",), weights=str(first))
    found = stage(2, 1, str(second), ("*.tower.*",), weights=str(first), layout=SP)
    assert found == pytest.approx(expected, rel=1e-9)
    assert changed(first, second) == {"projector", "word", "layers", "head"}
    # A run that goes on may freeze more, in another layout again.
    frozen = ("*.tower.*", "*.projector.*")
    assert len(stage(1, 2, str(third), frozen, resume=str(second))) == 1
    assert changed(second, third) == {"word", "layers", "head"}
