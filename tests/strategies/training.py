"""Small training runs under MegatronStrategy in the worker pool, and the same run on one device by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megalight.models.gpt import AttentionConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.gpt.model import GPT
from megalight.models.gpt.module import GPTModule
from megalight.nn.aux_losses import KeptAuxLosses, collecting
from megalight.nn.canonical import parts
from megalight.nn.init import initialize
from megalight.optim import AdamConfig
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.transform import ModelTransform
from megalight.strategies import MegatronStrategy
from megalight.types import Loss, TokenBatch
from tests.parallel.data_parallel.stale import stale_gradients
from tests.parallel.gathering import gather_canonical
from tests.support.environment import trainer
from tests.support.options import data_parallel

BASE = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    vocab_size=101,
    max_sequence_length=24,
)
CONFIGS = {
    "gqa": BASE,
    "mha": replace(BASE, num_kv_heads=4),
    "tied": replace(BASE, tie_embeddings=True, logit_softcap=10.0, attention=AttentionConfig(qk_norm=True)),
    "gpt2": replace(
        BASE,
        num_kv_heads=4,
        activation="gelu_tanh",
        mlp_bias=True,
        tie_embeddings=True,
        norm=NormConfig(kind="layer"),
        position=PositionConfig(kind="learned"),
        attention=AttentionConfig(qkv_bias=True, proj_bias=True),
    ),
}
ADAM = AdamConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
CLIP = 0.5
SEED = 7
STEPS = 2
"""The second step is the first whose weights, moments and schedule a step has changed."""


PACKED = ((5, 7), (12,), (1, 3, 8), (9, 3))
"""Documents of each row, where rows hold several."""


def global_batch(step: int, rows: int = 4, length: int = 12, packed: bool = False) -> TokenBatch:
    """The global batch of a step: random tokens, and a loss mask that lets rows count differently."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, BASE.vocab_size, (rows, length + 1), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < torch.linspace(0.2, 1, rows)[:, None]).float()
    return TokenBatch(ids[:, :-1], ids[:, 1:], mask, PACKED[:rows] if packed else None)


