from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from megalight.callbacks import Throughput
from megalight.callbacks.meter import StepMeter, Window, memory_gib, peak_of, rates
from megalight.errors import ConfigurationError
from megalight.types import TokenBatch
from tests.callbacks.tiny import BATCHES, LENGTH, ROWS, Tiny, tiny_trainer

TRAINER = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), world_size=4)


class Rows(Logger):
    def __init__(self):
        self.rows = []

    name = version = "rows"

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_rates_are_arithmetic_on_a_window():
    window = Window(step=20, steps=10, seconds=5.0, tokens=40_000, sequence_length=128, values={})
    found = rates(window, TRAINER, Tiny(), peak_tflops=1000)
    assert found.pop("memory_gib") > 0
    assert found == pytest.approx(
        {
            "step_time_s": 0.5,
            "tokens_per_s": 8000,
            "tokens_per_s_per_device": 2000,
            "tflop_per_s_per_device": 2000 * 128e9 / 1e12,
            "mfu_percent": 25.6,
        }
    )


def test_waits_for_data_are_a_share_of_the_window(monkeypatch):
    now = 0.0

    class Slow(Tiny):
        def train_dataloader(self):
            nonlocal now
            for batch in super().train_dataloader():
                now += 1
                yield batch

        def training_step(self, batch, batch_idx):
            nonlocal now
            now += 3
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("megalight.callbacks.meter.time", SimpleNamespace(perf_counter=lambda: now))
    logger = Rows()
    runner = tiny_trainer(callbacks=[Throughput()], logger=logger)
    runner.fit(Slow())
    shares = [row["data_wait_percent"] for _, row in logger.rows if "data_wait_percent" in row]
    assert shares == [25, 25, 20]  # batches are read one ahead: the last four steps wait for three
    assert "_on_before_fetch" not in vars(runner.fit_loop.epoch_loop)  # as it was


def test_what_cannot_be_known_is_left_out():
    window = Window(step=2, steps=1, seconds=1.0, tokens=8, sequence_length=8, values={})
    assert "mfu_percent" not in rates(window, TRAINER, Tiny())  # no peak on CPU
    module = torch.nn.Module()
    assert set(rates(window, TRAINER, module)) == {
        "memory_gib", "step_time_s", "tokens_per_s", "tokens_per_s_per_device",
    }  # fmt: skip
    assert set(rates(Window(2, 1, 1.0, 0, 0, {}), TRAINER, module)) == {"memory_gib", "step_time_s"}


def test_rows_are_logged_every_few_steps_under_the_step_they_end_with():
    logger = Rows()
    tiny_trainer(callbacks=[Throughput()], logger=logger).fit(Tiny())
    rows = [(step, row) for step, row in logger.rows if "tokens_per_s" in row]
    assert [step for step, _ in rows] == [3, 7, 11]
    for _, row in rows:
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(ROWS * LENGTH)


def test_steps_are_optimizer_steps_and_tokens_those_of_all_their_batches():
    logger = Rows()
    tiny_trainer(callbacks=[Throughput()], logger=logger, accumulate_grad_batches=3, log_every_n_steps=2).fit(Tiny())
    rows = [(step, row) for step, row in logger.rows if "tokens_per_s" in row]
    assert [step for step, _ in rows] == [1, 3]
    assert rows[0][1]["tokens_per_s"] * rows[0][1]["step_time_s"] == pytest.approx(3 * ROWS * LENGTH)
    assert BATCHES == 3 * 2 * 2


def test_the_csv_log_has_the_columns(tmp_path):
    logger = CSVLogger(tmp_path)
    tiny_trainer(callbacks=[Throughput(peak_tflops=1)], logger=logger).fit(Tiny())
    header = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert {"tflop_per_s_per_device", "mfu_percent", "memory_gib"} <= set(header.split(","))


def test_pauses_do_not_count(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 11.0, 11.5])  # start, pause, resume, end of window, end of the next
    monkeypatch.setattr("megalight.callbacks.meter.time.perf_counter", lambda: next(now))
    meter = StepMeter(torch.device("cpu"))
    meter.start(0)
    meter.pause()
    meter.resume()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    meter.add(TRAINER, TokenBatch(tokens, tokens, tokens))
    meter.close(2, {"loss": torch.tensor(1.5)})
    meter.close(3, {})
    first, second = meter.poll(), meter.poll()
    assert first == Window(2, 2, 3.0, 2 * 5 * 4, 5, {"loss": 1.5})
    assert (second.steps, second.seconds, second.tokens) == (1, 0.5, 0)
    assert meter.poll() is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2450),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_peaks_by_device_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_of(torch.device("cuda", 0)) == peak


def test_memory_is_plausible():
    assert 0.05 < memory_gib(torch.device("cpu")) < 100


def test_an_impossible_peak_is_refused():
    with pytest.raises(ConfigurationError, match="above 0"):
        Throughput(peak_tflops=0)


@pytest.mark.gpu
def test_windows_on_cuda_need_no_synchronization():
    meter = StepMeter(torch.device("cuda"))
    meter.start(0)
    big = torch.randn(4096, 4096, device="cuda")
    count = torch.tensor(3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            big = big @ big * 1e-3
        meter.close(1, {"loss": big.mean(), "count": count})
        while (window := meter.poll()) is None:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert window.seconds > 1e-3
    assert window.values["loss"] == pytest.approx(float(big.mean()))
    assert window.values["count"] == 3
