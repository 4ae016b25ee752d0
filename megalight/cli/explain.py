"""Turns jsonargparse's errors into short messages with the key, its value, the rule and the nearest valid key."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megalight.cli.checks.files import is_text_of_a_mapping
from megalight.cli.verbs import TRAINER_VERBS as VERBS
from megalight.errors import nearest

_UNKNOWN = re.compile(
    r"(?:[Oo]ption '(?P<a>[^']+)' is not accepted|does not accept option '(?P<b>[^']+)'"
    r"|unrecognized arguments: --(?P<c>[^\s=]+))"
)
_VALUE = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<rule>.*)', re.DOTALL)
_MISSING = re.compile(
    r"(?:arguments? (?:is|are) required: |Key \"|Option ')(?P<keys>[\w., ]+?)(?:['\"] is required.*)?$"
)
_SUBTYPE = re.compile(r"<class '([\w.]+)'>")
_LITERAL = re.compile(r"Expected an? typing\.Literal\[(?P<choices>.*)\]$")
_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
_INIT_ARGS = re.compile(r"\.init_args(?=\.|$)")
_NOISE = (
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Does not validate",
    "Given value",
    "Subtypes:",
    "Errors:",
)


@dataclass(frozen=True)
class Given:
    """What the user wrote on the command line and in configuration files: dotted key -> value.

    Keys have no ``init_args``. A class is the value of the key it fills: ``trainer.strategy`` ->
    ``"MegatronStrategy"``, ``trainer.strategy.tensor_parallel`` -> ``2``.
    """

    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, words: Sequence[str]) -> Given:
        """Read the words after the verb. Unreadable files are skipped here; the parser itself reports them."""
        return cls({key: value for part in parts(words) for key, value in part.items()})

    def ending_in(self, key: str) -> list[str]:
        """Return the given keys that are ``key`` or end with ``.key``."""
        key = _short(key)
        return [name for name in self.values if name == key or name.endswith("." + key)]

    def owner(self, key: str) -> tuple[str, type | None]:
        """Return the longest prefix of ``key`` whose value is a class, and the class."""
        # The longest prefix wins: the innermost class knows its own arguments.
        parts = key.split(".")
        for end in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:end])
            name = self.values.get(prefix, self.last_of(prefix))
            if isinstance(name, str) and (found := find_class(name)):
                return prefix, found
        return "", None

    def last_of(self, prefix: str) -> Any:
        """Return the last entry of a list: on the command line, arguments of the list belong to it."""
        entries = [value for key, value in self.values.items() if re.fullmatch(re.escape(prefix) + r"\.\d+", key)]
        return entries[-1] if entries else None


def parts(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what each option of a command gives, in order: the values of a file, or one value."""
    for key, value in _options(words):
        if key in ("config", "c"):
            yield _flatten(_read_config(value))
        else:
            inner = _inner(key, value)
            yield {_short(key): value} if inner is None else _flatten(inner, _short(key))


def explain(message: str, given: Given, options: Iterable[str]) -> str:
    """Return one short message for a parse error.

    Args:
        message: the message of jsonargparse.
        given: what the user wrote.
        options: every key that the parser knows.
    """
    known = [_short(option) for option in options]
    # The parser has no code for its errors, so its texts are read. Tests hold them to its version.
    if match := _UNKNOWN.search(message):
        return _unknown_key(next(group for group in match.groups() if group), given, known)
    if match := _VALUE.search(message):
        return _bad_value(match["key"], match["rule"], given, known)
    if match := _MISSING.search(message):
        keys = [_missing_key(key.strip(), given) for key in match["keys"].split(",")]
        return missing(keys)
    return _plain(message)


def missing(keys: Iterable[str]) -> str:
    """Say that values are missing."""
    return f"missing: {', '.join(keys)}. Give each as --KEY=VALUE or in a file after -c."


def rules(message: str) -> list[str]:
    """Return the reasons inside a nested message of jsonargparse, without its dumps of types and values."""
    # Nested messages are indented by blanks and dashes.
    lines = [re.sub(r"^[\s-]+", "", line) for line in message.splitlines()]
    return list(dict.fromkeys(_plain(line) for line in lines if line and not line.startswith(_NOISE)))


def find_class(name: str) -> type | None:
    """Return the class of an import path or, for a bare name, the imported Lightning subclass with this name."""
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except (ImportError, ValueError):  # ".2" has an empty name of a module
            return None
        return found if isinstance(found, type) else None
    known = (cls for base in _bases() for cls in subclasses(base))
    return next((cls for cls in known if cls.__name__ == name), None)


