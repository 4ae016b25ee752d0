"""The estimate of memory: what engines and optimizers really keep, and a model that no machine here holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT
from megalight.models.gpt.presets import llama3, qwen2_5
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize.recipes import recipe
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.estimate import estimate
from megalight.parallel.run_engine import owned_alone, units_of
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import mesh
from tests.parallel.data_parallel.test_unit_memory import Model
from tests.support.options import data_parallel
from tests.support.workers import run

FULL: dict[str, Any] = {"level": "optim_grads_params", "prefetch": 1, "reduce_each_micro_batch": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    *((2, {"level": level}) for level in ("no_shard", "optim", "optim_grads")),
    (1, FULL),
    (2, FULL),
    (4, FULL),
    (2, {**FULL, "gradient_dtype": "bfloat16"}),
    (2, {**FULL, "gradient_dtype": "bfloat16", "reduce_scatter_with_fp32_accumulation": True}),
    (2, {**FULL, "gradient_dtype": "bfloat16", "reduce_dtype": "float32"}),
    (2, {**FULL, "gradient_dtype": "bfloat16", "master_dtype": "bfloat16"}),
    (2, {**FULL, "prefetch": 2}),
    (2, {**FULL, "reduce_each_micro_batch": False}),
    (2, {**FULL, "optimizer_offload_fraction": 1.0}),
    (2, {**FULL, "optimizer_offload_fraction": 1.0, "master_dtype": "bfloat16"}),
    (4, {**FULL, "replicate": 2}),
    (4, {**FULL, "replicate": 2, "replicate_optimizer": False}),
    (2, {"level": "optim", "replicate": 2, "replicate_optimizer": False}),
]


def _model(tied: bool, frozen: bool) -> nn.Module:
    model = Model(tied)
    if frozen:
        model.layers[2:].requires_grad_(False)
    return model


def _kept(options: DataParallelOptions, tied: bool, frozen: bool, moments: str) -> tuple[dict[str, int], int, int]:
    """What the engine keeps; bytes of the optimizer's state on the device; those in host memory."""
    model = _model(tied, frozen).bfloat16()
    units = units_of(model) if options.has_units else []
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers.get(id(p)))
        for name, p in model.named_parameters()
        if p.requires_grad or options.shards_parameters
    ]
    engine = DataParallelEngine(infos, mesh(), options, units=units)
    optimizer = Adam(
        [p for p in model.parameters() if p.requires_grad],
        exp_avg_dtype=moments,  # type: ignore[arg-type]
        exp_avg_sq_dtype=moments,  # type: ignore[arg-type]
    )
    shard_optimizer(optimizer, engine)
    for _ in range(2):
        engine.zero_grad()
        with engine.micro_batches(1):
            model(torch.tensor([1, 5])).float().sum().backward()
        engine.finish_grad_sync()
        optimizer.step()
        engine.publish()
    engine.sync_parameters()
    memory = engine.memory()
    if not options.shards_parameters or dist.get_world_size() == 1:  # the engine does not hold frozen ones
        memory["parameters"] += sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    held = [0, 0]
    for bucket in engine.buckets:
        state = optimizer.state[bucket.shard.master]
        held[bucket.on_host] += sum(
            value.nbytes for value in state.values() if isinstance(value, Tensor) and value.ndim
        )
    return memory, held[0], held[1]


MODELS = [(False, False, "float32"), (True, True, "bfloat16")]
"""Tied, frozen in part, dtype of moments. One of the two with each case, in turns; whole test runs have both."""


@pytest.mark.parametrize(
    ("world", "given", "tied", "frozen", "moments"),
    [
        pytest.param(*case, *model, marks=[pytest.mark.full] * ((number + other) % 2))
        for number, case in enumerate(CASES)
        for other, model in enumerate(MODELS)
    ],
    ids=[f"{world}-{'-'.join(map(str, c.values()))}-{model[2]}" for world, c in CASES for model in MODELS],
)
def test_engines_keep_what_was_estimated(
    world: int, given: dict[str, Any], tied: bool, frozen: bool, moments: str
) -> None:
    options = data_parallel(**given)
    with torch.device("meta"):
        model = _model(tied, frozen)
    expected = estimate(model, world, options, moments={"float32": 8, "bfloat16": 4}[moments])
    for memory, moments_here, moments_away in run(_kept, world, options, tied, frozen, moments):
        assert memory["parameters"] == expected.parameters
        assert memory["gradients"] == expected.gradients
        assert memory["masters"] == expected.masters
        assert moments_here == expected.moments
        assert memory.get("host", 0) + moments_away == expected.host


def _quantized_bytes(primary: bool | None) -> nn.Module:
    """Layers whose two weights multiply in 8 bits, of unequal sizes, and a table that does not."""
    session = Session()
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 64 * wide, bias=False), nn.Linear(64 * wide, 64, bias=False))
        for wide in (2, 2, 3, 2)
    )
    for layer in layers:
        for linear in layer.children():
            state_of(linear.weight).precision = LowPrecision(  # type: ignore[arg-type]
                recipe("tensorwise"), session, emulate=True, primary=primary
            )
    return nn.ModuleDict({"layers": layers, "embed": nn.Embedding(64, 64)})


