from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import CheckpointError, ConfigurationError, LayoutError, MegalightError
from megalight.models.gpt import GPT, GPTConfig, GPTModule
from megalight.models.gpt.plan import gpt_plan
from megalight.models.transforms import LoRA, describe, rebuild
from megalight.models.transforms.lora import merge
from megalight.nn import Linear, Section
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize as initialize_whole
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Replicated, Row
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.parallel.transform import TRANSFORMS, ModelTransform
from megalight.types import PackedSequences
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import BASE, VARIANTS, batch, canonical, jitter, twin
from tests.support.workers import run


def adapted(config: GPTConfig, lora: LoRA) -> GPT:
    """A one-device model with values everywhere, in ``B`` too."""
    model = twin(config)
    lora.change(model)
    initialize_whole(model, 3)
    jitter(model)
    return model


@pytest.mark.parametrize("kind", [nn.Linear, Linear])
def test_the_formula_of_the_paper(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind(6, 8, bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    model = nn.ModuleDict({"up": layer}).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    LoRA(rank=3, targets=["up"], alpha=12.0).change(model)
    initialize_whole(model, 1)
    adapter = model["up"].adapter["default"]
    plain = x @ model["up"].weight.T + model["up"].bias
    torch.testing.assert_close(model["up"](x), plain)  # B is 0
    nn.init.normal_(adapter.B)
    expected = plain + (12.0 / 3) * x @ adapter.A.T @ adapter.B.T
    torch.testing.assert_close(model["up"](x), expected)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        f"up.adapter.default.{x}" for x in "AB"
    ]
    assert abs(float(adapter.A.detach().std()) - (3 * 6) ** -0.5) < 0.1
    twin = copy.deepcopy(model)
    merge(twin)
    assert [name for name, _ in twin.named_parameters()] == ["up.weight", "up.bias"]
    torch.testing.assert_close(twin["up"](x), expected)
    torch.testing.assert_close(model["up"](x), expected)


def test_each_section_of_a_fused_layer_has_a_pair_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": nn.ModuleDict({"qkv": Linear(6, [Section(n, 4, 2) for n in "qkv"])})}).double()
    LoRA(rank=2, targets=["q", "block.v"], alpha=2.0).change(model)
    names = canonical(model, dict(model.named_parameters()))
    assert {name: tuple(t.shape) for name, t in names.items() if "lora" in name} == {
        "block.q.lora_A.weight": (2, 6),
        "block.v.lora_A.weight": (2, 6),
        "block.q.lora_B.weight": (4, 2),
        "block.v.lora_B.weight": (4, 2),
    }
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    values, x = canonical(model, dict(model.named_parameters())), torch.randn(5, 6, dtype=torch.float64)

    def section(name: str) -> torch.Tensor:
        y = x @ values[f"block.{name}.weight"].T
        down, up = (values.get(f"block.{name}.lora_{part}.weight") for part in "AB")
        return y if down is None else y + x @ down.T @ up.T

    expected = torch.cat([section(name) for name in "qkv"], -1)
    torch.testing.assert_close(model["block"]["qkv"](x), expected)
    merge(model)
    torch.testing.assert_close(model["block"]["qkv"](x), expected)


def test_merged_logits_are_equal() -> None:
    model = adapted(GPTConfig(**BASE, **VARIANTS["gqa_two_kv_heads"]), LoRA(rank=3))
    tokens, _, _, sequences = batch(101, [7, 1, 5], 1)
    expected = model(tokens, sequences).logits
    merge(model)
    torch.testing.assert_close(model(tokens, sequences).logits, expected, rtol=1e-12, atol=1e-12)
    assert not any("adapter" in name for name, _ in model.named_modules())


def test_an_adapter_of_a_tied_head_is_not_merged_into_the_embedding() -> None:
    model = adapted(GPTConfig(**{**BASE, "tie_embeddings": True}), LoRA(rank=3, targets=["output_layer", "q"]))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigurationError, match=r"head\.output_layer has an adapter and shares its weight with"):
        merge(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def parity(
    options: dict,
    sequence_parallel: bool,
    targets: list[str],
    plan: ParallelizePlan | None = None,
    kind: type[LoRA] = LoRA,
) -> dict[str, float]:
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    whole = adapted(GPTConfig(**{**BASE, **options}), kind(rank=3, targets=targets, alpha=5.0))
    model = copy.deepcopy(whole)
    specs = parallelize(model, gpt_plan(model) | (plan or ParallelizePlan()), mesh, sequence_parallel=sequence_parallel)
    tokens, labels, weights, sequences = batch(101, [7, 1, 5, 8], tp)
    losses, expected = (m(tokens, sequences, labels).losses for m in (model, whole))
    errors = {"losses": relative_error(losses, expected)}
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    assert all((p.grad is not None) is p.requires_grad for p in model.parameters())
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, specs, mesh)
    wanted = canonical(
        whole, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.named_parameters()}
    )
    assert {name for name in wanted if "lora" in name} == grads.keys()
    return errors | {name: relative_error(grads[name], wanted[name]) for name in grads}


