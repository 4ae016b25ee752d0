"""Generation on a GPU equals computing every step anew."""

import pytest
import torch

from megalight.inference import generate
from megalight.models.gpt import GPT, GPTConfig, InitConfig
from megalight.nn.init import initialize
from megalight.types import PackedSequences

pytestmark = pytest.mark.gpu


def test_greedy_completions_equal_recomputation():
    config = GPTConfig(
        num_layers=2,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=1000,
        max_sequence_length=64,
        init=InitConfig(std=0.2),
    )
    with torch.device("cuda"):
        model = GPT(config)
    initialize(model, 1)
    prompts = [[5, 6, 7], [8], list(range(9, 30))]
    rows = [list(prompt) for prompt in prompts]
    for _ in range(8):
        for row in rows:
            sequences = PackedSequences.of_lengths([len(row)], "cuda")
            with torch.no_grad():
                row.append(int(model(torch.tensor(row, device="cuda"), sequences).logits[-1].argmax()))
    expected = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    assert generate(model, prompts, max_new_tokens=8, temperature=0) == expected
