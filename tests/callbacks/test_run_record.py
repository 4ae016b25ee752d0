import yaml
from lightning.pytorch.loggers import CSVLogger

from megalight import __version__
from megalight.callbacks import RunRecord
from megalight.callbacks.run_record import cpu_name, describe
from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.support.environment import trainer
from tests.support.workers import run


def test_the_record_lies_beside_the_logs(tmp_path):
    tiny_trainer(callbacks=[RunRecord()], logger=CSVLogger(tmp_path)).fit(Tiny())
    record = yaml.safe_load((tmp_path / "lightning_logs/version_0/run.yaml").read_text())
    assert record["versions"]["megalight"] == __version__
    assert record["device"] == f"cpu: {cpu_name()}"
    assert record["precision"] == "32-true"


def test_a_development_run_leaves_nothing(tmp_path):
    tiny_trainer(callbacks=[RunRecord()], default_root_dir=tmp_path, fast_dev_run=True).fit(Tiny())
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_record_stays(tmp_path, caplog):
    """Without a logger, the folder is where recipes may lie."""
    recipe = tmp_path / "run.yaml"
    recipe.write_text("trainer: {max_steps: 1}\n")

    def fit():
        tiny_trainer(callbacks=[RunRecord()], default_root_dir=tmp_path, logger=False).fit(Tiny())
        return recipe.read_text()

    assert fit() == "trainer: {max_steps: 1}\n"
    assert "run.yaml is no record of a run" in caplog.text
    recipe.unlink()
    recipe.write_text(fit().replace("strategy:", "strategy: other #"))
    assert "other" not in fit()  # a record is renewed


def test_the_layout_is_that_of_the_mesh():
    assert run(_layout, 2) == ["2 ranks: tp2", "2 ranks: tp2"]


def _layout():
    runner = trainer(MegatronStrategy(tensor_parallel=2))
    runner.strategy.setup_environment()
    return describe(runner)["layout"]
