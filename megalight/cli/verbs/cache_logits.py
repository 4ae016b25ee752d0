"""``megalight cache-logits TEACHER --top-k K --output FOLDER -- -c RECIPE ...``: cache a teacher's logits."""

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
from megalight.cli.verbs import dtype_of
from megalight.errors import ConfigurationError

PASSED_ON = "fit"
"""The verb whose arguments come after ``--``."""


DESCRIPTION = (
    "cache a teacher's logits (its most likely tokens) for the training samples of a run\n\n"
    "The arguments after -- are those of megalight fit, for the run that will learn from the store\n"
    "(Distillation(teacher_logits=FOLDER)). This command runs the teacher, and trains nothing. Run again, it goes\n"
    "on where it was stopped."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("teacher", help="a checkpoint, a run's folder (its newest one), or a folder of transformers")
    parser.add_argument("-k", "--top-k", type=int, required=True, help="tokens to store for each token; 64 is usual")
    parser.add_argument("-t", "--temperature", type=float, default=1.0, help="divides the logits (default: 1)")
    parser.add_argument(
        "--stored", choices=("float16", "float32"), default="float16", help="dtype on disk (default: float16)"
    )
    parser.add_argument("--validation", action="store_true", help="store the validation samples, too")
    add_caching_arguments(parser)


def check(arguments: argparse.Namespace) -> None:
    """Check the options of this verb."""
    from megalight.cli.checkpoints import existing
    from megalight.data.cached_outputs import check_open

    existing(arguments.teacher)
    # Before anything is read: the teacher's pass takes hours, and a store is not overwritten.
    check_open(arguments.output)


def run(arguments: argparse.Namespace) -> int:
    """Write the store and print a summary."""
    from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint

    path = latest_checkpoint(arguments.teacher)
    if arguments.processes != 1:
        return run_processes("cache-logits", arguments)

    from megalight.cli.lightning import parsed  # after the checks: importing torch takes seconds
    from megalight.inference import load_model
    from megalight.inference.cached_outputs import cache_logits, check_logits_cache
    from megalight.models.distillation import check_tokenizer
    from megalight.models.stored import open_model

    cli = parsed([PASSED_ON, *arguments.passed_on])
    data = cached_data(cli)
    stored = open_model(path)
    theirs, ours = stored.config.vocab_size, getattr(getattr(cli.model, "config", None), "vocab_size", None)
    if theirs != ours:
        raise ConfigurationError(
            f"the teacher in {path} has vocab_size={theirs}, and the model of the run has {ours}: their distributions "
            "cannot be compared. Use a teacher with the run's tokenizer and vocab_size."
        )
    check_logits_cache(theirs, stored.config.max_sequence_length, data, arguments.top_k, arguments.temperature)
    check_tokenizer(f"the teacher in {path}", stored.files, data.checkpoint_files())
    model = load_model(path, device_of(arguments), dtype_of(arguments))
    meta = cache_logits(
        model,
        data,
        arguments.output,
        caching_options(arguments, arguments.validation),
        top_k=arguments.top_k,
        temperature=arguments.temperature,
        dtype=arguments.stored,
    )
    return print_cached(arguments, meta, "{0.top_k} of {0.vocab_size} ids each")
