"""Process groups that their members make among themselves, whatever groups other ranks have made before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from megalight.errors import ConfigurationError, LayoutError


def new_group(
    ranks: Sequence[int],
    purpose: str,
    backend: str | None = None,
    max_ctas: int | None = None,
    urgent: bool = False,
) -> ProcessGroup:
    """A group of global ``ranks``, which all call this at the same time; nobody else takes part.

    torch names such a group after its ranks and after how many groups this process has. Pipeline stages have different
    numbers of groups and would wait for each other under different names; here the name says what the group is for.

    Args:
        purpose: groups of the same ranks for the same purpose are counted.
        backend: ``"gloo"`` for a group on the host; None: that of the default group.
        max_ctas: most multiprocessors of a GPU that a message occupies, also while it waits for the other side; None:
            NCCL's own choice. Other backends occupy none, and need not be told; where a user names a number,
            :func:`check_max_ctas` comes first.
        urgent: messages get multiprocessors before computation that waits for them too.

    Raises:
        LayoutError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise LayoutError(
            f"a group of {len(ranks)} ranks for {purpose} is wanted, but torch.distributed is not initialised; "
            "call torch.distributed.init_process_group first."
        )
    options = None
    if (max_ctas is not None or urgent) and (backend or dist.get_backend()) == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        if max_ctas is not None:
            options.config.max_ctas, options.config.min_ctas = max_ctas, 1
    with _named(f"{purpose} {' '.join(map(str, ranks))} {backend}"):
        group = dist.new_group(list(ranks), backend=backend, pg_options=options, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    return group


def shared_group(ranks: Sequence[int]) -> ProcessGroup:
    """The group of global ``ranks`` that everyone in this process uses who asks for it here; made for the first.

    Its members ask for groups in the same order, as for :func:`new_group`.

    Raises:
        LayoutError: torch.distributed is not initialised.
    """
    known = _SHARED.setdefault(dist.group.WORLD, {}) if dist.is_initialized() else {}
    if tuple(ranks) not in known:
        known[tuple(ranks)] = new_group(ranks, "the mesh")
    return known[tuple(ranks)]


_SHARED: WeakKeyDictionary[ProcessGroup | None, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()
"""Groups by ranks, of each default group: another one has others."""


def check_max_ctas(name: str, value: int | None, backend: str) -> None:
    """Refuse a limit on multiprocessors that a user has set where it would do nothing.

    Args:
        name: of the option, for the message.
        backend: that the default process group has or will have; only NCCL's messages run on multiprocessors.

    Raises:
        ConfigurationError: ``value`` is set, and the backend is not ``"nccl"``.
    """
    if value is not None and backend != "nccl":
        raise ConfigurationError(
            f"{name}={value} limits the multiprocessors of a GPU that NCCL's messages occupy, and messages go by "
            f"{backend} here. Leave it out, or train on GPUs with the backend nccl."
        )


@contextmanager
def _named(wanted: str) -> Iterator[None]:
    """Give the next group a name made of ``wanted``, and of how many groups have it already."""
    taken = set(c10d._world.pg_names.values())
    count = 0
    while (name := hashlib.sha256(f"{wanted} {count}".encode()).hexdigest()) in taken:
        count += 1
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original
