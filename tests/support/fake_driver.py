"""A CUDA driver for a machine without one: reserved addresses, and memory that is mapped there, on the host.

Structures are declared as in ``cuda.h``. Fresh memory holds NaN, and who touches what is not mapped ends the process.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.inference import engine
from megalight.parallel import host_memory, virtual_memory

PAGE = 4096
SOURCE = r"""
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#define PAGE 4096
#define MOST 4096
#define NOTHING (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
#define CHECK(is) if (!(is)) { mistakes++; return 1; }
typedef unsigned long long word;
typedef struct { int type, id; } location;
typedef struct {
    int type, handle_types;
    location place;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} properties;
typedef struct { location place; int flags; } description;
struct { word address; size_t size; int piece; } ranges[MOST];
struct { size_t size; int held, mapped; } pieces[MOST];
int supported = 1, mistakes = 0, failing = 0, started = 0;
long long limit = 1LL << 40;
long long sizes[7] = {
    sizeof(properties), sizeof(description), offsetof(properties, place), offsetof(properties, win32),
    offsetof(properties, flags), offsetof(properties, flags) + 2, offsetof(description, flags)
};
static int find(word address, size_t size) {
    for (int i = 0; i < MOST; i++) if (ranges[i].size == size && ranges[i].address == address) return i;
    return -1;
}
long long mapped(void) {
    long long sum = 0;
    for (int i = 1; i < MOST; i++) if (pieces[i].held || pieces[i].mapped) sum += pieces[i].size;
    return sum;
}
long long reserved(void) { long long sum = 0; for (int i = 0; i < MOST; i++) sum += ranges[i].size; return sum; }
long long handles(void) { long long sum = 0; for (int i = 1; i < MOST; i++) sum += pieces[i].held; return sum; }
int cuInit(unsigned flags) { started = 1; return flags; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 102 && supported;
    return started ? 0 : 3;
}
int cuMemGetAllocationGranularity(size_t *size, const properties *p, int option) {
    CHECK(option == 0 && p->type == 1 && p->place.type == 1)
    *size = PAGE;
    return 0;
}
int cuMemAddressReserve(word *address, size_t size, size_t alignment, word wish, word flags) {
    CHECK(size && size % PAGE == 0 && !alignment && !wish && !flags)
    for (int i = 0; i < MOST; i++) if (!ranges[i].size) {
        *address = (word)mmap(NULL, size, PROT_NONE, NOTHING, -1, 0);
        ranges[i].address = *address; ranges[i].size = size; ranges[i].piece = 0;
        return 0;
    }
    return 1;
}
int cuMemAddressFree(word address, size_t size) {
    int i = find(address, size);
    CHECK(i >= 0 && !ranges[i].piece)
    ranges[i].size = 0;
    return munmap((void *)address, size);
}
int cuMemCreate(word *handle, size_t size, const properties *p, word flags) {
    static const properties nothing;
    CHECK(size && size % PAGE == 0 && p->type == 1 && p->place.type == 1 && p->place.id == 0 && !p->handle_types)
    CHECK(!p->win32 && !memcmp(&p->flags, &nothing.flags, 8) && !flags)
    if (mapped() + (long long)size > limit) return 2;
    for (int i = 1; i < MOST; i++) if (!pieces[i].held && !pieces[i].mapped) {
        pieces[i].size = size; pieces[i].held = 1;
        *handle = i;
        return 0;
    }
    return 1;
}
int cuMemRelease(word handle) {
    CHECK(handle && handle < MOST && pieces[handle].held)
    pieces[handle].held = 0;
    return 0;
}
int cuMemMap(word address, size_t size, size_t offset, word handle, word flags) {
    int i = find(address, size);
    CHECK(i >= 0 && !ranges[i].piece && !offset && !flags && handle && handle < MOST)
    CHECK(pieces[handle].held && !pieces[handle].mapped && pieces[handle].size == size)
    if (failing == 1) return 999;
    ranges[i].piece = handle; pieces[handle].mapped = 1;
    return 0;
}
int cuMemSetAccess(word address, size_t size, const description *d, size_t count) {
    int i = find(address, size);
    CHECK(i >= 0 && ranges[i].piece && d->place.type == 1 && d->place.id == 0 && d->flags == 3 && count == 1)
    if (failing == 2) return 999;
    if (mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return 1;
    memset((void *)address, 255, size);
    return 0;
}
int cuMemUnmap(word address, size_t size) {
    int i = find(address, size);
    CHECK(i >= 0 && ranges[i].piece)
    pieces[ranges[i].piece].mapped = 0; ranges[i].piece = 0;
    void *again = mmap((void *)address, size, PROT_NONE, NOTHING | MAP_FIXED, -1, 0);
    return again != (void *)address;
}
"""


class FakeDriver:
    """What the driver counts, and what it is told.

    Attributes:
        why_not: the function that the driver makes say that a CPU has virtual memory management.
        emptied: how often torch gave unused memory back.
        frees: bytes by which this raises the limit.
    """

    CODE = 999

    def __init__(self, path: Path) -> None:
        self._own: Any = ctypes.CDLL(str(path))
        for name in ("mapped", "reserved", "handles"):
            getattr(self._own, name).restype = ctypes.c_longlong
        self.why_not = virtual_memory.why_not
        self.emptied = self.frees = 0

    def number(self, name: str, count: int) -> list[int]:
        return [*(ctypes.c_longlong * count).in_dll(self._own, name)]

    @property
    def mapped(self) -> int:
        """Bytes of memory in use."""
        return int(self._own.mapped())

    @property
    def reserved(self) -> int:
        """Bytes of addresses."""
        return int(self._own.reserved())

    @property
    def handles(self) -> int:
        """Handles that were not released."""
        return int(self._own.handles())

    @property
    def mistakes(self) -> int:
        """Calls that the driver refused."""
        return ctypes.c_int.in_dll(self._own, "mistakes").value

    def _set(self, name: str, value: int, kind: Any = ctypes.c_int) -> None:
        kind.in_dll(self._own, name).value = value

    supported = property(fset=lambda self, value: self._set("supported", value))
    limit = property(fset=lambda self, value: self._set("limit", value, ctypes.c_longlong))

    def fail(self, call: str | None) -> None:
        self._set("failing", {None: 0, "map": 1, "access": 2}[call])

    def empty_cache(self) -> None:
        self.emptied += 1
        if self.frees:
            (room,) = self.number("limit", 1)
            self.limit, self.frees = room + self.frees, 0


def _over(memory: Any) -> Tensor:
    buffer: Any = (ctypes.c_uint8 * memory.used).from_address(memory.address)
    buffer.owner = memory
    return torch.frombuffer(buffer, dtype=torch.uint8)


@contextmanager
def fake_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Let CPUs have memory that comes and goes."""
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True)
    driver = FakeDriver(library)
    monkeypatch.setattr(virtual_memory, "LIBRARY", str(library))
    for module in (virtual_memory, engine):
        monkeypatch.setattr(module, "why_not", lambda device: None)
    monkeypatch.setattr(virtual_memory, "ordinal_of", lambda device: 0)
    monkeypatch.setattr(host_memory, "ordinal_of", lambda device: 0)
    monkeypatch.setattr(virtual_memory, "tensor_over", _over)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", driver.empty_cache)
    virtual_memory.library.cache_clear()
    yield driver
    gc.collect()
    virtual_memory.library.cache_clear()
