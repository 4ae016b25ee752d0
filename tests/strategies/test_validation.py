"""What cannot work is refused, with the value, the rule and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from megalight.errors import ConfigurationError, LayoutError, MegalightError
from megalight.models.module import MegalightModule
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.strategies import DataParallelOptions, MegatronStrategy, PipelineOptions
from megalight.strategies.setup import check_plain
from megalight.types import Loss
from tests.parallel.tiny_transformers import tiny
from tests.strategies.regression import Plain, batches, fit, strategy
from tests.support.environment import trainer
from tests.support.options import data_parallel
from tests.support.workers import run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel=0; it must be at least 1."),
        ({"virtual_pipeline": 2}, "vpp=2 chunks per rank with pp=1; there is no pipeline to interleave"),
        ({"pipeline_layout": "Et|L"}, "2 stages, but pp is 1. Increase pp, or write one stage"),
        (
            {"pipeline": PipelineOptions(first_layers=0)},
            "first_layers=0 with pp=1; there is no pipeline to divide. Raise",
        ),
        ({"pipeline": PipelineOptions(last_layers=2)}, "last_layers=2 with pp=1; there is no pipeline to divide"),
        (
            {"pipeline": PipelineOptions(count_embedding=True, count_loss=True)},
            "count_embedding=True, count_loss=True with pp=1; there is no pipeline to divide",
        ),
        ({"pipeline_parallel": 2, "pipeline_layout": "Et|t|L"}, "3 stages, which is no multiple of pp=2. Write 2 or 4"),
        ({"pipeline_parallel": 2, "pipeline_layout": "Et|xL"}, "Et|xL"),
        ({"context_parallel": 0}, "context_parallel=0; it must be at least 1."),
        ({"expert_parallel": 0}, "expert_parallel=0; it must be at least 1"),
        ({"expert_tensor_parallel": 0}, "expert_tensor_parallel=0; it must be at least 1"),
        ({"tensor_parallel": 0}, "tensor_parallel=0; it must be at least 1."),
        ({"sequence_parallel": True}, "Set tensor_parallel, or leave sequence_parallel off"),
        (
            {"pipeline": PipelineOptions(schedule="zero_bubble"), "expert": ExpertOptions(shared_expert_overlap=True)},
            "shared_expert_overlap=True with pipeline.schedule='zero_bubble'",
        ),
        (
            {"pipeline": PipelineOptions(schedule="combined"), "expert": ExpertOptions("all_gather")},
            "pipeline.schedule='combined' with ExpertOptions(dispatcher='all_gather')",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size=0; it must be at least 1."),
        ({"sigterm_every_n_steps": 0}, "sigterm_every_n_steps=0; it must be at least 1."),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        MegatronStrategy(**options)


def test_pipeline_options() -> None:
    with pytest.raises(LayoutError, match="'1f1b' cannot run this: it runs one chunk per rank, not vpp=2"):
        MegatronStrategy(pipeline_parallel=2, virtual_pipeline=2, pipeline=PipelineOptions(schedule="1f1b"))
    with pytest.raises(ConfigurationError, match="leave first_layers, last_layers"):
        MegatronStrategy(pipeline_parallel=2, pipeline_layout="Et|tL", pipeline=PipelineOptions(first_layers=1))
    with pytest.raises(ConfigurationError, match="leave count_embedding and count_loss out"):
        MegatronStrategy(pipeline_parallel=2, pipeline=PipelineOptions(first_layers=1, count_loss=True))


def test_data_parallel_options() -> None:
    with pytest.raises(ConfigurationError, match=r"level='full'; it must be"):
        DataParallelOptions(level="full")  # type: ignore[arg-type]
    for name in ("bucket_size", "advanced.edge_bucket_size", "advanced.max_ctas"):
        with pytest.raises(ConfigurationError, match=rf"data_parallel\.{re.escape(name)}=0; it must be at least 1"):
            data_parallel(**{name.removeprefix("advanced."): 0})


def test_checkpoint_plugins() -> None:
    with pytest.raises(ConfigurationError, match=r"TorchCheckpointIO cannot be used.*Remove the CheckpointIO plugin"):
        MegatronStrategy(checkpoint_io=TorchCheckpointIO())


def test_checkpoint_plugins_of_the_trainer() -> None:
    with pytest.raises(ConfigurationError, match="TorchCheckpointIO cannot be used"):
        pl.Trainer(strategy=MegatronStrategy(), accelerator="cpu", plugins=[TorchCheckpointIO()], logger=False)


def refused(act: Any, *args: Any) -> str:
    """The message with which both ranks refuse."""
    first, second = run(_message, 2, act, *args)
    assert first == second
    return str(first)


def _message(act: Any, *args: Any) -> str:
    try:
        act(*args)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Plain):
    def configure_optimizers(self) -> Any:
        first, second = self.net[0], self.net[2]
        return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)]


class Quoting(Plain):
    """Fails with the words of Lightning's and torch's own errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def configure_optimizers(self) -> Any:
        raise self.error


