"""Out-of-the-box speed on one GPU: recipes beside their best hand-tuned setting, and a plain LightningModule.

    python benchmarks/out_of_box.py RESULT.json
    python benchmarks/out_of_box.py RESULT.json --tiny      # tiny sizes on the CPU, to try the script

One part trains a Llama of `transformers` with 1.1 B parameters (bf16-mixed, torch's AdamW, 4 x 2,048 tokens) in a
LightningModule under Lightning's strategies and ours. The others run `megalight fit` as a user types it: a recipe with
its own settings, the same with settings that were chosen by hand, and the same shape in `transformers` with
`torch.compile`. Each row has a process of its own. Figures are medians of late steps, when everything has settled.
Beside RESULT.json, a table is written to RESULT.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step import Step
from megalight.imports import version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "lightning", "triton", "transformers")
TELLING = ("steps are replayed", "steps run without", "micro_batch_size=auto", "FusedOps")
"""How lines of the log begin that tell what was chosen."""
TOLERANCE = 1e-2
"""Relative difference of the first loss from that of the first row of its part. bf16 rounds each row otherwise."""
LAST_LINES = 15

GRAPH = "--trainer.cuda_graphs=off --trainer.callbacks+=CUDAGraph"
EAGER = "--trainer.cuda_graphs=off"


@dataclass(frozen=True)
class Shape:
    """A recipe, and what is compared with it.

    Attributes:
        recipe: a file, or the name of a named recipe.
        words: what a user adds on the command line.
        tuned: name -> words of settings by hand.
        step: the same shape for ``transformers``.
        tokens: number of rows of the vocabulary of the data.
    """

    recipe: str
    words: str
    tuned: dict[str, str]
    step: str
    tokens: int


MICRO = "--trainer.strategy.micro_batch_size"
ONE_GPU = "--trainer.devices=1 --trainer.strategy.tensor_parallel=1 --trainer.strategy.sequence_parallel=false"
BATCH_OF_8 = "--model.config.num_layers=12 --model.config.hidden_size=768 --model.config.num_heads=12"
SHAPES = {
    "gpt2_small": Shape(
        "gpt2_small-pretrain-1xGPU",
        "--data.global_batch_size=64 --model.optimizer.schedule.warmup=10",
        {f"graph, {size} at once": f"{GRAPH} {MICRO}={size}" for size in (16, 32, 64)},
        "layers=12 hidden=768 ffn=2048 heads=12 kv=12 vocab=50304 seq=1024 mbs=16 micro=4",
        50257,
    ),
    "demo, 110M": Shape(
        "recipes/demo.yaml",
        f"{ONE_GPU} --trainer.precision=bf16-mixed {BATCH_OF_8} --model.config.ffn_hidden_size=2048 "
        "--data.tokenizer=null",
        {f"graph, {size} at once": f"{GRAPH} {MICRO}={size}" for size in (4, 8)},
        "layers=12 hidden=768 ffn=2048 heads=12 kv=12 vocab=4096 seq=256 mbs=8 micro=1",
        4096,
    ),
}
TINY_SHAPES = {
    "demo, tiny": Shape(
        "recipes/demo.yaml",
        f"{ONE_GPU} --model.config.num_layers=1 --model.config.hidden_size=32 --model.config.num_heads=2 "
        "--model.config.ffn_hidden_size=64 --data.tokenizer=null --data.sequence_length=32 "
        "--data.global_batch_size=4 --trainer.accelerator=cpu --model.optimizer.schedule.warmup=1",
        {"4 at once": f"{MICRO}=4"},
        "device=cpu precision=fp32 layers=1 hidden=32 ffn=64 heads=2 kv=2 vocab=4096 seq=32 mbs=4 micro=1 steps=3 "
        "warmup=1",
        4096,
    )
}
LLAMA = "layers=22 hidden=2048 ffn=5632 heads=32 kv=4 vocab=32000 seq=2048 mbs=4 micro=1 steps=20 warmup=5"
TINY_LLAMA = "device=cpu layers=1 hidden=32 ffn=48 heads=2 kv=1 vocab=64 seq=32 mbs=2 micro=1 steps=3 warmup=1"
PLAIN = ("ddp", "fsdp", "megatron", "megatron graphs fused", "megatron true", "megatron fused", "megatron graphs")
"""``graphs``, ``fused``: our callbacks. ``true``: both, and bf16 weights with float32 masters."""
TRIAL = 30
"""Warm-up steps of rows that find out whether graphs pay."""
STEPS, TINY_STEPS = 70, 6


def fit(shape: Shape, words: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Run ``megalight fit``, and read its own log: tokens/s, memory, loss, and what it chose."""
    recipe = ROOT / shape.recipe
    if not recipe.is_file():
        text = subprocess.run(
            [sys.executable, "-m", "megalight", "recipes", shape.recipe], check=True, capture_output=True, text=True
        ).stdout
        recipe = folder / "recipe.yaml"
        recipe.write_text(text)
    steps = TINY_STEPS if tiny else STEPS
    write_tokens(folder / "data" / "tokens", shape.tokens)
    common = f"--data.data=data/tokens --trainer.max_steps={steps} --trainer.log_every_n_steps={2 if tiny else 5}"
    quiet = "--trainer.logger=json --trainer.default_root_dir=runs --trainer.limit_val_batches=0"
    typed = f"fit -c {recipe} {shape.words} {words} {common} {quiet}".split()
    run = subprocess.run([sys.executable, "-m", "megalight", *typed], cwd=folder, capture_output=True, text=True)
    said = run.stdout + run.stderr
    if run.returncode:
        raise RuntimeError(f"megalight {shlex.join(typed)} ended with {run.returncode}:\n{last(said)}")
    (log,) = folder.glob("runs/**/metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    speeds = [row for row in rows if "tokens_per_s" in row]
    settled = [row["tokens_per_s"] for row in speeds if row["step"] >= steps // 2]
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    return {
        "tokens_per_second": statistics.median(settled),
        "peak_gib": max(row["memory_gib"] for row in speeds),
        "loss": losses[0],
        "said": [line.strip() for line in said.splitlines() if any(part in line for part in TELLING)],
    }


def write_tokens(prefix: Path, size: int) -> None:
    """Write random tokens as a data set."""
    import numpy as np

    from megalight.data.indexed import IndexedWriter

    draws = np.random.default_rng(0)
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(64):
            writer.add_documents(draws.integers(0, size, 1 << 16, dtype="uint16"), [1 << 16])


def compiled(shape: Shape) -> dict[str, Any]:
    """Train the shape in ``transformers`` with ``torch.compile``."""
    from benchmarks.dense_step import measure

    step = Step().but(shape.step)
    row = measure(argparse.Namespace(unchecked=True, profile=None, breakdown=False), "hf-compile", "hf-compile", step)
    if "refused" in row:
        raise RuntimeError(row["refused"])
    return {name: row[name] for name in ("tokens_per_second", "peak_gib")}


def plain(way: str, tiny: bool) -> dict[str, Any]:
    """Train a LightningModule around a Llama of ``transformers``."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.utils.data import DataLoader

    from benchmarks.meter import Meter, random_rows
    from benchmarks.peers.huggingface import llama
    from megalight.callbacks import CUDAGraph, FusedOps
    from megalight.strategies import MegatronStrategy

    words = way.split()
    tries = not tiny and {"graphs", "true"} & set(words)
    step = Step().but(TINY_LLAMA if tiny else LLAMA).but(f"warmup={TRIAL}" if tries else "")
    meter = Meter(step)

    class Chat(pl.LightningModule):
        reads_weights = False

        def __init__(self) -> None:
            super().__init__()
            self.model = llama(step).train()
            self.losses: list[torch.Tensor] = []

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    class Clock(pl.Callback):
        reads_weights = False

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            meter.start()

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
            if not found:
                found.append(float(outputs["loss"]))
            meter.tick()
            if trainer.global_step == step.warmup and step.device == "cuda":
                torch.cuda.reset_peak_memory_stats()  # building the model is no part of training

    found: list[float] = []
    callbacks: list[pl.Callback] = [Clock()]
    if {"graphs", "true"} & set(words):
        callbacks.append(CUDAGraph("auto"))
    if {"fused", "true"} & set(words):
        callbacks.append(FusedOps())
    if words[0] == "fsdp":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        strategy: Any = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer})
    else:
        strategy = "ddp" if words[0] == "ddp" else MegatronStrategy()
    trainer = pl.Trainer(
        accelerator=step.device,
        devices=1,
        strategy=strategy,
        precision="bf16-true" if "true" in words else "bf16-mixed",
        max_steps=meter.total,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rows = random_rows(step, step.mbs * meter.total, 0)[:, :-1].contiguous()
    loader: Any = DataLoader(rows, batch_size=step.mbs, pin_memory=step.device == "cuda")  # type: ignore[arg-type]
    trainer.fit(Chat(), loader)
    meter.close()
    seconds = statistics.median(meter.seconds())
    peak, _ = meter.ranks[0]
    reserved = torch.cuda.max_memory_reserved() / 2**30 if step.device == "cuda" else None
    graphs = [callback for callback in callbacks if isinstance(callback, CUDAGraph)]
    said = [str(graph.trial.verdict) for graph in graphs if graph.trial is not None]
    return {
        "tokens_per_second": step.tokens / seconds,
        "seconds": seconds,
        "peak_gib": peak,
        "reserved_gib": reserved,
        "loss": found[0],
        "said": [*said, *(reason for graph in graphs for reason in graph.reasons)],
    }


def rows_of(tiny: bool) -> dict[str, list[str]]:
    """Return the names of the rows, by part."""
    # Lightning's FSDPStrategy needs a GPU.
    found = {"plain Llama": ["ddp", "megatron graphs fused"] if tiny else list(PLAIN)}
    for name, shape in (TINY_SHAPES if tiny else SHAPES).items():
        found[name] = ["out of the box", *shape.tuned, "transformers + compile", "micro_batch_size=auto", "eager"]
        if tiny:  # nothing measures memory on a CPU, and compiling takes a minute
            found[name] = ["out of the box", *shape.tuned]
    return found


def run_row(part: str, row: str, tiny: bool) -> dict[str, Any]:
    """Measure one row in this process."""
    if part == "plain Llama":
        return plain(row, tiny)
    shape = (TINY_SHAPES if tiny else SHAPES)[part]
    if row == "transformers + compile":
        return compiled(shape)
    ways = {"out of the box": "", "eager": EAGER, "micro_batch_size=auto": f"{MICRO}=auto", **shape.tuned}
    with tempfile.TemporaryDirectory() as folder:
        return fit(shape, ways[row], tiny, Path(folder))


def last(text: str) -> str:
    """Return the last lines of an output."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def apart(part: str, row: str, tiny: bool, limit: float) -> dict[str, Any]:
    """Measure one row in a process of its own, or return how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        words = [sys.executable, __file__, str(out), "--part", part, "--row", row, *(["--tiny"] if tiny else [])]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            run = subprocess.run(
                words, capture_output=True, text=True, timeout=limit, env={**os.environ, "PYTHONPATH": path}
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s"}
        if run.returncode:
            return {"failed": last(run.stdout + run.stderr)}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def check(rows: Sequence[dict[str, Any]]) -> None:
    """Mark rows whose first loss is not that of the first row: they train something else."""
    known = [row for row in rows if row.get("loss") is not None]
    for row in known[1:]:
        difference = abs(row["loss"] / known[0]["loss"] - 1)
        if difference > TOLERANCE:
            row["failed"] = f"its first loss {row['loss']:.4f} differs from {known[0]['loss']:.4f} by {difference:.1e}"


def ratios(part: str, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the ratios that the aims are about."""
    timed = {row["row"]: row for row in rows if "failed" not in row and "tokens_per_second" in row}
    if part == "plain Llama":
        base = timed.get("fsdp")
        return {} if base is None else {
            f"{name} / fsdp": row["tokens_per_second"] / base["tokens_per_second"]
            for name, row in timed.items()
            if name.startswith("megatron")
        }  # fmt: skip
    ours, hand = timed.get("out of the box"), [row for name, row in timed.items() if "at once" in name]
    found = {}
    if ours and hand:
        best = max(hand, key=lambda row: row["tokens_per_second"])
        found[f"out of the box / {best['row']}"] = ours["tokens_per_second"] / best["tokens_per_second"]
    if ours and "transformers + compile" in timed:
        theirs = timed["transformers + compile"]["tokens_per_second"]
        found["out of the box / transformers + compile"] = ours["tokens_per_second"] / theirs
    return found


def table(record: dict[str, Any]) -> str:
    """Return the result in Markdown."""
    lines = [f"`{record['command']}` on {record['device']}", ""]
    for part, rows in record["parts"].items():
        lines += [f"| {part} | tokens/s | peak GiB | first loss | |", "| --- | ---: | ---: | ---: | --- |"]
        for row in rows:
            if "tokens_per_second" not in row:
                lines.append(f"| {row['row']} | | | | {row['failed'].splitlines()[-1][:150]} |")
                continue
            loss = "" if row.get("loss") is None else f"{row['loss']:.4f}"
            told = row.get("failed") or "; ".join(row.get("said", []))
            lines.append(
                f"| {row['row']} | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} | {loss} | {told[:200]} |"
            )
        lines += ["", *(f"{name}: {ratio:.2f}" for name, ratio in record["ratios"][part].items()), ""]
    return "\n".join(lines)


def device_of() -> str:
    """Return the name of the device, without making a CUDA context in this process."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    return name


def main(words: Sequence[str] | None = None) -> int:
    """Run all rows, or one; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--part", help="only this part")
    parser.add_argument("--row", help="only this row, in this process")
    parser.add_argument("--rows", nargs="+", help="only these rows of a part")
    parser.add_argument("--seconds", type=float, default=470, help="no row begins after as many")
    parser.add_argument("--limit", type=float, default=90, help="seconds that a row may take")
    a = parser.parse_args(words)
    if a.row is not None:
        a.result.write_text(json.dumps(run_row(a.part, a.row, a.tiny)))
        return 0
    start = time.monotonic()
    parts: dict[str, list[dict[str, Any]]] = {}
    record = {
        "command": " ".join(["benchmarks/out_of_box.py", "RESULT.json", *(words or sys.argv[1:])[1:]]),
        "device": "CPU" if a.tiny else device_of(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
        "parts": parts,
    }
    for part, names in rows_of(a.tiny).items():
        if a.part not in (None, part):
            continue
        parts[part] = []
        for name in names if a.rows is None else [name for name in names if name in a.rows]:
            left = a.seconds - (time.monotonic() - start)
            begun = time.monotonic()
            found = apart(part, name, a.tiny, min(a.limit, left)) if left > 10 else {"failed": "no time was left"}
            parts[part].append({"row": name, **found, "wall_seconds": round(time.monotonic() - begun, 1)})
            check(parts[part])
            record["ratios"] = {known: ratios(known, rows) for known, rows in parts.items()}
            # After each row: a call that is cut short has the rows before.
            a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            a.result.with_suffix(".md").write_text(table(record) + "\n", encoding="utf-8")
            shown = {**parts[part][-1]}
            print(
                part, "|", name, "|", shown.get("failed") or f"{shown['tokens_per_second']:,.0f} tokens/s", flush=True
            )
    print(table(record))
    return any("failed" in row for rows in parts.values() for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
