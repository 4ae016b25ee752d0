"""Saves for ever, until killed: ``python -m tests.checkpoint.killed DIRECTORY``. Prints each step once it is safe."""

from __future__ import annotations

import sys
from itertools import count

import torch

from megalight import checkpoint
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.publish import place
from tests.checkpoint import simple


def main(directory: PathLike) -> None:
    torch.set_num_threads(1)
    newest = checkpoint.latest(directory)
    for step in count(simple.step_of(newest) + 1 if newest else 1):
        simple.save(directory / f"step={step}.ckpt", step)
        simple.save(directory / "last.ckpt", step)
        checkpoint.remove(directory / f"step={step - 2}.ckpt")
        print(step, flush=True)


if __name__ == "__main__":
    main(place(sys.argv[1]))
