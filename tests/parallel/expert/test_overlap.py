"""Messages of experts hidden behind other work: one step equals one device, gradients tensor by tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalight.errors import ConfigurationError, LayoutError
from megalight.imports import in_backward
from megalight.models.gpt import DropoutConfig
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, MoE, SharedConfig
from megalight.ops.linear import WeightGradients
from megalight.parallel.apply import parallelize
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.model_plans import plan_for
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import StepDriver
from tests.parallel.expert.model import CONFIG, build
from tests.parallel.expert.test_coupling import Task, micro_batch
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import canonical
from tests.support.workers import run

DEEP = replace(CONFIG, num_layers=4)
VARIANT: dict[str, Any] = {
    "pattern": (False, True, True),
    "shared": SharedConfig(ffn_hidden_size=8, gate=True),
    "balance": BalanceConfig(aux_loss=0.1, z_loss=0.01),
}
BESIDE = ExpertOptions(shared_expert_overlap=True)


def micro_batches(replica: int, count: int) -> list[Any]:
    draws = torch.Generator().manual_seed(replica)
    return [micro_batch([4 + i % 2 * 4, 4], draws) for i in range(count)]


@functools.cache
def expected(replicas: int, count: int) -> dict[str, torch.Tensor]:
    """Loss, norm and gradients of one device, with one rank's work after the other's."""
    step = _stepper(ParallelMesh(), Layout())
    return _answers(step, [batch for replica in range(replicas) for batch in micro_batches(replica, count)])


def _stepper(mesh: ParallelMesh, options: Layout, dropout: DropoutConfig | None = None) -> StepDriver:
    root = build(replace(DEEP, dropout=dropout or DropoutConfig()), **VARIANT).double()
    if mesh.world_size == 1:
        initialize(root, 3, prefix="model.")
    else:
        root = root.to("meta")
    model = ParallelModel.build(root, mesh, options, seed=3)
    step = StepDriver(model, Task())
    step.engine = engine_over([model], [model.parameters()], DataParallelOptions(level="no_shard"))
    return step


def _answers(step: StepDriver, batches: list[Any]) -> dict[str, torch.Tensor]:
    assert step.engine is not None
    model = step.model
    for _ in range(2):  # the second step reduces buckets while its last micro-batches run
        step.engine.zero_grad()
        done = step.train(batches)
        found = {"loss": done.loss, **done.metrics, "norm": step.engine.grad_norm()}
    gradients = {name: p.grad for name, p in model.root.named_parameters()}
    if model.mesh.world_size == 1:
        whole = canonical(model.root, gradients)
    else:
        gathered = gather_canonical(gradients, model.specs, model.mesh, sum_partial=False)
        whole = {name.removeprefix("model."): value for name, value in gathered.items()}
    return {name: value.clone() for name, value in {**found, **whole}.items()}


def found(degrees: dict[str, int], options: dict[str, Any], count: int) -> tuple[int, dict[str, Any]]:
    """Number of replicas, and loss, norm and gradients of a layout."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    step = _stepper(mesh, Layout.on(mesh, sequence_parallel=mesh.tp > 1, **options))
    answers = _answers(step, micro_batches(mesh.rank("dp"), count))
    return mesh.dp, {name: value.numpy() for name, value in answers.items()}


def assert_equal(
    ranks: int, degrees: dict[str, int], options: dict[str, Any], count: int = 3, job: Callable[..., Any] = found
) -> None:
    """Compare with one device what ``job``, which is :func:`found` or calls it, gives on each rank."""
    for replicas, answers in run(job, ranks, degrees, options, count):
        wanted = expected(replicas, count)
        errors = {name: relative_error(torch.from_numpy(answers[name]), value) for name, value in wanted.items()}
        assert answers.keys() == wanted.keys()
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong
        assert {"loss", "norm", "router_aux_loss"} < errors.keys()


