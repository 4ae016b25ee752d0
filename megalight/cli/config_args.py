"""Arguments of a command: the words that the user wrote, and the files that they name, as dotted keys with values.

Nothing heavy is imported here, so that a mistake in a file is an error of a second.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megalight.errors import ConfigurationError

if TYPE_CHECKING:
    from yaml import MarkedYAMLError


STRATEGY = "trainer.strategy"
DEFAULTS = {"trainer": "megalight.cli.trainer.MegalightTrainer", STRATEGY: "megalight.strategies.MegatronStrategy"}
"""Classes that nobody needs to name."""
SECTIONS = (*DEFAULTS, "model", "data")
"""Keys of the configuration that a class fills."""


def find_class(name: str) -> type | None:
    """Return the class of an import path or, for a bare name, the imported Lightning subclass with this name."""
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except (ImportError, ValueError):  # ".2" has an empty name of a module
            return None
        return found if isinstance(found, type) else None
    known = (cls for base in _bases() for cls in subclasses(base))
    return next((cls for cls in known if cls.__name__ == name), None)


def registered_strategy(name: Any) -> type | None:
    """Return our strategy that is registered under a name; None if it is none of ours."""
    from lightning.pytorch.strategies import StrategyRegistry

    known = isinstance(name, str) and name.lower() in StrategyRegistry
    kind = StrategyRegistry[name.lower()]["strategy"] if known else None  # its method `get` would make a strategy
    return kind if isinstance(kind, type) and kind.__module__.startswith("megalight.") else None


def subclasses(base: type) -> Iterator[type]:
    """Yield all imported subclasses, at any depth."""
    below: list[type] = base.__subclasses__()
    for cls in below:
        yield cls
        yield from subclasses(cls)


def members(cls: type) -> dict[str, Any]:
    """Return constructor argument -> annotation. ``**kwargs`` adds the arguments of base classes."""
    if dataclasses.is_dataclass(cls):
        hints = _hints(cls)
        return {item.name: hints.get(item.name) for item in dataclasses.fields(cls) if item.init}
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        init = vars(base)["__init__"]
        parameters = inspect.signature(init).parameters
        hints = _hints(init)
        for name, parameter in list(parameters.items())[1:]:
            # Base classes come later in the order of `__mro__`, and must not replace an
            # argument that was overridden.
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(name, hints.get(name))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def keys_below(key: str, cls: type, above: tuple[type, ...] = ()) -> Iterator[str]:
    """Yield the keys that a class takes, with those of the dataclasses in it: no class is named for these."""
    for name, annotation in members(cls).items():
        yield f"{key}.{name}"
        inner = class_in(annotation)
        if dataclasses.is_dataclass(inner) and inner not in (*above, cls):  # one may hold its own kind
            yield from keys_below(f"{key}.{name}", inner, (*above, cls))


def class_in(annotation: Any) -> type | None:
    """Return the configurable class in an annotation: the annotation itself, or the first class of a union."""
    candidates = typing.get_args(annotation) or (annotation,)
    return next((item for item in candidates if isinstance(item, type) and item.__module__ != "builtins"), None)


def _hints(item: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(item)
    except (NameError, TypeError):  # annotations under TYPE_CHECKING, C functions
        return {}


def _bases() -> list[type]:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import CheckpointIO, Precision
    from lightning.pytorch.strategies import Strategy

    return [pl.LightningModule, pl.LightningDataModule, pl.Callback, Strategy, Logger, Precision, CheckpointIO]


FLAGS = ("-c", "--config")


def named_recipes_as_text(words: Sequence[str]) -> list[str]:
    """Return words in which names of recipes after ``-c`` are the YAML of the recipe; files win.

    Raises:
        ConfigurationError: a name has the form of one and there is none.
    """
    from megalight.cli.verbs.recipes import NAME

    found = list(words)
    for index, word in enumerate(found):
        flag, equals, value = word.partition("=")
        if flag not in FLAGS or (not equals and index + 1 == len(found)):
            continue
        place, name = (index, value) if equals else (index + 1, found[index + 1])
        if NAME.fullmatch(name) and not Path(name).exists():
            from megalight.cli.named_recipes import named

            text = yaml.safe_dump(named(name).configuration, sort_keys=False)
            found[place] = f"{flag}={text}" if equals else text
    return found


def check_files(words: Sequence[str]) -> None:
    """Check every file after ``-c`` in the words of a command.

    Raises:
        ConfigurationError: a file is missing, is not text or not YAML, is not a mapping, or has a key twice.
    """
    for value in config_files(words):
        if not is_text_of_a_mapping(value):
            read(value)


def config_files(words: Sequence[str]) -> Iterator[str]:
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


def not_yaml(path: str, text: str, error: MarkedYAMLError) -> str:
    """Say what is wrong with a line of a YAML file, and quote it.

    Args:
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


