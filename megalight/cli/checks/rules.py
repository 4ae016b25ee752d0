"""Rules for the values of a command that need no torch. The classes themselves call the same functions."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from math import prod
from pathlib import Path
from typing import Any

from megalight.cli import messages
from megalight.cli.checks.lightning_rules import only_known
from megalight.cli.checks.trainer_rules import check_trainer
from megalight.cli.recipe_names import PRESETS, preset_names
from megalight.cli.report import launched
from megalight.cli.signatures import SourceArgument, written
from megalight.cli.sources import ClassSource
from megalight.errors import CheckpointError, ConfigurationError
from megalight.parallel.degrees import check_backend, check_measured
from megalight.registry import PLUGIN_GROUP

Values = Mapping[str, Any]
STRATEGIES = ("MegatronStrategy", "MegatronFSDPStrategy", "MegatronTowersStrategy", "MegatronTowersBesideStrategy")
LARGEST_SEED = 2**32 - 1
"""What numpy takes at most."""

WEIGHTS = ("weights", "teacher", "base")
"""Arguments of modules and callbacks that say where a model is."""

AXES = ("tensor", "pipeline", "context")
"""Degrees by which the number of ranks is divided to give the replicas."""

DATA = ("GPTDataModule", "BertDataModule", "SFTDataModule")


def check(verb: str, values: Values, classes: Mapping[str, ClassSource | None]) -> None:
    """Check the values of a whole command.

    Args:
        verb: the command.
        values: dotted key -> value; see :class:`megalight.cli.given.Given`.
        classes: the classes that fill keys.

    Raises:
        MegalightError: a value breaks a rule.
    """
    check_trainer(_under("trainer", values))
    _check_backend(values, classes)
    if is_megatron(classes):
        given = _under("trainer.strategy", values)
        # Without an accelerator by name, only Lightning knows whether this is a CPU.
        if given.get("micro_batch_size") == "auto" and values.get("trainer.accelerator") == "cpu":
            check_measured("cpu")
    data = classes.get("data")
    if _is_one_of(DATA, data):
        _check_data(_under("data", values))
        _check_shares(values, classes)
        _check_vocabulary(values)
    _check_preset(values, classes)
    _check_weights(values, classes)
    _check_taught(values, classes)
    _check_folders(values)
    _check_seed(values.get("seed_everything"))
    if verb == "fit" and _is_one_of(("GPTDataModule",), data):
        _check_length(_under("data", values))
    _check_checkpoint(verb, values)


def _check_data(given: Values) -> None:
    """Check sizes, and that token files are there and whole."""
    # Imported only for these classes: they need numpy.
    from megalight.data.blend import Mixture
    from megalight.data.corpus import Corpus
    from megalight.data.sizes import check_sizes

    _call(check_sizes, given)
    tokenizer = given.get("tokenizer")
    if isinstance(tokenizer, str) and not Path(tokenizer).exists():
        from megalight.data.tokenizer import Tokenizer

        Tokenizer.load(tokenizer)  # its error says what is missing
    for name in ("data", "train_data", "val_data", "test_data"):
        if isinstance(given.get(name), str):
            for prefix in Mixture.parse(given[name]).prefixes:
                Corpus.open(prefix)


def _check_shares(values: Values, classes: Mapping[str, ClassSource | None]) -> None:
    """Check that a batch is divided evenly, where the command says the number of devices."""
    from megalight.data.sizes import check_replicas

    nodes: Any = values.get("trainer.num_nodes", 1)
    keys = ["data.global_batch_size", "trainer.devices", *(f"trainer.strategy.{axis}_parallel" for axis in AXES)]
    numbers: list[Any] = [values.get(key, 1) for key in keys]
    given = {"data.global_batch_size", "trainer.devices"} <= values.keys()
    if not given or not all(type(number) is int and number > 0 for number in (*numbers, nodes)):
        return  # "auto", or in a form that the parser reads
    batch, devices, *degrees = numbers
    # Towers have ranks of their own. Ranks that the degrees do not divide are refused elsewhere.
    if _is_one_of(STRATEGIES[:2], classes.get("trainer.strategy")) and devices * nodes % prod(degrees) == 0:
        check_replicas(batch, devices * nodes // prod(degrees))


def _check_vocabulary(values: Values) -> None:
    """Check that the model has an embedding for each token of the data, as far as the facts about these say."""
    from megalight.data.blend import Mixture
    from megalight.data.corpus import CorpusMeta
    from megalight.data.sizes import check_vocabulary

    size, tokens = values.get("model.config.vocab_size"), values.get("data.vocab_size")
    given = values.get("data.data", values.get("data.train_data"))
    # A tokenizer that is given wins over the facts.
    if tokens is None and values.get("data.tokenizer") is None and isinstance(given, str):
        meta = CorpusMeta.load(Mixture.parse(given).prefixes[0])
        tokens = None if meta is None else meta.vocab_size
    if type(size) is int and type(tokens) is int:
        check_vocabulary(tokens, size)


def _check_preset(values: Values, classes: Mapping[str, ClassSource | None]) -> None:
    """Check that the name of a model's configuration is one of Megalight's, where nothing else can register more."""
    source, name = classes.get("model"), values.get("model.config")
    module = "" if source is None else f"{source.module.name.rpartition('.')[0]}.presets"
    if not isinstance(name, str) or not name.isidentifier() or module not in PRESETS or Path(name).exists():
        return
    known = [*preset_names(module)]
    others = (entry for entry in entry_points(group=PLUGIN_GROUP) if not entry.value.startswith("megalight."))
    if name not in known and only_known(values, classes) and not any(others):
        expected = "the name of a preset (megalight recipes lists them), or sizes of a model"
        raise ConfigurationError(messages.not_valid("model.config", name, expected, known))


def _check_weights(values: Values, classes: Mapping[str, ClassSource | None]) -> None:
    """Check that there is something to start from, and to learn from."""
    for key, source in classes.items():
        ours = source is not None and source.module.name.startswith("megalight.")
        for name in WEIGHTS if ours else ():
            wanted = values.get(f"{key}.{name}")
            if not isinstance(wanted, str) or "://" in wanted or not _is_path(source, name):
                continue
            _check_run(f"{key}.{name}", Path(wanted))


def _check_run(key: str, folder: Path) -> None:
    """Refuse the folder of a run that has saved no checkpoint. What other folders hold is seen when they are read."""
    from megalight.checkpoint.disk.latest_checkpoint import newest_in
    from megalight.checkpoint.disk.manifest import is_run

    if folder.is_dir() and is_run(folder) and not (folder / "config.json").exists() and newest_in(folder) == folder:
        raise CheckpointError(
            f"{key}={folder}: this run has saved no finished checkpoint. Give the folder of one that has, or train it "
            "until it saves (ModelCheckpoint)."
        )


def _check_taught(values: Values, classes: Mapping[str, ClassSource | None]) -> None:
    """Check that a folder with a teacher's predictions is there."""
    for key, source in classes.items():
        folder = values.get(f"{key}.teacher_logits")
        if _is_one_of(("Distillation",), source) and isinstance(folder, str):
            from megalight.data.cached_outputs import check_complete

            check_complete(Path(folder), "megalight teach")


