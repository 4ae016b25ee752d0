"""The summary counts the whole model, whatever a rank holds of it."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from lightning.pytorch.callbacks import ModelSummary
from torch import nn

from megalight.callbacks import WholeModelSummary
from megalight.callbacks.summary import render
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.training import fit
from tests.workers import run

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=101, max_sequence_length=24)
SERIAL = SimpleNamespace(strategy=SimpleNamespace())


def whole() -> int:
    module = GPTModule(CONFIG)
    module.configure_model()
    return sum(parameter.numel() for parameter in module.parameters())


def test_parts_and_total():
    module = GPTModule(CONFIG)
    module.configure_model()
    lines = render(module, SERIAL).splitlines()
    assert lines[0] == f"GPTModule: {whole() / 1000:.1f} K parameters, all trainable"
    assert [line.split()[0] for line in lines[1:]] == ["embed", "layers", "head"]


def test_a_part_of_the_model_is_told_as_such():
    module = GPTModule(CONFIG)
    module.configure_model()
    module.model.embed = nn.Identity()
    text = render(module, SERIAL)
    assert f"GPTModule: {whole() / 1000:.1f} K parameters" in text
    assert f"rank 0 holds {(whole() - 1616) / 1000:.1f} K" in text


class Kept(ModelSummary):
    """Lightning's summary, which keeps its figure instead of printing it."""

    totals: ClassVar[list[int]] = []

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, *args: Any, **kwargs: Any) -> None:
        Kept.totals.append(total_parameters)


def _totals() -> list[int]:
    kept = Kept()
    for way in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        fit(CONFIG, steps=1, extra_callbacks=[kept], **way)
    assert "_summary" not in vars(kept)
    return Kept.totals


def test_lightnings_own_summary_counts_the_whole_too():
    assert run(_totals, 2) == [[whole()] * 2, []]


def test_frozen_parameters_are_not_trainable():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    module[0].requires_grad_(False)
    assert "Sequential: 15 parameters, 9 trainable" in render(module, SERIAL)


@pytest.mark.parametrize("depth", [0, 1])
def test_it_prints_when_fit_starts(depth, capsys):
    summary = WholeModelSummary(max_depth=depth)
    tiny_trainer(callbacks=[summary], strategy=MegatronStrategy(), max_steps=1, log_every_n_steps=1).fit(Tiny())
    assert ("Tiny: 25 parameters, all trainable\n  table  Embedding" in capsys.readouterr().out) == (depth == 1)
