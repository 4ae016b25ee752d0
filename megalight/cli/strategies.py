"""Strategies on the command line: registered names of our strategies take arguments like their classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import get_loader, set_dumper, set_loader
from lightning.pytorch.strategies import StrategyRegistry
from yaml import SafeDumper, YAMLError, dump

from megalight.strategies import MegatronStrategy

MODE = "megalight"
"""jsonargparse's name for our way to read a configuration."""

FLAG = "--trainer.strategy"


def _written_out(kind: type) -> dict[str, Any]:
    return {"class_path": f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}"}


DEFAULT = _written_out(MegatronStrategy)


def of_name(name: Any) -> dict[str, Any] | None:
    """Return the class and arguments that a registered name stands for; None if it is none of ours."""
    known = isinstance(name, str) and name.lower() in StrategyRegistry
    entry = StrategyRegistry[name.lower()] if known else {}  # its method `get` would make a strategy
    kind = entry.get("strategy")
    if not isinstance(kind, type) or not issubclass(kind, MegatronStrategy):
        return None
    return {**_written_out(kind), "init_args": dict(entry["init_params"])}


def in_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with ``--trainer.strategy=megatron`` written out."""
    flag = ""
    for word in words:
        # The value may follow its flag as a word of its own.
        if word == FLAG:
            flag = word
            continue
        before, _, value = f"{flag}={word}".partition("=") if flag else word.partition("=")
        found = of_name(value) if before == FLAG else None
        if found is None:
            yield from [flag, word] if flag else [word]
        else:
            yield f"{FLAG}={found['class_path']}"
            yield from (f"{FLAG}.{name}={value}" for name, value in found["init_args"].items())
        flag = ""
    if flag:
        yield flag


def _load(text: str) -> Any:
    """Read a configuration file, or a value, and write out ``trainer: {strategy: megatron}``."""
    value = get_loader("yaml")(text)
    trainer = value.get("trainer") if isinstance(value, dict) else None
    if isinstance(trainer, dict) and (found := of_name(trainer.get("strategy"))):
        # In place of the name, so that later arguments of the strategy find its class.
        return {**value, "trainer": {**trainer, "strategy": found}}
    return value


class _Dumper(SafeDumper):
    """Writes strings of other types as strings, such as members of an Enum: Lightning has some as defaults."""


_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))
set_loader(MODE, _load, exceptions=(YAMLError,))
set_dumper(MODE, lambda data: dump(data, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False))
