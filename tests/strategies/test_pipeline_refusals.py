"""What cannot be cut over pipeline and context ranks: said before anything starts, or by the stage that meets it."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.gpt.module import GPTModule
from megalight.models.module import Carry, MegalightModule
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy, PipelineOptions
from megalight.types import Loss
from tests.strategies.regression import Plain
from tests.strategies.toy import Toy, ToyModule
from tests.strategies.training import ADAM, BASE, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}


class OwnStep(ToyModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        return None


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(4)})


class Listed(Headless):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def of(build: Callable[[], nn.Module]) -> ToyModule:
    module = ToyModule()
    module.build_model = build  # type: ignore[method-assign]
    return module


def without(method: str) -> ToyModule:
    return type("Incomplete", (ToyModule,), {method: getattr(MegalightModule, method)})()


class Rows(pl.LightningDataModule):
    sequence_length = 5

    def train_dataloader(self) -> Any:
        raise AssertionError("data is asked for")


FULL_3 = RecomputeOptions(granularity="full", num_layers=3)
BEFORE: dict[str, tuple[Callable[[], Any], int, dict[str, Any], type[Exception], str]] = {
    "plain, pipeline": (Plain, 2, PP, ConfigurationError, r"Plain is a plain LightningModule, and pp=2 cut .*Derive"),
    "plain, context": (Plain, 2, CP, ConfigurationError, r"Plain is a plain LightningModule, and cp=2 cut"),
    **{
        f"no {method}": (
            functools.partial(without, method), 2, PP, ConfigurationError,
            rf"Incomplete does not define {method}, which pp=2 need.*Write",
        )
        for method in ("forward_step", "loss_step", "loss_tokens")
    },
    "own step": (OwnStep, 4, {**PP, **CP}, ConfigurationError, r"OwnStep defines validation_step.*pp=2 and cp=2"),
    "a step without the model": (
        lambda: type("Short", (ToyModule,), {"forward_step": lambda self, batch, carry=None: carry})(), 2, PP,
        ConfigurationError, r"Short\.forward_step\(batch, carry=None\) is called as forward_step\(model",
    ),
    "no head": (lambda: of(Headless), 2, PP, LayoutError, r"Headless has no attribute 'head'.*embed \| layers"),
    "a list of layers": (lambda: of(Listed), 2, PP, LayoutError, r"Listed\.layers is a ModuleList.*keyed '0'"),
    "layers": (
        lambda: ToyModule(5), 2, PP, LayoutError, r"5 layers do not divide evenly over 2 stages",
    ),
    "layers in a string": (
        ToyModule, 2, {**PP, "pipeline_layout": "Et|ttL"}, LayoutError, r"(?s)layout 'Et\|ttL'.*3.*4.*rank 1",
    ),
    "layers in a string without a pipeline": (
        ToyModule, 2, {"pipeline_layout": "EttL"}, LayoutError, r"layout 'EttL'.* 2 layers 't', but the model has 4",
    ),
    "a string without a pipeline for what has no layers": (
        lambda: of(Headless), 2, {"pipeline_layout": "EttttL"}, LayoutError, r"Headless has no attribute 'head'",
    ),
    "a schedule without a backward": (
        ToyModule, 2, {**PP, "pipeline": PipelineOptions(schedule="forward_only")}, ConfigurationError,  # type: ignore[arg-type]
        r"'forward_only' has no backward.*evaluation uses it by itself",
    ),
    "uneven layers": (
        ToyModule, 2, {**PP, "pipeline": PipelineOptions(first_layers=4)}, LayoutError, r"4 layers with first=4",
    ),
    "recompute in a short chunk": (
        ToyModule, 2, {**PP, "pipeline_layout": "Ettt|tL", "recompute": FULL_3}, ConfigurationError,
        r"recompute\.num_layers=3, but a model chunk has 1 layers \(layers\.3 to layers\.3\)",
    ),
    "recompute in a chunk without layers": (
        ToyModule, 2,
        {**PP, "pipeline_layout": "E|ttttL", "recompute": RecomputeOptions(granularity="full", num_layers=5)},
        ConfigurationError, r"recompute\.num_layers=5, but a model chunk has 4 layers",
    ),
    "short sequences": (
        lambda: GPTModule(BASE), 4, {"context_parallel": 4}, DataError,
        r"5 tokens, but context parallelism over cp=4 ranks cuts each into 2 x cp = 8 chunks",
    ),
    "heads": (
        lambda: GPTModule(BASE), 4, {"context_parallel": 4, "context": ContextOptions("all_to_all_ring", inner=3)},
        LayoutError, r"'all_to_all_ring' .*cannot serve ContextSpec\(cp=4, inner=3",
    ),
    "a model without attention": (ToyModule, 2, CP, LayoutError, r"ContextRegion\(\) for no attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE.values(), ids=BEFORE.keys())
def test_refused_before_a_process_starts(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, ranks, options, error, message = case
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(error, match=message):
        pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=MegatronStrategy(**options),
            logger=False,
            enable_checkpointing=False,
            max_steps=1,
        ).fit(make(), datamodule=Rows())
    assert not dist.is_initialized()
    assert "WORLD_SIZE" not in os.environ


def _on_one_device(text: str) -> None:
    strategy = MegatronStrategy(pipeline_layout=text)
    trainer(strategy, max_steps=1, use_distributed_sampler=False, limit_val_batches=0).fit(ToyModule())


def test_a_layout_string_for_one_device_must_fit_the_model() -> None:
    run(_on_one_device, 1, "EttttL")
    with pytest.raises(AssertionError, match=r"layout 'EtttttL'.* 5 layers 't', but the model has 4: 1 too many"):
        run(_on_one_device, 1, "EtttttL")


class Wrong(ToyModule):
    """Does something wrong on one stage, from the second step on."""

    def __init__(self, what: str, stage: int = 0, **attributes: Any) -> None:
        super().__init__(num_layers=4, rows=4)
        self.what, self.stage = what, stage
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry | None = None) -> Carry:
        here = self.trainer.strategy.mesh.rank("pp") == self.stage and self.trainer.global_step == 1
        if self.what == "layer" and here:
            model.layers["2"].forward = lambda hidden: None
        if self.what == "more" and carry is not None:
            carry = {name: value for name, value in carry.items() if name != "more"}
        output = super().forward_step(model, batch, carry)
        if self.what == "more" and here:
            output["more"] = output["hidden"] * 2
        if self.what == "detached" and here:
            output["penalty"] = output["penalty"].detach()
        if self.what == "tensor" and here:
            return output["hidden"]  # type: ignore[return-value]
        return {**output, "hidden": None} if self.what == "none" and here else output  # type: ignore[dict-item]

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        late = self.trainer.global_step == 1
        if self.what == "loss":
            return loss.sum  # type: ignore[return-value]
        return Loss(loss.sum, loss.aux_losses, {}) if self.what == "metrics" and late else loss

    def loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        count = super().loss_tokens(batch)
        return float(count) if self.what == "count" else count  # type: ignore[return-value]


def _step(what: str, stage: int, options: dict[str, Any]) -> float:
    runner = trainer(
        MegatronStrategy(pipeline_parallel=2, micro_batch_size=1),
        max_steps=2,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(Wrong(what, stage, **options))
    return float(runner.callback_metrics["train_loss"])


MIDWAY = {
    "tensor": (
        0,
        r"TypeError: forward_step returned Tensor on stage 0 \(embed, layers 0 to 1\); it must return a dict",
    ),
    "none": (1, r"TypeError: forward_step returned 'hidden': NoneType on stage 1 \(layers 2 to 3, head\)"),
    "more": (
        0,
        r"(?s)forward_step returned \(.*more \[1, 8\] float64 with a gradient\) on stage 0 and .*varying_carry",
    ),
    "detached": (0, r"returned \([^(]*penalty \[\] float64, .*and earlier.*penalty \[\] float64 with a gradient"),
    "metrics": (1, r"loss_step returned \['loss'\] and earlier \['error', 'loss'\]"),
    "loss": (1, r"Wrong\.loss_step returned Tensor; return megalight\.types\.Loss\(sum="),
    "layer": (1, r"(?s)TypeError.*pipeline: forward of micro-batch 0 on stage 1 \(layers 2 to 3, head\) of 2"),
}


@pytest.mark.parametrize(("what", "stage", "message"), [(k, *v) for k, v in MIDWAY.items()], ids=MIDWAY.keys())
def test_the_stage_that_meets_it_says_so(what: str, stage: int, message: str) -> None:
    with pytest.raises(AssertionError, match=rf"rank {stage} of 2 failed") as error:
        run(_step, 2, what, stage, {})
    assert re.search(message, str(error.value)), str(error.value)


def test_a_count_on_the_host_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"Wrong\.loss_tokens returned float; return a 0-dim tensor"):
        run(_step, 2, "count", 0, {})


def test_a_carry_may_vary_where_the_module_says_so() -> None:
    found = run(_step, 2, "more", 0, {"varying_carry": True})
    assert found == run(_step, 2, "nothing", 0, {})


class Sparse(ToyModule):
    """Nothing is trained but the head; an optimizer of a list of parameters, or of a group."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped

    def build_model(self) -> nn.Module:
        model = Toy(4)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
        return model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW([{"params": trained}] if self.grouped else trained)


