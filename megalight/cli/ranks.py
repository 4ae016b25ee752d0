"""Commands that run on several processes at once, which torchrun starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megalight.errors import LayoutError

if TYPE_CHECKING:
    import torch

    from megalight.parallel.mesh import ParallelMesh


def check_ranks(arguments: argparse.Namespace) -> None:
    """Check that there are as many processes as the layout of a command needs.

    Args:
        arguments: with ``tensor_parallel``, ``expert_parallel`` and ``pipeline_parallel``.

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
    if tensor * stages != world:
        raise LayoutError(
            f"--tensor-parallel {tensor} and --pipeline-parallel {stages} need {tensor * stages} processes, and there "
            f"are {world}; start them by torchrun --nproc-per-node {tensor * stages} -m megalight ..."
        )


@contextmanager
def joined(arguments: argparse.Namespace) -> Iterator[tuple[ParallelMesh | None, torch.device]]:
    """Join the processes of a command; yield their mesh, None for a single one, and the device of this one."""
    import torch
    import torch.distributed as dist

    from megalight.parallel.groups import end_at_exit
    from megalight.parallel.mesh import ParallelMesh

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.tensor_parallel * arguments.pipeline_parallel == 1:
        yield None, device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # Threads of the group that outlive the interpreter would abort the process.
        end_at_exit()
    mesh = ParallelMesh(
        dist.get_world_size(),
        dist.get_rank(),
        tp=arguments.tensor_parallel,
        ep=arguments.expert_parallel,
        pp=arguments.pipeline_parallel,
    )
    yield mesh, device
