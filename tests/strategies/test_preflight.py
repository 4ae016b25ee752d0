"""What is checked before processes start, is checked as it will run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

import megalight.parallel.apply
from megalight.errors import BackendError, ConfigurationError, LayoutError
from megalight.models.gpt import AttentionConfig, GPTBackendConfig, GPTConfig, MambaConfig, NormConfig
from megalight.models.gpt.module import GPTModule
from megalight.parallel.data_parallel import AdvancedDataParallelOptions
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies import DataParallelOptions, MegatronStrategy, launchers
from megalight.strategies.validation import check_tuners
from tests.strategies.regression import Plain, batches
from tests.strategies.toy import ToyModule
from tests.strategies.training import CONFIGS, WithData
from tests.support.workers import run

WHOLE = AttentionConfig(qk_norm=True, qk_norm_whole=True)
MAMBA = MambaConfig(num_heads=4, head_dim=8, state_size=4, num_groups=2)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32), ("64-true", torch.float64)]
)
def test_overlap_is_chosen_for_weights_of_the_run(
    monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    seen: list[set[torch.dtype]] = []
    checked = lambda model, device: seen.append({p.dtype for p in nn.Module.parameters(model)})  # noqa: E731
    monkeypatch.setattr(megalight.parallel.apply, "check_overlap", checked)
    strategy = MegatronStrategy(
        tensor_parallel=2, precision_plugin=MegatronPrecision(precision), parallel_devices=[torch.device("cpu")] * 2
    )
    launchers._split_on_meta(strategy, GPTModule(CONFIGS["gqa"]), *strategy.parts(2))
    assert seen == [{dtype}]


def norms(backend: str, **config: Any) -> GPTConfig:
    """A model whose norms use this backend."""
    return replace(CONFIGS["mha"], backends=GPTBackendConfig(norm=backend), **config)


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (norms("triton"), 1, r"layers\.0\.attention_norm: backend 'triton' of rms_norm cannot.*reference: can serve"),
        (norms("triton"), 2, r"layers\.0\.attention_norm: backend 'triton' of rms_norm cannot.*reference: can serve"),
        (norms("apex", norm=NormConfig(kind="layer")), 1, r"attention_norm: backend 'apex' of layer_norm cannot serve"),
        (norms("torch", norm=NormConfig(around_zero=True)), 1, "attention_norm: .*torch: needs a weight in the dtype"),
        (norms("torch", attention=WHOLE), 2, r"layers\.0\.attention\.q_norm: .*torch: norms whole rows, and these"),
        (
            norms("torch", layer_pattern="M*", mamba=MAMBA),
            1,
            r"layers\.0\.mamba\.norm: gated_norm has no backend 'torch'",
        ),
    ],
)
def test_a_norm_backend_that_cannot_serve_is_refused_before_the_first_step(
    config: GPTConfig, ranks: int, message: str
) -> None:
    """In setup, and before processes start if there are several."""
    module = WithData(config)
    runner = pl.Trainer(
        strategy=MegatronStrategy(tensor_parallel=ranks, start_method="popen"), accelerator="cpu", devices=ranks,
        precision="bf16-true", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(BackendError, match=message):
        runner.fit(module)


def of_ranks(ranks: int, callbacks: Any = (), **options: Any) -> pl.Trainer:
    """A Trainer that would start so many ranks."""
    return pl.Trainer(
        strategy=MegatronStrategy(start_method="popen", **options), accelerator="cpu", devices=ranks, max_steps=1,
        callbacks=list(callbacks), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def start_nothing(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


class Lazy(Plain):
    """Its first layer learns its size from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(7)