@pytest.mark.parametrize(
    ("ranks", "degrees", "options"),
    [
        pytest.param(2, {"ep": 2}, {}, marks=pytest.mark.full),
        (2, {"tp": 2, "ep": 2}, {"recompute": RecomputeOptions(granularity="full")}),
    ],
)
def test_the_shared_expert_beside_the_messages(ranks: int, degrees: dict[str, int], options: dict[str, Any]) -> None:
    assert_equal(ranks, degrees, {"expert": BESIDE, **options})


COMBINED: dict[str, Any] = {"pipeline": PipelineOptions(schedule="combined")}
FULL = RecomputeOptions(granularity="full", num_layers=2)
EXPERTS = RecomputeOptions(granularity="selective", modules=("moe", "attention_norm"))


@pytest.mark.parametrize(
    ("ranks", "degrees", "options"),
    [
        pytest.param(2, {"ep": 2}, {}, marks=pytest.mark.full),
        pytest.param(2, {"tp": 2, "ep": 2}, {"recompute": FULL}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2, "pp": 2}, {}, marks=pytest.mark.full),
        (4, {"ep": 2, "pp": 2}, {"virtual_pipeline": 2, "recompute": EXPERTS}),
        pytest.param(2, {"etp": 2}, {"recompute": EXPERTS}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 4}, {"recompute": EXPERTS}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2, "tp": 2, "pp": 2}, {"recompute": FULL}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2, "cp": 2, "pp": 2}, {"virtual_pipeline": 2}, marks=pytest.mark.full),
    ],
)
def test_forward_and_backward_in_turns(ranks: int, degrees: dict[str, int], options: dict[str, Any]) -> None:
    assert_equal(ranks, degrees, {**COMBINED, **options}, count=6)


