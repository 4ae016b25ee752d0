"""The plain decoder that stands beside the engine: cached steps give the logits of one pass."""

import torch

from benchmarks.compiled_decoding import PROMPT, TINY, Decoder, check, decoded


@torch.no_grad()
def test_cached_steps_are_those_of_one_pass() -> None:
    model, prompt = Decoder(TINY).double().eval(), torch.randint(10, 96, (1, PROMPT))
    assert check(model, prompt) < 1e-6  # rotary embedding is in float32
    assert decoded(model, model, prompt, 5).shape == (1, 5)
