"""The demo: data from this machine's own Python library, a small GPT on two processes, its loss curve, a sample.

Run by ``make demo``. Every step is a ``megalight`` command that you can type yourself; each is printed before it runs.
Everything is written below ``runs/demo``.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path("runs/demo")
DATA = ROOT / "data" / "stdlib"
STEPS, MORE = 200, 40


def megalight(*words: str) -> None:
    """Run one command, as a user would."""
    command = [str(Path(sysconfig.get_path("scripts")) / "megalight"), *words]
    shown = shlex.join(["megalight", *words])
    print("\n$", shown if len(shown) < 400 else f"{shown[:150]} ... {shown[-150:]}", flush=True)
    subprocess.run(command, check=True)


def devices() -> list[str]:
    """Two processes with TP=2, on CPU or on two GPUs; one process where there is a single GPU. GPUs compute in bf16."""
    import torch

    found = torch.cuda.device_count()
    options = ["--trainer.precision", "bf16-mixed"] if found else []
    if found == 1:
        strategy = "--trainer.strategy.init_args."
        options += [
            "--trainer.devices",
            "1",
            f"{strategy}tensor_parallel",
            "1",
            f"{strategy}sequence_parallel",
            "false",
        ]
    return options


def corpus() -> list[str]:
    """The standard library's own modules and packages: not its tests, not what was installed beside it."""
    left_out = {"site-packages", "test", "tests", "lib2to3", "__pycache__"}
    entries = sorted(Path(sysconfig.get_path("stdlib")).iterdir())
    kept = [path for path in entries if path.name not in left_out]
    return [str(path) for path in kept if path.suffix == ".py" or (path / "__init__.py").exists()]


def losses(run: Path, column: str) -> list[tuple[int, float]]:
    """A column of a run's CSV log: (step, value) where it was logged."""
    with (run / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if row.get(column)]


def main() -> None:
    """All steps, then a summary."""
    start = time.perf_counter()
    shutil.rmtree(ROOT, ignore_errors=True)
    options = ["--glob", "*.py", "--skip-bad", "--train-tokenizer", "--vocab-size", "4096"]
    megalight("prepare", *corpus(), *options, "--output", str(DATA))
    fit = ["fit", "-c", "recipes/demo.yaml", *devices()]
    megalight(*fit, "--trainer.max_steps", str(STEPS))
    megalight(*fit, "--trainer.max_steps", str(STEPS + MORE), "--ckpt_path", "last")
    runs = sorted((ROOT / "lightning_logs").iterdir(), key=lambda path: path.stat().st_mtime)
    megalight("plot", "--join", *map(str, runs), "--output", str(ROOT / "loss.png"))
    megalight(
        "generate", str(ROOT / "checkpoints" / "last.ckpt"), "--prompt", "def read_file(", "--max-new-tokens", "60",
        "--temperature", "0.7", "--seed", "1",
    )  # fmt: skip
    entropy = json.loads(Path(f"{DATA}.json").read_text())["unigram_entropy_nats"]
    step, value = losses(runs[-1], "val_loss")[-1]
    seconds = time.perf_counter() - start
    print(f"\nvalidation loss at step {step}: {value:.3f} nats per token")
    print(f"unigram entropy of the corpus: {entropy:.3f} nats per token (a model that knows only frequencies)")
    print(f"the model is {entropy - value:.3f} nats below it; perplexity {math.exp(value):.1f}")
    print(f"loss curve: {ROOT / 'loss.png'}; whole demo: {seconds:.0f} s")
    if not value < entropy - 1:
        sys.exit("the model has not learned: it should be at least 1 nat below the unigram entropy")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
