"""Every option, from the signatures of the classes: the page of all options, and the JSON schema."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megalight.cli.config_args import DEFAULTS, SECTIONS, STRATEGY, ConfigArgs, find_class, members
from megalight.cli.lightning import prepare
from megalight.cli.verbs import TRAINER_VERBS

CHOICES: dict[str, tuple[str, ...]] = {
    "model": (
        "megalight.models.gpt.GPTModule",
        "megalight.models.bert.BertModule",
        "megalight.models.vlm.VLMModule",
        "megalight.models.eagle.EagleModule",
        "megalight.rl.module.GRPOModule",
        "megalight.rl.module.HFGRPOModule",
    ),
    "data": (
        "megalight.data.gpt.module.GPTDataModule",
        "megalight.data.bert.module.BertDataModule",
        "megalight.data.chat.module.SFTDataModule",
        "megalight.data.multimodal.module.MultimodalDataModule",
        "megalight.data.streaming.module.StreamingDataModule",
        "megalight.data.streaming.module.StreamingSFTDataModule",
        "megalight.rl.data.PromptDataModule",
    ),
    STRATEGY: (
        DEFAULTS[STRATEGY],
        "megalight.strategies.MegatronFSDPStrategy",
        "megalight.strategies.MegatronTowersStrategy",
    ),
    "trainer.callbacks": ("megalight.callbacks", "lightning.pytorch.callbacks"),
    "trainer.logger": ("megalight.loggers", "lightning.pytorch.loggers"),
}
"""Key -> the classes that editors propose for it, by their import paths or those of their modules."""

ROOT: dict[str, dict[str, Any]] = {
    "seed_everything": {"type": ["integer", "boolean", "null"], "description": "Seed of all random numbers."},
    "ckpt_path": {"type": ["string", "null"], "description": "A checkpoint, a run's folder, last, or auto."},
    "weights_only": {"type": ["boolean", "null"]},
    "verbose": {"type": "boolean"},
    "return_predictions": {"type": ["boolean", "null"]},
}


SCALARS = {int: "int", float: "float", bool: "bool", str: "str"}


@dataclass(frozen=True)
class Accepted:
    """What an argument accepts.

    Attributes:
        scalars: the plain types, a subset of int, float, bool and str.
        choices: the values of a ``Literal``.
        cls: the class, if there is exactly one.
        complete: nothing else is accepted, except None if ``optional``.
        optional: None is accepted.
    """

    scalars: tuple[type, ...] = ()
    choices: tuple[Any, ...] = ()
    cls: type | None = None
    complete: bool = True
    optional: bool = False

    @classmethod
    def of(cls, annotation: Any) -> Accepted:
        """Return what an annotation accepts."""
        union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        parts = typing.get_args(annotation) if union else (annotation,)
        scalars = tuple(part for part in parts if part in SCALARS)
        literals = [part for part in parts if typing.get_origin(part) is Literal]
        classes = [part for part in parts if isinstance(part, type) and part not in (*SCALARS, types.NoneType)]
        # Builtin containers, and kinds of numbers and texts such as jsonargparse's, have rules of their own.
        known = [each for each in classes if each.__module__ != "builtins" and not issubclass(each, (*SCALARS,))]
        return Accepted(
            scalars,
            tuple(value for part in literals for value in typing.get_args(part)),
            known[0] if len(known) == 1 else None,
            len(known) < 2 and len(scalars) + len(literals) + len(known) + (types.NoneType in parts) == len(parts),
            types.NoneType in parts,
        )


@dataclass(frozen=True)
class Option:
    """One key of the configuration.

    Attributes:
        annotation: what its argument accepts.
        default: its default, as text; empty if there is none, or if a function makes it.
        description: what the docstring says about it; may be empty.
    """

    key: str
    annotation: Any
    default: str
    description: str

    @property
    def accepted(self) -> Accepted:
        """What it accepts."""
        return Accepted.of(self.annotation)

    @property
    def kind(self) -> str:
        """What may stand after ``=``, short: ``int``, ``auto|off``, ``int|auto|null``; else the annotation."""
        accepted = self.accepted
        if not accepted.complete or accepted.cls is not None:
            name = self.annotation.__name__ if isinstance(self.annotation, type) else str(self.annotation)
            return re.sub(r"[\w.]*\.(?=\w)", "", name).replace("NoneType", "None")
        words = [*(SCALARS[kind] for kind in accepted.scalars), *map(str, accepted.choices)]
        return "|".join(dict.fromkeys([*words, *["null"] * accepted.optional]))


def options(prefix: str, cls: type, above: tuple[type, ...] = ()) -> Iterator[Option]:
    """Yield the options of a class, each followed by those of the dataclass that it takes.

    Other classes are chosen by their path, and which one is not known here.

    Args:
        prefix: the key that the class fills.
        above: classes that hold this one. A class may have one of its own kind in it: of that one the key is enough.
    """
    said, written = descriptions(cls), defaults(cls)
    for name, annotation in members(cls).items():
        option = Option(f"{prefix}.{name}", annotation, written.get(name, ""), said.get(name, ""))
        yield option
        inner = option.accepted.cls
        if dataclasses.is_dataclass(inner) and inner not in (*above, cls):
            yield from options(option.key, inner, (*above, cls))


def defaults(cls: type) -> dict[str, str]:
    """Return argument -> its default value as text. Nearer classes win; objects have none."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            values = {name: parameter.default for name, parameter in parameters.items()}
            plain = (bool, int, float, str, list, tuple, types.NoneType)
            found |= {name: str(value) for name, value in values.items() if isinstance(value, plain)}
    return found


