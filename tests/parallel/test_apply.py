from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight import nn as mnn
from megalight.errors import ConfigurationError, LayoutError
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.config import NormConfig
from megalight.models.gpt.mixer_config import AttentionConfig, PositionConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.nn.canonical import parts
from megalight.nn.init import initialize as initialize_whole
from megalight.parallel.apply import parallelize, whole_tokens
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, HeadRegion, Replicated, Row, SequenceRegion, Vocab, VocabHeadStyle
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.types import PackedSequences
from tests.parallel.gathering import gather_canonical, relative_error
from tests.support.workers import run

BASE = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "head_dim": 6,
    "ffn_hidden_size": 20,
    "vocab_size": 101,
    "max_sequence_length": 32,
}
VARIANTS = {
    "mha": {},
    "gqa_two_kv_heads": {"num_kv_heads": 2, "attention": AttentionConfig(qkv_bias=True)},
    "mqa": {"num_kv_heads": 1, "attention": AttentionConfig(qk_norm=True)},
    "tied_softcap": {"tie_embeddings": True, "logit_softcap": 3.0, "embedding_multiplier": 2.0},
    "gpt2": {
        "tie_embeddings": True,
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "norm": NormConfig(kind="layer"),
        "position": PositionConfig(kind="learned"),
        "attention": AttentionConfig(qkv_bias=True, proj_bias=True),
    },
    "qk_norm_window": {"num_kv_heads": 2, "attention": AttentionConfig(qk_norm=True, window=3, softcap=5.0)},
}


def twin(config: GPTConfig, seed: int = 3) -> GPT:
    """The one-device model, with values."""
    model = GPT(config).double()
    initialize_whole(model, seed)
    return model


def jitter(model: nn.Module) -> None:
    """Norm weights away from 1 and biases away from 0, so that a wrong gradient sum cannot hide."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def canonical(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical tensors of a one-device model."""
    found = {}
    for part in parts(model):
        flat = tensors[part.parameter].detach().reshape(-1)
        found[part.name] = flat[part.start : part.start + torch.Size(part.shape).numel()].view(part.shape)
    return found


def batch(vocab: int, lengths: list[int], multiple: int):
    sequences = PackedSequences.of_lengths(lengths).pad_to(multiple)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab, (sequences.num_tokens,), generator=generator)
    labels = torch.randint(vocab, (sequences.num_tokens,), generator=generator)
    weights = torch.rand(sequences.num_tokens, generator=generator, dtype=torch.float64)
    weights[sequences.num_tokens - sequences.num_padding :] = 0
    return tokens, labels, weights, sequences


def parity(
    options: dict,
    sequence_parallel: bool,
    dtype: torch.dtype = torch.float64,
    tensor: TensorOptions | None = None,
) -> dict[str, float]:
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    config = GPTConfig(**{**BASE, **options})
    whole = twin(config)
    jitter(whole)
    whole.to(dtype)
    model = copy.deepcopy(whole)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel, tensor=tensor)
    model = copy.deepcopy(model)  # a parallel model can be copied
    assert {name for name, _ in model.named_parameters()} == set(specs)
    tokens, labels, weights, sequences = batch(config.vocab_size, [7, 1, 5, 8], tp)
    errors: dict[str, float] = {}

    def losses(one: GPT) -> torch.Tensor:
        out = one(tokens, sequences, labels).losses
        (out * weights).sum().backward()
        return out

    errors["losses"] = relative_error(losses(model), losses(whole))
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
    wanted = canonical(whole, {n: p.grad for n, p in whole.named_parameters()})
    assert grads.keys() == wanted.keys()
    errors |= {name: relative_error(grads[name], wanted[name]) for name in wanted}
    values = gather_canonical(dict(model.named_parameters()), specs, mesh, sum_partial=False)
    same = canonical(whole, dict(whole.named_parameters()))
    errors |= {f"{name} sliced": float(not torch.equal(values[name], same[name])) for name in same}
    with torch.no_grad():
        errors["logits"] = relative_error(model(tokens, sequences).logits, whole(tokens, sequences).logits)
        one = PackedSequences.of_lengths([1])
        with whole_tokens(model):
            logits = model(tokens[:1], one).logits
        errors["decode"] = relative_error(logits, whole(tokens[:1], one).logits)
    return errors


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.full),
        pytest.param(4, False, marks=pytest.mark.full),
        (4, True),
    ],
    ids=["2-tp", "2-tp+sp", "4-tp", "4-tp+sp"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_equal_one_device(variant: str, tp: int, sequence_parallel: bool) -> None:
    for errors in run(parity, tp, VARIANTS[variant], sequence_parallel):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_float32(sequence_parallel: bool) -> None:
    for errors in run(parity, 2, VARIANTS["gqa_two_kv_heads"], sequence_parallel, torch.float32):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-5}
        assert not wrong, wrong


