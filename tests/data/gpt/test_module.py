from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from megalight.data.blend import BlendedDataset
from megalight.data.gpt.module import GPTDataModule
from megalight.data.module import TokenLoader
from megalight.data.prepare import PrepareReport
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.data.conftest import documents
from tests.data.corpora import write
from tests.support.environment import PoolEnvironment
from tests.support.workers import run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*when using `ckpt_path`, callbacks used:UserWarning",
    "ignore:You requested to overfit:UserWarning",
    "ignore:Using ModelCheckpoint with manual optimization:UserWarning",
)


class Reader(pl.LightningModule):
    """Writes down the first token of every row it is given. Counts the steps of the run before it starts, as modules
    with schedules do, which makes Lightning ask for the training data early."""

    def __init__(self, vocab_size: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.rows: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}
        self.tokens = 0.0

    def note(self, stage: str, batch: TokenBatch) -> torch.Tensor:
        self.rows[stage].append(batch.tokens[:, 0].tolist())
        if stage != "train":
            self.tokens += float(batch.loss_mask.sum())
        return self.layer(torch.ones(1, 1)).sum()

    def training_step(self, batch: TokenBatch, index: int) -> torch.Tensor:
        return self.note("train", batch)

    def validation_step(self, batch: TokenBatch, index: int) -> None:
        self.note("val", batch)

    def test_step(self, batch: TokenBatch, index: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: TokenBatch, index: int) -> torch.Tensor:
        return self.note("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 0.1)


class ByHand(Reader):
    """Has two optimizers, and calls them after every ``window`` batches."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.window = window

    def training_step(self, batch: TokenBatch, index: int) -> torch.Tensor:
        loss = self.note("train", batch)
        self.manual_backward(loss)
        if (index + 1) % self.window == 0:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD([parameter], 0.1) for parameter in self.parameters()]


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": "callbacks" in options,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            **options,
        }
    )


def module(folder: Path, **options: Any) -> GPTDataModule:
    """400 tokens in documents of 4: 99 samples of 4 tokens; each starts with another token."""
    if not (folder / "a.idx").exists():
        write(folder / "a", [4] * 100)
    return GPTDataModule(
        **{"data": str(folder / "a"), "split": "1", "global_batch_size": 4, "sequence_length": 4, **options}
    )


def read(folder: Path, reader: Reader | None = None, data: dict[str, Any] | None = None, **options: Any) -> Reader:
    reader = reader or Reader()
    checkpoint = options.pop("ckpt_path", None)
    trainer(**options).fit(reader, module(folder, **(data or {})), ckpt_path=checkpoint)
    return reader


def flat(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def test_batches(corpus: PrepareReport) -> None:
    data = GPTDataModule(data=corpus.prefix, global_batch_size=3, sequence_length=16, document_mask=True)
    assert (data.sequence_length, data.vocab_size, data.options.eod_id, data.options.pad_id) == (16, 300, 0, 1)
    assert data.tokenizer.decode(data.tokenizer.encode("fox")) == "fox"
    assert data.checkpoint_files()["tokenizer.json"] == Path(corpus.tokenizer).read_bytes()
    data.setup("fit")
    loader = data.train_dataloader()
    assert isinstance(loader, TokenLoader)
    batch = next(iter(loader))
    assert isinstance(batch, TokenBatch)
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (3, 16)
    assert (batch.tokens.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.document_lengths is not None
    assert batch.sequences.num_tokens == 48


def test_a_run_with_max_steps_repeats_the_data_as_often_as_it_takes(tmp_path: Path) -> None:
    reader = read(tmp_path, max_steps=30)
    assert [len(rows) for rows in reader.rows["train"]] == [4] * 30
    tokens = flat(reader.rows["train"])
    assert len(set(tokens[:99])) == 99  # each sample once before any comes again
    accumulating = read(tmp_path, max_steps=10, accumulate_grad_batches=3)
    assert accumulating.rows["train"] == reader.rows["train"]


def test_without_max_steps_an_epoch_is_a_pass(tmp_path: Path) -> None:
    reader = read(tmp_path, max_epochs=2)
    rows = reader.rows["train"]
    assert len(rows) == 2 * 24
    assert len(set(flat(rows[:24]))) == len(set(flat(rows[24:]))) == 96
    assert rows[:24] != rows[24:]


@pytest.mark.parametrize(
    ("data", "options", "steps", "batches"),
    [  # steps and batches of an epoch
        ({}, {"max_steps": 6}, 100, 100),
        ({"num_workers": 1}, {"max_steps": 4}, 100, 100),
        ({}, {"max_steps": 4, "accumulate_grad_batches": 2}, 100, 200),
        ({"train_samples": 10}, {"max_epochs": 3}, 2, 2),
        ({"train_samples": 14, "num_workers": 1}, {"max_epochs": 2}, 3, 3),
        ({"train_samples": 21}, {"max_epochs": 2, "accumulate_grad_batches": 2}, 3, 5),
    ],
)
def test_resume_after_any_step(
    tmp_path: Path, data: dict[str, Any], options: dict[str, Any], steps: int, batches: int
) -> None:
    full = read(tmp_path, data=data, callbacks=[every_step(tmp_path / "saved")], **options).rows["train"]
    saved = sorted((tmp_path / "saved").iterdir(), key=lambda path: int(path.stem.partition("=")[2]))
    for step, path in list(enumerate(saved, 1))[:: 3 if data.get("num_workers") else 1]:
        epoch, inside = divmod(step, steps)
        done = epoch * batches + inside * options.get("accumulate_grad_batches", 1)
        assert read(tmp_path, data=data, ckpt_path=path, **options).rows["train"] == full[done:], step


@pytest.mark.parametrize(
    ("data", "options", "window"),
    [
        ({}, {"max_steps": 12}, 1),  # of both optimizers together
        ({}, {"max_steps": 6}, 3),  # needs a second pass over the data
        ({"train_samples": 21}, {"max_epochs": 3}, 1),
    ],
)
def test_resume_with_several_optimizers(
    tmp_path: Path, data: dict[str, Any], options: dict[str, Any], window: int
) -> None:
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    full = read(tmp_path, ByHand(window), data, callbacks=[saves], **options).rows["train"]
    saved = sorted((tmp_path / "saved").iterdir(), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(saved) >= 3
    for step, path in enumerate(saved, 1):
        assert read(tmp_path, ByHand(window), data, ckpt_path=path, **options).rows["train"] == full[step * window :]


@pytest.mark.parametrize(
    ("data", "options", "scheduling", "windows"),
    [
        ({}, {"max_steps": 5}, {0: 2}, [2] * 5),
        ({}, {"max_steps": 6, "limit_train_batches": 4}, {1: 2}, [1, 1, 1, 1, 2, 2]),
        ({"train_samples": 24}, {"max_epochs": 3}, {0: 3, 1: 1, 2: 2}, [3, 3, 1, 1, 1, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_the_batches_of_a_step_change_by_epoch(
    tmp_path: Path, data: dict[str, Any], options: dict[str, Any], scheduling: dict[int, int], windows: list[int]
) -> None:
    def fit(*callbacks: pl.Callback, **more: Any) -> list[list[int]]:
        more |= {"callbacks": [GradientAccumulationScheduler({**scheduling}), *callbacks], **options}
        more["enable_checkpointing"] = bool(callbacks)
        return read(tmp_path, data=data, strategy=MegatronStrategy(), **more).rows["train"]

    full = fit(every_step(tmp_path / "saved"))
    assert len(full) == sum(windows)
    if "train_samples" in data:
        assert {tuple(sorted(flat(full[begin : begin + 6]))) for begin in (0, 6, 12)} == {tuple(sorted(flat(full[:6])))}
    for step in range(1, len(windows)):
        saved = tmp_path / "saved" / f"step={step}.ckpt"
        assert fit(ckpt_path=saved) == full[sum(windows[:step]) :], step


class EveryBatch(pl.Callback):
    """Saves after every batch, also between those of one step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch={trainer.fit_loop.total_batch_idx + 1}.ckpt")


@pytest.mark.parametrize("options", [{"max_steps": 3}, {"max_steps": 4, "limit_train_batches": 5}])
def test_a_step_that_was_not_complete_begins_again(tmp_path: Path, options: dict[str, Any]) -> None:
    def fit(*callbacks: pl.Callback, **more: Any) -> Reader:
        more |= {"accumulate_grad_batches": 3, "strategy": MegatronStrategy(), **options}
        return read(tmp_path, callbacks=list(callbacks), enable_checkpointing=False, **more)

    full = fit(EveryBatch(tmp_path))
    rows = full.rows["train"]
    for batch in (1, 2, 3, 4):
        reader = fit(ckpt_path=tmp_path / f"batch={batch}.ckpt")
        assert reader.rows["train"] == rows[batch // 3 * 3 :], batch
        torch.testing.assert_close(reader.layer.weight, full.layer.weight, rtol=0, atol=0)


def test_a_change_in_an_epoch_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="in epoch 1, but with max_steps all of the run is epoch 0"):
        read(tmp_path, max_steps=5, callbacks=[GradientAccumulationScheduler({1: 2})])


def test_epochs_cut_short_go_on_where_they_ended(tmp_path: Path) -> None:
    whole = read(tmp_path, max_steps=12).rows["train"]
    assert read(tmp_path, max_steps=12, limit_train_batches=5).rows["train"] == whole
    overfit = read(tmp_path, max_steps=4, overfit_batches=2).rows["train"]
    assert overfit[:2] == overfit[2:]


def test_another_batch_size_is_refused_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, max_steps=2, callbacks=[every_step(tmp_path / "saved")])
    path = tmp_path / "saved" / "step=2.ckpt"
    with pytest.raises(ConfigurationError, match="global_batch_size is 8; the checkpoint was written with 4"):
        read(tmp_path, data={"global_batch_size": 8}, max_steps=4, ckpt_path=path)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches is 2"):
        read(tmp_path, max_steps=4, accumulate_grad_batches=2, ckpt_path=path)
    with pytest.raises(ConfigurationError, match="global_batch_size is 8"):
        read(tmp_path, data={"global_batch_size": 8, "train_samples": 64}, max_epochs=1, ckpt_path=path)
    data = module(tmp_path, global_batch_size=8, split="0,1,0")
    trainer(limit_val_batches=1.0).validate(Reader(), data, ckpt_path=path, verbose=False)  # that is another matter
    assert len(read(tmp_path, max_steps=4, ckpt_path=path).rows["train"]) == 2
    assert "samples may repeat" not in caplog.text
    read(tmp_path, data={"seed": 9}, max_steps=4, ckpt_path=path)
    assert "samples may repeat" in caplog.text


