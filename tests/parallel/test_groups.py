"""Names of groups, and what of torch's own they rest on."""

from __future__ import annotations

import hashlib
import inspect

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megalight.parallel.groups import new_group
from tests.workers import run

CHANGED = "torch names groups in another way: see megalight/parallel/groups.py, _named"


def test_torch_takes_names_where_they_are_given() -> None:
    """``_named`` stands in for a private function of torch; this fails when torch no longer asks it."""
    assert list(inspect.signature(c10d._hash_ranks_to_str).parameters) == ["ranks"], CHANGED
    assert "_hash_ranks_to_str(ranks)" in inspect.getsource(c10d._process_group_name), CHANGED
    assert "_process_group_name(ranks, use_hashed_name=use_local_synchronization)" in inspect.getsource(
        c10d._new_group_with_tag
    ), CHANGED
    assert isinstance(c10d._world.pg_names, dict), CHANGED


def _names() -> tuple[list[str], bool]:
    before = c10d._hash_ranks_to_str
    if dist.get_rank() == 0:
        new_group([0], "own")  # the other rank has one group less from here on
    groups = [new_group([0, 1], "pairs") for _ in range(2)]
    return [c10d._world.pg_names[group] for group in groups], c10d._hash_ranks_to_str is before


def test_names_tell_purpose_and_ranks() -> None:
    for names, restored in run(_names, 2):
        assert names == [hashlib.sha256(f"pairs 0 1 None {count}".encode()).hexdigest() for count in range(2)], CHANGED
        assert restored
