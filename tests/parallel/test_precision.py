"""Products in 8 bits with scales of past steps: ranks agree on a weight's history, and experts keep their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn import Linear
from megalight.nn.init import initialize
from megalight.nn.moe import Dispatcher, Experts, SharedConfig
from megalight.ops.grouped_linear import low_precision_stacks
from megalight.ops.grouped_linear.low_precision_stacks import Apart
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.parameter import cast_of
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import EXPERT_DATA_AXES, ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision, remove_low_precision
from megalight.parallel.run_engine import engine_over
from megalight.parallel.shard import ShardSpec
from megalight.parallel.step import StepDriver
from megalight.types import PackedSequences
from tests.parallel.expert.model import CONFIG, build
from tests.parallel.expert.test_coupling import Task, micro_batches
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import canonical
from tests.support.workers import run

OPTIONS = LowPrecisionOptions("delayed", history=2, emulate=True)
WIDE = replace(CONFIG, hidden_size=64, head_dim=16, ffn_hidden_size=64)
STEPS = 3


def _experts_on_one_device(replicas: int, options: LowPrecisionOptions) -> tuple[list[float], dict[str, Any]]:
    model, task = build(WIDE, ffn_hidden_size=64).double(), Task()
    initialize(model, 3, prefix="model.")
    session = apply_low_precision(model, options, ParallelMesh())
    batches = [batch for replica in range(replicas) for batch in micro_batches(replica)]
    tokens = sum(float(task.loss_tokens(batch)) for batch in batches)
    losses = []
    for number in range(STEPS):
        model.zero_grad()
        with session.step(number):
            total = 0.0
            for batch in batches:
                loss = task.loss_step(task.forward_step(model, batch), batch)
                ((loss.sum / tokens) + loss.aux_losses["mean"] / len(batches)).backward()
                total += float(loss.sum.detach()) / tokens
        losses.append(total)
    return losses, canonical(model, {name: p.grad for name, p in model.named_parameters()})


def _experts(degrees: dict[str, int], options: LowPrecisionOptions) -> dict[str, float]:
    """Three steps of a model with experts, without an update between them."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    root = build(WIDE, ffn_hidden_size=64).double().to("meta")
    model = ParallelModel.build(root, mesh, Layout.on(mesh, sequence_parallel=mesh.tp > 1), seed=3)
    session = apply_low_precision(root, options, mesh, specs=model.specs)
    step = StepDriver(model, Task())
    step.engine = engine_over([model], [model.parameters()], DataParallelOptions(level="no_shard"))
    wanted, gradients = _experts_on_one_device(mesh.dp, options)
    errors = {}
    for number in range(STEPS):
        step.engine.zero_grad()
        with session.step(number):
            outcome = step.train(micro_batches(mesh.rank("dp")))
        errors[f"loss {number}"] = abs(float(outcome.loss) / wanted[number] - 1)
    local = {name: p.main_grad for name, p in root.named_parameters()}
    found = gather_canonical(local, model.specs, mesh, sum_partial=False)
    return errors | {name: relative_error(found["model." + name], gradients[name]) for name in gradients}


DENSE = replace(OPTIONS, modules=("attention.*", "mlp.gate_up", "mlp.down"))
EXPERTS_ALONE = replace(OPTIONS, modules=("mlp.experts.*",))
PADDED = replace(EXPERTS_ALONE, history=None, router_padding_for_quantization=True, recipe="mxfp8")
TP2 = {"tp": 2, "ep": 2}
ROWS = [
    # Where ep joins replicas, an expert sees several micro-batches at once, and scales by all of them. So only dense
    # layers can be compared there.
    pytest.param({"ep": 2}, DENSE, id="ep2"),
    pytest.param(TP2, OPTIONS, id="tp2ep2", marks=pytest.mark.full),
    pytest.param(TP2, replace(EXPERTS_ALONE, recipe="rowwise", history=None), id="rowwise", marks=pytest.mark.full),
    pytest.param(TP2, replace(EXPERTS_ALONE, recipe="blockwise", history=None), id="blockwise", marks=pytest.mark.full),
    pytest.param(TP2, PADDED, id="mxfp8"),
    pytest.param(
        {"tp": 2, "etp": 2}, replace(PADDED, recipe="tensorwise", reduce_amax=True), id="etp2", marks=pytest.mark.full
    ),
    pytest.param({"tp": 2, "etp": 2}, EXPERTS_ALONE, id="etp2 delayed"),
]


