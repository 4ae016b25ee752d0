"""``megalight convert SOURCE OUTPUT``: checkpoints, folders of ``transformers``, those of Megatron-core; formats."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from megalight.cli.verbs import add_weights_keys

if TYPE_CHECKING:
    from megalight.parallel.source import Source

DTYPES = ("float32", "bfloat16", "float16")
FORMS = {
    "transformers": "folder of transformers",
    "checkpoint": "checkpoint of weights",
    "peft": "folder of peft",
    "modelopt": "quantized folder of transformers, in ModelOpt's format",
    "fully_reshardable": "checkpoint that every layout resumes from",
    "dp_reshardable": "checkpoint with flat optimizer state, for layouts that do not split weights",
    "fsdp_dtensor": "checkpoint that torch.distributed.checkpoint.load reads, and every layout resumes from",
}
MODELS = ("transformers", "checkpoint")
"""Forms that hold a model alone. The others keep all of a checkpoint."""


DESCRIPTION = "turn a checkpoint into a folder of transformers, and back, or into another format"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        help="a checkpoint, a run's folder, or a folder of transformers, peft or Megatron-core; also s3://...",
    )
    parser.add_argument("output", help="the folder to write; also s3://...")
    parser.add_argument(
        "--to",
        choices=tuple(FORMS),
        help="transformers: a folder; modelopt: one with narrow weights and scales, from a quantized checkpoint; "
        "checkpoint: weights; or a format, which keeps all of a checkpoint, optimizer "
        "state too (default: transformers from a checkpoint, checkpoint from a folder)",
    )
    parser.add_argument("--base", help="the model that a folder of peft adapts, or that a draft serves")
    parser.add_argument("--adapter", help="which adapter is written for peft, or the name that one of peft gets")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    parser.add_argument("--ema", action="store_true", help="take the moving averages of the weights")
    parser.add_argument(
        "--average", nargs="+", default=(), metavar="MORE", help="write the mean of the source and of these"
    )
    parser.add_argument(
        "--weights-only", action="store_true", help="leave out the optimizer state of a folder of Megatron-core"
    )
    add_weights_keys(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder. Weights are read in batches of bounded bytes, and written one after another."""
    from megalight.checkpoint.disk.publish import absolute, check_new
    from megalight.cli.checkpoints import existing

    check_new(absolute(arguments.output))
    # The output's form follows from what the source is, so this comes first.
    arguments.source = existing(arguments.source)
    arguments.base = None if arguments.base is None else existing(arguments.base)
    arguments.average = [existing(each) for each in arguments.average]

    from rich.console import Console  # after the checks: what follows imports torch, which takes seconds
    from rich.progress import Progress

    from megalight.checkpoint.foreign.transformers_folder import is_folder
    from megalight.checkpoint.sources import WatchedSource
    from megalight.errors import ConfigurationError
    from megalight.models.eagle.serving_format import holds_draft, is_draft
    from megalight.models.gpt import megatron
    from megalight.models.loading import refuse_keys
    from megalight.models.transforms.peft import is_adapter

    if not is_folder(arguments.source) or is_draft(arguments.source):
        refuse_keys(arguments.weights_keys, arguments.source)
    if arguments.weights_only and (
        not megatron.is_folder(arguments.source) or arguments.average or arguments.to not in (None, "checkpoint")
    ):
        raise ConfigurationError(
            "--weights-only leaves optimizer state of Megatron-core out of a checkpoint, and there is none here: leave "
            "it out."
        )
    if is_adapter(arguments.source) or arguments.to == "peft":
        return _convert_adapters(arguments)
    if arguments.adapter is not None:
        raise ConfigurationError(
            f"--adapter is for adapters from and to peft, and {arguments.source} goes to another form; leave it out."
        )
    if is_draft(arguments.source):
        return _import_draft(arguments)
    if arguments.to == "modelopt":
        return _convert_quantized(arguments)
    if arguments.base is not None:
        raise ConfigurationError(
            f"--base is for folders of peft and of drafts, and {arguments.source} is neither; leave it out."
        )
    if holds_draft(arguments.source) and arguments.to in (None, "transformers"):
        return _export_draft(arguments)
    foreign = is_folder(arguments.source) or megatron.is_folder(arguments.source)
    # From ours to theirs, or from theirs to ours, as nothing else would be a change.
    to = arguments.to or ("checkpoint" if foreign else "transformers")
    with Progress(console=Console(stderr=True), transient=True, disable=arguments.quiet) as bar:
        task = bar.add_task("converting", total=None)

        def watched(source: Source) -> Source:
            bar.update(task, total=sum(prod(stored.shape) for stored in source.tensors.values()))
            return WatchedSource(source, lambda count: bar.advance(task, count))

        if to in MODELS:
            _convert_model(arguments, to, watched)
        # These options change values, and the other formats promise the same ones.
        elif arguments.dtype or arguments.ema or arguments.average:
            raise ConfigurationError(f"--to {to} keeps all as it is; --dtype, --ema and --average change weights.")
        else:
            from megalight.checkpoint.sources import rewrite

            rewrite(arguments.source, arguments.output, to, watched)
    print(f"{arguments.output}: a {FORMS[to]}")
    return 0


