import threading
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from megalight.callbacks import GarbageCollection, Throughput
from megalight.callbacks.step_timing import LEVELS, OFF, TimerTable
from megalight.callbacks.throughput import program_start, startup_spans
from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel.trace import SILENCE, SPANS, span
from megalight.strategies import MegatronStrategy
from tests.callbacks.clock import by_hand
from tests.callbacks.rows import Rows
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    with by_hand() as now:
        yield now


def test_every_span_has_a_level():
    assert {"step", "data", *SPANS} == set(LEVELS)


def test_elapsed_is_reset_and_active_is_not(now):
    table = TimerTable(CPU, 1)
    timer = table.timer("mine")
    for seconds in (1, 2):
        with timer:
            now.time += seconds
        now.time += 10
    assert timer.elapsed(reset=False) == 3
    with timer:
        now.time += 4
    assert timer.elapsed() == 7
    assert timer.elapsed() == 0
    assert timer.active == 7
    timer.set_elapsed(2.5)
    assert timer.elapsed() == 2.5
    assert timer.active == 9.5
    timer.set_elapsed(1)
    times = table.close(4, 2)
    timer.set_elapsed(100)
    assert times.seconds() == {"mine": 0.5}


def test_starts_and_stops_alternate():
    timer = TimerTable(CPU, 1).timer("mine")
    with pytest.raises(MegalightError, match="'mine' does not run"):
        timer.stop()
    timer.start()
    with pytest.raises(MegalightError, match="'mine' already runs"):
        timer.start()
    thread = threading.Thread(target=lambda: timer.__enter__().stop())  # threads do not disturb each other
    thread.start()
    thread.join()
    timer.stop()
    assert len(timer.take().segments) == 2


def test_a_timer_stops_at_an_error():
    timer = TimerTable(CPU, 1).timer("mine")
    with pytest.raises(RuntimeError), timer:
        raise RuntimeError
    timer.start()
    timer.stop()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_levels_above_are_not_measured(level):
    table = TimerTable(CPU, level)
    for name in (*LEVELS, "mine"):
        table.begin(name, {})
        table.end(name)
    expected = {name for name, fine in {**LEVELS, "mine": 1}.items() if fine <= level}
    assert set(table.close(1, 1).seconds()) == expected
    assert table.timer("other", 2) is (OFF if level < 2 else table.timer("other"))


def test_a_timer_that_is_off_never_touches_the_device(monkeypatch):
    def touched(*given, **named):
        raise AssertionError("the device was touched")

    table = TimerTable(torch.device("cuda"), 0)
    for name in ("Event", "synchronize", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, touched)
    timer = table.timer("mine", 1)
    with timer:
        pass
    timer.set_elapsed(3)
    assert timer.elapsed() == timer.active == 0
    table.begin("forward", {})
    table.end("forward")
    assert table.close(1, 1).seconds() == {}


class Event:
    """An event of a device that is slow to get there: only waiting for it makes it pass."""

    made = 0
    waited = 0
    reached = 0.0
    time = None

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

    def record(self, stream):
        self.moment = Event.time()

    def query(self):
        return self.moment <= Event.reached

    def synchronize(self):
        Event.waited += self.moment > Event.reached

    def elapsed_time(self, other):
        return 1000 * (other.moment - self.moment)


