"""Imports ModelOpt."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

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
