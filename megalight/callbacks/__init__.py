"""Lightning callbacks, each with one job. A callback that needs something a strategy lacks raises a clear error."""

from megalight.callbacks.adapters import Adapters
from megalight.callbacks.cuda_graph import CUDAGraph
from megalight.callbacks.distillation import Distillation
from megalight.callbacks.ema import EMA
from megalight.callbacks.evaluation import Evaluation
from megalight.callbacks.memory import ActivationOffload, GarbageCollection
from megalight.callbacks.modelopt import AutoQuantize, ModelOptQuantization
from megalight.callbacks.ops import FusedOps, UseBackends
from megalight.callbacks.profiling import NVTX, ProfilerWindow
from megalight.callbacks.progress import ExpertLoads, OptimizerMonitor, StepProgress
from megalight.callbacks.retention import Retention
from megalight.callbacks.run_record import RunRecord, WholeModelSummary
from megalight.callbacks.stopping import FinalCheckpoint, Preemption
from megalight.callbacks.throughput import Throughput
from megalight.callbacks.transformers_export import TransformersExport

__all__ = [
    "EMA",
    "NVTX",
    "ActivationOffload",
    "Adapters",
    "AutoQuantize",
    "CUDAGraph",
    "Distillation",
    "Evaluation",
    "ExpertLoads",
    "FinalCheckpoint",
    "FusedOps",
    "GarbageCollection",
    "ModelOptQuantization",
    "OptimizerMonitor",
    "Preemption",
    "ProfilerWindow",
    "Retention",
    "RunRecord",
    "StepProgress",
    "Throughput",
    "TransformersExport",
    "UseBackends",
    "WholeModelSummary",
]