WIDTH = 110
SHOWN = {**DEFAULTS, "model": CHOICES["model"][0], "data": CHOICES["data"][0]}
"""Classes whose options are shown where the command names no other."""

OTHER_DEFAULTS = {STRATEGY: "megatron"}
"""Defaults of the command that are not those of the class."""

CONFIGURATION = {
    "config": "A recipe in YAML (short: -c); give several to stack them: later values win.",
    "print_config": "Print the complete configuration and stop.",
    **{key: rules.get("description", "") for key, rules in ROOT.items()},
}
"""Keys of the configuration itself -> what they mean."""

ONLY = {"verbose": ("validate", "test"), "return_predictions": ("predict",)}
"""Keys that not every verb takes -> the verbs that do."""


def page(verb: str, words: Sequence[str]) -> str:
    """Return the page.

    Args:
        verb: ``fit``, ``validate``, ``test`` or ``predict``.
        words: the other words of the command. Options of the classes that they name are shown.
    """
    prepare()
    given = ConfigArgs.read(words)
    lines = [
        f"usage: megalight {verb} -c FILE [-c FILE ...] [--KEY=VALUE ...]",
        "",
        f"{TRAINER_VERBS[verb].capitalize()}. Every option, with its kind and its default. In a file, dots are levels:",
        "--trainer.max_steps=10 is `trainer: {max_steps: 10}`.",
        "",
        "configuration:",
    ]
    for key, meaning in CONFIGURATION.items():
        if verb in ONLY.get(key, (verb,)):
            lines += _entry(f"--{key}", meaning)
    for key in SECTIONS:
        lines += _section(key, given.class_at(key) if key in given.values else find_class(SHOWN[key]))
    for key in CHOICES:
        lines += ["", f"classes for {key} (their options: megalight {verb} --{key}.help NAME):"]
        for cls in proposed(key).values():
            lines += _entry(cls.__name__, summary(cls))
    lines += ["", "docs/commands.md explains; megalight schema prints the same for editors."]
    return "\n".join(lines)


def _section(key: str, cls: type | None) -> Iterator[str]:
    """Yield the options of one class."""
    yield ""
    if cls is None:
        yield f"{key}: there is no such class."
        return
    yield f"{key}: {cls.__name__}. {summary(cls)}"
    for option in options(key, cls):
        default = OTHER_DEFAULTS.get(option.key, option.default)
        said = option.description
        # Lightning's descriptions end with it.
        told = default in ("", "None") or "Default:" in said
        yield from _entry(f"--{option.key}={option.kind}", said if told else f"{said} (default: {default})".strip())


def _entry(head: str, text: str) -> list[str]:
    """Return one option or class, and its meaning below it."""
    return [f"  {head}", *textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]


DRAFT = "https://json-schema.org/draft/2020-12/schema"
NAMES: dict[type, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}


