"""Our attention in models of ``transformers``: outputs and gradients are those of their own ``eager`` attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megalight.errors import LayoutError
from megalight.nn.transformers_attention import NAME, LazyMask, attend, calling, mask, use_attention
from megalight.types import PackedSequences
from tests.parallel.tiny_transformers import tiny

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "phi3", "deepseek_v3", "llama4_text", "gpt2"]
"""They differ in windows, soft caps, sinks, latent heads, chunks, scales and biases."""
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))


def without(rows: slice) -> dict[str, Tensor]:
    """Padding in the first row. What follows it is no label."""
    real, labels = torch.ones_like(IDS), IDS.clone()
    real[0, rows], labels[0, rows] = 0, -100
    labels[0, min(8, rows.stop or 8)] = -100
    return {"attention_mask": real, "labels": labels}


BATCHES: dict[str, dict[str, Tensor]] = {
    "whole": {"labels": IDS},
    "padded left": without(slice(3)),
    "padded right": without(slice(6, None)),
    "packed": {
        "labels": IDS,
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]]),
    },
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let softmax stay in float64, where ``eager`` asks for float32."""
    softmax = functional.softmax

    def kept(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(scores, dim, dtype=None if scores.dtype == torch.float64 else dtype)

    monkeypatch.setattr(functional, "softmax", kept)


def pair(family: str) -> tuple[Any, Any]:
    """A model with ``eager`` attention, and its copy with ours."""
    theirs: Any = tiny(family)
    ours = copy.deepcopy(theirs)
    assert use_attention(ours)
    assert ours.config._attn_implementation == NAME
    theirs.set_attn_implementation("eager")
    return theirs, ours


def results(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(input_ids=IDS, use_cache=False, **batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_eager(family: str) -> None:
    theirs, ours = pair(family)
    for name, batch in BATCHES.items():
        wanted, found = results(theirs, batch), results(ours, batch)
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            # The gradient of a bias of keys is zero up to rounding.
            error = (found[key] - value).norm() / (value.norm() + 1e-6)
            assert error < 1e-9, f"{name}: {key}"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(family: str, cache: str) -> None:
    theirs, ours = (model.eval() for model in pair(family))
    real = BATCHES["padded left"]["attention_mask"]
    options = {"attention_mask": real, "max_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    options |= {"disable_compile": True, "eos_token_id": None, "return_dict_in_generate": True, "output_scores": True}
    wanted, found = (model.generate(IDS, **options) for model in (theirs, ours))
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(wanted.scores), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_a_mask_of_another_form(family: str) -> None:
    theirs, ours = pair(family)
    real = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.5
    real |= torch.eye(9, dtype=torch.bool)
    # Theirs adds masks to scores.
    added = torch.zeros_like(real, dtype=torch.float64).masked_fill(~real, torch.finfo(torch.float64).min)
    wanted = results(theirs, {"labels": IDS, "attention_mask": added})
    found = results(ours, {"labels": IDS, "attention_mask": real})
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)


def test_windows_do_not_pass_over_padding_inside_of_a_row() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    function, real = sliding_window_causal_mask_function(3), torch.ones(1, 6, dtype=torch.bool)
    assert isinstance(mask(1, 6, 6, mask_function=function, attention_mask=real), LazyMask)
    real[0, 2] = False
    made = mask(1, 6, 6, mask_function=function, attention_mask=real, dtype=torch.float64)
    assert made.dtype == torch.bool
    assert not isinstance(made, LazyMask)
    assert made[0, 0, 4].tolist() == [False, False, False, True, True, False]


def test_a_mask_has_memory_only_where_a_layer_reads_it() -> None:
    real = torch.ones(2, 4, dtype=torch.bool)
    real[0, 0] = False
    made = mask(2, 4, 4, attention_mask=real, dtype=torch.float64)
    assert isinstance(made, LazyMask)
    assert isinstance(made.detach(), LazyMask)
    assert (made.shape, made.dtype, made.ndim) == ((2, 1, 4, 4), torch.float64, 4)
    low = torch.finfo(torch.float64).min
    assert made[0, 0].tolist() == [[low] * 4, [low, 0, low, low], [low, 0, 0, low], [low, 0, 0, 0]]
    scores = torch.ones(2, 3, 4, 4, dtype=torch.float64)
    for found in (scores + made, made + scores, scores.add(made)):
        assert type(found) is Tensor
        assert torch.equal(found[1, 2] == 1, torch.ones(4, 4, dtype=torch.bool).tril())
    with calling(PackedSequences.of_lengths([4, 4])), pytest.raises(LayoutError, match="reads its attention mask"):
        _ = mask(2, 4, 4) != 0


def test_a_layer_that_reads_the_mask() -> None:
    """Doge chooses tokens by values and mask: its own masks reach ``sdpa``, and losses are those of ``eager``."""
    theirs, ours = pair("doge")
    for name in ("whole", "padded right"):
        wanted, found = results(theirs, BATCHES[name]), results(ours, BATCHES[name])
        for key, value in wanted.items():
            assert (found[key] - value).norm() / (value.norm() + 1e-6) < 1e-9, f"{name}: {key}"


def test_sparse_layers_keep_their_attention() -> None:
    assert use_attention(tiny("deepseek_v32")) == 0
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(LayoutError, match="chooses itself \\(indices\\)"):
        attend(nn.Identity(), q, q, q, None, indices=torch.zeros(1, 3, 2))


def test_what_a_user_chose_stays() -> None:
    model: Any = tiny("llama")
    model.set_attn_implementation("eager")
    assert use_attention(model) == 0
    assert model.config._attn_implementation == "eager"


def test_the_name_is_not_saved(tmp_path: Any) -> None:
    model: Any = pair("llama")[1]
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