@pytest.mark.parametrize(("degrees", "options"), ROWS)
def test_steps_with_experts_equal_one_device(degrees: dict[str, int], options: LowPrecisionOptions) -> None:
    for errors in run(_experts, 4 if options is OPTIONS else 2, degrees, options):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


class Layer(nn.Module):
    """A dense layer and some experts, each a linear layer of its own."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        self.dense = Linear(32, 32, bias=False)
        self.experts = nn.ModuleDict({str(index): Linear(32, 32, bias=False) for index in experts})


EXPERTS = {0: [0, 1], 1: [2, 3]}
"""Place along ``ep`` -> the experts there."""


def _histories(experts: list[int], ranks: list[int], mesh: ParallelMesh) -> dict[str, Tensor]:
    """Two steps over the tokens of ``ranks``, whose sizes differ; rank 2 has no tokens for expert 1."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Layer(experts)})
    model.double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    stacked = ShardSpec((), (), EXPERT_DATA_AXES)
    specs = {name: stacked for name, _ in model.named_parameters() if "experts" in name}
    session = apply_low_precision(model, OPTIONS, mesh, specs=specs)
    layer = model.layers["0"]
    for number in range(2):
        with session.step(number):
            for rank in ranks:
                x = torch.full((16, 32), 2.0**rank, dtype=torch.float64)
                layer.dense(x).sum().backward()
                for index in experts:
                    if index in EXPERTS[rank % 2] and (rank, index) != (2, 1):
                        layer.experts[str(index)](x * (1 + index)).sum().backward()
    return {name: precision_of(p).history.past for name, p in model.named_parameters()}


def _apart() -> dict[str, bool]:
    rank = dist.get_rank()
    mesh = ParallelMesh(4, rank, ep=2)
    expected = _histories([0, 1, 2, 3], [0, 1, 2, 3], ParallelMesh())
    found = _histories(EXPERTS[mesh.rank("ep")], [rank], mesh)
    return {name: torch.equal(past, expected[name]) for name, past in found.items()}


def test_replicas_of_an_expert_agree_and_other_experts_keep_their_own() -> None:
    for found in run(_apart, 4):
        assert len(found) == 3
        assert all(found.values()), found


def _padded() -> list[tuple[list[int], int]]:
    """Rows of each expert that is here, for each dispatcher; and alignments without low precision."""
    found = []
    for dispatcher in ("all_to_all", "all_gather"):
        mesh = ParallelMesh(2, dist.get_rank(), ep=2)
        root = build(WIDE, ffn_hidden_size=64).double().to("meta")
        model = ParallelModel.build(root, mesh, Layout.on(mesh, expert=ExpertOptions(dispatcher)), seed=3)
        apply_low_precision(root, PADDED, mesh, specs=model.specs)
        experts = next(module for module in root.modules() if isinstance(module, Experts))
        rows: list[int] = []

        def note(module: Any, args: Any, rows: list[int] = rows) -> None:
            rows += [*args[0].sizes, *args[0].offsets.tolist(), len(args[0].tokens)]

        experts.register_forward_pre_hook(note)
        with torch.no_grad():
            root(torch.arange(12) % 7, PackedSequences.of_lengths([7, 5]))
        remove_low_precision(root)
        found.append((rows, experts.dispatcher.alignment))
    return found


def test_rows_of_each_expert_are_padded() -> None:
    for found in run(_padded, 2):
        for (one, two, end, last, rows), alignment in found:
            assert (end, last) == (one, one + two)
            assert one % 32 == two % 32 == 0 < rows == last
            assert alignment == 1


