"""ModelOpt's presets: which layers they name, and which of them serve here."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalight.errors import ConfigurationError, nearest
from megalight.plugins.modelopt.package import modelopt

SERVED = ("FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "INT8_DEFAULT_CFG", "INT8_WEIGHT_ONLY_CFG")
"""Presets that are tested against ModelOpt itself."""
HEAD = ("*lm_head*", "*output_layer*", "output.*")
"""Patterns by which presets leave out the output layer."""


@dataclass(frozen=True)
class Preset:
    """An ordered list of rules for quantizers; later rules win.

    Attributes:
        name: its name in ``modelopt.torch.quantization``.
        rules: each has a pattern of quantizer names, and ``cfg`` (a format) or ``enable``.
    """

    name: str
    rules: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, name: str, head: bool) -> Preset:
        """Return the preset; ``head``: with the output layer, which all presets leave out.

        Raises:
            ConfigurationError: there is no such preset, or it needs what is not supported here.
            MissingPackageError: ModelOpt is not installed.
        """
        package = modelopt()
        known = package.config.choices
        if name not in known:
            raise ConfigurationError(
                f"ModelOpt has no preset {name!r}.{nearest(name, known)} It has {', '.join(sorted(known))}."
            )
        config = getattr(package, name)
        rules = [copy.deepcopy(rule) for rule in config["quant_cfg"]]
        why = _why_not(config.get("algorithm"), rules)
        if why is None and name not in SERVED:
            # Its patterns would match no layer of ours, and what it means to leave out would be quantized.
            why = "names modules of other models"
        if why is not None:
            raise ConfigurationError(
                f"preset {name!r} {why}, which is not supported here. Use one of {', '.join(SERVED)}."
            )
        if head:
            rules = [rule for rule in rules if rule["quantizer_name"] not in HEAD]
        return cls(name, tuple(rules))

    def names(self, quantizer: str) -> bool:
        """Return whether the preset switches on this quantizer of a linear layer (``mlp.down.weight_quantizer``)."""
        enabled = False
        for rule in self.rules:
            # Rules with a parent class are for layers of other kinds, such as norms of batches.
            if not rule.get("parent_class") and fnmatch.fnmatch(quantizer, rule["quantizer_name"]):
                enabled = rule.get("enable", True)
        return enabled


def _why_not(algorithm: Any, rules: list[dict[str, Any]]) -> str | None:
    method = algorithm.get("method") if isinstance(algorithm, Mapping) else algorithm
    if method not in (None, "max"):
        return f"calibrates by {method!r}"
    for rule in rules:
        formats = rule.get("cfg") or {}
        if isinstance(formats, list):
            return f"quantizes {rule['quantizer_name']} twice"
        blocks = formats.get("block_sizes") or {}
        # `{-1: None}` with dynamic scales: a scale for each token, found in the forward pass.
        if any(size is not None for size in blocks.values()):
            return f"has blocks of elements in {rule['quantizer_name']}"
        of_linears = rule["quantizer_name"].endswith(("weight_quantizer", "input_quantizer"))
        if rule.get("enable", True) and formats and not of_linears:
            return f"quantizes {rule['quantizer_name']}, not only weights and inputs of linear layers"
    return None
