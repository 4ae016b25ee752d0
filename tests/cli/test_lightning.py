import csv
import logging
import shutil
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from megalight import checkpoint
from megalight.callbacks import CUDAGraph
from megalight.cli.lightning import ArgumentParser, parsed
from megalight.cli.main import main
from megalight.cli.trainer import MegalightTrainer, check_values
from megalight.cli.verbs import plot
from megalight.errors import ConfigurationError

MODEL = ["--model=tests.cli.samples.SampleModule", "--data=tests.cli.samples.SampleData"]
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
]
LOW_PRECISION = (
    "{class_path: megalight.plugins.precision.MegatronLowPrecision, "
    "init_args: {options: {recipe: tensorwise, towers: [visoin]}}}"
)
SAMPLE_STRATEGY = "--trainer.strategy=tests.cli.samples.SampleStrategy"

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*smaller than the logging interval:UserWarning",
)


@pytest.fixture(autouse=True)
def _quiet_handlers(monkeypatch):
    """Lightning's log handler may hold an earlier test's captured stream."""
    monkeypatch.setattr(logging, "raiseExceptions", False)


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning", "ignore:.*not resumable:UserWarning")
def test_the_last_step_is_saved_and_goes_on_with_what_is_said_now(tmp_path, caplog):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "ck"
    arguments = {"every_n_train_steps": 60, "dirpath": str(folder), "save_last": True}
    callbacks = [{"class_path": "ModelCheckpoint", "init_args": arguments}]
    recipe.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks, "default_root_dir": str(tmp_path)}}))
    words = ["-c", str(recipe), *MODEL, *QUIET[:4], "--trainer.log_every_n_steps=1"]
    assert main(["fit", *words, "--trainer.fast_dev_run=1", "--model.learning_rate=0.5"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert main(["fit", *words, "--trainer.max_steps=3", "--model.learning_rate=0.5"]) == 0
    assert checkpoint.open(folder / "last.ckpt").common["global_step"] == 3
    shutil.copytree(folder / "last.ckpt", tmp_path / "start.ckpt")
    changed = ["--trainer.max_steps=5", f"--ckpt_path={tmp_path / 'start.ckpt'}", "--model.learning_rate=0.25"]
    for flags, rate in ([], 0.25), (["--resume.optimizer=saved"], 0.5):
        root = tmp_path / f"{rate}"
        assert main(["fit", *words, *changed, *flags, f"--trainer.default_root_dir={root}"]) == 0
        _, (*_, last) = plot.read_curves(plot.find_logs(root))["lr"]
        assert last == rate
        (record,) = root.rglob("run.yaml")
        assert yaml.safe_load(record.read_text())["resumed_from"] == str(tmp_path / "start.ckpt")
        assert ("lr 0.5 -> 0.25" in caplog.text) == (rate == 0.25)
        caplog.clear()


def test_fit_writes_logs_configuration_and_record(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model:\n  class_path: tests.cli.samples.SampleModule\n"
        "  init_args: {config: {size: {hidden_size: 6}}}\n"
        "data:\n  class_path: tests.cli.samples.SampleData\n  init_args: {features: 6}\n"
        f"trainer:\n  default_root_dir: {tmp_path}\n  max_epochs: 2\n  log_every_n_steps: 1\n"
        "  callbacks: [Timer]\n"  # has a member of an Enum as a default
    )
    assert main(["fit", "-c", str(recipe), "--trainer.accelerator=cpu", "--trainer.devices=1", *QUIET[2:]]) == 0
    (folder,) = (tmp_path / "lightning_logs").iterdir()
    names = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert {"metrics", "config", "run", "events"} <= names
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed_everything"] == 1234
    assert config["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"
    assert config["model"]["init_args"]["config"]["size"] == {"hidden_size": 6, "num_layers": 2}
    record = yaml.safe_load((folder / "run.yaml").read_text())
    assert record["strategy"] == "MegatronStrategy"
    assert {"python", "megalight", "torch", "lightning"} <= set(record["versions"])
    with (folder / "metrics.csv").open() as lines:
        columns = set(next(csv.reader(lines)))
    assert {"train_loss", "val_loss", "step_time_s", "memory_gib", "lr", "grad_norm", "data_wait_percent"} <= columns
    image = tmp_path / "curves.png"
    assert main(["plot", str(tmp_path), "-o", str(image)]) == 0
    assert image.stat().st_size > 5000
    assert capsys.readouterr().out.strip().endswith(str(image))
    steps, _ = plot.read_curves(plot.find_logs(tmp_path))["train_loss"]
    assert steps == list(range(8))
    # the saved configuration runs again
    assert main(["fit", "-c", str(folder / "config.yaml"), "--trainer.max_epochs=1"]) == 0


@pytest.mark.parametrize(
    ("words", "bar"),
    [
        ([], "StepProgress"),
        (["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val_loss"], "StepProgress"),
        (["--trainer.callbacks=TQDMProgressBar"], "TQDMProgressBar"),
        (["--trainer.enable_progress_bar=false"], None),
    ],
)
def test_the_users_progress_bar_wins(words, bar):
    from megalight.cli.lightning import MegalightCLI

    cli = MegalightCLI(args=[*MODEL, "--trainer.accelerator=cpu", "--trainer.logger=false", *words], run=False)
    found = cli.trainer.progress_bar_callback
    assert (found and type(found).__name__) == bar
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names.count("Throughput") == names.count("RunRecord") == 1
    assert names[-1] == "ModelCheckpoint"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--trainer.max_stepz=3"], ["unknown key 'trainer.max_stepz' (value '3')", "'max_steps'"]),
        (["--trainer.max_steps=abc"], ["trainer.max_steps = 'abc'", "int"]),
        (["--model.config.size.hiden_size=8"], ["'model.config.size.hiden_size' (value '8')", "'hidden_size'"]),
        (["--model.config.size.hidden_size=x"], ["model.config.size.hidden_size = 'x'", "int"]),
        (["--model.config.size.hidden_size=5"], ["hidden_size is 5; it must be even. Use 6."]),
        (
            ["--trainer.strategy=tests.cli.samples.SampleStrateg"],
            ["'tests.cli.samples.SampleStrateg' is no import path", "'SampleStrategy'?"],
        ),
        (["--trainer.strategy=SampleStrateg"], ["'SampleStrateg'", "Did you mean 'SampleStrategy'?"]),
        (
            [SAMPLE_STRATEGY, "--trainer.strategy.tensor_paralel=2"],
            ["'trainer.strategy.tensor_paralel' (value '2')", "'tensor_parallel'"],
        ),
        ([SAMPLE_STRATEGY, "--trainer.strategy.tensor_parallel=2"], ["tensor_parallel is 2; this strategy has 1"]),
        (["--trainer.callbacks+=EarlyStoping"], ["EarlyStoping", "'EarlyStopping'"]),
        (["--trainer.callbacks=EMA", "--trainer.callbacks.decay=2"], ["decay is 2.0", "below 1"]),
        ([f"--trainer.plugins=[{LOW_PRECISION}]"], ["towers=['visoin']; 'visoin' is no tower", "Did you mean"]),
        (["-c", "absent.yaml"], ["absent.yaml"]),
        (["--ckpt_path=absent.ckpt"], ["absent.ckpt"]),
        (["--trainer.overfit_batches=2.5"], ["2.5"]),
        (["--trainer.val_check_interval=100"], ["`val_check_interval` (100)", "batches (4)", "--trainer.NAME"]),
    ],
)
def test_user_errors_are_one_short_message(words, parts, capsys, tmp_path):
    root = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=1"]
    assert main(["fit", *MODEL, *QUIET, *root, *words]) == 2
    text = capsys.readouterr().err
    errors = text[text.index("megalight fit: error: ") :]
    for part in parts:
        assert part in errors, errors
    assert len(errors.splitlines()) <= 20
    assert "Traceback" not in errors
    assert "Subclass types" not in errors
    assert "does not correspond to a subclass" not in errors


@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_missing_gpu_is_told_with_what_to_do(name, monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: False)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=f"accelerator is {name}, and torch finds none .* Leave it out, or"):
        check_values({"accelerator": name})


