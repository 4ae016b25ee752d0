"""The JSON schema of configuration files, from the same signatures against which commands are checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from megalight.cli import signatures
from megalight.cli.signatures import Annotation, ClassSource, find_class, find_module
from megalight.cli.unknown_keys import START, STRATEGY

DRAFT = "https://json-schema.org/draft/2020-12/schema"
NAMES: dict[type, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}

CHOICES: dict[str, tuple[str, ...]] = {
    "model": (
        "megalight.models.gpt.GPTModule",
        "megalight.models.bert.BertModule",
        "megalight.models.vlm.VLMModule",
        "megalight.models.eagle.EagleModule",
        "megalight.rl.module.GRPOModule",
    ),
    "data": (
        "megalight.data.gpt.module.GPTDataModule",
        "megalight.data.bert.module.BertDataModule",
        "megalight.data.chat.module.SFTDataModule",
        "megalight.data.multimodal.module.MultimodalDataModule",
        "megalight.rl.data.PromptDataModule",
    ),
    STRATEGY: (
        START[STRATEGY],
        "megalight.strategies.MegatronFSDPStrategy",
        "megalight.strategies.MegatronTowersStrategy",
        "megalight.strategies.MegatronTowersBesideStrategy",
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
