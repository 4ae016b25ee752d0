"""Host time of an eager training step: the time of Python and of the dispatch of operators, without the device.

    python benchmarks/host.py                  # on this machine's CPU
    python benchmarks/host.py --device cuda    # on a GPU: its kernels are too short to be waited for
    python benchmarks/host.py --device cuda --kinds   # four kinds of layers: dense and with experts, bf16 and FP8

Tensors are tiny, so that nearly all of the time is host time. The step is the one of `dense_step.py`: a GPT with
MegatronStrategy, four micro-batches, clipping, Adam. The script prints median microseconds of the parts of a step;
`outside` is everything except forward and backward. Then it prints microseconds of one layer's forward and backward,
and the number of Python's function calls, for our layer, plain torch and transformers. These are from the fastest of
many calls, because other processes may use the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.ops.grouped_linear import low_precision_stacks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.meter import device_name, synchronize
from benchmarks.peers.huggingface import llama
from benchmarks.peers.megalight import train
from benchmarks.step import Step
from megalight.imports import has
from megalight.nn.aux_losses import AttachedAuxLosses, collecting
from megalight.parallel import trace
from megalight.strategies import MegatronStrategy
from megalight.types import PackedSequences

TINY = Step(layers=12, hidden=32, ffn=64, heads=2, kv=2, vocab=64, seq=8, mbs=1, micro=4, steps=30, warmup=8)
LAYER = replace(TINY, layers=1, hidden=64, ffn=128, seq=256, micro=2, steps=2, warmup=1)
EXPERTS = 8
KINDS = {
    "dense bf16": LAYER,
    "dense FP8": replace(LAYER, precision="fp8"),
    "MoE bf16": replace(LAYER, experts=EXPERTS),
    "MoE FP8": replace(LAYER, experts=EXPERTS, precision="fp8"),
}
"""Kinds of layers. Experts in FP8 are taken for so large that they run one by one."""
CALLS = 500
"""Number of timed calls of a layer's forward and backward. The fastest one counts."""

Forward = Callable[[], Tensor]
"""Runs a layer on an input that requires a gradient."""


class Spans:
    """A listener of :mod:`megalight.parallel.trace` that records the seconds of each span of every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps: list[dict[str, float]] = []
        self._open: list[float] = []
        self._now: defaultdict[str, float] = defaultdict(float)
        self._began = clock()

    def begin(self, name: str, where: dict[str, int]) -> None:
        self._open.append(self.clock())

    def end(self, name: str) -> None:
        self._now[name] += self.clock() - self._open.pop()

    def tick(self) -> None:
        """Note the end of a step."""
        self.steps.append({**self._now, "step": self.clock() - self._began})
        self._now.clear()
        self._began = self.clock()

    def report(self, warmup: int) -> dict[str, float]:
        """Return median microseconds per step."""
        rows = self.steps[warmup:]
        found = {name: 1e6 * statistics.median(row.get(name, 0.0) for row in rows) for name in rows[-1]}
        return {**found, "outside": found["step"] - found["forward"] - found["backward"]}


def of_kind(kind: str, device: str, calls: int = CALLS) -> dict[str, float]:
    """Time a layer of a kind, with the strategy's gradient buffers."""
    with patch.object(low_precision_stacks, "LARGE_ONE_SCALE", 1):
        return ours(replace(KINDS[kind], device=device), calls)[1]


def clock_of(device: str) -> Callable[[], float]:
    """Return the clock: thread time on CPU. On a GPU, backward runs in another thread, so it is wall time."""
    return time.thread_time if device == "cpu" else time.perf_counter


def time_layer(forward: Forward, clock: Callable[[], float], calls: int = CALLS) -> dict[str, float]:
    """Return microseconds of the fastest forward and backward, and the number of Python's function calls in both."""
    forwards, backwards = [], []
    for _ in range(calls):
        synchronize()
        began = clock()
        out = forward()
        middle = clock()
        out.backward(out.detach())
        backwards.append(clock() - middle)
        forwards.append(middle - began)
    return {"forward": 1e6 * min(forwards), "backward": 1e6 * min(backwards), "calls": count_calls(forward)}


def count_calls(forward: Forward) -> int:
    """Count the functions that Python calls in a forward and its backward, including functions in C.

    On a GPU, calls of the backward are not counted, because they run in another thread.
    """
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        out = forward()
        out.backward(out.detach())
    finally:
        sys.setprofile(None)
    return count


