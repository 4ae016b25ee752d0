"""Configuration files, checked before anything heavy is imported, so that a mistake in one is an error of a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megalight.cli.messages import not_yaml
from megalight.errors import ConfigurationError

FLAGS = ("-c", "--config")


def check_files(words: Sequence[str]) -> None:
    """Check every file after ``-c`` in the words of a command.

    Raises:
        ConfigurationError: a file is missing, is not text or not YAML, is not a mapping, or has a key twice.
    """
    for value in given(words):
        if not is_text_of_a_mapping(value):
            read(value)


def given(words: Sequence[str]) -> Iterator[str]:
    """Yield the values of ``-c FILE``, ``-c=FILE``, ``--config FILE`` and ``--config=FILE``."""
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            if not equals and index + 1 == len(words):
                raise ConfigurationError(f"{flag} needs a file: {flag} recipe.yaml")
            # The word after the flag, which is a value whatever it looks like.
            yield value if equals else words[index + 1]


def read(path: str) -> dict[str, Any]:
    """Return the mapping of a YAML file.

    Raises:
        ConfigurationError: see :func:`check_files`; the message names the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text (byte {error.start}); after -c, give a YAML file.") from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {path}: {error.strerror}.") from error
    try:
        # Composed, not loaded: nodes know their lines, and show a key that stands twice.
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            raise ConfigurationError(f"{path} is empty; after -c, give a file with keys such as trainer, model, data.")
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            raise ConfigurationError(
                f"{path} holds {kind}; a configuration file is a mapping with keys such as trainer, model, data."
            )
        _check_keys(node, path)
        # Loaded from the text again: the checked nodes have been through no merge of `<<`.
        return dict(yaml.safe_load(text))
    except yaml.MarkedYAMLError as error:
        raise ConfigurationError(not_yaml(path, text, error)) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}.") from error


def _check_keys(node: yaml.Node, path: str, prefix: str = "") -> None:
    """Refuse a key that stands twice in one mapping: YAML readers would keep the last one silently."""
    # Numbered, so that a message can name the entry of a list.
    if isinstance(node, yaml.SequenceNode):
        for number, entry in enumerate(node.value):
            _check_keys(entry, path, f"{prefix}{number}.")
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        # `<<` merges another mapping, and may do so several times.
        if name in lines and name != "<<":
            raise ConfigurationError(
                f"{path}, line {line}: the key {prefix + name!r} stands there already, in line {lines[name]}. "
                "Remove one of them."
            )
        lines[name] = line
        _check_keys(value, path, f"{prefix}{name}.")


def is_text_of_a_mapping(value: str) -> bool:
    """Whether a value of ``-c`` is the configuration itself, which jsonargparse takes too."""
    return value.lstrip().startswith("{") or "\n" in value
