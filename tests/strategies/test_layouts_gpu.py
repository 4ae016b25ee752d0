"""Pipelines, context parallelism and full sharding over NCCL: the same model, and no step that waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.strategies import MegatronFSDPStrategy
from tests.strategies import regression
from tests.strategies.regression import batches, dealt, make_optimizer, weights
from tests.strategies.test_layouts import MODELS, WHOLE, WIDE, ZERO_BUBBLE, Row, options_of
from tests.strategies.test_plain import Normed, close
from tests.strategies.training import assert_same_run, by_hand, fit
from tests.support.nccl import runs_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

ROWS = [
    Row("gqa", pp=2),
    Row("gqa", 4, pp=2, vpp=2, pipeline=PipelineOptions(messages="plain")),
    Row("tied", pp=2, vpp=2, pipeline=ZERO_BUBBLE, packed=True),
    Row("gqa", 2, cp=2, kind="ring"),
    Row("tied", 2, cp=2, kind="all_to_all", packed=True),
    Row("gqa", 5, dp=2, level="optim_grads_params"),
    Row("tied", 4, dp=2, level="optim_grads", packed=True, recompute=WHOLE),
    Row("gqa", 8, pp=4, vpp=2),
    Row("mha", 3, tp=2, sp=True, dp=2, level="optim_grads_params", recompute=WHOLE),
    Row("tied", 6, dp=4, level="optim_grads_params", packed=True),
    Row("tied", 4, pp=2, tp=2, sp=True),
    Row("gqa", 4, pp=2, cp=2, kind="ring", pipeline=ZERO_BUBBLE),
    Row("gqa", 8, pp=2, vpp=2, dp=2, level="optim_grads_params"),
    Row("tied", 4, pp=2, dp=2, level="optim_grads_params", pipeline=ZERO_BUBBLE, packed=True),
    Row("mha", 4, pp=2, cp=2, kind="ring", level="optim_grads_params", recompute=WHOLE),
    Row("mha", 2, cp=4, kind="all_to_all_ring", inner=2),
    Row("gqa", 2, cp=4, kind="all_gather"),
    Row("gqa", 3, dp=2),
    Row("gqa", 4, pp=2, dp=2, pipeline=ZERO_BUBBLE),
    Row("mha", 3, tp=2, sp=True, dp=2),
    *(row for row in WIDE if row.world == 8),
]
"""Parameters are gathered as by default: by copy engines where the GPUs have links."""
STRICT = [
    Row("gqa", 4, pp=2, vpp=2),
    Row("gqa", 2, cp=2, kind="ring"),
    Row("gqa", 5, dp=2, level="optim_grads_params"),
    Row("gqa", 8, pp=2, vpp=2, dp=2, level="optim_grads_params"),
]
"""Rows that also run in bf16 with every wait for the device an error in the middle of the run."""
PUSHED = [
    Row("gqa", 5, dp=2, level="optim_grads_params"),
    Row("gqa", 8, pp=2, vpp=2, dp=2, level="optim_grads_params"),
    Row("tied", 6, dp=4, level="optim_grads_params", packed=True),
    Row("gqa", 3, dp=2),
    Row("tied", 4, dp=2, level="optim_grads", packed=True),
    Row("tied", 4, dp=4, packed=True),
]
"""Rows whose units, or whole parameters, copy engines gather and reduce as well."""
PLAIN = [Row("gqa", 5, dp=2, level="optim_grads_params"), Row("tied", 4, dp=4, packed=True)]
"""Rows whose parameters collectives gather as well."""

STEPS = 3
SYNCED = ("one", "fsdp")
"""Strategies that train with batch norms over ranks."""


class Strict(pl.Callback):
    """Any wait of the host for the device is an error in some steps."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx < 7 else "default")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _train(row: Row, strict: bool, way: str | None = None) -> dict[str, Any]:
    ways = {} if way is None else {"gathers": way, "reductions": way}
    options: dict[str, Any] = {"accelerator": "cuda"}
    if strict:
        options |= {"precision": "bf16-mixed", "log_every_n_steps": 1000}
    return fit(
        replace(MODELS[row.config], num_layers=row.layers),
        9 if strict else STEPS,
        options={"level": row.level, **ways},
        trainer_options=options,
        extra_callbacks=[Strict()] if strict else [],
        packed=row.packed,
        **options_of(row),
    )


def _synced(how: str) -> list[list[float]]:
    """Weights and buffers of a module with ``SyncBatchNorm``."""
    module, used = Normed(), MegatronFSDPStrategy() if how == "fsdp" else regression.strategy()
    regression.fit(module, batches(16, 2), used, accelerator="cuda", sync_batchnorm=True)
    assert isinstance(module.net[1], nn.SyncBatchNorm)
    assert used.parallel_model is not None
    with used.parallel_model.full_parameters():
        return weights(module) + [buffer.double().reshape(-1).tolist() for buffer in module.buffers()]


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    rows, strict, pushed, plain = (
        [row for row in rows if row.world == world] for rows in (ROWS, STRICT, PUSHED, PLAIN)
    )
    ordinary = [(_train, (row, False)) for row in rows] + [(_train, (row, True)) for row in strict]
    ordinary += [(_train, (row, False, "plain")) for row in plain]
    synced = [(_synced, (how,)) for how in SYNCED if world == 2]
    return synced + ordinary + [(_train, (row, strict, "symmetric")) for row in pushed for strict in (False, True)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_layout_over_nccl_trains_the_same_model(row: Row) -> None:
    found = runs_of(jobs, row.world).outcome((row, False))
    model = replace(MODELS[row.config], num_layers=row.layers)
    assert_same_run(found, by_hand(model, STEPS, device="cuda", packed=row.packed))


@pytest.mark.parametrize("row", PUSHED, ids=str)
def test_copy_engines_move_the_same_parameters_and_gradients(row: Row) -> None:
    found = runs_of(jobs, row.world).outcome((row, False, "symmetric"))
    model = replace(MODELS[row.config], num_layers=row.layers)
    assert_same_run(found, by_hand(model, STEPS, device="cuda", packed=row.packed))
    assert len(runs_of(jobs, row.world).outcome((row, True, "symmetric"))["losses"]) == 9


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_collectives_gather_the_same_parameters(row: Row) -> None:
    found = runs_of(jobs, row.world).outcome((row, False, "plain"))
    model = replace(MODELS[row.config], num_layers=row.layers)
    assert_same_run(found, by_hand(model, STEPS, device="cuda", packed=row.packed))


@pytest.mark.parametrize("how", SYNCED)
def test_batch_norms_over_ranks_are_those_of_the_whole_batch(how: str) -> None:
    found = runs_of(jobs, 2).outcome((how,))
    net = Normed().net.double().cuda()
    optimizer = make_optimizer("SGD", net.parameters())
    for step in dealt(16, 2, 2):
        x, y = (
            torch.cat(parts).cuda() for parts in zip(*[(x + rank, y) for rank, (x, y) in enumerate(step)], strict=True)
        )
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    close(found, weights(net) + [buffer.double().reshape(-1).tolist() for buffer in net.buffers()])


@pytest.mark.parametrize("row", STRICT, ids=str)
def test_no_step_waits_for_the_device(row: Row) -> None:
    assert len(runs_of(jobs, row.world).outcome((row, True))["losses"]) == 9