@pytest.mark.parametrize(
    ("world", "variant", "sequence_parallel", "targets"),
    [
        (2, "mha", False, ["layers.*"]),
        (2, "mha", True, ["layers.*"]),
        (4, "gqa_two_kv_heads", True, ["q", "v", "proj", "up"]),  # two ranks hold each k and v
        (4, "gqa_two_kv_heads", False, ["k", "down"]),
        (2, "gpt2", True, ["layers.*"]),
    ],
)
def test_adapters_are_split_with_their_layers(
    world: int, variant: str, sequence_parallel: bool, targets: list[str]
) -> None:
    for errors in run(parity, world, VARIANTS[variant], sequence_parallel, targets):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def drawn(sequence_parallel: bool) -> bool:
    mesh = ParallelMesh(2, dist.get_rank(), tp=2)
    lora, config = LoRA(rank=3), GPTConfig(**BASE)
    with torch.device("meta"):
        model = GPT(config)
        lora.change(model)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel)
    materialize(model, "cpu")
    initialize(model, specs, 7)
    whole = GPT(config)
    lora.change(whole)
    initialize_whole(whole, 7)
    ours = gather_canonical(dict(model.named_parameters()), specs, mesh, sum_partial=False)
    theirs = canonical(whole, dict(whole.named_parameters()))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].double()) for name in ours)
    assert all(bool(t.any()) is ("lora_B" not in name) for name, t in ours.items())
    return True


def test_initial_values_do_not_depend_on_the_layout() -> None:
    assert all(run(drawn, 2, True))