def subclasses(base: type) -> Iterator[type]:
    """Yield all imported subclasses, at any depth."""
    below: list[type] = base.__subclasses__()
    for cls in below:
        yield cls
        yield from subclasses(cls)


def members(cls: type) -> dict[str, Any]:
    """Return constructor argument -> annotation. ``**kwargs`` adds the arguments of base classes."""
    if dataclasses.is_dataclass(cls):
        hints = _hints(cls)
        return {item.name: hints.get(item.name) for item in dataclasses.fields(cls) if item.init}
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        init = vars(base)["__init__"]
        parameters = inspect.signature(init).parameters
        hints = _hints(init)
        for name, parameter in list(parameters.items())[1:]:
            # Base classes come later in the order of `__mro__`, and must not replace an
            # argument that was overridden.
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(name, hints.get(name))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def _unknown_key(key: str, given: Given, known: list[str]) -> str:
    found = given.ending_in(key) or [name for name in given.values if f".{_short(key)}." in f".{name}."] or [key]
    # Other classes may well have an argument of this name.
    for full in found:
        prefix, name, choices, where = _first_bad(_short(full), given, known)
        if name not in choices:
            break
    if prefix not in given.values and given.last_of(prefix) is not None:
        where = f"{where}, the last of {prefix},"
    return unknown_key(f"{prefix}.{name}" if prefix else name, given.values.get(full), where, choices, known)


def unknown_key(key: str, value: Any, owner: str, choices: Collection[str], known: Iterable[str] = ()) -> str:
    """Say that a key does not exist.

    Args:
        key: the key, in full.
        value: its value, if there is one.
        owner: what has no such argument.
        choices: the arguments that it has.
        known: keys of the whole configuration. One that ends with the same name is suggested, before one that is
            spelled alike: for ``max_steps``, ``trainer.max_steps``.
    """
    name = key.rpartition(".")[2]
    shown = f" (value {str(value)!r})" if value is not None else ""
    listing = f" Known: {', '.join(sorted(choices))}." if choices and len(choices) <= 24 else ""
    # The one nearest to the top: ``model.config.num_layers``, not that of recompute.
    same = sorted((option for option in known if option.rpartition(".")[2] == name), key=lambda each: each.count("."))
    begun = [choice for choice in choices if choice.startswith(name)]  # ``seed``: ``seed_everything``
    better = [*begun, *same] if len(begun) == 1 else same
    hint = f" Did you mean {better[0]!r}?" if better else nearest(name, choices)
    return f"unknown key {key!r}{shown}: {owner} has no such argument.{hint}{listing}"


def _first_bad(key: str, given: Given, known: list[str]) -> tuple[str, str, list[str], str]:
    """Find the first part of a key that does not exist. Returns its prefix, the part, the valid parts, their owner."""
    prefix, cls = given.owner(key)
    parts = key[len(prefix) :].strip(".").split(".")
    for index, part in enumerate(parts):
        if cls is not None:
            choices: dict[str, Any] = members(cls)
            where = cls.__name__
        else:
            start = f"{prefix}." if prefix else ""
            choices = {name[len(start) :].partition(".")[0]: None for name in known if name.startswith(start)}
            where = f"{prefix!r}" if prefix else "the configuration"
        if part not in choices or index == len(parts) - 1:
            return prefix, part, [name for name in choices if name], where
        cls = _class_in(choices[part])
        prefix = f"{prefix}.{part}" if prefix else part
    return prefix, key, [], "the configuration"


def _bad_value(key: str, rule: str, given: Given, known: list[str]) -> str:
    full = _full_key(key, given, known)
    if "dot import path string: " in rule or "has no attribute" in rule or "No module named" in rule:
        return _unknown_class(full, rule, given)
    reasons = [re.sub(r"\.? Got value: .*", "", reason).rstrip(".") for reason in rules(rule)]
    choices = [choice for reason in reasons if (match := _LITERAL.match(reason)) for choice in _choices(match)]
    others = [re.sub(r"^Expected an? ", "", reason) for reason in reasons if not _LITERAL.match(reason)]
    expected = [*others, *([f"one of {', '.join(choices)}"] if choices else [])]
    return not_valid(full, given.values.get(full), ", or ".join(expected), choices)


def not_valid(key: str, value: Any, expected: str, choices: Iterable[str] = ()) -> str:
    """Say that a key has a value of another kind than expected, with the nearest of the choices."""
    shown = f"{key} = {str(value)!r}" if value is not None else key
    hint = nearest(str(value), choices) if value is not None else ""
    return f"{shown} is not valid; expected: {expected or 'see --help'}.{hint}"