class Shares(torch.utils.data.Dataset[TokenBatch]):
    """This rank's share of each step's global batch."""

    def __init__(self, steps: int, replicas: int, rank: int, packed: bool = False) -> None:
        self.steps, self.replicas, self.rank, self.packed = steps, replicas, rank, packed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> TokenBatch:
        batch = global_batch(step, packed=self.packed)
        return batch.split(len(batch) // self.replicas)[self.rank]


class Losses(pl.Callback):
    """Keeps every step's reported loss and gradient norm."""

    reads_weights = False

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.initial: dict[str, np.ndarray[Any, Any]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.initial = gathered(trainer.strategy, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.losses.append(float(trainer.strategy.report.loss))
        if "grad_norm" in trainer.callback_metrics:  # not before the first step, where several batches make one
            self.norms.append(float(trainer.callback_metrics["grad_norm"]))


class Gradients(pl.Callback):
    """Keeps the first step's gradients, summed over all ranks and not clipped yet."""

    reads_weights = False

    def __init__(self) -> None:
        self.first: dict[str, np.ndarray[Any, Any]] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.first = self.first or reduced(trainer.strategy)


def reduced(strategy: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The whole model's reduced gradients by canonical name."""
    engine = strategy.engine
    named = {}
    for bucket, gradient in zip(engine.buckets, engine.main_gradients.values, strict=True):
        flat = gradient.new_zeros(bucket.layout.numel)
        flat[bucket.shard.start : bucket.shard.stop] = gradient
        for group in bucket.state_groups:  # each rank holds an interval
            dist.all_reduce(flat, group=group)
        for info, (spec, start) in zip(bucket.infos, bucket.shard.slots, strict=True):
            named[info.name] = flat[start : start + spec.numel]
    return {name: value.numpy() for name, value in _of_all_ranks(strategy, named).items()}


def _of_all_ranks(strategy: Any, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors out of this rank's; a part with a layout of its own has a mesh of its own."""
    model, whole = strategy.parallel_model, {}
    for mesh in [model.mesh] + ([] if model.grafted is None else [model.grafted.mesh]):
        own = {name: tensor for name, tensor in named.items() if model.mesh_of(name) is mesh}
        whole |= gather_canonical(own, model.specs, mesh, sum_partial=False)
    return whole


def gathered(strategy: Any, module: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The whole model by canonical name."""
    strategy.sync_parameters()
    with strategy.parallel_model.full_parameters():
        named = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    return {name: value.numpy().copy() for name, value in _of_all_ranks(strategy, named).items()}


class From(torch.utils.data.Sampler[int]):
    """Steps from ``start`` on; as long as the whole epoch, which is what Lightning counts against."""

    def __init__(self, start: int, steps: int) -> None:
        self.start, self.steps = start, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.steps))


def loader(strategy: MegatronStrategy, steps: int, start: int = 0, packed: bool = False) -> DataLoader[Any]:
    share = strategy.distributed_sampler_kwargs
    rows = Shares(steps, share["num_replicas"], share["rank"], packed)
    return DataLoader(rows, batch_size=None, sampler=From(start, steps))


class WithData(GPTModule):
    """A GPTModule that brings its own data."""

    steps = 3
    packed = False

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.strategy, self.steps, self.trainer.global_step, self.packed)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.strategy, 2, packed=self.packed)


def fit(
    config: GPTConfig,
    steps: int = STEPS,
    options: dict[str, Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
    packed: bool = False,
    extra_callbacks: Sequence[pl.Callback] = (),
    module_type: type[WithData] = WithData,
    optimizer: AdamConfig = ADAM,
    **strategy_options: Any,
) -> dict[str, Any]:
    """Train in every rank of the pool; returns losses, norms, initial and final weights, and callback metrics."""
    strategy = MegatronStrategy(data_parallel=data_parallel(**(options or {})), **strategy_options)
    losses = Losses()
    module = module_type(config, optimizer=optimizer, seed=SEED)
    module.steps, module.packed = steps, packed
    runner = trainer(
        strategy,
        callbacks=[*extra_callbacks, losses],
        **{
            "max_steps": steps,
            "gradient_clip_val": CLIP,
            "use_distributed_sampler": False,
            "limit_val_batches": 0,
            **(trainer_options or {}),
        },
    )
    with stale_gradients():
        runner.fit(module)
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    final = gathered(strategy, module)
    return {
        "losses": losses.losses,
        "norms": losses.norms,
        "initial": losses.initial,
        "final": final,
        "metrics": metrics,
    }


def by_hand(
    config: GPTConfig,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    packed: bool = False,
    build: Callable[[GPTConfig], GPT] = GPT,
    transforms: Sequence[ModelTransform] = (),
    micro_batch_size: int | None = None,
    batches: Callable[[int], TokenBatch] | None = None,
) -> dict[str, Any]:
    """The same run with torch alone: one device, torch's own AdamW and clipping; auxiliary losses by micro-batch."""
    model = build(config).to(device, dtype)
    alone = ParallelModel(model, ParallelMesh(1, 0), Layout(transforms=tuple(transforms)))
    initialize(model, SEED, "model.")
    alone.transform_values()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Magnitudes of stacked experts are a row for each expert.
    vectors = [p for name, p in trained.items() if p.ndim == 1 or name.endswith("magnitude")]
    matrices = [p for p in trained.values() if all(p is not vector for vector in vectors)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": ADAM.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=ADAM.lr,
        betas=ADAM.betas,
        eps=ADAM.eps,
    )
    initial = whole(model)
    losses, norms, gradients = [], [], {}
    task = GPTModule(config)
    for step in range(steps):
        batch = (batches(step) if batches else global_batch(step, packed=packed)).to(device)
        loss, aside = torch.zeros((), dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device)
        parts = batch.split(micro_batch_size or len(batch))
        for part in parts:
            with collecting(KeptAuxLosses()) as aux_losses:
                if config.mtp is None:
                    output = model(part.tokens.reshape(-1), part.sequences, labels=part.labels.reshape(-1))
                    found = Loss((output.losses * part.loss_mask.reshape(-1).to(dtype)).sum())
                else:
                    found = task.loss_step(task.forward_step(model, part), part)
            loss = loss + found.sum / batch.loss_mask.sum()
            aside = aside + sum(aux_losses.values.values()) / len(parts)
            counts = task.aux_loss_counts(batch)
            aside = aside + sum(value / counts[name] for name, value in found.aux_losses.items())
        optimizer.zero_grad()
        (loss + aside).backward()
        gradients = gradients or canonical(model, {name: p.grad for name, p in trained.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "gradients": gradients, "initial": initial, "final": whole(model)}


def whole(model: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """A one-device model by canonical name."""
    return canonical(model, dict(model.named_parameters()))


def canonical(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors by parameter name of a one-device model, by canonical name."""
    return {
        "model." + part.name: named[part.parameter]
        .detach()
        .reshape(-1)[part.start : part.start + int(np.prod(part.shape))]
        .view(part.shape)
        .cpu()
        .numpy()
        .copy()
        for part in parts(model)
        if part.parameter in named
    }


def assert_same_run(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Initial weights bit for bit; losses, norms and final weights to a relative norm."""
    assert set(found["initial"]) == set(expected["initial"])
    for name, value in expected["initial"].items():
        assert np.array_equal(found["initial"][name], value), f"initial {name} differs"
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=tolerance)
    for name, value in expected["final"].items():
        # a key bias cancels in the softmax: all it ever holds is rounding
        error = np.linalg.norm(found["final"][name] - value) / max(float(np.linalg.norm(value)), 1e-3)
        assert error <= tolerance, f"final {name} differs by {error:.2e}"


def assert_weights(how: MegatronStrategy, expected: Mapping[str, Any], tolerance: float = 1e-9) -> set[str]:
    """Compare what this rank holds of each weight, to a relative norm. Return the names of the weights."""
    assert how.parallel_model is not None
    compared = set()
    with how.parallel_model.full_parameters():
        for name, tensor in how.parallel_model.tensors().items():
            for piece in how.parallel_model.specs[name].pieces:
                value, found = expected[piece.name][piece.box], piece.view(tensor.detach()).cpu().numpy()
                error = np.linalg.norm(found - value) / max(float(np.linalg.norm(value)), 1e-3)
                assert error <= tolerance, f"{piece.name} differs by {error:.1e}"
                compared.add(piece.name)
    return compared


def assert_same_gradients(
    found: Mapping[str, np.ndarray[Any, Any]], expected: Mapping[str, np.ndarray[Any, Any]], tolerance: float = 1e-9
) -> None:
    """Every tensor's to a relative norm."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        # a key bias cancels in the softmax: its gradient is rounding
        error = np.linalg.norm(found[name] - value) / max(float(np.linalg.norm(value)), 1e-6)
        assert error <= tolerance, f"the gradient of {name} differs by {error:.2e}"
