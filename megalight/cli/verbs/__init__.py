"""The verbs of the command line. To add one: a module with the three functions of :class:`Verb`, and its name here."""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

TRAINER_VERBS = {
    "fit": "train a model",
    "validate": "run one pass over the validation data",
    "test": "run one pass over the test data",
    "predict": "run the model over data and keep what it returns",
}
"""Verbs that Lightning's Trainer does, with the line that ``megalight --help`` shows."""

VERBS = ("prepare", "generate", "inspect", "plot", "doctor", "bench")
"""Verbs of our own: the modules of this package."""


class Verb(Protocol):
    """What a module of this package offers. Importing it must not import torch: ``--help`` has to be instant."""

    def describe(self) -> str:
        """The verb's line in the overview; further lines show in its own ``--help``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


def load(name: str) -> Verb:
    """The module behind one of ``VERBS``."""
    return cast(Verb, importlib.import_module(f"{__name__}.{name}"))
