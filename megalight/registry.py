"""Registries that plugins can extend: named objects of one kind, and the backends of an op."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
import tomllib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from megalight.errors import BackendError, MegalightError, nearest

log = logging.getLogger(__name__)

T = TypeVar("T")
SpecT = TypeVar("SpecT")
FnT = TypeVar("FnT", bound=Callable[..., object])
ChooseT = TypeVar("ChooseT", bound=Callable[..., object])

PLUGIN_GROUP = "megalight.plugins"
SOURCES = Path(__file__).parents[1] / "pyproject.toml"
"""Exists if Megalight runs from its sources."""


class Registry(Generic[T]):
    """A mapping from names to objects of one kind.

    Plugins are loaded when the registry is iterated or a name is unknown: first the one of that name. Registering a
    name twice raises :class:`MegalightError`; so does an unknown name, with a list of the known ones.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds an entry under ``name``."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise MegalightError(f"{self.kind} {name!r} is already registered; choose another name.")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        _load_for(name, self._entries)
        try:
            return self._entries[name]
        except KeyError:
            raise MegalightError(
                f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._entries)) or 'none'}."
                + nearest(name, self._entries)
            ) from None

    def __contains__(self, name: str) -> bool:
        _load_for(name, self._entries)
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(sorted(self._entries))


@dataclass(frozen=True)
class Backend(Generic[SpecT, FnT]):
    """One implementation of an op.

    Attributes:
        name: the name that users type and that logs show.
        fn: the implementation. All backends of an op have the same signature.
        priority: ``auto`` tries the highest first. Priorities come from measurements.
        why_not: returns the reason why this backend cannot serve a request, or None if it can.
        plugin: the plugin that registered the backend, or None for a built-in one. ``BackendRegistry.register`` sets
            it.
        slower: returns the reason why ``auto`` should not choose this backend for a request that it can serve, or None.
            ``auto`` never chooses a plugin's backend, as to install a package should not change a run.
    """

    name: str
    fn: FnT
    priority: int
    why_not: Callable[[SpecT], str | None]
    plugin: str | None = None
    slower: Callable[[SpecT], str | None] | None = None

    def automatic(self, spec: SpecT) -> bool:
        """Return whether ``auto`` may choose it for a request, if it can serve."""
        return self.plugin is None and (self.slower is None or self.slower(spec) is None)


_remembered: list[Callable[[], None]] = []
"""Functions that clear the caches made by :func:`remembered`."""


def remembered(choose: ChooseT) -> ChooseT:
    """Decorator that caches which backend an op chose for a request, until :meth:`BackendRegistry.prefer` is called.

    A function that is imported at its first use (``imported``) is imported now, so that calls go straight to it.
    """

    # Requests are named tuples, so equal layers share one answer.
    @functools.lru_cache(maxsize=4096)
    @functools.wraps(choose)
    def cached(*args: object, **kwargs: object) -> object:
        found = choose(*args, **kwargs)
        return found.imported() if hasattr(found, "imported") else found

    _remembered.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


