"""The help page of every option (``--help-all``), from the same signatures against which commands are checked.

It is made from the source of the classes that the command names, so it takes no seconds and cannot be out of date.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalight.cli import signatures
from megalight.cli.config_args import each_option
from megalight.cli.schema import CHOICES, ROOT, descriptions, plain, proposed
from megalight.cli.signatures import SCALARS, Annotation, ClassSource, SourceArgument, find_class
from megalight.cli.unknown_keys import START, STRATEGY, Classes, named_classes
from megalight.cli.verbs import TRAINER_VERBS

# The options of a class and of the dataclasses in it, one by one, for help pages and for completion.


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


WIDTH = 110
DEFAULTS = {**START, "model": CHOICES["model"][0], "data": CHOICES["data"][0]}
"""Classes whose options are shown where the command names no other."""

OTHER_DEFAULTS = {STRATEGY: "megatron"}
"""Defaults of the command that are not those of the class."""

CONFIGURATION = {
    "config": "A recipe in YAML (short: -c); give several to stack them: later values win.",
    "print_config": "Print the complete configuration and stop.",
    **{key: rules.get("description", "") for key, rules in ROOT.items()},
}
"""Keys of the configuration itself -> what they mean."""

ONLY = {"verbose": ("validate", "test"), "return_predictions": ("predict",)}
"""Keys that not every verb takes -> the verbs that do."""


def page(verb: str, words: Sequence[str]) -> str:
    """Return the page.

    Args:
        verb: ``fit``, ``validate``, ``test`` or ``predict``.
        words: the other words of the command. Options of the classes that they name are shown.
    """
    classes: Classes = {key: find_class(path) for key, path in DEFAULTS.items()}
    for part in each_option(words):
        classes |= named_classes(part, classes)
    lines = [
        f"usage: megalight {verb} -c FILE [-c FILE ...] [--KEY=VALUE ...]",
        "",
        f"{TRAINER_VERBS[verb].capitalize()}. Every option, with its kind and its default. In a file, dots are levels:",
        "--trainer.max_steps=10 is `trainer: {max_steps: 10}`.",
        "",
        "configuration:",
    ]
    for key, meaning in CONFIGURATION.items():
        if verb in ONLY.get(key, (verb,)):
            lines += _entry(f"--{key}", meaning)
    for key in ("trainer", STRATEGY, "model", "data"):
        lines += _section(verb, key, classes[key])
    for key in CHOICES:
        lines += _choices(verb, key)
    lines += ["", "docs/commands.md explains; megalight schema prints the same for editors."]
    return "\n".join(lines)


def page_of_class(verb: str, words: Sequence[str]) -> str | None:
    """Return the options of the class that ``--KEY.help NAME`` or ``--KEY.help=NAME`` asks for, if any word does.

    Without a name, they are those of the default. None also where the source does not say: the parser must answer.
    """
    for index, word in enumerate(words):
        key, equals, name = word.removeprefix("--").partition("=")
        key = key.removesuffix(".help")
        if not word.startswith("--") or f"--{key}.help{equals}{name}" != word or key not in CHOICES:
            continue
        following = words[index + 1] if index + 1 < len(words) else ""
        asked = name if equals else "" if following.startswith("-") else following
        source = named_classes({key: asked}, {}).get(key) if asked else find_class(DEFAULTS.get(key, ""))
        if source is not None and signatures.members(source) is not None:
            return "\n".join([*_section(verb, key, source)][1:])
    return None


def _section(verb: str, key: str, source: ClassSource | None) -> Iterator[str]:
    """Yield the options of one class."""
    yield ""
    if source is None or signatures.members(source) is None:
        yield f"{key}: the source of its class does not list the options. Type: megalight {verb} --{key}.help CLASS"
        return
    yield f"{key}: {source.name}. {plain(source.summary)}"
    for option in options(key, source):
        default = OTHER_DEFAULTS.get(option.key, option.written.default)
        said = option.description
        # Lightning's descriptions end with it.
        told = default in ("", "None") or "Default:" in said
        yield from _entry(f"--{option.key}={option.kind}", said if told else f"{said} (default: {default})".strip())


def _choices(verb: str, key: str) -> Iterator[str]:
    """Yield the classes that a key may name."""
    yield ""
    yield f"classes for {key} (their options: megalight {verb} --{key}.help NAME):"
    for source in proposed(CHOICES[key]).values():
        yield from _entry(source.name, plain(source.summary))


def _entry(head: str, text: str) -> list[str]:
    """Return one option or class, and its meaning below it."""
    return [f"  {head}", *textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
