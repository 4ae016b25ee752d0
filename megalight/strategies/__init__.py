"""Lightning strategies."""

from lightning.pytorch.strategies import StrategyRegistry

from megalight.strategies.megatron import MegatronStrategy as MegatronStrategy
from megalight.strategies.options import DataParallel as DataParallel
from megalight.strategies.persistence import load_weights as load_weights

MegatronStrategy.register_strategies(StrategyRegistry)
