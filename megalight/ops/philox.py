"""Random numbers that follow from a seed and a position, by a counter: Philox (https://doi.org/10.1145/2063384.2063405).

Nothing is kept from one draw to the next. So the numbers of a sequence do not depend on what else is drawn, a draw can
be repeated, and a step that draws can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.registry import Backend, BackendRegistry, choose

ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def reference_draws(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """See :func:`draws`."""
    groups = -(-size // 4)
    k0, k1 = (seeds & _MASK)[:, None], (seeds >> 32 & _MASK)[:, None]
    # 32-bit numbers in 64 bits, as torch has no products of unsigned ones
    c0 = torch.arange(groups, device=seeds.device).expand(len(seeds), -1)
    c1 = positions[:, None].long().expand(-1, groups)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        a, b = c0 * _FACTORS[0], c2 * _FACTORS[1]
        # The sign of a product is a bit as all others.
        c0, c2 = (b >> 32 & _MASK) ^ c1 ^ k0, (a >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = b & _MASK, a & _MASK
        k0, k1 = k0 + _STEPS[0] & _MASK, k1 + _STEPS[1] & _MASK
    return torch.cat([c0, c1, c2, c3], 1)[:, :size]


# In Triton: four numbers from each counter.

BLOCK = 1024
"""Counters of a program."""


@jit
def _draw(seeds: Value, positions: Value, out: Value, size: Value, groups: Value, BLOCK: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row)
    first = group.to(tl.uint32)
    second = (first * 0 + tl.load(positions + row)).to(tl.uint32)
    zero = first * 0
    a, b, c, d = tl.philox(seed, first, second, zero, zero, 10)
    target = out + row * size + group
    within = group < groups
    tl.store(target, a.to(tl.int64), mask=within & (group < size))
    tl.store(target + groups, b.to(tl.int64), mask=within & (group + groups < size))
    tl.store(target + 2 * groups, c.to(tl.int64), mask=within & (group + 2 * groups < size))
    tl.store(target + 3 * groups, d.to(tl.int64), mask=within & (group + 3 * groups < size))


def triton_draws(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """See :func:`draws`."""
    out = torch.empty(len(seeds), size, dtype=torch.int64, device=seeds.device)
    groups = cdiv(size, 4)
    _draw[(len(seeds), cdiv(groups, BLOCK))](seeds, positions, out, size, groups, BLOCK=BLOCK, num_warps=4)
    return out


class DrawsSpec(NamedTuple):
    """A request to random numbers: device type."""

    device: str


DRAWS: BackendRegistry[DrawsSpec, Callable[..., Tensor]] = BackendRegistry("draws")
REGISTRIES: tuple[BackendRegistry[DrawsSpec, Any], ...] = (DRAWS,)
EXAMPLE = DrawsSpec("cpu")


def _triton_why_not(spec: DrawsSpec) -> str | None:
    return triton_why_not(spec.device)


DRAWS.register(Backend("triton", triton_draws, 20, _triton_why_not))
DRAWS.register(Backend("reference", reference_draws, 0, serve_all))


def draws(seeds: Tensor, positions: Tensor, size: int, *, backend: str = "auto") -> Tensor:
    """Return random bits ``[N, size]``, int64 from 0 to ``2**32 - 1``. All backends give the same.

    Args:
        seeds: ``[N]`` int64, at least 0.
        positions: ``[N]`` integers from 0 to ``2**32 - 1``. Each of them has numbers of its own.
        size: how many numbers to draw for each row.
        backend: name of a backend.
    """
    return choose(DRAWS, DrawsSpec(seeds.device.type), backend)(seeds, positions, size)


def exponentials(seeds: Tensor, positions: Tensor, size: int, *, backend: str = "auto") -> Tensor:
    """Return draws ``[N, size]`` from the exponential distribution, float32; see :func:`draws`."""
    # The upper 23 bits and a half: exact in float32, above 0 and below 1.
    uniform = ((draws(seeds, positions, size, backend=backend) >> 9) + 0.5) * 2.0**-23
    return -uniform.log()
