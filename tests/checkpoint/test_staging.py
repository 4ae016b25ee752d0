"""Staging fixes what a later write writes; the write may run in a thread beside training."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from megalight import checkpoint
from megalight.checkpoint.saving import HostCopies
from tests.checkpoint import simple
from tests.checkpoint.layouts import Layout, Model
from tests.support.workers import run


def test_what_changes_after_staging_is_not_written(tmp_path: Path) -> None:
    values, counts, state = simple.tensors(1), torch.ones(5), torch.ones(9)
    common = {"global_step": 1, "counts": counts}
    files = {"tokenizer.json": b"step 1"}
    staged = checkpoint.stage(simple.views(values), common=common, rank_state={"random": state}, files=files)
    for tensor in (*values.values(), counts, state):
        tensor.fill_(2)
    common["global_step"] = 2
    files["tokenizer.json"] = b"step 2"
    assert list(tmp_path.iterdir()) == []
    checkpoint.write(tmp_path / "a.ckpt", staged)
    assert simple.step_of(tmp_path / "a.ckpt") == 1


def test_without_a_copy_the_memory_stays_its_owners() -> None:
    values = simple.tensors(1)
    staged = checkpoint.stage(simple.views(values), copy=False)
    kept = {box.data.data_ptr() for view in staged.views.values() for box in view.boxes}
    assert kept == {value.data_ptr() for value in values.values()}


def test_sources_are_held_until_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are written, their memory may be needed: an optimizer may have been moved to the host."""
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    source, target = torch.ones(3), torch.zeros(3)
    held, copies = weakref.ref(source), HostCopies([source], [target])
    del source
    assert held() is not None
    copies.wait()
    assert held() is None
    assert target.tolist() == [1, 1, 1]


def write_beside_training(path: Path) -> tuple[int, int, list[str]]:
    """Write in a thread, over a group of its own, while the default group goes on with other values."""
    layout, group = Layout(2, 1, "no_shard"), dist.new_group(backend="gloo")
    model = Model(layout, dist.get_rank(), filled=True)
    staged = checkpoint.stage(model.views())
    copied = sum(box.data.nbytes for view in staged.views.values() for box in view.boxes)
    owned = sum(t.nbytes for t in model.parameters.values()) + sum(t.nbytes for ts in model.states.values() for t in ts)
    thread = threading.Thread(target=checkpoint.write, args=(path, staged), kwargs={"process_group": group})
    thread.start()
    for tensor in (*model.parameters.values(), *(t for tensors in model.states.values() for t in tensors)):
        dist.all_reduce(tensor)
    thread.join()
    dist.barrier()
    again = Model(layout, dist.get_rank(), filled=False)
    checkpoint.open(path).fill(checkpoint.targets_of(again.views()))
    return copied, owned, again.differs(Model(layout, dist.get_rank(), filled=True))


def test_ranks_copy_their_shares_and_write_beside_training(tmp_path: Path) -> None:
    results = run(write_beside_training, 2, tmp_path / "a.ckpt")
    assert [wrong for _, _, wrong in results] == [[], []]
    for copied, owned, _ in results:
        assert copied < 0.6 * owned
