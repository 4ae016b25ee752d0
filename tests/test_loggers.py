import json

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from megalight.callbacks import RunRecord
from megalight.cli.trainer import MegalightTrainer, named_loggers
from megalight.errors import ConfigurationError, MissingPackageError
from megalight.loggers import JSONLogger
from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import Tiny
from tests.support.environment import PoolEnvironment
from tests.support.workers import run


def rows(logger):
    with open(f"{logger.log_dir}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def test_rows_are_appended_with_their_own_metrics(tmp_path):
    logger = JSONLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": torch.tensor(0.5)}, step=3)
    assert rows(logger) == [{"step": 3, "loss": 0.5}]
    logger.log_metrics({"other": float("nan")})
    logger.save()
    assert rows(logger)[1] == {"step": 1, "other": "nan"}
    logger.log_hyperparams({"a": 1})
    logger.log_hyperparams({"b": tmp_path})
    with open(f"{logger.log_dir}/hparams.json") as file:
        assert json.load(file) == {"a": 1, "b": str(tmp_path)}


def test_named_loggers_share_a_folder(tmp_path):
    loggers = named_loggers("json, csv", str(tmp_path))
    assert [type(logger) for logger in loggers] == [JSONLogger, CSVLogger]
    assert loggers[0].log_dir == loggers[1].log_dir
    with pytest.raises(MissingPackageError, match=r"trainer.logger=comet needs .*'comet_ml'.*pip install comet_ml"):
        named_loggers("csv,comet", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"'jsn' is not a known logger\. Did you mean 'json'\?"):
        named_loggers("csv,jsn", str(tmp_path))


def _two_at_once(root):
    """Both runs look for a free folder before either has written anything, as commands of the same second do."""
    options = {"accelerator": "cpu", "devices": 2, "plugins": [PoolEnvironment()], "default_root_dir": root}
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainers = [
        MegalightTrainer(
            strategy=MegatronStrategy(), logger="json,csv", max_steps=steps, val_check_interval=1, **options, **quiet
        )
        for steps in (1, 2)
    ]
    for trainer in trainers:
        trainer.fit(Tiny())
    return [(*(logger.version for logger in trainer.loggers), trainer.log_dir) for trainer in trainers]


def test_runs_that_start_at_once_take_a_folder_each(tmp_path):
    folders = [tmp_path / "lightning_logs" / f"version_{number}" for number in (0, 1)]
    # Ranks that did not choose the number know it, too.
    assert run(_two_at_once, 2, str(tmp_path)) == [[(0, 0, str(folders[0])), (1, 1, str(folders[1]))]] * 2
    assert [len((folder / "metrics.jsonl").read_text().splitlines()) for folder in folders] == [1, 2]


def test_runs_with_a_foreign_logger_have_folders_of_their_own(tmp_path):
    from tests.callbacks.test_throughput import Rows

    class Saving(Rows):
        save_dir = str(tmp_path)
        name = "project"

        def __init__(self, version):
            super().__init__()
            self.version = version

    for version in ("a", "b"):
        trainer = MegalightTrainer(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            logger=Saving(version),
            callbacks=[RunRecord()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(Tiny())
        assert trainer.log_dir == str(tmp_path / "project" / version)
    assert {path.parent.name for path in tmp_path.rglob("run.yaml")} == {"a", "b"}
