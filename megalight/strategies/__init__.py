"""Lightning strategies."""

from lightning.pytorch.strategies import StrategyRegistry

from megalight.strategies.megatron import MegatronStrategy as MegatronStrategy
from megalight.strategies.options import DataParallel as DataParallel

MegatronStrategy.register_strategies(StrategyRegistry)