class LazyModel(ToyModule):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("module", [Lazy, LazyModel])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_without_a_shape_are_refused_before_there_are_ranks(
    module: type[pl.LightningModule], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", start_nothing)
    with pytest.raises(ConfigurationError, match=r"weight has no shape yet.*Run one batch through"):
        of_ranks(ranks).fit(module(), batches(8, 2), batches(8, 2))


def test_a_plain_module_without_a_plan_is_refused_before_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", start_nothing)
    with pytest.raises(
        ConfigurationError, match=r"^tensor_parallel=2, but there is no plan for Plain: nothing would be split"
    ):
        of_ranks(2, tensor_parallel=2).fit(Plain(), batches(8, 2))
    with pytest.raises(AssertionError, match="a process was started"):
        of_ranks(2, tensor_parallel=2, plan=ParallelizePlan({"net.0": Column(), "net.2": Row()})).fit(
            Plain(), batches(8, 2)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel": 2}, r"^ep=2 divides experts.*no module.*Add the rule, or set ep=1\."),
        (
            {"plan": ParallelizePlan({"net.o": Column()})},
            r"^pattern 'net\.o' of the plan matches no module of Plain.*Did you mean 'net",
        ),
    ],
)
def test_a_plan_that_does_not_fit_a_plain_module_is_refused_before_there_are_ranks(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", start_nothing)
    with pytest.raises(LayoutError, match=message):
        of_ranks(2, **options).fit(Plain(), batches(8, 2))


def test_pruning_without_whole_layers_is_refused_before_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", start_nothing)
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    for layout in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        with pytest.raises(ConfigurationError, match=r"before WithData has built its.*load_weights\(module, path"):
            of_ranks(2, [pruning], **layout).fit(WithData(CONFIGS["gqa"]))
    plan = ParallelizePlan({"net.0": Column(), "net.2": Row()})
    with pytest.raises(ConfigurationError, match=r"whole layers, but tp=2 divide those of Plain\. Leave these"):
        of_ranks(2, [pruning], tensor_parallel=2, plan=plan).fit(Plain(), batches(8, 2))


@pytest.mark.parametrize("averager", [EMAWeightAveraging(), StochasticWeightAveraging(0.1)])
def test_averaging_without_whole_weights_is_refused_before_there_are_ranks(
    averager: pl.Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", start_nothing)
    with pytest.raises(ConfigurationError, match=r"but ep=2 divide the model.*Use megalight\.callbacks\.EMA, or leave"):
        of_ranks(2, [averager], expert_parallel=2).fit(Plain(), batches(8, 2))
    with pytest.raises(ConfigurationError, match=r"level='no_shard'\), or use megalight\.callbacks\.EMA\."):
        of_ranks(2, [averager]).fit(Plain(), batches(8, 2))


class Rated(WithData):
    """Has what the finder of a rate changes."""

    lr = 0.1


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (BackboneFinetuning(), r"module\.backbone before WithData has built its.*write build_model in a subclass"),
        (LearningRateFinder(), r"to lr or learning_rate of WithData, which has none\. Pass.*update_attr=False"),
        (LearningRateFinder(attr_name="rate"), "to rate of WithData, which has none"),
        (BatchSizeFinder(), r"BatchSizeFinder changes batch_size of WithData.*there is none.*micro_batch_size='auto'"),
    ],
)
def test_tuners_that_find_nothing_to_change_are_refused(callback: pl.Callback, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        of_ranks(1, [callback]).fit(WithData(CONFIGS["gqa"]))


def test_a_search_that_would_change_the_global_batch_is_refused() -> None:
    data, finder = SimpleNamespace(global_batch_size=2), BatchSizeFinder(batch_arg_name="global_batch_size")
    with pytest.raises(ConfigurationError, match=r"would change global_batch_size.*micro_batch_size='auto'"):
        check_tuners(of_ranks(1, [finder]), WithData(CONFIGS["gqa"]), data, 1)


def test_tuners_that_find_what_they_change_are_not_refused() -> None:
    for finder, module in ((LearningRateFinder(), Rated), (LearningRateFinder(update_attr=False), WithData)):
        check_tuners(of_ranks(1, [finder]), module(CONFIGS["gqa"]), None, 1)
    module = WithData(CONFIGS["gqa"])
    module.save_hyperparameters({"learning_rate": 0.1})
    check_tuners(of_ranks(1, [LearningRateFinder()]), module, None, 1)
    check_tuners(of_ranks(1, [BatchSizeFinder()]), WithData(CONFIGS["gqa"]), SimpleNamespace(batch_size=2), 1)


def test_a_search_for_the_batch_in_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", start_nothing)
    with pytest.raises(ConfigurationError, match=r"in one process, and there are 2\. Remove it.*='auto'\)"):
        of_ranks(2, [BatchSizeFinder()]).fit(Plain(), batches(8, 2))


def _one_device_then_two() -> str:
    module = Plain().double()
    of_ranks(1).fit(module, batches(8, 2))
    two = MegatronStrategy(parallel_devices=[torch.device("cpu")] * 2, cluster_environment=LightningEnvironment())
    with pytest.raises(LayoutError) as caught:
        launchers.check(two, None, lambda model: None, module)
    return str(caught.value)


def test_a_plain_module_that_was_trained_on_one_device_is_refused_before_there_are_more() -> None:
    (message,) = run(_one_device_then_two, 1)
    assert message.startswith("Plain was split already (1 rank: one device) and cannot become another (2 ranks: dp2)")


def limited(ctas: int | None, device: str, backend: str | None = None) -> list[MegatronStrategy]:
    """Strategies with a limit on the SMs of communication: of data parallelism, and of tensor parallelism."""
    where = {"parallel_devices": [torch.device(device)] * 2, "process_group_backend": backend}
    where["cluster_environment"] = LightningEnvironment()
    return [
        MegatronStrategy(
            data_parallel=DataParallelOptions(advanced=AdvancedDataParallelOptions(max_ctas=ctas)), **where
        ),
        MegatronStrategy(tensor_parallel=2, tensor=TensorOptions(max_ctas=ctas), **where),
    ]


def look(strategy: MegatronStrategy) -> None:
    launchers.check(strategy, None, lambda model: None, GPTModule(CONFIGS["gqa"]))


@pytest.mark.parametrize(("device", "backend"), [("cpu", None), ("cuda", "gloo")])
def test_limits_on_sms_need_nccl(device: str, backend: str | None) -> None:
    carrier = backend or "gloo"
    for strategy, name in zip(limited(4, device, backend), ("data_parallel.advanced", "TensorOptions"), strict=True):
        message = rf"^{name}\.max_ctas=4 limits.*the backend here is {carrier}\. Remove it, or train on GPUs"
        with pytest.raises(ConfigurationError, match=message):
            look(strategy)


@pytest.mark.parametrize(
    ("ctas", "device", "backend"),
    [
        *[(None, "cpu", None), (4, "cuda", None), (4, "cuda", "nccl"), (None, "cuda", "gloo")],
        (4, "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_limits_on_sms_that_act(ctas: int | None, device: str, backend: str | None) -> None:
    for strategy in limited(ctas, device, backend):
        look(strategy)


def _limited_among_ranks() -> None:
    """The process group that is there already decides, whatever the strategy would have made."""
    for strategy in limited(4, "cuda", "nccl"):
        with pytest.raises(ConfigurationError, match="the backend here is gloo"):
            look(strategy)


def test_the_group_that_is_there_decides() -> None:
    run(_limited_among_ranks, 2)
