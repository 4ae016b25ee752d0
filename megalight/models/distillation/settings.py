"""Settings of distillation as ModelOpt's plugin for Megatron reads them from YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from megalight.errors import ConfigurationError
from megalight.models.distillation.loss import DistillationLoss, LayerPair

KNOWN = ("logit_layers", "intermediate_layer_pairs", "skip_lm_loss", "kd_loss_scale", "logit_kl_temperature")


def read_modelopt(path: str | os.PathLike[str]) -> DistillationLoss:
    """Read a file with ModelOpt's ``DistillationConfig``. Losses are balanced, as there.

    Raises:
        ConfigurationError: there is no such file, a key is unknown, or a value is not of the form that it needs.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"modelopt_config={path} is no YAML file that can be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold keys and values, such as kd_loss_scale: 1.0.")
    # Files that ModelOpt itself has written name all of its fields.
    given = {key: value for key, value in found.items() if key in KNOWN or value is not None}
    if unknown := sorted(set(given) - set(KNOWN)):
        raise ConfigurationError(
            f"{path} has {', '.join(map(repr, unknown))}, which is not supported here; remove it. Known are "
            f"{', '.join(KNOWN)}."
        )
    layers = given.get("logit_layers", ["output_layer"] * 2)
    if not isinstance(layers, list) or [str(name).rpartition(".")[2] for name in layers] != ["output_layer"] * 2:
        raise ConfigurationError(
            f"{path}: logit_layers={layers}; logits are those of the output layers of both models, so "
            "write [output_layer, output_layer], or leave it out."
        )
    own = not _of(bool, given, "skip_lm_loss", True, path)
    pairs = tuple(_pair(entry, path) for entry in given.get("intermediate_layer_pairs") or ())
    scale = _of(float, given, "kd_loss_scale", 1.0, path)
    return DistillationLoss(
        temperature=_of(float, given, "logit_kl_temperature", 1.0, path),
        # ModelOpt does not use it without the student's own loss.
        scale=scale if own else 1.0,
        own=own,
        pairs=pairs,
        balance=own or bool(pairs),
    )


def _pair(entry: Any, path: object) -> LayerPair:
    if not isinstance(entry, list) or len(entry) not in (2, 3) or not all(isinstance(part, str) for part in entry):
        raise ConfigurationError(
            f"{path}: intermediate_layer_pairs has {entry!r}; write [student's layer, teacher's layer] or "
            "[student's layer, teacher's layer, cosine or mse]."
        )
    return LayerPair(student=entry[0], teacher=entry[1], loss=entry[2] if len(entry) == 3 else "cosine")


def _of(kind: type, given: dict[str, Any], key: str, default: Any, path: object) -> Any:
    value = given.get(key, default)
    # A whole number is a float, but True is not.
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (kind, int)):
        raise ConfigurationError(f"{path}: {key}={value!r} is no {kind.__name__}; the usual one is {default}.")
    return value
