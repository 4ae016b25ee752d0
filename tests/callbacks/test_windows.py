import gzip
import json

import pytest
import torch

from megalight.callbacks import ProfilerWindow
from megalight.callbacks.profiling import StepWindow
from megalight.errors import ConfigurationError
from megalight.parallel.trace import SILENCE, span
from tests.callbacks.tiny import Tiny, tiny_trainer


@pytest.mark.parametrize(
    ("window", "ahead", "begins"),
    [
        (StepWindow(3, 5), 0, [3]),
        (StepWindow(3, 5), 2, [1]),
        (StepWindow(1, 2), 2, [0]),
        (StepWindow(0, 2, 4), 1, [0, 3, 7, 11]),
        (StepWindow(5, 6, 3), 1, [4, 7, 10]),
    ],
)
def test_where_windows_begin(window, ahead, begins):
    assert [step for step in range(12) if window.begins(step, ahead)] == begins


@pytest.mark.parametrize("arguments", [(3, 3), (-1, 2), (0, 4, 3)])
def test_impossible_windows_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="step"):
        StepWindow(*arguments)


class Nsight:
    """What torch.cuda is asked for, in order."""

    def __init__(self, monkeypatch, trainer):
        self.calls = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append("wait"))
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: self.calls.append(f"start {trainer.global_step}"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: self.calls.append(f"stop {trainer.global_step}"))


def on_gpu(window, monkeypatch):
    monkeypatch.setattr(window.tool, "check", lambda trainer: None)  # which looks for a GPU
    trainer = tiny_trainer(callbacks=[window])
    return trainer, Nsight(monkeypatch, trainer)


def test_nsight_records_the_steps_of_its_window(monkeypatch):
    trainer, nsight = on_gpu(ProfilerWindow(3, 5, "nsys"), monkeypatch)
    trainer.fit(Tiny())
    assert nsight.calls == ["wait", "start 3", "wait", "stop 5"]


def test_nsight_is_stopped_where_training_ends_or_fails(monkeypatch):
    trainer, nsight = on_gpu(ProfilerWindow(10, 50, "nsys"), monkeypatch)
    trainer.fit(Tiny())
    assert nsight.calls == ["wait", "start 10", "wait", "stop 12"]

    class Broken(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 11:
                raise RuntimeError("broken")

    trainer, nsight = on_gpu(ProfilerWindow(10, 50, "nsys"), monkeypatch)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken())
    assert nsight.calls == ["wait", "start 10", "stop 11"]


def test_nsight_leaves_other_ranks_alone(monkeypatch):
    trainer, nsight = on_gpu(ProfilerWindow(3, 5, "nsys", ranks=(1,)), monkeypatch)
    trainer.fit(Tiny())
    assert nsight.calls == []


def test_nsight_needs_cuda_on_the_ranks_it_records():
    with pytest.raises(ConfigurationError, match="rank 0 runs on cpu"):
        tiny_trainer(callbacks=[ProfilerWindow(3, 5, "nsys")]).fit(Tiny())
    tiny_trainer(callbacks=[ProfilerWindow(3, 5, "nsys", ranks=(1,))], max_steps=1).fit(Tiny())


def spans_in(path):
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_a_profile_holds_the_windows_steps_and_their_parts(tmp_path):
    window = ProfilerWindow(2, 4, every_n_steps=5, rows=5)
    tiny_trainer(callbacks=[window], default_root_dir=tmp_path).fit(Tiny())
    names = ["steps=2-3-rank=0", "steps=7-8-rank=0"]
    assert [path.name for path in window.traces] == [f"{name}.json.gz" for name in names]
    for path in window.traces:
        assert path.parent == tmp_path / "profile"
        found = spans_in(path)
        assert {name: found.count(name) for name in ("step", "forward", "backward", "optimizer")} == {
            "step": 2, "forward": 2, "backward": 2, "optimizer": 2,
        }  # fmt: skip
        table = path.with_name(path.name.replace(".json.gz", ".txt")).read_text()
        assert "Self CPU" in table
        assert len(table.splitlines()) < 20
    assert span("step") is SILENCE


def test_a_profile_ends_with_training_or_its_error(tmp_path):
    class Broken(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    window = ProfilerWindow(2, 50, dirpath=str(tmp_path))
    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(callbacks=[window]).fit(Broken())
    assert window.traces == [tmp_path / "steps=2-3-rank=0.json.gz"]
    assert spans_in(window.traces[0]).count("backward") == 1
    window = ProfilerWindow(20, 50, warmup=10, dirpath=str(tmp_path / "none"))
    tiny_trainer(callbacks=[window]).fit(Tiny())
    assert window.traces == []
    assert not (tmp_path / "none").exists()
    assert span("step") is SILENCE


def test_a_profile_is_made_by_the_ranks_that_were_asked(tmp_path):
    window = ProfilerWindow(1, 2, ranks=(3,), dirpath=str(tmp_path))
    tiny_trainer(callbacks=[window], max_steps=3).fit(Tiny())
    assert window.traces == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup": -1}, "warmup"),
        ({"rows": 0}, "rows"),
        ({"every_n_steps": 2, "warmup": 2}, "at least 4"),
        ({"tool": "perf"}, "torch, nsys, memory"),
        ({"tool": "nsys", "shapes": True}, "has no shapes; leave them out"),
        ({"tool": "memory", "warmup": 3}, "has no warmup"),
        ({"max_entries": 5}, "has no max_entries"),
        ({"stop_step": None}, "needs stop_step"),
    ],
)
def test_impossible_profiles_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ProfilerWindow(**{"start_step": 2, "stop_step": 4, **arguments})


@pytest.mark.gpu
def test_on_a_gpu_traces_hold_kernels(tmp_path):
    window = ProfilerWindow(2, 4, dirpath=str(tmp_path))
    tiny_trainer(callbacks=[window, ProfilerWindow(5, 6, "nsys")], accelerator="gpu").fit(Tiny())
    with gzip.open(window.traces[0]) as file:
        assert {event.get("cat") for event in json.load(file)["traceEvents"]} >= {"kernel", "user_annotation"}
