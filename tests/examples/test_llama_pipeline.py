"""The Llama of the pipeline example against ``LlamaForCausalLM`` itself, in float64: losses, norms, weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from llama_pipeline import LlamaPipelineModule
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megalight.strategies import MegatronStrategy
from tests.strategies.training import Losses, gathered
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, ROWS, LENGTH, CLIP = 3, 4, 10, 0.5
ENDS = {"embed": "model.embed_tokens", "head.norm": "model.norm", "head.lm_head": "lm_head"}
"""The example's names and those of transformers."""


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attn_implementation="sdpa",
        tie_word_embeddings=tied,
    )


def batches() -> list[tuple[torch.Tensor]]:
    return [
        (torch.randint(37, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step)),) for step in range(STEPS)
    ]


def _rank(tied: bool, options: dict[str, Any]) -> dict[str, Any]:
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    module, losses = LlamaPipelineModule(config(tied)), Losses()
    runner = trainer(
        strategy, callbacks=[losses], gradient_clip_val=CLIP, max_steps=STEPS, use_distributed_sampler=False
    )
    runner.fit(module, DataLoader(batches(), batch_size=None))
    final = gathered(strategy, module)
    return {"losses": losses.losses, "norms": losses.norms, "initial": losses.initial, "final": final}


def theirs(name: str) -> str:
    """The name of a tensor in transformers, by its canonical one."""
    name = name.removeprefix("model.")
    end = next((end for end in ENDS if name.startswith(f"{end}.")), None)
    return f"model.{name}" if end is None else ENDS[end] + name.removeprefix(end)


@functools.cache
def alone(tied: bool) -> dict[str, Any]:
    """Training transformers' own model on whole batches, from the initial weights of a run on one device."""
    (drawn,) = run(_rank, 1, tied, {})
    model = LlamaForCausalLM(config(tied)).double()
    model.load_state_dict(
        {theirs(name): torch.from_numpy(value) for name, value in drawn["initial"].items()}, strict=not tied
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for (ids,) in batches():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss.detach()))
        optimizer.step()
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "initial": drawn["initial"], "final": final}


@pytest.mark.parametrize(
    ("world", "tied", "options"),
    [
        (1, False, {}),
        (2, False, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        (2, True, {"pipeline_parallel": 2}),
        pytest.param(
            *(4, False, {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_it_trains_as_transformers_does(world: int, tied: bool, options: dict[str, Any]) -> None:
    expected = alone(tied)
    for rank in run(_rank, world, tied, options):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for name, value in rank["initial"].items():
            np.testing.assert_array_equal(value, expected["initial"][name], err_msg=name)
        assert {theirs(name) for name in rank["final"]} == set(expected["final"])
        for name, value in rank["final"].items():
            reference = expected["final"][theirs(name)]
            assert np.linalg.norm(value - reference) <= 1e-9 * np.linalg.norm(reference), name