class Schema:
    """Builds the schema; every class is one definition, to which others refer."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def build(self) -> dict[str, Any]:
        """Return the schema of a whole file."""
        prepare()
        trainer = find_class(DEFAULTS["trainer"])
        assert trainer is not None
        self._define(trainer)
        options = self.definitions[_name(trainer)]["properties"]
        options["strategy"] = {"anyOf": [{"type": "string"}, self._classes(STRATEGY, needs_class=False)]}
        # A strategy may also be a name, which then needs no class.
        callback = self._classes("trainer.callbacks")
        options["callbacks"] = {"anyOf": [{"type": ["string", "null"]}, callback, {"type": "array", "items": callback}]}
        # A recipe may also append to a list that another has begun.
        options["callbacks+"] = options["callbacks"]
        logger = self._classes("trainer.logger")
        kinds = {"type": ["string", "boolean", "null"]}
        options["logger"] = {"anyOf": [kinds, logger, {"type": "array", "items": logger}]}
        properties = {
            **ROOT,
            "trainer": {"$ref": f"#/$defs/{_name(trainer)}"},
            **{key: {"anyOf": [{"type": "string"}, self._classes(key)]} for key in ("model", "data")},
        }
        return {
            "$schema": DRAFT,
            "title": "Megalight's configuration",
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            "$defs": self.definitions,
        }

    def _classes(self, key: str, *, needs_class: bool = True) -> dict[str, Any]:
        """Return the schema of ``class_path`` and ``init_args``. Arguments of classes of the user are not checked."""
        rules, classes = [], proposed(key)
        for path, cls in classes.items():
            self._define(cls)
            names = list(dict.fromkeys([path, _name(cls), cls.__name__]))
            condition: dict[str, Any] = {"properties": {"class_path": {"enum": names}}}
            if needs_class or cls is not find_class(CHOICES[key][0]):  # else it is the default
                condition["required"] = ["class_path"]
            rules.append({"if": condition, "then": {"properties": {"init_args": {"$ref": f"#/$defs/{_name(cls)}"}}}})
        return {
            "type": "object",
            "properties": {
                "class_path": {"type": "string", "examples": [*classes]},
                "init_args": {"type": "object"},
                "dict_kwargs": {"type": "object"},
            },
            "required": ["class_path"] if needs_class else [],
            "additionalProperties": False,
            "allOf": rules,
        }

    def _define(self, cls: type) -> None:
        """Add the definition of a class: its arguments, with what its docstring says about them."""
        name = _name(cls)
        if name in self.definitions:
            return
        definition: dict[str, Any] = {"type": "object", "description": summary(cls)}
        # Entered before its arguments are read: a class may hold itself.
        self.definitions[name] = definition
        said = descriptions(cls)
        definition["properties"] = {
            argument: {**self._accepted(annotation), **({"description": said[argument]} if argument in said else {})}
            for argument, annotation in members(cls).items()
        }
        definition["patternProperties"] = {r"\+$": True}  # ``plugins+`` appends to a list
        definition["additionalProperties"] = _takes_more(cls)

    def _accepted(self, annotation: Any) -> dict[str, Any]:
        accepted = Accepted.of(annotation)
        # Of what is not plain anything is accepted: an editor must not mark a right value.
        if not accepted.complete:
            return {}
        options: list[dict[str, Any]] = []
        kinds = [NAMES[kind] for kind in NAMES if kind in accepted.scalars] + ["null"] * accepted.optional
        options += [{"type": kinds}] if kinds else []
        options += [{"enum": list(accepted.choices)}] if accepted.choices else []
        if dataclasses.is_dataclass(accepted.cls):
            self._define(accepted.cls)
            options.append({"$ref": f"#/$defs/{_name(accepted.cls)}"})
        elif accepted.cls is not None:
            options.append({"type": ["object", "string"]})
        return options[0] if len(options) == 1 else {"anyOf": options}


def _takes_more(cls: type) -> bool:
    """Whether a class takes arguments that no signature names."""
    inits = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    kinds = ({each.kind for each in inspect.signature(init).parameters.values()} for init in inits)
    return all(inspect.Parameter.VAR_KEYWORD in each for each in kinds)


ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ?(.*(?:\n {8}.*)*)", re.MULTILINE)
"""Arguments in a docstring, and what is said about them."""


def descriptions(cls: type) -> dict[str, str]:
    """Return argument -> what the docstring of the class, of its constructor, or of a base class says about it."""
    found: dict[str, str] = {}
    # Base classes first: what a class says itself wins.
    for base in reversed(cls.__mro__):
        for text in (base.__doc__, vars(base)["__init__"].__doc__ if "__init__" in vars(base) else None):
            for match in ENTRY.finditer(inspect.cleandoc(text or "")):
                found |= dict.fromkeys(match[1].split(", "), plain(match[2]))
    return found


def summary(cls: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return plain(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0])


def plain(text: str) -> str:
    """Return a docstring's text in one line without its marks; of a path with ``~`` the last part, as Sphinx does."""
    text = re.sub(r":\w+:`(?:~[^`]*\.(?=[^`.]+`))?~?([^`]*)`", r"\1", " ".join(text.split()))
    return text.replace("``", "")


def proposed(key: str) -> dict[str, type]:
    """Return import path -> class, for the classes that are proposed for a key, and for what the modules export."""
    found: dict[str, type] = {}
    for path in CHOICES[key]:
        cls = find_class(path)
        if cls is not None:
            found[path] = cls
            continue
        module = importlib.import_module(path)
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == path
        ]
        # Only names in capitals are of classes that a user may name.
        exported = ((name, getattr(module, name)) for name in sorted(names) if name[0].isupper())
        found |= {f"{path}.{name}": each for name, each in exported if isinstance(each, type)}
    return found


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
