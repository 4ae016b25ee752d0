"""``megalight merge CKPT --output FOLDER``: a fine-tuned model without its adapters."""

from __future__ import annotations

import argparse

DESCRIPTION = "add adapters to the weights of their layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", help="the checkpoint's folder, or a run's (its newest one); also s3://...")
    parser.add_argument("-o", "--output", required=True, help="the folder to write; also s3://...")
    parser.add_argument(
        "--base", help="for a checkpoint of adapters: the weights that training began with, or a run's folder"
    )
    parser.add_argument("--adapter", help="which adapter, for a checkpoint of several")


def run(arguments: argparse.Namespace) -> int:
    """Write the merged checkpoint."""
    from megalight.checkpoint.disk.publish import absolute, check_new
    from megalight.cli.checkpoints import existing

    check_new(absolute(arguments.output))
    source = existing(arguments.checkpoint)
    base = None if arguments.base is None else existing(arguments.base)

    from megalight.models.transforms.saved import merge_checkpoint

    count = merge_checkpoint(source, arguments.output, base, arguments.adapter)
    print(f"{arguments.output}: merged the adapters of {count} linear layers")
    return 0
