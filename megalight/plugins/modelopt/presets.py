"""ModelOpt's presets: which layers they name, and which of them serve here."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import importlib
import io
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megalight.errors import ConfigurationError, nearest
from megalight.imports import require


def modelopt(part: str = "torch.quantization") -> ModuleType:
    """Import a part of the package and return it.

    Raises:
        MissingPackageError: it is not installed.
    """
    with warnings.catch_warnings():
        # The package uses functions that torch 2.13 deprecates, and tells users which optional packages it lacks.
        warnings.simplefilter("ignore")
        require("modelopt", "quantization")
        return importlib.import_module(f"modelopt.{part}")


SERVED = (
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "INT8_DEFAULT_CFG",
    "INT8_WEIGHT_ONLY_CFG",
    "INT8_SMOOTHQUANT_CFG",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "INT4_AWQ_CFG",
    "W4A8_AWQ_BETA_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4_DEFAULT_CFG",
    "NVFP4_AWQ_LITE_CFG",
    "W4A8_NVFP4_FP8_CFG",
    "MXFP4_DEFAULT_CFG",
    "MXFP6_DEFAULT_CFG",
    "MXFP8_DEFAULT_CFG",
    "general/ptq/fp8_default-kv_fp8",
    "general/ptq/fp8_default-kv_fp8_cast",
    "general/ptq/int4_blockwise_weight_only",
)
"""Presets that are tested against ModelOpt itself; those with slashes are recipes of its library."""
KV = "*[kv]_bmm_quantizer"
"""The pattern by which presets name keys and values."""
KV_SERVED = ("FP8_KV_CFG", "NVFP4_KV_CFG")
"""Presets for keys and values. They have no other rules."""
SEARCHES = ("awq_lite", "smoothquant")
"""Calibration that finds scales of input features, and changes weights."""
HEAD = ("*lm_head*", "*output_layer*", "output.*")
"""Patterns by which presets leave out the output layer."""
OURS = {"*mlp.shared_expert_gate.*": "*mlp.shared_gate.*"}
"""Patterns of presets for a layer that has another name here."""


@dataclass(frozen=True)
class Preset:
    """An ordered list of rules for quantizers; later rules win.

    Attributes:
        name: its name in ``modelopt.torch.quantization``.
        rules: each has a pattern of quantizer names, and ``cfg`` (a format) or ``enable``.
        algorithm: ``method`` of calibration, and its options.
    """

    name: str
    rules: tuple[Mapping[str, Any], ...]
    algorithm: Mapping[str, Any]

    @property
    def only_cuda(self) -> str | None:
        """The pattern of a format that ModelOpt's kernels for CUDA alone can round to; None: all run everywhere."""
        for rule in self.rules:
            if any("scale_bits" in (each.get("block_sizes") or {}) for each in _formats(rule)):
                return str(rule["quantizer_name"])
        return None

    @property
    def searches(self) -> bool:
        """Whether calibration finds scales of input features, and changes weights."""
        return self.algorithm["method"] in SEARCHES

    @property
    def bits(self) -> float:
        """Bits of a weight in this format, as ModelOpt counts: those of scales only where its preset tells them."""
        config = {"quant_cfg": [dict(rule) for rule in self.rules], "algorithm": dict(self.algorithm)}
        recipe = modelopt("torch.quantization.algorithms").QuantRecipe
        return 16 * float(recipe(quant_cfg=config, name=self.name).compression)

    @property
    def enabling(self) -> list[Mapping[str, Any]]:
        """The rules that give formats. Which layers they are for has been found by :meth:`names`."""
        return [rule for rule in self.rules if rule.get("enable", True)]

    @classmethod
    def read(cls, name: str, head: bool, kv: str | None = None) -> Preset:
        """Return the preset.

        Args:
            name: the preset; one for keys and values alone is one too.
            head: with the output layer, which all presets leave out.
            kv: with the rules of this preset for keys and values. What ``name`` leaves out stays left out.

        Raises:
            ConfigurationError: there is no such preset, or it needs what is not supported here.
            MissingPackageError: ModelOpt is not installed.
        """
        if name in KV_SERVED and kv is None:
            base, kv = _rules("FP8_DEFAULT_CFG")[0], name
            rules, algorithm = [rule for rule in base if not rule.get("enable", True)], {"method": "max"}
        else:
            rules, algorithm = _rules(name)
            why = _why_not(algorithm["method"], rules)
            if why is None and name not in SERVED:
                # Its patterns would match no layer of ours, and what it means to leave out would be quantized.
                why = "names modules of other models"
            if why is not None:
                raise ConfigurationError(
                    f"preset {name!r} {why}, which is not supported here. Use one of {', '.join(SERVED)}."
                )
        if kv is not None:
            added, _ = _rules(kv)
            if kv not in KV_SERVED:
                raise ConfigurationError(f"kv={kv!r} is not supported here. Use one of {', '.join(KV_SERVED)}.")
            # The first rule switches all off. The later ones leave modules out, such as towers of images.
            rules[1:1] = added
        if head:
            rules = [rule for rule in rules if rule["quantizer_name"] not in HEAD]
        return cls(name, tuple(rules), algorithm)

    def names(self, quantizer: str) -> bool:
        """Return whether the preset switches on this quantizer of a linear layer (``mlp.down.weight_quantizer``)."""
        enabled = False
        for rule in self.rules:
            # Rules with a parent class are for layers of other kinds, such as norms of batches.
            if not rule.get("parent_class") and fnmatch.fnmatch(quantizer, rule["quantizer_name"]):
                enabled = rule.get("enable", True)
        return enabled


