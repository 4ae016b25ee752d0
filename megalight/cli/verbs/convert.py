"""``megalight convert SOURCE OUTPUT``: a model between our checkpoints and folders of ``transformers``."""

from __future__ import annotations

import argparse
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")
FORMS = {"transformers": "folder of transformers", "checkpoint": "checkpoint"}


def describe() -> str:
    """Return the line for the overview."""
    return "turn a checkpoint into a folder of transformers, and back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", type=Path, help="a checkpoint, or a folder of transformers")
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument("--to", choices=tuple(FORMS), help="what to write (default: what the source is not)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    parser.add_argument("--ema", action="store_true", help="take the moving averages of the weights")
    parser.add_argument(
        "--average", nargs="+", type=Path, default=(), metavar="MORE", help="write the mean of the source and of these"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder. Weights are read and written one tensor at a time."""
    from dataclasses import replace
    from math import prod

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from megalight.checkpoint.combine import Watched
    from megalight.models.export import export
    from megalight.models.folder import is_folder
    from megalight.models.stored import averaged, open_model, save_model

    models = [open_model(path, ema=arguments.ema) for path in (arguments.source, *arguments.average)]
    model = averaged(models) if arguments.average else models[0]
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    to = arguments.to or ("checkpoint" if is_folder(arguments.source) else "transformers")
    total = sum(prod(stored.shape) for stored in model.weights.tensors.values())
    with Progress(console=Console(stderr=True), transient=True, disable=arguments.quiet) as bar:
        task = bar.add_task("converting", total=total)
        watched = replace(model, weights=Watched(model.weights, lambda count: bar.advance(task, count)))
        if to == "transformers":
            export(watched, arguments.output, dtype=dtype)
        else:
            save_model(watched, arguments.output, dtype)
    print(f"{arguments.output}: a model of the family {model.family.name}, as a {FORMS[to]}")
    return 0
