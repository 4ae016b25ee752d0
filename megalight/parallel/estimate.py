"""What data parallelism will keep on each device, from a model without values: before a machine is there to try it on.

The numbers are those that :meth:`.data_parallel.DataParallelEngine.memory` counts later, and the optimizer's state.
Activations come on top.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.data_parallel.layout import level_of
from megalight.parallel.data_parallel.memory import GRADIENT_TURNS
from megalight.parallel.data_parallel.options import DTYPES
from megalight.parallel.units import owned_alone, units_of

ADAM = 8.0
"""Bytes per element of Adam's two moments in float32."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device of each rank, and in its host memory.

    Attributes:
        parameters: shards of units, buffers for whole units, and what is outside of units.
        gradients: likewise.
        masters: those that are copies of the parameters.
        moments: the optimizer's state.
        host: masters, moments, and gradients and parameters on their way.
    """

    parameters: float
    gradients: float
    masters: float
    moments: float
    host: float = 0.0

    @property
    def device(self) -> float:
        """All bytes on the device, without activations."""
        return self.parameters + self.gradients + self.masters + self.moments


def estimate(
    model: nn.Module,
    ranks: int,
    options: DataParallel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    moments: float = ADAM,
) -> Estimate:
    """Estimate the memory of a model's weights, gradients and optimizer over data-parallel ranks.

    Where the engine would choose by free memory, this takes what needs least: ``prefetch=1``, and gradients that each
    micro-batch reduces. Padding is left out: a few hundred elements per bucket.

    Args:
        model: on any device, ``meta`` for one that is too large; on each rank, as a split has left it.
        ranks: data-parallel ranks.
        options: of data parallelism.
        dtype: of the parameters that the model computes with.
        moments: bytes of optimizer state per element; Adam with moments in 16 bits has 4.

    Raises:
        ConfigurationError: ``ranks`` is not a multiple of ``options.replicate``.
    """
    if ranks % options.replicate:
        raise ConfigurationError(f"{ranks} ranks are no multiple of data_parallel.replicate={options.replicate}.")
    level = level_of(options.level)
    units = units_of(model, options.units) if options.has_units else []
    numbers = owned_alone(model, units)
    shards = ranks // options.replicate
    holders = 1 if options.level == "no_shard" else shards if options.replicate_optimizer else ranks
    wanted = DTYPES.get(options.master_dtype or "")
    buffered = DTYPES.get(options.gradient_dtype or "") or torch.promote_types(dtype, torch.float32)
    gradient = buffered.itemsize
    # Shards of units sum over ranks and micro-batches, in the wider dtype of buffer and message.
    summed = torch.promote_types(buffered, DTYPES.get(options.reduce_dtype or "", buffered))
    if options.reduce_scatter_with_fp32_accumulation:
        summed = torch.promote_types(summed, torch.float32)
    # Masters in the parameters' own dtype lie in the parameters' memory.
    master = 0 if dtype.itemsize >= 4 or wanted == dtype else (wanted or torch.float32).itemsize

    # By whether they are trained: elements of each unit, and those outside of units.
    units_of_kind: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    outside = {True: 0, False: 0}
    for parameter in {id(p): p for p in model.parameters()}.values():
        number = numbers.get(id(parameter))
        if number is None:
            outside[parameter.requires_grad] += parameter.numel()
        else:
            units_of_kind[parameter.requires_grad][number] += parameter.numel()
    inside = {kind: sum(sizes.values()) for kind, sizes in units_of_kind.items()}
    largest = {kind: max(sizes.values(), default=0) for kind, sizes in units_of_kind.items()}
    turns = (1 if options.prefetch is None else options.prefetch) + 1
    # One rank has all there is, so nothing is gathered.
    if level.parameters and shards > 1:
        flat = sum(inside.values()) / shards + turns * sum(largest.values()) + sum(outside.values())
    else:
        flat = float(sum(inside.values()) + sum(outside.values()))
    trained = inside[True] + outside[True]
    if level.gradients and shards > 1 and options.reduce_each_micro_batch is not False:
        gradients = summed.itemsize * inside[True] / holders + gradient * (
            GRADIENT_TURNS * largest[True] + outside[True]
        )
    else:
        gradients = gradient * float(trained)
    learnt = trained / holders
    away = options.optimizer_offload_fraction
    return Estimate(
        dtype.itemsize * flat,
        gradients,
        master * learnt * (1 - away),
        moments * learnt * (1 - away),
        # A master that lies in host memory is a copy, also in the dtype of the parameters.
        away * learnt * ((master or dtype.itemsize) + moments + gradient + (dtype.itemsize if master else 0)),
    )
