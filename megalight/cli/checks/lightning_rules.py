"""What Lightning or a callback refuses after a slow import: names that nobody has registered, and missing values.

The tables are Lightning's; tests hold them to the release that is installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from megalight.cli import messages
from megalight.cli.checks.declarations import default_of, method_of
from megalight.cli.checks.trainer_rules import check_time
from megalight.cli.checks.walk import KNOWN, Walk
from megalight.cli.sources import ClassSource, find_class, find_module
from megalight.errors import ConfigurationError, nearest

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps", "tpu")
STRATEGIES = (
    "auto",
    *(f"ddp{how}" for how in ("", "_fork", "_notebook", "_spawn")),
    *(
        f"ddp{how}_find_unused_parameters_{find}"
        for how in ("", "_fork", "_notebook", "_spawn")
        for find in ("false", "true")
    ),
    *("deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload", "deepspeed_stage_3"),
    *("deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme", "fsdp", "fsdp_cpu_offload"),
    *("megatron", "megatron_fsdp", "megatron_notebook", "megatron_towers", "megatron_towers_beside"),
    *("single_device", "single_tpu", "single_xla", "xla", "xla_debug"),
)
"""Registered names of strategies."""

CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "EarlyStopping": {"mode": ("min", "max")},
    "LearningRateMonitor": {"logging_interval": ("step", "epoch")},
    "ModelCheckpoint": {"mode": ("min", "max")},
    "Timer": {"interval": ("step", "epoch")},
}
"""Class of Lightning -> argument -> the words that it takes, where the signature says no more than ``str``."""

CLASSES = {
    "trainer.callbacks": ".callbacks",
    "trainer.logger": ".loggers",
    "trainer.plugins": ".plugins",
    "model": ".models.",
    "model.optimizer.schedule": ".optim",
    "data": ".data.",
}
"""Key that classes fill -> a part of the paths of modules that have some of its."""

QUANTIZATION = "megalight.plugins.modelopt.presets"
"""Module that knows the presets of ModelOpt."""


def check(values: Mapping[str, Any], classes: Mapping[str, ClassSource | None], modules: tuple[str, ...]) -> None:
    """Check names, words and missing values.

    Args:
        values: dotted key -> value.
        classes: the classes that fill keys.
        modules: where classes are found by their bare names.

    Raises:
        ConfigurationError: a value is none of those that Lightning knows, or is missing.
    """
    _check_named(values, classes, modules)
    if only_known(values, classes):
        _check_accelerator(values.get("trainer.accelerator"))
        if classes.get("trainer.strategy") is None:
            check_strategy(values.get("trainer.strategy"), STRATEGIES, _classes(modules, ".strategies"))
        _check_classes(values, modules)
    for key, source in classes.items():
        if source is not None and source.module.name.startswith(KNOWN):
            _check_words(key, source, values)
            _check_missing(key, source, values)
            _check_duration(key, source, values)
            _check_quantization(key, source, values)


def only_known(values: Mapping[str, Any], classes: Mapping[str, ClassSource | None]) -> bool:
    """Return whether nothing but Lightning and Megalight will be imported: others may register more names."""
    paths = [value for value in values.values() if isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value)]
    foreign = [path for path in paths if not path.startswith(KNOWN) and find_module(path.partition(".")[0])]
    sources = all(source is None or source.module.name.startswith(KNOWN) for source in classes.values())
    # Where Lightning is imported already, classes may be defined that no file shows, and the parser is quick.
    return sources and not foreign and "lightning.pytorch" not in sys.modules


def check_strategy(name: Any, registered: Iterable[str], classes: Iterable[str]) -> None:
    """Check that a word is the registered name of a strategy.

    Args:
        name: the word; anything else is left to others.
        registered: the names.
        classes: names of classes, which may have been meant.

    Raises:
        ConfigurationError: it is not; the message has the nearest name.
    """
    if not isinstance(name, str) or name.lower() in registered or "." in name or not name:
        return
    raise ConfigurationError(
        f"trainer.strategy = {name!r} is not a known strategy.{nearest(name, [*classes, *registered])} "
        "Give a strategy class (such as MegatronStrategy, with its arguments under trainer.strategy), or a registered "
        "name such as auto, ddp, megatron."
    )


def check_bare(strategy: Any, values: Mapping[str, Any]) -> None:
    """Check that a registered name of Lightning's gets no arguments: it stands for a class with some.

    Args:
        strategy: the strategy, which was named with these values or before.
        values: dotted key -> value.

    Raises:
        ConfigurationError: it gets one.
    """
    inner = next((key for key in values if key.startswith("trainer.strategy.") and not key.endswith(".help")), None)
    if inner is None or not isinstance(strategy, str) or strategy.startswith("megatron") or strategy not in STRATEGIES:
        return
    raise ConfigurationError(
        f"{inner} = {values[inner]!r}: the strategy {strategy!r} is a name that takes no arguments. Give a class, such "
        "as DDPStrategy, FSDPStrategy or MegatronStrategy, which takes its own."
    )


def _check_accelerator(name: Any) -> None:
    if isinstance(name, str) and name.isidentifier() and name not in ACCELERATORS:
        raise ConfigurationError(
            f"trainer.accelerator = {name!r} is not a known accelerator.{nearest(name, ACCELERATORS)} Choose from "
            f"{', '.join(ACCELERATORS)}."
        )


def _check_named(
    values: Mapping[str, Any], classes: Mapping[str, ClassSource | None], modules: tuple[str, ...]
) -> None:
    """Check that the sections of the model and of the data name their classes."""
    for section in ("model", "data"):
        inner = next((key for key in values if key.startswith(f"{section}.") and key != f"{section}.help"), None)
        if inner is not None and section not in classes:
            sources = (find_class(name, modules) for name in _classes(modules, CLASSES[section]))
            # Not those that they derive from, nor other things that their files import.
            known = {each.name for each in sources if each is not None and each.module.name.startswith(modules)}
            names = ", ".join(sorted(name for name in known if name.endswith("Module")))
            raise ConfigurationError(
                f"{inner} is given, but {section} names no class. Give --{section}=CLASS as well: your own, or one of "
                f"{names}."
            )


def _check_classes(values: Mapping[str, Any], modules: tuple[str, ...]) -> None:
    """Check that classes with bare names are there."""
    for key, name in values.items():
        part = next((part for section, part in CLASSES.items() if re.fullmatch(rf"{section}(\.\d+)?", key)), None)
        # Words in small letters are loggers, and files of a section; the class of a path is checked elsewhere.
        if part is None or not isinstance(name, str) or not name.isidentifier() or not name[0].isupper():
            continue
        if find_class(name, modules) is None:
            raise ConfigurationError(messages.no_class(key, name, "", nearest(name, _classes(modules, part))))


def _classes(modules: tuple[str, ...], part: str) -> list[str]:
    """Return the names of the classes in modules whose paths have a part."""
    # Packages of models import their ``module`` only when somebody asks for the class.
    paths = [each for path in modules if part in path for each in (path, f"{path}.module")]
    found = map(find_module, paths)
    return [name for module in found if module is not None for name in module.names if name[0].isupper()]


def _check_words(key: str, source: ClassSource, values: Mapping[str, Any]) -> None:
    words = CHOICES.get(source.name, {}) if source.module.name.startswith("lightning.") else {}
    for name, choices in words.items():
        value = values.get(f"{key}.{name}")
        if isinstance(value, str) and value not in choices:
            raise ConfigurationError(
                messages.not_valid(f"{key}.{name}", value, f"one of {', '.join(choices)}", choices)
            )


def _check_missing(key: str, source: ClassSource, values: Mapping[str, Any]) -> None:
    """Check that a class in the trainer's section has what its constructor needs."""
    init = method_of(source, "__init__")
    if init is None or init[0] != source or not key.startswith("trainer."):
        return
    arguments = init[1].args
    needed = [
        each.arg
        for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
        if default_of(source, each.arg) is None
    ]
    inner = (f"{key}.{name}" for name in needed)
    missing = [each for each in inner if not any(given == each or given.startswith(f"{each}.") for given in values)]
    if missing and not any(given.startswith(f"{key}.dict_kwargs") for given in values):
        raise ConfigurationError(messages.missing(missing))


def _check_duration(key: str, source: ClassSource, values: Mapping[str, Any]) -> None:
    """Check the time of a Timer, if it is a text."""
    duration = values.get(f"{key}.duration")
    if source.name == "Timer" and isinstance(duration, str):
        check_time(f"{key}.duration", duration)


def _check_quantization(key: str, source: ClassSource, values: Mapping[str, Any]) -> None:
    """Check that ModelOpt has a preset, without importing it."""
    name, own = values.get(f"{key}.preset"), find_module(QUANTIZATION)
    if source.name != "ModelOptQuantization" or not isinstance(name, str) or "/" in name or own is None:
        return
    config = find_module("modelopt.torch.quantization.config")
    known = None if config is None else config.names.get("choices")
    check_known = own.names["check_known"]
    if (
        isinstance(known, ast.AnnAssign)
        and isinstance(known.value, ast.Set)
        and isinstance(check_known, ast.FunctionDef)
    ):
        Walk(own, {"name": name, "known": tuple(ast.literal_eval(known.value))}).follow(check_known.body)