class BackendRegistry(Generic[SpecT, FnT]):
    """The backends of one op. The choice is made when a model is built, not at every call."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._backends: dict[str, Backend[SpecT, FnT]] = {}
        self._preferred = "auto"
        self._told: set[tuple[str, str]] = set()

    def register(self, backend: Backend[SpecT, FnT]) -> None:
        """Add a backend.

        Raises:
            MegalightError: the op has a backend of this name.
        """
        if backend.name in self._backends:
            raise MegalightError(f"backend {backend.name!r} of {self.op} is already registered; choose another name.")
        # A plugin may be the first to import an op. The op then registers its own backends while the plugin loads;
        # they are built-in, so look at the module that calls.
        own = str(sys._getframe(1).f_globals.get("__name__")).split(".")[:2] == ["megalight", "ops"]
        self._backends[backend.name] = replace(backend, plugin=_loading[-1]) if _loading and not own else backend

    def prefer(self, name: str) -> None:
        """Make ``auto`` mean the backend ``name`` from now on. ``"auto"`` restores the order by priority.

        If the preferred backend cannot serve a request, the request raises; no other backend is tried.

        Raises:
            BackendError: the op has no backend of this name.
        """
        self.check(name)
        self._preferred = name
        # Ops have cached earlier choices.
        for forget in _remembered:
            forget()

    def check(self, name: str) -> None:
        """Check that ``name`` is ``auto`` or the name of a backend.

        Raises:
            BackendError: it is not; the message lists the backends.
        """
        if name == "auto":
            return
        if isinstance(name, str):
            _load_for(name, self._backends)
        known = self.names
        if name not in known:
            raise BackendError(
                f"{self.op} has no backend {name!r}; it has {', '.join(known)}." + nearest(str(name), known)
            )

    @property
    def names(self) -> list[str]:
        """The names of all backends, highest priority first."""
        load_plugins()
        return [backend.name for backend in self._ordered()]

    def _ordered(self) -> list[Backend[SpecT, FnT]]:
        # `sorted` is stable: of equal priorities, the one registered first wins, in every process alike.
        return sorted(self._backends.values(), key=lambda backend: -backend.priority)

    def table(self, spec: SpecT) -> list[tuple[Backend[SpecT, FnT], str | None]]:
        """Every backend with the answer of its ``why_not(spec)``, highest priority first.

        This imports the packages that plugins need.
        """
        load_plugins()
        return [(backend, backend.why_not(spec)) for backend in self._ordered()]

    def select(self, spec: SpecT, name: str = "auto") -> Backend[SpecT, FnT]:
        """Choose the backend for ``spec`` and log the choice once.

        ``auto`` means the backend that :meth:`prefer` named, or else that of the highest priority that can serve, among
        the built-in ones that are not slower for it. A backend that is asked for by name is
        used or raises; there is no silent fallback.

        Raises:
            BackendError: no backend can serve, or the named one cannot serve or does not exist.
        """
        name = self._preferred if name == "auto" else name
        if name != "auto":  # which never chooses a plugin's backend
            _load_for(name, self._backends)
        for backend in self._ordered():
            asked = backend.name == name or (name == "auto" and backend.automatic(spec))
            if asked and backend.why_not(spec) is None:
                if (backend.name, name) not in self._told:
                    # Once per backend and request by name: thousands of layers would say the same.
                    self._told.add((backend.name, name))
                    log.info("%s: backend %s (asked for %s)", self.op, backend.name, name)
                return backend
        reasons = "; ".join(f"{backend.name}: {_answer(backend, spec, reason)}" for backend, reason in self.table(spec))
        known = name == "auto" or name in self._backends
        verdict = (
            f"backend {name!r} of {self.op} cannot serve {spec}" if known else f"{self.op} has no backend {name!r}"
        )
        raise BackendError(f"{verdict}. Backends: {reasons}." + ("" if known else nearest(name, self._backends)))


def _answer(backend: Backend[SpecT, FnT], spec: SpecT, reason: str | None) -> str:
    if reason is not None:
        return reason
    return "can serve" if backend.automatic(spec) else "can serve if you ask for it by name"


@remembered
def choose(registry: BackendRegistry[SpecT, FnT], spec: SpecT, name: str = "auto") -> FnT:
    """Return the function of :meth:`BackendRegistry.select`. The choice is cached."""
    return registry.select(spec, name).fn


_loaded: dict[str, str | None] = {}
_loading: list[str] = []
"""Names of the plugins that are being loaded, the innermost last."""


@functools.cache
def _plugin_entries() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of plugins by name. If two have the same name, the first is kept and a warning is logged."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    # The sources first: their entry is the newer one, if both declare a plugin.
    for entry in (*_declared(SOURCES), *importlib.metadata.entry_points(group=PLUGIN_GROUP)):
        if entry.name in found and entry.value != found[entry.name].value:
            log.warning(
                "plugin %s is already %s; %s has the same name and is ignored",
                entry.name,
                found[entry.name].value,
                entry.value,
            )
        found.setdefault(entry.name, entry)
    return found


def _declared(pyproject: Path) -> list[importlib.metadata.EntryPoint]:
    """Return the plugins that the sources of Megalight declare.

    Package metadata has them too, but sources on ``PYTHONPATH`` have no metadata, and that of an editable install is as
    old as the install.
    """
    if not pyproject.is_file():
        return []
    project = tomllib.loads(pyproject.read_text()).get("project", {})
    if project.get("name") != "megalight":
        return []
    names = project.get("entry-points", {}).get(PLUGIN_GROUP, {})
    return [importlib.metadata.EntryPoint(name, value, PLUGIN_GROUP) for name, value in names.items()]


def load_plugins() -> dict[str, str | None]:
    """Load every entry point of the group ``megalight.plugins``, each once per process.

    A plugin that fails is named in the log; the others are loaded all the same.

    Returns:
        plugin name -> None if it was loaded, otherwise the error.
    """
    for name, entry in _plugin_entries().items():
        _load(name, entry)
    return dict(_loaded)


def _load_for(name: str, entries: Container[str]) -> None:
    """If ``name`` is not among ``entries``, load the plugin of this name, and all others if that does not add it."""
    # Not at import: plugins import this package, and cost time.
    if name not in entries and (entry := _plugin_entries().get(name)) is not None:
        _load(name, entry)
    if name not in entries:
        load_plugins()


def _load(name: str, entry: importlib.metadata.EntryPoint) -> None:
    if name in _loaded:
        return
    _loaded[name] = None  # set first: a plugin may ask a registry, which calls this function again
    _loading.append(name)
    try:
        plugin = entry.load()
        if callable(plugin):
            # An entry may be a function, or a module whose import is all.
            plugin()
        log.info("plugin %s loaded", name)
    except Exception as error:  # third-party code may raise anything
        _loaded[name] = f"{type(error).__name__}: {error}"
        log.warning("plugin %s could not be loaded and is ignored: %s", name, _loaded[name])
    finally:
        _loading.pop()
