"""``megalight merge CKPT --output FOLDER``: a fine-tuned model without its adapters."""

from __future__ import annotations

import argparse
from pathlib import Path


def describe() -> str:
    """The verb's line in the overview."""
    return "add adapters to the weights of their layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--base", type=Path, help="the weights that training began with, for a checkpoint of adapters")


def run(arguments: argparse.Namespace) -> int:
    """Write the merged checkpoint."""
    from megalight.models.transforms.merge import merge_checkpoint

    count = merge_checkpoint(arguments.checkpoint, arguments.output, arguments.base)
    print(f"{arguments.output}: merged the adapters of {count} linear layers")
    return 0
