"""``megalight inspect CKPT``: show the contents of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def describe() -> str:
    """Return the line for the overview."""
    return "show what a checkpoint holds: names, shapes, sizes, norms, versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's folder (its newest one)")
    parser.add_argument("--norms", action="store_true", help="also read and verify all data, and show the norms")
    parser.add_argument("--depth", type=int, help="show only this many parts of the names, with sums of the rest")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Only ``--norms`` reads more than metadata. Torch is needed for single files alone."""
    from megalight.checkpoint.inspect import describe as read
    from megalight.checkpoint.inspect import render
    from megalight.cli.newest import newest_in

    path = newest_in(arguments.checkpoint)
    if path.is_file():
        from megalight.checkpoint.single_file import describe as read
    print(render(read(path, norms=arguments.norms), arguments.depth))
    return 0