class Foreign(nn.Module):
    """Linear layers of torch, of which the plan keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(self.down(torch.tanh(self.up(x))))


FOREIGN = {
    "whole": ParallelizePlan({"up": Column(tokens="whole"), "down": Row(), "kept": Replicated()}),
    "gathered": ParallelizePlan({"up": Column(tokens="gathered"), "down": Row(), "kept": Replicated()}),
    "out": ParallelizePlan({"up": Column(gather_output=True), "down": Replicated(), "kept": Replicated()}),
}


def foreign(kind: str) -> dict[str, float]:
    mesh = ParallelMesh(2, dist.get_rank(), tp=2)
    torch.manual_seed(0)
    whole = Foreign().double()
    LoRA(rank=2, targets=["up", "down", "kept"]).change(whole)
    initialize_whole(whole, 1)
    jitter(whole)
    model = copy.deepcopy(whole)
    specs = parallelize(model, FOREIGN[kind], mesh)
    x = torch.randn(4, 6, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(ours).square().sum().backward()
    whole(theirs).square().sum().backward()
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, specs, mesh)
    wanted = canonical(whole, {n: p if p.grad is None else p.grad for n, p in whole.named_parameters()})
    assert len(grads) == 6
    return {"x": relative_error(ours.grad, theirs.grad)} | {n: relative_error(grads[n], wanted[n]) for n in grads}


@pytest.mark.parametrize("kind", FOREIGN)
def test_adapters_in_foreign_models(kind: str) -> None:
    for errors in run(foreign, 2, kind):
        assert all(error <= 1e-9 for error in errors.values()), errors


def test_a_record_in_plain_values() -> None:
    lora = LoRA(rank=4, targets=["q", "v"], alpha=8.0, dropout=0.1)
    described = describe([lora])
    values = {"rank": 4, "targets": ["q", "v"], "alpha": 8.0, "dropout": 0.1, "rank_stabilized": False, "exclude": []}
    values["adapter"] = "default"
    assert described == [{"name": "lora", "values": values}]
    assert rebuild(described) == [lora]
    # Records of older releases know no ``exclude``.
    assert rebuild([{"name": "lora", "values": {key: values[key] for key in values if key != "exclude"}}]) == [lora]
    with pytest.raises(MegalightError, match=r"unknown model transform 'lorra'.*Did you mean 'lora'"):
        rebuild([{"name": "lorra", "values": {}}])
    with pytest.raises(ConfigurationError, match="rang"):
        rebuild([{"name": "lora", "values": {"rang": 4}}])


def test_rank_stabilized() -> None:
    assert LoRA(rank=16, alpha=8.0, rank_stabilized=True).scale == 2.0
    assert LoRA(rank=16, alpha=8.0).scale == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank is 0; it must be at least 1"),
        ({"rank": 2, "exclude": "q"}, r"exclude='q' is one string; give a list: \['q'\]"),
        ({"rank": 2, "targets": "q"}, r"targets='q' is one string; give a list: \['q'\]"),
        ({"rank": 2, "targets": []}, "targets is empty"),
        ({"rank": 2, "alpha": 0.0}, "alpha=0.0; it must be above 0"),
        ({"rank": 2, "dropout": 1.0}, "dropout=1.0; it must be at least 0 and below 1"),
    ],
)
def test_values_out_of_range(values: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LoRA(**values)


def test_excluded_layers_get_no_adapter() -> None:
    model = GPT(GPTConfig(**BASE))
    LoRA(rank=2, targets=["attention.*"], exclude=["layers.0.*", "k"]).change(model)
    found = {name for name in canonical_tensors(model) if ".lora_A" in name}
    layers = range(1, model.config.num_layers)
    assert found == {f"layers.{i}.attention.{part}.lora_A.weight" for i in layers for part in ("q", "v", "proj")}


def test_models_that_do_not_fit() -> None:
    config = GPTConfig(**BASE)

    def change(**values: object) -> str:
        model = GPT(config)
        with pytest.raises(ConfigurationError) as error:
            LoRA(**values).change(model)
        return str(error.value)

    assert "target 'q_prj' of LoRA matches no linear layer of GPT." in change(rank=2, targets=["q", "q_prj"])
    assert "Did you mean 'gate'?" in change(rank=2, targets=["gates"])
    assert "It has q, k, v, proj, gate, up, down" in change(rank=2, targets=["gates"])
    assert "exclude 'q_prj' of LoRA matches no linear layer of GPT." in change(rank=2, exclude=["q_prj"])
    assert "exclude=['layers.*'] of LoRA leaves none of the layers of targets=['q', 'k']" in change(
        rank=2, targets=["q", "k"], exclude=["layers.*"]
    )
    assert "rank=21 is larger than layers.0.mlp.gate_up allows, which has 24 input features" in change(
        rank=21, targets=["mlp.*"]
    )
    model = GPT(config)
    LoRA(rank=2).change(model)
    with pytest.raises(ConfigurationError, match=r"GPT has an adapter 'default' already"):
        LoRA(rank=2, targets=["q"]).change(model)


def test_losses_refuse_an_adapter_of_the_output_layer() -> None:
    model = GPT(GPTConfig(**BASE))
    LoRA(rank=2, targets=["output_layer"]).change(model)
    tokens, sequences = torch.arange(4), PackedSequences.of_lengths([4])
    assert model(tokens, sequences).logits is not None
    with pytest.raises(ConfigurationError, match="the output layer has an adapter, and losses use its weight alone"):
        model(tokens, sequences, labels=tokens)


def test_layers_that_cannot_be_split_with_an_adapter() -> None:
    mesh = ParallelMesh(2, 0, tp=2)
    model = GPT(GPTConfig(**BASE))
    LoRA(rank=2, targets=["output_layer"]).change(model)
    with pytest.raises(LayoutError, match="head has an adapter, which the style VocabHeadStyle does not split"):
        parallelize(model, gpt_plan(model), mesh)
    model = GPT(GPTConfig(**BASE))
    LoRA(rank=2).change(model)
    with pytest.raises(LayoutError, match=r"layers\.0\.attention\.proj has an adapter.*overlap='pipelined'"):
        parallelize(model, gpt_plan(model), mesh, tensor=TensorOptions(overlap="pipelined"))
    options = TensorOptions(overlap={"*.qkv": "pipelined"})
    parallelize(GPT(GPTConfig(**BASE)), gpt_plan(model), mesh, tensor=options)


@dataclass(frozen=True)
class Named(ModelTransform):
    """A transform of a user's own that changes nothing."""

    name: ClassVar[str] = "named in tests"
    layers: tuple[str, ...] = ()

    def change(self, model: nn.Module) -> None:
        return


def test_a_transform_with_a_tuple_is_the_one_in_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFORMS._entries, Named.name, Named)
    config = GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, max_sequence_length=4)
    module = GPTModule(config)
    module.transforms.append(Named(("a", "b")))
    saved = json.loads(json.dumps(module.describe_model()))
    module.check_checkpoint({"model": saved})
    module.transforms[0] = Named(("a",))
    with pytest.raises(CheckpointError, match="has these transforms"):
        module.check_checkpoint({"model": saved})
