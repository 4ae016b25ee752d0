"""The data-parallel engine: buckets, reductions, gathers."""

from megalight.parallel.data_parallel.engine import DataParallelEngine
from megalight.parallel.data_parallel.flat_shard import FlatShard
from megalight.parallel.data_parallel.norm import clip_coefficient
from megalight.parallel.data_parallel.options import DataParallel
from megalight.parallel.data_parallel.param_info import ParamInfo

__all__ = ["DataParallel", "DataParallelEngine", "FlatShard", "ParamInfo", "clip_coefficient"]
