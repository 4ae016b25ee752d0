"""Rules for the values of Trainer arguments. They need no torch, so commands check them early."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError, nearest

DEVICES = re.compile(r"auto|-1|[1-9]\d*|\d+,(\s*\d+,?)*|\[.*\]|")
"""What ``--trainer.devices`` takes: a number, ids, or ``auto``."""

COUNTS = {
    "max_steps": (-1, "the optimizer steps of the run, or -1 for no limit"),
    "max_epochs": (-1, "the passes over the data, or -1 for no limit"),
    "min_steps": (0, "the optimizer steps that the run has at least"),
    "min_epochs": (0, "the passes over the data that the run has at least"),
    "num_nodes": (1, "the number of machines"),
    "num_sanity_val_steps": (-1, "the validation batches before training: 0 for none, -1 for all"),
    "check_val_every_n_epoch": (1, "the epochs from one validation to the next, or null to count batches alone"),
    "reload_dataloaders_every_n_epochs": (0, "the epochs after which loaders are made again, or 0 to keep them"),
    "accumulate_grad_batches": (1, "the number of batches whose gradients are added up before each optimizer step"),
    "log_every_n_steps": (0, "the steps from one log to the next, or 0 for no logs"),
    "fast_dev_run": (0, "the batches of a trial run"),
    "gradient_clip_val": (0, "the largest norm of gradients. Leave it out to train without clipping"),
}
"""Argument -> its least value, and what it means."""

SHARES = {
    **dict.fromkeys((f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")), "the batches to use"),
    "overfit_batches": "the batches to train with again and again",
    "val_check_interval": "the training batches from one validation to the next",
}
"""Arguments that are a number of batches, or a share of all batches."""

WORDS = {
    "gradient_clip_algorithm": ("norm", "value"),
    "profiler": ("simple", "advanced", "pytorch", "xla"),
}
"""Arguments that are one of a few words, or an object."""

LOGGERS = ("csv", "json", "tensorboard")
"""The names that ``--trainer.logger`` takes."""


def check_trainer(arguments: Mapping[str, Any]) -> None:
    """Refuse values of Trainer arguments that Lightning would accept silently, or refuse late or with another cause.

    Raises:
        ConfigurationError: with the value, the rule and the next step.
    """
    for name, (least, meaning) in COUNTS.items():
        value = arguments.get(name)
        if isinstance(value, int | float) and value < least:
            raise ConfigurationError(f"trainer.{name} is {value}; it must be at least {least}: {meaning}.")
    for name, meaning in SHARES.items():
        _check_share(name, arguments.get(name), meaning)
    for name, words in WORDS.items():
        word = arguments.get(name)
        if isinstance(word, str) and word.islower() and word.isidentifier() and word not in words:
            raise ConfigurationError(
                f"trainer.{name} is {word!r}; choose from {', '.join(words)}.{nearest(word, words)}"
            )
    devices = arguments.get("devices")
    if isinstance(devices, int | str) and not DEVICES.fullmatch(str(devices)):
        raise ConfigurationError(
            f"trainer.devices is {devices}; give a number of at least 1, ids with commas (0,1), or auto for all."
        )
    if arguments.get("barebones") is True:
        raise ConfigurationError(
            "trainer.barebones is True, but commands log and show progress, which Lightning refuses with it. Leave it "
            "out and give --trainer.logger=false and --trainer.enable_checkpointing=false, or use a Trainer in Python."
        )
    check_time("trainer.max_time", arguments.get("max_time"))
    logger = arguments.get("logger")
    # Others are names of classes, which the parser knows.
    if isinstance(logger, str) and re.fullmatch(r"[a-z, ]+", logger):
        check_loggers(logger)
    # Without an accelerator by name, only Lightning knows whether this is a CPU.
    if str(arguments.get("precision") or "").startswith("16") and arguments.get("accelerator") == "cpu":
        raise half_on_cpu(arguments["precision"])


def check_loggers(names: str) -> list[str]:
    """Return the names of loggers, which commas separate.

    Raises:
        ConfigurationError: a name is unknown.
    """
    found = [name.strip() for name in names.split(",")]
    for name in found:
        if name not in LOGGERS:
            raise ConfigurationError(
                f"trainer.logger = {name!r} is not a known logger.{nearest(name, LOGGERS)} Choose from "
                f"{', '.join(LOGGERS)} (several with commas), or give the class of a logger, or false."
            )
    return found


def half_on_cpu(precision: Any) -> ConfigurationError:
    """Return the error for 16-bit floats on a CPU."""
    return ConfigurationError(
        f"trainer.precision is {precision}, and this run is on the CPU, where 16-bit floats with loss scaling do not "
        "work. Use bf16-mixed, or 32-true."
    )


def check_time(key: str, value: Any) -> None:
    """Check a time as Lightning reads it from a text.

    Raises:
        ConfigurationError: it is none.
    """
    # YAML reads 1:00:00:00 without quotes as a number of seconds, of which Lightning makes nothing.
    if value is None or (isinstance(value, str) and re.fullmatch(r"\d+(:\d\d){3}", value.strip())):
        return
    if isinstance(value, str | int | float):
        raise ConfigurationError(
            f"{key} is {value!r}; give days, hours, minutes and seconds as DD:HH:MM:SS, for example "
            "'00:12:00:00' for twelve hours (in a file, with quotes)."
        )


def _check_share(name: str, value: Any, meaning: str) -> None:
    # `True` is an int in Python. An interval of no batches never comes.
    least = 1 if name == "val_check_interval" and type(value) is int else 0
    if type(value) not in (int, float) or (value >= least and (type(value) is int or value <= 1)):
        return
    raise ConfigurationError(
        f"trainer.{name} is {value}; give a whole number of at least {1 if name == 'val_check_interval' else 0}, or a "
        f"share between 0.0 and 1.0: {meaning}."
    )
