"""Compare training in 8 bits with bf16: the same small GPT on the same batches of real text, once per recipe.

    python benchmarks/low_precision_loss.py RESULT.json [--recipes tensorwise delayed ...] [--steps 500] [--size full]

The text is this repository's own documentation and source as bytes. Batches and initial values are the same in every
run, and the learning rate decays to zero. A recipe passes if its mean loss over the last tenth of the steps is within
``--bound`` of bf16's. The run ``bf16 nudged`` starts with one weight changed by 0.01; its difference from bf16 shows
how much is chance. A recipe with ``+primary`` stores its weights in FP8; with ``+attention``, attention multiplies in
8 bits, too. A recipe that the device does not support is emulated: its products are computed in float64 from the
quantized values. So are all on a CPU: `--size medium` takes minutes there, `--size small` only shows that it works. A
recipe that cannot be emulated either is reported and not run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.errors import BackendError
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import GPT
from megalight.nn.init import initialize
from megalight.ops.linear.low_precision import Session
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo, clip_coefficient
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision
from megalight.parallel.shard import ShardSpec
from megalight.types import TokenBatch

ROOT = Path(__file__).resolve().parents[1]
BASELINE, NUDGED = "bf16", "bf16 nudged"
PATTERNS = ("*.md", "docs/**/*.md", "megalight/**/*.py", "tests/**/*.py", "benchmarks/**/*.py")


@dataclass(frozen=True)
class Size:
    """The model, the batch and the run."""

    layers: int = 6
    hidden: int = 512
    ffn: int = 1536
    length: int = 512
    rows: int = 32
    lr: float = 1e-3
    warmup: int = 50


SMALL = Size(layers=2, hidden=32, ffn=64, length=32, rows=4, lr=3e-3, warmup=2)
SIZES = {"full": Size(), "medium": Size(layers=4, hidden=128, ffn=384, length=128, rows=16, lr=2e-3), "small": SMALL}


def corpus() -> Tensor:
    """Return the bytes of all files, in the order of their names."""
    files = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    return torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batch_of(text: Tensor, size: Size, step: int, device: str) -> TokenBatch:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - size.length - 1, (size.rows, 1), generator=generator)
    ids = text[starts + torch.arange(size.length + 1)].long().to(device)
    return TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(size.rows, size.length, device=device))


def train(recipe: str, size: Size, steps: int, text: Tensor, device: str, emulate: bool) -> dict[str, Any]:
    """Train, and return the losses of all steps and the time after the first ten steps.

    Raises:
        BackendError: the device lacks the recipe's products.
    """
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
    session, mesh = Session(), ParallelMesh()
    if recipe == NUDGED:
        with torch.no_grad():
            list(model.parameters())[-1].view(-1)[0] += 0.01
    if recipe not in (BASELINE, NUDGED):
        name, *more = recipe.split("+")
        if unknown := set(more) - {"primary", "attention"}:
            raise SystemExit(f"unknown {', '.join(sorted(unknown))} in {recipe!r}; there are primary and attention.")
        options = LowPrecisionOptions(
            name, primary_weights="primary" in more or None, fp8_attention="attention" in more, emulate=emulate
        )
        session = apply_low_precision(model, options, mesh)
    infos = [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in model.named_parameters()]
    engine = DataParallelEngine(infos, mesh)
    optimizer = shard_optimizer(Adam(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1), engine)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        if step == min(10, steps - 1):
            began = _now(device)
        optimizer.param_groups[0]["lr"] = size.lr * min(1.0, (step + 1) / size.warmup) * cosine(step / steps)
        batch = batch_of(text, size, step, device)
        engine.zero_grad()
        with session.step(step), engine.micro_batches(1):
            output = model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
            loss = output.losses.float().mean()
            loss.backward()
        engine.finish_grad_sync()
        engine.scale_gradients(clip_coefficient(engine.grad_norm(), 1.0))
        optimizer.step()
        engine.publish()
        losses.append(loss.detach())
    seconds = (_now(device) - began) / max(1, steps - 10)
    return {
        "recipe": recipe,
        "emulated": emulate and recipe not in (BASELINE, NUDGED),
        "losses": [round(loss, 5) for loss in torch.stack(losses).tolist()],
        "seconds_per_step": seconds,
    }


def cosine(done: float) -> float:
    """Decay from 1 to 0. With a high learning rate at the end, losses would differ by chance."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def verdicts(runs: Sequence[dict[str, Any]], bound: float) -> None:
    """Add to each run its last loss, the difference from the baseline, and whether it passes."""
    for run in runs:
        losses = run["losses"]
        run["last"] = sum(losses[-max(1, len(losses) // 10) :]) / max(1, len(losses) // 10)
    expected = next(run["last"] for run in runs if run["recipe"] == BASELINE)
    for run in runs:
        run["difference"] = run["last"] / expected - 1
        run["passed"] = abs(run["difference"]) <= bound  # False for NaN


def text_of(about: dict[str, Any]) -> str:
    """Return JSON with a line for each value and for each run."""
    runs = ",\n".join("  " + json.dumps(run) for run in about["runs"])
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in about.items() if name != "runs"]
    return "{\n" + ",\n".join([*lines, f' "runs": [\n{runs}\n ]']) + "\n}\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "delayed", "tensorwise+primary"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--bound", type=float, default=0.005, help="relative difference of losses that passes")
    parser.add_argument("--size", choices=SIZES, default="full")
    arguments = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, text = SIZES[arguments.size], corpus()
    about: dict[str, Any] = {
        "command": "python benchmarks/low_precision_loss.py " + " ".join(words if words is not None else sys.argv[1:]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, emulated",
        "torch": torch.__version__,
        "corpus_bytes": len(text),
        "steps": arguments.steps,
        "bound": arguments.bound,
        "size": vars(size),
        "runs": [],
        "refused": {},
    }
    for recipe in (BASELINE, NUDGED, *arguments.recipes):
        run = None
        for emulate in (False, True) if device == "cuda" else (True,):
            try:
                run = train(recipe, size, arguments.steps, text, device, emulate)
                break
            except BackendError as error:
                about["refused"][recipe] = str(error)
                print(f"{recipe:20} {'not even emulated' if emulate else 'refused'}: {error}", flush=True)
        if run is None:
            continue
        about["runs"].append(run)
        verdicts(about["runs"], arguments.bound)
        print(
            f"{recipe:20} {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}, at last {run['last']:.4f} "
            f"{run['difference']:+.3%}  {run['seconds_per_step']:.4f} s/step",
            flush=True,
        )
        arguments.result.write_text(text_of(about), encoding="utf-8")  # a later run may fail
    return 0 if all(run["passed"] for run in about["runs"] if run["recipe"] != NUDGED) else 1


if __name__ == "__main__":
    raise SystemExit(main())
