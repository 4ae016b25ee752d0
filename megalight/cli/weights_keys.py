"""The flag that says what to do with folders of transformers whose tensors are not the model's."""

from __future__ import annotations

import argparse


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--weights-keys``."""
    parser.add_argument(
        "--weights-keys",
        choices=("strict", "log", "ignore"),
        default="strict",
        help="in a folder of transformers with other tensors than the model's: strict refuses it; log and ignore skip "
        "what is too much, and give what is missing its initial values (default: strict)",
    )
