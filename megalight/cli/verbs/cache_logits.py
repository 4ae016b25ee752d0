"""``megalight cache-logits TEACHER --top-k K --output FOLDER -- -c RECIPE ...``: cache a teacher's logits."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalight.cli.verbs import add_device_arguments, dtype_of

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
    from megalight.cli import processes as parts

    parser.add_argument("teacher", help="a checkpoint, a run's folder (its newest one), or a folder of transformers")
    parser.add_argument("-k", "--top-k", type=int, required=True, help="tokens to store for each token; 64 is usual")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("-t", "--temperature", type=float, default=1.0, help="divides the logits (default: 1)")
    parser.add_argument(
        "--stored", choices=("float16", "float32"), default="float16", help="dtype on disk (default: float16)"
    )
    parser.add_argument("--validation", action="store_true", help="store the validation samples, too")
    parts.add_process_arguments(parser)
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples of a forward pass (default: 1)")
    add_device_arguments(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def check(arguments: argparse.Namespace) -> None:
    """Check the options of this verb."""
    from megalight.cli import checkpoints as latest_checkpoint
    from megalight.errors import ConfigurationError

    for name, least in (("top_k", 1), ("micro_batch_size", 1)):
        if (value := getattr(arguments, name)) < least:
            raise ConfigurationError(f"--{name.replace('_', '-')}={value} must be at least {least}.")
    latest_checkpoint.existing(arguments.teacher)
    # Before anything is read: the teacher's pass takes hours, and a store is not overwritten.
    from megalight.data.cached_outputs import check_open

    check_open(arguments.output)


def run(arguments: argparse.Namespace) -> int:
    """Write the store and print a summary."""
    from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
    from megalight.cli import processes as parts
    from megalight.errors import ConfigurationError

    path = latest_checkpoint(arguments.teacher)
    if arguments.processes != 1:
        return parts.run_processes("cache-logits", arguments)

    from megalight.cli.lightning import parsed  # after the checks: importing torch takes seconds
    from megalight.data.module import TokenDataModule
    from megalight.inference import load_model
    from megalight.inference.cached_outputs import cache_logits, check_logits_cache
    from megalight.models.distillation import check_tokenizer
    from megalight.models.stored import open_model

    cli = parsed([PASSED_ON, *arguments.passed_on])
    data = cli.datamodule
    if not isinstance(data, TokenDataModule):
        raise ConfigurationError(
            f"data is {type(data).__name__}, whose samples have no numbers by which to store predictions; use "
            "GPTDataModule or SFTDataModule."
        )
    stored = open_model(path)
    theirs, ours = stored.config.vocab_size, getattr(getattr(cli.model, "config", None), "vocab_size", None)
    if theirs != ours:
        raise ConfigurationError(
            f"the teacher in {path} has vocab_size={theirs}, and the model of the run has {ours}: their distributions "
            "cannot be compared. Use a teacher with the run's tokenizer and vocab_size."
        )
    check_logits_cache(theirs, stored.config.max_sequence_length, data, arguments.top_k, arguments.temperature)
    check_tokenizer(f"the teacher in {path}", stored.files, data.checkpoint_files())
    # The trainer says how many samples a run reads.
    data.trainer = cli.trainer
    model = load_model(
        path,
        parts.device_of(arguments),
        dtype_of(arguments),
    )
    part, count = arguments.part
    meta = cache_logits(
        model,
        data,
        arguments.output,
        top_k=arguments.top_k,
        temperature=arguments.temperature,
        dtype=arguments.stored,
        micro_batch_size=arguments.micro_batch_size,
        validation=arguments.validation,
        part=part,
        parts=count,
        progress=not arguments.quiet,
    )
    if meta is None:
        print(f"{arguments.output}: part {part} of {count} is there; others are missing")
        return 0
    number = meta.samples + meta.validation_samples
    size = number * meta.record.itemsize / 1e6
    print(
        f"{arguments.output}: {number} samples of {meta.sequence_length} tokens, {meta.top_k} of "
        f"{meta.vocab_size} ids each, {size:.1f} MB"
    )
    return 0
