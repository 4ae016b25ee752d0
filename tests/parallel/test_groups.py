"""Names of groups, and what of torch's own they rest on."""

from __future__ import annotations

import hashlib
import inspect
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megalight.parallel.mesh import ParallelMesh, new_group, uses_backend
from megalight.parallel.shared_state import SharedState
from tests.support.workers import run

CHANGED = "torch names groups in another way: see megalight/parallel/mesh.py, _named"


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


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ("nccl", ["nccl"]),
        ("gloo", ["gloo"]),
        ("cpu:gloo,cuda:nccl", ["gloo", "nccl"]),
        ("cuda:nccl", ["nccl"]),
        ("cpu:gloo,xpu:xccl", ["gloo"]),
    ],
)
def test_backends_are_found_where_each_type_of_device_has_its_own(backend: str, found: list[str]) -> None:
    assert [name for name in ("gloo", "nccl") if uses_backend(name, backend)] == found


def _tokens_and_gradients() -> list[bool]:
    """Whether groups of the same ranks differ by what they send."""
    shared = SharedState(ParallelMesh(2, dist.get_rank(), ep=2))
    data = shared.mesh.group("dp", "cp")
    assert data is not None
    groups = [data, shared.expert_group, shared.counts_group]
    assert shared.expert_group is SharedState(shared.mesh).expert_group
    assert [dist.get_process_group_ranks(group) for group in groups] == [[0, 1]] * 3
    return [one is other for one in groups for other in groups]


def test_tokens_of_experts_do_not_queue_behind_gradients() -> None:
    apart = [True, False, False, False, True, False, False, False, True]
    assert run(_tokens_and_gradients, 2) == [apart] * 2


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's schedulers")
def test_threads_that_hold_tensors_do_not_abort_the_exit() -> None:
    command = [sys.executable, "-m", "tests.parallel.exits", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
