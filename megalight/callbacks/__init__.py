"""Lightning callbacks, one job each. They ask the strategy for what they need and say so where it is lacking."""

from megalight.callbacks.ema import EMA
from megalight.callbacks.preemption import Preemption
from megalight.callbacks.progress import StepProgress
from megalight.callbacks.run_record import RunRecord
from megalight.callbacks.throughput import Throughput

__all__ = ["EMA", "Preemption", "RunRecord", "StepProgress", "Throughput"]