def ours(step: Step, calls: int = CALLS) -> tuple[dict[str, float], dict[str, float]]:
    """Time the parts of a step with the strategy, and one of its layers with the strategy's gradient buffers."""
    clock = clock_of(step.device)
    spans, layer = Spans(clock), dict[str, float]()
    total = step.warmup + step.steps

    def tick(strategy: MegatronStrategy) -> None:
        spans.tick()
        if len(spans.steps) == total:
            layer.update(time_layer_of(strategy, step, clock, calls))

    stop = trace.listen(spans)
    try:
        train(step, total, tick)
    finally:
        stop()
    return spans.report(step.warmup), layer


def time_layer_of(strategy: MegatronStrategy, step: Step, clock: Callable[[], float], calls: int) -> dict[str, float]:
    (model,), engine = strategy.chunks, strategy.engine
    assert engine is not None
    sequences = PackedSequences.of_uniform(step.mbs, step.seq, step.device)
    hidden = input_of(step, model.embed.word.weight.dtype)
    losses = AttachedAuxLosses(step.device)
    with collecting(losses):
        context = model.context(sequences, hidden.dtype)
    layer = next(iter(model.layers.values()))
    engine.zero_grad()
    # Weights are cast once, as in the micro-batches of a step.
    with torch.enable_grad(), engine.micro_batches(calls, reduce=False), strategy.precision.rehearsal():
        return time_layer(lambda: layer(hidden, context), clock, calls)


def input_of(step: Step, dtype: torch.dtype) -> Tensor:
    """Make hidden states ``[T, h]``."""
    return torch.randn(step.mbs * step.seq, step.hidden, dtype=dtype, device=step.device, requires_grad=True)


class Plain(nn.Module):
    """The layer in plain torch: bfloat16 weights, nothing fused, rotary angles computed beforehand."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        hidden, head, dtype = step.hidden, step.head_dim, torch.bfloat16
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(hidden, dtype=dtype) for _ in range(2))
        self.qkv = nn.Linear(hidden, head * (step.heads + 2 * step.kv), bias=False, dtype=dtype)
        self.proj = nn.Linear(head * step.heads, hidden, bias=False, dtype=dtype)
        self.gate_up = nn.Linear(hidden, 2 * step.ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(step.ffn, hidden, bias=False, dtype=dtype)
        angles = torch.arange(step.seq)[:, None] * 10000.0 ** (-torch.arange(0, head, 2) / head)
        self.register_buffer("cos", angles.cos().repeat(1, 2).to(dtype))
        self.register_buffer("sin", angles.sin().repeat(1, 2).to(dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, h] -> [T, h]``."""
        step = self.step
        qkv = self.qkv(self.attention_norm(hidden)).view(step.mbs, step.seq, -1, step.head_dim).transpose(1, 2)
        q, k, v = qkv.split([step.heads, step.kv, step.kv], 1)
        grouped = step.heads != step.kv
        context = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=grouped)
        hidden = hidden + self.proj(context.transpose(1, 2).reshape(hidden.shape[0], -1))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)

    def turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


def plain(step: Step) -> Forward:
    layer, hidden = Plain(step).to(step.device), input_of(step, torch.bfloat16)
    return lambda: layer(hidden)


def transformers(step: Step) -> Forward:
    """Make Llama's layer with bfloat16 weights, without autocast, which would need more time."""
    model = llama(replace(step, layers=1)).model.to(torch.bfloat16)
    hidden = input_of(step, torch.bfloat16)
    rows = hidden.detach().view(step.mbs, step.seq, -1).requires_grad_()
    positions = torch.arange(step.seq, device=step.device)[None]
    table = model.rotary_emb(rows, positions)
    return lambda: model.layers[0](rows, position_embeddings=table, position_ids=positions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--kinds", action="store_true", help="time layers of four kinds in place of a step")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)
    if arguments.pop("kinds"):
        if arguments["precision"] != "bf16":
            parser.error("--kinds has precisions of its own: leave out --precision.")
        print(f"torch {torch.__version__}; microseconds of the host for a layer")
        for kind in KINDS:
            found = of_kind(kind, arguments["device"])
            print(f"{kind}:", ", ".join(f"{part} {value:.0f}" for part, value in found.items()), flush=True)
        return
    step = replace(TINY, **arguments)
    parts, layer = ours(step)
    print(f"{device_name(step)}, torch {torch.__version__}; microseconds of the host")
    print("a step:", ", ".join(f"{name} {value:.0f}" for name, value in parts.items()))
    layers = {"megalight": layer, "torch": time_layer(plain(step), clock_of(step.device))}
    if has("transformers"):
        layers["transformers"] = time_layer(transformers(step), clock_of(step.device))
    for name, found in layers.items():
        print(f"a layer, {name}:", ", ".join(f"{part} {value:.0f}" for part, value in found.items()))


if __name__ == "__main__":
    main()
