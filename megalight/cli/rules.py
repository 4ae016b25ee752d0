"""Rules for the values of a command that need no torch. The classes themselves call the same functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megalight.cli.signatures import Source
from megalight.errors import ConfigurationError
from megalight.parallel.degrees import check_at_least_one, check_degrees, check_timeout

Values = Mapping[str, Any]
STRATEGIES = ("MegatronStrategy", "MegatronFSDPStrategy", "MegatronTowersStrategy", "MegatronTowersBesideStrategy")
DATA = ("GPTDataModule", "BertDataModule", "SFTDataModule")


def check(verb: str, values: Values, classes: Mapping[str, Source | None]) -> None:
    """Check the values of a whole command.

    Args:
        verb: the command.
        values: dotted key -> value; see :class:`megalight.cli.explain.Given`.
        classes: the classes that fill keys.

    Raises:
        MegalightError: a value breaks a rule.
    """
    check_trainer(_under("trainer", values))
    if is_megatron(classes):
        given = _under("trainer.strategy", values)
        _call(check_degrees, given)
        # A value of another kind is refused elsewhere, with a better message.
        for name in ("micro_batch_size", "sigterm_every_n_steps"):
            if isinstance(given.get(name), int):
                check_at_least_one(name, given[name])
        if isinstance(given.get("timeout_seconds"), int | float):
            check_timeout(given["timeout_seconds"])
    data = classes.get("data")
    if _is_one_of(DATA, data):
        _check_data(_under("data", values))
    if verb == "fit" and _is_one_of(("GPTDataModule",), data):
        _check_length(_under("data", values))
    _check_checkpoint(verb, values)


def check_trainer(arguments: Values) -> None:
    """Refuse values of Trainer arguments that Lightning would accept silently, or refuse with another cause.

    Raises:
        ConfigurationError: with the value, the rule and the next step.
    """
    clip = arguments.get("gradient_clip_val")
    if isinstance(clip, int | float) and clip < 0:
        raise ConfigurationError(
            f"trainer.gradient_clip_val is {clip}; it must be at least 0. Leave it out to train without clipping."
        )
    window = arguments.get("accumulate_grad_batches")
    if isinstance(window, int) and window < 1:
        raise ConfigurationError(
            f"trainer.accumulate_grad_batches is {window}; it must be at least 1: the number of batches whose "
            "gradients are added up before each optimizer step."
        )
    # Without an accelerator by name, only Lightning knows whether this is a CPU.
    if str(arguments.get("precision") or "").startswith("16") and arguments.get("accelerator") == "cpu":
        raise half_on_cpu(arguments["precision"])
    every = arguments.get("log_every_n_steps")
    if isinstance(every, int) and every < 0:
        raise ConfigurationError(f"trainer.log_every_n_steps is {every}; it must be at least 1, or 0 for no logs.")


def half_on_cpu(precision: Any) -> ConfigurationError:
    """Return the error for 16-bit floats on a CPU."""
    return ConfigurationError(
        f"trainer.precision is {precision}, and this run is on the CPU, where 16-bit floats with loss scaling do not "
        "work. Use bf16-mixed, or 32-true."
    )


def _check_data(given: Values) -> None:
    """Check sizes, and that token files are there and whole."""
    # Imported only for these classes: they need numpy.
    from megalight.data.corpus import Corpus
    from megalight.data.mixture import Mixture
    from megalight.data.sizes import check_sizes

    _call(check_sizes, given)
    for name in ("data", "train_data", "val_data", "test_data"):
        if isinstance(given.get(name), str):
            for prefix in Mixture.parse(given[name]).prefixes:
                Corpus.open(prefix)


def _check_length(given: Values) -> None:
    """Check that each corpus holds a sample to train with. Only its index is read."""
    from megalight.data.corpus import Corpus
    from megalight.data.gpt.index import check_one_sample, of_split
    from megalight.data.mixture import Mixture, Part
    from megalight.data.splits import SPLIT, SPLITS, split_bounds

    length = given.get("sequence_length")
    for name in ("data", "train_data"):
        if not isinstance(given.get(name), str) or type(length) is not int:
            continue  # the parser reads mixtures, and numbers in other forms
        for prefix in Mixture.parse(given[name]).prefixes:
            corpus = Corpus.open(prefix)
            whole = range(len(corpus.data))
            # Data of their own for each split are not divided.
            used = split_bounds(given.get("split", SPLIT), len(whole))[0] if name == "data" else whole
            tokens = Part(corpus, used, None).num_tokens
            if tokens > 1:  # else the split is empty, which the data module explains
                with of_split(SPLITS[0], corpus.data.prefix):
                    check_one_sample(tokens, length)


def _check_checkpoint(verb: str, values: Values) -> None:
    """Check that there is a checkpoint."""
    from pathlib import Path

    from megalight.cli import newest

    wanted = values.get("ckpt_path")
    if not isinstance(wanted, str) or wanted in newest.LIGHTNINGS or wanted == "auto":
        return
    # remote storage is asked later, once: it may be slow
    if wanted != "last" and not wanted.startswith("registry:") and "://" not in wanted and not Path(wanted).exists():
        newest.check_is_one(Path(wanted))
    callbacks = [
        value for key, value in values.items() if key.startswith("trainer.callbacks") and key.endswith("dirpath")
    ]
    if wanted == "last":
        newest.check_there_is_one([values.get("trainer.default_root_dir") or ".", *callbacks])


def _call(rule: Callable[..., None], given: Values) -> None:
    """Call a rule with the values that it takes, where they are plain numbers; the parser reads all others."""
    names = inspect.signature(rule).parameters
    rule(**{name: value for name, value in given.items() if name in names and isinstance(value, int)})


def _under(prefix: str, values: Values) -> dict[str, Any]:
    return {key[len(prefix) + 1 :]: value for key, value in values.items() if key.startswith(f"{prefix}.")}


def is_megatron(classes: Mapping[str, Source | None]) -> bool:
    """Return whether the strategy is one of Megalight's."""
    return _is_one_of(STRATEGIES, classes.get("trainer.strategy"))


def _is_one_of(names: tuple[str, ...], source: Source | None) -> bool:
    return source is not None and source.name in names and source.module.name.startswith("megalight.")