def _memory_of_quantized(options: DataParallelOptions, primary: bool | None, dtype: torch.dtype) -> dict[str, int]:
    model = _quantized_bytes(primary).to(dtype)
    units = units_of(model) if options.has_units else []
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers.get(id(p)))
        for name, p in model.named_parameters()
    ]
    return DataParallelEngine(infos, mesh(), options, units=units).memory()


WEIGHTS = 2 * 64 * 64 * (2 + 2 + 3 + 2)


@pytest.mark.parametrize(
    ("world", "given", "primary", "dtype", "casts"),
    [
        (1, {"level": "no_shard"}, None, torch.bfloat16, WEIGHTS),
        (1, {"level": "no_shard"}, None, torch.float32, 2 * WEIGHTS),  # quantized values would spare nothing
        (2, {"level": "optim"}, None, torch.float32, WEIGHTS),
        (2, {"level": "optim"}, False, torch.bfloat16, 2 * WEIGHTS),
        (2, {"level": "optim_grads"}, True, torch.bfloat16, WEIGHTS),
        (2, {"level": "optim", "optimizer_offload_fraction": 1.0}, None, torch.bfloat16, 2 * WEIGHTS),
        (2, {"level": "optim", "master_dtype": "bfloat16"}, None, torch.bfloat16, 2 * WEIGHTS),
        (2, FULL, None, torch.bfloat16, 2 * 64 * 64 * (3 + 2)),  # the largest layer of each turn
    ],
)
def test_weights_quantized(
    world: int, given: dict[str, Any], primary: bool | None, dtype: torch.dtype, casts: int
) -> None:
    options = data_parallel(**given)
    with torch.device("meta"):
        model = _quantized_bytes(primary)
    expected = estimate(model, world, options, dtype=dtype)
    assert expected.casts == casts
    for memory in run(_memory_of_quantized, world, options, primary, dtype):
        assert memory["parameters"] == expected.parameters
        assert memory["masters"] == expected.masters
        assert memory["gradients"] == expected.gradients


def test_groups_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"6 ranks are no multiple of data_parallel\.replicate=4"):
        estimate(Model(False), 6, DataParallelOptions(replicate=4))


GIB = 2**30
H200 = 139.8 * GIB
"""What torch may take of an H200."""
CONTEXT = 2 * GIB
"""CUDA, NCCL and the temporary tensors of the loss."""


def _activations(layers: int, hidden: int, heads: int, kv: int, head_dim: int, ffn: int, recomputed: bool) -> int:
    """Bytes in bfloat16 that layers keep per token for the backward pass; ``recomputed``: norms and the activation.

    Inputs of both norms, queries, keys and values, what attention returns, gate and up; else also what both norms and
    the activation return.
    """
    kept = 2 * hidden + (heads + 2 * kv) * head_dim + heads * head_dim + 2 * ffn
    return 2 * layers * (kept + (0 if recomputed else 2 * hidden + ffn))


def test_it_tells_what_was_measured() -> None:
    """16 layers of Llama-3-8B on two GPUs, sequences of 4096 tokens: 53.08 GiB on two H200s."""
    with torch.device("meta"):
        model = GPT(llama3(16, 4096, 32, 14336))
    found = estimate(model, 2, DataParallelOptions(level="optim_grads_params"))
    activations = 4096 * _activations(16, 4096, 32, 8, 128, 14336, recomputed=False)
    assert (found.device + activations) / GIB == pytest.approx(53.08, rel=0.02)


def test_32b_parameters_on_four_devices() -> None:
    """12 bytes a parameter fit into four H200s with activations of 4096 tokens, and 18 do not."""
    with torch.device("meta"):
        model = GPT(qwen2_5(64, 5120, 40, 8, 27648, 152064))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == pytest.approx(32.76e9, rel=1e-3)
    activations = 4096 * _activations(64, 5120, 40, 8, 128, 27648, recomputed=True)
    wide = estimate(model, 4, DataParallelOptions(level="optim_grads_params"))
    assert wide.device > H200
    half = DataParallelOptions(level="optim_grads_params", gradient_dtype="bfloat16")
    found = [
        estimate(model, 4, half, moments=4),  # float32 masters, moments in bfloat16
        estimate(model, 4, replace(half, master_dtype="bfloat16")),  # moments in float32
    ]
    for each in found:
        buffers = 4 * 2 * 152064 * 5120  # two whole units of the embedding's size, parameters and gradients
        assert each.device == pytest.approx(12 * parameters / 4 + buffers, rel=1e-5)
        assert each.device + activations + CONTEXT < H200
        assert each.device + activations > 0.9 * H200  # without recompute it would not fit
    host = replace(half, gradient_dtype=None, optimizer_offload_fraction=1.0)
    assert estimate(model, 4, host).device + 4096 * _activations(64, 5120, 40, 8, 128, 27648, False) < H200
    assert estimate(model, 2, host, moments=2 + 1 / 32).device < H200
