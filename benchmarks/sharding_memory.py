"""Account for the memory of a step under full sharding, part by part, without a GPU.

    python benchmarks/sharding_memory.py --gpus 2
    python benchmarks/sharding_memory.py --gpus 4 --but "layers=32"
    python benchmarks/sharding_memory.py --gpus 2 --but "recompute=attention_norm,mlp_norm,mlp.act
        sharding=gradient_dtype:bfloat16,reduce_scatter_with_fp32_accumulation:true"

The shape is that of `full_sharding.py`. Weights, gradients and optimizer come from `megalight.parallel.estimate`, which
tests compare with engines to the byte. Layers keep, per token in bfloat16: the inputs of both norms and what these
return, queries, keys and values, what attention returns, gate, up, and what the activation returns; less what is
recomputed. The head keeps the logits. What CUDA, NCCL and temporary tensors take is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.full_sharding import FULL, SHAPES, TIMED
from benchmarks.peers.megalight import config_of, sharding_of
from benchmarks.step import Step
from megalight.models.gpt import GPT
from megalight.parallel.data_parallel.reduce import SLOT_BYTES
from megalight.parallel.estimate import estimate
from megalight.parallel.peers.memory import SLOTS
from megalight.strategies import DataParallelOptions

BYTES = 2
"""Of bfloat16."""
GIB = 2**30
CHEAP = ("attention_norm", "mlp_norm", "mlp.act")
"""Modules whose outputs this knows to leave out."""


def parts(step: Step, gpus: int) -> dict[str, float]:
    """Return the bytes of each part on one GPU.

    Raises:
        ValueError: the step recomputes other modules than :data:`CHEAP`, or has experts.
    """
    if unknown := set(step.recompute) - set(CHEAP):
        raise ValueError(f"recompute={','.join(sorted(unknown))} is not counted here; use some of {', '.join(CHEAP)}")
    if step.experts:
        raise ValueError(f"experts={step.experts} are not counted here; leave them out")
    options = DataParallelOptions(level=step.level, **sharding_of(step))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = GPT(config_of(step))
    found = estimate(model, gpus, options)
    width, tokens = step.heads * step.head_dim, step.mbs * step.seq
    kept = 2 * step.hidden + width + 2 * step.kv * step.head_dim + width + 2 * step.ffn
    kept += sum(
        size
        for name, size in zip(CHEAP, (step.hidden, step.hidden, step.ffn), strict=True)
        if name not in step.recompute
    )
    return {
        "parameters, shards": found.parameters - found.parameter_buffers,
        "gradients, shards": found.gradients - found.gradient_buffers,
        "masters": found.masters,
        "moments": found.moments,
        "buffers of parameters": found.parameter_buffers,
        "buffers of gradients": found.gradient_buffers,
        "slots of sums": SLOTS * SLOT_BYTES if options.advanced.reductions != "plain" else 0,
        "kept by layers": BYTES * tokens * step.layers * kept,
        "logits": BYTES * tokens * step.vocab,
    }


def table(found: dict[str, float]) -> str:
    rows = [f"| {name} | {size / GIB:.2f} |" for name, size in {**found, "sum": sum(found.values())}.items()]
    return "\n".join(["| | GiB per GPU |", "| --- | ---: |", *rows])


def main(line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--but", default="", help="other values of the step, as 'layers=32'")
    a = parser.parse_args(line)
    step = Step().but(f"{SHAPES['llama3']} {TIMED} layers=16 level={FULL}").but(a.but)
    print(table(parts(step, a.gpus)))


if __name__ == "__main__":
    main()
