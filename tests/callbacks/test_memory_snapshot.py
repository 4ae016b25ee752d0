from pathlib import Path

import pytest
import torch

from megalight.callbacks import ProfilerWindow
from megalight.callbacks.profiling import MemoryHistory, ran_out
from megalight.errors import ConfigurationError
from tests.callbacks.tiny import Tiny, tiny_trainer


class Full(Tiny):
    error: BaseException = torch.OutOfMemoryError("full")

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.fixture
def calls(monkeypatch):
    """What torch.cuda.memory is asked for; the run seems to be on a GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    monkeypatch.setattr(MemoryHistory, "check", lambda self, trainer: None)
    return calls


def test_a_full_device_leaves_a_snapshot_and_the_error_names_it(calls, tmp_path):
    snapshot = ProfilerWindow(tool="memory", max_entries=10)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        tiny_trainer(callbacks=[snapshot], default_root_dir=tmp_path).fit(Full())
    path = tmp_path / "memory" / "out-of-memory-step=2-rank=0.pickle"
    assert snapshot.traces == [path]
    assert path.read_bytes() == b"snapshot"
    assert raised.value.__notes__ == [f"(snapshot and history of the memory: {path})"]
    assert calls == [{"max_entries": 10, "stacks": "python"}, {"enabled": None}]


def test_other_errors_and_good_ends_leave_nothing(calls, tmp_path):
    snapshot = ProfilerWindow(tool="memory", dirpath=str(tmp_path))
    other = Full()
    other.error = RuntimeError("other")
    with pytest.raises(RuntimeError, match="other"):
        tiny_trainer(callbacks=[snapshot]).fit(other)
    tiny_trainer(callbacks=[snapshot]).fit(Tiny())
    assert snapshot.traces == []
    assert list(tmp_path.iterdir()) == []
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, {"enabled": None}] * 2


def test_an_unwritable_folder_does_not_hide_the_error(calls, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    snapshot = ProfilerWindow(tool="memory", dirpath=str(tmp_path / "file"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        tiny_trainer(callbacks=[snapshot]).fit(Full())
    assert snapshot.traces == []


def test_a_window_leaves_a_snapshot_of_its_steps(calls, tmp_path):
    window = ProfilerWindow(2, 4, "memory", ranks=[0], dirpath=str(tmp_path))
    tiny_trainer(callbacks=[window]).fit(Tiny())
    assert window.traces == [tmp_path / "steps=2-3-rank=0.pickle"]
    assert window.traces[0].read_bytes() == b"snapshot"
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, {"enabled": None}]


def test_causes_are_looked_through():
    error = ValueError("while loading")
    assert not ran_out(error)
    error.__cause__ = RuntimeError("in a worker")
    error.__cause__.__context__ = torch.OutOfMemoryError("full")
    assert ran_out(error)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("full"), True),
        (torch.AcceleratorError("CUDA error: out of memory", 2), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), False),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), False),
        (ValueError("the tokenizer is out of memory cells"), False),
    ],
)
def test_libraries_that_find_no_memory_count(error, full):
    assert ran_out(error) is full


def test_without_cuda_it_is_refused():
    with pytest.raises(ConfigurationError, match="this run is on cpu"):
        tiny_trainer(callbacks=[ProfilerWindow(tool="memory")]).fit(Tiny())
    tiny_trainer(callbacks=[ProfilerWindow(tool="memory")], limit_val_batches=1).validate(Tiny(), verbose=False)
    with pytest.raises(ConfigurationError, match="at least 1"):
        ProfilerWindow(tool="memory", max_entries=0)


@pytest.mark.gpu
def test_a_gpu_that_is_really_full(tmp_path):
    class Greedy(Tiny):
        def training_step(self, batch, batch_idx):
            self.kept = torch.empty(2**45, device=self.device)

    snapshot = ProfilerWindow(tool="memory", dirpath=str(tmp_path))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        tiny_trainer(accelerator="gpu", callbacks=[snapshot]).fit(Greedy())
    (path,) = snapshot.traces
    assert path.stat().st_size > 100
    assert str(path) in raised.value.__notes__[0]