def test_evaluation_counts_every_token_once(tmp_path: Path) -> None:
    for stage in ("validate", "test", "predict"):
        reader = Reader()
        split = "0,1,0" if stage == "validate" else "0,0,1"
        call = getattr(trainer(limit_val_batches=1.0), stage)
        call(reader, module(tmp_path, split=split, sequence_length=7, global_batch_size=8))
        assert reader.tokens == 399
        rows = reader.rows[{"validate": "val"}.get(stage, stage)]
        assert [len(row) for row in rows] == [8] * 8  # 57 samples in 8 batches
    for stage, split in (("val", "0,1,0"), ("test", "0,0,1")):
        reader = Reader()
        data = module(tmp_path, split=split, **{f"{stage}_samples": 10})
        getattr(trainer(limit_val_batches=1.0), {"val": "validate"}.get(stage, stage))(reader, data, verbose=False)
        assert reader.tokens == 40


def test_an_empty_split(tmp_path: Path) -> None:
    data = module(tmp_path, split="1,0,0")
    trainer(max_steps=1, limit_val_batches=1.0).fit(Reader(), data)
    assert data.val_dataloader() == []
    for stage in ("validate", "test"):
        with pytest.raises(DataError, match=r"split holds no documents, so .* data of its own"):
            getattr(trainer(), stage)(Reader(), data)
    with pytest.raises(DataError, match="training split holds no documents"):
        read(tmp_path, data={"split": "0,1,0"}, max_steps=1)


