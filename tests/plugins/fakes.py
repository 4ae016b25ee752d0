"""Packages that are not here, in small: they compute with torch, note how they were called, and check it."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.plugins import package


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the device passes on the CPU."""
    monkeypatch.setattr(package, "cuda_why_not", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


class Fakes:
    """Modules on ``sys.path`` for one test: ``fakes.add("a.b", name=value, ...)``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.setattr(package, "_load", functools.lru_cache(package._load.__wrapped__))

    def add(self, name: str, version: str | None = None, **names: Any) -> ModuleType:
        """A module with ``names``; its parents are made too."""
        parent, _, last = name.rpartition(".")
        if parent and parent not in sys.modules:
            self.add(parent)
        folder = self.root / name.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()  # what find_spec looks for
        module = sys.modules[name] if name in sys.modules else ModuleType(name)
        module.__path__ = [str(folder)]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        if version is not None:
            module.__version__ = version
        for key, value in names.items():
            setattr(module, key, self.noted(key, value) if callable(value) and not isinstance(value, type) else value)
        self.monkeypatch.setitem(sys.modules, name, module)
        if parent:
            setattr(sys.modules[parent], last, module)
        return module

    def broken(self, name: str, line: str) -> None:
        """A package whose import runs ``line``."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(line)
        importlib.invalidate_caches()

    def noted(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return function(*args, **kwargs)

        return call

    def called(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the latest call of ``name``."""
        return next((args, kwargs) for called, args, kwargs in reversed(self.calls) if called == name)


def dense(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, left: int, right: int, cap: float,
    sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention ``[B, S, H, D]`` with windows as flash-attn and cuDNN count them, bottom-right."""
    repeats = q.shape[2] // k.shape[2]
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if cap:
        scores = cap * torch.tanh(scores / cap)
    rows, columns = scores.shape[-2:]
    ahead = torch.arange(columns) - torch.arange(columns - rows, columns)[:, None]
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        right = 0
    if right >= 0:
        allowed &= ahead <= right
    if left >= 0:
        allowed &= -ahead <= left
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sink is not None:  # a last column without a value
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Tensor:
    """The same for ``[T, H, D]``."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    parts = zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)
    return torch.cat([dense(q[None, a:b], k[None, c:d], v[None, c:d], *rest)[0] for a, b, c, d in parts])
