"""Prompts whose answers are trained on in several steps."""

from __future__ import annotations

from typing import NamedTuple

from megalight.rl.environment import Task
from megalight.rl.prompts import TaskDataset


class Use(NamedTuple):
    """A task in a batch.

    Attributes:
        task: the task.
        number: how many batches had it before, of those that share its answers.
    """

    task: Task
    number: int


class ReusedTasks:
    """Tasks in global batches, each of which comes several times in a row.

    Args:
        tasks: the tasks of a run.
        batch: tasks of a global batch.
        times: how often it comes.

    Attributes:
        order: hash of everything that the order depends on.
    """

    def __init__(self, tasks: TaskDataset, batch: int, times: int) -> None:
        self.tasks, self.batch, self.times = tasks, batch, times
        self.order = f"{tasks.order}/{times}"

    def __len__(self) -> int:
        return len(self.tasks) // self.batch * self.batch * self.times

    def __getitem__(self, index: int | None) -> Use | None:
        """Return task ``index``; None stays None, and fills up a batch."""
        if index is None:
            return None
        batch, place = divmod(index, self.batch)
        first, number = divmod(batch, self.times)
        task = self.tasks[first * self.batch + place]
        assert task is not None
        return Use(task, number)
