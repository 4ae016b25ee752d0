"""``megalight inspect CKPT``: what a checkpoint holds."""

from __future__ import annotations

import argparse
from pathlib import Path


def describe() -> str:
    """The verb's line in the overview."""
    return "show what a checkpoint holds: names, shapes, sizes, norms, versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    parser.add_argument("--norms", action="store_true", help="also read and verify all data, and show each norm")
    parser.add_argument("--depth", type=int, help="sum up everything below so many parts of the names")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Reads metadata only, unless norms are asked for; needs no torch."""
    from megalight.checkpoint.inspect import describe as read
    from megalight.checkpoint.inspect import render

    print(render(read(arguments.checkpoint, norms=arguments.norms), arguments.depth))
    return 0