def test_a_run_shorter_than_its_intervals_is_validated_and_logged_at_its_end(tmp_path):
    """The first thing people try with a recipe: a few steps of it."""
    long = ["--trainer.max_steps=2", "--trainer.val_check_interval=100", "--trainer.log_every_n_steps=100"]
    assert main(["fit", *MODEL, *QUIET, *long, f"--trainer.default_root_dir={tmp_path}"]) == 0
    found = plot.read_curves(plot.find_logs(tmp_path))
    assert found["train_loss"][0] == [1]
    assert len(found["val_loss"][0]) == 1


def test_only_fit_tells_of_intervals_that_are_longer_than_the_run(caplog, tmp_path):
    words = [*MODEL, *QUIET, "--trainer.max_steps=2", f"--trainer.default_root_dir={tmp_path}"]
    for verb, told in (("fit", True), ("validate", False)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert main([verb, *words]) == 0
        assert ("log_every_n_steps=50 is longer than the run" in caplog.text) == told


@pytest.mark.parametrize("writer", [True, False])
def test_predict_tells_if_nobody_writes_what_it_returns(writer, caplog):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 8, "max_sequence_length": 8}
    words = ["predict", "--model=GPTModule", *(f"--model.config.{name}={value}" for name, value in sizes.items())]
    words += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = parsed([*words, *(["--trainer.callbacks+=tests.cli.samples.SampleWriter"] if writer else [])])
    with caplog.at_level(logging.INFO):
        cli.before_predict()
    assert ("no callback writes what predict returns" in caplog.text) != writer


