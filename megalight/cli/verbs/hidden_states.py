"""``megalight hidden-states --output FOLDER -- -c RECIPE ...``: store what a draft learns from."""

from __future__ import annotations

import argparse

from megalight.cli.processes import (
    add_caching_arguments,
    cached_data,
    caching_options,
    device_of,
    print_cached,
    run_processes,
)
from megalight.errors import ConfigurationError

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
    parser.add_argument("--no-validation", action="store_true", help="training samples alone")
    add_caching_arguments(parser)


def check(arguments: argparse.Namespace) -> None:
    """Check the options of this verb."""
    from megalight.data.cached_outputs import check_open

    # Before anything is read: the base's pass takes hours.
    check_open(arguments.output)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print a summary."""
    if arguments.processes != 1:
        return run_processes("hidden-states", arguments)

    from megalight.cli.lightning import parsed  # after the checks: importing it takes seconds
    from megalight.inference.cached_outputs import cache_hidden_states
    from megalight.models.eagle.module import EagleModule

    cli = parsed([PASSED_ON, *arguments.passed_on])
    module = cli.model
    if not isinstance(module, EagleModule) or module.base_model.states is not None:
        raise ConfigurationError(
            f"model is {type(module).__name__}, and hidden states are those that an EagleModule reads of a base that "
            "runs; name a recipe of one after --, such as recipes/eagle.yaml."
        )
    data = cached_data(cli)
    module.check_data(data)
    meta = cache_hidden_states(
        module.base_model,
        module.config,
        data,
        arguments.output,
        caching_options(arguments, not arguments.no_validation),
        device=device_of(arguments),
        dtype=arguments.dtype,
    )
    layers = ", ".join(map(str, module.config.auxiliary_layers))
    what = f"hidden states of {module.config.hidden_size} features after layers {layers} and the last"
    return print_cached(arguments, meta, what)
