"""Models that a file describes and does not hold are refused before any of them is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from megalight import checkpoint
from megalight.checkpoint import Box, View
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt import GPTConfig, GPTModule, MultiTokenConfig
from megalight.models.gpt.model import GPT
from megalight.models.gpt.presets import PRESETS
from megalight.models.loading import blocks, check_held, saved_model
from megalight.models.stored import held_model, open_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.nn.moe import MoEConfig, RouterConfig

DENSE = GPTConfig(num_layers=2, hidden_size=8, num_heads=2, ffn_hidden_size=8, vocab_size=11, max_sequence_length=8)
MOE = MoEConfig(num_experts=4, ffn_hidden_size=4, router=RouterConfig(top_k=2))
SPARSE = replace(DENSE, num_layers=4, moe=replace(MOE, pattern=(False, True)))


def test_blocks_are_layers_and_experts() -> None:
    assert blocks(DENSE) == 2
    assert blocks(SPARSE) == 2 + 2 * 4
    assert blocks(replace(SPARSE, mtp=MultiTokenConfig(num_layers=3))) == 2 + 2 * 4 + 3
    hybrid = replace(SPARSE, num_layers=3, layer_pattern="*-E", moe=MOE)
    assert blocks(hybrid) == 2 + 4


@pytest.mark.parametrize("config", [DENSE, SPARSE, replace(SPARSE, mtp=MultiTokenConfig(num_layers=3))], ids=str)
def test_every_whole_model_passes(config: GPTConfig) -> None:
    with torch.device("meta"):
        shapes = [tuple(tensor.shape) for tensor in canonical_tensors(GPT(config)).values()]
    check_held(config, shapes, "x")
    with pytest.raises(CheckpointError, match="x describes a model of"):
        check_held(config, shapes[: blocks(config) - 1], "x")


def test_stacks_count_as_what_is_in_them() -> None:
    check_held(SPARSE, [(4, 4, 8, 8)], "x")
    with pytest.raises(CheckpointError, match="10 layers and experts, and holds 8 tensors"):
        check_held(SPARSE, [(2, 4, 8, 8)], "x")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_published_models_are_far_below_the_limits(name: str) -> None:
    assert blocks(PRESETS[name]) < 1 << 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: replace(DENSE, num_layers=10_000, moe=replace(MOE, num_experts=10_000)),
            "num_layers=10000 times moe.num_experts=10000 is 100000000; it must be at most 262144",
        ),
        (lambda: MultiTokenConfig(num_layers=10**9), "mtp.num_layers is 1000000000; it must be at most 10000"),
    ],
)
def test_numbers_that_no_model_has_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def forged(folder: Path, config: GPTConfig) -> Path:
    """A checkpoint of ours with the weights of a small model, that says to be a large one."""
    save_model(held_model("gpt", DENSE, GPT(DENSE)), folder / "small.ckpt")
    opened = checkpoint.open(folder / "small.ckpt")
    values = {
        name: View(name, each.shape, [Box((0,) * len(each.shape), torch.zeros(each.shape))])
        for name, each in opened.tensors.items()
    }
    common = {**opened.common, "model": {**opened.common["model"], "config": config.to_dict()}}
    checkpoint.save(folder / "a.ckpt", values, common=common)
    return folder / "a.ckpt"


LARGE = replace(DENSE, num_layers=5000)
LARGE_SPARSE = replace(DENSE, num_layers=100, moe=replace(MOE, num_experts=2600))


@pytest.mark.parametrize("config", [LARGE, LARGE_SPARSE], ids=["layers", "experts"])
def test_forged_checkpoints_are_refused_at_once(
    config: GPTConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: torch.nn.Module) -> None:
        raise AssertionError("a layer is built")

    path = forged(tmp_path, config)
    monkeypatch.setattr(torch.nn.Module, "__init__", never)
    for read in (open_model, lambda path: saved_model(checkpoint.open(path))):
        with pytest.raises(CheckpointError, match=rf"a.ckpt describes a model of {blocks(config)} layers and experts"):
            read(path)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert "describes a model of" in " ".join(capsys.readouterr().err.split())
    assert main(["inspect", str(path)]) == 0
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_start_from_a_forged_folder(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=8)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 9999}))
    with pytest.raises(CheckpointError, match="describes a model of 9999 layers and experts, and holds 12 tensors"):
        GPTModule(weights=str(folder))