def logit_gradients(sequence_parallel: bool) -> dict[str, float]:
    """Through gathered logits, where every rank computes the same loss."""
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    whole = twin(GPTConfig(**BASE))
    model = copy.deepcopy(whole)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel)
    tokens, labels, _, sequences = batch(101, [8, 8], tp)
    for one in (whole, model):
        torch.nn.functional.cross_entropy(one(tokens, sequences).logits, labels).backward()
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
    wanted = canonical(whole, {n: p.grad for n, p in whole.named_parameters()})
    return {name: relative_error(grads[name], wanted[name]) for name in wanted}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_through_logits(sequence_parallel: bool) -> None:
    for errors in run(logit_gradients, 2, sequence_parallel):
        assert max(errors.values()) <= 1e-9, errors


def initial_values(options: dict, dtype: torch.dtype) -> bool:
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    config = GPTConfig(**{**BASE, **options})
    with torch.device("meta"):
        whole, model = GPT(config).to(dtype), GPT(config).to(dtype)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=True, prefix="model.")
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "cpu")
    masters: dict[str, torch.Tensor] = {}
    initialize(model, specs, 7, on_values=masters.__setitem__)
    materialize(whole, "cpu")
    initialize_whole(whole, 7, prefix="model.")
    values = gather_canonical(dict(model.named_parameters()), specs, mesh, sum_partial=False)
    same = {f"model.{n}": v for n, v in canonical(whole, dict(whole.named_parameters())).items()}
    assert masters.keys() == specs.keys()
    for name, parameter in model.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(masters[name].to(dtype), parameter)
    assert all(torch.equal(values[name], same[name].double()) for name in same)
    if config.tie_embeddings:
        assert model.head.output_layer.weight is model.embed.word.weight
    return values.keys() == same.keys()


@pytest.mark.parametrize("variant", ["gpt2", "mqa"])
def test_initial_values_do_not_depend_on_the_layout(variant: str) -> None:
    assert all(run(initial_values, 4, VARIANTS[variant], torch.bfloat16))


def test_one_rank_changes_nothing_but_gives_specs() -> None:
    model = twin(GPTConfig(**BASE, num_kv_heads=2))
    before = {name: type(module) for name, module in model.named_modules()}
    values = {name: p.clone() for name, p in model.named_parameters()}
    specs = parallelize(model, plan_for(model), ParallelMesh(), sequence_parallel=True)
    assert {name: type(module) for name, module in model.named_modules()} == before
    gathered = gather_canonical(dict(model.named_parameters()), specs, ParallelMesh())
    assert gathered.keys() == {part.name for part in parts(model)}
    initialize(model, specs, 3)
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


class Toy(nn.Module):
    """A user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 11, bias=False)
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * self.scale
        return self.out(hidden + self.down(self.norm(self.up(hidden))))


def refusal(plan: ParallelizePlan, tp: int, model: nn.Module | None = None, **options: bool) -> str:
    mesh = ParallelMesh(tp, 0, tp=tp)
    with torch.device("meta"):
        model = model or Toy()
    with pytest.raises(LayoutError) as error:
        parallelize(model, plan, mesh, **options)
    return str(error.value)


def test_refusals_name_the_module_the_value_and_the_remedy() -> None:
    text = refusal(ParallelizePlan({"up": Column(units=3)}), 2)
    assert "up.weight consists of 3 units" in text
    assert "tp=2" in text
    assert "Choose tp from 1, 3" not in text
    assert "Choose tp from 1" in text
    assert "up.weight consists of 2 units" in refusal(ParallelizePlan({"up": Column(units=2)}), 4)
    assert "5 equal units" in refusal(ParallelizePlan({"up": Column(units=5)}), 2)
    assert "down.weight consists of 12 units" in refusal(ParallelizePlan({"down": Row()}), 8)
    assert "'upp' of the plan matches no module" in refusal(ParallelizePlan({"upp": Column()}), 2)
    assert "Did you mean 'up'" in refusal(ParallelizePlan({"upp": Column()}), 2)
    assert "Vocab meets norm, a LayerNorm" in refusal(ParallelizePlan({"norm": Vocab()}), 2)
    assert "vocabulary of 11 rows" in refusal(ParallelizePlan({"embed": Vocab()}), 8)
    assert "the model (Toy), norm (LayerNorm)" in refusal(
        ParallelizePlan({"embed": Vocab(), "up": Column(), "down": Row(), "out": VocabHeadStyle()}),
        2,
        sequence_parallel=True,
    )
    with torch.device("meta"):
        tied = Toy()
    tied.out.weight = tied.embed.weight
    assert "the same parameter as embed.weight" in refusal(ParallelizePlan({"embed": Vocab()}), 2, tied)
    assert "replaces the model itself" in refusal(ParallelizePlan({nn.Linear: Column()}), 2, nn.Linear(4, 4))
    heads = GPT(GPTConfig(**{**BASE, "num_heads": 6, "num_kv_heads": 3}))
    assert "layers.0.attention.q.weight consists of 6 units" in refusal(gpt_plan(heads), 4, heads)
    heads = GPT(GPTConfig(**{**BASE, "num_heads": 4, "num_kv_heads": 4}))
    assert "layers.0.attention.q.weight consists of 4 units" in refusal(gpt_plan(heads), 8, heads)
    heads = GPT(GPTConfig(**{**BASE, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}))
    assert "layers.0.attention.k.weight consists of 3 units" in refusal(gpt_plan(heads), 2, heads)


def user_module() -> tuple[float, float]:
    """Plain modules by name: split features are normalized in between, so the norm's output is gathered first."""
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    torch.manual_seed(1)
    whole = Toy().double()
    model = copy.deepcopy(whole)
    plan = ParallelizePlan(
        {
            "embed": Vocab(),
            "up": Column(gather_output=True),
            "norm": Replicated(),
            "out": VocabHeadStyle(),
            "down": Column(),
        }
    )
    plan = plan | ParallelizePlan({"down": Column(gather_output=True)})
    specs = parallelize(model, plan, mesh)
    assert {"scale", "steps"} <= specs.keys()
    ids = torch.randint(11, (3, 5))
    for one in (whole, model):
        one(ids).square().sum().backward()
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
    worst = max(relative_error(grads[n], p.grad) for n, p in whole.named_parameters())
    return relative_error(model(ids), whole(ids)), worst


