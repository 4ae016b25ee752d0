"""Reference pages of the documentation's site, made from the code each time the site is built.

Names, types and defaults come from signatures and parsers, meanings from docstrings. The metrics are those that the
``Logs:`` sections of docstrings list.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import griffe

Rows = list[tuple[str, str, str, str]]


def pages() -> dict[str, str]:
    """Return the path and the text of each page."""
    from megalight import callbacks, loggers, optim
    from megalight.data.bert.module import BertDataModule
    from megalight.data.gpt.module import GPTDataModule
    from megalight.models.family import families
    from megalight.models.module import MegalightModule
    from megalight.strategies import (
        MegatronFSDPStrategy,
        MegatronStrategy,
        MegatronTowersStrategy,
    )

    ours = [getattr(callbacks, name) for name in callbacks.__all__]
    modules = [family.module() for family in families()]
    schedules = [cls for cls in vars(optim).values() if isinstance(cls, type) and cls.__module__.endswith("schedules")]
    return {
        "reference/trainer.md": _page("Keys of the commands", _parser_of_fit()),
        "reference/strategies.md": _page(
            "Options of the strategies",
            _classes(
                [MegatronStrategy, MegatronFSDPStrategy, MegatronTowersStrategy],
                "trainer.strategy",
            ),
        ),
        "reference/models.md": _page(
            "Keys of models and data",
            [
                *_classes(modules, "model"),
                *_classes([GPTDataModule, BertDataModule], "data"),
                *_classes(schedules, "model.optimizer.schedule"),
            ],
        ),
        "reference/callbacks.md": _page(
            "Every callback", [*_classes(ours), *_classes([loggers.JSONLogger], "trainer.logger")]
        ),
        "reference/commands.md": _page("Options of the other commands", _verbs()),
        "reference/metrics.md": _page("Every metric", _metrics([MegatronStrategy, MegalightModule, *ours])),
    }


def _page(title: str, parts: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", "Made from the code when this site was built.", *parts]) + "\n"


# ---------------------------------------------------------------------------------------------------------- arguments


def keys(cls: type, prefix: str = "", around: tuple[type, ...] = ()) -> Iterator[tuple[str, type]]:
    """Yield every key below a class, and the class that it is an argument of. Dataclasses are entered.

    A class inside its own kind (one of the classes ``around`` it) has the same keys again, which are left out.
    """
    for name, annotation in parameters(cls).items():
        key = f"{prefix}.{name}" if prefix else name
        yield key, cls
        nested = nested_class(annotation)
        if nested is not None and nested not in (*around, cls):
            yield from keys(nested, key, (*around, cls))


def parameters(cls: type) -> dict[str, Any]:
    """Return argument -> annotation, without what Lightning's Trainer passes to strategies itself."""
    from lightning.pytorch.strategies import Strategy

    from megalight.cli.config_args import members

    passed = members(Strategy) if issubclass(cls, Strategy) else {}
    passed |= dict.fromkeys(("parallel_devices", "cluster_environment") if passed else ())
    return {name: annotation for name, annotation in members(cls).items() if name not in passed}


def nested_class(annotation: Any) -> type | None:
    """Return our dataclass in an annotation, whose fields are keys too."""
    for choice in typing.get_args(annotation) or (annotation,):
        if dataclasses.is_dataclass(choice) and isinstance(choice, type) and choice.__module__.startswith("megalight."):
            return choice
    return None


def _classes(classes: Iterable[type], prefix: str = "") -> Iterator[str]:
    for cls in classes:
        yield f"## {cls.__name__}"
        yield _summary(cls)
        yield from _arguments(cls, prefix, shown=set())


def _arguments(cls: type, prefix: str, shown: set[type]) -> Iterator[str]:
    """Yield the table of a class, and then those of the dataclasses in it, each with the prefix of its keys."""
    nested: list[tuple[str, type]] = []
    rows: Rows = []
    meanings, defaults = _meanings(cls), _defaults(cls)
    for name, annotation in parameters(cls).items():
        inner = nested_class(annotation)
        meaning = meanings.get(name) or (_summary(inner) if inner is not None else "")
        rows.append((name, _type(annotation), _default(defaults.get(name)), meaning))
        if inner is not None and inner not in shown:
            shown.add(inner)
            nested.append((f"{prefix}.{name}" if prefix else name, inner))
    yield _table(rows) if rows else "It takes no arguments."
    for key, inner in nested:
        yield f"### {key}"
        yield _summary(inner)
        yield from _arguments(inner, key, shown)


