"""What the user wrote: the words of a command, and the files that they name, as dotted keys with their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megalight.cli.checks.files import is_text_of_a_mapping
from megalight.cli.classes import find_class

_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
_INIT_ARGS = re.compile(r"\.init_args(?=\.|$)")


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
        return cls({key: value for part in each_option(words) for key, value in part.items()})

    def ending_in(self, key: str) -> list[str]:
        """Return the given keys that are ``key`` or end with ``.key``."""
        key = short_key(key)
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


def each_option(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what each option of a command gives, in order: the values of a file, or one value."""
    for key, value in _options(words):
        if key in ("config", "c"):
            yield _flatten(_read_config(value))
        else:
            inner = _inner(key, value)
            yield {short_key(key): value} if inner is None else _flatten(inner, short_key(key))


def short_key(key: str) -> str:
    """Return a key without ``init_args`` and ``class_path``."""
    return _INIT_ARGS.sub("", key).removesuffix(".class_path")


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
        key = str(name).removesuffix("+")  # it appends to a list, and is a key like others
        if key == "class_path":
            flat[prefix] = value
        elif key == "init_args":
            flat.update(_flatten(value, prefix))
        else:
            flat.update(_flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat
