"""Turn jsonargparse's errors into short messages with the key, its value, the rule and the nearest valid key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from inspect import isabstract
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from megalight.cli.config_args import ConfigArgs, class_in, find_class, members, short_key, subclasses
from megalight.cli.verbs import TRAINER_VERBS as VERBS
from megalight.errors import nearest
from megalight.migration import ours

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
OTHER_BASE = re.compile(r"Import path (?:\S+ )?does not correspond to a subclass of ")
"""Begins lines about types that a class is not of."""
_NO_CLASS = re.compile(r"Not a valid subclass of (\w+)\.?$")
MAX_LISTED = 12
"""Classes that a message lists, if none is spelled like the given one."""

_FORM = r"class_path, which names a subclass of \1, and beside it nothing but init_args"
_ELSEWHERE = {
    "AdamConfig": " Muon is one of them: --model.optimizer.muon.lr=VALUE. For another optimizer, return it from "
    "configure_optimizers in a subclass of the module."
}
"""Class of settings -> what to do for what it does not set."""
_NOISE = (
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Does not validate",
    "Given value",
    "Subtypes:",
    "Errors:",
    "Subclass types expect",
    "a class path (str)",
    "a dict with",
)


def explain(message: str, given: ConfigArgs, options: Iterable[str]) -> str:
    """Return one short message for a parse error.

    Args:
        options: every key that the parser knows.
    """
    known = [short_key(option) for option in options if not option.endswith("help")]
    # The parser has no code for its errors, so its texts are read. Tests hold them to its version.
    if match := _UNKNOWN.search(message):
        if (match["b"] or "").startswith(("init_args", "class_path")):
            return (
                f"{match['b'].partition('.')[0]} stands at the top level of the file. Indent it below the section that "
                "it belongs to, such as model: or data:."
            )
        return _unknown_key(next(group for group in match.groups() if group), given, known)
    if match := _VALUE.search(message):
        return _bad_value(match["key"], match["rule"], given, known)
    stray = message.partition("unrecognized arguments: ")[2].split()
    if stray and stray[0].endswith((".yaml", ".yml", ".json")):
        return f"unknown argument {stray[0]!r}. A configuration file comes after -c: -c {stray[0]}"
    if match := _MISSING.search(message):
        keys = [_missing_key(key.strip(), given) for key in match["keys"].split(",")]
        return missing(keys)
    return _plain(message)


def unknown_key(key: str, value: Any, owner: str, choices: Collection[str], known: Iterable[str] = ()) -> str:
    """Say that a key does not exist.

    Args:
        value: its value, if there is one.
        owner: what has no such argument.
        choices: the arguments that it has.
        known: keys of the whole configuration. One is named that another program calls so, or ends with the same
            name, before one that is spelled alike: for ``train-iters`` and ``max_steps``, ``trainer.max_steps``.
    """
    known = [*known]
    name = key.rpartition(".")[2]
    shown = f" (value {str(value)!r})" if value not in (None, "") else ""
    unknown = f"unknown key {key!r}{shown}: {owner} has no such argument."
    if (meant := ours(name, [*known, *choices])) is not None:
        return f"{unknown} Here it is {meant}."
    listing = f" Known: {', '.join(sorted(choices))}." if choices and len(choices) <= 24 else ""
    name = name.replace("-", "_")  # flags of other programs have dashes
    # The one nearest to the top: ``model.config.num_layers``, not that of recompute.
    same = sorted((option for option in known if option.rpartition(".")[2] == name), key=lambda each: each.count("."))
    begun = [choice for choice in choices if choice.startswith(name)]  # ``seed``: ``seed_everything``
    better = [*begun, *same] if len(begun) == 1 else same
    hint = f" Did you mean {better[0]!r}?" if better else nearest(name, choices)
    return f"{unknown}{hint}{listing}"


def not_valid(key: str, value: Any, expected: str, choices: Iterable[str] = ()) -> str:
    """Say that a key has a value of another kind than expected, with the nearest of the choices."""
    shown = f"{key} = {str(value)!r}" if value is not None else key
    hint = nearest(str(value), choices) if value is not None else ""
    return f"{shown} is not valid; expected: {expected or 'see --help'}.{hint}"


def no_class(key: str, name: str, reason: str, hint: str) -> str:
    """Say that a name means no class."""
    return (
        f"{key} = {name!r} names no known class{f' ({reason})' if reason else ''}.{hint} "
        "Give the name of an imported class, or its import path (package.module.Class)."
    )


def missing(keys: Iterable[str]) -> str:
    """Say that values are missing."""
    keys = [*keys]
    # Lightning's loggers have no folder of their own; those that go by name take the run's.
    named = " Or name the logger: --trainer.logger=csv, json or tensorboard write under trainer.default_root_dir."
    hint = named if "trainer.logger.save_dir" in keys else ""
    return f"missing: {', '.join(keys)}. Give each as --KEY=VALUE or in a file after -c.{hint}"


def rules(message: str) -> list[str]:
    """Return the reasons inside a nested message of jsonargparse, without its dumps of types and values."""
    # Nested messages are indented by blanks and dashes.
    lines = [re.sub(r"^[\s-]+", "", line) for line in message.splitlines()]
    return list(dict.fromkeys(_plain(line) for line in lines if line and not line.startswith(_NOISE)))


def _unknown_key(key: str, given: ConfigArgs, known: list[str]) -> str:
    found = given.ending_in(key) or [name for name in given.values if f".{short_key(key)}." in f".{name}."] or [key]
    # Other classes may well have an argument of this name.
    for full in found:
        prefix, name, choices, where = _first_bad(short_key(full), given, known)
        if name not in choices:
            break
    if prefix not in given.values and given.last_of(prefix) is not None:
        where = f"{where}, the last of {prefix},"
    key, every = f"{prefix}.{name}" if prefix else name, [*known, *given.known_keys()]
    return unknown_key(key, given.values.get(full), where, choices, every)


def _first_bad(key: str, given: ConfigArgs, known: list[str]) -> tuple[str, str, list[str], str]:
    """Find the first part of a key that does not exist. Returns its prefix, the part, the valid parts, their owner."""
    prefix, cls = given.owner(key)
    parts = key[len(prefix) :].strip(".").split(".")
    for index, part in enumerate(parts):
        if cls is not None:
            choices: dict[str, Any] = members(cls)
            where = "'trainer'" if prefix == "trainer" else cls.__name__
        else:
            start = f"{prefix}." if prefix else ""
            choices = {name[len(start) :].partition(".")[0]: None for name in known if name.startswith(start)}
            where = f"{prefix!r}" if prefix else "the configuration"
        if part not in choices or index == len(parts) - 1:
            return prefix, part, [name for name in choices if name], where
        cls = class_in(choices[part])
        prefix = f"{prefix}.{part}" if prefix else part
    return prefix, key, [], "the configuration"


def _bad_value(key: str, rule: str, given: ConfigArgs, known: list[str]) -> str:
    full = _full_key(key, given, known)
    if (settings := _settings(rule)) is not None:
        return _no_settings(full, given.values.get(full), settings)
    if "dot import path string: " in rule or "has no attribute" in rule or "No module named" in rule:
        return _unknown_class(full, rule, given)
    reasons = [re.sub(r"\.? Got value: .*", "", reason).rstrip(".") for reason in rules(rule)]
    reasons = [_NO_CLASS.sub(_FORM, OTHER_BASE.sub("a subclass of ", reason)) for reason in reasons]
    choices = [choice for reason in reasons if (match := _LITERAL.match(reason)) for choice in _choices(match)]
    others = [re.sub(r"^Expected an? ", "", reason) for reason in reasons if not _LITERAL.match(reason)]
    expected = [*others, *([f"one of {', '.join(choices)}"] if choices else [])]
    return not_valid(full, given.values.get(full), ", or ".join(expected), choices)


def _settings(rule: str) -> type | None:
    """Return the class of settings that a key holds, if a class or a bare word was given instead of them."""
    if "dot import path string: " not in rule and "Subclasses are disabled" not in rule:
        return None
    bases = [find_class(path) for path in _SUBTYPE.findall(rule) if "." in path]
    return next((base for base in bases if base and dataclasses.is_dataclass(base) and not [*subclasses(base)]), None)


def _no_settings(key: str, value: Any, settings: type) -> str:
    names = [*members(settings)]
    return (
        f"{not_valid(key, value, f'the arguments of {settings.__name__}, no name and no class')} They are "
        f"{', '.join(names)}: --{key}.{names[0]}=VALUE.{_ELSEWHERE.get(settings.__name__, '')}"
    )


def _choices(literal: re.Match[str]) -> list[str]:
    return [choice.strip(" '\"") for choice in literal["choices"].split(",")]


def _unknown_class(key: str, rule: str, given: ConfigArgs) -> str:
    match = re.search(r"dot import path string: (\S+)|class_path '([^']+)'", rule)
    name = next(group for group in match.groups() if group) if match else str(given.values.get(key))
    if key == "trainer.strategy" and name.lower() in StrategyRegistry:
        return (
            f"{key} = {name!r} is a name that takes no arguments. Give a class, such as DDPStrategy, FSDPStrategy or "
            "MegatronStrategy, which takes its own."
        )
    reason = next((line for line in rules(rule) if "no attribute" in line or "No module" in line), "")
    bases = [base for path in _SUBTYPE.findall(rule) if "." in path and (base := find_class(path))]
    known = {
        cls.__name__: f"{cls.__module__}.{cls.__name__}"
        for base in bases
        for cls in subclasses(base)
        if not isabstract(cls)
    }
    listed = f" Known: {', '.join(sorted(known))}." if 0 < len(known) <= MAX_LISTED else ""
    hint = nearest(name.rpartition(".")[2], known) or listed
    if "." in name:  # an import path is answered with one
        hint = re.sub("'(.*)'", lambda match: repr(known[match[1]]), hint)
    return no_class(key, name, reason, hint)


def _full_key(key: str, given: ConfigArgs, known: list[str]) -> str:
    """Complete a key that jsonargparse names relative to the innermost class."""
    key = short_key(key)
    if found := given.ending_in(key):
        return found[0]
    return key if key in known else _missing_key(key, given)


def _missing_key(key: str, given: ConfigArgs) -> str:
    """Complete a key that the user did not give: it belongs to the class that has this argument."""
    head = key.partition(".")[0]
    for prefix, value in given.values.items():
        if isinstance(value, str) and (cls := find_class(value)) and head in members(cls):
            return f"{prefix}.{key}"
    return key.partition(".")[2] if head in VERBS else key


def _plain(text: str) -> str:
    """Replace Python's repr of classes: ``<class 'int'>`` becomes ``int``."""
    return _SUBTYPE.sub(lambda match: match[1].rpartition(".")[2], text).strip()
