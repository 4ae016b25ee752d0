"""Commands that run on several processes: ranks that share one model, and workers that share the samples."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalight.cli.verbs import add_device_arguments, dtype_of
from megalight.errors import ConfigurationError, LayoutError

if TYPE_CHECKING:
    from megalight.checkpoint.disk.files import PathLike
    from megalight.data.cached_outputs import RecordsMeta
    from megalight.inference import TextGenerator
    from megalight.inference.cached_outputs import CachingOptions


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the degrees by which a command divides a model over processes."""
    for option, what in (
        ("tensor", "divide layers over so many processes, under torchrun (default: 1)"),
        ("expert", "divide experts over so many of these processes (default: 1, each has all of them)"),
        ("pipeline", "divide the model into so many stages, under torchrun (default: 1)"),
    ):
        parser.add_argument(f"--{option}-parallel", type=int, default=1, help=what)


def check_ranks(arguments: argparse.Namespace, *, replicas: bool = False) -> None:
    """Check that there are as many processes as the layout of a command needs.

    Args:
        arguments: with ``tensor_parallel``, ``expert_parallel`` and ``pipeline_parallel``.
        replicas: whether more processes hold further replicas of the model.

    Raises:
        LayoutError: there are more or fewer, a degree is below 1, or experts are to be on other ranks than layers.
    """
    tensor, experts, stages = arguments.tensor_parallel, arguments.expert_parallel, arguments.pipeline_parallel
    if min(tensor, experts, stages) < 1:
        raise LayoutError(
            f"--tensor-parallel is {tensor}, --expert-parallel {experts} and --pipeline-parallel {stages}; all must be "
            "at least 1."
        )
    if tensor % experts:
        raise LayoutError(
            f"--expert-parallel {experts} does not divide --tensor-parallel {tensor}: the processes that share a layer "
            f"divide its experts. Set --expert-parallel {tensor}, or 1."
        )
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world % (tensor * stages) if replicas else tensor * stages != world:
        raise LayoutError(
            f"--tensor-parallel {tensor} and --pipeline-parallel {stages} need {tensor * stages} processes"
            f"{', or a multiple' if replicas else ''}, and there are {world}; start them by torchrun --nproc-per-node "
            f"{tensor * stages} -m megalight ..."
        )


def text_generator(
    arguments: argparse.Namespace, path: PathLike, tokenizer: str | Path | None, base: PathLike | None
) -> tuple[TextGenerator, bool]:
    """Join the processes of a command, and load its model; return it, and whether this process prints."""
    import torch

    from megalight.inference import TextGenerator
    from megalight.parallel.mesh import join_ranks

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    degrees = {"tp": arguments.tensor_parallel, "ep": arguments.expert_parallel, "pp": arguments.pipeline_parallel}
    mesh, device = join_ranks(device, **degrees)
    found = TextGenerator.from_checkpoint(
        path,
        tokenizer=tokenizer,
        device=device,
        base=base,
        dtype=dtype_of(arguments),
        mesh=mesh,
        keys=arguments.weights_keys,
        adapter=arguments.adapter,
    )
    return found, mesh is None or mesh.global_rank == 0


def add_caching_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how a command caches what a model returns for the samples of a run."""
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples of a forward pass (default: 1)")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that share the samples, each on a GPU of its own"
    )
    parser.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="write only part I of N, counted from 0: for processes on several machines, with one shared folder",
    )
    add_device_arguments(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 0/4, the first of four (the last is 3/4)")
    return int(found[1]), int(found[2])


def cached_data(cli: Any) -> Any:
    """Return the data module of a parsed command, which knows how many samples the run reads.

    Raises:
        ConfigurationError: its samples have no numbers.
    """
    from megalight.data.module import TokenDataModule

    if not isinstance(cli.datamodule, TokenDataModule):
        raise ConfigurationError(
            f"data is {type(cli.datamodule).__name__}, whose samples have no numbers by which to store what a model "
            "returns; use GPTDataModule or SFTDataModule."
        )
    # The trainer says how many samples a run reads.
    cli.datamodule.trainer = cli.trainer
    return cli.datamodule


def caching_options(arguments: argparse.Namespace, validation: bool) -> CachingOptions:
    """Return the options that :func:`add_caching_arguments` declares."""
    from megalight.inference.cached_outputs import CachingOptions

    part, parts = arguments.part
    return CachingOptions(arguments.micro_batch_size, validation, part, parts, progress=not arguments.quiet)


def print_cached(arguments: argparse.Namespace, meta: RecordsMeta | None, what: str) -> int:
    """Print what a folder holds, or that parts are missing; return the exit code.

    Args:
        what: what it holds of each sample, with the fields of ``meta``.
    """
    if meta is None:
        print(f"{arguments.output}: part {arguments.part[0]} of {arguments.part[1]} is there; others are missing")
        return 0
    number = meta.samples + meta.validation_samples
    size = number * meta.record.itemsize / 1e6
    print(f"{arguments.output}: {number} samples of {meta.sequence_length} tokens, {what.format(meta)}, {size:.1f} MB")
    return 0


def device_of(arguments: argparse.Namespace) -> str:
    """Return the device of this process: that which is named, or a GPU by the number of the part, or the CPU."""
    import torch

    if arguments.device:
        return str(arguments.device)
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{arguments.part[0] % torch.cuda.device_count()}"


def run_processes(verb: str, arguments: argparse.Namespace) -> int:
    """Run the same command in ``--processes`` processes, and return the exit code.

    If one fails, its error is printed at once and the others are stopped: run again, they go on from there.

    Raises:
        ConfigurationError: the number is out of range, or ``--part`` is given, too.
    """
    count = arguments.processes
    if count < 1 or arguments.part != (0, 1):
        raise ConfigurationError(
            f"--processes={count} must be at least 1, and divides the samples into parts itself; leave --part out."
        )
    words = _without(arguments.words, "--processes")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "megalight", verb, f"--part={part}/{count}", *["--quiet"] * (part > 0), *words],
            # One progress bar and one error are enough.
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if part else None,
            text=True,
        )
        for part in range(count)
    ]
    with ThreadPoolExecutor(count) as readers:
        # All pipes are read from the start: a full one would stop its process.
        ends = {readers.submit(process.communicate): process for process in processes}
        said, code = "", 0
        try:
            for end in as_completed(ends):
                out, error = end.result()
                # Told by the process that ended last.
                said = out if "samples of" in out or not said else said
                if ends[end].returncode and not code:
                    code = ends[end].returncode
                    print(error or "", file=sys.stderr, end="")
                    _stop(processes)
        finally:
            _stop(processes)
    print(said if not code else "", end="")
    return code


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()


def _without(words: Sequence[str], option: str) -> list[str]:
    cut = list(words).index("--") if "--" in words else len(words)
    found, rest = list(words[:cut]), list(words[cut:])
    for place, word in enumerate(found):
        if word == option:
            return found[:place] + found[place + 2 :] + rest
        if word.startswith(f"{option}="):
            return found[:place] + found[place + 1 :] + rest
    return found + rest
