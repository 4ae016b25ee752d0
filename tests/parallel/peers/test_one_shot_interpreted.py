"""One-shot collectives of two to eight ranks without a GPU: sizes up to the largest that slots take, call after call.

Triton's interpreter runs the kernels, and files that all ranks map are the memory. A store and a load of eight bytes
take the place of the two instructions that no interpreter has.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.imports import has
from megalight.parallel.peers import one_shot
from megalight.parallel.peers.one_shot import WORDS, OneShotCollectives
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.support.workers import run

MOST = 3 * 4 * WORDS + 8
"""Bytes that each rank sends to each other at most here: three programs, and two words of a fourth."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _send(address: Any, word: Any, call: Any) -> None:
    tl = importlib.import_module("triton.language")
    low = word.to(tl.int64) & 0xFFFFFFFF
    tl.store(address.to(tl.pointer_type(tl.int64)), (call.to(tl.int64) << 32) | low)


def _receive(address: Any, call: Any) -> Any:
    tl = importlib.import_module("triton.language")
    while True:
        found = tl.load(address.to(tl.pointer_type(tl.int64)))
        if (found.handle.data >> 32 == call.handle.data).all():
            return found.to(tl.int32)
        time.sleep(0)


def _terms(size: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.bfloat16:  # to which the interpreter does not round as a GPU does: whole numbers need no rounding
        draws = [torch.randint(-16, 16, (size,), generator=random) for _ in range(dist.get_world_size())]
    else:
        draws = [torch.randn(size, generator=random) for _ in range(dist.get_world_size())]
    return [draw.to(dtype) for draw in draws]


def _sum(terms: list[Tensor]) -> Tensor:
    total = torch.zeros_like(terms[0], dtype=torch.float32)
    for term in terms:  # in the order of ranks
        total += term.float()
    return total.to(terms[0].dtype)


def _wrong(way: OneShotCollectives) -> dict[str, int]:
    """Wrong values by call, of calls whose sizes and kinds change from each to the next."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), dict[str, int]()
    for turn, dtype in product(range(2), DTYPES):
        most = way.most // 4 * 4 // dtype.itemsize
        assert way.takes(most, dtype)
        assert not way.takes(most + 2, dtype)
        for size in (most, 2, WORDS + 2, most):
            terms = _terms(size, dtype, 100 * turn + size)
            wrong[f"sum {turn} {dtype} {size}"] = int((way.all_reduce(terms[rank]) != _sum(terms)).sum())
            terms = _terms(ranks * size, dtype, turn + size)
            own = _sum(terms)[rank * size :][:size]
            wrong[f"scatter {turn} {dtype} {size}"] = int((way.reduce_scatter(terms[rank]) != own).sum())
        # The largest third tensor beside two of one program each.
        left = (way._stride // WORDS - 2) * WORDS * 4 // dtype.itemsize
        for size in (left, 6):
            every = [torch.arange(3 * ranks), torch.rand(ranks * 5), torch.cat(_terms(size, dtype, turn))]
            for each in every:
                dist.broadcast(each, 0)
            parts = [each.chunk(ranks)[rank] for each in every]
            assert way.gathers(*parts)
            assert not way.gathers(*parts[:2], parts[2].new_zeros(left + 2))
            found = zip(way.all_gather(*parts), every, strict=True)
            wrong[f"gather {turn} {dtype} {size}"] = sum(int((one != two).sum()) for one, two in found)
    return wrong


def _interpreted() -> dict[str, int]:
    with ExitStack() as stack:
        stack.enter_context(symmetric_on_cpu())
        module = importlib.reload(one_shot)
        for name, value in (
            ("_send", _send),
            ("_receive", _receive),
            ("start_dependents", lambda PDL: None),
            ("MOST_BYTES", MOST * (dist.get_world_size() - 1)),
        ):
            stack.enter_context(patch.object(module, name, value))
        return _wrong(module.OneShotCollectives(dist.group.WORLD))


@pytest.mark.skipif(
    not has("triton") or os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
    reason="needs triton's interpreter: TRITON_INTERPRET=1",  # for all processes: triton reads it when it is imported
)
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)]
)
def test_every_value_is_right(ranks: int) -> None:
    for wrong in run(_interpreted, ranks):
        assert wrong
        assert not any(wrong.values()), wrong
