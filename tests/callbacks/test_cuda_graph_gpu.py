"""Real CUDA graphs: losses of eager steps, dropout and low precision too; no waits, no growing memory; over NCCL."""

from __future__ import annotations

import datetime
import os
import queue
import time
import traceback
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

from megalight.callbacks import CUDAGraph, Throughput
from megalight.models.gpt import DropoutConfig, MambaConfig, MultiTokenConfig
from megalight.models.gpt.module import GPTModule
from megalight.nn.moe import BalanceConfig, CapacityConfig, MoEConfig, Router, RouterConfig
from megalight.ops.quantize.recipes import recipe as quantize_recipe
from megalight.optim import AdamConfig, MuonConfig
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.plugins.transformer_engine.low_precision import why_not
from megalight.strategies import MegatronStrategy, PipelineOptions
from tests.parallel.data_parallel.stale import stale_gradients
from tests.strategies.test_gpu import Batches, Watch, batches, watched
from tests.strategies.test_low_precision import CONFIG as WIDE
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, fit
from tests.support.workers import meeting

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROOMY = replace(WIDE, hidden_size=256, head_dim=64, ffn_hidden_size=256)
"""Features in multiples of the blocks of 128 that block-wise scales span."""
NEVER = 1000
STEPS = 12
DROPPING = replace(CONFIGS["gqa"], dropout=DropoutConfig(hidden=0.2, attention=0.1, embedding=0.1))


