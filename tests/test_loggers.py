import json

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from megalight.callbacks import RunRecord
from megalight.cli.trainer import MegalightTrainer, named_loggers
from megalight.errors import ConfigurationError
from megalight.loggers import JSONLogger
from tests.callbacks.tiny import Tiny


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
    with pytest.raises(ConfigurationError, match=r"'jsn' is not a known logger\. Did you mean 'json'\?"):
        named_loggers("csv,jsn", str(tmp_path))


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
