from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight import nn as mnn
from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.ops.parameter import collect
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import Draws, RecomputeOptions, apply_recompute, check_recompute
from tests.parallel.test_apply import BASE, batch, jitter, twin
from tests.support.workers import run

T, H, F, LAYERS = 21, 24, 20, 5
DROPOUT = DropoutConfig(attention=0.2, hidden=0.3, embedding=0.1)
NORMS = ("attention_norm", "mlp_norm")


def selective(*modules: str) -> RecomputeOptions:
    return RecomputeOptions(granularity="selective", modules=modules)


KINDS = {
    "uniform": RecomputeOptions(granularity="full"),
    "uniform of 2": RecomputeOptions(granularity="full", num_layers=2),
    "uniform of all": RecomputeOptions(granularity="full", num_layers=LAYERS),
    "block": RecomputeOptions(granularity="full", method="block", num_layers=3),
    "norms": selective(*NORMS),
    "activation": selective("mlp.act"),
    "attention": selective("attention.inner"),
    "mlp": selective("mlp"),
    "mlp after its norm": selective("mlp", "mlp_norm"),
    "much": selective("attention", "*_norm", "mlp.act"),
    "some layers": selective("layers.1", "layers.[23].mlp"),
}


def config(**options: Any) -> GPTConfig:
    return GPTConfig(**{**BASE, "num_layers": LAYERS, "num_kv_heads": 2, **options})


def with_main_grads(model: nn.Module) -> list[str]:
    """Gradients go to ``main_grad`` as under the data-parallel engine; returns where arrivals are noted."""
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        collect(parameter, torch.zeros_like(parameter), functools.partial(arrived.append, name))
        parameter.grad = parameter.main_grad
    return arrived


@contextmanager
def saved(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Storages that the graph keeps, other than parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def numbers_saved(recompute: RecomputeOptions) -> int:
    """How many numbers the layers of a model keep for the backward pass."""
    model = twin(config())
    with_main_grads(model)
    apply_recompute(model, recompute)
    sequences = batch(101, [7, 1, 5, 8], 1)[3]
    hidden = torch.randn(T, H, dtype=torch.float64, requires_grad=True) * 1
    context = model.context(sequences, hidden.dtype)
    with saved(model) as kept:
        for layer in model.layers.values():
            hidden = layer(hidden, context)
        del hidden
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 8


WHOLE = T * H
LAYER = numbers_saved(RecomputeOptions()) // LAYERS


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("uniform", LAYERS * WHOLE),
        ("uniform of 2", 3 * WHOLE),  # groups of 2, 2 and 1
        ("uniform of all", WHOLE),
    ],
)
def test_full_keeps_the_inputs_of_regions_alone(kind: str, kept: int) -> None:
    assert numbers_saved(KINDS[kind]) == kept


@pytest.mark.parametrize(
    ("kind", "per_token"),
    [
        ("norms", LAYERS * 2 * H),
        ("activation", LAYERS * F),
        ("mlp", LAYERS * (2 * F + F + F)),  # gate and up, silu(gate), their product; the norm's output stays
        ("mlp after its norm", LAYERS * (4 * F + H)),
    ],
)
def test_selective_saves_what_it_says(kind: str, per_token: int) -> None:
    assert numbers_saved(RecomputeOptions()) - numbers_saved(KINDS[kind]) == per_token * T


def test_block_saves_in_its_layers_alone() -> None:
    none, all_layers = numbers_saved(RecomputeOptions()), numbers_saved(KINDS["uniform"])
    table = 2 * T * 3  # cosines and sines of the rotation are kept once for all layers
    block = none - numbers_saved(KINDS["block"])
    assert block * LAYERS == (none - all_layers - table) * 3