def _choices(literal: re.Match[str]) -> list[str]:
    return [choice.strip(" '\"") for choice in literal["choices"].split(",")]


def _unknown_class(key: str, rule: str, given: Given) -> str:
    match = re.search(r"dot import path string: (\S+)|class_path '([^']+)'", rule)
    name = next(group for group in match.groups() if group) if match else str(given.values.get(key))
    reason = next((line for line in rules(rule) if "no attribute" in line or "No module" in line), "")
    bases = [base for path in _SUBTYPE.findall(rule) if "." in path and (base := find_class(path))]
    known = {cls.__name__: f"{cls.__module__}.{cls.__name__}" for base in bases for cls in subclasses(base)}
    hint = nearest(name.rpartition(".")[2], known)
    if "." in name:  # an import path is answered with one
        hint = re.sub("'(.*)'", lambda match: repr(known[match[1]]), hint)
    return no_class(key, name, reason, hint)


def no_class(key: str, name: str, reason: str, hint: str) -> str:
    """Say that a name means no class."""
    return (
        f"{key} = {name!r} names no known class{f' ({reason})' if reason else ''}.{hint} "
        "Give the name of an imported class, or its import path (package.module.Class)."
    )


def _full_key(key: str, given: Given, known: list[str]) -> str:
    """Complete a key that jsonargparse names relative to the innermost class."""
    key = _short(key)
    if found := given.ending_in(key):
        return found[0]
    return key if key in known else _missing_key(key, given)


def _missing_key(key: str, given: Given) -> str:
    """Complete a key that the user did not give: it belongs to the class that has this argument."""
    head = key.partition(".")[0]
    for prefix, value in given.values.items():
        if isinstance(value, str) and (cls := find_class(value)) and head in members(cls):
            return f"{prefix}.{key}"
    return key.partition(".")[2] if head in VERBS else key


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(words):
        if not _is_option(word):
            continue
        key, equals, value = word.lstrip("-").partition("=")
        following = words[index + 1] if index + 1 < len(words) else ""
        # `-c` may have its value behind it without a blank, and is the only short option that has one.
        if key.startswith("c") and not word.startswith("--") and key != "c":
            yield "c", word[2:]  # -cFILE
        else:
            yield key.rstrip("+"), value if equals or _is_option(following) else following


def _is_option(word: str) -> bool:
    """Whether argparse takes a word as an option: negative numbers, and words with spaces, are values."""
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word) and " " not in word.partition("=")[0]


def _read_config(value: str) -> Any:
    """Read a configuration: a file, or the text itself."""
    try:
        return yaml.safe_load(value if is_text_of_a_mapping(value) else Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def _inner(key: str, value: str) -> Any:
    """Return the mapping or list that a value holds, which may be that of a file for a whole section; else None."""
    is_file = "." not in key and value.endswith((".yaml", ".yml", ".json"))
    if not is_file and not any(mark in value for mark in ("{", "[", ":")):
        return None
    try:
        found = yaml.safe_load(Path(value).read_text(encoding="utf-8") if is_file else value)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, list | Mapping) else None


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, Mapping):
        return {prefix: node} if prefix else {}
    flat: dict[str, Any] = {}
    for name, value in node.items():
        # Keys with `+` append to a list, and are arguments like others.
        key = str(name).removesuffix("+")  # it appends to a list
        if key == "class_path":
            flat[prefix] = value
        elif key == "init_args":
            flat.update(_flatten(value, prefix))
        else:
            flat.update(_flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat


def _short(key: str) -> str:
    return _INIT_ARGS.sub("", key).removesuffix(".class_path")


def _plain(text: str) -> str:
    """Replace Python's repr of classes: ``<class 'int'>`` becomes ``int``."""
    return _SUBTYPE.sub(lambda match: match[1].rpartition(".")[2], text).strip()


def _hints(item: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(item)
    except (NameError, TypeError):  # annotations under TYPE_CHECKING, C functions
        return {}


def _class_in(annotation: Any) -> type | None:
    """Return the configurable class in an annotation: the annotation itself, or the first class of a union."""
    candidates = typing.get_args(annotation) or (annotation,)
    return next((item for item in candidates if isinstance(item, type) and item.__module__ != "builtins"), None)


def _bases() -> list[type]:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import CheckpointIO, Precision
    from lightning.pytorch.strategies import Strategy

    return [pl.LightningModule, pl.LightningDataModule, pl.Callback, Strategy, Logger, Precision, CheckpointIO]
