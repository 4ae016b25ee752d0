"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with our Trainer, defaults and error messages."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import yaml
from jsonargparse import ActionConfigFile, Namespace, get_loader, set_dumper, set_loader, set_parsing_settings  # type: ignore[attr-defined]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from yaml import SafeDumper, YAMLError, dump

from megalight.callbacks import (
    FinalCheckpoint,
    OptimizerMonitor,
    Preemption,
    RunRecord,
    StepProgress,
    Throughput,
    WholeModelSummary,
)
from megalight.cli import checkpoints
from megalight.cli.config_args import STRATEGY, ConfigArgs, registered_strategy
from megalight.cli.explain import OTHER_BASE, explain, rules
from megalight.cli.report import PREEMPTED, debugging, reported, tell
from megalight.cli.trainer import MegalightTrainer
from megalight.data.bert.module import BertDataModule
from megalight.data.chat.module import SFTDataModule
from megalight.data.gpt.module import GPTDataModule
from megalight.data.multimodal.module import MultimodalDataModule
from megalight.data.streaming.module import StreamingDataModule, StreamingSFTDataModule
from megalight.errors import ConfigurationError, MegalightError
from megalight.models.family import families
from megalight.models.family.module import FamilyModule
from megalight.models.module import MegalightModule
from megalight.registry import load_plugins
from megalight.rl.data import PromptDataModule
from megalight.rl.module import GRPOModule, HFGRPOModule
from megalight.strategies import (
    MegatronFSDPStrategy,
    MegatronStrategy,
    MegatronTowersStrategy,
)

PARSER_MODE = "megalight"
"""jsonargparse's name for our way to read a configuration."""

STRATEGY_FLAG = f"--{STRATEGY}"


def _written_out(kind: type) -> dict[str, Any]:
    return {"class_path": f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}"}


DEFAULT_STRATEGY = _written_out(MegatronStrategy)


def strategy_of_name(name: Any) -> dict[str, Any] | None:
    """Return the class and arguments that a registered name stands for; None if it is none of ours."""
    if (kind := registered_strategy(name)) is None:
        return None
    return {**_written_out(kind), "init_args": dict(StrategyRegistry[name.lower()]["init_params"])}


