"""``megalight quantize OUTPUT -- -c RECIPE ...``: calibrate quantizers on validation data and save them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

PASSED_ON = "validate"
"""The verb whose arguments come after ``--``."""


DESCRIPTION = (
    "quantize a model with ModelOpt, calibrated on validation data\n\n"
    "The arguments after -- are those of megalight validate: the recipe, the weights\n"
    "(model.weights), the layout, the number of batches (--trainer.limit_val_batches).\n"
    "With --auto, a first run finds a format for each layer, and a second one quantizes by them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("output", help="the checkpoint to write; also s3://...")
    rules = parser.add_mutually_exclusive_group()
    rules.add_argument("--preset", default="FP8_DEFAULT_CFG", help="preset of ModelOpt (default: FP8_DEFAULT_CFG)")
    rules.add_argument("--recipe", dest="preset", help="recipe of its library: general/ptq/fp8_default-kv_fp8")
    rules.add_argument(
        "--auto", nargs="+", metavar="PRESET", help="a format for each layer, of these: the least harm within the bits"
    )
    rules.add_argument("--layers", metavar="FILE", help="formats of layers, as --auto found them")
    parser.add_argument(
        "--effective-bits", type=float, default=4.8, help="with --auto: bits per weight, at most (default: 4.8)"
    )
    parser.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help="with --auto: layers to leave out")
    parser.add_argument("--kv", metavar="PRESET", help="also round keys and values, e.g. FP8_KV_CFG")
    parser.add_argument("--head", action="store_true", help="also quantize the output layer")


def check(arguments: argparse.Namespace) -> None:
    """Check the options of this verb."""
    from megalight.checkpoint.disk.publish import absolute, check_new

    # Before data is read: calibration takes minutes, and checkpoints are not overwritten.
    check_new(absolute(arguments.output))


def run(arguments: argparse.Namespace) -> int:
    """Calibrate in a validation run, which writes the checkpoint."""
    from megalight.cli.main import main

    layers = arguments.layers
    if arguments.auto:
        # Beside the checkpoint, which is not there yet; an address of remote storage has no such place.
        layers = f"{arguments.output}.layers.json" if "://" not in arguments.output else "layers.json"
        search = {
            "formats": arguments.auto,
            "output": layers,
            "effective_bits": arguments.effective_bits,
            "exclude": arguments.exclude,
        }
        if code := main([PASSED_ON, *arguments.passed_on, _added("AutoQuantize", search)]):
            return code
    values = {
        "preset": arguments.preset,
        "head": arguments.head,
        "kv": arguments.kv,
        "measure": True,
        "save_to": arguments.output,
        "layers": layers,
    }
    # Launched ranks run this same command, so each adds the callback.
    return main([PASSED_ON, *arguments.passed_on, _added("ModelOptQuantization", values)])


def _added(callback: str, values: Mapping[str, Any]) -> str:
    """Return the option that adds a callback."""
    added = {"class_path": f"megalight.callbacks.{callback}", "init_args": values}
    return f"--trainer.callbacks+={json.dumps(added)}"
