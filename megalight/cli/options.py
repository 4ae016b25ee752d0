"""The options of a class and of the dataclasses in it, one by one, for help pages and for completion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalight.cli import signatures
from megalight.cli.annotations import SCALARS, Annotation
from megalight.cli.schema import descriptions
from megalight.cli.signatures import SourceArgument
from megalight.cli.sources import ClassSource


@dataclass(frozen=True)
class Option:
    """One key of the configuration.

    Attributes:
        key: the dotted key.
        accepted: what it accepts, as far as the source says.
        written: its annotation and its default, as they are written.
        description: what the docstring says about it; may be empty.
    """

    key: str
    accepted: Annotation
    written: SourceArgument
    description: str

    @property
    def kind(self) -> str:
        """What may stand after ``=``, short: ``int``, ``auto|off``, ``int|auto|null``; else the annotation."""
        if not self.accepted.complete or self.accepted.source is not None:
            return self.written.annotation
        scalars = [name for name, kind in SCALARS.items() if kind in self.accepted.scalars]
        words = [*scalars, *map(str, self.accepted.choices), *["null"] * self.accepted.optional]
        return "|".join(dict.fromkeys(words))


def options(prefix: str, source: ClassSource, above: tuple[ClassSource, ...] = ()) -> Iterator[Option]:
    """Yield the options of a class, each followed by those of the dataclass that it takes.

    Other classes are chosen by their path, and which one is not known here.

    Args:
        prefix: the key that the class fills.
        source: the class.
        above: classes that hold this one. A class may have one of its own kind in it: of that one the key is enough.
    """
    said, written = descriptions(source), signatures.written(source)
    for name, accepted in (signatures.members(source) or {}).items():
        key = f"{prefix}.{name}"
        yield Option(key, accepted, written.get(name, SourceArgument()), said.get(name, ""))
        inner = accepted.source
        if inner is not None and inner.is_dataclass and inner not in (*above, source):
            yield from options(key, inner, (*above, source))