def _meanings(cls: type) -> dict[str, str]:
    """Return argument -> meaning from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for text in (base.__doc__, vars(base)["__init__"].__doc__ if "__init__" in vars(base) else None):
            for section in _sections(text):
                if section.kind in (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters):
                    for entry in section.value:
                        # of "a, b: meaning", griffe reads "a," as the name and "b" as its type
                        others = str(entry.annotation).split(", ") if entry.name.endswith(",") else []
                        found |= dict.fromkeys([entry.name.rstrip(","), *others], _plain(entry.description))
    return found


def _sections(text: str | None) -> list[Any]:
    return griffe.Docstring(inspect.cleandoc(text or "")).parse("google", warnings=False)


def _defaults(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items():
                found.setdefault(name, parameter.default)
    return found


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "**required**"
    if value is None:
        return ""
    if hasattr(value, "class_path"):
        return f"`{value.class_path.rpartition('.')[2]}`"
    if isinstance(value, str | bool | int | float | tuple | list | dict):
        return f"`{value}`"
    return "its own defaults" if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" else f"`{type(value).__name__}`"


def _type(annotation: Any) -> str:
    """Return an annotation in words: ``int or none``."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "none"
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type, inner))
    if isinstance(annotation, type) and origin is None:
        return annotation.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(annotation)).replace(" | ", " or ").replace("NoneType", "none")


# ------------------------------------------------------------------------------------------------------------ parsers


def _parser_of_fit() -> Iterator[str]:
    yield (
        "Of `megalight fit`, `validate`, `test` and `predict`. The keys below `trainer.strategy`, `model`, `data` and "
        "those of callbacks follow from the class that you choose: see the other pages of this part."
    )
    rows: Rows = []
    for action in parser_of_fit()._actions:
        if action.help != argparse.SUPPRESS and "." + action.dest.rpartition(".")[2] != ".help":
            default = "" if action.default is argparse.SUPPRESS else _default(action.default)
            kind = getattr(action, "_typehint", action.type)
            rows.append((action.dest, "" if kind is None else _type(kind), default, _first_sentence(action.help)))
    yield _table(rows)


def parser_of_fit() -> Any:
    """Return the parser of ``megalight fit``."""
    from megalight.cli.lightning import MegalightCLI

    class Made(Exception):
        """Stops the command as soon as its parsers are there."""

    class Parsers(MegalightCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise Made(self._subcommand_parsers["fit"])

    try:
        Parsers(args=["fit"])
    except Made as made:
        return made.args[0]


def _verbs() -> Iterator[str]:
    from megalight.cli.verbs import VERBS, load

    for name in VERBS:
        verb = load(name)
        parser = argparse.ArgumentParser(add_help=False)
        verb.add_arguments(parser)
        yield f"## megalight {name}"
        line = verb.DESCRIPTION.splitlines()[0]
        yield f"{line[0].upper()}{line[1:]}."
        yield _table(
            [
                (
                    ", ".join(action.option_strings) or str(action.metavar or action.dest).lower(),
                    ", ".join(f"`{choice}`" for choice in action.choices or ()),
                    "" if action.default in (None, False, argparse.SUPPRESS) else f"`{action.default}`",
                    ((action.help or "") % {**vars(action), "prog": f"megalight {name}"}).replace("<", "&lt;"),
                )
                for action in parser._actions
                if action.help != argparse.SUPPRESS
            ]
        )


# ------------------------------------------------------------------------------------------------------------ metrics


def metrics(cls: type) -> dict[str, str]:
    """Return metric -> meaning from the ``Logs:`` section of a class. ``<...>`` stands for a part that varies."""
    found = {}
    for section in _sections(cls.__doc__):
        if section.kind is griffe.DocstringSectionKind.admonition and section.title == "Logs":
            entries = re.findall(r"^(\S.*?): ((?:.|\n(?=\s))+)", section.value.description, re.MULTILINE)
            found |= {name.strip("`"): _plain(text) for name, text in entries}
    return found


def _metrics(classes: Iterable[type]) -> Iterator[str]:
    yield "`<...>` stands for a part of the name that varies. Names end with their unit."
    for cls in classes:
        if rows := metrics(cls):
            yield f"## {cls.__name__}"
            lines = [f"| `{name}` | {_cell(text)} |" for name, text in rows.items()]
            yield "\n".join(["| metric | meaning |", "| --- | --- |", *lines])


# -------------------------------------------------------------------------------------------------------------- words


def _table(rows: Rows) -> str:
    lines = [f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(text)} |" for name, kind, default, text in rows]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *lines])


def _cell(text: str) -> str:
    """Return one line of text for a table. A ``|`` inside code needs no mark."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if index % 2 else part.replace("|", "\\|") for index, part in enumerate(parts))


def _plain(text: str | None) -> str:
    """Turn the marks of docstrings into those of Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text or "")
    parts = text.replace("``", "`").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _summary(cls: type) -> str:
    return _plain(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0])


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", _plain(text).strip(), maxsplit=1)[0]
