"""``megalight adapters A.ckpt B.ckpt --output FOLDER``: the adapters of several checkpoints in one."""

from __future__ import annotations

import argparse

DESCRIPTION = "put the adapters of several checkpoints into one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoints", nargs="+", help="checkpoints with adapters of one base; also s3://...")
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="a new name for the adapter of each checkpoint (default: its own)"
    )
    parser.add_argument("-o", "--output", required=True, help="the folder to write; also s3://...")


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint of adapters."""
    from megalight.checkpoint.disk.publish import absolute, check_new
    from megalight.cli.checkpoints import existing

    check_new(absolute(arguments.output))
    sources = [existing(path) for path in arguments.checkpoints]

    from megalight.models.transforms.saved import join_adapters  # after the checks: it imports torch

    names = join_adapters(sources, arguments.output, arguments.names)
    print(f"{arguments.output}: the adapters {', '.join(names)}")
    return 0
