"""Every option, from the signatures against which commands are checked: help pages and the JSON schema.

They are made from the source of the classes, so they take no seconds and cannot be out of date.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalight.cli import signatures
from megalight.cli.config_args import each_option
from megalight.cli.signatures import SCALARS, Annotation, ClassSource, SourceArgument, find_class, find_module
from megalight.cli.unknown_keys import START, STRATEGY, Classes, named_classes
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
        START[STRATEGY],
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


@dataclass(frozen=True)
class Option:
    """One key of the configuration.

    Attributes:
        key: the dotted key.
        accepted: what it accepts, as far as the source says.
        written: its annotation and its default, as they are written.
        description: what the docstring says about it; may be empty.
    """

    key: str
    accepted: Annotation
    written: SourceArgument
    description: str

    @property
    def kind(self) -> str:
        """What may stand after ``=``, short: ``int``, ``auto|off``, ``int|auto|null``; else the annotation."""
        if not self.accepted.complete or self.accepted.source is not None:
            return self.written.annotation
        scalars = [name for name, kind in SCALARS.items() if kind in self.accepted.scalars]
        words = [*scalars, *map(str, self.accepted.choices), *["null"] * self.accepted.optional]
        return "|".join(dict.fromkeys(words))


def options(prefix: str, source: ClassSource, above: tuple[ClassSource, ...] = ()) -> Iterator[Option]:
    """Yield the options of a class, each followed by those of the dataclass that it takes.

    Other classes are chosen by their path, and which one is not known here.

    Args:
        prefix: the key that the class fills.
        source: the class.
        above: classes that hold this one. A class may have one of its own kind in it: of that one the key is enough.
    """
    said, written = descriptions(source), signatures.written(source)
    for name, accepted in (signatures.members(source) or {}).items():
        key = f"{prefix}.{name}"
        yield Option(key, accepted, written.get(name, SourceArgument()), said.get(name, ""))
        inner = accepted.source
        if inner is not None and inner.is_dataclass and inner not in (*above, source):
            yield from options(key, inner, (*above, source))


WIDTH = 110
DEFAULTS = {**START, "model": CHOICES["model"][0], "data": CHOICES["data"][0]}
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
    classes: Classes = {key: find_class(path) for key, path in DEFAULTS.items()}
    for part in each_option(words):
        classes |= named_classes(part, classes)
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
    for key in ("trainer", STRATEGY, "model", "data"):
        lines += _section(verb, key, classes[key])
    for key in CHOICES:
        lines += _choices(verb, key)
    lines += ["", "docs/commands.md explains; megalight schema prints the same for editors."]
    return "\n".join(lines)


def page_of_class(verb: str, words: Sequence[str]) -> str | None:
    """Return the options of the class that ``--KEY.help NAME`` or ``--KEY.help=NAME`` asks for, if any word does.

    Without a name, they are those of the default. None also where the source does not say: the parser must answer.
    """
    for index, word in enumerate(words):
        key, equals, name = word.removeprefix("--").partition("=")
        key = key.removesuffix(".help")
        if not word.startswith("--") or f"--{key}.help{equals}{name}" != word or key not in CHOICES:
            continue
        following = words[index + 1] if index + 1 < len(words) else ""
        asked = name if equals else "" if following.startswith("-") else following
        source = named_classes({key: asked}, {}).get(key) if asked else find_class(DEFAULTS.get(key, ""))
        if source is not None and signatures.members(source) is not None:
            return "\n".join([*_section(verb, key, source)][1:])
    return None


def _section(verb: str, key: str, source: ClassSource | None) -> Iterator[str]:
    """Yield the options of one class."""
    yield ""
    if source is None or signatures.members(source) is None:
        yield f"{key}: the source of its class does not list the options. Type: megalight {verb} --{key}.help CLASS"
        return
    yield f"{key}: {source.name}. {plain(source.summary)}"
    for option in options(key, source):
        default = OTHER_DEFAULTS.get(option.key, option.written.default)
        said = option.description
        # Lightning's descriptions end with it.
        told = default in ("", "None") or "Default:" in said
        yield from _entry(f"--{option.key}={option.kind}", said if told else f"{said} (default: {default})".strip())


def _choices(verb: str, key: str) -> Iterator[str]:
    """Yield the classes that a key may name."""
    yield ""
    yield f"classes for {key} (their options: megalight {verb} --{key}.help NAME):"
    for source in proposed(CHOICES[key]).values():
        yield from _entry(source.name, plain(source.summary))


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
        trainer = find_class(START["trainer"])
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
        rules = []
        for path, source in proposed(CHOICES[key]).items():
            self._define(source)
            names = list(dict.fromkeys([path, f"{source.module.name}.{source.name}", source.name]))
            condition: dict[str, Any] = {"properties": {"class_path": {"enum": names}}}
            if needs_class or path != CHOICES[key][0]:  # else it is the default
                condition["required"] = ["class_path"]
            rules.append({"if": condition, "then": {"properties": {"init_args": {"$ref": f"#/$defs/{_name(source)}"}}}})
        return {
            "type": "object",
            "properties": {
                "class_path": {"type": "string", "examples": list(proposed(CHOICES[key]))},
                "init_args": {"type": "object"},
                "dict_kwargs": {"type": "object"},
            },
            "required": ["class_path"] if needs_class else [],
            "additionalProperties": False,
            "allOf": rules,
        }

    def _define(self, source: ClassSource) -> None:
        """Add the definition of a class: its arguments, with what its docstring says about them."""
        name = _name(source)
        if name in self.definitions:
            return
        arguments = signatures.members(source)
        definition: dict[str, Any] = {"type": "object", "description": plain(source.summary)}
        # Entered before its arguments are read: a class may hold itself.
        self.definitions[name] = definition
        # Without readable arguments the definition accepts all.
        if arguments is None:
            return
        said = descriptions(source)
        definition["properties"] = {
            argument: {**self._accepted(annotation), **({"description": said[argument]} if argument in said else {})}
            for argument, annotation in arguments.items()
        }
        definition["patternProperties"] = {r"\+$": True}  # ``plugins+`` appends to a list
        definition["additionalProperties"] = False

    def _accepted(self, annotation: Annotation) -> dict[str, Any]:
        # What cannot be read accepts anything: an editor must not mark a right value.
        if not annotation.complete:
            return {}
        options: list[dict[str, Any]] = []
        types = [NAMES[kind] for kind in NAMES if kind in annotation.scalars] + ["null"] * annotation.optional
        options += [{"type": types}] if types else []
        options += [{"enum": list(annotation.choices)}] if annotation.choices else []
        if annotation.source is not None and annotation.source.is_dataclass:
            self._define(annotation.source)
            options.append({"$ref": f"#/$defs/{_name(annotation.source)}"})
        elif annotation.source is not None:
            options.append({"type": ["object", "string"]})
        return options[0] if len(options) == 1 else {"anyOf": options}


def descriptions(source: ClassSource) -> dict[str, str]:
    """Return argument -> what the docstring of the class, or of a base class, says about it."""
    found: dict[str, str] = {}
    # Base classes first: what a class says itself wins.
    for base in source.bases():
        found |= {} if base is None else descriptions(base)
    for match in re.finditer(r"^    (\w+(?:, \w+)*): ?(.*(?:\n {8}.*)*)", source.doc, re.MULTILINE):
        found |= dict.fromkeys(match[1].split(", "), plain(match[2]))
    return found


def plain(text: str) -> str:
    """Return a docstring's text in one line without its marks; of a path with ``~`` the last part, as Sphinx does."""
    text = re.sub(r":\w+:`(?:~[^`]*\.(?=[^`.]+`))?~?([^`]*)`", r"\1", " ".join(text.split()))
    return text.replace("``", "")


def proposed(paths: tuple[str, ...]) -> Mapping[str, ClassSource]:
    """Return import path -> class, for classes and for what modules export."""
    found: dict[str, ClassSource] = {}
    for path in paths:
        module = find_module(path)
        # A package exports what it imports; what another module imports is not its own.
        exports = (
            {}
            if module is None
            else {
                name: node
                for name, node in module.names.items()
                if module.path.name == "__init__.py" or isinstance(node, ast.ClassDef)
            }
        )
        # Only names in capitals are classes; modules export functions as well.
        names = [path] if module is None else [f"{path}.{name}" for name in exports if name[0].isupper()]
        sources = {name: source for name in names if (source := find_class(name)) is not None}
        found |= dict(sorted(sources.items()))
    return found


def _name(source: ClassSource) -> str:
    return f"{source.module.name}.{source.name}"
