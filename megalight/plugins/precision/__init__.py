"""Precision plugins for Lightning."""

from megalight.plugins.precision.megatron import MegatronPrecision as MegatronPrecision
