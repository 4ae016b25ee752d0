"""Named things that plugins may add to: a registry for each kind, and backends that say why they cannot serve."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from megalight.errors import BackendError, MegalightError, nearest

log = logging.getLogger(__name__)

T = TypeVar("T")
SpecT = TypeVar("SpecT")
FnT = TypeVar("FnT", bound=Callable[..., object])
ChooseT = TypeVar("ChooseT", bound=Callable[..., object])

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
        plugin: name of the plugin that brought it, noted when it is registered. ``auto`` passes over it, and does not
            ask it: nothing is switched on just by being installed.
    """

    name: str
    fn: FnT
    priority: int
    why_not: Callable[[SpecT], str | None]
    plugin: str | None = None


_remembered: list[Callable[[], None]] = []
"""What empties each function's memory of :func:`remembered`."""


def remembered(choose: ChooseT) -> ChooseT:
    """Decorator of an op's choice of a backend: made once per request, and anew when somebody prefers another."""
    cached = functools.lru_cache(maxsize=256)(choose)
    _remembered.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


class BackendRegistry(Generic[SpecT, FnT]):
    """The backends of one op. One is chosen when a model is built, never per call."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._backends: dict[str, Backend[SpecT, FnT]] = {}
        self._preferred = "auto"
        self._told: set[tuple[str, str]] = set()

    def register(self, backend: Backend[SpecT, FnT]) -> None:
        """Add a backend; a second one of the same name raises."""
        if backend.name in self._backends:
            raise MegalightError(f"backend {backend.name!r} of {self.op} is registered already.")
        # A plugin may be the first to import an op, which then registers its own backends.
        own = str(sys._getframe(1).f_globals.get("__name__")).split(".")[:2] == ["megalight", "ops"]
        self._backends[backend.name] = replace(backend, plugin=_loading[-1]) if _loading and not own else backend

    def prefer(self, name: str) -> None:
        """From now on ``auto`` is the backend ``name``, which serves or raises; ``"auto"`` restores the usual order.

        Raises:
            BackendError: there is no such backend.
        """
        self.check(name)
        self._preferred = name
        for forget in _remembered:
            forget()

    def check(self, name: str) -> None:
        """Refuse a name that is neither ``auto`` nor a backend's.

        Raises:
            BackendError: names those that there are.
        """
        if name == "auto" or name in self._backends:
            return
        known = self.names  # with those of plugins
        if name not in known:
            raise BackendError(f"{self.op} has no backend {name!r}; it has {', '.join(known)}." + nearest(name, known))

    @property
    def names(self) -> list[str]:
        """Of all backends, highest priority first."""
        return [backend.name for backend in self._ordered()]

    def _ordered(self) -> list[Backend[SpecT, FnT]]:
        load_plugins()
        return sorted(self._backends.values(), key=lambda backend: -backend.priority)

    def table(self, spec: SpecT) -> list[tuple[Backend[SpecT, FnT], str | None]]:
        """Every backend with its answer for ``spec``, highest priority first. Imports plugins' packages."""
        return [(backend, backend.why_not(spec)) for backend in self._ordered()]

    def select(self, spec: SpecT, name: str = "auto") -> Backend[SpecT, FnT]:
        """The backend to use for ``spec``.

        ``auto`` takes the first by priority that can serve and is no plugin's, or what :meth:`prefer` named, and logs
        it once. A named backend that cannot serve raises: nothing is ever downgraded silently.

        Raises:
            BackendError: none can serve, or the named one cannot or does not exist.
        """
        name = self._preferred if name == "auto" else name
        for backend in self._ordered():
            asked = backend.name == name or (name == "auto" and backend.plugin is None)
            if asked and backend.why_not(spec) is None:
                if (backend.name, name) not in self._told:
                    self._told.add((backend.name, name))
                    log.info("%s: backend %s (asked for %s)", self.op, backend.name, name)
                return backend
        reasons = "; ".join(f"{backend.name}: {_answer(backend, reason)}" for backend, reason in self.table(spec))
        known = name == "auto" or name in self._backends
        verdict = (
            f"backend {name!r} of {self.op} cannot serve {spec}" if known else f"{self.op} has no backend {name!r}"
        )
        raise BackendError(f"{verdict}. Backends: {reasons}." + ("" if known else nearest(name, self._backends)))


def _answer(backend: Backend[SpecT, FnT], reason: str | None) -> str:
    if reason is not None:
        return reason
    return "can serve" if backend.plugin is None else "can serve when asked for by name"


_loaded: dict[str, str | None] = {}
_loading: list[str] = []
"""Plugins that are registering what they bring, the innermost last."""


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
        _loading.append(name)
        try:
            plugin = entry.load()
            if callable(plugin):
                plugin()
            log.info("plugin %s loaded", name)
        except Exception as error:  # a third party's code may raise anything
            _loaded[name] = f"{type(error).__name__}: {error}"
            log.warning("plugin %s could not be loaded and is left out: %s", name, _loaded[name])
        finally:
            _loading.pop()
    return dict(_loaded)
