"""Generation with the cache equals computing every step anew, for several prompts of different lengths."""

import pytest
import torch

from megalight.errors import ConfigurationError, DataError
from megalight.inference import BlockPool, Cache, SamplingParams, generate, sample, stream
from megalight.models.gpt import (
    GPT,
    AttentionConfig,
    DeltaNetConfig,
    DropoutConfig,
    GPTConfig,
    InitConfig,
    LatentConfig,
    NormConfig,
    PositionConfig,
    TemperatureConfig,
)
from megalight.nn.init import initialize
from megalight.ops.rotary import RotaryAxes
from megalight.types import PackedSequences

SIZES = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 61, "max_sequence_length": 40}
STYLES = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {
        "norm": NormConfig(kind="layer"),
        "position": PositionConfig(kind="learned"),
        "activation": "gelu",
        "tie_embeddings": True,
    },
    "windowed": {"attention": AttentionConfig(window=4, window_pattern=(True, False), qk_norm=True)},
    "hybrid": {"mixer_pattern": ("conv", "attention"), "conv_kernel": 4},
    "latent": {
        "mixer_pattern": ("latent_attention",),
        "latent": LatentConfig(kv_rank=10, q_rank=14, head_dim=6, rotary_dim=4, value_dim=7),
    },
    "sinks": {"attention": AttentionConfig(softmax="learnable", window=4, window_pattern=2)},
    "tempered": {
        "position": PositionConfig(pattern=(False, True)),
        "attention": AttentionConfig(output_gate=True, temperature=TemperatureConfig(length=4, scale=0.5)),
    },
    "delta": {
        "mixer_pattern": ("gated_delta_net", "attention"),
        "delta": DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=5, key_dim=3),
    },
    "capped": {"attention": AttentionConfig(softcap=2.0)},
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [5, 6, 7]]


def build(style: str = "llama", **more) -> GPT:
    model = GPT(GPTConfig(**SIZES | STYLES[style] | {"init": InitConfig(std=0.4)} | more)).double()
    initialize(model, 5)
    return model.eval()


