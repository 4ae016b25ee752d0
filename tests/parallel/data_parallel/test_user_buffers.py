"""Buffers that NCCL knows: which ones, by which groups, and where it cannot be had. A stand-in takes NCCL's place."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import AdvancedDataParallelOptions, DataParallelOptions, communication
from megalight.parallel.data_parallel.communication import why_not
from tests.parallel.data_parallel.helpers import assert_models_close
from tests.parallel.data_parallel.test_units import Net, _reference, _train, engine_of
from tests.support.options import data_parallel
from tests.support.workers import run

CUDA = torch.device("cuda")


class Pool:
    """Stands in for a pool of NCCL's memory: knows the memory of tensors that were made inside it."""

    def __init__(self, allocator: str) -> None:
        assert allocator == "NCCL's allocator"
        self.made: dict[int, Tensor] = {}
        self.open = False

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        pool = self

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                pool.made.update({t.untyped_storage().data_ptr(): t for t in tree_leaves(out) if isinstance(t, Tensor)})
                return out

        with Noting():
            yield

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.made


class Backend:
    """Stands in for NCCL's side of a group."""

    mem_allocator = "NCCL's allocator"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, bool]]] = []

    def register_mem_pool(self, pool: Pool, **options: bool) -> None:
        self.calls.append(("register", len(pool.made), options))

    def deregister_mem_pool(self, pool: Pool) -> None:
        self.calls.append(("deregister", len(pool.made), {}))


def _trained(level: str, kind: str, replicate: int) -> None:
    backends: dict[Any, Backend] = {}
    connected: set[Any] = set()
    send = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        connected.add(group)
        return send(tensor, *args, group=group, **options)

    with (
        patch.object(dist, "all_reduce", noted),
        patch.object(communication, "why_not", lambda *_: None),
        patch.object(communication, "_backend", lambda group, _: backends.setdefault(group, Backend())),
        patch.object(communication, "FAILED", threading.Event()),  # not that of earlier tests in this rank
        patch.object(torch.cuda, "MemPool", Pool),
        patch.object(torch.cuda, "use_mem_pool", Pool.use),
        patch.object(torch.cuda, "synchronize", lambda _: None),
    ):
        net, expected = Net(3).double(), Net(3).double()
        engine = engine_of(net, level, replicate=replicate, nccl_ub=kind)
        pool = engine._user_buffers._pool
        assert isinstance(pool, Pool)
        flat = [*engine.buckets, *engine.frozen_shards.buckets]
        sent = {group for b in flat for group in (b.group, b.shard_group, b.unit_group, b.replica_group)} - {None}
        used = {group: backend for group, backend in backends.items() if backend.calls}
        assert used.keys() == sent
        assert connected == sent, "a message has connected each group before"
        everything = [("register", len(pool.made), {"symm": True} if kind == "symmetric" else {})]
        assert all(backend.calls == everything for backend in used.values()), "once, when all buffers are there"
        buffers = [tensor for bucket in flat for tensor in (bucket.params, bucket.own_params)]
        buffers += [tensor for bucket in engine.buckets for tensor in (bucket.grads, bucket.own_grads)]
        assert all(map(pool.holds, buffers))
        own = {tensor.untyped_storage().data_ptr() for tensor in buffers}
        assert pool.made.keys() == own, "nothing else takes registered memory"
        _train(net, engine, micro=2)
        engine.sync_parameters()
        assert all(map(pool.holds, buffers)), "addresses are fixed"
        _reference(expected, micro=2)
        engine.close()
        engine.close()
        assert all(len(b.calls) == 2 and b.calls[1][0] == "deregister" for b in used.values()), "before groups end"
        if engine.units is not None:
            with engine.units.full_parameters():
                assert_models_close(net, expected)
        else:
            assert_models_close(net, expected)


def _all() -> None:
    with patch.object(atexit, "register"):
        for level, kind, replicate in (
            ("optim_grads_params", "symmetric", 1),
            ("optim_grads_params", "local", 2),
            ("optim_grads", "local", 1),
            ("optim", "symmetric", 1),
        ):
            _trained(level, kind, replicate)


def test_every_buffer_of_messages_is_registered_once_with_every_group() -> None:
    run(_all, 2)


class Known:
    """A ProcessGroupNCCL that can do everything."""

    mem_allocator = None

    def register_mem_pool(self) -> None:
        """(self, pool, symm: bool = False)"""


class Older(Known):
    def register_mem_pool(self) -> None:
        """(self, pool)"""


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    Known.mem_allocator = Older.mem_allocator = property()  # type: ignore[assignment]
    backend, version = "gloo", (2, 27, 5)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Known, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_CUMEM_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    assert why_not("off", torch.device("cpu")) is None
    assert why_not("local", torch.device("cpu")) == "it needs GPUs, and the buffers are on cpu"
    assert why_not("local", CUDA) == "it needs the backend nccl"
    backend = "nccl"
    assert why_not("local", CUDA) is why_not("symmetric", CUDA) is None
    version = (2, 26, 2)
    assert why_not("local", CUDA) is None
    assert why_not("symmetric", CUDA) == "it needs NCCL 2.27 or newer, and this is 2.26"
    version = (2, 27, 5)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Older)
    assert why_not("local", CUDA) is None
    assert "cannot register pools of memory this way" in str(why_not("symmetric", CUDA))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert "expandable segments" in str(why_not("local", CUDA))
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert "unset it" in str(why_not("local", CUDA))


def _refused() -> None:
    with pytest.raises(ConfigurationError, match=r"nccl_ub='local': it needs GPUs, .* Or use 'off'"):
        engine_of(Net(2), nccl_ub="local")


def test_what_cannot_be_registered_is_refused() -> None:
    run(_refused, 2)
    with pytest.raises(ConfigurationError, match="nccl_ub='on'; it must be one of off, local, symmetric"):
        DataParallelOptions(advanced=AdvancedDataParallelOptions(nccl_ub="on"))  # type: ignore[arg-type]
    for options in ({"reduce_dtype": "float32"}, {"reduce_scatter_with_fp32_accumulation": True}):
        with pytest.raises(ConfigurationError, match=r"nccl_ub='local' with reduce_.*, which sends gradients from"):
            data_parallel(nccl_ub="local", **options)  # type: ignore[arg-type]
