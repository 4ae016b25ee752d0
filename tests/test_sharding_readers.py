"""Other code that reads a module under ``fully_shard``: torch's clipping, and state dicts of it and of its layers."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before

import megalight
from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import DataParallelOptions
from tests.support.workers import run

LEVELS = ["no_shard", "optim_grads", "optim_grads_params"]


def _sharded(level: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = DataParallelOptions(level=level)  # type: ignore[arg-type]
    return model, optimizer, megalight.fully_shard(model, optimizer, units=["Linear"], data_parallel=options)


def _inputs() -> torch.Tensor:
    return torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).double()


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    return loss


def _clipped(level: str, clip: str) -> tuple[str, Any, float]:
    model, _, sharded = _sharded(level)
    _loss(model, _inputs()[dist.get_rank()]).backward()
    call = imported_before if clip == "imported before" else getattr(nn.utils, clip)
    try:
        call(model.parameters(), 0.1)
    except ConfigurationError as error:
        message = str(error)
    other = nn.Linear(6, 6)
    other.weight.grad = torch.ones(6, 6)
    plain = float(imported_before(iter([other.weight]), 1.0)), float(other.weight.grad.norm())
    return message, plain, float(sharded.clip_grad_norm_(0.1))


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_", "imported before"])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_by_torch_is_refused_and_leaves_gradients_alone(level: str, clip: str) -> None:
    torch.manual_seed(2)
    whole = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()
    (sum(_loss(whole, x) for x in _inputs()) / 2).backward()  # type: ignore[union-attr]
    expected = float(nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None]))
    for message, plain, norm in run(_clipped, 2, level, clip):
        assert "cannot clip a module under megalight.fully_shard" in message
        assert "Call sharded.clip_grad_norm_(max_norm) on all ranks" in message
        assert plain == (6.0, pytest.approx(1.0, rel=1e-5)), "other modules are clipped as ever"
        assert norm == pytest.approx(expected, rel=1e-12)


def _read(level: str) -> tuple[dict[str, Any], list[str]]:
    """State dicts after a step, or why they were refused; and how loading into a layer was refused."""
    model, optimizer, sharded = _sharded(level)
    _loss(model, _inputs()[dist.get_rank()]).backward()
    if dist.get_rank():  # so that its new weights come late, if nobody waits for them
        optimizer.register_step_pre_hook(lambda *_: time.sleep(0.3))
    optimizer.step()
    found: dict[str, Any] = {}
    for name, part in (("whole", model), ("layer", model[1])):
        try:
            found[name] = {key: value.tolist() for key, value in part.state_dict().items()}
        except ConfigurationError as error:
            found[name] = str(error)
    with sharded.full_parameters():
        kept = model[1].state_dict()
    _loss(model, _inputs()[0])
    found["kept"] = {name: value.tolist() for name, value in kept.items()}
    state = deepcopy(kept)
    refused = []
    for load in (model[1].load_state_dict, model.load_state_dict):
        try:
            load(state)
        except ConfigurationError as error:
            refused.append(str(error))
    return found, refused


@pytest.mark.parametrize("level", LEVELS)
def test_state_dicts_are_right_or_refused(level: str) -> None:
    torch.manual_seed(2)
    whole = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    (sum(_loss(whole, x) for x in _inputs()) / 2).backward()  # type: ignore[union-attr]
    optimizer.step()
    expected = {name: value.numpy() for name, value in whole.state_dict().items()}
    for found, refused in run(_read, 2, level):
        for name, prefix in (("whole", ""), ("layer", "1."), ("kept", "1.")):
            if level == "optim_grads_params" and name != "kept":
                assert "whose parameters are not whole here" in found[name]
                continue
            for key, value in found[name].items():
                assert value == pytest.approx(expected[prefix + key], rel=1e-12), (name, key)
        assert all("does not reach its optimizer's masters" in message for message in refused)
        assert len(refused) == 2
