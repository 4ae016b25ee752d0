"""The engine on weights of few bits: stored quantized, or cast to FP8 in each product."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from megalight.inference import DynamicEngine
from megalight.models.gpt import GPT
from megalight.nn.linear import Linear
from megalight.ops.quantized_weight import store
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision
from megalight.types import PackedSequences
from tests.inference.test_engine import alone, ask, tokens_of
from tests.inference.test_generate import build

PROMPT = [*range(12)]


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_texts_are_those_of_the_decoded_weights(name: str) -> None:
    model = build(name).requires_grad_(False)
    decoded = deepcopy(model)
    for linear, exact in zip(model.layers.modules(), decoded.layers.modules(), strict=True):
        if isinstance(linear, Linear) and linear.weight.shape[1] % 2 == 0:
            assert isinstance(exact, Linear)
            exact.weight.data = store(linear.weight, "nf4", 2).values()
            assert bool(torch.isnan(linear.weight).all())
    expected = alone(decoded)
    assert expected != alone(build(name)), "quantization changes nothing"
    engine = DynamicEngine(model, num_blocks=40, block_size=3, step_tokens=5)
    ask(engine)
    assert tokens_of(engine.run()) == expected


def test_a_model_of_fp8_training_has_the_scores_of_its_forward_pass() -> None:
    model = build(hidden_size=32).float()
    with torch.no_grad():
        exact = scores_of(model)
    # its rotations look for magnitudes, which what is stored has no use for
    apply_low_precision(model, LowPrecisionOptions(recipe="tensorwise", emulate=True), ParallelMesh())
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    engine.add(PROMPT, max_new_tokens=3, prompt_log_probs=True, seed=0)
    found = torch.tensor(engine.run()[0].prompt_log_probs)
    with torch.no_grad():
        expected = scores_of(model)
    assert (expected - exact).abs().max() > 0.01, "8 bits change nothing"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def scores_of(model: GPT) -> Tensor:
    scores = model(torch.tensor(PROMPT), PackedSequences.of_lengths([len(PROMPT)])).logits
    assert isinstance(scores, Tensor)
    return scores[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
