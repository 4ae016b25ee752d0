"""Lightning strategies."""

from lightning.pytorch.strategies import StrategyRegistry

from megalight.parallel.data_parallel import AdvancedDataParallelOptions as AdvancedDataParallelOptions
from megalight.parallel.data_parallel import DataParallelOptions as DataParallelOptions
from megalight.parallel.layout import Layout as Layout
from megalight.parallel.pipeline.schedules import PipelineOptions as PipelineOptions
from megalight.strategies._lightning import silence
from megalight.strategies.checkpoints import CheckpointOptions as CheckpointOptions
from megalight.strategies.checkpoints.resuming import load_weights as load_weights
from megalight.strategies.fsdp import MegatronFSDPStrategy as MegatronFSDPStrategy
from megalight.strategies.megatron import MegatronStrategy as MegatronStrategy
from megalight.strategies.towers import MegatronTowersStrategy as MegatronTowersStrategy

MegatronStrategy.register_strategies(StrategyRegistry)
MegatronFSDPStrategy.register_strategies(StrategyRegistry)
MegatronTowersStrategy.register_strategies(StrategyRegistry)
silence()
