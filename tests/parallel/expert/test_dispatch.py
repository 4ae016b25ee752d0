"""Experts divided over ranks, together with the engine: one step equals one device."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import lcm
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import distributed_c10d as c10d

from megalight.errors import LayoutError
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, NormConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.nn import Activation
from megalight.nn.init import initialize as initialize_whole
from megalight.nn.moe import Experts
from megalight.ops.router import Routes
from megalight.parallel.apply import parallelize
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.expert import AllToAllDispatcher, ExpertOptions
from megalight.parallel.expert.dispatch import EqualTokens
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.shard import check_cover
from megalight.parallel.shared_state import SharedState
from megalight.parallel.styles import Expert
from megalight.types import PackedSequences
from tests.parallel.expert.model import CONFIG, MOE, build
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import canonical
from tests.support.workers import run


def tokens_of(replica: int, lengths: list[int], multiple: int):
    sequences = PackedSequences.of_lengths(lengths).pad_to(multiple)
    generator = torch.Generator().manual_seed(replica)
    ids, labels = torch.randint(0, 101, (2, sequences.num_tokens), generator=generator)
    return ids, sequences, labels


def step(degrees: dict[str, int], level: str, dispatcher: str) -> dict[str, float]:
    """One step of SGD; replicas bring different numbers of tokens."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    lengths = [[7, 1, 5], [3, 8], [2], [9, 9, 1]]
    whole = build().double()
    initialize_whole(whole, 3)
    model = build().double().to("meta")
    expert = ExpertOptions(dispatcher)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=mesh.tp > 1, expert=expert)
    materialize(model, "cpu")
    initialize(model, specs, 3)
    infos = [ParamInfo(name, p, specs[name], 0) for name, p in model.named_parameters()]
    engine = DataParallelEngine(infos, mesh, DataParallelOptions(level=level, bucket_size=3000))
    optimizer = torch.optim.SGD([shard.master for shard in engine.shards], lr=0.1)
    expected = torch.optim.SGD(whole.parameters(), lr=0.1)
    errors = {}
    for _ in range(2):
        whole.zero_grad()
        losses = []
        for replica in range(mesh.dp):
            ids, sequences, labels = tokens_of(replica, lengths[replica], mesh.tp)
            losses.append(whole(ids, sequences, labels).losses.sum())
            losses[-1].backward()
        engine.zero_grad()
        with engine.micro_batches(1):
            ids, sequences, labels = tokens_of(mesh.rank("dp"), lengths[mesh.rank("dp")], mesh.tp)
            loss = model(ids, sequences, labels).losses.sum()
            loss.backward()
        engine.finish_grad_sync()
        norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        errors["loss"] = relative_error(loss, losses[mesh.rank("dp")])
        errors["norm"] = relative_error(engine.grad_norm(), norm)
        optimizer.step()
        engine.publish()
        engine.sync_parameters()
        expected.step()
    values = gather_canonical(dict(model.named_parameters()), specs, mesh, sum_partial=False)
    wanted = canonical(whole, dict(whole.named_parameters()))
    assert values.keys() == wanted.keys()
    return errors | {name: relative_error(values[name], wanted[name]) for name in wanted}


@pytest.mark.parametrize(
    ("degrees", "level", "dispatcher"),
    [
        pytest.param({"ep": 2}, "optim", "all_to_all", marks=pytest.mark.full),
        ({"ep": 4}, "no_shard", "all_gather"),
        pytest.param({"ep": 4}, "optim", "all_to_all", marks=pytest.mark.full),
        pytest.param({"etp": 2}, "optim", "all_to_all", marks=pytest.mark.full),
        ({"ep": 2, "etp": 2}, "optim", "all_to_all"),
        pytest.param({"ep": 2, "etp": 2}, "optim", "all_gather", marks=pytest.mark.full),
        ({"tp": 2, "ep": 2}, "optim", "all_gather"),
        pytest.param({"tp": 2, "ep": 2, "etp": 2}, "optim", "all_to_all", marks=pytest.mark.full),
        pytest.param({"tp": 2}, "optim", "all_to_all", marks=pytest.mark.full),
    ],
)
def test_steps_equal_one_device(degrees: dict[str, int], level: str, dispatcher: str) -> None:
    for errors in run(step, 4, degrees, level, dispatcher):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


EXTREMES: dict[str, list[list[list[int]]]] = {
    "all to one expert": [[[2, -1]] * 5, [[2, -1]] * 3],
    "an expert without tokens": [[[0, 1], [3, 1]], [[1, 0], [0, 3], [3, 0]]],
    "a rank without tokens": [[[0, 3], [2, 1]], []],
    "one token": [[], [[3, 0]]],
    "no token": [[], []],
    "every token dropped": [[[-1, -1]] * 2, [[-1, -1]]],
    "some dropped": [[[-1, 2], [0, -1]], [[3, -1], [-1, -1]]],
}


