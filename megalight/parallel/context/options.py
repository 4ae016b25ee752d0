"""Which kind of context-parallel attention a model's layers use."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megalight.errors import BackendError, LayoutError, nearest
from megalight.parallel.context.kinds import KINDS, ONE_LEVEL


@dataclass(frozen=True)
class ContextOptions:
    """The kind of attention of each layer under context parallelism. Without it, that is with cp=1, nothing acts.

    Attributes:
        kind: a kind's name (``ring``, ``all_gather``, ``all_to_all``, ``all_to_all_ring``), or ``auto``: the first by
            priority that can serve the layer. Or a mapping from globs over names of attention modules
            (``"*layers.3.*"``) to kinds; the first that matches decides, and ``auto`` serves what none matches.
        inner: how many neighbouring ranks exchange heads in the two-level kind ``all_to_all_ring``; the ring then has
            ``cp / inner`` steps. Put ranks of one host here.

    Raises:
        LayoutError: there is no such kind; ``inner`` is below 2, or no kind has use for it.
    """

    kind: str | Mapping[str, str] = "auto"
    inner: int | None = None

    def __post_init__(self) -> None:
        if self.inner is not None and self.inner < 2:
            raise LayoutError(
                f"the inner all-to-all of context parallelism has inner={self.inner} ranks; it needs at least 2. "
                "Leave inner out for kinds of one level."
            )
        kinds = {"kind": self.kind} if isinstance(self.kind, str) else self.kind
        for what, kind in kinds.items():
            try:
                KINDS.check(kind)
            except BackendError as error:
                raise LayoutError(f"ContextOptions({what!r}): {error}") from error
        if self.inner is not None and ONE_LEVEL.issuperset(kinds.values()):
            raise LayoutError(
                f"inner={self.inner} acts in the kind 'all_to_all_ring' alone, and ContextOptions asks for "
                f"{', '.join(map(repr, kinds.values())) or 'none'}. Name that kind, for all layers or "
                "by a pattern, or leave inner out."
            )

    def kind_of(self, name: str) -> str:
        """The kind for the attention module ``name``."""
        if isinstance(self.kind, str):
            return self.kind
        return next((kind for pattern, kind in self.kind.items() if fnmatch.fnmatchcase(name, pattern)), "auto")

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that match none of the attention modules ``names``.

        Raises:
            LayoutError: names the pattern.
        """
        names = list(names)
        for pattern in [] if isinstance(self.kind, str) else self.kind:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise LayoutError(
                    f"the context-parallel pattern {pattern!r} matches no attention module; correct or remove it. "
                    f"There are {', '.join(names[:3]) or 'none'}{' ...' if names[3:] else ''}."
                    + nearest(pattern, names)
                )
