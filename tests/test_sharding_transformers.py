"""What users of transformers do with a sharded model: freeze, compile, checkpoint, evaluate, generate, move weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

import megalight
from megalight.errors import ConfigurationError
from tests.parallel.test_transformers import llama
from tests.support.workers import run

WORLD, STEPS, MICRO = 2, 2, 2
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, **NO_DROPOUT}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=51, n_embd=32, n_layer=3, n_head=2, n_positions=32, **GPT2)),
    "llama": lambda: llama(3, 2, tied=False),
    "bert": lambda: BertForMaskedLM(BertConfig(vocab_size=51, max_position_embeddings=32, **SMALL)),
    "vit": lambda: ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **SMALL)),
}
LAYERS = ("GPT2Block", "LlamaDecoderLayer", "BertLayer", "ViTLayer")


def _freeze(model: Any) -> None:
    """The embeddings, and parts of the first layer: a unit of both kinds."""
    for parameter in list(model.parameters())[:6]:
        parameter.requires_grad_(False)


def _compile(model: Any) -> None:
    for module in model.modules():
        if type(module).__name__ in LAYERS:
            module.forward = torch.compile(module.forward, backend="eager")


def _compile_with_hooks(model: Any) -> None:
    for module in model.modules():
        if type(module).__name__ in LAYERS:
            module.compile(backend="eager")


WAYS: dict[str, Callable[[Any], None]] = {
    "plain": lambda model: None,
    "frozen": _freeze,
    "compiled": _compile,
    "compiled with hooks": _compile_with_hooks,
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
}


def _model(name: str, way: str) -> Any:
    torch.manual_seed(4)
    model = MODELS[name]().double().train()
    WAYS[way](model)
    return model


def _batch(name: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64),
            "labels": torch.randint(4, (2,), generator=generator),
        }
    ids = torch.randint(3, 51, (2, 7), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _train(name: str, model: Any, optimizer: Any, clip: Callable[[], object], ranks: list[int]) -> None:
    for step in range(STEPS):
        for micro in range(MICRO):
            for rank in ranks:
                batch = _batch(name, 100 * step + 10 * micro + rank)
                (model(**batch).loss / (MICRO * len(ranks))).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def _used(name: str, way: str) -> None:
    """Train as on one device; evaluate, generate; move weights out and in; refuse what would read NaN."""
    one, model = _model(name, way), _model(name, way)
    optimizer = torch.optim.AdamW(one.parameters(), 1e-2)
    _train(name, one, optimizer, lambda: nn.utils.clip_grad_norm_(one.parameters(), 0.5), list(range(WORLD)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sharded = megalight.fully_shard(model, optimizer)
    initial = sharded.state_dict()
    _train(name, model, optimizer, lambda: sharded.clip_grad_norm_(0.5), [dist.get_rank()])
    trained = sharded.state_dict()
    assert bool(trained) == (dist.get_rank() == 0)
    for key, value in one.state_dict().items() if trained else ():
        np.testing.assert_allclose(trained[key], value, rtol=1e-9, atol=1e-11, err_msg=key)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = model.eval()(**_batch(name, 99)).logits.clone(), one.eval()(**_batch(name, 99)).logits
        torch.testing.assert_close(*logits, rtol=1e-8, atol=1e-10)
    if name in ("gpt2", "llama"):
        ids = _batch(name, 5)["input_ids"]
        wanted = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **wanted), one.generate(ids, **wanted))
    with pytest.raises(ConfigurationError, match=r"sharded.state_dict\(\)"):
        model.state_dict()
    with pytest.raises(ConfigurationError, match=r"sharded.load_state_dict\(state\)"):
        model.load_state_dict(one.state_dict())
    wrong = dict(copy.copy(initial), more=torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"has 1 that the module lacks \['more'\]"):
        sharded.load_state_dict(wrong)
    assert _same(sharded.state_dict(), trained)
    sharded.load_state_dict(initial)
    assert _same(sharded.state_dict(), initial)
    # Masters have followed: a step from no gradients moves weights by their averages alone, from the loaded values.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert _same(sharded.state_dict(), initial)


def _warned(compiled: bool) -> list[str]:
    model = _model("llama", "compiled with hooks" if compiled else "compiled")
    with patch.object(logging.getLogger("megalight.sharding"), "warning") as warn:
        megalight.fully_shard(model, torch.optim.SGD(model.parameters(), 0.1))
    return [call.args[0] for call in warn.mock_calls]


def test_compiled_hooks_are_told() -> None:
    """Nothing is compiled before the first forward, so this is quick."""
    for (told,) in run(_warned, WORLD, True):
        assert "LlamaDecoderLayer.compile() also traces the hooks" in told
    assert run(_warned, WORLD, False) == [[]] * WORLD


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


QUICK = {("gpt2", "plain"), ("vit", "frozen"), ("bert", "checkpointing")}
"""Without the compiler, whose start takes longer than all of these."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.full)
        for name in MODELS
        for way in WAYS
    ],
)
def test_a_model_does_sharded_what_it_does_alone(name: str, way: str) -> None:
    run(_used, WORLD, name, way)