def _convert_adapters(arguments: argparse.Namespace) -> int:
    """Write adapters in the format of ``peft``, or read them from it."""
    from megalight.errors import ConfigurationError
    from megalight.models.transforms.peft import export_adapter, import_adapter, is_adapter

    if arguments.dtype or arguments.ema or arguments.average:
        raise ConfigurationError("adapters are converted as they are; --dtype, --ema and --average change weights.")
    if is_adapter(arguments.source):
        if arguments.base is None or arguments.to not in (None, "checkpoint"):
            raise ConfigurationError(
                f"{arguments.source} holds adapters of peft, which become a checkpoint; name the model that they adapt "
                "with --base, and leave --to out."
            )
        named = {} if arguments.adapter is None else {"adapter": arguments.adapter}
        count = import_adapter(arguments.source, arguments.base, arguments.output, **named)
    else:
        count = export_adapter(arguments.source, arguments.output, arguments.adapter)
    print(f"{arguments.output}: the adapters of {count} weights")
    return 0


def _import_draft(arguments: argparse.Namespace) -> int:
    """Write a draft for serving engines as a checkpoint."""
    from megalight.errors import ConfigurationError
    from megalight.models.eagle import import_draft

    if arguments.dtype or arguments.ema or arguments.average or arguments.to not in (None, "checkpoint"):
        raise ConfigurationError(
            f"{arguments.source} holds a draft, which becomes a checkpoint as it is; leave --to, --dtype, --ema and "
            "--average out."
        )
    import_draft(arguments.source, arguments.output, arguments.base)
    print(f"{arguments.output}: a draft")
    return 0


def _export_draft(arguments: argparse.Namespace) -> int:
    """Write a draft for serving engines."""
    import torch

    from megalight.errors import ConfigurationError
    from megalight.models.eagle import export_draft

    if arguments.ema or arguments.average:
        raise ConfigurationError("--ema and --average are for models that are no drafts; leave them out.")
    export_draft(arguments.source, arguments.output, getattr(torch, arguments.dtype) if arguments.dtype else None)
    print(f"{arguments.output}: a draft for serving engines")
    return 0


def _convert_quantized(arguments: argparse.Namespace) -> int:
    """Write a quantized checkpoint in ModelOpt's format."""
    from megalight.errors import ConfigurationError
    from megalight.plugins.modelopt.export import export_quantized

    if arguments.dtype or arguments.ema or arguments.average or arguments.base:
        raise ConfigurationError(
            "a quantized model is converted as it is; --dtype, --ema, --average and --base are for other forms."
        )
    count = export_quantized(arguments.source, arguments.output)
    print(f"{arguments.output}: {count} quantized layers")
    return 0


def _convert_model(arguments: argparse.Namespace, to: str, watched: Callable[[Source], Source]) -> None:
    from dataclasses import replace

    import torch

    from megalight.models.hugging_face.export import export
    from megalight.models.stored import averaged, open_model, save_model

    keys = arguments.weights_keys
    models = [open_model(path, ema=arguments.ema, keys=keys) for path in (arguments.source, *arguments.average)]
    model = averaged(models) if arguments.average else models[0]
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    model = replace(model, weights=watched(model.weights))
    if to == "transformers":
        export(model, arguments.output, dtype=dtype)
    else:
        save_model(model, arguments.output, dtype, optimizer=not arguments.weights_only)
