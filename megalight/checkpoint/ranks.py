"""All ranks of a save or load act as one: either all continue, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megalight.errors import CheckpointError, MegalightError

T = TypeVar("T")


@contextmanager
def alone() -> Iterator[ProcessGroup | None]:
    """A process group of this process alone, for a rank that loads a checkpoint while the others do not."""
    if not (dist.is_available() and dist.is_initialized()):
        yield None
        return
    # With local synchronization, since the other ranks do not take part.
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


class Ranks:
    """The ranks of a process group (None: the default one, or this process alone where there is none)."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def together(self, stage: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank. Returns all results, in rank order, on rank 0 (on others an empty list).

        Raises:
            CheckpointError: on every rank, when it failed on any; rank 0's view of who failed and why.
        """
        own: Exception | None = None
        value: Any = None
        try:
            value = work()
        except Exception as error:
            own = error
        if self.alone:
            if own is not None:
                raise _failure(stage, [(0, own)]) from own
            return [value]
        # Only rank 0 gets all answers: it decides for all.
        answers: list[Any] | None = [None] * self.size if self.rank == 0 else None
        # Gathered even after an error here: the others wait for this rank.
        dist.gather_object((None if own is None else _portable(own), value), answers, group=self.group, group_dst=0)
        verdict: list[str | None] = [None]
        if answers is not None:
            failures = [(rank, error) for rank, (error, _) in enumerate(answers) if error is not None]
            verdict = [str(_failure(stage, failures)) if failures else None]
        dist.broadcast_object_list(verdict, group=self.group, group_src=0)
        if verdict[0] is not None:
            # The same text on all ranks. The own error, if there is one, is its cause.
            raise CheckpointError(verdict[0]) from own
        return [] if answers is None else [answer for _, answer in answers]

    def first(self, stage: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and give every rank its result.

        Raises:
            CheckpointError: on every rank, when it failed.
        """
        results = self.together(stage, lambda: work() if self.rank == 0 else None)
        if self.alone:
            return results[0]  # type: ignore[return-value]
        box: list[Any] = [results[0] if results else None]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        result: T = box[0]
        return result

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. The group's collectives must work on the host."""
        # Without a message: a single rank knows already.
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)


def _portable(error: Exception) -> Exception:
    """The error by its text: an error must be picklable to be sent to other ranks."""
    # Classes of other packages may need arguments to be unpickled.
    return CheckpointError(_text(error))


def _failure(stage: str, failures: list[tuple[int, Exception]]) -> CheckpointError:
    rank, error = failures[0]
    others = f" (and on {len(failures) - 1} other ranks)" if len(failures) > 1 else ""
    return CheckpointError(f"{stage} failed on rank {rank}{others}: {_text(error)}")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, MegalightError) else repr(error)
