"""Asynchronous saves of a run, and what waits for them: links to a checkpoint, removals of others, callbacks.

Lightning removes an old checkpoint and links to a new one right after it has asked for the new one. Both wait here
until the new one is published, so that a run can resume from a complete checkpoint at every moment.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import ProcessGroup

from megalight import checkpoint
from megalight.checkpoint import AsyncSaver
from megalight.checkpoint.async_save.saves import Kind, PendingSave
from megalight.checkpoint.ranks import Ranks

log = logging.getLogger(__name__)


class AsyncSaves:
    """The asynchronous saves of a run.

    Args:
        kind: see :data:`megalight.checkpoint.async_save.saves.Kind`.
        skip: skip a save while another is in progress. False: wait for the other.
        group: a group of all ranks that works on the host.
        zero: whether this is rank 0, which publishes, links and removes.
        remove: removes a checkpoint now.
        written: tells callbacks of a checkpoint, on all ranks.

    Attributes:
        saver: writes them.
    """

    def __init__(
        self,
        kind: Kind,
        skip: bool,
        group: ProcessGroup | None,
        zero: bool,
        remove: Callable[[str], None],
        written: Callable[[str], None],
    ) -> None:
        self.saver = AsyncSaver(kind, group)
        self._ranks = Ranks(group)
        self._skip = skip
        self._zero = zero
        self._remove = remove
        self._written = written
        self._links: list[tuple[str, str]] = []
        self._removals: dict[str, int] = {}  # path -> the save that must be published before
        self._asked = 0
        self._published = 0
        self._number = 0
        self._in_progress = 0
        self._late = ""

    def begin(self, path: str, views: Any, **values: Any) -> bool:
        """Start a save, on all ranks. False: it was skipped, because another is in progress.

        Raises:
            CheckpointError: on all ranks, if this one cannot start, or the previous one failed.
        """
        # An error of the save before comes up now, on all ranks, and not in the middle of the next one.
        self.check()
        asked, before = time.time(), self.saver.pending
        if before is not None and not self._skip:
            self.finish()  # before this save counts as asked for, or removals would no longer wait for it
        self._number += 1
        self._asked = self._number
        if self.saver.pending is not None:
            log.warning("%s is not saved: %s is still being written", path, self.saver.pending.path)
            return False
        late = "" if before is None else f"; it began {time.time() - asked:.2f} s late, after {before.path}"
        self.saver.save(path, views, **values)
        # The path is written again, so what was to be removed there must stay.
        self._removals.pop(path, None)
        self._in_progress, self._late = self._number, late
        return True

    def check(self) -> None:
        """At a step boundary, on all ranks: complete a save that has ended.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self.saver.ready():
            self._settled(self.saver.settle())

    def finish(self) -> None:
        """Wait for the save in progress, on all ranks.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self.saver.pending is not None:
            self._settled(self.saver.settle())

    def finish_alone(self) -> None:
        """Wait for the save in progress after training has failed, when other ranks may be gone."""
        pending = self.saver.settle_alone()
        if pending is not None:
            self._follow(pending)

    def abort(self) -> None:
        """Drop the save in progress, at once and on this rank alone. What it was to replace stays."""
        self.saver.abort()
        self._links.clear()
        self._removals.clear()

    def remove(self, path: str) -> None:
        """Remove a checkpoint, after the latest one is published."""
        if self._published >= self._asked:
            self._remove(path)
        else:
            self._removals[path] = self._asked

    def link(self, path: str, link: str) -> None:
        """Link to the checkpoint ``path`` as soon as that is published."""
        pending = self.saver.pending
        if pending is not None and str(pending.path) == os.path.abspath(path):
            self._links.append((path, link))
        elif os.path.exists(path):
            relink(path, link)

    def _settled(self, pending: PendingSave) -> None:
        # Rank 0 alone has links and removals, and must not leave the others when one fails.
        self._ranks.together(f"linking to {pending.path}", lambda: self._follow(pending))
        self._written(str(pending.path))

    def _follow(self, pending: PendingSave) -> None:
        """Do what follows a publication on this rank alone."""
        # Up to the save that was published. A save that was skipped since then has not replaced anything.
        self._published = self._asked = self._in_progress
        for path, link in self._links:
            relink(path, link)
        due = [path for path, number in self._removals.items() if number <= self._published]
        for path in due:
            del self._removals[path]
            self._remove(path)
        self._links.clear()
        # Rank 0 tells, after links and removals are done.
        if self._zero:
            message = "saved %s in %.2f s; training waited %.2f s for it%s"
            rank_zero_info(message, pending.path, pending.seconds, pending.waited, self._late)


def relink(path: str, link: str) -> None:
    """Make a link to a checkpoint in the same folder. It exists at every moment, if it did before."""
    place = Path(link)
    # Named by the process, so that two runs in one folder do not take each other's link.
    temporary = place.with_name(f"{place.name}.link-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # Relative, so that the folder of checkpoints can be moved as a whole.
    temporary.symlink_to(os.path.relpath(path, place.parent))
    if place.is_dir() and not place.is_symlink():
        checkpoint.remove(place)
    # One rename: at no moment is there no link.
    os.replace(temporary, place)