@pytest.mark.parametrize("name", ["train", "val", "test", "predict"])
def test_one_batch_is_not_all_batches(name):
    parser = ArgumentParser()
    parser.add_lightning_class_args(MegalightTrainer, "trainer")
    flag = f"--trainer.limit_{name}_batches"
    for text, value in (("1", 1), ("1.0", 1.0)):
        found = parser.parse_args([f"{flag}={text}"]).trainer[f"limit_{name}_batches"]
        assert (type(found), found) == (type(value), value)


def test_parts_of_an_argument_without_a_type(capsys):
    """Warnings are errors here, so that this also finds one of jsonargparse in front of the message."""
    assert main(["fit", "--model=tests.cli.samples.UntypedModule", MODEL[1], *QUIET, "--model.config.size=2"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "error: model.config.size = '2' cannot be set: the argument 'config' has no type annotation" in text


def test_other_ranks_stay_silent(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["fit", *MODEL, "--trainer.max_stepz=3"]) == 2
    assert "error" not in capsys.readouterr().err


def test_debug_lets_the_traceback_through(monkeypatch):
    monkeypatch.setenv("MEGALIGHT_DEBUG", "1")
    with pytest.raises(Exception, match="must be even"):
        main(["fit", *MODEL, *QUIET, "--model.config.size.hidden_size=5"])


@pytest.mark.parametrize(
    ("mode", "others", "added"),
    [({"cuda_graphs": "off"}, [], 0), ({}, [], 1), ({}, [CUDAGraph("auto")], 1), ({}, [CUDAGraph()], 1)],
)
def test_graphs_are_tried_unless_they_are_off(mode: Any, others: list[pl.Callback], added: int) -> None:
    runner = MegalightTrainer(accelerator="cpu", callbacks=others, logger=False, **mode)
    assert sum(type(callback) is CUDAGraph for callback in runner.callbacks) == added  # type: ignore[attr-defined]


def stacked(tmp_path, *files, words=()):
    names = []
    for number, text in enumerate(files):
        names += ["-c", str(tmp_path / f"{number}.yaml")]
        (tmp_path / f"{number}.yaml").write_text(text)
    runner = parsed(["fit", *MODEL, "--trainer.accelerator=cpu", "--trainer.logger=false", *names, *words]).trainer
    return runner, [callback for callback in runner.callbacks if isinstance(callback, pl.callbacks.ModelCheckpoint)]


FIRST = """
trainer:
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {dirpath: first, filename: one, every_n_train_steps: 7, save_last: true}
"""
SECOND = """
trainer:
  callbacks{plus}:
    - class_path: ModelCheckpoint
      init_args: {{filename: two}}
"""


@pytest.mark.parametrize("flag", [False, True])
def test_a_list_of_a_later_file_replaces_that_before(tmp_path, flag):
    second = SECOND.format(plus="")
    entry = "[{class_path: ModelCheckpoint, init_args: {filename: two}}]"
    files, words = ([FIRST], [f"--trainer.callbacks={entry}"]) if flag else ([FIRST, second], [])
    _, (saver,) = stacked(tmp_path, *files, words=words)
    assert (saver.dirpath, saver.filename, saver._every_n_train_steps, saver.save_last) == (None, "two", 0, None)


def test_a_plus_adds_to_the_list_before(tmp_path):
    _, savers = stacked(tmp_path, FIRST, SECOND.format(plus="+"), words=["--trainer.callbacks+=EMA"])
    assert [(saver.filename, saver._every_n_train_steps) for saver in savers] == [("one", 7), ("two", 0)]


def test_values_of_one_class_are_still_stacked(tmp_path):
    """Only lists replace: a later file changes single arguments of the classes before."""
    model = "model: {class_path: tests.cli.samples.SampleModule, init_args: {config: {size: {hidden_size: 6}}}}"
    later = "model: {init_args: {learning_rate: 0.5}}\ntrainer: {strategy: {init_args: {tensor_parallel: 1}}}"
    runner, _ = stacked(tmp_path, model, later, words=["--trainer.callbacks=EMA", "--trainer.callbacks.decay=0.5"])
    (ema,) = (callback for callback in runner.callbacks if type(callback).__name__ == "EMA")
    assert ema.decay == 0.5
