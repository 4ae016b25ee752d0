"""Precision plugins for Lightning."""

from megalight.parallel.precision import LowPrecisionOptions as LowPrecisionOptions
from megalight.plugins.precision.low_precision import MegatronLowPrecision as MegatronLowPrecision
from megalight.plugins.precision.megatron import MegatronPrecision as MegatronPrecision
