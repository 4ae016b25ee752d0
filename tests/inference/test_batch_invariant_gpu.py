"""Batch-invariant mode on a GPU: 10,000 tokens bitwise, alone, among 64, with graphs, and in a training forward."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.inference import Completion, DynamicEngine, SamplingParams
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, InitConfig, LatentConfig
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.ops.batch_invariant import batch_invariant_mode
from megalight.ops.linear import linear
from megalight.types import PackedSequences

pytestmark = pytest.mark.gpu

MODELS: dict[str, tuple[int, int, Any]] = {
    "llama": (160, 1, {"num_kv_heads": 2}),
    "sinks": (24, 8, {"attention": AttentionConfig(softmax="learnable", window=100, window_pattern=2, qk_norm=True)}),
    "latent": (
        24,
        8,
        {
            "mixer_pattern": ("latent_attention",),
            "latent": LatentConfig(kv_rank=512, q_rank=256, head_dim=128, rotary_dim=64, value_dim=128),
        },
    ),
    "experts": (24, 8, {"moe": MoEConfig(num_experts=16, ffn_hidden_size=512)}),
}
"""New tokens of each of 64 texts, which of the texts run alone (each n-th), and what is special."""


def build(name: str) -> GPT:
    config = GPTConfig(
        num_layers=2,
        hidden_size=1024,
        num_heads=8,
        ffn_hidden_size=2816,
        vocab_size=32000,
        max_sequence_length=512,
        init=InitConfig(std=0.05),
        **MODELS[name][2],
    )
    with torch.device("cuda"):
        model = GPT(config).bfloat16()
    initialize(model, 1)
    return model.eval()


def add(engine: DynamicEngine, prompt: list[int], new: int, number: int) -> None:
    params = SamplingParams(temperature=0.7 if number % 2 else 0)
    engine.add(prompt, max_new_tokens=new, seed=number, sampling_params=params, log_probs=True)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_training_alone_and_among_64(name: str) -> None:
    model, (new, stride, _) = build(name), MODELS[name]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(32000, (1 + 3 * number,), generator=generator).tolist() for number in range(64)]
    options: dict[str, Any] = {"num_blocks": 1600, "batch_invariant": True}
    spans: dict[str, float] = {}

    def completions(what: str, engine: DynamicEngine, numbers: range, apart: bool = False) -> list[Completion]:
        begin, found = perf_counter(), list[Completion]()
        for number in numbers:
            add(engine, prompts[number], new, number)
            found += engine.run().values() if apart else ()
        found += engine.run().values()
        spans[what] = perf_counter() - begin
        return found

    everyone = range(64)
    among = DynamicEngine(model, max_sequences=64, step_tokens=256, **options)
    each = completions("among 64", among, everyone)
    assert among.step_log.graph_uses, "no step is recorded"
    del among
    single = DynamicEngine(model, max_sequences=1, **options)
    eager = DynamicEngine(model, max_sequences=64, cuda_graphs=0, step_tokens=999, **options)
    for what, numbers, found in (
        ("alone", everyone[::stride], completions("alone", single, everyone[::stride], True)),
        ("without graphs", everyone, completions("without graphs", eager, everyone)),
    ):
        wrong = [
            number
            for number, one in zip(numbers, found, strict=True)
            if (one.tokens, one.log_probs) != (each[number].tokens, each[number].log_probs)
        ]
        assert not wrong, what
    assert single.step_log.graph_uses, "no step is recorded"
    rows = [[*prompt, *one.tokens] for prompt, one in zip(prompts, each, strict=True)]
    sequences = PackedSequences.of_lengths([len(row) - 1 for row in rows], "cuda")
    tokens, labels = (
        torch.tensor([id for row in rows for id in row[cut]], device="cuda")
        for cut in (slice(None, -1), slice(1, None))
    )
    begin = perf_counter()
    with batch_invariant_mode():
        losses = model.train()(tokens, sequences, labels).losses
    if name != "llama":  # the longest test; gradients compile many kernels
        losses.sum().backward()
        assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    parts = losses.detach().double().neg().split([*sequences.lengths])
    expected = [part[len(prompt) - 1 :].tolist() for prompt, part in zip(prompts, parts, strict=True)]
    wrong = [
        number
        for number, (one, other) in enumerate(zip(expected, each, strict=True))
        for mine, theirs in zip(one, other.log_probs or [], strict=True)
        if mine != theirs
    ]
    spans["training"] = perf_counter() - begin
    times = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in spans.items())
    print(f"{name}: {sum(map(len, expected))} tokens, {len(wrong)} differ from training; {times}")
    assert not wrong


@pytest.mark.parametrize("shape", [(1024, 1024), (32000, 1024), (515, 1000), (28672, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_a_row_have_the_same_bits_among_any_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, device="cuda", dtype=dtype)
    x = torch.randn(1000, shape[1], device="cuda", dtype=dtype)

    def product(rows: Tensor) -> Tensor:
        with torch.no_grad(), batch_invariant_mode():
            return linear(rows, weight)

    whole = product(x)
    exact = x.double() @ weight.double().T
    assert (whole.double() - exact).norm() < (5e-3 if dtype == torch.bfloat16 else 1e-5) * exact.norm()
    for first, last in ((0, 1), (77, 78), (130, 194), (5, 133), (300, 557)):
        assert torch.equal(product(x[first:last]), whole[first:last])
