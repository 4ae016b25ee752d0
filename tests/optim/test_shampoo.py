"""Shampoo: its state lies on the homes of matrices, in every layout and through checkpoints."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT, GPTConfig
from megalight.optim import AdamConfig, MuonConfig, Shampoo, ShampooConfig
from megalight.optim.shampoo import inverse_root
from tests.optim.test_muon import STEPS, goes_on, train_by_hand
from tests.strategies.test_experts import PLAIN
from tests.strategies.training import BASE, assert_same_run, fit
from tests.support.workers import run

SHAMPOO = ShampooConfig(lr=0.02, root_every=2, root_eps=1e-3, dtype="float64")
CONFIG = AdamConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, matrices=SHAMPOO)


def root(moment: Tensor) -> Tensor:
    """The inverse fourth root, as the inverse of the square root of the square root."""
    matrix = moment / moment.norm() + SHAMPOO.root_eps * torch.eye(len(moment), dtype=moment.dtype)
    values, vectors = np.linalg.eigh(matrix.numpy())
    return torch.from_numpy(np.linalg.inv(vectors @ np.diag(np.sqrt(np.sqrt(values))) @ vectors.T))


@functools.cache
def by_hand(config: GPTConfig) -> dict[str, Any]:
    def step(name: str, weight: Tensor, gradient: Tensor, kept: dict[str, Any]) -> None:
        kept["steps"] = steps = kept.get("steps", -1) + 1
        for key, value, decay in (
            ("mean", gradient, SHAMPOO.momentum),
            ("left", gradient @ gradient.T, SHAMPOO.beta),
            ("right", gradient.T @ gradient, SHAMPOO.beta),
        ):
            kept[key] = decay * kept.get(key, 0.0) + (1 - decay) * value
        if steps % SHAMPOO.root_every == 0:
            kept["roots"] = root(kept["left"]), root(kept["right"])
        moved = kept["roots"][0] @ kept["mean"] @ kept["roots"][1]
        update = moved * (0.2 * moved.numel() ** 0.5 / moved.norm())
        weight.mul_(1 - SHAMPOO.lr * SHAMPOO.weight_decay).sub_(update, alpha=SHAMPOO.lr)

    return train_by_hand(config, CONFIG, step)


def _rank(config: GPTConfig, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(config, STEPS, options, optimizer=CONFIG, micro_batch_size=1, **strategy)


LAYOUTS: list[Any] = [
    (BASE, 1, {}, "optim"),
    (PLAIN, 4, {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}, "optim"),
    *(
        pytest.param(each, marks=pytest.mark.full)
        for each in (
            (BASE, 2, {}, "optim_grads_params"),
            (BASE, 4, {"tensor_parallel": 2, "pipeline_parallel": 2}, "no_shard"),
            (BASE, 4, {"context_parallel": 2}, "optim_grads"),
        )
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[1]}-{layout[2]}-{layout[3]}")
def test_every_layout_trains_as_one_device(layout: tuple[GPTConfig, int, dict[str, Any], str]) -> None:
    config, ranks, strategy, level = layout
    assert_same_run(run(_rank, ranks, config, strategy, {"level": level}, timeout=240)[0], by_hand(config))


@pytest.mark.full
def test_its_state_goes_on_in_another_layout(tmp_path: Path) -> None:
    # After a step between two computations of the roots, which must come from the checkpoint then.
    state = {"exp_avg", "exp_avg_sq", *SHAMPOO.build([nn.Parameter(torch.zeros(1))]).home_state((1, 1))}
    goes_on(CONFIG, 1, state, by_hand(PLAIN), tmp_path)


def test_a_plain_loop_has_the_same_steps() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(2, 3, 5, dtype=torch.float64))  # a stack of two matrices
    optimizer = Shampoo(
        [{"params": [weight], "whole_matrices": True}], 0.1, weight_decay=0.0, root_eps=1e-3, dtype=torch.float64
    )
    gradient = torch.randn_like(weight)
    weight.grad, before = gradient, weight.detach().clone()
    optimizer.step()
    for index in range(2):
        g = gradient[index]
        moved = root(g @ g.T) @ g @ root(g.T @ g)
        expected = before[index] - 0.1 * 0.2 * 15**0.5 * moved / moved.norm()
        torch.testing.assert_close(weight[index].detach(), expected)


def test_a_matrix_without_a_gradient_keeps_its_state() -> None:
    optimizer = Shampoo([nn.Parameter(torch.zeros(1))])
    state = {name: torch.randn(2, *size) for name, size in optimizer.home_state((3, 4)).items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    matrices = torch.randn(2, 3, 4)
    matrices[1] = 0
    optimizer.update(matrices, state)
    for name in ("left", "right", "mean"):
        assert torch.equal(state[name][1], before[name][1])
        assert not torch.equal(state[name][0], before[name][0])


def test_the_root_is_an_inverse_fourth_root() -> None:
    factor = torch.randn(4, 3, dtype=torch.float64)
    found = inverse_root((factor @ factor.T)[None], 1e-2)[0]
    whole = factor @ factor.T / (factor @ factor.T).norm() + 1e-2 * torch.eye(4)
    torch.testing.assert_close(torch.linalg.matrix_power(found, 4) @ whole, torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.0}, "beta of Shampoo is 1.0"),
        ({"root_every": 0}, "root_every of Shampoo is 0"),
        ({"root_eps": 0.0}, "root_eps of Shampoo is 0.0"),
        ({"dtype": "int8"}, "dtype of Shampoo is 'int8'"),
        ({"lr": -1.0}, "lr of Shampoo is -1.0"),
        ({"gather_bytes": 0}, "gather_bytes of Shampoo is 0"),
        ({"names": ("*norm*",)}, "matches '*norm*' of matrices.names, and is no matrix"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        replace(CONFIG, matrices=replace(SHAMPOO, **options)).build(GPT(BASE).named_parameters())
    assert message in str(error.value)


def test_matrices_have_one_optimizer() -> None:
    with pytest.raises(ConfigurationError, match=r"both muon and matrices \(ShampooConfig\) are given"):
        replace(CONFIG, muon=MuonConfig())