def test_a_users_own_module() -> None:
    for output, gradient in run(user_module, 2):
        assert output <= 1e-9
        assert gradient <= 1e-9


def foreign_values() -> bool:
    """Modules that draw themselves: the same values under every layout, and as on one rank."""
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    plan = ParallelizePlan(
        {"up": Column(), "down": Row(), "embed": Vocab(), "out": VocabHeadStyle(), "norm": HeadRegion()}
    )
    gathered = []
    for layout in (mesh, ParallelMesh()):
        with torch.device("meta"):
            model = Toy()
        model.scale = nn.Parameter(torch.full((8,), 3.0))
        model.steps = torch.ones(2)
        specs = parallelize(model, plan, layout)
        materialize(model, "cpu")
        initialize(model, specs, 5)
        assert torch.equal(model.scale, torch.full((8,), 3.0))
        assert torch.equal(model.steps, torch.ones(2))
        gathered.append(gather_canonical(dict(model.named_parameters()), specs, layout, sum_partial=False))
    assert gathered[0]["up.weight"].std() > 0.1
    return all(torch.equal(gathered[0][name], gathered[1][name]) for name in gathered[1])


def test_modules_that_draw_themselves() -> None:
    assert all(run(foreign_values, 2))


@pytest.mark.parametrize("keep", ["scale", "steps"])
def test_values_that_nobody_can_make(keep: str) -> None:
    with torch.device("meta"):
        model = Toy()
    setattr(model, keep, nn.Parameter(torch.ones(8)) if keep == "scale" else torch.ones(2))
    specs = parallelize(model, ParallelizePlan(), ParallelMesh())
    materialize(model, "cpu")
    missing = {"scale": "steps", "steps": "scale"}[keep]
    with pytest.raises(ConfigurationError, match=f"^{missing} has no value.*reset_parameters"):
        initialize(model, specs, 5)


def test_shared_module_is_replaced_everywhere() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = mnn.Linear(4, 4)
            self.second = self.first

    model = Twice().to("meta")
    mesh = ParallelMesh(2, 0, tp=2)
    parallelize(model, ParallelizePlan({"first": Column(), nn.LayerNorm: SequenceRegion()}), mesh)
    assert model.first is model.second
    assert model.first.weight.shape == (2, 4)


def autocast(sequence_parallel: bool) -> float:
    """Float32 weights under autocast to bfloat16, as plain Lightning modules run them."""
    mesh = ParallelMesh(2, dist.get_rank(), tp=2)
    torch.manual_seed(1)
    whole = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})
    model = copy.deepcopy(whole)
    plan = ParallelizePlan({"up": Column(), "down": Row()})
    specs = parallelize(model, plan, mesh, sequence_parallel=sequence_parallel)
    x = torch.randn(6, 8, requires_grad=True)
    mine = x.chunk(2)[mesh.global_rank] if sequence_parallel else x
    outputs = []
    for one, given in ((whole, x), (model, mine)):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(one["down"](one["up"](given)))
        outputs[-1].float().square().sum().backward()
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
    return max(relative_error(grads[n], p.grad) for n, p in whole.named_parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(sequence_parallel: bool) -> None:
    assert max(run(autocast, 2, sequence_parallel)) < 0.02
