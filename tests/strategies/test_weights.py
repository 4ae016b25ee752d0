"""A run starts from a folder of ``transformers`` under any layout: each rank reads its part; training is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalight.checkpoint import boxes
from megalight.errors import CheckpointError
from megalight.models.gpt import GPTConfig, GPTModule
from megalight.models.gpt.hugging_face import from_transformers
from megalight.models.hugging_face.folder import Folder
from megalight.parallel.source import parameter_targets, shard_targets
from megalight.strategies import MegatronStrategy, load_weights
from tests.strategies.training import ADAM, CLIP, Losses, WithData
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 101, "initializer_range": 0.1}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}
OPTIONS: dict[str, Any] = {"limit_val_batches": 0, "use_distributed_sampler": False, "gradient_clip_val": CLIP}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(1)
    llama = transformers.LlamaConfig(**SIZES, **LLAMA, num_key_value_heads=2, max_position_embeddings=24)
    transformers.LlamaForCausalLM(llama).save_pretrained(root / "llama")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **GPT2)).save_pretrained(root / "gpt2")
    return root


class Started(WithData):
    """Keeps its source, to see what it has read."""

    def initial_weights(self) -> Folder:
        found = super().initial_weights()
        assert isinstance(found, Folder)
        self.folder = found
        return found


class Seen(Losses):
    """What a rank holds when training begins, and how many bytes it had to read for that."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        assert isinstance(pl_module, Started)
        if strategy.precision.dtype != torch.bfloat16:  # which numpy lacks
            super().on_train_start(trainer, pl_module)
        targets = parameter_targets(pl_module.model.named_parameters(), strategy.parallel_model.specs)
        self.held = sum(target.data.numel() for target in targets) * 4  # files are float32
        self.read = pl_module.folder.bytes_read
        shards = strategy.engine.shards
        self.masters = [
            (target.name, target.offset, target.data.clone().numpy())
            for target in shard_targets([shard.master for shard in shards], shards)
        ]


def _fit(layout: str, folder: Path, precision: str) -> tuple[list[float], dict[str, Any], int, int, list[Any]]:
    boxes.GAP = 1  # tensors are tiny
    seen = Seen()
    module = Started(None, optimizer=ADAM, weights=folder)
    strategy = MegatronStrategy(micro_batch_size=1, **LAYOUTS[layout][1])
    trainer(strategy, callbacks=[seen], precision=precision, max_steps=2, **OPTIONS).fit(module)
    return seen.losses, seen.initial, seen.read, seen.held, seen.masters


def expected(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    config = GPTModule(weights=folder).config
    tensors = from_transformers(load_file(folder / "model.safetensors"), config)
    return {f"model.{name}": tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [("llama", ["tp2", "pp2"]), pytest.param("gpt2", ["tp2", "tp2pp2"], marks=pytest.mark.full)],
    ids=["llama", "gpt2"],
)
def test_every_layout_starts_alike_and_reads_its_own_bytes(kind: str, layouts: list[str], folders: Path) -> None:
    folder = folders / kind
    ((losses, *_),) = run(_fit, 1, "one", folder, "64-true")
    whole = expected(folder)
    size = sum(value.nbytes for value in whole.values())
    for layout in layouts:
        for found, initial, read, held, _ in run(_fit, LAYOUTS[layout][0], layout, folder, "64-true"):
            np.testing.assert_allclose(found, losses, rtol=1e-9)
            assert initial.keys() == whole.keys()
            assert all(np.array_equal(initial[name], whole[name]) for name in whole)
            assert read == held
            assert read < 0.75 * size


def test_masters_begin_with_what_the_folder_says(folders: Path) -> None:
    """Parameters are bf16; the float32 masters are not those rounded values."""
    whole = expected(folders / "llama")
    for *_, masters in run(_fit, 2, "dp2", folders / "llama", "bf16-true"):
        for name, offset, values in masters:
            box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert np.array_equal(values, whole[name][box]), name
        assert sum(values.size for _, _, values in masters) < 0.6 * sum(value.size for value in whole.values())


class Masters(pl.Callback):
    """The masters of all parameters when training begins; one rank holds them all."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = [shard.master.detach().clone() for shard in trainer.strategy.engine.shards]


def _from_our_own(folder: Path, path: Path) -> list[bool]:
    module, strategy = WithData(weights=folder, optimizer=ADAM), MegatronStrategy()
    runner = trainer(strategy, precision="bf16-true", max_steps=2, **OPTIONS)
    runner.fit(module)
    runner.save_checkpoint(path)
    assert strategy.engine is not None
    trained = [shard.master.detach() for shard in strategy.engine.shards]
    masters = Masters()
    trainer(MegatronStrategy(), precision="bf16-true", max_steps=1, callbacks=[masters], **OPTIONS).fit(
        WithData(weights=path, optimizer=ADAM)
    )
    rounded = [master.bfloat16().float() for master in trained]
    return [
        all(map(torch.equal, masters.found, trained)),
        any(not torch.equal(a, b) for a, b in zip(trained, rounded, strict=True)),
    ]


def test_masters_begin_with_those_of_a_checkpoint_of_ours(folders: Path, tmp_path: Path) -> None:
    assert run(_from_our_own, 1, folders / "llama", tmp_path / "a.ckpt") == [[True, True]]


def _resume(folder: Path, path: Path) -> tuple[list[float], list[float]]:
    losses = []
    for steps, source, resumed in ((1, folder, None), (2, folder / "gone", path)):
        module = WithData(GPTModule(weights=folder).config, optimizer=ADAM, weights=source)
        seen = Losses()
        runner = trainer(MegatronStrategy(), callbacks=[seen], max_steps=steps, **OPTIONS)
        runner.fit(module, ckpt_path=resumed)
        runner.save_checkpoint(path)
        losses.append(seen.losses)
    load_weights(again := GPTModule(module.config, weights=folder / "gone"), path)
    assert again.model is not None
    assert torch.equal(again.model.embed.word.weight, module.model.embed.word.weight)
    return losses[0], losses[1]


def test_a_checkpoint_takes_the_place_of_the_folder(folders: Path, tmp_path: Path) -> None:
    ((first, second),) = run(_resume, 1, folders / "llama", tmp_path / "a.ckpt")
    ((losses, *_),) = run(_fit, 1, "one", folders / "llama", "64-true")
    np.testing.assert_allclose([*first, *second], losses, rtol=1e-12)


def test_what_cannot_be_read_is_refused_before_ranks_start(folders: Path, tmp_path: Path) -> None:
    config = GPTModule(weights=folders / "llama").config
    assert isinstance(config, GPTConfig)
    shutil.copytree(folders / "llama", tmp_path / "torn")
    file = tmp_path / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    for name, message in (("none", "none: nothing is there"), ("torn", r"model\.safetensors cannot be read")):
        runner = pl.Trainer(
            accelerator="cpu", devices=2, strategy=MegatronStrategy(start_method="spawn"), logger=False, max_steps=1
        )
        with pytest.raises(CheckpointError, match=message):
            runner.fit(WithData(config, weights=tmp_path / name))
