"""The number of samples per micro-batch is found by measuring steps, and is kept with the run."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megalight import checkpoint
from megalight.errors import ConfigurationError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.step import run_passes
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies import micro_batches
from megalight.strategies.micro_batches import AUTO, FoundSize, MicroBatchSize, Usage, balanced
from tests.strategies.regression import Plain, batches, strategy, weights

BEFORE, FIRST_STEP = 1000, 500


class FakeMemory:
    """A device where a sample takes ``each`` bytes, with room for ``room`` bytes of activations.

    Args:
        state: bytes of the optimizer's state, which are part of the room until it exists.
    """

    def __init__(self, each: int, room: int, fixed: int = 0, state: int = 0) -> None:
        self.each, self.room, self.fixed, self.state = each, room, fixed, state
        self.sizes: list[int] = []
        self.batch: MicroBatchSize | None = None
        self.held = BEFORE

    def measure(self, samples: int) -> Any:
        assert self.batch is not None
        assert self.batch.size is not None
        limit = BEFORE + self.room
        if not samples:
            return lambda: Usage(0, self.held, self.held, limit)
        self.sizes.append(self.batch.size)
        held = self.held
        peak = held + self.fixed + self.each * min(samples, self.batch.size)
        if peak > limit:
            raise torch.OutOfMemoryError(f"{peak} bytes")
        if len(self.sizes) == 1:
            peak += FIRST_STEP  # what only the first step allocates misleads nobody
        return lambda: Usage(samples, held, peak, limit)


class Updates(torch.optim.SGD):
    """An optimizer with a state that the fake device counts."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.memory = memory

    def step(self, closure: Any = None) -> None:
        self.memory.held = BEFORE + self.memory.state


def search(memory: FakeMemory, samples: int, skipped: int = 0, steps: int = 12, every: int = 1) -> MicroBatchSize:
    """Search over steps, of which the first updates are skipped, each after ``every`` steps."""
    memory.batch = found = MicroBatchSize(1, memory)
    optimizer = Updates(memory)
    for number in range(steps * every):
        with found.step(samples):
            pass
        if (number + 1) % every == 0:
            with found.update(optimizer, lambda: True):
                if number // every >= skipped:
                    optimizer.step()
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
    """Gradients accumulate over four steps; the state would take the place of half of the samples."""
    memory = FakeMemory(each=100, room=1600, state=800)
    found = search(memory, 16, every=4)
    assert memory.sizes[:7] == [1, 1, 1, 1, 1, 2, 4]
    assert found.found
    assert found.size == 8


def test_steps_that_are_skipped_make_no_state():
    """In float16, the gradients of the first steps overflow."""
    memory = FakeMemory(each=100, room=1600, state=800)
    found = search(memory, 16, skipped=5)
    assert memory.sizes == [1, 1, 1, 1, 1, 1, 1, 2, 4, 8]
    assert found.size == 8


def test_updates_without_gradients_make_no_state():
    memory = FakeMemory(each=100, room=1600, state=800)
    memory.batch = found = MicroBatchSize(1, memory)
    optimizer = Updates(memory)
    for has in (False, False, True, True):
        with found.step(16):
            pass
        with found.update(optimizer, lambda has=has: has):
            optimizer.step()
    assert memory.sizes == [1, 1, 1, 1]
    assert found.size == 2


@pytest.mark.parametrize(
    ("room", "held", "size"),
    [
        (800, BEFORE, 8),  # the device on which it was found
        (2000, BEFORE, 8),  # a larger one, where the search would go on
        (500, BEFORE, 1),  # a smaller one
        (800, BEFORE + 100, 1),  # more is allocated than then
        (900, BEFORE + 100, 8),
        (700, BEFORE - 100, 1),  # what comes in the first step, such as gradients, is missing
    ],
)
def test_a_saved_number_is_taken_if_it_fits(room, held, size, caplog):
    memory = FakeMemory(each=100, room=room)
    memory.held = held
    memory.batch = resumed = MicroBatchSize(1, memory, FoundSize(8, BEFORE, 800))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        resumed.resumed()
    assert resumed.size == size
    assert resumed.found == (size == 8)
    assert ("searched anew" in caplog.text) == (size == 1)
    assert (resumed.result is None) == (size == 1)


def test_symmetric_memory_takes_room_from_the_allocator(monkeypatch):
    """Of 1000 bytes, another process has 50, the allocator 600, peers share 300, and 50 are free."""
    figures: dict[str, Any] = {
        "reset_peak_memory_stats": None,
        "memory_allocated": 400,
        "max_memory_allocated": 550,
        "memory_reserved": 600,
        "mem_get_info": (50, 1000),
        "get_per_process_memory_fraction": 1.0,
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(micro_batches, "check_measured", lambda kind: None)
    held = [200, 300, 300]  # it grows in the step
    monkeypatch.setattr("megalight.parallel.peers.memory.held", lambda: held.pop(0))
    monkeypatch.setattr(micro_batches, "held", lambda: held.pop(0))
    end = micro_batches.DeviceMemory(torch.device("cpu"), ParallelMesh()).measure(4)
    assert end() == Usage(4, before=600, peak=850, limit=int(0.9 * 950))


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


def run(
    how: Any, ckpt_path: str | None = None, rows: int = 8, module: Any = None, **options: Any
) -> tuple[pl.Trainer, Plain]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    common = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False, **quiet}
    trainer = pl.Trainer(strategy=how, **{**common, **options})
    module = Plain().double() if module is None else module
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
    assert checkpoint.open(saved).common["megalight"]["micro_batches"] == {"size": 4, "held": BEFORE, "used": 400}
    how = strategy(micro_batch_size=AUTO)
    run(how, str(saved), max_epochs=2)
    assert memory.sizes == [1, 1, 2, 4], "a resumed run does not search"
    assert how.micro_batches is not None
    assert how.micro_batches.size == 4


class Overflows(Plain):
    """The gradients of the first three steps are infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx < 3 else 1.0)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_the_search_waits_for_the_first_update(memory):
    how = strategy(micro_batch_size=AUTO)
    how.precision_plugin = precision = MegatronPrecision("16-mixed")
    precision.dtype = torch.float64
    run(how, module=Overflows().double())
    assert memory.sizes == [1, 1, 1, 1, 1, 2]


def test_a_resumed_run_with_less_memory_searches_again(memory, tmp_path):
    """Four samples do not fit beside what it holds when the optimizer's state is loaded, and two do."""
    trainer, _ = run(strategy(micro_batch_size=AUTO))
    saved = tmp_path / "last.ckpt"
    trainer.save_checkpoint(saved)
    memory.sizes.clear()
    memory.held += 200
    how = strategy(micro_batch_size=AUTO)
    run(how, str(saved), max_epochs=2)
    assert memory.sizes == [1, 1, 2]
    assert how.micro_batches is not None
    assert how.micro_batches.result == FoundSize(2, BEFORE + 200, 200)


def test_a_run_that_is_cut_off_while_it_searches_searches_again(memory, tmp_path):
    """The checkpoint has no number then. Four samples of eight fit; the run ends as one that was never cut off."""
    saved = tmp_path / "early.ckpt"
    first, _ = run(strategy(micro_batch_size=AUTO), max_steps=2)
    first.save_checkpoint(saved)
    assert "micro_batches" not in checkpoint.open(saved).common["megalight"]
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
