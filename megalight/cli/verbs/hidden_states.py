"""``megalight hidden-states --output FOLDER -- -c RECIPE ...``: store what a draft learns from."""

from __future__ import annotations

import argparse
from pathlib import Path

PASSED_ON = "fit"
"""The verb whose arguments come after ``--``."""


DESCRIPTION = (
    "store a base's hidden states for the samples of a run of its draft\n\n"
    "The arguments after -- are those of megalight fit for a run of EagleModule beside its base. With\n"
    "--model.base=FOLDER, the same run then learns from the folder, without the base. Run again, the command\n"
    "goes on where it was stopped."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from megalight.cli import processes as parts

    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples of a forward pass (default: 1)")
    parser.add_argument("--no-validation", action="store_true", help="training samples alone")
    parts.add_process_arguments(parser)
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the base and of the states (default: as saved)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def check(arguments: argparse.Namespace) -> None:
    """Check the options of this verb."""
    from megalight.data.cached_outputs import check_open
    from megalight.errors import ConfigurationError

    # Before anything is read: the base's pass takes hours.
    check_open(arguments.output)
    if arguments.micro_batch_size < 1:
        raise ConfigurationError(f"--micro-batch-size={arguments.micro_batch_size} must be at least 1.")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print a summary."""
    from megalight.cli import processes as parts
    from megalight.errors import ConfigurationError

    if arguments.processes != 1:
        return parts.run_processes("hidden-states", arguments)

    from megalight.cli.lightning import parsed  # after the checks: importing it takes seconds
    from megalight.data.module import TokenDataModule
    from megalight.inference.cached_outputs import cache_hidden_states
    from megalight.models.eagle.module import EagleModule

    cli = parsed([PASSED_ON, *arguments.passed_on])
    module, data = cli.model, cli.datamodule
    if not isinstance(module, EagleModule) or module.base_model.states is not None:
        raise ConfigurationError(
            f"model is {type(module).__name__}, and hidden states are those that an EagleModule reads of a base that "
            "runs; name a recipe of one after --, such as recipes/eagle.yaml."
        )
    if not isinstance(data, TokenDataModule):
        raise ConfigurationError(
            f"data is {type(data).__name__}, whose samples have no numbers by which to store hidden states; use "
            "GPTDataModule or SFTDataModule."
        )
    module.check_data(data)
    # The trainer says how many samples a run reads.
    data.trainer = cli.trainer
    part, count = arguments.part
    meta = cache_hidden_states(
        module.base_model,
        module.config,
        data,
        arguments.output,
        device=parts.device_of(arguments),
        dtype=arguments.dtype,
        micro_batch_size=arguments.micro_batch_size,
        validation=not arguments.no_validation,
        part=part,
        parts=count,
        progress=not arguments.quiet,
    )
    if meta is None:
        print(f"{arguments.output}: part {part} of {count} is there; others are missing")
        return 0
    number = meta.samples + meta.validation_samples
    print(
        f"{arguments.output}: {number} samples of {meta.sequence_length} tokens, hidden states of {meta.hidden_size} "
        f"features after layers {', '.join(map(str, meta.layers))} and the last, "
        f"{number * meta.record.itemsize / 1e6:.1f} MB"
    )
    return 0
