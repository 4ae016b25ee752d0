"""Optional packages, slow ones, and features of torch that depend on its version: detection and import."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megalight.errors import MissingPackageError

EXTRAS = {
    "transformers": "transformers",
    "pyarrow": "parquet",
    "matplotlib": "plot",
    "transformer_engine": "te",
    "flash_attn": "flash-attn",
    "shtab": "completion",
    "jinja2": "chat",
    "modelopt": "modelopt",
    "PIL": "images",
    "huggingface_hub": "hub",
    "datasets": "hub",
    "lm_eval": "evaluate",
    "llguidance": "grammar",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "msgspec": "serve",
    "zmq": "serve",
}
"""Import name of an optional package -> the pip extra of Megalight that installs it."""


def has(package: str) -> bool:
    """Return whether ``package`` (a top-level import name) is installed. Nothing is imported."""
    try:
        # A parent that fails to import raises here, too, and so does a module without a spec.
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@functools.cache  # files are parsed, and every save asks
def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None. Nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(package: str, purpose: str) -> ModuleType:
    """Import ``package`` and return it.

    Raises:
        MissingPackageError: it is not installed or cannot be imported. The message names ``purpose`` and the pip
            command.
    """
    try:
        # The import itself, as an installed package may still be broken.
        return importlib.import_module(package)
    except (ImportError, OSError) as error:  # OSError: the package loads a shared library that is missing
        root = package.partition(".")[0]
        wanted = f"'megalight[{EXTRAS[root]}]'" if root in EXTRAS else root
        if has(root):
            problem, step = "is installed but could not be imported", "Repair it, or reinstall it with"
        else:
            problem, step = "is not installed", "Install it with"
        raise MissingPackageError(
            f"{purpose} needs the package {root!r}, which {problem} ({error}). {step}: pip install {wanted}"
        ) from error


def lazy_members(package: str, members: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports some members at their first use.

    Args:
        package: its ``__name__``.
        members: name -> module.
    """

    def found(name: str) -> Any:
        if name not in members:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(members[name]), name)

    return found


class _Later:
    """Stands for a member of a package until it is used."""

    def __init__(self, package: str, name: str) -> None:
        self._where = package, name

    def _member(self) -> Any:
        package, name = self._where
        return getattr(_undeferred(package), name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._member()(*args, **kwargs)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._member())


class _Deferred(ModuleType):
    """Stands for a package of which names are taken."""

    def __getattr__(self, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


class _DeferredFinder(list[str]):
    """Where the submodules of a deferred package are. Who looks for one needs the package itself."""

    def __init__(self, package: str, places: Iterable[str]) -> None:
        super().__init__(places)
        self._package = package

    def __iter__(self) -> Iterator[str]:
        _undeferred(self._package)
        return super().__iter__()


def _undeferred(package: str) -> ModuleType:
    if isinstance(sys.modules.get(package), _Deferred):
        del sys.modules[package]
    return importlib.import_module(package)


@contextmanager
def deferred(package: str) -> Iterator[None]:
    """Let modules that are first imported in this context take names from ``package`` without importing it.

    One of these names imports it when it is used. Nothing changes if it is not installed or was imported before.

    Args:
        package: the name of a top-level package.
    """
    if package in sys.modules or (spec := importlib.util.find_spec(package)) is None:
        yield
        return
    stand_in = _Deferred(package)
    stand_in.__spec__, stand_in.__path__ = spec, _DeferredFinder(package, spec.submodule_search_locations or ())
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(package) is stand_in:
            del sys.modules[package]


def torch_distributed(*names: str) -> Any:
    """Return the first of ``names`` that ``torch.distributed`` has: collectives change names between releases."""
    module = importlib.import_module("torch.distributed")
    # In the order given: callers name the newest one first.
    return next(getattr(module, name) for name in names if hasattr(module, name))


def symmetric_memory() -> ModuleType:
    """Return torch's module for symmetric memory (buffers that the GPUs of one host share).

    Check :func:`has_symmetric_memory` first.
    """
    return importlib.import_module("torch.distributed._symmetric_memory")


@functools.cache
def has_symmetric_memory() -> bool:
    """Return whether this torch has symmetric memory with all functions that Megalight uses. No device is asked."""
    try:
        found = symmetric_memory()
    except ImportError:
        return False
    handle = getattr(importlib.import_module("torch._C._distributed_c10d"), "_SymmetricMemory", None)
    # By its functions: private modules change without a change of version.
    return all(hasattr(found, name) for name in ("empty", "rendezvous")) and all(
        hasattr(handle, name) for name in ("get_buffer", "barrier")
    )


@functools.cache
def has_grad_dtype() -> bool:
    """Return whether a parameter can declare the dtype of its gradient (``Tensor.grad_dtype``)."""
    return hasattr(importlib.import_module("torch").Tensor, "grad_dtype")


# Looked up once: it is asked in every call of a layer.
@functools.cache
def _graph_task_id() -> Callable[[], int]:
    found: Callable[[], int] = importlib.import_module("torch")._C._current_graph_task_id
    return found


def in_backward() -> bool:
    """Return whether the caller runs inside a backward pass. torch has no public function for this."""
    return _graph_task_id()() != -1


def catches_saved_tensors() -> bool:
    """Return whether hooks catch what autograd saves now. torch has no public function for this."""
    return _saved_tensors_hooks()(True) is not None


@functools.cache
def _saved_tensors_hooks() -> Callable[[bool], object]:
    found: Callable[[bool], object] = importlib.import_module("torch")._C._autograd._top_saved_tensors_default_hooks
    return found