class Memory(pl.Callback):
    """Bytes in use after every step."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self.used.append(torch.cuda.memory_reserved())


def train(
    scope: Any,
    warmup: int,
    config: Any,
    strict: bool = False,
    also: Any = (),
    backend: Any = "own",
    pin_memory: bool = True,
    optimizer: AdamConfig = ADAM,
    **options: Any,
) -> tuple[list[float], CUDAGraph, list[int]]:
    """Losses, the callback, and memory after each step."""
    callback = CUDAGraph(scope, warmup_steps=warmup, backend=backend, on_refusal="error")
    memory = Memory()
    precision = {"precision": "bf16-mixed"} if "plugins" not in options else {"plugins": options.pop("plugins")}
    strategy = MegatronStrategy(micro_batch_size=2, **options)
    more = {"strategy": strategy, "max_steps": STEPS, "gradient_clip_val": CLIP, **precision}
    torch.manual_seed(0)
    module, data = GPTModule(config, optimizer=optimizer, seed=SEED), batches(STEPS, pin_memory)
    with stale_gradients():
        losses = watched(module, data, strict, callbacks=[callback, memory, *also], **more)
    return losses, callback, memory.used


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (CONFIGS["tied"], {}),
    "layer norm": (CONFIGS["gpt2"], {}),
    "dropout": (DROPPING, {}),
    "depths": (replace(CONFIGS["gqa"], mtp=MultiTokenConfig(num_layers=2)), {}),
    "hybrid": (
        replace(
            CONFIGS["gqa"],
            num_layers=4,
            layer_pattern="M*-M",
            mamba=MambaConfig(num_heads=4, head_dim=16, state_size=16, num_groups=2),
        ),
        {},
    ),
    "recompute": (
        CONFIGS["gqa"],
        {"recompute": RecomputeOptions(granularity="selective", modules=("attention.inner", "mlp_norm", "mlp.act"))},
    ),
}


@pytest.mark.parametrize("scope", ["iteration", "layer", "attention"])
@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_have_the_losses_of_eager_ones(name: str, scope: str) -> None:
    config, options = CASES[name]
    if config.layer_pattern and scope == "attention":
        pytest.skip("layers of a pattern have no attention to record in each")
    expected, _, _ = train(scope, NEVER, config, **options)
    found, callback, used = train(scope, 2, config, **options)
    assert not callback.reasons
    assert callback.replays >= STEPS - 2
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert used[-1] == used[5], "memory grows over replays"
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "the stream is given back"


@pytest.mark.parametrize("scope", ["iteration", "layer", "attention"])
@pytest.mark.parametrize("qk_clip", [None, 2e-3])
def test_muon(qk_clip: float | None, scope: str) -> None:
    """Replays note the largest logits, too: some heads exceed the threshold in every step."""
    how = {"optimizer": replace(ADAM, muon=MuonConfig(lr=0.02, qk_clip=qk_clip)), "strict": True}
    expected, _, _ = train(scope, NEVER, CONFIGS["gqa"], **how)
    found, callback, used = train(scope, 2, CONFIGS["gqa"], **how)
    assert not callback.reasons
    assert callback.replays >= STEPS - 2
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert used[-1] == used[5], "memory grows over replays"
    if qk_clip is not None:
        free, _, _ = train(scope, NEVER, CONFIGS["gqa"], **how | {"optimizer": replace(ADAM, muon=MuonConfig(lr=0.02))})
        assert np.abs(np.array(free) / np.array(found) - 1).max() > 2e-4, "nothing was clipped"


class Loads(pl.Callback):
    """The number of choices that each router has counted in every step."""

    def __init__(self) -> None:
        self.sums: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        routers = [module for module in pl_module.modules() if isinstance(module, Router)]
        self.sums.append([float(router.loads.sum()) for router in routers])


@pytest.mark.parametrize(
    ("scope", "capacity"),
    [
        ("iteration", CapacityConfig(factor=1.5, pad=True)),
        ("layer", CapacityConfig(factor=1.5, pad=True)),
        ("attention", None),
        ("router", None),
    ],
)
def test_experts_count_in_replays_as_in_eager_steps(scope: str, capacity: CapacityConfig | None) -> None:
    moe = MoEConfig(
        num_experts=4,
        ffn_hidden_size=64,
        router=RouterConfig(score="sigmoid", expert_bias=True),
        balance=BalanceConfig(aux_loss=0.01, global_aux_loss=0.01, z_loss=0.001),
        capacity=capacity,
    )
    config, eager, replayed = replace(CONFIGS["gqa"], moe=moe), Loads(), Loads()
    expected, _, _ = train(scope, NEVER, config, also=(eager,))
    found, callback, _ = train(scope, 2, config, also=(replayed,))
    assert not callback.reasons
    assert callback.replays >= STEPS - 2
    # a rounding that differs may send a token elsewhere
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert replayed.sums == eager.sums


@pytest.mark.parametrize("scope", ["layer", "attention"])
def test_layers_by_transformer_engine(scope: str) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    expected, _, _ = train(scope, NEVER, CONFIGS["gqa"])
    found, callback, _ = train(scope, 2, CONFIGS["gqa"], backend="transformer_engine", pin_memory=False)
    assert callback.replays == (STEPS - 2) * 2 * CONFIGS["gqa"].num_layers
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("scope", ["iteration", "layer"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_low_precision(recipe: str, scope: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs products in 8 bits")

    def losses(warmup: int) -> list[float]:
        plugin = MegatronLowPrecision(LowPrecisionOptions(recipe=recipe))
        return train(scope, warmup, WIDE, plugins=[plugin])[0]

    np.testing.assert_allclose(losses(2), losses(NEVER), rtol=1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize(
    ("backend", "scope"),
    [("transformer_engine", "layer"), ("own", "layer"), ("own", "attention"), ("own", "iteration")],
)
def test_low_precision_of_transformer_engine(backend: str, scope: str, recipe: str) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    if (reason := why_not("cuda", quantize_recipe(recipe))) is not None:
        pytest.skip(reason)

    def losses(warmup: int) -> tuple[list[float], CUDAGraph]:
        plugin = MegatronLowPrecision(LowPrecisionOptions(recipe=recipe), implementation="transformer_engine")
        return train(scope, warmup, ROOMY, backend=backend, pin_memory=False, plugins=[plugin])[:2]

    expected, _ = losses(NEVER)
    found, callback = losses(2)
    assert not callback.reasons
    assert callback.replays == (STEPS - 2) * (1 if scope == "iteration" else 2 * ROOMY.num_layers)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("scope", ["iteration", "layer"])
def test_no_replayed_step_waits_for_the_device(scope: str) -> None:
    losses, callback, _ = train(scope, 2, CONFIGS["tied"], strict=True, also=[Throughput(timers=2, every_n_steps=2)])
    assert len(losses) == STEPS
    assert not callback.reasons


def run_module(kind: type[GPTModule], config: Any, warmup: int) -> tuple[list[float], CUDAGraph]:
    """Six steps of a module that may be refused."""
    callback, watch = CUDAGraph(warmup_steps=warmup), Watch(False)
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=MegatronStrategy(micro_batch_size=2),
        precision="bf16-mixed",
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[callback, watch],
    )
    torch.manual_seed(0)
    module = kind(config, optimizer=ADAM, seed=SEED)
    trainer.fit(module, DataLoader(Batches(6), batch_size=None, pin_memory=True))
    return [float(loss) for loss in watch.losses], callback


class Reading(GPTModule):
    def loss_step(self, carry: Any, batch: Any) -> Any:
        loss = super().loss_step(carry, batch)
        assert float(loss.sum.detach()) > 0
        return loss


def test_a_step_that_reads_values_goes_on_eagerly() -> None:
    losses, callback = run_module(Reading, CONFIGS["gqa"], 2)
    assert callback.replays == 0
    assert "reads a value of a tensor" in callback.reasons[0]
    assert len(losses) == 6


class Broken(GPTModule):
    def loss_step(self, carry: Any, batch: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return super().loss_step(carry, batch)


def test_a_recording_that_breaks_leaves_the_device_and_dropout_as_they_were() -> None:
    expected, _ = run_module(GPTModule, DROPPING, NEVER)
    found, callback = run_module(Broken, DROPPING, 2)
    assert "recording failed" in callback.reasons[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("iteration", {"micro_batch_size": 1}),
    ("iteration", {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    ("iteration", {"micro_batch_size": 1, "pipeline_parallel": 2}),
    ("iteration", {"micro_batch_size": 1, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("iteration", {"micro_batch_size": 1, "pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    ("layer", {"micro_batch_size": 1}),
    ("layer", {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    ("layer", {"micro_batch_size": 1, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("attention", {"micro_batch_size": 1, "pipeline_parallel": 2}),
    ("layer", {"micro_batch_size": 1, "options": {"level": "optim_grads_params"}}),
    ("attention", {"micro_batch_size": 1, "options": {"level": "optim_grads"}}),
]
PATIENCE = 120.0


def _rank(rank: int, place: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", place, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=PATIENCE))
    config = replace(DROPPING, num_layers=4)
    for number, (scope, layout) in enumerate(LAYOUTS):
        try:
            losses = []
            for warmup in (NEVER, 2):
                callback = CUDAGraph(scope, warmup_steps=warmup, on_refusal="error")
                torch.manual_seed(0)
                options = {"accelerator": "cuda", "precision": "32-true"}
                found = fit(config, 6, trainer_options=options, extra_callbacks=[callback], **layout)
                losses.append(found["losses"])
            results.put((rank, number, (*losses, callback.replays)))
        except Exception:
            results.put((rank, number, traceback.format_exc()))
            raise
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def over_nccl() -> dict[int, Any]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    context = mp.get_context("spawn")
    results, place = context.Queue(), meeting()
    workers = [context.Process(target=_rank, args=(rank, place, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    last = time.monotonic()
    while len(found) < len(LAYOUTS) and time.monotonic() < last + PATIENCE and any(w.is_alive() for w in workers):
        try:
            rank, number, outcome = results.get(timeout=1)
        except queue.Empty:
            continue
        last = time.monotonic()
        if rank == 0 or isinstance(outcome, str):
            found.setdefault(number, outcome)
        if isinstance(outcome, str):
            break
    for worker in workers:
        worker.kill()
    return found


@pytest.mark.xdist_group("replays over NCCL")
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda number: f"{LAYOUTS[number]}")
def test_replays_over_nccl(over_nccl: dict[int, Any], number: int) -> None:
    outcome = over_nccl.get(number, "it did not end, or one before it failed")
    assert not isinstance(outcome, str), outcome
    expected, found, replays = outcome
    assert replays > 0
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_losses_can_be_kept() -> None:
    """What a callback keeps of a step is not overwritten by the next replay."""
    kept = Losses()
    losses, _, _ = train("iteration", 2, CONFIGS["gqa"], also=[kept])
    assert losses == kept.losses
    assert len(set(losses)) == STEPS
