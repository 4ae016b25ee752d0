"""What a script takes from a trainer, a strategy and a model has a type that editors know."""

from typing import assert_type

import lightning.pytorch as pl
from torch import Tensor

from megalight import Training
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.parallel.mesh import ParallelMesh
from megalight.strategies import DataParallelOptions, MegatronFSDPStrategy, MegatronStrategy, load_weights
from megalight.strategies.step import StepReport


class Watch(pl.Callback):
    """Reads the report of the last step."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = MegatronStrategy.of(trainer)
        assert_type(strategy, MegatronStrategy)
        assert_type(strategy.mesh, ParallelMesh)
        assert_type(strategy.report, StepReport | None)
        if strategy.report is not None:
            assert_type(strategy.report.loss, Tensor)


def build() -> pl.Trainer:
    """Make a trainer and a module."""
    config = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=64, max_sequence_length=16)
    module = GPTModule(config)
    assert_type(module.config.num_layers, int)
    assert_type(GPT(config), GPT)
    strategy = MegatronStrategy(tensor_parallel=2, micro_batch_size=4, data_parallel=DataParallelOptions(level="optim"))
    trainer = pl.Trainer(strategy=strategy, callbacks=[Watch()])
    assert_type(MegatronFSDPStrategy.of(trainer), MegatronFSDPStrategy)
    return trainer


__all__ = ["Training", "Watch", "build", "load_weights"]