def results(model: GPT, recompute: RecomputeOptions, multiple: int = 1) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Losses, gradients of two micro-batches, and the arrivals of gradients."""
    model = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    arrived = with_main_grads(model)
    apply_recompute(model, recompute)
    assert [name for name, _ in model.named_parameters()] == names
    tokens, labels, weights, sequences = batch(101, [7, 1, 5, 8], multiple)
    torch.manual_seed(7)
    losses = [model(tokens, sequences, labels).losses for _ in range(2)]
    for one in losses:
        (one * weights).sum().backward()
    torch.rand(3)
    return torch.cat(losses).detach(), {n: p.main_grad for n, p in model.named_parameters()}, sorted(arrived)


def differences(model: GPT, recompute: RecomputeOptions, multiple: int = 1) -> list[str]:
    """What recompute changes, to the bit."""
    losses, gradients, arrived = results(model, RecomputeOptions(), multiple)
    after = torch.rand(1)
    again, again_gradients, again_arrived = results(model, recompute, multiple)
    assert torch.equal(after, torch.rand(1))  # the generator went on as without recompute
    drops = model.config.dropout != DropoutConfig()
    assert torch.equal(*losses.chunk(2)) != drops
    wrong = [name for name, gradient in gradients.items() if not torch.equal(gradient, again_gradients[name])]
    return [
        *wrong,
        *([] if torch.equal(losses, again) else ["losses"]),
        *([] if arrived == again_arrived else ["arrived"]),
    ]


@pytest.mark.parametrize("dropout", [pytest.param(False, marks=pytest.mark.full), True], ids=["", "dropout"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_to_the_bit(kind: str, dropout: bool) -> None:
    model = twin(config(dropout=DROPOUT) if dropout else config())
    jitter(model)
    assert differences(model, KINDS[kind]) == []


def split(sequence_parallel: bool, names: list[str]) -> dict[str, list[str]]:
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), tp=dist.get_world_size())
    model = twin(config(dropout=DROPOUT))
    jitter(model)
    parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel)
    return {name: differences(model, KINDS[name], mesh.tp) for name in names}


SOME = ["uniform of 2", "attention", "much"]
"""A region of each sort: whole layers, one module, and several in one layer, with and without collectives."""


@pytest.mark.parametrize("kinds", [SOME, pytest.param(list(KINDS), marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True], ids=["tp", "tp+sp"])
def test_split_over_ranks(sequence_parallel: bool, kinds: list[str]) -> None:
    for found in run(split, 2, sequence_parallel, kinds):
        assert found == {name: [] for name in kinds}


def test_ordinary_gradients() -> None:
    """Without main gradients, as under other strategies."""
    model = twin(config())
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], 1)
    found = []
    for recompute in (RecomputeOptions(), KINDS["norms"], KINDS["uniform of 2"]):
        apply_recompute(model, recompute)
        model.zero_grad()
        model(tokens, sequences, labels).losses.sum().backward()
        found.append([p.grad for p in model.parameters()])
    for gradients in found[1:]:
        for ours, theirs in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_inside_somebody_elses_checkpoint() -> None:
    model = twin(config())
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], 1)
    expected = torch.autograd.grad(model(tokens, sequences, labels).losses.sum(), list(model.parameters()))
    apply_recompute(model, KINDS["much"])
    losses = checkpoint(lambda: model(tokens, sequences, labels).losses, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(losses.sum(), list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_is_as_it_was() -> None:
    config_ = config()
    model = GPT(config_)
    mnn.init.initialize(model, 3)
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], 1)
    found = []
    for recompute in (RecomputeOptions(), KINDS["norms"], KINDS["mlp"]):
        apply_recompute(model, recompute)
        with_main_grads(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(tokens, sequences, labels).losses
        losses.sum().backward()
        found.append([p.main_grad for p in model.parameters()])
    for gradients in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0], strict=True))


class Counting(nn.Module):
    """Counts how often its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin()


class Sequential(nn.Module):
    """A model of plain layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})

    def forward(self, hidden: Any) -> Any:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("recompute", [KINDS["uniform"], RecomputeOptions(granularity="full", num_layers=2)])
def test_evaluation_is_untouched(recompute: RecomputeOptions) -> None:
    model = Sequential(Counting(), Counting())
    apply_recompute(model, recompute)
    x = torch.randn(3, requires_grad=True)

    def calls() -> list[int]:
        found = [layer.calls for layer in model.layers.values()]
        for layer in model.layers.values():
            layer.calls = 0
        return found

    model(x).sum().backward()
    assert calls() == [2, 2]
    with torch.no_grad():
        model(x)
    assert calls() == [1, 1]
    model.eval()
    model(x).sum().backward()
    assert calls() == [1, 1]
    apply_recompute(model.train(), RecomputeOptions())
    model(x).sum().backward()
    assert calls() == [1, 1]


def test_applied_anew_and_copied() -> None:
    model = Sequential(Counting(), Counting())
    apply_recompute(model, KINDS["uniform"])
    apply_recompute(model, RecomputeOptions(granularity="full", num_layers=2))
    twin_ = copy.deepcopy(model)
    twin_(torch.randn(3, requires_grad=True)).sum().backward()
    assert [layer.calls for layer in model.layers.values()] == [0, 0]
    assert [layer.calls for layer in twin_.layers.values()] == [2, 2]


class Carrying(nn.Module):
    """Works on a dict of tensors, in place, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, carry: dict[str, Tensor]) -> dict[str, Tensor]:
        carry["auxiliary"] = carry["auxiliary"] + carry["hidden"].square().mean()
        carry["hidden"] = (carry["hidden"] * self.weight).sin()
        return carry