def test_on_cuda_moments_are_events_read_later_and_used_again(monkeypatch):
    capturing, moment = [False], [0.0]
    for count in ("made", "waited"):
        monkeypatch.setattr(Event, count, 0)
    monkeypatch.setattr(Event, "time", lambda: moment[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    table = TimerTable(torch.device("cuda"), 1)
    for window in (1, 2, 3):
        for _ in range(4):
            table.begin("forward", {"chunk": 0})
            moment[0] += window
            table.end("forward")
        capturing[0] = True  # no events inside a graph
        table.begin("backward", {})
        table.end("backward")
        capturing[0] = False
        times = table.close(2 * window, 2)
        assert Event.waited == 4 * (window - 1)
        assert times.seconds() == {"forward": 2 * window}  # of backward nothing is known
    assert Event.made == 8


def test_a_long_window_needs_the_events_of_a_few_steps_only(monkeypatch):
    moment = [0.0]
    monkeypatch.setattr(Event, "time", lambda: moment[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made, waited = Event.made, Event.waited
    table = TimerTable(torch.device("cuda"), 1)
    for _ in range(100):
        table.begin("forward", {})
        moment[0] += 2
        table.end("forward")
        monkeypatch.setattr(Event, "reached", moment[0] - 5)  # the device is a few steps behind
        table.settle()
    assert Event.made - made <= 10
    assert Event.waited == waited
    assert table.timer("forward").active == pytest.approx(2 * 97, abs=2)
    assert table.close(100, 100).seconds() == {"forward": 2}
    assert table.timer("forward").active == 200


def test_an_unknown_level_is_refused():
    for make in (lambda: Throughput(timers=3), lambda: TimerTable(CPU, -1), lambda: Throughput().timer("mine", 5)):
        with pytest.raises(ConfigurationError, match="0 \\(coarse\\), 1 or 2"):
            make()
    with pytest.raises(ConfigurationError, match="max, minmax, all"):
        Throughput(ranks="mean")
    with pytest.raises(ConfigurationError, match="at least 1"):
        Throughput(every_n_steps=0)
    with pytest.raises(ConfigurationError, match="set timers to 0, 1 or 2"):
        Throughput(ranks="all")


def test_startup_is_measured_from_the_first_rank_to_the_last():
    stamps = [
        {"program": 10.0, "entry": 12.0, "fit": 13.0, "train": 20.0},
        {"program": 10.5, "entry": 14.0, "fit": 15.0, "train": 18.0},
    ]
    assert startup_spans(stamps) == {
        "ranks_apart_s": 0.5,
        "program_s": 4.0,
        "launch_s": 1.0,
        "setup_s": 5.0,
        "all_s": 10.0,
    }
    assert 0 < time.time() - program_start() < 24 * 3600


def test_rows_are_means_per_step_without_the_first():
    logger, timers = Rows(), Throughput(timers=1)
    tiny_trainer(callbacks=[timers], logger=logger).fit(Tiny())
    ((_, startup),) = logger.starting("startup/")
    assert startup["startup/all_s"] > 0
    ((step, first),) = logger.starting("time/first/")
    names = {"step", "forward", "backward", "optimizer"}
    assert step == 0
    assert set(first) == {f"time/first/{name}_s" for name in {*names, "data"}}
    rows = [(step, row) for step, row in logger.starting("time/") if "time/step_s" in row]
    assert [step for step, _ in rows] == [4, 8]
    for _, row in rows:
        assert set(row) == {f"time/{name}_s" for name in {*names, "data"}}
        parts = sum(row[f"time/{name}_s"] for name in names - {"step"})
        assert 0 < parts < row["time/step_s"]
    assert span("step") is SILENCE
    tiny_trainer(callbacks=[timers], logger=logger).fit(Tiny())
    assert len(logger.starting("time/first/")) == 2
    assert len(logger.starting("startup/")) == 1  # a process starts once


def test_saving_a_checkpoint_is_no_waiting_for_data(tmp_path, now):
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, *given):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    class Slow(Tiny):
        def on_save_checkpoint(self, checkpoint):
            now.time += 5

    logger = Rows()
    tiny_trainer(callbacks=[Throughput(timers=1, every_n_steps=4), Saves()], logger=logger).fit(Slow())
    row = next(row for step, row in logger.starting("time/") if step == 4)
    assert row["time/data_s"] == 0


def test_lightnings_own_distributed_strategy(tmp_path):
    rows, others = run(_ddp, 2)
    assert others == []
    assert [step for step, _ in rows] == [0, 2]
    assert {"time/forward_min_s", "time/backward_max_s", "time/optimizer_max_s"} <= set(rows[1][1])


def _ddp():
    logger = Rows()
    callbacks = [Throughput(timers=1, every_n_steps=2, ranks="minmax", stragglers=1.15), GarbageCollection(2)]
    strategy = DDPStrategy(process_group_backend="gloo")
    runner = trainer(strategy, callbacks=callbacks, max_steps=4, limit_val_batches=0, logger=logger,
                     precision="32-true", use_distributed_sampler=False)  # fmt: skip
    runner.fit(Tiny())
    assert dist.get_rank() > 0 or len(logger.starting("straggler/")) == 1
    return [(step, row) for step, row in logger.rows if any(name.startswith("time/") for name in row)]


def test_ones_own_spans_and_timers_are_rows_too_and_validation_is_not(tmp_path, now):
    timers = Throughput(timers=1, every_n_steps=2)

    class Own(Tiny):
        def training_step(self, batch, batch_idx):
            with span("own"), timers.timer("fine", 2), timers.timer("coarse", 0):
                now.time += 3
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            with span("own"), span("validation"):
                now.time += 100

    logger = CSVLogger(tmp_path)
    runner = tiny_trainer(callbacks=[timers], logger=logger, limit_val_batches=3, val_check_interval=4)
    assert timers.timer("before") is OFF
    runner.fit(Own())
    assert timers.timer("after") is OFF
    header, *lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    names = header.split(",")
    assert {"time/own_s", "time/coarse_s", "time/first/own_s"} <= set(names)
    assert not {"time/fine_s", "time/validation_s"} & set(names)
    own = [float(line.split(",")[names.index("time/own_s")] or 0) for line in lines]
    assert [seconds for seconds in own if seconds] == [3] * 5


def test_after_an_error_nothing_listens():
    class Broken(Tiny):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(callbacks=[Throughput(timers=1)]).fit(Broken())
    assert span("step") is SILENCE


@pytest.mark.parametrize("ranks", ["max", "minmax", "all"])
def test_all_ranks_are_in_the_row_of_rank_0(ranks):
    (step, row, first), others = run(_timed, 2, ranks)
    assert others == []
    assert step == 2
    ends = {"max": [""], "minmax": ["_min", "_max"], "all": ["_rank0", "_rank1"]}[ranks]
    names = {*LEVELS, "nap"} - {"checkpoint", "input_gradient", "weight_gradient", "data"}
    assert set(row) - {f"time/data{end}_s" for end in ends} == {f"time/{name}{end}_s" for name in names for end in ends}
    assert set(first) == {name.replace("time/", "time/first/") for name in row}
    low, high = row.get(f"time/nap{ends[0]}_s"), row[f"time/nap{ends[-1]}_s"]
    assert high == 7
    assert len(ends) == 1 or low == 0


def _timed(ranks):
    class Napping(WithData):
        def loss_step(self, carry, batch):
            with span("nap"):
                now.time += 7
            return super().loss_step(carry, batch)

        def forward_step(self, chunk, batch, carry=None):
            if dist.get_rank() == 0:
                with span("nap"):
                    pass
            return super().forward_step(chunk, batch, carry)

    logger = Rows()
    module = Napping(BASE, optimizer=ADAM, seed=SEED)
    module.steps = 6
    runner = trainer(
        MegatronStrategy(pipeline_parallel=2), max_steps=4,
        callbacks=[Throughput(timers=2, ranks=ranks, every_n_steps=2)],
        limit_val_batches=0, use_distributed_sampler=False, gradient_clip_val=1.0, logger=logger,
    )  # fmt: skip
    with by_hand() as now:
        runner.fit(module)
    rows = [(step, row) for step, row in logger.rows if any(name.startswith("time/") for name in row)]
    if dist.get_rank() > 0:
        return rows
    (_, first), (step, row) = rows
    return step, row, first


@pytest.mark.gpu
def test_timers_on_cuda_need_no_synchronization():
    table = TimerTable(torch.device("cuda"), 1)
    big = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            table.begin("forward", {})
            big = big @ big * 1e-3
            table.end("forward")
        times = table.close(1, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seconds = times.seconds()["forward"]  # waits for the device
    assert 0 < seconds < time.perf_counter() - start


@pytest.mark.gpu
def test_timers_on_cuda_log_the_devices_time():
    class Busy(Tiny):
        def training_step(self, batch, batch_idx):
            x = torch.randn(8192, 8192, device=self.device)
            for _ in range(10):
                x = x @ x * 1e-4
            return super().training_step(batch, batch_idx) + 0 * x.mean()

    logger = Rows()
    tiny_trainer(accelerator="gpu", callbacks=[Throughput(timers=1)], logger=logger).fit(Busy())
    row = logger.starting("time/")[-1][1]
    assert 0.01 < row["time/forward_s"] < row["time/step_s"] < 1
