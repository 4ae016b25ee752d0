"""Named things that plugins may add to: a registry for each kind, and backends that say why they cannot serve."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megalight.errors import BackendError, MegalightError, nearest

log = logging.getLogger(__name__)

T = TypeVar("T")
SpecT = TypeVar("SpecT")
FnT = TypeVar("FnT", bound=Callable[..., object])

PLUGIN_GROUP = "megalight.plugins"


class Registry(Generic[T]):
    """Names to things of one kind. A second entry of a name raises; an unknown name lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an entry under ``name``."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise MegalightError(f"{self.kind} {name!r} is registered already; choose another name.")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            load_plugins()
        try:
            return self._entries[name]
        except KeyError:
            raise MegalightError(
                f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._entries)) or 'none'}."
                + nearest(name, self._entries)
            ) from None

    def __contains__(self, name: str) -> bool:
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(sorted(self._entries))


@dataclass(frozen=True)
class Backend(Generic[SpecT, FnT]):
    """One implementation of an op.

    Attributes:
        name: what users type, and what logs show.
        fn: the implementation; every backend of an op has the same signature.
        priority: ``auto`` asks the highest first. Set from measurements.
        why_not: answers why this backend cannot serve a request, or None when it can.
    """

    name: str
    fn: FnT
    priority: int
    why_not: Callable[[SpecT], str | None]


class BackendRegistry(Generic[SpecT, FnT]):
    """The backends of one op. One is chosen when a model is built, never per call."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._backends: dict[str, Backend[SpecT, FnT]] = {}
        self._told: set[tuple[str, str]] = set()

    def register(self, backend: Backend[SpecT, FnT]) -> None:
        """Add a backend; a second one of the same name raises."""
        if backend.name in self._backends:
            raise MegalightError(f"backend {backend.name!r} of {self.op} is registered already.")
        self._backends[backend.name] = backend

    def table(self, spec: SpecT) -> list[tuple[Backend[SpecT, FnT], str | None]]:
        """Every backend with its answer for ``spec``, highest priority first."""
        load_plugins()
        ordered = sorted(self._backends.values(), key=lambda backend: -backend.priority)
        return [(backend, backend.why_not(spec)) for backend in ordered]

    def select(self, spec: SpecT, name: str = "auto") -> Backend[SpecT, FnT]:
        """The backend to use for ``spec``.

        ``auto`` takes the first by priority that can serve, and logs it once. A named backend that cannot serve
        raises: nothing is ever downgraded silently.

        Raises:
            BackendError: none can serve, or the named one cannot or does not exist.
        """
        table = self.table(spec)
        for backend, reason in table:
            if name in ("auto", backend.name) and reason is None:
                if (backend.name, name) not in self._told:
                    self._told.add((backend.name, name))
                    log.info("%s: backend %s (asked for %s)", self.op, backend.name, name)
                return backend
        reasons = "; ".join(f"{backend.name}: {reason or 'can serve'}" for backend, reason in table)
        known = name == "auto" or name in self._backends
        verdict = (
            f"backend {name!r} of {self.op} cannot serve {spec}" if known else f"{self.op} has no backend {name!r}"
        )
        raise BackendError(f"{verdict}. Backends: {reasons}." + ("" if known else nearest(name, self._backends)))


_loaded: dict[str, str | None] = {}


@functools.cache
def _plugin_entries() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points by name, looked up once. Of two with one name the first stays, and the log says so."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        if entry.name in found:
            log.warning(
                "plugin %s is %s; %s has the same name: left out", entry.name, found[entry.name].value, entry.value
            )
        found.setdefault(entry.name, entry)
    return found


def load_plugins() -> dict[str, str | None]:
    """Import every entry point of the group ``megalight.plugins`` once.

    Returns:
        plugin name -> None when it loaded, else the error. A broken plugin is named in the log and harms nobody else.
    """
    for name, entry in _plugin_entries().items():
        if name in _loaded:
            continue
        _loaded[name] = None  # before loading: a plugin may itself ask a registry
        try:
            plugin = entry.load()
            if callable(plugin):
                plugin()
            log.info("plugin %s loaded", name)
        except Exception as error:  # a third party's code may raise anything
            _loaded[name] = f"{type(error).__name__}: {error}"
            log.warning("plugin %s could not be loaded and is left out: %s", name, _loaded[name])
    return dict(_loaded)
