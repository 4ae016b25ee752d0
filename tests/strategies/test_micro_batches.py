"""The number of samples per micro-batch is found by measuring steps, and is kept with the run."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megalight import checkpoint
from megalight.errors import ConfigurationError
from megalight.parallel.step import run_passes
from megalight.strategies import micro_batches
from megalight.strategies.micro_batches import AUTO, MicroBatchSize, Usage, balanced
from tests.strategies.regression import Plain, batches, strategy, weights

BEFORE, FIRST_STEP = 1000, 500


class FakeMemory:
    """A device where a sample takes ``each`` bytes, with room for ``room`` bytes of activations."""

    def __init__(self, each: int, room: int, fixed: int = 0) -> None:
        self.each, self.room, self.fixed = each, room, fixed
        self.sizes: list[int] = []
        self.batch: MicroBatchSize | None = None

    def measure(self, samples: int) -> Any:
        assert self.batch is not None
        assert self.batch.size is not None
        self.sizes.append(self.batch.size)
        peak = BEFORE + self.fixed + self.each * min(samples, self.batch.size)
        if peak > BEFORE + self.room:
            raise torch.OutOfMemoryError(f"{peak} bytes")
        if len(self.sizes) == 1:
            peak += FIRST_STEP  # what only the first step allocates misleads nobody
        return lambda: Usage(samples, BEFORE, peak, BEFORE + self.room)


def search(memory: FakeMemory, samples: int, steps: int = 12) -> MicroBatchSize:
    found = MicroBatchSize(1, memory)
    memory.batch = found
    for _ in range(steps):
        with found.step(samples):
            pass
    return found


@pytest.mark.parametrize(
    ("room", "samples", "sizes"),
    [
        (10_000, 16, [1, 1, 2, 4, 8, 16]),  # all fit
        (900, 16, [1, 1, 2, 4, 8]),  # 9 fit: two micro-batches of 8
        (100, 16, [1, 1]),  # one fits
        (550, 12, [1, 1, 2, 4]),  # 5 fit: three of 4
        (700, 7, [1, 1, 2, 4, 7]),
        (690, 7, [1, 1, 2, 4]),  # 6 fit: two of 4 and 3
    ],
)
def test_the_largest_that_fits_is_found_without_running_out_of_memory(room, samples, sizes):
    memory = FakeMemory(each=100, room=room)
    found = search(memory, samples)
    assert found.found
    assert memory.sizes == sizes
    assert found.size == sizes[-1]


def test_what_does_not_grow_makes_the_search_careful_and_not_wrong():
    memory = FakeMemory(each=100, room=1000, fixed=300)
    found = search(memory, 16)
    assert found.found
    assert found.size in (4, 6)  # 7 would fit, and so do 16 samples by three times 6
    assert balanced(16, found.size) == found.size


def test_nothing_is_chosen_before_the_optimizer_has_its_state():
    memory = FakeMemory(each=100, room=10_000)
    memory.batch = found = MicroBatchSize(1, memory)
    for number in range(8):
        with found.step(16, updates=number % 4 == 3):
            pass
    assert memory.sizes == [1, 1, 1, 1, 1, 2, 4, 8]


def test_a_given_number_stays():
    for size in (None, 3):
        given = MicroBatchSize(size)
        assert given.found
        with given.step(8):
            pass
        assert given.size == size


def test_sizes_are_balanced():
    assert [balanced(16, size) for size in (1, 2, 3, 5, 7, 8, 11, 15, 16, 99)] == [1, 2, 3, 4, 6, 8, 8, 8, 16, 16]
    assert balanced(7, 0) == 1


def test_errors_of_a_step_pass_through():
    memory = FakeMemory(each=100, room=400)
    found = MicroBatchSize(1, memory)
    memory.batch = found
    with pytest.raises(ValueError, match="mine"), found.step(4):
        raise ValueError("mine")


@pytest.fixture
def memory(monkeypatch):
    """A fake device with room for 4 of 8 samples."""
    fake = FakeMemory(each=100, room=450)
    made = micro_batches.MicroBatchSize

    def known(*arguments: Any) -> MicroBatchSize:
        fake.batch = made(*arguments)
        return fake.batch

    monkeypatch.setattr(micro_batches, "DeviceMemory", lambda device, mesh: fake)
    monkeypatch.setattr(micro_batches, "MicroBatchSize", known)
    return fake


def run(how: Any, ckpt_path: str | None = None, rows: int = 8, **options: Any) -> tuple[pl.Trainer, Plain]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    common = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False, **quiet}
    trainer = pl.Trainer(strategy=how, **{**common, **options})
    module = Plain().double()
    trainer.fit(module, batches(6 * rows, rows), batches(8, 8), ckpt_path=ckpt_path)
    return trainer, module


def test_a_run_trains_as_with_whole_batches_and_keeps_the_number(memory, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer, module = run(strategy(micro_batch_size=AUTO))
    assert memory.sizes == [1, 1, 2, 4]
    assert trainer.strategy.micro_batches.size == 4
    assert "micro_batch_size=auto: 4 of 8 samples" in caplog.text
    _, whole = run(strategy())
    for mine, theirs in zip(weights(module), weights(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    saved = tmp_path / "last.ckpt"
    trainer.save_checkpoint(saved)
    assert checkpoint.open(saved).common["megalight"]["micro_batch_size"] == 4
    how = strategy(micro_batch_size=AUTO)
    run(how, str(saved), max_epochs=2)
    assert memory.sizes == [1, 1, 2, 4], "a resumed run does not search"
    assert how.micro_batches is not None
    assert how.micro_batches.size == 4


def test_a_run_that_is_cut_off_while_it_searches_searches_again(memory, tmp_path):
    """The checkpoint has no number then. Four samples of eight fit; the run ends as one that was never cut off."""
    saved = tmp_path / "early.ckpt"
    first, _ = run(strategy(micro_batch_size=AUTO), max_steps=2)
    first.save_checkpoint(saved)
    assert "micro_batch_size" not in checkpoint.open(saved).common["megalight"]
    memory.sizes.clear()
    resumed, module = run(strategy(micro_batch_size=AUTO), str(saved), max_epochs=2)
    assert resumed.global_step > first.global_step
    assert memory.sizes == [1, 1, 2, 4]
    _, whole = run(strategy(), str(saved), max_epochs=2)
    for mine, theirs in zip(weights(module), weights(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_a_number_above_a_smaller_batch_takes_it_whole(memory, tmp_path):
    trainer, _ = run(strategy(micro_batch_size=AUTO))
    saved = tmp_path / "last.ckpt"
    trainer.save_checkpoint(saved)
    how = strategy(micro_batch_size=AUTO)
    resumed, _ = run(how, str(saved), rows=3, max_epochs=2)
    assert how.micro_batches is not None
    assert how.micro_batches.size == 4
    assert resumed.global_step > trainer.global_step


def test_graphs_are_refused_while_the_number_changes(memory):
    class Graphs(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.strategy.run_steps_by(run_passes)  # type: ignore[attr-defined]
            trainer.strategy.run_steps_by(lambda *passes: None)  # type: ignore[attr-defined]

    with pytest.raises(ConfigurationError, match="CUDA graphs record one"):
        run(strategy(micro_batch_size=AUTO), callbacks=[Graphs()])


def test_a_cpu_has_no_stated_limit():
    with pytest.raises(ConfigurationError, match="no stated limit"):
        run(strategy(micro_batch_size=AUTO))


def test_pipelines_want_a_number():
    from megalight.parallel.mesh import ParallelMesh

    mesh = ParallelMesh(world_size=2, pp=2)
    with pytest.raises(ConfigurationError, match="Give a number with pipeline_parallel"):
        micro_batches.of_strategy(AUTO, torch.device("cpu"), mesh, None)