def with_strategy_classes(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with ``--trainer.strategy=megatron`` written out."""
    flag = ""
    for word in words:
        # The value may follow its flag as a word of its own.
        if word == STRATEGY_FLAG:
            flag = word
            continue
        before, _, value = f"{flag}={word}".partition("=") if flag else word.partition("=")
        found = strategy_of_name(value) if before == STRATEGY_FLAG else None
        if found is None:
            yield from [flag, word] if flag else [word]
        else:
            yield f"{STRATEGY_FLAG}={found['class_path']}"
            yield from (f"{STRATEGY_FLAG}.{name}={value}" for name, value in found["init_args"].items())
        flag = ""
    if flag:
        yield flag


def _load(text: str) -> Any:
    """Read a configuration file, or a value, and write out ``trainer: {strategy: megatron}``."""
    value = get_loader("yaml")(text)
    trainer = value.get("trainer") if isinstance(value, dict) else None
    if isinstance(trainer, dict) and (found := strategy_of_name(trainer.get("strategy"))):
        # In place of the name, so that later arguments of the strategy find its class.
        return {**value, "trainer": {**trainer, "strategy": found}}
    return value


class _Dumper(SafeDumper):
    """Writes strings of other types as strings, such as members of an Enum: Lightning has some as defaults."""


_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))
set_loader(PARSER_MODE, _load, exceptions=(YAMLError,))
set_dumper(
    PARSER_MODE, lambda data: dump(data, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
)

# Lightning uses deprecated functions of jsonargparse; users cannot change that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

DEFAULT_SEED = 1234
IMPORTABLE = ["megalight", "lightning", "torch", "torchmetrics", "transformers"]
"""Packages that a configuration file may import from, beside the user's own; jsonargparse refuses all others."""


TRIED = re.compile(
    r"Expected an? |Errors:|Problem with given|Not a valid subclass|Subclass types expect|an? (class path|dict with)"
)
"""Begins lines of jsonargparse's report that name types and forms which it tried, and no reason."""

ADDED: tuple[type[pl.Callback], ...] = (Throughput, OptimizerMonitor, RunRecord, FinalCheckpoint)
"""Callbacks of every run."""

LISTS = ("--trainer.callbacks", "--trainer.logger", "--trainer.plugins")
"""Flags that take lists of classes."""

REPLACED: dict[type[pl.Callback], type[pl.Callback]] = {ProgressBar: StepProgress, ModelSummary: WholeModelSummary}
"""Lightning's default callbacks -> ours in their place, where they are not disabled."""

NAMED = (
    GPTDataModule,
    BertDataModule,
    SFTDataModule,
    MultimodalDataModule,
    StreamingDataModule,
    StreamingSFTDataModule,
    PromptDataModule,
    GRPOModule,
    HFGRPOModule,
    MegatronStrategy,
    MegatronFSDPStrategy,
    MegatronTowersStrategy,
)
"""Classes with short names on the command line, like the modules of the families: jsonargparse finds imported ones."""


def run(words: Sequence[str]) -> int:
    """Run one of Lightning's verbs, for example ``["fit", "-c", "recipe.yaml", ...]``. Returns the exit code.

    It is 75 for a run that ``Preemption`` stopped: start it again with ``--ckpt_path=auto`` to complete it.
    """
    prepare()
    with reported(f"megalight {words[0]}", MisconfigurationException, FileNotFoundError), _refusals_of_lightning():
        cli = MegalightCLI(args=list(words))
    # Only after the run: a signal sets the flag at the end of a step.
    stops = (callback for callback in cli.trainer.callbacks if isinstance(callback, Preemption))  # type: ignore[attr-defined]
    return PREEMPTED if any(callback.preempted for callback in stops) else 0


def parsed(words: Sequence[str]) -> MegalightCLI:
    """Create the trainer, the model and the data module of a command, as :func:`run` does, without running it."""
    prepare()
    with _refusals_of_lightning():
        return _Parsed(args=list(words))


def prepare() -> None:
    """Import and load what a command may name."""
    # Before anything is parsed: the parser imports what a file names.
    set_parsing_settings(import_path_allowlist=IMPORTABLE)
    load_plugins()
    for family in families():
        family.module()  # imported, so that it can be called by its bare name


@contextmanager
def _refusals_of_lightning() -> Iterator[None]:
    """Turn a ``ValueError`` that Lightning itself raises, about its arguments, into a :class:`ConfigurationError`."""
    try:
        yield
    except ValueError as error:
        # The innermost frame shows who raised: the user's own errors keep their traceback.
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals["__name__"].partition(".")[0] != "lightning":
            raise
        hint = "(arguments of the Trainer are set by --trainer.NAME=...)"
        raise ConfigurationError(f"{str(error).strip()}\n{hint}") from error


@dataclass(frozen=True)
class _Invocation:
    """The command that is being parsed.

    Attributes:
        words: the words after ``megalight``.
        options: every key that the parser of the verb knows.
    """

    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_invocation: ContextVar[_Invocation] = ContextVar("_invocation", default=_Invocation())  # noqa: B039  it is frozen


class _Stacked(ActionConfigFile):
    """``-c FILE``: a list in a file replaces that of the files before it; ``callbacks+`` adds to it.

    jsonargparse lets entries of lists of the same length inherit from those at their places.
    """

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        """Parse a file, or a text, and put it over what was parsed before."""
        path = Path(value)
        # The file's own errors are told where it is parsed.
        with suppress(OSError, yaml.YAMLError):
            _forget_lists(cfg, yaml.safe_load(path.read_text(encoding="utf-8") if path.is_file() else value))
        ActionConfigFile.apply_config(parser, cfg, dest, value)


def _forget_lists(before: Any, new: Any) -> None:
    """Take the entries out of lists of classes that ``new`` has at the same keys."""
    if not isinstance(before, Namespace) or not isinstance(new, dict):
        return
    for key, value in new.items():
        owner = before if key in before else before.get("init_args")  # `init_args` may be left out
        if not isinstance(owner, Namespace) or key not in owner:
            continue
        if isinstance(value, list):
            owner[key] = None
        else:
            _forget_lists(owner[key], value)


def _emptied(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command. One that gives a list comes after one that empties the list of the files."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in LISTS and (value if equals else following).startswith("["):
            yield f"{flag}=null"
        yield word


class ArgumentParser(LightningArgumentParser):
    """Lightning's parser with errors that fit on one screen and name the nearest valid key.

    jsonargparse also creates parsers of this class for nested classes. They read the whole command from a context
    variable.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": PARSER_MODE, "allow_abbrev": False, **kwargs})

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument; Lightning's ``-c`` is ours."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = _Stacked
        return super().add_argument(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write a configuration to a file. It was checked when it was parsed, so it is not checked again."""
        super().save(*args, **{"skip_validation": True, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one clear message and exit with code 2."""
        if debugging():
            raise ConfigurationError(message) from ex
        invocation = _invocation.get()
        prog = f"megalight {invocation.words[0]}" if invocation.words else "megalight"
        text = explain(str(message), ConfigArgs.read(invocation.words[1:]), invocation.options)
        tell(prog, f"{text}\nSee: {prog} --help")
        raise SystemExit(2)


class MegalightCLI(LightningCLI):
    """LightningCLI with Megalight's Trainer, callbacks, seed and messages.

    In a notebook or script: ``MegalightCLI(run=False, args={...})`` gives ``.model``, ``.datamodule``, ``.trainer``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults: dict[str, Any] = {
            "trainer_class": MegalightTrainer,
            "trainer_defaults": {"strategy": DEFAULT_STRATEGY},
            "parser_class": ArgumentParser,
            "auto_configure_optimizers": False,  # the model has no parameters yet when the command line is parsed
            "seed_everything_default": DEFAULT_SEED,
            "save_config_kwargs": {"overwrite": True},
            "parser_kwargs": {"prog": "megalight"},
        }
        words = kwargs.get("args")
        words = sys.argv[1:] if words is None else words
        self._verb = words[0] if isinstance(words, Sequence) and words else ""
        super().__init__(*args, **{**defaults, **kwargs})

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning calls it on the instance
        """Return the verb that is asked for, or all if it is none of them: each verb's parser takes time to build."""
        every = LightningCLI.subcommands()
        return {self._verb: every[self._verb]} if self._verb in every else every

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse words, a nested dict or a Namespace. Error messages quote the words."""
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
            return
        words = list(_emptied(list(with_strategy_classes(sys.argv[1:] if args is None else args))))
        verb = getattr(self, "_subcommand_parsers", {}).get(words[0] if words else "", parser)
        # For error messages of nested parsers, which do not see the command.
        token = _invocation.set(_Invocation(tuple(words), tuple(action.dest for action in verb._actions)))
        try:
            self.config = parser.parse_args(words)
        finally:
            _invocation.reset(token)

    def _parse_ckpt_path(self) -> None:
        """Do nothing. Lightning would unpickle the whole file on every rank to read hyperparameters."""

    def _dump_config(self) -> None:
        """Keep the configuration for hyperparameters, as Lightning does, but do not check again what was parsed."""
        if not hasattr(self, "config_dump"):
            dumped = self.parser.dump(self.config, skip_link_targets=False, skip_none=False, skip_validation=True)
            found = yaml.safe_load(dumped)
            self.config_dump = found if self.subcommand is None else found[self.subcommand]

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except SystemExit:
            # Ctrl-C ends a run as SIGTERM does, after a step; to the shell it is what it was.
            callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
            if any(isinstance(each, FinalCheckpoint) and each.interrupted for each in callbacks):
                raise KeyboardInterrupt from None
            raise

    def before_fit(self) -> None:
        """Say what the trainer changed for a run that is this short."""
        for line in getattr(self.trainer, "shortened", ()):  # another Trainer has none
            rank_zero_info(line)

    def before_predict(self) -> None:
        """Say that what our modules return is gone when the command ends, if no callback writes it."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(self.model, MegalightModule) and not any(isinstance(c, BasePredictionWriter) for c in callbacks):
            rank_zero_info(
                "no callback writes what predict returns (the loss of each token); add one that derives from "
                "Lightning's BasePredictionWriter"
            )

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint that ``--ckpt_path=last``, ``auto`` and a folder of runs mean."""
        if self.subcommand is not None:
            config = self.config[self.subcommand]
            # All ranks look in the same folders. What they find there must be one checkpoint.
            folders = checkpoints.folders_of(config.trainer)
            config.ckpt_path = checkpoints.resolve(config.get("ckpt_path"), self.subcommand, folders)

    def instantiate_classes(self) -> None:
        """Create the trainer, the model and the data module.

        Raises:
            ConfigurationError: a constructor raised ``ValueError`` or ``TypeError``, or a part of an argument was given
                whose type is unknown.
        """
        _check_typed("", self.config if self.subcommand is None else self.config[self.subcommand])
        try:
            super().instantiate_classes()
        except MegalightError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigurationError(_reason(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Create the trainer with our default callbacks, each unless the user gives their own."""
        self._record_weights()  # the model is there already; the trainer gets the configuration that it will write
        given = self._get(self.config_init, "trainer", default={}).get("callbacks") or []
        own = [*given] if isinstance(given, list) else [given]  # Lightning appends to the list itself
        trainer = super().instantiate_trainer(**kwargs)  # adds Lightning's own bar and summary
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy) and strategy.checkpoints.resume_optimizer is None:
            # A command says what it wants now, so that wins over what a checkpoint holds.
            strategy.checkpoints = replace(strategy.checkpoints, resume_optimizer="configured")
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        present = {type(callback) for callback in callbacks}
        added: list[pl.Callback] = [make() for make in ADDED if make not in present]
        for kind, ours in REPLACED.items():
            theirs = [callback for callback in callbacks if isinstance(callback, kind)]
            if theirs and not any(isinstance(each, kind) for each in own):
                callbacks.remove(theirs[0])
                added.append(ours())
        callbacks[:0] = added  # in front: ModelCheckpoint must stay last
        return trainer

    def _record_weights(self) -> None:
        """Put the checkpoint that the model took from a folder of runs into the configuration."""
        taken = self.model.weights if isinstance(self.model, FamilyModule) else None
        given = self._get(self.config, "model")
        if taken is not None and isinstance(given, Namespace):
            given.init_args.weights = str(taken)


class _Parsed(MegalightCLI):
    """Stops where the verb would begin."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


def _check_typed(key: str, value: Any) -> None:
    """Refuse ``--model.config.size=2`` where ``config`` has no annotation: jsonargparse would pass its own object."""
    if isinstance(value, Namespace):
        for name, inner in vars(value).items():
            _check_typed(key if name == "init_args" else f"{key}.{name}".strip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            _check_typed(key, inner)
    elif type(value).__name__ == "NestedArg":
        name = key.rpartition(".")[2]
        raise ConfigurationError(
            f"{key}.{value.key} = {value.val!r} cannot be set: the argument {name!r} has no type annotation, so that "
            f"its parts are unknown. Annotate it in the constructor, for example {name}: GPTConfig."
        )


def _reason(error: BaseException) -> str:
    """Extract the message of a constructor from jsonargparse's report on all the types it tried."""
    text = str(error)
    if "Does not validate against any of the Union subtypes" not in text:
        return text
    wanted = [line for line in rules(text) if not TRIED.match(line)]
    # That the class is none of one type is no reason where it is of another type of the union.
    reasons = [line for line in wanted if not OTHER_BASE.match(line)]
    return "; ".join(reasons or wanted) or text
