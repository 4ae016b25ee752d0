"""Folders of ``transformers``: ``config.json`` beside safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_folder(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a model that ``save_pretrained`` wrote, in one file or several.

    Raises:
        CheckpointError: no such folder, a file is missing or torn, or the weights are not safetensors.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG}; give the folder that save_pretrained wrote.")
    config = _json(folder / CONFIG)
    if (folder / INDEX).is_file():
        files = sorted(set(_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        files = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= _tensors(folder / name)
    return config, tensors


def write_folder(path: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write what :func:`read_folder` and ``from_pretrained`` read."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not JSON ({error}); copy the folder again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}; a JSON object is expected.")
    return content


def _tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist; weights are read from safetensors files alone. Load the model with transformers "
            "and save it again with save_pretrained, or copy the folder again."
        )
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except Exception as error:  # the package raises its own and the system's
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}); copy it again.") from error
    return tensors
