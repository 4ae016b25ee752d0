"""Options of context parallelism: the kind of attention of each layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megalight.errors import BackendError, LayoutError, nearest
from megalight.parallel.context.attention import KINDS, ONE_LEVEL


@dataclass(frozen=True)
class ContextOptions:
    """The kind of attention of each layer under context parallelism. With cp=1 the options have no effect.

    Attributes:
        kind: name of a kind (``ring``, ``all_gather``, ``all_to_all``, ``all_to_all_ring``), or ``auto``: the kind of
            the highest priority that can serve the layer. Or a mapping from globs over names of attention modules
            (``"*layers.3.*"``) to kinds: the first match counts, and other layers use ``auto``.
        inner: number of neighboring ranks that exchange heads in the two-level kind ``all_to_all_ring``. The ring then
            has ``cp / inner`` steps. Use the number of GPUs of a host.

    Raises:
        LayoutError: there is no such kind, ``inner`` is below 2, or no chosen kind uses it.
    """

    kind: str | Mapping[str, str] = "auto"
    inner: int | None = None

    def __post_init__(self) -> None:
        if self.inner is not None and self.inner < 2:
            raise LayoutError(
                f"ContextOptions has inner={self.inner}; it must be at least 2. Remove it for kinds with one level."
            )
        kinds = {"kind": self.kind} if isinstance(self.kind, str) else self.kind
        for what, kind in kinds.items():
            try:
                KINDS.check(kind)
            except BackendError as error:
                raise LayoutError(f"ContextOptions({what!r}): {error}") from error
        # Only if no pattern names a kind with two levels: one layer that uses `inner` is enough.
        if self.inner is not None and ONE_LEVEL.issuperset(kinds.values()):
            raise LayoutError(
                f"inner={self.inner} is used only by the kind 'all_to_all_ring', but ContextOptions has "
                f"{', '.join(map(repr, kinds.values())) or 'no kind'}. Use that kind, for all layers or by a pattern, "
                "or remove inner."
            )

    def kind_of(self, name: str) -> str:
        """Return the kind for the attention module ``name``."""
        if isinstance(self.kind, str):
            return self.kind
        return next((kind for pattern, kind in self.kind.items() if fnmatch.fnmatchcase(name, pattern)), "auto")

    def check(self, names: Iterable[str]) -> None:
        """Check that every pattern matches one of the attention modules ``names``.

        Raises:
            LayoutError: a pattern matches none.
        """
        names = list(names)
        for pattern in [] if isinstance(self.kind, str) else self.kind:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise LayoutError(
                    f"the context-parallel pattern {pattern!r} matches no attention module; correct or remove it. "
                    f"There are {', '.join(names[:3]) or 'none'}{' ...' if names[3:] else ''}."
                    + nearest(pattern, names)
                )
