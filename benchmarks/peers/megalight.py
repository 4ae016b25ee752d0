"""Megalight with Lightning's Trainer. Before timing, its losses are compared with float32 on one device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch.utils.data import DataLoader, Dataset

from benchmarks.meter import Meter, forget, random_rows
from benchmarks.peers import world_size
from benchmarks.step import Step
from megalight.callbacks import ActivationOffload, CUDAGraph
from megalight.imports import has
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.config import GPTBackendConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.transforms import LoRA, QuantizedBase
from megalight.nn.aux_losses import KeptAuxLosses, collecting
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, MoEConfig, Router, RouterConfig
from megalight.ops import use_backends
from megalight.ops.quantized_weight import readable
from megalight.optim import AdamConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.parallel.transform import ModelTransform, apply_transforms
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import AdvancedDataParallelOptions, DataParallelOptions, MegatronStrategy, PipelineOptions
from megalight.strategies.checkpoints import CheckpointOptions
from megalight.types import PackedSequences, TokenBatch

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp8": 2e-2}
"""Precision -> relative difference of losses from float32 that rounding may cause."""

TRAINER_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed"}
PLUGINS = ("transformer_engine", "apex", "flash_attn")
AUX_LOSS = 1e-2
CHECKED_STEPS = 6
GRAPH_WARMUP = 2
LEARNING_RATE = 6e-4
"""Learning rate of the twin, before division by its layers. A few times higher, deep narrow models amplify rounding."""
NARROW = 512
"""Width of most twins. Wider ones sooner know their tokens. Then the loss is small, and rounding is much of it."""
WIDEST = 1024
"""Width of the widest twins where two heads for each key allow it. The float32 run takes 16 bytes for each element."""
ADAPTER_LEARNING_RATE = 2e-2
"""The same for adapters. Their effect is a product of two matrices, one of which begins at 0."""


class Wrong(RuntimeError):
    """The losses differ from those of float32, so nothing must be timed."""


class Runner:
    """Runs any layout that the strategy supports."""

    def why_not(self, step: Step) -> str | None:
        if world_size() % step.model_ranks:
            return f"{world_size()} ranks cannot hold replicas of {step.model_ranks}"
        missing = [name for name in PLUGINS if not has(name) and any(b.endswith(f":{name}") for b in step.backends)]
        if missing:
            return f"{missing[0]} is not installed"
        if step.graph and step.device != "cuda":
            return f"there are no CUDA graphs on {step.device}"
        if step.graph and step.warmup <= GRAPH_WARMUP:
            return f"a CUDA graph is recorded in step {GRAPH_WARMUP + 1}, which must not be timed: warmup={step.warmup}"
        return None

    def check(self, step: Step) -> dict[str, Any]:
        """Train a narrow twin of the step with the timed settings, and in a plain loop on one device in float32.

        Raises:
            Wrong: their losses differ.
        """
        small = twin(step)
        learned: list[float] = []
        train(small, CHECKED_STEPS, lambda strategy: learned.append(float(strategy.report.loss)), fixed=True)
        forget(step)
        exact = by_hand(small)
        forget(step)
        worst = max(abs(a - b) / b for a, b in zip(learned, exact, strict=True))
        found = {"twin_losses": learned, "twin_losses_float32": exact, "twin_difference": worst}
        say(f"twin: losses {show(learned)}, in float32 {show(exact)}, relative difference {worst:.1e}")
        if not worst < TOLERANCE[step.precision]:
            raise Wrong(f"the twin's losses differ from float32 by {worst:.1e}: {found}")
        return found

    def run(self, step: Step, meter: Meter) -> dict[str, Any]:
        losses: list[torch.Tensor] = []

        def tick(strategy: MegatronStrategy) -> None:
            losses.append(strategy.report.loss)
            meter.tick()

        module = train(step, meter.total, tick, begin=meter.start)
        meter.close()
        say(f"loss after {meter.total} steps: {float(losses[-1]):.4f}")
        if not math.isfinite(float(losses[-1])):
            raise Wrong(f"the loss after {meter.total} steps is {float(losses[-1])}")
        return check_loss(step, module) if world_size() == 1 else {}


def say(text: str) -> None:
    """Print once, on the first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def show(losses: list[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)


def config_of(step: Step) -> GPTConfig:
    return GPTConfig(
        num_layers=(1 + step.halves) * step.layers,
        layer_pattern="*-" * step.layers if step.halves else "",
        hidden_size=step.hidden,
        num_heads=step.heads,
        num_kv_heads=step.kv,
        ffn_hidden_size=step.ffn,
        vocab_size=step.vocab,
        max_sequence_length=step.seq,
        head_dim=step.head_dim,
        moe=mixture_of(step) if step.experts else None,
    )


def mixture_of(step: Step) -> MoEConfig:
    return MoEConfig(
        num_experts=step.experts,
        router=RouterConfig(top_k=step.topk, force_balance=not step.natural),
        balance=BalanceConfig(aux_loss=AUX_LOSS),
    )


def twin(step: Step) -> Step:
    """Return a small step with the same layout, head size and precision. Its depth is kept only with a pipeline."""
    kv = min(step.kv, step.tp * step.cp)
    heads = kv * min(step.heads // step.kv, max(2, WIDEST // (kv * step.head_dim)))
    return replace(
        step,
        layers=step.layers if step.pp > 1 else min(step.layers, 4),
        kv=kv,
        heads=heads,
        hidden=heads * step.head_dim,
        dim=0,
        natural=False,  # the router's own routes would flip by rounding, and losses would drift apart
        ffn=min(step.ffn, 2 * heads * step.head_dim),
        vocab=min(step.vocab, 4096),
        seq=min(step.seq, 256 * step.cp),
        mbs=1,
        micro=min(step.micro, 4 * step.pp) if step.pp > 1 else 2,
    )


class Rows(Dataset[TokenBatch]):
    """A replica's share of each step's global batch. With ``fixed``, it is the same in every step."""

    def __init__(self, step: Step, steps: int, strategy: MegatronStrategy, fixed: bool) -> None:
        self.step, self.steps, self.strategy, self.fixed = step, steps, strategy, fixed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> TokenBatch:
        ids = share(self.step, self.strategy.mesh.rank("dp"), 0 if self.fixed else index)
        return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(len(ids), self.step.seq))


def share(step: Step, replica: int, index: int) -> torch.Tensor:
    """Return the tokens ``[mbs * micro, seq + 1]`` of one replica's step."""
    return random_rows(step, step.mbs * step.micro, 1000 * replica + index)


class Steps(pl.Callback):
    """Calls functions at the start of training and at the end of each step."""

    reads_weights = False

    def __init__(self, begin: Callable[[], None], tick: Callable[[Any], None]) -> None:
        self.begin, self.tick = begin, tick

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        if trainer.strategy.root_device.type == "cpu":
            # the tick may stop the profiler, and torch crashes when a message of Gloo ends after that
            trainer.strategy.engine.sync_parameters()
        self.tick(trainer.strategy)


def train(
    step: Step,
    steps: int,
    tick: Callable[[Any], None],
    *,
    begin: Callable[[], None] = lambda: None,
    fixed: bool = False,
    checkpoints: CheckpointOptions | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> GPTModule:
    """Train ``steps`` steps with the strategy, with ``tick(strategy)`` after each; return the trained module."""
    strategy = MegatronStrategy(
        tensor_parallel=step.tp,
        sequence_parallel=step.tp > 1,
        pipeline_parallel=step.pp,
        virtual_pipeline=step.vpp,
        pipeline_layout=step.layout,
        pipeline=PipelineOptions(schedule=step.schedule, messages=step.messages),
        tensor=TensorOptions(overlap=step.overlap, keep_gathered=step.keep),
        expert_parallel=step.ep,
        context_parallel=step.cp,
        context=ContextOptions(step.kind, inner=2 if step.kind == "all_to_all_ring" else None),
        recompute=RecomputeOptions(granularity="selective", modules=step.recompute) if step.recompute else None,
        micro_batch_size=step.mbs,
        data_parallel=DataParallelOptions(level=step.level, **sharding_of(step)),  # type: ignore[arg-type]
        checkpoints=checkpoints,
    )
    cuda = step.device == "cuda"
    graphs = [CUDAGraph(warmup_steps=GRAPH_WARMUP, on_refusal="error")] if step.graph else []
    # What is as large as the residual stream would leave nothing free: the stream keeps it.
    stream = step.mbs * step.seq // step.cp * step.hidden
    moved = [ActivationOffload(step.offload, stream + 1)] if step.offload else []
    with_config, without = backends_of(step)
    use_backends(**without)
    trainer = pl.Trainer(
        accelerator=step.device,
        devices=world_size(),
        strategy=strategy,
        **precision_of(step),
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[Steps(begin, tick), *graphs, *moved, *callbacks],
    )
    adam = AdamConfig(lr=twin_rate(step), weight_decay=0.0) if fixed else AdamConfig(lr=1e-4)
    adam = replace(adam, exp_avg_dtype=step.moments, exp_avg_sq_dtype=step.moments)  # type: ignore[arg-type]
    module = GPTModule(replace(config_of(step), backends=GPTBackendConfig(**with_config)), optimizer=adam)
    module.transforms += transforms_of(step)
    rows = Rows(step, steps, strategy, fixed)
    trainer.fit(module, DataLoader(rows, batch_size=None, num_workers=2 if cuda else 0, pin_memory=cuda))
    use_backends(**dict.fromkeys(without, "auto"))
    return module


def transforms_of(step: Step) -> list[ModelTransform]:
    """Return what trains adapters alone and stores frozen weights quantized, if the step asks for that."""
    return [*([LoRA(step.rank)] if step.rank else []), *([QuantizedBase(step.base)] if step.base else [])]


def twin_rate(step: Step) -> float:
    """Return the learning rate of a twin."""
    return (ADAPTER_LEARNING_RATE if step.rank else LEARNING_RATE) / step.layers * min(1.0, NARROW / step.hidden) ** 2


def one_device(step: Step) -> GPT:
    """Make the step's model on one device in float32, with its adapters and without values."""
    with torch.device("meta"):
        model = GPT(config_of(step))
        apply_transforms(model, transforms_of(step))
    return model.to_empty(device=step.device).float()


def precision_of(step: Step) -> dict[str, Any]:
    """Return the Trainer's arguments for precision. On CPU, products in FP8 are emulated."""
    if step.precision == "fp8":
        recipe, *words = step.recipe.split("+")
        primary = True if "primary" in words else False if "wide" in words else None
        options = LowPrecisionOptions(recipe, primary_weights=primary, emulate=step.device != "cuda")
        implementation = "transformer_engine" if "transformer_engine" in words else "own"
        return {"plugins": [MegatronLowPrecision(options, implementation=implementation)]}
    return {"precision": TRAINER_PRECISION[step.precision]}


def backends_of(step: Step) -> tuple[dict[str, str], dict[str, str]]:
    """Return the named backends by op: those with settings in the model's configuration, and the others."""
    named = dict(word.split(":", 1) for word in step.backends)
    settings = {field.name for field in fields(GPTBackendConfig)}
    return (
        {op: name for op, name in named.items() if op in settings},
        {op: name for op, name in named.items() if op not in settings},
    )


def sharding_of(step: Step) -> dict[str, Any]:
    """Return further options of ``DataParallelOptions``; those of its advanced group are named without it."""
    given = {name: yaml.safe_load(value) for name, value in (word.split(":", 1) for word in step.sharding)}
    names = {each.name for each in fields(AdvancedDataParallelOptions)}
    advanced = AdvancedDataParallelOptions(**{name: given.pop(name) for name in names & given.keys()})
    return {**given, "advanced": advanced}


def by_hand(step: Step) -> list[float]:
    """Return the losses of :func:`train` with ``fixed``, from a plain loop on one device in float32."""
    adam, model = AdamConfig(lr=twin_rate(step)), one_device(step)
    initialize(model, GPTModule(config_of(step)).seed, prefix="model.")
    if step.base and step.precision == "bf16":
        # Frozen weights are stored from 16 bits: others would have other quantized values, which are further away than
        # rounding.
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16().float()
    # The transforms have changed it already; here they act on its values.
    ParallelModel(model, ParallelMesh(1, 0), Layout(transforms=tuple(transforms_of(step)))).transform_values()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=0.0)
    replicas = world_size() // step.model_ranks
    rows = torch.cat([share(step, replica, 0) for replica in range(replicas)]).to(step.device)
    sequences = PackedSequences.of_uniform(1, step.seq, step.device)
    losses = []
    for _ in range(CHECKED_STEPS):
        mean = 0.0
        for number, row in enumerate(rows):
            force_routes_of(model, number * replicas // len(rows))
            with collecting(KeptAuxLosses()) as side:
                loss = model(row[:-1], sequences, labels=row[1:]).losses.mean() / len(rows)
            torch.stack([loss, *(value / len(rows) for value in side.values.values())]).sum().backward()
            mean += float(loss.detach())
        losses.append(mean)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def force_routes_of(model: GPT, rank: int) -> None:
    """Let routers choose experts by the random numbers of one rank: ranks differ."""
    for module in model.modules():
        if isinstance(module, Router) and module.pool.place != rank:
            module.pool.place = rank
            module._forced.clear()


def check_loss(step: Step, module: GPTModule) -> dict[str, Any]:
    """Compare the trained model's loss on new tokens with that of the same weights in float32.

    Raises:
        Wrong: the losses differ.
    """
    module.trainer = None  # type: ignore[assignment]  # with it goes the optimizer's state: it leaves room for float32
    forget(step)
    ids = random_rows(step, 1, 10**6).to(step.device)
    labels, tokens = ids[0, 1:], ids[0, :-1]
    sequences = PackedSequences.of_uniform(1, step.seq, step.device)
    with torch.no_grad():
        fast = module.model(tokens, sequences, labels=labels).losses.float()
        wide = one_device(step)
        for ours, theirs in zip(wide.parameters(), module.model.parameters(), strict=True):
            ours.copy_(readable(theirs))
        exact = wide(tokens, sequences, labels=labels).losses
    mean = float((fast.mean() - exact.mean()).abs() / exact.mean())
    each = float((fast - exact).norm() / exact.norm())
    say(f"loss {float(fast.mean()):.5f}, in float32 {float(exact.mean()):.5f}, difference {mean:.1e}")
    if not mean < TOLERANCE[step.precision]:
        raise Wrong(f"the loss differs from float32 by {mean:.1e}")
    return {"loss": float(fast.mean()), "loss_float32": float(exact.mean()), "difference": mean, "by_token": each}
