"""Context parallelism of families off the attention interface: loss and gradients are those of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.apply import check_split, split
from megalight.parallel.layout import Layout
from tests.parallel.tiny_transformers import tiny, trained
from tests.support.workers import run

FORMS = ("bloom", "mt5", "qwen3_5_text", "openai-gpt", "higgs_audio_v2")
"""ALiBi in a fused layer; relative biases in encoder and decoder; layers that are computed whole; ``Conv1D``; a mask of
tokens that layers get."""
MORE = ("bert", "camembert", "codegen", "deepseek_v32", "minimax", "mpt", "olmo_hybrid", "opt", "stablelm", "whisper")


def _errors(families: tuple[str, ...]) -> dict[str, dict[str, float]]:
    return {family: trained(family, {"context_parallel": 2}) for family in families}


def _check(families: tuple[str, ...]) -> None:
    for ranks in run(_errors, 2, families, timeout=240):
        for family, errors in ranks.items():
            wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
            assert not wrong, (family, wrong)


def test_forms_equal_the_plain_model() -> None:
    _check(FORMS)


@pytest.mark.full
def test_more_families() -> None:
    _check(MORE)


def _refused(model: Any, **options: Any) -> str:
    layout = Layout(context_parallel=2, **options)
    with pytest.raises(LayoutError) as error:
        check_split(model, layout.mesh(4), layout, torch.float32, torch.device("cpu"))
    return str(error.value)


def test_what_cannot_be_divided_is_named() -> None:
    assert "(MambaForCausalLM) has layers of type linear_attention" in _refused(tiny("mamba"))
    assert "draws dropout of 0.1 in transformer.drop" in _refused(tiny("gptj", embd_pdrop=0.1))
    assert "context_parallel=2, and not over tensor_parallel=2 besides" in _refused(tiny("gptj"), tensor_parallel=2)
    assert "has attention outside of a list of layers (model.local_encoder.cross_attn_" in _refused(tiny("blt"))
    assert "(reformer.encoder.layers.0) that gets hidden states as prev_attn_output and" in _refused(tiny("reformer"))
    odd = tiny("gptj", num_attention_heads=1, n_head=1)
    assert "num_attention_heads is 1; it must be an integer that 2 divides. Lower context_parallel" in _refused(odd)


def _short() -> str:
    model: nn.Module = tiny("gptj")
    layout = Layout(context_parallel=2)
    split(model, layout.mesh(2, torch.distributed.get_rank()), layout, "")
    with torch.no_grad():  # generation: each rank computes all tokens
        whole = tiny("gptj")(torch.arange(3, 10)[None]).logits
        torch.testing.assert_close(model(torch.arange(3, 10)[None]).logits, whole)
    with pytest.raises(LayoutError) as error:
        model(torch.arange(3, 10)[None])
    return str(error.value)


def test_odd_lengths_are_for_generation() -> None:
    assert "must be a multiple of 2" in run(_short, 2)[0]