def rank_reads(folder: str) -> dict[str, list[list[int]]]:
    reader = Reader()
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=PoolEnvironment())
    data = module(Path(folder), global_batch_size=6, split="60,40,0")
    trainer(strategy=strategy, devices=2, max_steps=5, limit_val_batches=1.0, val_check_interval=5).fit(reader, data)
    return reader.rows


def test_two_ranks_share_each_batch_and_lightning_leaves_the_sampler_alone(tmp_path: Path) -> None:
    data = module(tmp_path, global_batch_size=6, split="60,40,0")
    reader = Reader()
    trainer(max_steps=5, limit_val_batches=1.0, val_check_interval=5).fit(reader, data)
    ranks = run(rank_reads, 2, str(tmp_path), timeout=240)
    for stage in ("train", "val"):
        assert [len(row) for row in ranks[0][stage]] == [3] * len(reader.rows[stage])
        together = [a + b for a, b in zip(ranks[0][stage], ranks[1][stage], strict=True)]
        assert together == reader.rows[stage]


def test_blends(tmp_path: Path) -> None:
    for k, name in enumerate("ab"):
        write(tmp_path / name, [4] * 100, first=1000 * k)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    weighted: list[str | float] = ["0.25", a, "0.75", b]
    rows = read(tmp_path, data={"data": weighted}, max_steps=10).rows["train"]
    assert sum(token >= 1000 for token in flat(rows)) == 30
    data = module(tmp_path, data=None, train_data={a: 1.0}, val_data=[a, b])
    reader = Reader()
    trainer(max_steps=1, limit_val_batches=1.0).fit(reader, data)
    assert isinstance(data._datasets["validation"], BlendedDataset)
    assert reader.tokens == 2 * 399
    with pytest.raises(DataError, match="the test split holds no documents"):
        data.setup("test")