def routed(dispatcher: str) -> dict[tuple[str, bool], list[torch.Tensor]]:
    """Outputs of this rank's tokens, and all gradients, with each of the given routes, padded or not."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), ep=2)
    found = {}
    for name, pad in product(EXTREMES, (False, True)):
        one = Expected(EXTREMES[name][mesh.rank("ep")])
        root = nn.ModuleDict({"experts": one.experts}).to("meta")
        specs = parallelize(root, ParallelizePlan({Experts: Expert()}), mesh, expert=ExpertOptions(dispatcher))
        materialize(root, "cpu")
        initialize(root, specs, 3)
        one.experts = root["experts"]  # type: ignore[assignment]
        found[name, pad] = one.answers(max(1, len(one.hidden)) if pad else None)
    return found


class Expected:
    """One rank's tokens and routes, and all experts."""

    def __init__(self, experts: list[list[int]]) -> None:
        self.experts = Experts(4, 6, 8, Activation("swiglu"), std=0.5, down_std=0.5).double()
        generator = torch.Generator().manual_seed(len(experts))
        self.hidden, self.cotangent = torch.randn(2, len(experts), 6, dtype=torch.float64, generator=generator)
        self.hidden.requires_grad_()
        probs = torch.rand(len(experts), 2, dtype=torch.float64, generator=generator).requires_grad_()
        self.routes = Routes(probs, torch.tensor(experts, dtype=torch.int64).view(-1, 2))

    def answers(self, capacity: int | None = None) -> list[torch.Tensor]:
        """Output, and gradients of tokens, weights and parameters."""
        dispatcher = self.experts.dispatcher
        copies, memo = dispatcher.dispatch(self.hidden, self.routes, len(self.experts), capacity)
        out = dispatcher.combine(self.experts(copies), memo)
        wanted = [self.hidden, self.routes.probs, *self.experts.parameters()]
        return [out.detach(), *torch.autograd.grad((out * self.cotangent).sum(), wanted)]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_extreme_routes(dispatcher: str) -> None:
    answers = run(routed, 2, dispatcher)
    for name, pad in product(EXTREMES, (False, True)):
        expected = []
        for experts in EXTREMES[name]:
            one = Expected(experts)
            initialize_whole(nn.ModuleDict({"experts": one.experts}), 3)
            expected.append(one.answers())
        for rank, answer in enumerate(answers):
            halves = [(a + b)[2 * rank :][:2] for a, b in zip(expected[0][3:], expected[1][3:], strict=True)]
            for actual, wanted in zip(answer[name, pad], [*expected[rank][:3], *halves], strict=True):
                torch.testing.assert_close(actual, wanted, msg=f"{name}, pad={pad}")


EVEN = [[[0, 1], [3, -1], [1, 0], [3, 1]], [[1, 0], [-1, -1], [3, 0], [2, 3]]]
"""Routes of equally many tokens."""


def _without_waiting(dispatcher: str, alignment: int) -> list[list[torch.Tensor]]:
    """Answers with a fixed number of rows: the second pass reads no value on the host."""
    mesh = ParallelMesh(2, dist.get_rank(), ep=2)
    one = Expected(EVEN[mesh.rank("ep")])
    root = nn.ModuleDict({"experts": one.experts}).to("meta")
    options = ExpertOptions(dispatcher, equal_tokens=True)
    specs = parallelize(root, ParallelizePlan({Experts: Expert()}), mesh, expert=options)
    materialize(root, "cpu")
    initialize(root, specs, 3)
    one.experts = root["experts"]  # type: ignore[assignment]
    one.experts.dispatcher.alignment = alignment
    found = [one.answers(3)]
    with ExitStack() as stack:
        # On a CPU the check of the promise reads the numbers; on a GPU it is an assertion on the device.
        stack.enter_context(patch.object(EqualTokens, "_check"))
        for read in ("tolist", "item", "__int__", "__bool__", "nonzero"):
            stack.enter_context(patch.object(torch.Tensor, read, side_effect=AssertionError(f"waits: {read}")))
        found.append(one.answers(3))
    return found


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_a_fixed_number_of_rows_needs_no_wait_where_ranks_have_equally_many_tokens(
    dispatcher: str, alignment: int
) -> None:
    expected = []
    for experts in EVEN:
        one = Expected(experts)
        initialize_whole(nn.ModuleDict({"experts": one.experts}), 3)
        expected.append(one.answers(3))
    for rank, answers in enumerate(run(_without_waiting, 2, dispatcher, alignment)):
        halves = [(a + b)[2 * rank :][:2] for a, b in zip(expected[0][3:], expected[1][3:], strict=True)]
        for answer in answers:
            for actual, wanted in zip(answer, [*expected[rank][:3], *halves], strict=True):
                torch.testing.assert_close(actual, wanted)


def _broken_promise() -> str:
    """Rank 0 repeats its number of tokens, and rank 1 brings a new one."""
    mesh = ParallelMesh(2, dist.get_rank(), ep=2)
    dispatcher = AllToAllDispatcher(SharedState(mesh, expert=ExpertOptions(equal_tokens=True)))
    one, more = Expected(EXTREMES["some dropped"][0]), Expected(EXTREMES["some dropped"][0] + [[0, 1]])
    dispatcher.dispatch(one.hidden, one.routes, 2, 3)
    now = more if mesh.rank("ep") else one
    with pytest.raises(LayoutError) as caught:
        dispatcher.dispatch(now.hidden, now.routes, 2, 3)
    return str(caught.value)