def _sparse(pp: int, vpp: int, grouped: bool) -> float:
    strategy = MegatronStrategy(pipeline_parallel=pp, virtual_pipeline=vpp, micro_batch_size=1)
    runner = trainer(strategy, max_steps=2, use_distributed_sampler=False, limit_val_batches=0)
    runner.fit(Sparse(grouped))
    return float(runner.callback_metrics["train_loss"])


def test_a_stage_that_trains_nothing_needs_a_group() -> None:
    message = (
        r"no trainable parameters on stage 0 \(embed, layers 0 to 0\) and stage 2 \(layers 2 to 2\)\. Pass .*group"
    )
    with pytest.raises(AssertionError, match=r"rank 0 of 2 failed") as error:
        run(_sparse, 2, 2, 2, False)
    assert re.search(message, str(error.value)), str(error.value)
    assert run(_sparse, 2, 2, 2, True) == pytest.approx(run(_sparse, 1, 1, 1, False) * 2, rel=1e-9)


class ByName(WithData):
    """Groups by local names: a tied head has that of the embedding on one stage only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        embedded, others = [], []
        for name, parameter in self.named_parameters():
            (embedded if "embed" in name else others).append(parameter)
        return torch.optim.AdamW([{"params": others}, {"params": embedded, "lr": 1e-4}])


def _by_name() -> None:
    strategy = MegatronStrategy(pipeline_parallel=2)
    runner = trainer(strategy, max_steps=1, use_distributed_sampler=False, limit_val_batches=0)
    runner.fit(ByName(CONFIGS["tied"]))


def test_a_tied_weight_has_one_group_on_all_stages() -> None:
    message = (
        r"model\.embed\.word\.weight into different parameter groups: 1 on pipeline rank 0, 0 on pipeline rank 1\."
    )
    with pytest.raises(AssertionError, match=message):
        run(_by_name, 2)


class Shaky(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        raise ArithmeticError("too much")


class InLayer(ToyModule):
    def build_model(self) -> nn.Module:
        model = Toy(4)
        model.layers["3"] = Shaky()
        return model


def _in_layer() -> None:
    strategy = MegatronStrategy(pipeline_parallel=2)
    trainer(strategy, use_distributed_sampler=False, limit_val_batches=0).fit(InLayer())


def test_the_layer_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"too much\n\(pipeline: forward of micro-batch 0 in layers\.3 on stage 1 "
    ):
        run(_in_layer, 2)


def _warnings(room: str, module: Callable[[], MegalightModule], **options: Any) -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(f"megalight.parallel.{room}")
    log.addHandler(handler)
    try:
        strategy = MegatronStrategy(pipeline_parallel=2, **options)
        trainer(strategy, max_steps=2, use_distributed_sampler=False, limit_val_batches=0).fit(module())
    finally:
        log.removeHandler(handler)
    return told


def test_too_few_micro_batches_are_told_once_by_the_first_rank() -> None:
    first, second = run(_warnings, 2, "pipeline.timeline", ToyModule)
    assert len(first) == 1
    assert "1 micro-batch in a pipeline of 2 ranks: the bubble is 100% of the work" in first[0]
    assert second == []
    assert run(functools.partial(_warnings, micro_batch_size=1), 2, "pipeline.timeline", ToyModule) == [[], []]


def _own_layers() -> MegalightModule:
    module = WithData(replace(BASE, num_layers=2), optimizer=ADAM, seed=SEED)
    module.steps, module.packed = 2, False
    return module


@pytest.mark.parametrize(
    ("module", "schedule", "told"),
    [
        (
            ToyModule,
            "zero_bubble",
            r"6 linear layers compute .* at once.*: embed, layers\.0, layers\.1 \.\.\.; use mega",
        ),
        (
            functools.partial(Sparse, True),
            "zero_bubble",
            r"1 linear layer computes .*: head; use megalight\.nn\.Linear",
        ),
        (ToyModule, "1f1b", None),
        (_own_layers, "zero_bubble", None),
    ],
)
def test_layers_that_defer_nothing_are_told_once(module: Any, schedule: Any, told: str | None) -> None:
    options = {"micro_batch_size": 1, "pipeline": PipelineOptions(schedule=schedule)}
    first, second = run(functools.partial(_warnings, **options), 2, "apply", module)
    assert second == []
    assert len(first) == (told is not None)
    assert all(re.search(str(told), text) for text in first), first
