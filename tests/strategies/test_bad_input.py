"""What users get wrong: one clear message, exit code 2, nothing started, nothing written, nothing lost."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import yaml

from megalight.cli.main import main
from tests.strategies.training import BASE, WithData, by_hand
from tests.support.environment import trainer
from tests.support.workers import run as run_on_ranks

CONFIG = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 300,
    "max_sequence_length": 16,
}


@dataclass(frozen=True)
class Place:
    """A folder with data, a recipe, and the checkpoints ``step=1`` and ``step=2`` of a run."""

    root: Path

    @property
    def recipe(self) -> str:
        return str(self.root / "recipe.yaml")

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def write_recipe(self) -> None:
        recipe = {
            "trainer": {
                "default_root_dir": str(self.root),
                "accelerator": "cpu",
                "devices": 1,
                "max_steps": 2,
                "limit_val_batches": 0,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "strategy": {"class_path": "megalight.strategies.MegatronStrategy"},
                "callbacks": [
                    {
                        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                        "init_args": {
                            "dirpath": str(self.checkpoints),
                            "filename": "{step}",
                            "every_n_train_steps": 1,
                            "save_top_k": -1,
                        },
                    }
                ],
            },
            "model": {"class_path": "megalight.models.gpt.GPTModule", "init_args": {"config": CONFIG}},
            "data": {
                "class_path": "megalight.data.gpt.module.GPTDataModule",
                "init_args": {
                    "data": str(self.root / "corpus"),
                    "split": "100,0,0",
                    "global_batch_size": 4,
                    "sequence_length": 16,
                },
            },
        }
        (self.root / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def contents(self) -> dict[str, tuple[int, int]]:
        """Every file with its size and the time of its last change."""
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files} | {
            str(path): (0, 0) for path in self.root.rglob("*") if path.is_dir()
        }


@pytest.fixture(autouse=True)
def _quiet_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's log handler may hold an earlier test's captured stream."""
    monkeypatch.setattr(logging, "raiseExceptions", False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run that works."""
    root = tmp_path_factory.mktemp("made")
    (root / "text").mkdir()
    for number in range(20):
        (root / "text" / f"{number}.txt").write_text(f"{number} be or not to be, that is the question. " * 12)
    words = ["--train-tokenizer", "--vocab-size=270", "--workers=1", "-q"]
    assert main(["prepare", str(root / "text"), "-o", str(root / "corpus"), *words]) == 0
    (root / "text" / "20.txt").write_text("Whether 'tis nobler in the mind to suffer")
    assert main(["prepare", str(root / "text"), "-o", str(root / "other"), *words]) == 0
    place = Place(root)
    place.write_recipe()
    assert main(["fit", "-c", place.recipe, "--trainer.logger=false"]) == 0
    assert {path.name for path in place.checkpoints.iterdir()} == {"step=1.ckpt", "step=2.ckpt"}
    return place


@pytest.fixture
def place(made: Place, tmp_path: Path) -> Place:
    """A copy of it, to be damaged."""
    shutil.copytree(made.root, tmp_path / "place")
    copy = Place(tmp_path / "place")
    copy.write_recipe()
    return copy


def refusal(place: Place, words: list[str], capsys: pytest.CaptureFixture[str], verb: str = "fit") -> str:
    """The one message of a refused command."""
    before = place.contents()
    capsys.readouterr()
    code = main([verb, "-c", place.recipe, *words])
    text = capsys.readouterr().err
    assert code == 2, text
    assert text.count("error: ") == 1, text
    assert "Traceback" not in text
    message = text[text.index(f"megalight {verb}: error: ") :]
    assert len(message.splitlines()) <= 20
    assert not dist.is_initialized()
    assert place.contents() == before
    return " ".join(message.split())


STRATEGY, MODEL, DATA = "--trainer.strategy.", "--model.config.", "--data."

WORDS = {
    "heads": (
        ["--trainer.devices=3", f"{STRATEGY}tensor_parallel=3"],
        ["attention.q.weight", "tp=3", "Choose tp from 1, 2"],
    ),
    "world": (
        ["--trainer.devices=3", f"{STRATEGY}tensor_parallel=2"],
        ["world size 3 is not a multiple of tp x cp x pp = 2", "Use 2 x n processes"],
    ),
    "sequence parallelism alone": ([f"{STRATEGY}sequence_parallel=true"], ["needs tensor_parallel > 1"]),
    "pipeline over ranks": (
        ["--trainer.devices=3", f"{STRATEGY}pipeline_parallel=2"],
        ["world size 3 is not a multiple of tp x cp x pp = 2"],
    ),
    "layers in the pipeline": (
        ["--trainer.devices=4", f"{STRATEGY}pipeline_parallel=4"],
        ["1 layers do not divide evenly over 4 stages", "lower pp or vpp"],
    ),
    "pipeline layout": (
        ["--trainer.devices=2", f"{STRATEGY}pipeline_parallel=2", f"{STRATEGY}pipeline_layout=Ett|ttL"],
        ["layout 'Ett|ttL'", "rank 1"],
    ),
    "heads over context": (
        ["--trainer.devices=3", f"{STRATEGY}context_parallel=3", f"{STRATEGY}context.kind=all_to_all"],
        ["layers.0.attention.inner", "all_to_all", "cp=3"],
    ),
    "overlap without a GPU": (
        [
            "--trainer.devices=2",
            f"{STRATEGY}tensor_parallel=2",
            f"{STRATEGY}sequence_parallel=true",
            f"{STRATEGY}tensor.overlap=symmetric",
        ],
        ["layers.0.attention.qkv", "symmetric: needs tensors on cuda, not on cpu", "pipelined: can serve"],
    ),
    "pieces over ranks": (
        [
            "--trainer.devices=2",
            f"{STRATEGY}tensor_parallel=2",
            f"{STRATEGY}sequence_parallel=true",
            f"{STRATEGY}tensor.pieces=3",
        ],
        ["TensorOptions.pieces=3 does not divide tp=2", "Choose a divisor"],
    ),
    "a limit for NCCL without it": (
        ["--trainer.devices=2", f"{STRATEGY}data_parallel.advanced.max_ctas=4"],
        ["data_parallel.advanced.max_ctas=4", "the backend here is gloo", "Remove it"],
    ),
    "the same of tensor parallelism": (
        ["--trainer.devices=2", f"{STRATEGY}tensor_parallel=2", f"{STRATEGY}tensor.max_ctas=16"],
        ["TensorOptions.max_ctas=16", "the backend here is gloo", "Remove it"],
    ),
    "batch over ranks": (
        ["--trainer.devices=3"],
        ["global_batch_size is 4", "3 data-parallel ranks", "Change global_batch_size or the layout"],
    ),
    "no micro-batch": ([f"{STRATEGY}micro_batch_size=0"], ["micro_batch_size=0", "at least 1"]),
    "vocabulary": ([f"{MODEL}vocab_size=200"], ["270 tokens", "vocab_size is 200", "raise vocab_size"]),
    "sequence": (
        [f"{DATA}sequence_length=32"],
        ["sequence_length=32", "max_sequence_length=16", "lower it, or raise"],
    ),
    "no sequence": ([f"{DATA}sequence_length=0"], ["sequence_length is 0", "at least 1"]),
    "heads in the model": ([f"{MODEL}num_heads=5"], ["num_heads", "5", "hidden_size"]),
    "split": ([f"{DATA}split=a,b"], ["a,b"]),
    "empty split": (
        [f"{DATA}split=0,100,0", "--trainer.logger=false"],
        ["training split holds no documents", "larger share"],
    ),
    "type": ([f"{DATA}global_batch_size=many"], ["global_batch_size", "'many'", "int"]),
    "type in the model": ([f"{MODEL}num_layers=1.5"], ["num_layers", "1.5", "int"]),
    "too many steps of a start": ([f"{STRATEGY}start_method=thread"], ["thread", "fork"]),
    "no checkpoint": (["--ckpt_path={root}/checkpoints/step=9.ckpt"], ["step=9.ckpt", "newest", "step=2.ckpt"]),
    "another width": (
        ["--ckpt_path={root}/checkpoints/step=2.ckpt", f"{MODEL}hidden_size=64"],
        ["another model", "hidden_size is 64 here and 32 in the checkpoint"],
    ),
    "another depth": (
        ["--ckpt_path={root}/checkpoints/step=2.ckpt", f"{MODEL}num_layers=2"],
        ["another model", "num_layers is 2 here and 1 in the checkpoint"],
    ),
    "a file": (["--ckpt_path={root}/recipe.yaml"], ["recipe.yaml is no checkpoint", "neither a folder"]),
    "a foreign folder": (["--ckpt_path={root}/text"], ["/text"]),
    "data that is not there": ([f"{DATA}data={{root}}/korpus"], ["korpus"]),
    "another tokenizer": ([f"{DATA}tokenizer={{root}}/other.tokenizer.json"], ["made with the tokenizer", "Use "]),
    "more ranks than heads": (
        ["--trainer.devices=8", f"{STRATEGY}tensor_parallel=8"],
        ["consists of 4 units", "tp=8", "tp must divide this number"],
    ),
    "no readers": ([f"{DATA}num_workers=-1"], ["num_workers is -1", "at least 0"]),
    "a negative timeout": ([f"{STRATEGY}timeout_seconds=-5"], ["timeout_seconds=-5", "above 0"]),
    "a negative norm": (["--trainer.gradient_clip_val=-1"], ["gradient_clip_val is -1", "at least 0"]),
    "no accumulation": (["--trainer.accumulate_grad_batches=0"], ["accumulate_grad_batches is 0", "at least 1"]),
    "half precision": (["--trainer.precision=16-mixed"], ["precision is 16-mixed", "bf16-mixed"]),
    "more than the corpus": (
        [f"{DATA}sequence_length=9999999", f"{MODEL}max_sequence_length=9999999", "--trainer.logger=false"],
        ["train split", "one sample of sequence_length 9999999", "Lower sequence_length"],
    ),
    "an unknown strategy": (["--trainer.strategy=MegatronStrateg"], ["'MegatronStrategy'"]),
}


MORE = {
    *("pipeline over ranks", "the same of tensor parallelism", "another depth", "split", "type", "no sequence"),
    *("torn index", "no tokens", "checkpoint without a file", "checkpoint without a manifest"),
    *("sequence parallelism alone", "layers in the pipeline", "pipeline layout", "heads over context"),
    *("pieces over ranks", "a limit for NCCL without it", "more ranks than heads", "heads in the model"),
    *("sequence", "more than the corpus", "another tokenizer", "a foreign folder", "no readers"),
    *("a negative timeout", "a negative norm", "no accumulation"),
}
"""What the same step of a command refuses as another of them; tests of each option have its message."""


@pytest.mark.parametrize(
    ("words", "parts"),
    [pytest.param(*each, marks=[pytest.mark.full] if name in MORE else (), id=name) for name, each in WORDS.items()],
)
def test_bad_words_are_refused(made: Place, words: list[str], parts: list[str], capsys: Any) -> None:
    message = refusal(made, [word.format(root=made.root) for word in words], capsys)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("verb", ["validate", pytest.param("test", marks=pytest.mark.full)])
def test_evaluation_refuses_what_training_does(made: Place, verb: str, capsys: Any) -> None:
    checkpoint = f"--ckpt_path={made.checkpoints / 'step=2.ckpt'}"
    message = refusal(made, [checkpoint, f"{MODEL}ffn_hidden_size=64"], capsys, verb)
    assert "ffn_hidden_size is 64 here and 48 in the checkpoint" in message
    assert "3 data-parallel ranks" in refusal(made, ["--trainer.devices=3"], capsys, verb)


def _tear(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _biggest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Place], object], list[str], list[str]]] = {
    "torn tokens": (lambda place: _tear(place.root / "corpus.bin"), [], ["corpus.bin"]),
    "torn index": (lambda place: _tear(place.root / "corpus.idx"), [], ["corpus.idx"]),
    "no tokens": (lambda place: (place.root / "corpus.bin").unlink(), [], ["corpus.bin"]),
    "torn checkpoint": (
        lambda place: _tear(_biggest(place.checkpoints / "step=2.ckpt")),
        ["--ckpt_path={root}/checkpoints/step=2.ckpt"],
        ["step=2.ckpt", "newest finished checkpoint beside it is", "step=1.ckpt"],
    ),
    "checkpoint whose progress is torn": (
        lambda place: _flip(place.checkpoints / "step=2.ckpt" / "common.json"),
        ["--ckpt_path={root}/checkpoints/step=2.ckpt"],
        ["common.json", "newest finished checkpoint beside it is", "step=1.ckpt"],
    ),
    "checkpoint without a file": (
        lambda place: _biggest(place.checkpoints / "step=2.ckpt").unlink(),
        ["--ckpt_path={root}/checkpoints/step=2.ckpt"],
        ["step=2.ckpt", "newest finished checkpoint beside it is", "step=1.ckpt"],
    ),
    "checkpoint without a manifest": (
        lambda place: (place.checkpoints / "step=2.ckpt" / "manifest.json").unlink(),
        ["--ckpt_path={root}/checkpoints/step=2.ckpt"],
        ["step=2.ckpt", "newest finished checkpoint beside it is", "step=1.ckpt"],
    ),
}


@pytest.mark.parametrize(
    ("damage", "words", "parts"),
    [pytest.param(*each, marks=[pytest.mark.full] if name in MORE else (), id=name) for name, each in DAMAGE.items()],
)
def test_damaged_files_are_refused(
    place: Place, damage: Callable[[Place], object], words: list[str], parts: list[str], capsys: Any
) -> None:
    damage(place)
    message = refusal(place, [word.format(root=place.root) for word in words], capsys)
    for part in parts:
        assert part in message, message


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty", "ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "file",
    [_biggest, pytest.param(lambda folder: folder / "ranks" / "0.json", marks=pytest.mark.full)],
    ids=["tensors", "rank"],
)
def test_a_flipped_bit_is_found_before_any_weight_changes(
    file: Callable[[Path], Path], place: Place, capsys: Any
) -> None:
    """It shows when tensors are read: logs have begun then, checkpoints are as they were."""
    torn = place.checkpoints / "step=2.ckpt"
    _flip(file(torn))
    before = set(place.checkpoints.rglob("*"))
    capsys.readouterr()
    assert main(["fit", "-c", place.recipe, f"--ckpt_path={torn}", "--trainer.logger=false"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("error: ") == 1
    assert "is torn" in text
    assert f"newest finished checkpoint beside it is {place.checkpoints / 'step=1.ckpt'}" in text
    assert set(place.checkpoints.rglob("*")) == before
    # and the one it names works
    assert (
        main(["fit", "-c", place.recipe, f"--ckpt_path={place.checkpoints / 'step=1.ckpt'}", "--trainer.logger=false"])
        == 0
    )


def _uneven(size: int) -> list[float]:
    from megalight.strategies import MegatronStrategy
    from tests.strategies.training import ADAM, CLIP, SEED, Losses

    losses = Losses()
    module = WithData(BASE, optimizer=ADAM, seed=SEED)
    runner = trainer(
        MegatronStrategy(tensor_parallel=2, micro_batch_size=size),
        callbacks=[losses],
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module)
    return losses.losses


def test_a_smaller_last_micro_batch_is_legal() -> None:
    """4 samples in micro-batches of 3 are 3 and 1: the loss is the mean over tokens all the same."""
    np.testing.assert_allclose(run_on_ranks(_uneven, 2, 3)[0], by_hand(BASE, 3)["losses"], rtol=1e-9)
