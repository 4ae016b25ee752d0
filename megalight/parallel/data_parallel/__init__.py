"""The data-parallel engine: buckets, reductions, gathers."""

from megalight.parallel.data_parallel.buffers import FlatShard, ParamInfo
from megalight.parallel.data_parallel.engine import DataParallelEngine
from megalight.parallel.data_parallel.norm import clip_coefficient
from megalight.parallel.data_parallel.options import DataParallel

__all__ = ["DataParallel", "DataParallelEngine", "FlatShard", "ParamInfo", "clip_coefficient"]
