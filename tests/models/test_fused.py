"""Fused ops inside models of ``transformers``, held to the models as they are."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.models import fused as fused_ops
from megalight.models.fused import FusedLinear, Head, fuse, unfuse
from megalight.nn import transformers_attention
from megalight.ops.parameter import collect
from tests.parallel.tiny_transformers import errors_of, tiny
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attn_implementation": "sdpa",
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-eager": (
        "Llama",
        {"tie_word_embeddings": True, "attn_implementation": "eager", "attention_bias": True, "mlp_bias": True},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral": ("Mistral", {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def models(kind: str = "llama", **more: Any) -> tuple[Any, Any]:
    """The model as it is, and its fused copy."""
    name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    fused = copy.deepcopy(model)
    assert fuse(fused) == fuse(fused) == 2
    return model, fused


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(53, (3, 17), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(17) < 4, -100)} | more


def trained(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients."""
    model.zero_grad()
    loss = model(**batch(**inputs)).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error of a tensor."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_generated_text_are_equal(kind: str) -> None:
    model, fused = models(kind)
    loss, gradients = trained(model)
    ours, own = trained(fused)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert distance(own, gradients) < 3e-6
    model.eval(), fused.eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
        told = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        assert torch.equal(fused.generate(ids, **told), model.generate(ids, **told))


def test_what_runs_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    names = ("rms_norm", "add_rms_norm", "gated_pair", "apply_rotary", "linear", "linear_cross_entropy", "attention")
    for name in names:
        place = transformers_attention if name == "attention" else fused_ops
        op = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, op=op, name=name, **k: (called.add(name), op(*a, **k))[1])
    _, fused = models()
    output = fused(**batch())
    assert called == {*names}
    assert output.logits is None
    assert output.past_key_values is None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_autocast_is_no_less_exact(kind: str) -> None:
    """Against the model in float32: as near as ``transformers`` is, whose hidden states stay in float32."""
    model, fused = models(kind)
    loss, gradients = trained(model)
    errors = []
    for one in (model, fused):
        with torch.autocast("cpu", torch.bfloat16):
            found, own = trained(one)
        assert abs(float(found - loss)) < 1e-2 * float(loss)
        errors.append(distance(own, gradients))
    assert errors[1] < 2 * errors[0], errors
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.model(batch()["input_ids"]).last_hidden_state.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(11)},
        {"ignore_index": 3, "labels": torch.arange(51).view(3, 17)},
        {"shift_labels": torch.arange(51).view(3, 17)},
        {"attention_mask": torch.ones(3, 17).tril(8).long().flip(1)},
        {"position_ids": torch.cat([torch.arange(9), torch.arange(8)]).repeat(3, 1)},  # two documents
        {"output_hidden_states": True},
        {"use_cache": False},
        {"logits_to_keep": 17},
    ],
)
def test_arguments_mean_what_they_mean_in_transformers(inputs: dict[str, Any]) -> None:
    model, fused = models()
    loss, gradients = trained(model, **inputs)
    ours, own = trained(fused, **inputs)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert distance(own, gradients) < 3e-6
    if "output_hidden_states" in inputs:
        assert len(fused(**batch(**inputs)).hidden_states) == 3


def test_another_loss_or_head_stays() -> None:
    model, fused = models()
    model.loss_function = fused.loss_function = lambda logits, labels, **_: (logits * 2).logsumexp(-1).mean()
    assert torch.allclose(*(trained(one)[0] for one in (model, fused)))
    assert fused(**batch()).logits is not None
    fused = models()[1]
    fused.lm_head = nn.Sequential(fused.lm_head)
    assert fused(**batch()).logits is not None


def _times(factor: float, loss: Any, *args: Any, **kwargs: Any) -> Any:
    return factor * loss(*args, **kwargs)


def test_a_loss_without_a_name_stays() -> None:
    model, fused = models()
    plain = model(**batch()).loss
    model.loss_function = fused.loss_function = functools.partial(_times, 2.0, model.loss_function)
    assert torch.allclose(fused(**batch()).loss, 2 * plain, rtol=1e-5)


def test_tuples_are_tuples() -> None:
    model, fused = models()
    ours, theirs = (one(**batch(return_dict=False)) for one in (fused, model))
    assert type(ours) is tuple
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
def test_checkpointed_layers(kind: str) -> None:
    model, fused = models(kind)
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    assert distance(trained(fused)[1], trained(model)[1]) < 3e-6


def test_parts_that_we_lack_stay() -> None:
    model, _ = models(hidden_act="mish")
    first = model.model.layers[0]
    first.input_layernorm = nn.RMSNorm(32)
    expected = trained(model)[0]
    assert fuse(model) == 1
    assert all(type(one).__module__.startswith("transformers.") for one in (first, first.mlp))
    torch.testing.assert_close(trained(model)[0], expected, rtol=1e-6, atol=0)