def _raised(error: Exception) -> tuple[str, str, bool]:
    module = Quoting(error)
    with pytest.raises(Exception, match=str(error)) as caught:
        fit(module, batches(4, 4))
    return type(caught.value).__name__, str(caught.value), "configure_optimizers" in vars(module)


@pytest.mark.parametrize(
    "error", [RuntimeError("multiple optimizers are not supported"), ValueError("got an empty parameter list")]
)
def test_errors_of_configure_optimizers_are_the_users_own(error: Exception) -> None:
    assert run(_raised, 1, error) == [(type(error).__name__, str(error), False)]


class Foreign(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


class Lossless(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Detached(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx).detach()}


class Newton(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Own(Plain):
    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(swa_lrs=0.1)]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, r"Manual uses manual optimization.*every rank, but data_parallel.level='optim' divides them\. Pass"),
        (Two, r"multiple optimizers is only supported with manual optimization"),
        (
            Foreign,
            r"a parameter of shape \(3,\) that is not part of Foreign; return an optimizer over self\.parameters",
        ),
        (Lossless, r"Lossless\.training_step returned None, which skips a batch only in a single process: return"),
        (Detached, r"Detached\.training_step returned a loss that does not require gradients: compute it from"),
        (
            Newton,
            r"LBFGS is not known to update each element of net\.0\.weight only.*"
            r"Pass data_parallel=DataParallelOptions\(level='no_shard'\)",
        ),
        (Own, r"StochasticWeightAveraging averages whole parameters.*, or use megalight\.callbacks\.EMA\."),
    ],
)
def test_modules(module: type[Plain], message: str) -> None:
    assert re.search(message, refused(_fit, module), re.DOTALL)


def _fit(module: type[Plain]) -> None:
    fit(module(), batches(8, 2))


def test_manual_optimization_may_be_evaluated() -> None:
    run(_validate_manual, 1)


def _validate_manual() -> None:
    trainer(strategy()).validate(Manual(), batches(8, 2), verbose=False)


@pytest.mark.parametrize("callback", [WeightAveraging, StochasticWeightAveraging])
def test_averaging_callbacks(callback: type[pl.Callback]) -> None:
    message = refused(_with_callback, callback)
    assert f"{callback.__name__} averages whole parameters" in message
    assert "Pass data_parallel=DataParallelOptions(level='no_shard')" in message


def _with_callback(callback: Any) -> None:
    fit(
        Plain(),
        batches(8, 2),
        callbacks=[callback(swa_lrs=0.1) if callback is StochasticWeightAveraging else callback()],
    )


def test_classes_of_the_other_lightning_package() -> None:
    message = refused(_foreign_callback)
    assert "the callback LearningRateMonitor comes from pytorch_lightning" in message
    assert "Use lightning.pytorch throughout" in message


def _foreign_callback() -> None:
    fit(Plain(), batches(8, 2), callbacks=[pytorch_lightning.callbacks.LearningRateMonitor()])


def test_precisions() -> None:
    message = refused(_precision)
    assert "precision='16-true' is not supported by MegatronStrategy" in message
    assert "32-true, 64-true, bf16-true, bf16-mixed" in message


def _precision() -> None:
    trainer(strategy(), precision="16-true")


def test_precision_plugins_of_others() -> None:
    message = refused(_precision_plugin)
    assert "the precision plugin Odd does not work under MegatronStrategy" in message


class Odd(pl.plugins.MixedPrecision):
    pass


def _precision_plugin() -> None:
    MegatronStrategy(precision_plugin=Odd("bf16-mixed", "cpu"))


@pytest.mark.parametrize(("cls", "where"), [(Plain, "Before training"), (MegalightModule, "In build_model")])
def test_compiled_modules(cls: type[pl.LightningModule], where: str) -> None:
    ((message, own),) = run(_compiled, 1, cls)
    assert "MegatronStrategy divides them into passes of its own" in message
    assert f"{where}, compile its layers, layer.forward = torch.compile(layer.forward)" in message
    assert own, "the module itself cannot be passed now, as the message says"


def _compiled(cls: type[pl.LightningModule]) -> tuple[str, bool]:
    module = cls()
    message = _message(fit, torch.compile(module), batches(8, 2))
    return message, module._compiler_ctx is None and not hasattr(module.training_step, "get_compiler_config")


def test_backward_that_nobody_may_call() -> None:
    with pytest.raises(ConfigurationError, match="whose training_step has done it already"):
        MegatronStrategy().backward(torch.zeros(()), None)


