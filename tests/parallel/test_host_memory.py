"""Host memory that is used again: who takes which block, and what is waited for."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel import host_memory
from megalight.parallel.host_memory import (
    HostPool,
    ManagedMemory,
    advise,
    compile_allocator,
    move_pages,
    prefetch,
    why_not,
)


def test_blocks_are_used_again() -> None:
    pool, waits = HostPool(torch.device("cpu")), list[str]()
    small, large = pool.take(10), pool.take(40)
    assert (small.numel(), large.numel(), pool.pinned) == (10, 40, 50)
    pool.give(large, lambda: waits.append("large"))
    pool.give(small, lambda: waits.append("small"))
    # a block may be twice as large as what it serves for, and the smallest that fits is taken
    again, other = pool.take(9), pool.take(20)
    assert again.data_ptr() == small.data_ptr()
    assert other.data_ptr() == large.data_ptr()
    assert waits == ["small", "large"]
    assert pool.pinned == 50


def test_the_oldest_block_comes_first() -> None:
    """Its last copy was made first, so the wait is short."""
    pool = HostPool(torch.device("cpu"))
    one, two = pool.take(8), pool.take(8)
    pool.give(two, None)
    pool.give(one, None)
    assert pool.take(8).data_ptr() == two.data_ptr()


def test_a_block_that_does_not_fit_stays() -> None:
    pool = HostPool(torch.device("cpu"))
    pool.give(pool.take(21), None)
    assert pool.take(10).numel() == 10
    assert pool.take(22).numel() == 22
    assert pool.take(21).numel() == 21
    assert pool.pinned == 21 + 10 + 22
    pool.clear()
    assert pool.take(21).numel() == 21
    assert pool.pinned == 21 + 10 + 22 + 21


CPU, SECOND = torch.device("cpu"), torch.device("cuda:1")
COMMON = """
#include <stdlib.h>
long long seen[6];
int concurrent = 1, freed = 0, started = 0;
typedef struct { int type, id; } location;
int cuInit(unsigned flags) { started = flags == 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 89 && concurrent;
    return started ? 0 : 3;  /* CUDA_ERROR_NOT_INITIALIZED */
}
int cuMemAllocManaged(unsigned long long *address, size_t size, unsigned flags) {
    seen[0] = size; seen[1] = flags;
    *address = (unsigned long long)malloc(size);
    return 0;
}
int cuMemFree_v2(unsigned long long address) { free((void *)address); freed++; return 0; }
static int note(long long a, long long b, long long c, long long d, long long e, long long f) {
    seen[0] = a; seen[1] = b; seen[2] = c; seen[3] = d; seen[4] = e; seen[5] = f;
    return b == 8 ? 801 : 0;  /* it refuses tensors of eight bytes */
}
"""
ORDINAL = """
int cuMemPrefetchAsync(unsigned long long p, size_t n, int device, void *s) {
    return note(p, n, device, 0, 0, (long)s);
}
int cuMemAdvise(unsigned long long p, size_t n, int advice, int device) { return note(p, n, advice, device, 0, 0); }
"""
LOCATED = """
int cuMemPrefetchAsync_v2(unsigned long long p, size_t n, location l, unsigned flags, void *s) {
    return note(p, n, l.type, l.id, flags, (long)s);
}
int cuMemAdvise_v2(unsigned long long p, size_t n, int advice, location l) {
    return note(p, n, advice, l.type, l.id, 0);
}
"""


BATCHED = """
typedef unsigned long long word;
static int batch(int call, word *p, size_t *n, size_t count, location *l, size_t *first, size_t places, word flags) {
    if (n[count - 1] == 4) return 801;
    return note(call, p[count - 1], n[count - 1], count, l ? l->type * 10 + l->id : 0, flags + (places ? *first : 0));
}
int cuMemPrefetchBatchAsync(word *p, size_t *n, size_t c, location *l, size_t *f, size_t k, word flags, void *s) {
    return s ? batch(1, p, n, c, l, f, k, flags) : 1;
}
int cuMemDiscardBatchAsync(word *p, size_t *n, size_t c, word flags, void *s) {
    return s ? batch(2, p, n, c, 0, 0, 0, flags) : 1;
}
int cuMemDiscardAndPrefetchBatchAsync(word *p, size_t *n, size_t c, location *l, size_t *f, size_t k, word flags,
                                      void *s) {
    return s ? batch(3, p, n, c, l, f, k, flags) : 1;
}
"""


@pytest.fixture(params=["ordinal", "located", "batched"])
def driver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A driver before CUDA 12.2, one that also has newer forms, whose old calls abort here, and one of CUDA 13."""
    located = request.param != "ordinal"
    wrong = "int cuMemPrefetchAsync() { abort(); } int cuMemAdvise() { abort(); }" if located else ""
    source, library = tmp_path / "driver.c", tmp_path / f"libdriver-{request.param}.so"
    source.write_text(COMMON + (LOCATED + wrong if located else ORDINAL) + BATCHED * (request.param == "batched"))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setattr(host_memory, "LIBRARY", str(library))
    host_memory.library.cache_clear()
    yield SimpleNamespace(located=located, batched=request.param == "batched", own=ctypes.CDLL(str(library)))
    host_memory.library.cache_clear()