@pytest.mark.parametrize("num_layers", [1, 3])
def test_dicts_that_layers_change(num_layers: int) -> None:
    model = Sequential(*(Carrying() for _ in range(3)))
    x = torch.randn(4, dtype=torch.float64)

    def gradients() -> tuple[list[Tensor], int]:
        with saved(model) as kept:
            out = model({"hidden": x.clone().requires_grad_() * 1, "auxiliary": torch.zeros((), dtype=torch.float64)})
        loss = out["hidden"].sum() + out["auxiliary"]
        return list(torch.autograd.grad(loss, list(model.parameters()))), len(kept)

    expected, _ = gradients()
    apply_recompute(model, RecomputeOptions(granularity="full", num_layers=num_layers))
    found, kept = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kept == 2 * (3 // num_layers)  # hidden states and the loss so far, of every region


class Between(Sequential):
    def forward(self, hidden: Any) -> Any:
        for layer in self.layers.values():
            hidden = layer(hidden + 1)
        return hidden


def test_groups_refuse_what_they_would_skip() -> None:
    in_groups = RecomputeOptions(granularity="full", num_layers=2)
    model = Between(Counting(), Counting())
    apply_recompute(model, in_groups)
    with pytest.raises(
        ConfigurationError, match=r"layers\.1 is recomputed together with the layer before.*num_layers=1"
    ):
        model(torch.randn(3, requires_grad=True))
    apply_recompute(model, RecomputeOptions())
    model.layers["1"].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"layers\.1 has forward hooks"):
        apply_recompute(model, in_groups)
    apply_recompute(model, KINDS["uniform"])


def test_another_argument_for_another_layer_is_refused() -> None:
    model = twin(config())
    apply_recompute(model, KINDS["uniform of 2"])
    tokens, _, _, sequences = batch(101, [7, 1, 5, 8], 1)
    first, second = list(model.layers.values())[:2]
    context = model.context(sequences, torch.float64)
    hidden = first(model.embed(tokens, sequences.positions), context)
    with pytest.raises(ConfigurationError, match="the same other arguments"):
        second(hidden, copy.copy(context))


def test_generators_are_put_back_only_where_something_draws() -> None:
    quiet, loud = twin(config()).layers["0"], twin(config(dropout=DROPOUT)).layers["0"]
    assert not Draws([quiet])()
    assert Draws([loud])()
    assert Draws([Counting()])()  # a foreign module may draw
    draws = Draws([quiet])
    quiet.mlp_dropout.p = 0.1
    assert draws()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "ful"}, r"granularity='ful'.*none, selective, full.*Did you mean 'full'"),
        ({"granularity": "selective"}, "needs modules"),
        ({"granularity": "selective", "modules": ["mlp"], "num_layers": 2}, "they need granularity='full'"),
        ({"granularity": "selective", "modules": ["mlp"], "method": "block"}, "they need granularity='full'"),
        ({"method": "uniform"}, "they need granularity='full'"),
        ({"modules": ["mlp"]}, "they need granularity='selective'"),
        ({"granularity": "full", "modules": ["mlp"]}, "they need granularity='selective'"),
        ({"granularity": "full", "method": "blocks"}, r"method='blocks'.*Did you mean 'block'"),
        ({"granularity": "full", "method": "block"}, "needs num_layers"),
        ({"granularity": "full", "num_layers": 0}, "num_layers=0; it must be at least 1"),
    ],
)
def test_options_that_do_not_belong_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RecomputeOptions(**options)


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (selective("mlp", "mpl.act"), r"'mpl\.act'.*matches no module.*Did you mean 'mlp\.act'"),
        (selective("layers.7.mlp"), r"'layers\.7\.mlp'.*matches no module"),
        (selective("attention.qkv"), r"'attention\.qkv'.*keeps only its input"),
        (selective("*_dropout"), "keeps a mask"),
        (selective("mlp", "mlp.act"), r"'mlp\.act'.*lies inside another"),
        (RecomputeOptions(granularity="full", num_layers=6), r"num_layers=6.*has 5 layers \(layers.0 to layers.4\)"),
    ],
)
def test_what_would_have_no_effect_is_refused(recompute: RecomputeOptions, message: str) -> None:
    with torch.device("meta"):
        model = GPT(config())
    with pytest.raises(ConfigurationError, match=message):
        check_recompute(model, recompute)
    with pytest.raises(ConfigurationError, match=message):
        apply_recompute(model, recompute)


def test_a_part_may_lack_what_the_whole_model_has() -> None:
    with torch.device("meta"):
        model = GPT(config())
    del model.layers["3"]
    with pytest.raises(ConfigurationError, match="matches no module"):
        apply_recompute(model, selective("layers.3.mlp"))
    apply_recompute(model, selective("layers.3.mlp"), whole=False)
    model.layers.clear()
    apply_recompute(model, KINDS["uniform of 2"])


def test_models_without_layers_and_foreign_forwards_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a model with `layers`"):
        apply_recompute(nn.Linear(2, 2), KINDS["uniform"])
    apply_recompute(nn.Linear(2, 2), RecomputeOptions())
    model = Sequential(Counting())
    model.layers["0"].forward = lambda x: x
    with pytest.raises(ConfigurationError, match=r"layers\.0 \(Counting\) has a forward that was set"):
        apply_recompute(model, KINDS["uniform"])


def test_an_output_that_no_linear_layer_reads_is_told() -> None:
    model = twin(config(attention=AttentionConfig(qk_norm=True)))
    apply_recompute(model, selective("attention.q_norm"))
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], 1)
    model(tokens, sequences, labels)
    with pytest.raises(ConfigurationError, match=r"layers\.0\.attention\.q_norm \(RMSNorm\) saves nothing"):
        model(tokens, sequences, labels)
