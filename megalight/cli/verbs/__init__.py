"""The verbs of the command line. To add one, write a module with the functions of :class:`Verb`, and list it here."""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

TRAINER_VERBS = {
    "fit": "train a model",
    "validate": "run one pass over the validation data",
    "test": "run one pass over the test data",
    "predict": "run the model over data, and hand what it returns to a callback that writes it",
}
"""Verbs of Lightning's Trainer, with the line that ``megalight --help`` shows."""

VERBS = (
    *(
        "prepare",
        "recipes",
        "launch",
        "generate",
        "evaluate",
        "chat",
        "serve",
        "acceptance",
        "adapters",
        "merge",
        "quantize",
        "cache-logits",
        "hidden-states",
        "draft-vocabulary",
        "convert",
        "inspect",
        "plot",
        "doctor",
        "bench",
    ),
    *("schema", "completion"),
)
"""Our own verbs: the modules of this package."""


class Verb(Protocol):
    """The functions of a verb's module. The module must not import torch at its top, so that ``--help`` is instant.

    A module with the options of another verb behind ``--`` names it as ``PASSED_ON``, and has a function
    ``check(arguments)`` for its own options, which is called before those of the other verb are checked.
    """

    def describe(self) -> str:
        """Return the line for the overview. Further lines are shown by ``--help`` of the verb."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the verb and return the exit code."""


def load(name: str) -> Verb:
    """Import the module of a verb."""
    return cast(Verb, importlib.import_module(f"{__name__}.{name.replace('-', '_')}"))


def add_weights_keys(parser: argparse.ArgumentParser) -> None:
    """Add ``--weights-keys``."""
    parser.add_argument(
        "--weights-keys",
        choices=("strict", "log", "ignore"),
        default="strict",
        help="in a folder of transformers with other tensors than the model's: strict refuses it; log and ignore skip "
        "what is too much, and give what is missing its initial values (default: strict)",
    )
