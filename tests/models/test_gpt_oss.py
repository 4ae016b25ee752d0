"""GPT-OSS: logits and gradients of the sinks equal those of ``transformers``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.models.gpt import GPT
from megalight.models.gpt.presets import preset
from megalight.types import PackedSequences
from tests.canonical import load_canonical
from tests.reference_gpt import canonical_gradients, relative_error

transformers = pytest.importorskip("transformers")

LENGTH = 41
"""More than two windows."""


def theirs() -> Any:
    torch.manual_seed(1)
    rotary = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    config = transformers.GptOssConfig(
        num_hidden_layers=4,
        num_local_experts=6,
        num_experts_per_tok=4,
        vocab_size=53,
        hidden_size=24,
        intermediate_size=20,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.3,
        rope_parameters={**rotary, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.GptOssForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 2 and parameter.shape[-1] != 24:
                parameter.add_(0.5 * torch.randn_like(parameter))
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(8)  # so that some activations reach their limit
    return model


def converted(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Canonical tensors. Theirs stack the experts as ``[E, in, out]``, with gate and up in turn."""
    found = {
        "embed.word.weight": tensors["model.embed_tokens.weight"],
        "head.norm.weight": tensors["model.norm.weight"],
        "head.output_layer.weight": tensors["lm_head.weight"],
    }
    for i in range(layers):
        ours, source = f"layers.{i}", f"model.layers.{i}"
        found[f"{ours}.attention_norm.weight"] = tensors[f"{source}.input_layernorm.weight"]
        found[f"{ours}.mlp_norm.weight"] = tensors[f"{source}.post_attention_layernorm.weight"]
        found[f"{ours}.attention.sink.offset"] = tensors[f"{source}.self_attn.sinks"]
        for leaf in ("weight", "bias"):
            for name, other in zip(("q", "k", "v", "proj"), "qkvo", strict=True):
                found[f"{ours}.attention.{name}.{leaf}"] = tensors[f"{source}.self_attn.{other}_proj.{leaf}"]
            found[f"{ours}.mlp.router.{leaf}"] = tensors[f"{source}.mlp.router.{leaf}"]
            suffix = "" if leaf == "weight" else "_bias"
            wide, narrow = (tensors[f"{source}.mlp.experts.{name}_proj{suffix}"] for name in ("gate_up", "down"))
            for expert in range(len(wide)):
                for name, values in (("gate", wide[expert][..., ::2]), ("up", wide[expert][..., 1::2])):
                    found[f"{ours}.mlp.experts.{expert}.{name}.{leaf}"] = values.T if leaf == "weight" else values
                down = narrow[expert]
                found[f"{ours}.mlp.experts.{expert}.down.{leaf}"] = down.T if leaf == "weight" else down
    return found


def test_equal_logits_and_gradients() -> None:
    model, published = theirs(), preset("gpt_oss_20b")
    assert published.moe is not None
    config = replace(
        published,
        num_layers=4,
        hidden_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=20,
        vocab_size=53,
        attention=replace(published.attention, window=7),
        moe=replace(published.moe, num_experts=6),
    )
    ours = GPT(config).double()
    load_canonical(ours, converted(dict(model.named_parameters()), 4))
    tokens = torch.randint(0, 53, (2, LENGTH))
    expected = model(tokens).logits
    found = ours(tokens.flatten(), PackedSequences.of_uniform(2, LENGTH)).logits.view_as(expected)
    assert relative_error(found, expected) < 2e-6
    cotangent = torch.randn_like(expected)
    for logits in (found, expected):
        (logits * cotangent).sum().backward()
    wanted = converted({name: p.grad for name, p in model.named_parameters()}, 4)
    gradients = canonical_gradients(ours)
    assert gradients.keys() == wanted.keys()
    for key, gradient in gradients.items():
        # their rotary tables are float32, and the wide activations amplify that
        if not key.endswith("attention.k.bias") or wanted[key].norm() > 1e-9:
            assert relative_error(gradient, wanted[key]) < 2e-4, key
