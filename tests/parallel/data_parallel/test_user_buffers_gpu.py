"""Buffers that NCCL knows, on two GPUs and without multicast: the same training, and nothing left registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.parallel.data_parallel.communication import Registration, why_not
from tests.parallel.data_parallel.helpers import assert_close
from tests.parallel.data_parallel.test_units_gpu import train
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu


def _train(kind: Registration, level: str) -> tuple[Tensor, Tensor] | str:
    """Norms and the last loss, or why it cannot be had here."""
    if (reason := why_not(kind, torch.device("cuda", torch.cuda.current_device()))) is not None:
        return reason
    norms, loss, _ = train(level, True, nccl_ub=kind)
    return norms, loss


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """One engine after the other: each registers its buffers with the same groups."""
    kinds = ("local", "symmetric", "off")  # the first one meets groups that have sent nothing yet
    return [(_train, (kind, level)) for kind in kinds for level in ("optim_grads_params", "optim")]


@pytest.mark.parametrize("level", ["optim_grads_params", "optim"])
@pytest.mark.parametrize("kind", ["local", "symmetric"])
def test_two_gpus_train_as_without_registration(kind: str, level: str) -> None:
    runs = runs_of(jobs, 2)
    found, expected = runs.outcome((kind, level)), runs.outcome(("off", level))
    if isinstance(found, str):
        pytest.skip(found)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-2)
