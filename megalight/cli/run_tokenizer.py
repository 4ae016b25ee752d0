"""The tokenizer of a run whose checkpoints hold none: single files of Lightning's own strategies.

The command writes ``config.yaml`` into the run's folder, and that names the run's tokenizer, or its data, beside which
``prepare`` saved one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megalight.data.blend import Mixture
from megalight.data.corpus import tokenizer_path
from megalight.errors import DataError

CONFIG = "config.yaml"
LEVELS = 2
"""Folders above a checkpoint in which the configuration may be: beside it, or above ``checkpoints``."""


def of_run(checkpoint: Path) -> Path | None:
    """Return the path of the tokenizer of the run that wrote a checkpoint, or None if that is not known."""
    for folder in checkpoint.resolve().parents[:LEVELS]:
        if (folder / CONFIG).is_file():
            return next((path for path in _named(folder / CONFIG) if path.exists()), None)
    return None


def _named(config: Path) -> list[Path]:
    """Return the tokenizers that a run may have used: the one that it was given, then those of its data."""
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []  # it may be another program's
    data = _section(content, "data")
    given = _section(data, "init_args") or data
    found = [Path(given["tokenizer"])] if isinstance(given.get("tokenizer"), str) else []
    for name in ("data", "train_data"):
        if given.get(name):
            try:
                found += map(tokenizer_path, Mixture.parse(given[name]).prefixes)
            except (DataError, TypeError, ValueError):
                continue  # another data module may mean something else by it
    return found


def _section(content: Any, name: str) -> dict[str, Any]:
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}
