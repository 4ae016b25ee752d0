"""The summary counts the whole model, whatever a rank holds of it."""

import re
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.callbacks import WholeModelSummary
from megalight.callbacks.run_record import render
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from megalight.types import TokenBatch
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.regression import Plain, batches
from tests.strategies.regression import fit as fit_plain
from tests.strategies.training import fit
from tests.support.workers import run

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
    deeper = [line.split()[0] for line in render(module, SERIAL, 2).splitlines()[1:]]
    assert deeper == ["embed", "embed.word", "layers", "layers.0", "layers.1", "head", "head.norm", "head.output_layer"]
    everything = [line.split()[0] for line in render(module, SERIAL, -1).splitlines()[1:]]
    assert {*deeper, "layers.1.mlp"} < {*everything}


def test_a_part_of_the_model_is_told_as_such():
    module = GPTModule(CONFIG)
    module.configure_model()
    module.model.embed = nn.Identity()
    text = render(module, SERIAL)
    assert f"GPTModule: {whole() / 1000:.1f} K parameters" in text
    assert f"rank 0 holds {(whole() - 1616) / 1000:.1f} K" in text


class Runs(Tiny):
    """It has a forward, which multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(5, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(nn.functional.one_hot(tokens, 5).float())

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch.tokens).flatten(0, 1), batch.labels.flatten())


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
    assert {"_summary", "summarize"}.isdisjoint(vars(kept))
    return Kept.totals


def test_lightnings_own_summary_counts_the_whole_too():
    assert run(_totals, 2) == [[whole()] * 2, []]


class Divided(Plain):
    """A plain module that a plan divides; one layer is shared, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        self.again = self.net
        self.net[0].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))
        self.example_input_array = torch.ones(4, 5, dtype=torch.float64)

    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args) + 0 * self.scale.sum()


def _plain(way: str) -> tuple[dict[str, Any], list[str], str]:
    told: dict[str, Any] = {}

    class Told(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total: int, trainable: int, *args: Any, **kwargs: Any) -> None:
            told.update({**dict(summary_data), "total": total, "trainable": trainable, "flops": kwargs["total_flops"]})

    plan = ParallelizePlan({"net.0": Column(), "net.2": Row()})
    strategy: MegatronStrategy = {
        "data": lambda: MegatronStrategy(),
        "tensor": lambda: MegatronStrategy(tensor_parallel=2, plan=plan),
        "shards": lambda: MegatronFSDPStrategy(auto_wrap_policy={nn.Linear}),
    }[way]()
    module = Divided()
    module.reads_weights = False
    shown: list[str] = []
    module.on_train_start = lambda: shown.append(render(module, module.trainer))  # type: ignore[method-assign]
    fit_plain(module, batches(8, 4), strategy, callbacks=[Told(max_depth=-1)])
    return told, [type(part).__name__ for part in module.net], shown[0]


@pytest.mark.parametrize("way", ["data", "tensor", "shards"])
def test_a_plain_module_is_counted_whole(way: str) -> None:
    (told, kinds, shown), _ = run(_plain, 2, way)
    assert told["Name"][:4] == ["net", "net.0", "net.1", "net.2"]
    assert told["Type"][:4] == ["Sequential", "Linear", "Tanh", "Linear"]
    assert [count.strip() for count in told["Params"]] == ["66", "48", "0", "18"]
    assert (told["total"], told["trainable"]) == (69, 61)
    assert shown.startswith("Divided: 69 parameters, 61 trainable")
    assert "net  Sequential        66" in shown
    # A rank that lacks a part cannot run the example alone. Sharded parameters are gathered where they are used.
    assert told["flops"] == (0 if way == "tensor" else 2 * 4 * (5 * 8 + 8 * 2))
    assert ("rank 0 holds 37 (2 ranks: tp2)" in shown) == (way == "tensor")
    assert (kinds[0] == "Linear") == (way != "tensor")


@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
def test_flops_are_shown_only_where_they_were_counted(kind, capsys, caplog):
    for example in (None, torch.zeros(1, 8, dtype=torch.long)):
        module = Runs()
        module.example_input_array = example
        caplog.clear()
        capsys.readouterr()
        with caplog.at_level("INFO", logger="lightning.pytorch.callbacks.model_summary"):
            tiny_trainer(callbacks=[kind()], strategy=MegatronStrategy(), max_steps=1, log_every_n_steps=1).fit(module)
        text = capsys.readouterr().out + caplog.text
        assert ("FLOPs" in text, "otal FLOPs" in text.replace("Flops", "FLOPs")) == (example is not None,) * 2
        for line in (r"25 +Trainable params|Trainable params: 25", r"0 +Non-trainable|Non-trainable params: 0"):
            assert re.search(line, text)
        assert re.search(r"Linear .* 25 .* train", text)
        assert "eval mode" in text


def test_metrics_of_one_run_are_no_layers_of_the_next():
    class Layers(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *args: Any, **kwargs: Any) -> None:
            names.append(dict(summary_data)["Name"])

    names: list[list[str]] = []
    ids = torch.randint(101, (2, 9))
    loader = DataLoader([TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(2, 8))], batch_size=None)
    module = GPTModule(CONFIG)
    for _ in range(2):
        trainer = tiny_trainer(
            callbacks=[Layers()], strategy=MegatronStrategy(), max_steps=1, log_every_n_steps=1, limit_val_batches=1
        )
        trainer.fit(module, loader, loader)
        assert trainer.callback_metrics["val_loss"] > 0
    assert trainer.validate(module, loader, verbose=False)[0]["val_loss"] > 0
    assert names == [["model"]] * 2
    assert [name for name, _ in module.named_children()] == ["model"]


def test_frozen_parameters_are_not_trainable():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    module[0].requires_grad_(False)
    assert "Sequential: 15 parameters, 9 trainable" in render(module, SERIAL)


@pytest.mark.parametrize("depth", [0, 1])
def test_it_prints_when_fit_starts(depth, capsys):
    summary = WholeModelSummary(max_depth=depth)
    tiny_trainer(callbacks=[summary], strategy=MegatronStrategy(), max_steps=1, log_every_n_steps=1).fit(Tiny())
    assert ("Tiny: 25 parameters, all trainable\n  table  Embedding" in capsys.readouterr().out) == (depth == 1)
