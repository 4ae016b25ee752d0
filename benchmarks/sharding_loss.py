"""Train the same small GPT with each way to shard and to sum gradients: losses and norms side by side.

    torchrun --nproc-per-node 4 benchmarks/sharding_loss.py RESULT.json [--steps 500] [--size tiny]

Batches of real text and initial values are those of ``low_precision_loss.py``; the ranks share each batch, in two
micro-batches. Levels, prefetch and host memory must not change the loss but by rounding. Sums of bf16 gradients over
ranks do: in bf16 with an error that grows with the number of ranks, in float32 without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.data_parallel import DataParallelEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.low_precision_loss import SIZES as ALL_SIZES
from benchmarks.low_precision_loss import Size, batch_of, corpus, cosine
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import GPT
from megalight.nn.init import initialize
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelOptions, ParamInfo, clip_coefficient
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.run_engine import owned_alone, units_of
from megalight.parallel.shard import ShardSpec

SIZES = {**ALL_SIZES, "tiny": Size(layers=2, hidden=64, ffn=96, length=64, rows=8, lr=3e-3, warmup=20)}
FULL: dict[str, Any] = {"level": "optim_grads_params"}
BF16: dict[str, Any] = {**FULL, "gradient_dtype": "bfloat16"}
WAYS: dict[str, dict[str, Any]] = {
    "optim": {},
    "optim_grads": {"level": "optim_grads"},
    "optim_grads_params": FULL,
    "whole gradients, prefetch 2": {**FULL, "reduce_each_micro_batch": False, "prefetch": 2},
    "optimizer in host memory": {**FULL, "optimizer_offload_fraction": 1.0},
    "bf16 gradients, summed in bf16": BF16,
    "bf16 gradients, summed in fp32": {**BF16, "reduce_scatter_with_fp32_accumulation": True},
}
"""The first one is what the others are compared with."""


def train(options: dict[str, Any], size: Size, steps: int, device: str) -> dict[str, Any]:
    """Return the mean loss over ranks and the norm of the gradients of each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = GPTConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_heads=max(1, size.hidden // 64),
        ffn_hidden_size=size.ffn,
        vocab_size=256,
        max_sequence_length=size.length,
    )
    model = GPT(config)
    initialize(model, 1, "model.")
    model.to(device, torch.bfloat16)
    units = units_of(model)
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers.get(id(p)))
        for name, p in model.named_parameters()
    ]
    engine = DataParallelEngine(infos, ParallelMesh(world, rank), DataParallelOptions(**options), units=units)
    optimizer = shard_optimizer(Adam(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1), engine)
    text, losses, norms = corpus(), list[Tensor](), list[Tensor]()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = size.lr * min(1.0, (step + 1) / size.warmup) * cosine(step / steps)
        batch = batch_of(text, size, step, device)
        total = torch.zeros((), device=device)
        engine.zero_grad()
        with engine.micro_batches(2):
            for some in batch.split(size.rows // (2 * world))[2 * rank : 2 * rank + 2]:
                output = model(some.tokens.reshape(-1), some.sequences, labels=some.labels.reshape(-1))
                loss = output.losses.float().mean() / (2 * world)
                loss.backward()
                total += loss.detach()
        engine.finish_grad_sync()
        norms.append(engine.grad_norm())
        engine.scale_gradients(clip_coefficient(norms[-1], 1.0))
        optimizer.step()
        engine.publish()
        dist.all_reduce(total)
        losses.append(total)
    engine.sync_parameters()
    return {"losses": torch.stack(losses).tolist(), "norms": torch.stack(norms).tolist()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    size, world = SIZES[arguments.size], dist.get_world_size()
    if size.rows % (2 * world):
        raise SystemExit(f"{size.rows} rows do not divide into two micro-batches on each of {world} ranks")
    about: dict[str, Any] = {
        "command": "benchmarks/sharding_loss.py " + " ".join(words if words is not None else sys.argv[1:]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "ranks": world,
        "torch": torch.__version__,
        "steps": arguments.steps,
        "size": vars(size),
        "ways": {},
    }
    for way in arguments.ways:
        run = train(WAYS[way], size, arguments.steps, device)
        about["ways"][way] = run
        first = next(iter(about["ways"].values()))
        tenth = max(1, arguments.steps // 10)
        run["last"], run["last_norm"] = (sum(run[name][-tenth:]) / tenth for name in ("losses", "norms"))
        run["difference"] = run["last"] / first["last"] - 1
        if dist.get_rank() == 0:
            losses, norm = run["losses"], run["last_norm"]
            print(
                f"{way:32} {losses[0]:.4f} -> {run['last']:.4f} {run['difference']:+.3%}, norm {norm:.4f}", flush=True
            )
            arguments.result.write_text(json.dumps(about) + "\n", encoding="utf-8")  # a later way may fail
    return 0 if all(math.isfinite(run["last"]) for run in about["ways"].values()) else 1


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    code = main()
    dist.destroy_process_group()
    raise SystemExit(code)