def test_worker_processes_read_the_same(tmp_path: Path) -> None:
    data = {"num_workers": 2, "document_mask": True}
    assert read(tmp_path, data=data, max_steps=8).rows == read(tmp_path, max_steps=8).rows


def test_bad_arguments(tmp_path: Path, corpus: PrepareReport) -> None:
    with pytest.raises(ConfigurationError, match="neither was given"):
        module(tmp_path, data=None)
    with pytest.raises(ConfigurationError, match="both were given"):
        module(tmp_path, val_data="x")
    for name in ("global_batch_size", "sequence_length"):
        with pytest.raises(DataError, match=f"{name} is 0"):
            module(tmp_path, **{name: 0})
    with pytest.raises(DataError, match="does not exist"):
        module(tmp_path, data=str(tmp_path / "none"))
    with pytest.raises(DataError, match="vocab_size allows 50"):
        module(tmp_path, vocab_size=50)
    with pytest.raises(DataError, match="the model allows 50"):
        read(tmp_path, Reader(vocab_size=50), max_steps=1)
    with pytest.raises(DataError, match="sequence_length 500 takes 501"):
        read(tmp_path, data={"sequence_length": 500}, max_epochs=1)
    with pytest.raises(DataError, match="fewer than one global batch of 200"):
        read(tmp_path, data={"global_batch_size": 200}, max_epochs=1)
    with pytest.raises(DataError, match="no tokenizer was saved with the data"):
        _ = module(tmp_path).tokenizer
    assert module(tmp_path).checkpoint_files() == {}
    other = Tokenizer.train(documents(), 310).save(tmp_path / "other.json")
    with pytest.raises(DataError, match="the same ids mean different text"):
        module(tmp_path, data=corpus.prefix, tokenizer=str(other))
    with pytest.raises(DataError, match="eod_mask_loss needs"):
        module(tmp_path, eod_mask_loss=True)


def test_a_batch_that_does_not_divide_is_refused_in_setup(tmp_path: Path) -> None:
    data = module(tmp_path, global_batch_size=6)
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4, "rank": 1})
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=strategy, max_steps=5, accumulate_grad_batches=1, lightning_module=None
    )
    with pytest.raises(LayoutError, match="global_batch_size is 6 and there are 4 data-parallel ranks"):
        data.setup("fit")


@pytest.mark.gpu
def test_batches_reach_the_gpu_from_pinned_memory(tmp_path: Path) -> None:
    class Device(Reader):
        def note(self, stage: str, batch: TokenBatch) -> torch.Tensor:
            assert batch.tokens.is_cuda
            assert batch.loss_mask.is_cuda
            self.rows[stage].append(batch.tokens[:, 0].tolist())
            return self.layer(torch.ones(1, 1, device="cuda")).sum()

    data = module(tmp_path, num_workers=1, document_mask=True)
    reader = Device()
    trainer(accelerator="gpu", max_steps=8).fit(reader, data)
    loader = data.train_dataloader()
    assert isinstance(loader, TokenLoader)
    assert loader.pin_memory
    assert reader.rows == read(tmp_path, max_steps=8).rows
