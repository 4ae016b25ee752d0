"""Messages about keys and values: the key, its value, the rule, and the nearest valid one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from megalight.errors import nearest
from megalight.migration import ours

if TYPE_CHECKING:
    from yaml import MarkedYAMLError


def unknown_key(key: str, value: Any, owner: str, choices: Collection[str], known: Iterable[str] = ()) -> str:
    """Say that a key does not exist.

    Args:
        key: the key, in full.
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


def not_yaml(path: str, text: str, error: MarkedYAMLError) -> str:
    """Say what is wrong with a line of a YAML file, and quote it.

    Args:
        path: the file.
        text: what it holds.
        error: what the reader of YAML said: where it stopped, and where what it was reading begins.
    """
    here, began, lines = error.problem_mark, error.context_mark, [*text.splitlines(), "", ""]
    problem, context = error.problem or "", error.context or ""
    if here is None:
        return f"{path} is not valid YAML: {problem}."
    line, advice = here.line, f"{problem}."
    if "'\\t'" in problem:
        advice = "it begins with a tab. Indent with spaces."
    elif "simple key" in context and began is not None:
        line, advice = began.line, "it has no ': '. Write key: value, with a space after the colon."
    elif "mapping values" in problem:
        advice = (
            "a key cannot stand there: the line above has a value already, or lacks its ': '. Check both, and their "
            "indentation."
        )
    elif context.startswith("while parsing a flow") and began is not None and began.line < here.line:
        advice = f"a bracket of line {began.line + 1} is not closed before it."
    elif context.startswith("while parsing a block") and began is not None and not lines[line][: here.column].strip():
        kind = "entries of the list" if "collection" in context else "keys of the section"
        others = f"the {kind} that begins in line {began.line + 1}"
        advice = (
            f"it begins in column {here.column + 1}, and {others} in column {began.column + 1}. "
            "Indent it as those that it belongs to."
            if here.column != began.column
            else f"it cannot stand beside {others}. Indent it below one of them, or end them."
        )
    quoted = f"{lines[line].strip()!r}: " if lines[line].strip() else ""
    return f"{path}, line {line + 1} is not valid YAML: {quoted}{advice}"