def test_models_stay_theirs(tmp_path: Path) -> None:
    """Pickles, folders and ``unfuse``."""
    model, fused = models()
    assert isinstance(fused, transformers.LlamaForCausalLM)
    again = pickle.loads(pickle.dumps(fused))
    assert type(again) is type(fused)
    assert type(again.lm_head) is Head
    fused.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is transformers.LlamaForCausalLM
    unfuse(again)
    assert [type(one) for one in again.modules()] == [type(one) for one in model.modules()]
    assert fuse(nn.Linear(2, 2)) == 0


FAMILIES = {
    "gemma2": "norms add 1 to weights, four in a layer, soft caps",
    "gemma3_text": "windows in some layers, norms of heads that add 1",
    "glm4": "four norms in another order, pairs that are neighbors, gate and up of one layer",
    "gpt_oss": "experts with clamp and biases, sinks, tables of angles that do not repeat",
    "granite": "multipliers of scores, sums and logits",
    "phi3": "one layer to queries, keys and values",
    "olmo2": "norms after sublayers, and over all heads",
    "cohere": "layer norms, and a parallel layer",
    "qwen3_moe": "experts",
}
"""Family -> what is its own. The last layer of each is fused as a whole."""
PARTS = {"Norm", "FusedAttention", "Layer", "Decoder", "CausalLM", "FusedRotary"}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_differ_in_form(family: str) -> None:
    model: Any = tiny(family).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fused = copy.deepcopy(model)
    assert fuse(fused) == 2
    parts = {type(module).__mro__[1].__name__ for module in fused.modules() if "fused_form" in vars(module)}
    moe = family in ("gpt_oss", "qwen3_moe")
    assert parts == PARTS | ({"FusedExperts"} if moe else {"GatedMLP"})
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    losses = []
    for one in (model, fused):
        one.train()(input_ids=ids, labels=ids).loss.backward()
        losses.append(one.eval()(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for (name, wanted), found in zip(model.named_parameters(), fused.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found[1].grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=name)


def _errors(families: list[str], sequence_parallel: bool) -> dict[str, dict[str, float]]:
    return {family: errors_of(family, sequence_parallel, fused=True) for family in families}


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.full)])
def test_tensor_parallelism_splits_them_alike(sequence_parallel: bool) -> None:
    for found in run(_errors, 2, [*FAMILIES], sequence_parallel):
        for family, errors in found.items():
            assert errors.pop("share of parameters") < 0.75, family
            assert max(errors.values()) < 1e-9, (family, errors)


def test_numbers_decide_what_a_module_is() -> None:
    """A module with the names and shapes of a known form, and other numbers, stays as it is."""
    for change in (0.5, 1.0):
        model, _ = models()
        layer = model.model.layers[0]
        for kind in ("input_layernorm", "mlp", "self_attn"):
            module = getattr(layer, kind)
            forward = type(module).forward
            own = type(kind, (type(module),), {"forward": _scaled(forward, change)})
            module.__class__ = own
        assert fuse(model) == (1 if change != 1.0 else 2)
        found = [
            isinstance(each, fused_ops.FusedModule) for each in (layer.input_layernorm, layer.mlp, layer.self_attn)
        ]
        assert found == [change == 1.0] * 3


def _scaled(forward: Any, factor: float) -> Any:
    def scaled(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        # Also to signatures: a norm takes one argument.
        found = forward(self, hidden_states, **kwargs)
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    @functools.wraps(forward)
    def alike(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scaled(self, args[0] if args else kwargs.pop("hidden_states"), **kwargs)

    return alike


def test_layers_of_torch_add_to_main_gradients() -> None:
    _, fused = models()
    assert isinstance(fused.model.layers[0].mlp.up_proj, FusedLinear)
    weight = fused.model.layers[0].mlp.up_proj.weight
    collect(weight, torch.zeros_like(weight))
    trained(fused)
    assert weight.grad is None
    wanted = models()[1]
    trained(wanted)
    torch.testing.assert_close(weight.main_grad, wanted.model.layers[0].mlp.up_proj.weight.grad)


def test_tables_of_angles_keep_the_dtype_that_foreign_attention_needs() -> None:
    """Its attention turns queries by the tables as they are: float32 ones would make queries of float32."""
    model: Any = models()[0].bfloat16().eval()
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward
    ids = torch.randint(3, 50, (2, 9))
    exact, plain = copy.deepcopy(model).double()(ids).logits, model(ids).logits
    fuse(model)
    assert not any(isinstance(module, fused_ops.FusedRotary) for module in model.modules())
    assert (model(ids).logits - exact).norm() < 1.2 * (plain - exact).norm()  # both are rounded to bfloat16
