"""The verbs of the command line. To add one, write a module with the functions of :class:`Verb`, and list it here."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

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

    DESCRIPTION: str
    """The line for the overview. Further lines are shown by ``--help`` of the verb."""

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


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a command loads a model."""
    parser.add_argument("--tokenizer", help="tokenizer, or its name, to use instead of the one in the checkpoint")
    parser.add_argument(
        "--base", help="for a checkpoint of adapters: the weights that training began with, or a run's folder"
    )
    add_weights_keys(parser)
    parser.add_argument("--adapter", help="which adapter computes, for a checkpoint of several (default: the last one)")
    add_device_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: as saved)"
    )


def dtype_of(arguments: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype of ``--dtype``."""
    import torch  # slow

    found: torch.dtype | None = getattr(torch, arguments.dtype) if arguments.dtype else None
    return found


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a command samples."""
    parser.add_argument("-t", "--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--top-k", type=int, help="sample from the k most probable tokens")
    parser.add_argument("--top-p", type=float, help="sample from the fewest tokens with this total probability")
    parser.add_argument("--seed", type=int, help="seed of the sampling (default: another one each time)")
