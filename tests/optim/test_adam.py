from __future__ import annotations

import pickle
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.optim import Adam


def _tensors() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in (7, 129)]


def _run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> list[Tensor]:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


def _same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all((a - b).norm() <= 1e-12 * b.norm() for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("decoupled", "capturable"), list(product((True, False), (True, False))))
def test_equals_torch(decoupled: bool, capturable: bool) -> None:
    options: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.2}
    ours, theirs = _tensors(), _tensors()
    optimizer = Adam(ours, decoupled_weight_decay=decoupled, capturable=capturable, **options)
    expected = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **options)
    assert _same(_run(optimizer, ours, 5), _run(expected, theirs, 5))


def test_reads_and_writes_torch_state() -> None:
    ours, theirs, copy = _tensors(), _tensors(), _tensors()
    expected = torch.optim.AdamW(theirs, lr=0.03)
    _run(expected, theirs, 3)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    optimizer = Adam(ours)
    state = deepcopy(expected.state_dict())
    for group in state["param_groups"]:
        group["decoupled_weight_decay"] = True
    optimizer.load_state_dict(state)
    assert _same(_run(optimizer, ours, 2, first=3), _run(expected, theirs, 2, first=3))
    again = torch.optim.AdamW(copy)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    for p, q in zip(copy, ours, strict=True):
        p.data.copy_(q)
    assert _same(_run(again, copy, 2, first=5), _run(optimizer, ours, 2, first=5))


def test_gradient_scale_serves_one_step() -> None:
    ours, theirs = _tensors(), _tensors()
    optimizer, expected = Adam(ours), Adam(theirs)
    optimizer.grad_scale = torch.tensor(0.5, dtype=torch.float64)
    _run(optimizer, ours, 1)
    assert optimizer.grad_scale is None
    for p in theirs:
        p.grad = torch.zeros_like(p)
    generator = torch.Generator().manual_seed(0)
    for p in theirs:
        p.grad = 0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    expected.step()
    assert _same([p.detach() for p in ours], [p.detach() for p in theirs])


def test_low_precision_copies_follow() -> None:
    params = [nn.Parameter(p.detach().float()) for p in _tensors()]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    optimizer = Adam(params)
    optimizer.copies = dict(zip(params, copies, strict=True))
    _run(optimizer, params, 2)
    for p, copy in zip(params, copies, strict=True):
        assert torch.equal(copy, p.detach().bfloat16())


def test_closure_and_missing_gradients() -> None:
    params = _tensors()
    optimizer = Adam(params)
    before = [p.detach().clone() for p in params]

    def closure() -> Tensor:
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == before[0].square().sum()
    assert not torch.equal(params[0].detach(), before[0])
    assert torch.equal(params[1].detach(), before[1])
    assert params[1] not in optimizer.state


def test_lightning_can_subclass_it_and_it_can_be_pickled() -> None:
    optimizer = Adam(_tensors(), lr=0.5)
    assert isinstance(LightningOptimizer(optimizer), Adam)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}])
def test_values_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        Adam(_tensors(), **option)
