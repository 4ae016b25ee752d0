"""Initial values that depend only on the seed and the canonical name, so that any part of a tensor can be drawn alone.

A tensor is drawn in tiles of fixed size, each from its own generator. To get a box of the tensor, only the tiles that
overlap with it are drawn. A tensor with more than two dims is drawn as a matrix: dim 0 gives the rows, the other
dims are flattened. Values are float32, drawn on the given device. On one device type they are bit-equal in any layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from megalight.nn.canonical import joined, parts

TILE = 1024
"""Rows and columns of a tile. Do not change it: the initial values of every model depend on it."""


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0 and standard deviation ``std``."""

    std: float

    def tile(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw a tile in float32, on the generator's device."""
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)
        return values.mul_(self.std)


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution between ``low`` and ``high``, then an element-wise ``function`` of it (None: none)."""

    low: float
    high: float
    function: Callable[[Tensor], Tensor] | None = None

    def tile(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw a tile in float32, on the generator's device."""
        values = torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device)
        values = values.mul_(self.high - self.low).add_(self.low)
        # on the whole tile, so that a part of it gets the same bits
        return values if self.function is None else self.function(values)


@dataclass(frozen=True)
class ConstantInit:
    """The same value everywhere (1 for norm weights, 0 for biases)."""

    value: float


Initializer: TypeAlias = Normal | Uniform | ConstantInit


def key(seed: int, name: str, *more: int) -> int:
    """Hash a run's seed, a canonical name and integers to a 63-bit generator seed."""
    text = ":".join([str(seed), name, *map(str, more)])
    # Python's own hash of strings differs from process to process. Shifted by one, as seeds must fit a signed 64-bit
    # integer.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def draw(
    initializer: Initializer,
    name: str,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    size: tuple[int, ...],
    seed: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw the box ``offset, size`` of the canonical tensor ``name``, which has global ``shape``, in float32."""
    if isinstance(initializer, ConstantInit):
        return torch.full(size, initializer.value, dtype=torch.float32, device=device)
    # A tensor with one dim is a column, so that a part of it is a part of the rows.
    rows, columns = (shape[0] if shape else 1), prod(shape[1:])
    row, height = (offset[0], size[0]) if shape else (0, 1)
    out = torch.empty(height, prod(size[1:]), dtype=torch.float32, device=device)
    # On the target device, so that no tensor is copied there.
    generator = torch.Generator(device=device)
    # Tiles start at multiples of the tile size in the whole tensor, never at the box.
    for top in range(row // TILE * TILE, row + height, TILE):
        for left, inside, place in _columns(shape[1:], offset[1:], size[1:]):
            # A seed per tile, so that a tile can be drawn without the tiles before it.
            generator.manual_seed(key(seed, name, top, left))
            # the whole tile is drawn, also for a small box: values depend on their place in the generator's sequence
            extent = min(TILE, rows - top), min(TILE, columns - left)
            tile = initializer.tile(extent, generator)
            first, last = max(top, row), min(top + extent[0], row + height)
            out[first - row : last - row, place] = tile[first - top : last - top][:, inside]
    return out.view(size)


def _columns(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> Iterator[tuple[int, slice | Tensor, slice]]:
    """Yield the columns that a box takes from each tile, for rows that are flattened.

    Args:
        shape: shape of one row of the tensor.
        offset, size: the box within a row.

    Yields:
        the tile's first column; the box's columns within the tile; their place in a flattened row of the box.
    """
    if not shape:
        yield 0, slice(0, 1), slice(0, 1)
        return
    # all of the box lies between these two columns; dims after the first may leave out columns in between
    step = prod(shape[1:])
    begin, end = offset[0] * step, (offset[0] + size[0]) * step
    position = 0
    for left in range(begin // TILE * TILE, end, TILE):
        places = torch.unravel_index(torch.arange(left, min(left + TILE, prod(shape))), shape)
        # A place is held if each of its coordinates lies in the box.
        held = [(o <= place) & (place < o + s) for place, o, s in zip(places, offset, size, strict=True)]
        inside = torch.stack(held).all(0).nonzero().flatten()
        if count := len(inside):
            first, last = int(inside[0]), int(inside[-1]) + 1
            # A slice copies faster than an index, and nearly every box is contiguous.
            yield left, slice(first, last) if last - first == count else inside, slice(position, position + count)
            position += count


def initializers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Initializer]]:
    """Yield every parameter with an initializer: full name, module, name in the module, initializer.

    A module lists them in an attribute ``initializers: dict[str, Initializer]``, by the parameter's name in the module.
    """
    for path, module in model.named_modules():
        for name, initializer in getattr(module, "initializers", {}).items():
            if module._parameters.get(name) is not None:
                yield joined(path, name), module, name, initializer


@torch.no_grad()
def initialize(model: nn.Module, seed: int, prefix: str = "") -> None:
    """Draw every parameter with an initializer in a whole single-device model.

    Args:
        model: the model, on a real device.
        seed: the run's seed.
        prefix: added before each canonical name. With the name of this model inside a larger one, it gets the same
            values as there.
    """
    states = {name: (module, local, initializer) for name, module, local, initializer in initializers(model)}
    # By canonical part: sections of a fused weight have the values that separate layers would have.
    for part in parts(model):
        if part.parameter in states:
            module, local, initializer = states[part.parameter]
            parameter = module._parameters[local]
            assert parameter is not None
            whole = (0,) * len(part.shape)
            values = draw(initializer, prefix + part.name, part.shape, whole, part.shape, seed, parameter.device)
            parameter.view(-1)[part.start : part.start + prod(part.shape)].view(part.shape).copy_(values)
