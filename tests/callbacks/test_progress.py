import json
import re
import sys

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from megalight.callbacks import StepProgress, Throughput
from megalight.errors import ConfigurationError
from megalight.loggers import JSONLogger
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import LENGTH, Tiny, tiny_trainer


@pytest.fixture(autouse=True)
def _no_notebook(monkeypatch):
    """A test that starts a notebook imports this too, and may come before in this process."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


def fit(**options):
    tiny_trainer(**{"enable_progress_bar": True, **options}).fit(Tiny())


def test_plain_lines_show_loss_speed_memory_and_time(capsys):
    fit(callbacks=[StepProgress(plain=True)], limit_val_batches=2)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if "tok/s" in line]
    assert [line.split()[1] for line in steps] == ["4", "8", "12"]
    for part in ("loss ", "lr 0.1 ", "tok/s ", "TFLOP/s/dev ", "s/step ", "data wait ", "GiB ", "left 0:00:0"):
        assert part in steps[0]
    assert re.search(r"step 12  val_loss \d\.\d{4}", "\n".join(lines))


def test_a_run_shorter_than_the_interval_shows_and_logs_its_last_step(capsys, tmp_path):
    logger = JSONLogger(tmp_path)
    fit(callbacks=[StepProgress(plain=True), Throughput()], log_every_n_steps=9, max_steps=5, logger=logger)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "tok/s" in line] == ["5/5"]
    lines = next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()
    assert [row["step"] for row in map(json.loads, lines) if "tokens_per_s" in row] == [4]


def test_a_line_has_its_own_steps_loss(capsys):
    torch.manual_seed(1)
    fit(callbacks=[StepProgress(plain=True)], log_every_n_steps=1)
    shown = [float(loss) for loss in re.findall(r"  loss (\d\.\d+)", capsys.readouterr().out)]
    torch.manual_seed(1)
    module = Tiny()
    optimizer = module.configure_optimizers()
    expected = []
    for batch in module.train_dataloader():
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert shown == pytest.approx(expected, abs=1e-4)


def test_the_loss_shown_does_not_depend_on_accumulation(capsys):
    class Frozen(Tiny):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    shown = []
    for batches in (1, 2):
        torch.manual_seed(1)
        runner = tiny_trainer(
            callbacks=[StepProgress(plain=True)],
            enable_progress_bar=True,
            accumulate_grad_batches=batches,
            log_every_n_steps=12 // batches,
        )
        runner.fit(Frozen())
        shown += re.findall(r"  loss (\d\.\d+)", capsys.readouterr().out)
    assert len(shown) == 2
    assert shown[0] == shown[1]


def test_the_bar_shows_the_same(capsys):
    fit(callbacks=[StepProgress(interval_s=0, plain=False)], limit_val_batches=2, max_epochs=2)
    text = "".join(capsys.readouterr())
    assert "12/12" in text
    for part in ("loss=", "tok/s=", "s/step=", "val_loss="):
        assert part in text


def test_a_run_that_steps_end_counts_no_epochs(capsys):
    """Lightning's bar for rich terminals counts ``Epoch 0/-2`` there."""
    fit(callbacks=[StepProgress(interval_s=0, plain=False)], max_steps=3, max_epochs=-1)
    text = "".join(capsys.readouterr())
    assert "3/3" in text
    assert "-2" not in re.sub(r"e-\d+", "", text)


def test_lightnings_own_bar_counts_no_epochs_either(capsys):
    bar = RichProgressBar()
    for limits, told in (({"max_steps": 3, "max_epochs": -1}, "Epoch 0 "), ({"max_epochs": 1}, "Epoch 0/0 ")):
        tiny_trainer(**{"enable_progress_bar": True, "callbacks": [bar], "strategy": MegatronStrategy(), **limits}).fit(
            Tiny()
        )
        text = "".join(capsys.readouterr())
        assert told in text
        assert "/-2" not in text
    assert "_get_train_description" not in vars(bar)


def test_the_last_state_of_the_bar_is_that_of_the_last_step(capsys):
    torch.manual_seed(1)
    # Ends in the middle of an epoch of 12 batches. No refresh is due by time.
    fit(callbacks=[StepProgress(interval_s=1000, plain=False)], max_steps=7)
    shown = "".join(capsys.readouterr())
    torch.manual_seed(1)
    fit(callbacks=[StepProgress(plain=True)], max_steps=7, log_every_n_steps=1)
    losses = re.findall(r"  loss (\d\.\d+)", capsys.readouterr().out)
    assert len(losses) == 7
    assert re.findall(r" (\d+)/12 \[\d+:\d+, loss=(\d\.\d{4})", shown)[-1] == ("7", losses[-1])


def test_what_users_look_for_fits_into_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    fit(callbacks=[StepProgress(interval_s=0, plain=False)], limit_val_batches=0)
    line = re.split(r"[\r\n]+", "".join(capsys.readouterr()).strip())[-1][:100]
    for part in ("12/12", "loss=", "lr=", "left=0:00:0", "tok/s="):
        assert part in line


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightnings_own_bar_shows_the_loss_too(accumulate):
    class Bar(TQDMProgressBar):
        shown = ()

        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            self.shown = self.get_metrics(trainer, pl_module)

    bar = Bar()
    module = GPTModule(GPTConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=5, max_sequence_length=LENGTH))
    strategy = MegatronStrategy()
    fit_options = {"callbacks": [bar], "strategy": strategy, "enable_progress_bar": True}
    tiny_trainer(**fit_options, accumulate_grad_batches=accumulate, log_every_n_steps=1).fit(
        module, Tiny().train_dataloader(), Tiny().val_dataloader()
    )
    assert float(bar.shown["train_loss"]) == pytest.approx(float(strategy.report.loss), rel=1e-2)


def test_a_disabled_bar_says_nothing(capsys):
    fit(callbacks=[StepProgress(plain=True)], enable_progress_bar=True, max_steps=0)
    capsys.readouterr()
    bar = StepProgress(plain=True)
    bar.disable()
    fit(callbacks=[bar])
    assert "tok/s" not in capsys.readouterr().out


def test_validation_alone_is_left_to_lightnings_table(capsys):
    runner = tiny_trainer(callbacks=[StepProgress(plain=True)], enable_progress_bar=True, limit_val_batches=2)
    runner.validate(Tiny(), verbose=False)
    assert "step" not in capsys.readouterr().out


def test_a_negative_interval_is_refused():
    with pytest.raises(ConfigurationError, match="at least 0"):
        StepProgress(interval_s=-1)


class Strict(StepProgress):
    """Anything that makes the host wait for the device is an error."""

    def on_train_batch_end(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            super().on_train_batch_end(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [True, False])
def test_nothing_waits_for_the_device(plain, capsys):
    bar = Strict(interval_s=0, plain=plain)
    fit(callbacks=[bar], accelerator="cuda", log_every_n_steps=1, limit_val_batches=2, max_epochs=2)
    assert "val_loss" in "".join(capsys.readouterr())