def test_tensor_parallelism_needs_a_plan() -> None:
    assert "tensor_parallel=2, but there is no plan for Plain: nothing would be split" in refused(_no_plan)


def _no_plan() -> None:
    fit(Plain(), batches(8, 2), MegatronStrategy(tensor_parallel=2))


class Planned(MegalightModule):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def plan(self) -> ParallelizePlan:  # type: ignore[override]
        return ParallelizePlan()


def _planned() -> None:
    trainer(MegatronStrategy()).fit(Planned(), batches(8, 2))


def test_a_plan_takes_the_model() -> None:
    message = refused(_planned)
    assert "Planned.plan() is called as plan(model), which it does not take" in message
    assert "write def plan(self, model)" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sum": 1.0}, "'sum' is a float; it must be a tensor"),
        ({"aux_losses": {"a": 1}}, "'a' is a int; it must be a tensor"),
        ({"metrics": {"a": torch.zeros(())}}, r"the metric 'a' is tensor\(0\.\); it must be \(sum, count\)"),
        (
            {"metrics": {"a": (1.0, torch.ones(()))}},
            r"the metric 'a' is \(1\.0, tensor\(1\.\)\); it must be \(sum, count\)",
        ),
    ],
)
def test_losses_are_tensors_and_metrics_are_pairs(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Loss(**{"sum": torch.zeros(()), **values})


class Wordy(Plain):
    """A batch that cannot be cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def transfer_batch_to_device(self, batch: Any, *args: Any) -> Any:
        return object()


def test_batches_that_cannot_be_cut() -> None:
    assert "cannot cut this batch, because it is not certain what its samples are" in refused(_wordy)


def _wordy() -> None:
    fit(Wordy(), batches(8, 2), strategy(micro_batch_size=1))


class SavesEarly(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.save_checkpoint("early")


def test_saving_before_setup() -> None:
    message = refused(_saves_early)
    assert "early: the strategy is not set up" in message
    assert "Save from the hook on_fit_start on" in message


def _saves_early() -> None:
    fit(Plain(), batches(8, 2), strategy(), callbacks=[SavesEarly()])


def test_strategies_below_ours_are_told_of_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []
    monkeypatch.setattr(ParallelStrategy, "on_exception", lambda self, exception: told.append(exception))
    error = ValueError("of the user")
    MegatronStrategy().on_exception(error)
    assert told == [error]


def test_the_strategy_of_a_trainer_or_a_refusal():
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MegatronStrategy(), logger=False)
    assert MegatronStrategy.of(trainer) is trainer.strategy
    plain = pl.Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(ConfigurationError, match=r"SingleDeviceStrategy.*Trainer\(strategy=MegatronStrategy"):
        MegatronStrategy.of(plain)


class Holder(Plain):
    """A plain module around a model of ``transformers``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def _quantized() -> nn.Module:
    model = tiny("qwen3")
    model.is_quantized = True  # type: ignore[assignment]
    model.quantization_method = "bitsandbytes"  # type: ignore[assignment]
    return model


def _compiled_in_place() -> nn.Module:
    model = tiny("qwen3")
    model.compile()
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "compiled": (
        lambda: torch.compile(tiny("qwen3")),  # type: ignore[return-value]
        2,
        r"net is torch.compile\(Qwen3ForCausalLM\), and tp=2 divides what it compiled. Compile the layers instead",
    ),
    "quantized": (
        _quantized, 2, r"net \(Qwen3ForCausalLM\) is quantized \(bitsandbytes\), and tp=2 divides weights, not packed",
    ),
    "more ranks than heads": (lambda: tiny("qwen3"), 8, r"layers.0.self_attn has 4 heads, and tp=8 does not divide"),
    "odd widths": (
        lambda: tiny("qwen3", intermediate_size=47), 2, "gate_proj.weight consists of 47 units .*, and tp=2",
    ),
    "a wrong declaration": (
        lambda: tiny("doge"), 2, r"self_attn.dt_proj is declared rowwise, so that every rank has its 2 .* is wrong",
    ),
}  # fmt: skip
"""What is wrong -> the model, ranks along ``tp``, and the message."""


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_models_that_are_compiled_in_place_do_not_run_in_parts(axis: str) -> None:
    module, mesh = Holder(_compiled_in_place()), ParallelMesh(2, 0, **{axis: 2})
    with pytest.raises(ConfigurationError, match=rf"is compiled by net.compile\(\), and {axis}=2 runs it in parts"):
        check_plain(MegatronStrategy(), module, mesh)


@pytest.mark.parametrize("case", MODELS)
def test_models_of_transformers_are_refused_before_processes_start(case: str) -> None:
    build, ranks, message = MODELS[case]
    with pytest.raises(MegalightError, match=message):
        check_plain(MegatronStrategy(tensor_parallel=ranks), Holder(build()), ParallelMesh(ranks, 0, tp=ranks))
