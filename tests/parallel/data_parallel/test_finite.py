"""All ranks stop together when a gradient is not finite."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalight.errors import MegalightError
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.data_parallel.grad_norm import check_finite
from tests.parallel.data_parallel.helpers import accumulate, batches, build, infos, mesh
from tests.support.workers import run


def _spoilt(level: str, bad: float) -> list[str]:
    model = build()
    engine = DataParallelEngine(
        infos(model), mesh(), DataParallelOptions(level=level, bucket_size=30, check_for_nan=True)
    )
    inputs = batches(0, dist.get_world_size(), 2)[dist.get_rank()]
    accumulate(engine, model, inputs)  # good ones pass
    spoil = model[3].bias.register_hook(lambda gradient: gradient * bad)  # type: ignore[union-attr]
    messages = []
    for rank in range(dist.get_world_size()):
        if rank != dist.get_rank():
            spoil.remove()
        with pytest.raises(MegalightError) as caught:
            accumulate(engine, model, inputs)
        messages.append(str(caught.value))
        spoil.remove()
        spoil = model[3].bias.register_hook(lambda gradient: gradient * bad)  # type: ignore[union-attr]
    spoil.remove()
    accumulate(engine, model, inputs)  # and a later step is not spoilt by an earlier one
    return messages


@pytest.mark.parametrize(("level", "bad"), [("optim", float("nan")), ("no_shard", float("inf"))])
def test_all_ranks_raise_the_same_error(level: str, bad: float) -> None:
    """Only one rank has a bad gradient, and another one may hold its sum."""
    found = run(_spoilt, 2, level, bad)
    assert found[0] == found[1]
    for message in found[0]:
        assert message.startswith("the gradients of 3.bias are NaN or infinite")
        assert "those of the last good step" in message


def _overflow() -> None:
    model = build(torch.float32)
    engine = DataParallelEngine(infos(model), mesh())
    accumulate(engine, model, batches(0, 1, 1, torch.float32)[0] * 0)
    engine.main_gradients.values[0].fill_(1e38)
    with pytest.raises(MegalightError, match=r"norm of the gradients is inf, though every gradient is finite"):
        check_finite(engine.buckets, engine.grad_norm(), None)


def test_a_norm_that_overflows() -> None:
    run(_overflow, 1)
