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
from megalight.models.fused import Head, fuse, part_of, unfuse
from tests.parallel.tiny_transformers import tiny

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
    for name in ("rms_norm", "add_rms_norm", "gated_pair", "apply_rotary", "attention", "linear_cross_entropy"):
        op = getattr(fused_ops, name)
        monkeypatch.setattr(fused_ops, name, lambda *a, op=op, name=name, **k: (called.add(name), op(*a, **k))[1])
    _, fused = models()
    output = fused(**batch())
    assert called == {"rms_norm", "add_rms_norm", "gated_pair", "apply_rotary", "attention", "linear_cross_entropy"}
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


def test_checkpointed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fused = models()
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


FUSED: dict[str, int] = {
    **{"arcee": 2, "ernie4_5": 2, "glm": 2, "glm4_moe": 2, "hunyuan_v1_dense": 2, "qwen3_moe": 2, "smollm3": 2},
    **{"gemma": 0, "granite": 0, "minicpm3": 0, "olmo2": 0, "phi3": 0, "exaone4": 0},
}
"""Family -> the layers that are fused as a whole. Other parts are in all of them."""


@pytest.mark.parametrize("family", FUSED)
def test_parts_with_the_code_of_a_known_family(family: str) -> None:
    model: Any = tiny(family).float()
    fused = copy.deepcopy(model)
    assert fuse(fused) == FUSED[family]
    names = {
        type(module).__mro__[1].__name__ for module in fused.modules() if isinstance(module, fused_ops.FusedModule)
    }
    assert len(names) >= 3
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    for one in (model, fused):
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, wanted), found in zip(model.named_parameters(), fused.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_code_that_differs_is_left_alone() -> None:
    assert part_of(torch.nn.Linear) is None
    model: Any = tiny("gemma2")
    kinds = {type(module) for module in model.modules()}
    # Its norms add 1 to their weights, and its layers have four of them.
    assert not any(part_of(kind) in (fused_ops.Norm, fused_ops.Layer) for kind in kinds)


@pytest.mark.parametrize("family", ["gemma2", "glm4"])
def test_tables_of_angles_keep_the_dtype_that_foreign_attention_needs(family: str) -> None:
    """Their attention turns queries by the tables as they are: float32 ones would make queries of float32."""
    model: Any = tiny(family).bfloat16().eval()
    ids = torch.randint(3, 50, (2, 9))
    expected = model(ids).logits
    fuse(model)
    assert not any(isinstance(module, fused_ops.FusedRotary) for module in model.modules())
    torch.testing.assert_close(model(ids).logits, expected, atol=0.05, rtol=0.05)