def _seen(driver: Any) -> list[int]:
    return list((ctypes.c_longlong * 6).in_dll(driver.own, "seen"))


def test_arguments_of_both_generations(driver: Any) -> None:
    x, stream = torch.zeros(6), SimpleNamespace(cuda_stream=77)
    address, size = x.data_ptr(), x.nbytes
    prefetch(x, SECOND, stream)  # type: ignore[arg-type]
    assert _seen(driver) == [address, size, *((1, 1, 0, 77) if driver.located else (1, 0, 0, 77))]
    prefetch(x[2:], CPU, stream)  # type: ignore[arg-type]
    assert _seen(driver) == [address + 8, size - 8, *((2, 0, 0, 77) if driver.located else (-1, 0, 0, 77))]
    advise(x, "preferred_location", SECOND)
    assert _seen(driver) == [address, size, 3, *((1, 1, 0) if driver.located else (1, 0, 0))]
    advise(x, "accessed_by", CPU)
    assert _seen(driver) == [address, size, 5, *((2, 0, 0) if driver.located else (-1, 0, 0))]
    with pytest.raises(MegalightError, match="cuMemPrefetchAsync failed with code 801"):
        prefetch(x[:2], SECOND, stream)  # type: ignore[arg-type]


def test_several_tensors_move_together_and_values_of_no_use_are_discarded(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    current, side = (
        SimpleNamespace(cuda_stream=number, device=SECOND, wait_stream=waits.append) for number in (77, 78)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(host_memory, "_side_stream", lambda device: side)
    tensors = [torch.zeros(6), torch.zeros(3)]
    address, size = tensors[1].data_ptr(), tensors[1].nbytes
    for where, keep, call, place in (
        (CPU, True, 1, 20),
        (CPU, False, 2, 0),
        (SECOND, True, 1, 11),
        (SECOND, False, 3, 11),
    ):
        waits.clear()
        move_pages(tensors, where, keep)
        if driver.batched:
            assert _seen(driver) == [call, address, size, 2, place, 0]
            assert waits == [current, side]
        else:
            assert _seen(driver)[:2] == [address, size]
            assert not waits
    if driver.batched:
        side.cuda_stream = None
        with pytest.raises(MegalightError, match="batch of moves of memory failed with code 1"):
            move_pages(tensors, CPU)
        side.cuda_stream = 78
        tensors[1] = tensors[1][:1]  # which this driver does not support
        move_pages(tensors, CPU, False)
        assert _seen(driver)[:3] == [address, 4, 2]
        assert not host_memory.library().batched


def test_the_allocator_allocates_and_frees(driver: Any, tmp_path: Path) -> None:
    found = ctypes.CDLL(str(compile_allocator(tmp_path)))
    found.managed_alloc.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    found.managed_alloc.restype = ctypes.c_void_p
    found.managed_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    address = found.managed_alloc(4096, 1, None)
    assert address
    assert _seen(driver)[:2] == [4096, 1], "attached to all streams"
    ctypes.memset(address, 1, 4096)
    found.managed_free(address, 4096, 1, None)
    assert ctypes.c_int.in_dll(driver.own, "freed").value == 1


def test_reasons(driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_not(SECOND) is None
    assert why_not(CPU) == "it needs a GPU, not cpu"
    with pytest.raises(ConfigurationError, match=r"managed memory for cpu: it needs a GPU, not cpu\. Use the device's"):
        ManagedMemory(CPU)
    monkeypatch.setenv("PATH", "")
    assert "C compiler" in str(why_not(SECOND))
    with pytest.raises(MegalightError, match="could not be compiled"):
        compile_allocator(tmp_path)
    ctypes.c_int.in_dll(driver.own, "concurrent").value = 0
    assert "concurrentManagedAccess is 0" in str(why_not(SECOND))
    monkeypatch.setattr(host_memory, "LIBRARY", "libnothing.so")
    host_memory.library.cache_clear()
    assert why_not(SECOND) == "libnothing.so is not there, or lacks managed memory"