def _is_path(source: ClassSource | None, name: str) -> bool:
    """Whether an argument of a class is a path: ``base`` of adapters is a word."""
    return source is not None and "PathLike" in written(source).get(name, SourceArgument()).annotation


def _check_folders(values: Values) -> None:
    """Check that the folders of logs and checkpoints can be made."""
    if values.get("trainer.logger") is not False:
        _check_folder("trainer.default_root_dir", values.get("trainer.default_root_dir") or ".")
    for key, folder in values.items():
        if re.fullmatch(r"trainer\.callbacks(\.\d+)?\.dirpath", key):
            _check_folder(key, folder)


def _check_folder(key: str, folder: Any) -> None:
    if not isinstance(folder, str) or "://" in folder:
        return
    # The nearest folder that is there: those below it are made.
    path = Path(os.path.abspath(folder))
    above = next(each for each in (path, *path.parents) if each.exists())
    if not above.is_dir():
        raise ConfigurationError(f"{key}={folder}: {above} is a file; name a folder for logs and checkpoints.")
    try:
        # Only an attempt shows it, also for full and read-only disks, and for root. A rank need not try again.
        if not launched():
            tempfile.TemporaryDirectory(prefix=".megalight-", dir=above).cleanup()
    except OSError as error:
        raise ConfigurationError(
            f"{key}={folder}: {above} cannot be written ({error.strerror}); name another folder for logs and "
            "checkpoints."
        ) from error


def _check_backend(values: Values, classes: Mapping[str, ClassSource | None]) -> None:
    """Check the backend of collectives, where nothing else can register more."""
    name = values.get("trainer.strategy.process_group_backend")
    if isinstance(name, str) and only_known(values, classes):
        check_backend(name)


def _check_seed(seed: Any) -> None:
    """Check that all generators take a seed."""
    if type(seed) is int and not 0 <= seed <= LARGEST_SEED:
        raise ConfigurationError(f"seed_everything is {seed}; it must be at least 0, and at most {LARGEST_SEED}.")


def _check_length(given: Values) -> None:
    """Check that each corpus holds a sample to train with. Only its index is read."""
    from megalight.data.blend import BlendPart, Mixture
    from megalight.data.corpus import SPLIT, SPLITS, Corpus, split_bounds
    from megalight.data.gpt.index import check_one_sample, of_split

    length = given.get("sequence_length")
    for name in ("data", "train_data"):
        if not isinstance(given.get(name), str) or type(length) is not int:
            continue  # the parser reads mixtures, and numbers in other forms
        for prefix in Mixture.parse(given[name]).prefixes:
            corpus = Corpus.open(prefix)
            whole = range(len(corpus.data))
            # Data of their own for each split are not divided.
            used = split_bounds(given.get("split", SPLIT), len(whole))[0] if name == "data" else whole
            tokens = BlendPart(corpus, used, None).num_tokens
            if tokens > 1:  # else the split is empty, which the data module explains
                with of_split(SPLITS[0], corpus.data.prefix):
                    check_one_sample(tokens, length)


def _check_checkpoint(verb: str, values: Values) -> None:
    """Check that there is a checkpoint."""
    from megalight.cli import newest

    wanted = values.get("ckpt_path")
    if not isinstance(wanted, str) or wanted in newest.LIGHTNINGS or wanted == "auto":
        return
    # remote storage is asked later, once: it may be slow
    if wanted != "last" and not wanted.startswith("registry:") and "://" not in wanted and not Path(wanted).exists():
        newest.check_is_one(Path(wanted))
    if "://" not in wanted:
        _check_run("ckpt_path", Path(wanted))
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


def is_megatron(classes: Mapping[str, ClassSource | None]) -> bool:
    """Return whether the strategy is one of Megalight's."""
    return _is_one_of(STRATEGIES, classes.get("trainer.strategy"))


def _is_one_of(names: tuple[str, ...], source: ClassSource | None) -> bool:
    return source is not None and source.name in names and source.module.name.startswith("megalight.")
