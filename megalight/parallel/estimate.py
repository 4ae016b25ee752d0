"""What data parallelism will keep on each device, from a model without values: before a machine is there to try it on.

The numbers are those that :meth:`.data_parallel.DataParallelEngine.memory` counts later, and the optimizer's state.
Activations come on top.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.parameter import storage_format_of
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.data_parallel.layout import level_of
from megalight.parallel.data_parallel.options import DTYPES
from megalight.parallel.data_parallel.unit_memory import GRADIENT_BUFFERS, PassOrder
from megalight.parallel.run_engine import Unit, owned_alone, units_of

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
        parameter_buffers: the part of the parameters that are buffers for whole units.
        gradient_buffers: likewise, of the gradients.
        casts: what GEMMs in 8 bits keep of weights during a step: transposes of weights that are quantized, and both
            casts of weights in a dtype of their own.
    """

    parameters: float
    gradients: float
    masters: float
    moments: float
    host: float = 0.0
    parameter_buffers: float = 0.0
    gradient_buffers: float = 0.0
    casts: float = 0.0

    @property
    def device(self) -> float:
        """All bytes on the device, without activations."""
        return self.parameters + self.gradients + self.masters + self.moments + self.casts


class _Kind(NamedTuple):
    """What is the same for parameters that lie in memory together."""

    trained: bool
    quantized: bool
    casts: bool


class _Bytes(NamedTuple):
    """Bytes of one element: of a gradient, of a shard that sums gradients, and of a master that is a copy."""

    gradient: int
    summed: int
    master: int


def estimate(
    model: nn.Module,
    ranks: int,
    options: DataParallelOptions,
    *,
    dtype: torch.dtype = torch.bfloat16,
    moments: float = ADAM,
) -> Estimate:
    """Estimate the memory of a model's weights, gradients and optimizer over data-parallel ranks.

    Where the engine would choose by free memory, this takes what needs least: ``prefetch=1``, and gradients that each
    micro-batch reduces. Padding is left out: a few hundred elements per bucket. So are scales of 8-bit weights.

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
    shards = ranks // options.replicate
    holders = 1 if options.level == "no_shard" else shards if options.advanced.replicate_optimizer else ranks
    bytes_of = _bytes_of(options, dtype)
    inside, outside = _elements(model, units, options.may_quantize, dtype.itemsize < 4 or (level.state and shards > 1))

    turns = PassOrder().turns(units, (1 if options.prefetch is None else options.prefetch) + 1)
    gradient_turns = PassOrder().turns(units, GRADIENT_BUFFERS, backward_only=True)
    by_turns = level.parameters and shards > 1  # one rank has all there is, so nothing is gathered
    reduced = level.gradients and shards > 1 and options.reduce_each_micro_batch is not False
    away = options.optimizer_offload_fraction
    parameters = gradients = masters = learned = casts = parameter_buffers = gradient_buffers = 0.0
    for kind in {*inside, *outside}:
        divided, whole = sum(inside[kind].values()), outside[kind]
        size = 1 if kind.quantized else dtype.itemsize
        # Elements that a rank has as whole weights.
        shown = (_largest_of_turns(inside[kind], turns) if by_turns else divided) + whole
        parameters += size * (shown + (divided / shards if by_turns else 0))
        parameter_buffers += size * (shown - whole) if by_turns else 0
        casts += (1 if kind.quantized else 2) * kind.casts * shown
        if not kind.trained:
            continue
        if reduced:
            buffers = bytes_of.gradient * _largest_of_turns(inside[kind], gradient_turns)
            gradients += bytes_of.summed * divided / holders + buffers + bytes_of.gradient * whole
            gradient_buffers += buffers
        else:
            gradients += bytes_of.gradient * (divided + whole)
        learned += (divided + whole) / holders
        masters += (max(dtype.itemsize, 4) if kind.quantized else bytes_of.master) * (divided + whole) / holders
    # A master that lies in host memory is a copy, also in the dtype of the parameters.
    copied = bytes_of.master or dtype.itemsize
    moved = dtype.itemsize if bytes_of.master else 0
    return Estimate(
        parameters,
        gradients,
        masters * (1 - away),
        moments * learned * (1 - away),
        away * learned * (copied + moments + bytes_of.gradient + moved),
        parameter_buffers,
        gradient_buffers,
        casts,
    )


def _bytes_of(options: DataParallelOptions, dtype: torch.dtype) -> _Bytes:
    """Return the sizes of one element, by the dtypes that the options choose for parameters of ``dtype``."""
    wanted = DTYPES.get(options.master_dtype or "")
    gradient = DTYPES.get(options.gradient_dtype or "") or torch.promote_types(dtype, torch.float32)
    # Shards of units sum over ranks and micro-batches, in the wider dtype of buffer and message.
    summed = torch.promote_types(gradient, DTYPES.get(options.reduce_dtype or "", gradient))
    if options.reduce_scatter_with_fp32_accumulation:
        summed = torch.promote_types(summed, torch.float32)
    # Masters in the parameters' own dtype lie in the parameters' memory.
    master = 0 if dtype.itemsize >= 4 or wanted == dtype else (wanted or torch.float32).itemsize
    return _Bytes(gradient.itemsize, summed.itemsize, master)


def _elements(
    model: nn.Module, units: Sequence[Unit], may_be_quantized: bool, spared: bool
) -> tuple[defaultdict[_Kind, Counter[int]], Counter[_Kind]]:
    """Count the elements of a model, tied ones once.

    Args:
        units: of the model.
        may_be_quantized: whether trained parameters may be kept quantized at all.
        spared: as :func:`megalight.ops.parameter.storage_format_of` takes it.

    Returns:
        for each kind, number of each unit -> elements of the parameters that it alone owns; for each kind, elements of
        all other parameters.
    """
    numbers = owned_alone(model, units)
    inside: defaultdict[_Kind, Counter[int]] = defaultdict(Counter)
    outside: Counter[_Kind] = Counter()
    for parameter in model.parameters():
        trained, cast = parameter.requires_grad, precision_of(parameter) is not None
        quantized = trained and may_be_quantized and storage_format_of(parameter, spared) is not None
        kind, number = _Kind(trained, quantized, cast), numbers.get(id(parameter))
        if number is None:
            outside[kind] += parameter.numel()
        else:
            inside[kind][number] += parameter.numel()
    return inside, outside


def _largest_of_turns(sizes: Mapping[int, int], turns: Sequence[int]) -> int:
    """Return the elements of buffers, one for each turn, that hold the largest unit of that turn.

    Args:
        sizes: number of each unit -> its elements.
        turns: the turn of each unit.
    """
    found: dict[int, int] = {}
    for number, size in sizes.items():
        found[turns[number]] = max(size, found.get(turns[number], 0))
    return sum(found.values())
