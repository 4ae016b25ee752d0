"""The data-parallel engine: buckets, reductions, gathers."""

from megalight.parallel.data_parallel.buffers import FlatShard
from megalight.parallel.data_parallel.engine import DataParallelEngine
from megalight.parallel.data_parallel.grad_norm import clip_coefficient
from megalight.parallel.data_parallel.layout import ParamInfo
from megalight.parallel.data_parallel.options import AdvancedDataParallelOptions, DataParallelOptions

__all__ = [
    "AdvancedDataParallelOptions",
    "DataParallelEngine",
    "DataParallelOptions",
    "FlatShard",
    "ParamInfo",
    "clip_coefficient",
]