def _unknown(name: str, known: Collection[str]) -> ConfigurationError:
    return ConfigurationError(
        f"ModelOpt has no preset {name!r}.{nearest(name, known)} It has {', '.join(sorted(known))}."
    )


def _rules(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return copies of the rules of a preset, or of a recipe for quantization, and of its algorithm."""
    if "/" in name:
        config = _recipe(name)
    else:
        # All of its presets end so. What is none of them needs no package, whose import takes seconds.
        if not name.endswith(("_CFG", "_CONFIG")):
            raise _unknown(name, (*SERVED, *KV_SERVED))
        package = modelopt()
        if name not in package.config.choices:
            raise _unknown(name, package.config.choices)
        config = getattr(package, name)
    algorithm = config.get("algorithm")
    algorithm = dict(algorithm) if isinstance(algorithm, Mapping) else {"method": algorithm}
    rules = []
    for rule in config["quant_cfg"]:
        pattern = rule["quantizer_name"]
        rules.append({**copy.deepcopy(rule), "quantizer_name": OURS.get(pattern, pattern)})
    return rules, algorithm


def _recipe(name: str) -> Mapping[str, Any]:
    library = modelopt("recipe.loader")
    known = [recipe for recipe in SERVED if "/" in recipe]
    # Those of users have no name that a checkpoint could hold.
    if not library.BUILTIN_RECIPES_LIB.joinpath(f"{name}.yaml").is_file():
        raise ConfigurationError(
            f"ModelOpt's library has no recipe {name!r}.{nearest(name, known)} Name one of it without .yaml, such as "
            f"{', '.join(known)}."
        )
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it loads
        recipe = library.load_recipe(name)
    if not hasattr(recipe, "quantize"):
        raise ConfigurationError(
            f"recipe {name!r} is not one of quantization by fixed rules. Use one of {', '.join(known)}."
        )
    found: Mapping[str, Any] = recipe.quantize.model_dump(exclude_unset=True)
    return found


def _formats(rule: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the formats of a rule; several round one after the other."""
    found = rule.get("cfg") or []
    return found if isinstance(found, list) else [found]


def _why_not(method: str | None, rules: list[dict[str, Any]]) -> str | None:
    if method not in (None, "max", *SEARCHES):
        return f"calibrates by {method!r}"
    for rule in rules:
        pattern, formats = rule["quantizer_name"], _formats(rule)
        for blocks in (each.get("block_sizes") or {} for each in formats):
            # `{-1: None}` with dynamic scales: a scale for each token, found in the forward pass.
            of_rows = blocks.get("type") == "static" and set(blocks) == {-1, "type"}
            squares = set(blocks) == {-1, -2}
            # Blocks of floating-point elements, whose scales are computed in each pass.
            scaled = blocks.get("type") == "dynamic" and set(blocks) == {-1, "type", "scale_bits"}
            if of_rows or squares or scaled:
                continue
            if any(size is not None for key, size in blocks.items() if key != "type") or "scale_bits" in blocks:
                return f"has blocks of elements in {pattern}"
        known = pattern == KV or pattern.endswith(("weight_quantizer", "input_quantizer"))
        if rule.get("enable", True) and formats and not known:
            return f"quantizes {pattern}, not only weights and inputs of linear layers"
    return None
