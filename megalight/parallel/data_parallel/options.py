"""Options of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import nn

from megalight.errors import ConfigurationError, nearest
from megalight.parallel.data_parallel.communication import Registration, Transport
from megalight.parallel.data_parallel.layout import level_of

Level = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
MasterDtype = Literal["float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class AdvancedDataParallelOptions:
    """How the engine moves bytes; the defaults suit nearly every run.

    Attributes:
        edge_bucket_size: ``bucket_size`` of the parameters that the model registers first. They are reduced last and
            gathered first, with little or no computation to hide the communication. None: ``bucket_size``.
        max_ctas: largest number of SMs that reductions and gathers may occupy beside computation, on process groups of
            their own. None: NCCL's own choice. Other backends refuse a number.
        replicate_optimizer: whether each of the ``replicate`` groups has all masters and optimizer state. False: the
            groups shard them, too. Then the optimizer takes the memory of sharding over all replicas; parameters are
            still gathered inside a group, and updated ones also over the groups, once per step.
        gathers: how parameters are gathered: ``plain``: collectives. ``symmetric``: the GPUs of one host write into
            each other's memory with their copy engines, which use no SM. ``auto``: ``symmetric`` where the GPUs reach
            each other's memory and ``nccl_ub`` is off, else ``plain``; the log says why. With ``optim_grads_params``,
            collectives gather what lies outside of units.
        reductions: how gradients are reduce-scattered: ``plain``: collectives. ``symmetric``: copy engines carry the
            terms between the GPUs of one host in ``reduce_dtype``, and the owner of a shard sums them in float32, in
            the order of ranks. ``auto``: ``symmetric`` for gradients of units where the GPUs reach each other's memory,
            else ``plain``.
        nccl_ub: whether the flat buffers are NCCL user buffers, which it sends without copies of its own: ``off``;
            ``local``, each rank registers its own; ``symmetric``, as windows that all ranks reach. NVLink multicast
            stays as ``NCCL_NVLS_ENABLE`` of the environment says.
    """

    edge_bucket_size: int | None = None
    max_ctas: int | None = None
    replicate_optimizer: bool = True
    gathers: Transport = "auto"
    reductions: Transport = "plain"
    nccl_ub: Registration = "off"

    def __post_init__(self) -> None:
        for name, choices in (("gathers", Transport), ("reductions", Transport), ("nccl_ub", Registration)):
            _check_choice(f"advanced.{name}", getattr(self, name), get_args(choices))
        for name in ("edge_bucket_size", "max_ctas"):
            _check_at_least(f"advanced.{name}", getattr(self, name), 1)
        for name in ("gathers", "reductions"):
            if getattr(self, name) == "symmetric" and self.nccl_ub != "off":
                raise ConfigurationError(
                    f"data_parallel.advanced.{name}='symmetric' with nccl_ub={self.nccl_ub!r}: buffers are either in "
                    "memory of NCCL or in that of copy engines. Leave one of the two out."
                )


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """How data-parallel replicas share work and memory.

    Attributes:
        level: ``no_shard``: every replica holds everything, and gradients are all-reduced. ``optim``: optimizer state
            and masters are sharded over the replicas, gradients are reduce-scattered, parameters all-gathered (ZeRO-1).
            ``optim_grads``: gradients of units are sharded, too (ZeRO-2). ``optim_grads_params``: and their parameters
            (ZeRO-3, FSDP). Both work with all schedules of a pipeline but ``combined``.
        units: classes of the modules that are sharded and gathered as a whole, or their names. Empty: the layers, found
            automatically, and the ``embed`` and ``head`` of a model with ``layers``. Everything outside of units stays
            whole on every rank.
        gradient_dtype: dtype of the gradient buffers: ``float32`` or ``bfloat16``. None: float32, or float64 if the
            weights are float64.
        master_dtype: dtype of the main weights that the optimizer updates. ``bfloat16``: bfloat16 weights are their own
            masters, which saves 4 bytes per weight over the ranks of a shard. Each update is rounded to the nearest
            bfloat16 (there is no stochastic rounding), so updates of less than half a unit in the last place, 1/512 of
            the weight, are lost. Weights of other dtypes keep their own masters. None: float32 for half precision, else
            the weights themselves.
        reduce_dtype: dtype of gradients during the reduction. None: that of the buffers.
        reduce_scatter_with_fp32_accumulation: exchange gradients in the dtype of the reduction, and sum them in
            float32. So bfloat16 gradients take half the bytes, and their sums lose no precision.
        bucket_size: elements of one reduction. None: chosen from the number of replicas.
        replicate: number of groups of neighboring replicas. Each group holds all shards (hybrid sharding), so that
            gathers stay inside it, inside a host for example.
        prefetch: number of units that are gathered ahead of the one that computes, each into a buffer of its own. 0: no
            gather is hidden, and one buffer is enough. None: 1, or more if little of the free memory is needed for it.
        reduce_each_micro_batch: with sharded parameters, whether each micro-batch reduces gradients of units, so that
            only shards of them stay. False: whole gradients stay until the last micro-batch of a step reduces them,
            which takes memory for all of them and saves messages. None: False if they need little of the free memory.
        optimizer_offload_fraction: share of masters and optimizer state that is kept and updated in host memory, in
            whole buckets: 0 none, 1 all. Copies to and from the device run beside the updates.
        check_for_nan: before each update, check that all gradients are finite. If not, all ranks stop with the same
            error, which names parameters. It takes a pass over the gradients, and the host waits for the device.
        find_unused_parameters: whether parameters that no gradient reaches in a step, on no rank, are left as they are,
            as in torch: no decay, no momentum, and the step is not counted for them. It takes one small message per
            step, and ranks that lack a gradient wait for it. False: only frozen ones are; the gradient of others is
            zero, and a warning names one. None: False for a ``MegalightModule``, else True.
        overlap_grad_reduce: reduce buckets while the backward pass still runs.
        overlap_param_gather: gather parameters while the next forward pass already runs.
        advanced: how the engine moves bytes.
    """

    level: Level = "optim"
    units: tuple[str | type[nn.Module], ...] = ()
    gradient_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    master_dtype: MasterDtype | None = None
    reduce_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    bucket_size: int | None = None
    replicate: int = 1
    prefetch: int | None = None
    reduce_each_micro_batch: bool | None = None
    optimizer_offload_fraction: float = 0.0
    check_for_nan: bool = False
    find_unused_parameters: bool | None = None
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    advanced: AdvancedDataParallelOptions = field(default_factory=AdvancedDataParallelOptions)

    def __post_init__(self) -> None:
        level_of(self.level)
        if self.master_dtype is not None:
            _check_choice("master_dtype", self.master_dtype, get_args(MasterDtype))
        advanced = self.advanced
        # Such messages travel from memory that is made for each of them, so registered gradients would do nothing.
        if advanced.nccl_ub != "off" and (self.reduce_dtype or self.reduce_scatter_with_fp32_accumulation):
            other = "reduce_dtype" if self.reduce_dtype else "reduce_scatter_with_fp32_accumulation"
            raise ConfigurationError(
                f"data_parallel.advanced.nccl_ub={advanced.nccl_ub!r} with {other}={getattr(self, other)!r}, which "
                "sends gradients from memory of its own; leave one of the two out, or set gradient_dtype instead."
            )
        if self.reduce_scatter_with_fp32_accumulation and self.level == "no_shard":
            raise ConfigurationError(
                "data_parallel.reduce_scatter_with_fp32_accumulation=True needs gradients that are reduce-scattered, "
                "and level 'no_shard' all-reduces them; use level 'optim', or reduce_dtype='float32'."
            )
        for name in ("gathers", "reductions"):
            if getattr(advanced, name) == "symmetric" and self.level == "no_shard":
                raise ConfigurationError(
                    f"data_parallel.advanced.{name}='symmetric' with level 'no_shard', which shards nothing: gradients "
                    "are all-reduced and no parameter is gathered; use level 'optim', or leave it out."
                )
        if self.replicate > 1 and self.level == "no_shard":
            raise ConfigurationError(
                f"data_parallel.replicate={self.replicate} makes groups of ranks that share shards, and level "
                "'no_shard' has none; leave it at 1, or use another level."
            )
        for name, least in (("replicate", 1), ("bucket_size", 1), ("prefetch", 0)):
            _check_at_least(name, getattr(self, name), least)
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise ConfigurationError(
                f"data_parallel.optimizer_offload_fraction={self.optimizer_offload_fraction}; it must be between 0 "
                "(nothing) and 1 (all masters and optimizer state)."
            )

    @property
    def has_units(self) -> bool:
        """Whether gradients or parameters are sharded unit by unit."""
        return level_of(self.level).gradients

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters of units are sharded, too."""
        return level_of(self.level).parameters

    @property
    def divides_optimizer(self) -> bool:
        """Whether groups of replicas divide masters and optimizer state."""
        return level_of(self.level).state and self.replicate > 1 and not self.advanced.replicate_optimizer

    @property
    def may_quantize(self) -> bool:
        """Whether weights may be stored quantized: casts of masters on the device that hold at least as much."""
        narrow = self.master_dtype is not None and DTYPES[self.master_dtype].itemsize < 4
        return not (self.divides_optimizer or self.optimizer_offload_fraction or narrow)

    def finding_unused(self, usual: bool) -> DataParallelOptions:
        """Return these options with ``usual`` for ``find_unused_parameters`` if it is None."""
        return replace(self, find_unused_parameters=usual) if self.find_unused_parameters is None else self

    def check(self, schedule: str) -> None:
        """Refuse levels that a schedule cannot have, and options without what they act on.

        Args:
            schedule: name of the schedule of the pipeline.

        Raises:
            ConfigurationError: passes of several micro-batches would use the same unit at once; or an option has
                nothing to act on.
        """
        for name in ("prefetch", "reduce_each_micro_batch"):
            # Not earlier: strategies and functions that shard parameters set the level after the user's options.
            if getattr(self, name) is not None and not self.shards_parameters:
                raise ConfigurationError(
                    f"data_parallel.{name}={getattr(self, name)} with level {self.level!r}, which shards no "
                    "parameters; leave it out, or use level 'optim_grads_params'."
                )
        if not self.advanced.replicate_optimizer and self.replicate == 1:
            raise ConfigurationError(
                "data_parallel.advanced.replicate_optimizer=False with replicate=1: there are no groups of replicas "
                "that could divide the optimizer. Leave it out, or set replicate (device_mesh of MegatronFSDPStrategy)."
            )
        if self.has_units and schedule == "combined":
            raise ConfigurationError(
                f"data_parallel.level={self.level!r} with pipeline.schedule='combined': a forward and a backward would "
                "gather and free the same unit. Use level 'optim', or another schedule."
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"data_parallel.{name}={value!r}; it must be one of {', '.join(choices)}." + nearest(str(value), choices)
        )


def _check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"data_parallel.{name}={value}; it must be at least {least}.")
