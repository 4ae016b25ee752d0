"""Optimizers, parameter groups, schedules."""

from megalight.optim.adam import Adam
from megalight.optim.config import AdamConfig
from megalight.optim.groups import GroupRule, parameter_groups
from megalight.optim.muon import Muon, MuonConfig
from megalight.optim.schedules import WSD, Constant, CosineDecay, InverseSqrtDecay, LinearDecay, LRSchedule
from megalight.optim.shampoo import Shampoo, ShampooConfig
from megalight.optim.sharded import offload_to_cpu, restore_from_cpu, shard_optimizer
from megalight.optim.whole_matrices import WholeMatrixOptimizer
from megalight.optim.whole_matrix_config import WholeMatrixConfig

__all__ = [
    "WSD",
    "Adam",
    "AdamConfig",
    "Constant",
    "CosineDecay",
    "GroupRule",
    "InverseSqrtDecay",
    "LRSchedule",
    "LinearDecay",
    "Muon",
    "MuonConfig",
    "Shampoo",
    "ShampooConfig",
    "WholeMatrixConfig",
    "WholeMatrixOptimizer",
    "offload_to_cpu",
    "parameter_groups",
    "restore_from_cpu",
    "shard_optimizer",
]