def test_a_broken_promise_is_told_on_every_rank() -> None:
    for message in run(_broken_promise, 2):
        assert "equal_tokens=True, but the ranks along ep and etp bring [2, 3] tokens. Make batches" in message
    with pytest.raises(LayoutError, match="equal_tokens=True with dispatcher='deepep'"):
        ExpertOptions("deepep", equal_tokens=True)
    shares = SharedState(ParallelMesh(4, 0, tp=4, ep=2, etp=2))
    assert shares.equal_tokens.holds  # shares along tp
    assert not SharedState(ParallelMesh(4, 0, tp=2, ep=4)).equal_tokens.holds


def _groups_of_messages() -> tuple[int, bool, bool]:
    """New groups of two models, whether both share that of numbers, and whether any tokens went through it."""
    mesh, send = ParallelMesh(2, dist.get_rank(), ep=2), dist.all_to_all_single
    numbers, tokens = [], []

    def sent(out: torch.Tensor, x: torch.Tensor, *args: object, group: dist.ProcessGroup, **kwargs: object) -> object:
        (tokens if x.is_floating_point() else numbers).append(group)
        return send(out, x, *args, group=group, **kwargs)  # type: ignore[arg-type]

    before = len(c10d._world.pg_names)
    with patch.object(dist, "all_to_all_single", sent):
        for _ in range(2):
            one = Expected(EXTREMES["some dropped"][mesh.rank("ep")])
            root = nn.ModuleDict({"experts": one.experts}).to("meta")
            specs = parallelize(root, ParallelizePlan({Experts: Expert()}), mesh)
            materialize(root, "cpu")
            initialize(root, specs, 3)
            one.experts = root["experts"]  # type: ignore[assignment]
            one.answers()
    assert len(numbers) == 2
    return len(c10d._world.pg_names) - before, numbers[0] is numbers[1], any(group in numbers for group in tokens)


def test_numbers_of_rows_do_not_wait_for_tokens() -> None:
    """Each kind has one group of its own, for all models on the same ranks."""
    for made, shared, mixed in run(_groups_of_messages, 2):
        assert made <= 2  # tokens and numbers; an earlier test on these ranks may have made them
        assert shared
        assert not mixed


@settings(deadline=None, max_examples=15)
@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
    tied=st.booleans(),
)
def test_specs_cover_the_mesh(tp: int, cp: int, pp: int, ep: int, etp: int, tied: bool) -> None:
    """Whole models: fused sections, KV heads that ranks share, a padded vocabulary, tied ends, experts."""
    world = pp * lcm(2 * tp * cp, ep * etp)
    specs = []
    with torch.device("meta"):
        whole = build(replace(CONFIG, tie_embeddings=tied))
    for rank in range(world):
        root = copy.deepcopy(whole)
        mesh = ParallelMesh(world, rank, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
        options = Layout(plan=gpt_plan(root), tensor_parallel=tp, sequence_parallel=tp > 1)
        with patch.object(ParallelMesh, "group"):  # stages with tied weights make a group at once
            specs.append(ParallelModel(root, mesh, options).specs)
    check_cover(mesh, specs)


@pytest.mark.parametrize(
    ("degrees", "config", "message"),
    [
        (
            {"tp": 2},
            replace(CONFIG, norm=NormConfig(kind="layer"), attention=AttentionConfig(qk_norm=True, qk_norm_whole=True)),
            "q_norm is a LayerNorm over all heads together",
        ),
        ({"etp": 2}, replace(CONFIG, moe=replace(MOE, bias=True)), "etp=2 divides experts with biases"),
    ],
)
def test_models_that_cannot_be_divided(degrees: dict[str, int], config: GPTConfig, message: str) -> None:
    with torch.device("meta"):
        model = GPT(config)
    with pytest.raises(LayoutError, match=message):
        parallelize(model, gpt_plan(model), ParallelMesh(4, **degrees), sequence_parallel="tp" in degrees)


@pytest.mark.parametrize(
    ("degrees", "rules", "message"),
    [
        ({"ep": 3}, True, "holds 4 experts, and ep=3 does not divide them"),
        ({"tp": 2}, True, "tp=2 without sequence parallelism would send the same tokens"),
        ({"ep": 2}, False, r"ep=2 divides experts .* Expert\(\) for no module"),
        ({"etp": 5}, True, "inner width of 12, and etp=5 does not divide it"),
        ({"etp": 2}, False, r"etp=2 divides experts .* Expert\(\) for no module"),
    ],
)
def test_layouts_that_cannot_work(degrees: dict[str, int], rules: bool, message: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(LayoutError, match=message):
        parallelize(model, gpt_plan(model) if rules else ParallelizePlan(), ParallelMesh(60, **degrees))
