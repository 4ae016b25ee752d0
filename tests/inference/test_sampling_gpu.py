"""Sampling on a GPU: kernels against the reference, recorded, and decode steps that never wait for the device."""

from __future__ import annotations

import pytest
import torch

from megalight.inference import DynamicEngine, SamplingParams
from megalight.models.gpt import GPT, GPTConfig
from megalight.nn.init import initialize
from megalight.ops.sample_tokens import kept_mask, reference_cut, reference_peak, sample_tokens, triton_cut, triton_peak
from tests.inference.test_sampler import EOS, SETTINGS
from tests.ops.test_sample_tokens import rows_of

pytestmark = pytest.mark.gpu

VOCABULARY = 128_256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_keep_and_sample_what_the_reference_does(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(24, VOCABULARY, generator=torch.Generator().manual_seed(2))).to("cuda", dtype)
    rows = rows_of(
        24,
        temperature=[0, 1, 0.7, 1.3] * 6,
        top_k=[2**31] * 8 + [50] * 8 + [1, 2, 1000, 100_000] * 2,
        top_p=[1, 0.9, 0.5, 1, 0.95, 0.3, 1, 0.99] * 3,
        seed=list(range(24)),
    )
    rows = rows._replace(reals=rows.reals.cuda(), numbers=rows.numbers.cuda())
    peak, _ = triton_peak(logits)
    assert torch.equal(peak, reference_peak(logits)[0])
    found, known = triton_cut(logits, rows, peak), reference_cut(logits, rows, peak)
    apart = (kept_mask(logits, rows, peak, found) != kept_mask(logits, rows, peak, known)).sum(-1)
    # Sums of 128,256 shares are rounded, so a token at the edge of top-p may be on either side.
    size = kept_mask(logits, rows, peak, known).sum(-1)
    assert (apart <= 1 + size // 1000).all()
    tokens = sample_tokens(logits, rows)
    assert (tokens == sample_tokens(logits, rows, backend="reference")).sum() >= 22
    graph, numbers = torch.cuda.CUDAGraph(), rows.numbers.clone()
    with torch.cuda.graph(graph):
        recorded = sample_tokens(logits, rows)
    graph.replay()
    assert torch.equal(recorded, tokens)
    rows.numbers[1] += 100  # other seeds, without another recording
    graph.replay()
    assert not torch.equal(recorded, tokens)
    rows.numbers.copy_(numbers)
    graph.replay()
    assert torch.equal(recorded, tokens)


def test_decode_never_waits_for_the_device_however_it_samples() -> None:
    config = GPTConfig(num_layers=2, hidden_size=128, num_heads=2, vocab_size=1000, max_sequence_length=128)
    with torch.device("cuda"):
        model = GPT(config).bfloat16()
    initialize(model, 1)
    engine = DynamicEngine(model, num_blocks=80, max_sequences=16)
    for number, settings in enumerate(SETTINGS):
        params = SamplingParams(**{**settings, "min_new_tokens": 60})
        engine.add([5, 6, 7 + number], max_new_tokens=60, sampling_params=params, eos_id=EOS, seed=number, n=2)
    engine.add([8], max_new_tokens=60, sampling_params=SamplingParams(temperature=0), log_probs=True)
    for _ in range(20):  # kernels are compiled, and steps recorded
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = engine.run()
    assert {len(each.tokens) for each in found.values()} == {60}
    assert engine.step_log.graphed > 40
