"""Unknown keys and degrees that do not divide the devices, found before torch is imported.

Keys are compared with the arguments in the source of the classes (:mod:`megalight.cli.signatures`). Nothing else is
checked here: a value is validated once, where it is used first, and :mod:`megalight.cli.explain` words the error.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megalight.cli import signatures
from megalight.cli.config_args import each_option
from megalight.cli.signatures import ClassSource, find_class, find_module, read_word
from megalight.errors import ConfigurationError, nearest
from megalight.migration import ours
from megalight.parallel.degrees import check_world_size


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


MODULES = (
    "megalight.models.gpt",
    "megalight.models.hf",
    "megalight.models.bert",
    "megalight.models.vlm",
    "megalight.models.eagle",
    "megalight.data.gpt.module",
    "megalight.data.bert.module",
    "megalight.data.chat.module",
    "megalight.data.multimodal.module",
    "megalight.data.streaming.module",
    "megalight.rl.data",
    "megalight.rl.module",
    "megalight.strategies",
    "megalight.optim",
    "megalight.callbacks",
    "megalight.loggers",
    "megalight.plugins.precision",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.plugins.environments",
    "lightning.pytorch.strategies",
)
"""Where classes are found by their bare names. The parser knows more; it decides about those."""

STRATEGY = "trainer.strategy"
START = {"trainer": "megalight.cli.trainer.MegalightTrainer", STRATEGY: "megalight.strategies.MegatronStrategy"}
"""Classes that nobody needs to name."""

STRATEGIES = {
    "megatron": START[STRATEGY],
    "megatron_fsdp": "megalight.strategies.MegatronFSDPStrategy",
    "megatron_towers": "megalight.strategies.MegatronTowersStrategy",
}
"""Registered names of strategies -> their classes."""

ROOT = (
    *("config", "print_config", "trainer", "model", "data", "ckpt_path", "seed_everything"),
    *("weights_only", "verbose", "return_predictions"),
)
"""Keys of the configuration itself, for any verb."""

LISTS = ("trainer.callbacks", "trainer.logger", "trainer.plugins")
"""Keys of several classes. A class that is named there later is another one, and takes nothing from those before it."""

Classes = dict[str, ClassSource | None]


def check(verb: str, words: Sequence[str]) -> None:
    """Check the words after the verb.

    Raises:
        ConfigurationError: a key does not exist.
        LayoutError: the parallel degrees do not divide the number of devices.
    """
    if os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() in ("true", "1"):
        return  # values and classes may be in environment variables, which only the parser reads
    find_module.cache_clear()  # files may have changed since an earlier command of this process
    classes: Classes = {key: find_class(path) for key, path in START.items()}
    values: dict[str, Any] = {}
    # In order: a later class or value replaces an earlier one, as it does for the parser.
    for part in each_option(words):
        found = named_classes(part, classes)
        # With a class go those of its arguments: the next one may take others by the same names.
        classes = {key: source for key, source in classes.items() if not any(key.startswith(f"{k}.") for k in found)}
        classes |= found
        for key, value in part.items():
            _check(key, value, classes, verb)
        replaced = {above for key in part for above in _above(key)}  # ``strategy: a`` by ``strategy: {a: 1, b: 2}``
        values = {key: value for key, value in values.items() if key not in replaced} | part
    # Nothing is run then, so the values need not fit together.
    if not any(key.partition("=")[0] == "print_config" for key in values):
        _check_degrees(values, classes.get(STRATEGY))


def _check_degrees(values: Mapping[str, Any], strategy: ClassSource | None) -> None:
    """Check that the parallel degrees divide the number of devices, where the command says it as a number."""
    # Towers have degrees of their own.
    if strategy is None or strategy.name not in ("MegatronStrategy", "MegatronFSDPStrategy"):
        return
    nodes, devices = (read_word(values.get(f"trainer.{name}", 1)) for name in ("num_nodes", "devices"))
    names = [*inspect.signature(check_world_size).parameters][1:]
    given = {name: read_word(values.get(f"{STRATEGY}.{name}", 1)) for name in names}
    numbers = (nodes, devices, *given.values())
    if "trainer.devices" in values and all(type(number) is int and number > 0 for number in numbers):
        check_world_size(devices * nodes, **given)


def named_classes(part: Mapping[str, Any], before: Mapping[str, ClassSource | None]) -> Classes:
    """Return the classes that values name; None for a class that cannot be read."""
    found: Classes = {}
    for key, value in part.items():
        if not isinstance(value, str):
            continue
        name = STRATEGIES.get(value.lower(), value) if key == STRATEGY else value
        source = find_class(name, MODULES) if name.replace(".", "").isidentifier() else None
        if (
            source is not None
            or key in before
            or key in ("model", "data", *LISTS)
            or any(k.startswith(f"{key}.") for k in part)
        ):
            found[key] = source
    # An entry of a list has a class of its own. That of the list would say nothing about it.
    lists = {above for key in part for above in _above(key) if key[len(above) + 1 :].partition(".")[0].isdigit()}
    return dict.fromkeys(lists & {*before}) | found


def _above(key: str) -> list[str]:
    """Return the keys that hold a key: ``a.b.c`` -> ``a``, ``a.b``."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _check(key: str, value: Any, classes: Mapping[str, ClassSource | None], verb: str) -> None:
    """Follow the parts of a key through the arguments of classes, as far as these are known."""
    if key.partition(".")[0] not in ROOT:
        _refuse(verb, unknown_key(key.partition(".")[0], value, "the configuration", ROOT, _all(classes)))
    prefix = key
    # The longest prefix with a known class decides. Without one the parser must.
    while (prefix := prefix.rpartition(".")[0]) not in classes:
        if not prefix:
            return
    owner, parts = classes[prefix], key[len(prefix) + 1 :].split(".")
    for part in parts:
        arguments = None if owner is None else signatures.members(owner)
        if owner is None or arguments is None or part in ("help", "dict_kwargs"):
            return
        prefix = f"{prefix}.{part}"
        if part not in arguments:
            _refuse(verb, unknown_key(prefix, value, _called(owner, prefix), arguments, _all(classes)))
        accepted = arguments[part]
        source = accepted.source if accepted.complete else None  # else it may also be a list or a dict of them
        owner = source if source is not None and source.is_dataclass else None


def _all(classes: Mapping[str, ClassSource | None]) -> Iterator[str]:
    """Yield the keys that the known classes take."""
    for key, source in classes.items():
        yield from () if source is None else _below(key, source)


def _below(key: str, source: ClassSource, above: tuple[ClassSource, ...] = ()) -> Iterator[str]:
    """Yield the keys that a class takes, with the fields of its configurations: no class is named for these."""
    for name, accepted in (signatures.members(source) or {}).items():
        yield f"{key}.{name}"
        inner = accepted.source if accepted.complete else None
        if inner is not None and inner.is_dataclass and inner not in (*above, source):  # one may hold its own kind
            yield from _below(f"{key}.{name}", inner, (*above, source))


def _called(owner: ClassSource, key: str) -> str:
    """Name a class as the user knows it: the trainer is a section of the configuration."""
    return "'trainer'" if key.count(".") == 1 and key.startswith("trainer.") else owner.name


def _refuse(verb: str, message: str) -> None:
    raise ConfigurationError(f"{message}\nSee: megalight {verb} --help")