def test_every_layer_with_a_shared_expert_computes_it_beside() -> None:
    with torch.device("meta"):
        model = build(DEEP, **VARIANT)
    parallelize(model, plan_for(model), ParallelMesh(2, 0, ep=2), expert=BESIDE)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    assert [layer.shared_expert_overlap for layer in layers] == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute": RecomputeOptions(granularity="selective", modules=("shared_experts",))},
            r"\['mlp.shared'\].*different",
        ),
        ({"pipeline": PipelineOptions(schedule="zero_bubble")}, "with pipeline.schedule='zero_bubble'"),
        (COMBINED, "with pipeline.schedule='combined'"),
    ],
)
def test_options_that_do_not_go_with_the_shared_expert_beside(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(expert=BESIDE, **options)


@pytest.mark.parametrize(
    ("degrees", "moe", "message"),
    [({"ep": 2}, {"shared": None}, "no layer has a shared expert"), ({}, {}, "ep=1 and etp=1, so no tokens travel")],
)
def test_models_without_a_shared_expert(degrees: dict[str, int], moe: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = build(DEEP, **{**VARIANT, **moe})
    with pytest.raises(LayoutError, match=message):
        parallelize(model, plan_for(model), ParallelMesh(2, 0, **degrees), expert=BESIDE)


def test_schedules_without_messages_to_hide() -> None:
    with pytest.raises(LayoutError, match=r"dispatcher='all_gather'.*whose messages block"):
        Layout(expert=ExpertOptions("all_gather"), **COMBINED)
    with torch.device("meta"):
        model = build(DEEP, **VARIANT)
    with pytest.raises(LayoutError, match="with ep=1 and etp=1 there are none"):
        ParallelModel(model, ParallelMesh(), Layout(**COMBINED))


def _order() -> list[str]:
    """The starts and ends of messages of a step, and the weight gradients, in order."""
    found: list[str] = []
    start, run_weights = dist.all_to_all_single, WeightGradients.run

    class Watched:
        def __init__(self, work: dist.Work, name: str) -> None:
            self.work, self.name = work, name

        def wait(self) -> None:
            found.append(f"{self.name} here")
            self.work.wait()

    def started(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        name = "back" if in_backward() else "on"
        if async_op:
            found.append(f"{name} sent")
        work = start(*args, async_op=async_op, **kwargs)
        return Watched(work, name) if async_op else work

    def weights(self: WeightGradients) -> None:
        found.append(f"{len(self)} weights")
        run_weights(self)

    mesh = ParallelMesh(2, dist.get_rank(), ep=2)
    step = _stepper(mesh, Layout.on(mesh, **COMBINED))
    batches = micro_batches(mesh.rank("dp"), 2)
    with patch.object(dist, "all_to_all_single", started), patch.object(WeightGradients, "run", weights):
        assert step.engine is not None
        step.engine.zero_grad()
        step.train(batches)
    return found


def test_each_message_is_hidden_behind_the_other_pass() -> None:
    """One pair, in the layers 1 and 2. Tokens travel with their weights, and come back alone."""
    on, back = ["on here", "on here", "on sent"], ["back here", "back here", "back sent"]
    wanted = [
        *("back sent", "on sent", "on sent"),  # outputs of layer 2 are on their way back, those of layer 1 on theirs
        *("back here", "back sent", "back sent", *on),
        *(*back, "on here", "on sent", "on sent"),
        *("back here", "back sent", "back sent", *on),
        *("back here", "back here", "on here"),
    ]
    for order in run(_order, 2):
        assert [entry for entry in order if "weights" not in entry] == wanted
        # weight gradients fill each pause of the backward, and its end
        queued = [int(entry.split()[0]) for entry in order if "weights" in entry]
        assert len(queued) == 5
        assert all(queued)


def _dropped_out() -> float:
    """The largest difference between the gradients of two schedules, with dropout that recompute draws again."""
    found = []
    for schedule in ("1f1b", "combined"):
        torch.manual_seed(5)
        mesh = ParallelMesh(2, dist.get_rank(), ep=2)
        pipeline = PipelineOptions(schedule=schedule)  # type: ignore[arg-type]
        options = Layout(pipeline=pipeline, recompute=RecomputeOptions(granularity="full"))
        step = _stepper(mesh, options, DropoutConfig(hidden=0.3))
        found.append(_answers(step, micro_batches(mesh.rank("dp"), 4)))
    return max(relative_error(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.full
def test_recompute_draws_the_same_numbers_again() -> None:
    assert max(run(_dropped_out, 2)) <= 1e-12


def test_dispatchers_without_messages_to_hide_behind() -> None:
    with pytest.raises(LayoutError, match="shared_expert_overlap=True with dispatcher='all_gather'"):
        ExpertOptions("all_gather", shared_expert_overlap=True)


def test_units_that_two_passes_would_free() -> None:
    model = ParallelModel(build(DEEP, **VARIANT).to("meta"), ParallelMesh(2, 0, ep=2), Layout(**COMBINED))
    model.place("cpu")
    with pytest.raises(ConfigurationError, match=r"level='optim_grads' with pipeline.schedule='combined'"):
        engine_over([model], [model.parameters()], DataParallelOptions(level="optim_grads"))


def test_units_inside_of_what_computes_beside() -> None:
    options = Layout(expert=BESIDE)
    model = ParallelModel(build(DEEP, **VARIANT).to("meta"), ParallelMesh(2, 0, ep=2), options)
    model.place("cpu")
    with pytest.raises(ConfigurationError, match=r"units names MLP, which is also .* a shared expert.*Name the layer"):
        engine_over([model], [model.parameters()], DataParallelOptions(level="optim_grads_params", units=("MLP",)))


def test_devices_with_a_single_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ParallelModel(build(DEEP, **VARIANT).to("meta"), ParallelMesh(2, 0, ep=2), Layout(**COMBINED))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    model.check_device()
    model.device = torch.device("cuda")
    with pytest.raises(ConfigurationError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 gives a GPU one queue"):
        model.check_device()