def last_logits(model: GPT, rows: list[list[int]]) -> torch.Tensor:
    """``[N, V]`` without a cache, one sequence after the other."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor(row), PackedSequences.of_lengths([len(row)])).logits[-1:] for row in rows])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("block_size", [None, 3])
def test_logits_with_cache_equal_recomputation(style, block_size):
    model = build(style)
    cache = Cache(
        model.layers, len(PROMPTS), 20, None if block_size is None else BlockPool(len(PROMPTS), 12, block_size)
    )
    rows = [list(prompt) for prompt in PROMPTS]
    fresh = rows
    generator = torch.Generator().manual_seed(0)
    # one step takes two tokens for one sequence and leaves another out
    for slots, counts in [([0, 1, 2, 3], None), ([0, 1, 2, 3], [1, 1, 1, 1]), ([0, 3, 2], [2, 1, 1]), ([1, 0], [3, 1])]:
        if counts is not None:
            fresh = [torch.randint(0, 61, (count,), generator=generator).tolist() for count in counts]
            for slot, ids in zip(slots, fresh, strict=True):
                rows[slot] = rows[slot] + ids
        sequences = cache.extend(slots, [len(ids) for ids in fresh], "cpu")
        ends = sequences.cu_seqlens[1:].long() - 1
        with torch.no_grad():
            tokens = torch.tensor([token for ids in fresh for token in ids])
            found = model(tokens, sequences, states=cache.states, rows=ends).logits
        expected = last_logits(model, [rows[slot] for slot in slots])
        assert (found - expected).norm() < 1e-12 * expected.norm()
    assert cache.lengths == [len(row) for row in rows]


@pytest.mark.parametrize("style", ["llama", "gpt2", "hybrid", "latent"])
def test_greedy_completions_equal_recomputation(style):
    model = build(style)
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(9):
        for row, token in zip(rows, last_logits(model, rows).argmax(-1).tolist(), strict=True):
            row.append(token)
    expected = [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]
    assert generate(model, PROMPTS, max_new_tokens=9, temperature=0) == expected


def test_draws_equal_recomputation():
    model = build()
    rows, seeds = [list(prompt) for prompt in PROMPTS], torch.arange(11, 15)
    for _ in range(6):
        places = torch.tensor([len(row) for row in rows])
        chosen = SamplingParams(temperature=0.7, top_k=20, top_p=0.9)
        drawn = sample(last_logits(model, rows), chosen, seeds, places)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            row.append(token)
    found = generate(
        model,
        PROMPTS,
        max_new_tokens=6,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        seed=11,
    )
    assert found == [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


def test_completions_end_at_the_end_token():
    model = build()
    free = generate(model, PROMPTS, max_new_tokens=12, temperature=0)
    eos = free[2][4]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in free]
    assert any(len(row) < 12 for row in expected)
    assert any(len(row) == 12 for row in expected)
    assert generate(model, PROMPTS, max_new_tokens=12, temperature=0, eos_id=eos) == expected
    steps = list(stream(model, PROMPTS, max_new_tokens=12, sampling_params=SamplingParams(temperature=0), eos_id=eos))
    assert [sorted(step) for step in steps[:1]] == [[0, 1, 2, 3]]
    assert [[step[i] for step in steps if i in step] for i in range(4)] == expected


def test_the_model_and_the_random_state_stay_as_they_were():
    model = build(dropout=DropoutConfig(hidden=0.5)).train()
    model.layers["0"].eval()
    state = torch.get_rng_state()
    first = generate(model, PROMPTS, max_new_tokens=4, temperature=0)
    assert first == generate(model, PROMPTS, max_new_tokens=4, temperature=0)
    generate(model, PROMPTS, max_new_tokens=4)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not model.layers["0"].training
    assert not model.layers["0"].mlp.training
    assert torch.is_grad_enabled()


def test_training_after_generation():
    model = build().train()
    generate(model, [[1, 2, 3]], max_new_tokens=2)
    losses = model(torch.tensor([1, 2, 3]), PackedSequences.of_lengths([3]), torch.tensor([2, 3, 4])).losses
    losses.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bad_requests_are_refused():
    model = build()
    with pytest.raises(DataError, match="prompt of 7 tokens and 34 new ones exceed max_sequence_length = 40"):
        generate(model, PROMPTS, max_new_tokens=34)
    generate(model, PROMPTS[2:3], max_new_tokens=33)
    for prompts in ([], [[1], []]):
        with pytest.raises(DataError, match="a prompt is empty"):
            generate(model, prompts, max_new_tokens=1)
    with pytest.raises(DataError, match="token 61 is outside"):
        generate(model, [[60, 61]], max_new_tokens=1)
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        generate(model, PROMPTS, max_new_tokens=0)
    with pytest.raises(DataError, match="21 tokens and the cache has room for 20"):
        Cache(model.layers, 1, 20).extend([0], [21], "cpu")


def test_completions_follow_positions_on_axes():
    """An image of 4 tokens at time 1, 2 x 2, then text behind the largest position."""
    model = build(position=PositionConfig(axes=RotaryAxes((1, 1, 1))))
    prompts = [[5, 6, 7, 8, 9, 10], [8, 3]]
    places = [torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]), torch.tensor([[0, 4]] * 3)]
    found = generate(model, prompts, max_new_tokens=5, temperature=0, axis_positions=places)
    for prompt, where, completion in zip(prompts, places, found, strict=True):
        row = list(prompt)
        for token in completion:
            further = where.max() + 1 + torch.arange(len(row) - len(prompt)).expand(3, -1)
            sequences = PackedSequences.of_lengths([len(row)]).with_axes(torch.cat([where, further], 1))
            with torch.no_grad():
                assert model(torch.tensor(row), sequences).logits[-1].argmax() == token
            row.append(token)
    assert found != generate(model, prompts, max_new_tokens=5, temperature=0)
    with pytest.raises(DataError, match=r"axis_positions have shapes \[\(3, 6\)\]; .* need \[\(3, 6\), \(3, 2\)\]"):
        generate(model, prompts, max_new_tokens=5, axis_positions=places[:1])
    with pytest.raises(DataError, match=r"position\.axes of the model is null"):
        generate(build(), prompts, max_new_tokens=5, axis_positions=places)
