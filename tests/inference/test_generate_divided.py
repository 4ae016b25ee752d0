"""The model of a checkpoint, divided over ranks in layouts that a command can ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight.cli.main import main
from megalight.inference import generate, load_divided, load_model
from megalight.models.gpt import GPT, GPTConfig, InitConfig, MultiTokenConfig
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.nn.moe import Experts, MoEConfig, SharedConfig
from megalight.parallel.mesh import ParallelMesh
from tests.support.workers import run

CONFIG = GPTConfig(
    num_layers=5,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=61,
    max_sequence_length=40,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=10, pattern=(False, True), shared=SharedConfig(ffn_hidden_size=8)),
    mtp=MultiTokenConfig(num_layers=1),
    init=InitConfig(std=0.4),
)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [60, 0]]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = GPT(CONFIG).double()
    initialize(model, 3)
    save_model(held_model("gpt", CONFIG, model), tmp_path / "c")
    return tmp_path / "c"


def ask(model: Any) -> list[list[int]]:
    return generate(model, PROMPTS, max_new_tokens=9, temperature=0)


def _generate(path: Path, degrees: dict[str, int]) -> tuple[list[list[int]], list[int], int]:
    model = load_divided(path, ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees))
    return ask(model), [*map(int, model.layers)], expert_weights(model)


def expert_weights(model: torch.nn.Module) -> int:
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    return sum(weight.numel() for stack in stacks for weight in stack.parameters())


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_every_rank_gets_the_tokens_of_one_device(saved: Path, degrees: dict[str, int]) -> None:
    whole = load_model(saved)
    expected = ask(whole)
    found = run(_generate, 2, saved, degrees)
    assert [tokens for tokens, _, _ in found] == [expected, expected]
    layers = [[0, 1], [2, 3, 4]] if "pp" in degrees else [[0, 1, 2, 3, 4]] * 2
    assert sorted(held for _, held, _ in found) == sorted(layers)
    if "tp" in degrees:
        assert {count * degrees.get("ep", 1) for _, _, count in found} == {expert_weights(whole)}


def test_degrees_that_cannot_be_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(saved), "-p", "a", "--tensor-parallel", "2", "--expert-parallel"]
    for degree, message in (
        ("0", "--tensor-parallel is 2, --expert-parallel 0 and --pipeline-parallel 1; all must be at least 1"),
        ("4", "--expert-parallel 4 does not divide --tensor-parallel 2"),
    ):
        assert main([*words, degree]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