_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
_INIT_ARGS = re.compile(r"\.init_args(?=\.|$)")


@dataclass(frozen=True)
class ConfigArgs:
    """What the user wrote on the command line and in configuration files: dotted key -> value.

    Keys have no ``init_args``. A class is the value of the key it fills: ``trainer.strategy`` ->
    ``"MegatronStrategy"``, ``trainer.strategy.tensor_parallel`` -> ``2``.
    """

    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, words: Sequence[str]) -> ConfigArgs:
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
            if found := self.class_at(prefix := ".".join(parts[:end])):
                return prefix, found
        return "", None

    def class_at(self, key: str) -> type | None:
        """Return the class that fills a key: what the user named, or the default."""
        name = self.values.get(key, self.last_of(key)) or DEFAULTS.get(key)
        if key == STRATEGY and (registered := registered_strategy(name)):
            return registered
        return find_class(name) if isinstance(name, str) else None

    def known_keys(self) -> Iterator[str]:
        """Yield the keys that the classes of the command take."""
        for key in SECTIONS:
            if cls := self.class_at(key):
                yield from keys_below(key, cls)

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


EXPORT = "--export_hf"
CALLBACK = "megalight.callbacks.TransformersExport"
RESUME = "--resume.optimizer"

NEEDS = {EXPORT: "a folder to write: --export_hf=FOLDER", RESUME: "a word: --resume.optimizer=saved or configured"}
"""Flag -> what must follow it."""
MEANS = {
    EXPORT: "writes the model that fit has trained; {verb} trains none. Leave it out, or convert a checkpoint "
    "(megalight convert).",
    RESUME: "is about the optimizer of fit; {verb} has none. Leave it out.",
}
"""Flag -> why no other verb has it."""


def written_out(verb: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command without the flags, and with what they stand for at the end.

    ``--export_hf=FOLDER`` is one more callback, ``--resume.optimizer=WORD`` an option of the strategy. The
    configuration that a run saves has them, so that it does the same when it is used again.

    Raises:
        ConfigurationError: a flag has no value, is there twice, or the verb trains nothing.
    """
    rest = list[str]()
    found: dict[str, list[str]] = {flag: [] for flag in NEEDS}
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag not in found:
            rest.append(word)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise ConfigurationError(f"{flag} needs {NEEDS[flag]}")
        found[flag].append(value)
    for flag, values in found.items():
        if values and verb != "fit":
            raise ConfigurationError(f"{flag} {MEANS[flag].format(verb=verb)}")
        if len(values) > 1:
            raise ConfigurationError(f"{flag} is there {len(values)} times ({', '.join(values)}); give it once.")
    # Last, so that no other word replaces the list of callbacks, or the strategy, after them.
    rest += [f"--trainer.strategy.checkpoints.resume_optimizer={word}" for word in found[RESUME]]
    for folder in found[EXPORT]:
        rest.append("--trainer.callbacks+=" + json.dumps({"class_path": CALLBACK, "init_args": {"folder": folder}}))
    return rest