def test_experts_take_part() -> None:
    def marked(**options: Any) -> list[str]:
        model = build(WIDE, ffn_hidden_size=64, shared=SharedConfig(ffn_hidden_size=32, gate=True))
        apply_low_precision(model, LowPrecisionOptions(emulate=True, **options), ParallelMesh())
        return [name for name, parameter in model.named_parameters() if cast_of(parameter) is not None]

    assert marked(modules=("mlp.experts.*", "mlp.shared*")) == [
        "layers.1.mlp.experts.up",
        "layers.1.mlp.experts.down",
        "layers.1.mlp.shared.gate_up.weight",
        "layers.1.mlp.shared.down.weight",
    ]
    assert not any("router" in name or "shared_gate" in name for name in marked())
    model = build(WIDE, ffn_hidden_size=64)
    options = LowPrecisionOptions(
        "mxfp8", modules=("mlp.experts.down",), router_padding_for_quantization=True, emulate=True
    )
    apply_low_precision(model, options, ParallelMesh())
    assert {module.alignment for module in model.modules() if isinstance(module, Dispatcher)} == {32}


def test_the_host_learns_numbers_of_rows_where_products_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def tells(recipe: str, **options: Any) -> bool:
        model = build(WIDE, ffn_hidden_size=64)
        apply_low_precision(model, LowPrecisionOptions(recipe, emulate=True, **options), ParallelMesh())
        (experts,) = (module for module in model.modules() if isinstance(module, Experts))
        found = experts.dispatcher.tells_sizes
        remove_low_precision(model)
        assert not experts.dispatcher.tells_sizes
        return found

    assert tells("blockwise")  # its products take one expert at a time
    assert not tells("blockwise", modules=("attention.*",))
    assert not tells("tensorwise")  # small experts
    monkeypatch.setattr(low_precision_stacks, "LARGE_ONE_SCALE", low_precision_stacks.ROWS * 2 * 64.0 * 64)
    assert tells("tensorwise")
    assert tells("delayed")
    assert not tells("rowwise")
    assert not tells("delayed", experts_together=True)
    assert not tells("tensorwise", modules=("mlp.experts.down",))  # half as large as ``up``


def test_experts_one_by_one_train_like_experts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_stacks, "LARGE_ONE_SCALE", 1.0)
    ways: list[type] = []
    found = []
    for cls in (Apart, low_precision_stacks.Together):
        original = cls.product

        def noted(self: Any, *args: Any, cls: type = cls, original: Any = original, **more: Any) -> Any:
            ways.append(cls)
            return original(self, *args, **more)

        monkeypatch.setattr(cls, "product", noted)
    for option in (False, True):
        ways.clear()
        found.append(_experts_on_one_device(1, replace(OPTIONS, experts_together=option)))
        assert set(ways) == {low_precision_stacks.Together if option else Apart}
    (losses, gradients), (others, other_gradients) = found
    assert losses == others
    for name, gradient in gradients.items():
        assert relative_error(gradient, other_gradients[name]) <= 1e-12, name


@pytest.mark.parametrize(
    ("options", "width", "match"),
    [
        ({"primary_weights": True}, 64, "mlp.experts.up, mlp.experts.down have one for each expert. Leave the experts"),
        ({"modules": ("attention.*",), "router_padding_for_quantization": True}, 64, "no experts multiply in low"),
        ({"modules": ("attention.*",), "experts_together": True}, 64, "experts_together=True, but no experts"),
        ({}, 40, r"mlp.experts.down has a weight of .64, 40. on this rank.*multiples of 16.*etp"),
        ({"modules": ("mlp.expert.*",)}, 64, "matches no linear layer.*mlp.experts.up"),
    ],
)
def test_what_experts_cannot_do_is_refused(options: Any, width: int, match: str) -> None:
    model = build(replace(WIDE, ffn_hidden_size=64), ffn_hidden_size=width)
    with pytest.raises(ConfigurationError, match=match):
        apply_low_precision(model, LowPrecisionOptions(emulate=True, **options), ParallelMesh())
