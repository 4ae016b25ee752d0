"""Typical mistakes: each must end with one screen of text and an exit code, and soon.

python benchmarks/mistakes.py                                      # prints a table
python benchmarks/mistakes.py --out benchmarks/results/mistakes.md
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SCREEN = 25
"""Lines of one screen."""

TARGET = 12.0
"""CPU seconds of the slowest answer: most of them import torch and Lightning, whose constructors refuse values."""

RECIPE = """
trainer: {default_root_dir: runs, max_steps: 6, accelerator: cpu, devices: 1}
model:
  class_path: megalight.models.gpt.GPTModule
  init_args:
    config: {num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 300, max_sequence_length: 64}
    optimizer: {lr: 1.0e-3}
data:
  class_path: megalight.data.gpt.module.GPTDataModule
  init_args: {data: data/text, global_batch_size: 4, sequence_length: 64}
"""
FILES = {
    "r.yaml": RECIPE,
    "twice.yaml": "trainer:\n  max_steps: 3\n  max_steps: 4\n",
    "broken.yaml": "trainer: [1\nmodel: 2\n",
    "empty.txt": "",
    "binary.yaml": "trainer: \x00\x01",
    "list.yaml": "- trainer\n- model\n",
    "layers.json": "{",
    "text.txt": "to be or not to be that is the question " * 500,
}
RUN = "fit -c r.yaml"
MISTAKES = {
    "nothing but the verb": "fit",
    "misspelled verb": "fti -c r.yaml",
    "missing file": "fit -c recipe.yaml",
    "broken YAML": f"{RUN} -c broken.yaml",
    "key twice": f"{RUN} -c twice.yaml",
    "misspelled option": f"{RUN} --trainer.max_step=3",
    "option without its section": f"{RUN} --max_steps=3",
    "misspelled option of the strategy": f"{RUN} --trainer.strategy.tensor_paralel=2",
    "misspelled option of the model": f"{RUN} --model.config.num_layer=3",
    "word for a number": f"{RUN} --model.config.hidden_size=big",
    "unknown choice": f"{RUN} --trainer.precision=bf16mixed",
    "sequence parallel alone": f"{RUN} --trainer.strategy.sequence_parallel=true",
    "heads that do not divide": f"{RUN} --model.config.num_heads=5",
    "more ranks than heads": f"{RUN} --trainer.devices=8 --trainer.strategy.tensor_parallel=8",
    "negative clipping": f"{RUN} --trainer.gradient_clip_val=-1",
    "data that is not there": f"{RUN} --data.data=data/txt",
    "samples above the corpus": f"{RUN} --data.sequence_length=9999999",
    "negative number of readers": f"{RUN} --data.num_workers=-1",
    "checkpoint that is not there": f"{RUN} --ckpt_path=runs/last.ckpt",
    "nothing to resume": f"{RUN} --ckpt_path=last",
    "wrong class": f"{RUN} --model=megalight.models.gpt.module.GPTModul",
    "empty corpus": "prepare empty.txt -o data/x --train-tokenizer",
    "no devices": f"{RUN} --trainer.devices=0",
    "batch that replicas cannot share": f"{RUN} --trainer.devices=3",
    "fewer embeddings than tokens": f"{RUN} --model.config.vocab_size=100",
    "weights that are not there": f"{RUN} --model.weights=weights",
    "tokenizer that is not there": f"{RUN} --data.tokenizer=tokens",
    "misspelled dtype": f"{RUN} --model.optimizer.exp_avg_dtype=flaot8",
    "no tokenizer": "prepare text.txt -o data/x",
    "nothing to convert": "convert weights out",
    "nothing to merge": "merge weights -o out",
    "file that is no checkpoint": "inspect text.txt",
    "no logs to plot": "plot data",
    "script without a command": "launch --slurm --nodes 2",
    "two kinds of script": "launch --slurm --torchrun --nodes 2 -- fit -c r.yaml",
    "unknown recipe": "recipes llama3-pretrain-8xGPU",
    "shell without completion": "completion fish",
    "no checkpoint to sample from": "generate runs --prompt hello",
    # Values that the constructor of a class refuses.
    "steps below no limit": f"{RUN} --trainer.max_steps=-5",
    "passes below no limit": f"{RUN} --trainer.max_epochs=-5",
    "no machines": f"{RUN} --trainer.num_nodes=0",
    "interval of no batches": f"{RUN} --trainer.val_check_interval=0",
    "interval of no epochs": f"{RUN} --trainer.check_val_every_n_epoch=0",
    "share above all": f"{RUN} --trainer.limit_train_batches=1.5",
    "negative number of batches": f"{RUN} --trainer.limit_val_batches=-1",
    "negative trial run": f"{RUN} --trainer.fast_dev_run=-1",
    "misspelled logger": f"{RUN} --trainer.logger=jsn",
    "misspelled profiler": f"{RUN} --trainer.profiler=simpel",
    "misspelled way to clip": f"{RUN} --trainer.gradient_clip_algorithm=nrom",
    "no accumulation": f"{RUN} --trainer.accumulate_grad_batches=0",
    "half precision on a CPU": f"{RUN} --trainer.precision=16-mixed",
    "word for a seed": f"{RUN} --seed_everything=abc",
    "negative seed": f"{RUN} --seed_everything=-1",
    "word for yes": f"{RUN} --weights_only=maybe",
    "folder that is a file": f"{RUN} --trainer.default_root_dir=text.txt/runs",
    "negative timeout": f"{RUN} --trainer.strategy.timeout_seconds=-5",
    "degree of 0": f"{RUN} --trainer.strategy.tensor_parallel=0",
    "micro-batches of nothing": f"{RUN} --trainer.strategy.micro_batch_size=0",
    "automatic micro-batches on a CPU": f"{RUN} --trainer.strategy.micro_batch_size=auto",
    "misspelled level": f"{RUN} --trainer.strategy.data_parallel.level=optimizer",
    "empty buckets": f"{RUN} --trainer.strategy.data_parallel.bucket_size=0",
    "half of recompute": f"{RUN} --trainer.strategy.recompute.num_layers=2",
    "unknown start": f"{RUN} --trainer.strategy.start_method=thread",
    "negative learning rate": f"{RUN} --model.optimizer.lr=-1",
    "moments that do not decay": f"{RUN} --model.optimizer.betas=[0.9,1.5]",
    "warm-up above the steps": (
        f"{RUN} --model.optimizer.schedule=CosineDecay --model.optimizer.schedule.warmup=9 "
        "--model.optimizer.schedule.steps=5"
    ),
    "unknown shape of a schedule": (f"{RUN} --model.optimizer.schedule=WSD --model.optimizer.schedule.shape=cube"),
    "unknown activation": f"{RUN} --model.config.activation=swish",
    "no layers": f"{RUN} --model.config.num_layers=0",
    "dropout of everything": f"{RUN} --model.config.dropout.hidden=1",
    "split without weight": f"{RUN} --data.split=0,0,0",
    "split in words": f"{RUN} --data.split=most,rest",
    "model shorter than samples": f"{RUN} --model.config.max_sequence_length=32",
    "key in the wrong section": f"{RUN} --data.micro_batch_size=2",
    "binary file": f"{RUN} -c binary.yaml",
    "list for a file": f"{RUN} -c list.yaml",
    "teacher that is not there": f"{RUN} --trainer.callbacks+=Distillation --trainer.callbacks.teacher=teacher",
    "no teacher": f"{RUN} --trainer.callbacks+=Distillation",
    "unknown divergence": (
        f"{RUN} --trainer.callbacks+=Distillation --trainer.callbacks.teacher=data --trainer.callbacks.divergence=kl"
    ),
    "temperature of 0": (
        f"{RUN} --trainer.callbacks+=Distillation --trainer.callbacks.teacher=data --trainer.callbacks.temperature=0"
    ),
    "adapter without a rank": f"{RUN} --trainer.callbacks+=Adapters",
    "adapter of rank 0": f"{RUN} --trainer.callbacks+=Adapters --trainer.callbacks.rank=0",
    "average that does not move": f"{RUN} --trainer.callbacks+=EMA --trainer.callbacks.decay=1",
    "best checkpoints of nothing": f"{RUN} --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.save_top_k=3",
    "window that ends first": (
        f"{RUN} --trainer.callbacks+=ProfilerWindow --trainer.callbacks.start_step=5 --trainer.callbacks.stop_step=2"
    ),
    "level that does not exist": f"{RUN} --trainer.callbacks+=Throughput --trainer.callbacks.timers=5",
    "preemption before the start": f"{RUN} --trainer.callbacks+=Preemption --trainer.callbacks.after_minutes=-1",
    "misspelled accelerator": f"{RUN} --trainer.accelerator=gpuu",
    "misspelled strategy": f"{RUN} --trainer.strategy=megatro",
    "misspelled plugin": f"{RUN} --trainer.plugins=SLURMEnvironmen",
    "misspelled backend": f"{RUN} --trainer.strategy.process_group_backend=ncl",
    "folder that cannot be made": f"{RUN} --trainer.default_root_dir=/proc/1/runs",
    "misspelled callback": f"{RUN} --trainer.callbacks+=EarlyStoping",
    "callback without its metric": f"{RUN} --trainer.callbacks+=EarlyStopping",
    "word for the best": (
        f"{RUN} --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitor=loss --trainer.callbacks.mode=maxx"
    ),
    "word for a time": f"{RUN} --trainer.max_time=noon",
    "predictions that are not there": (
        f"{RUN} --trainer.callbacks+=Distillation --trainer.callbacks.teacher_logits=absent"
    ),
    "unknown preset": f"{RUN} --trainer.callbacks+=ModelOptQuantization --trainer.callbacks.preset=nvfp3",
    "option of another verb": "quantize out -c r.yaml",
    "nothing to learn from": "cache-logits absent --top-k 4 -o out -- -c r.yaml",
    "nothing behind the dashes": "cache-logits absent --top-k 4 -o out",
    "option after the dashes": "launch --slurm -- fit --nodes 2",
    "time that SLURM does not take": "launch --slurm --time=noon --nodes 2 -- fit -c r.yaml",
    "negative time": "bench tiny-cpu --timeout=-1",
    "misspelled axis": "doctor --layout tq=2",
    "adapters of nothing": "adapters absent -o out",
    "no workers": "prepare text.txt -o data/x --train-tokenizer --workers=0",
    "no text": "prepare absent.txt -o data/x --train-tokenizer",
}


@dataclass(frozen=True)
class Row:
    """What became of one mistake."""

    name: str
    words: str
    code: int
    lines: int
    seconds: float
    cpu_seconds: float
    first: str

    @property
    def good(self) -> bool:
        """Whether the command ended with an error, on one screen, soon, and without a traceback."""
        soon = self.cpu_seconds <= TARGET
        return self.code not in (0, 1) and 0 < self.lines <= SCREEN and soon and "Traceback" not in self.first


def measure(name: str, words: str, folder: Path) -> Row:
    """Make one mistake."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "megalight", *words.split()], cwd=folder, capture_output=True, text=True, timeout=300
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    text = run.stderr.strip().splitlines()
    shown = "Traceback" if "Traceback" in run.stderr else text[0] if text else ""
    return Row(name, words, run.returncode, len(text), seconds, cpu, shown)


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| mistake | command | exit | lines | seconds | CPU seconds |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        figures = f"{row.code} | {row.lines} | {row.seconds:.1f} | {row.cpu_seconds:.1f}"
        lines.append(f"| {row.name} | `megalight {row.words}` | {figures} |")
    slow = [row.name for row in rows if row.cpu_seconds > TARGET]
    verdict = f"Above {TARGET:g} CPU seconds: {', '.join(slow)}." if slow else f"None takes {TARGET:g} CPU seconds."
    return "\n".join([*lines, "", verdict])


def main() -> int:
    """Make all mistakes; return 1 if one is not answered as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in FILES.items():
            (folder / name).write_text(text)
        prepare = "prepare text.txt -o data/text --train-tokenizer --vocab-size=280 --workers=1 -q"
        subprocess.run([sys.executable, "-m", "megalight", *prepare.split()], cwd=folder, check=True)
        rows = [measure(name, words, folder) for name, words in MISTAKES.items()]
    text = table(rows)
    print(text)
    if arguments.out is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        head = f"# Typical mistakes\n\nMade by `python benchmarks/mistakes.py` ({machine}).\n\n"
        arguments.out.write_text(head + text + "\n")
    bad = [
        f"{row.name}: exit {row.code}, {row.lines} lines, {row.cpu_seconds:.1f} s: {row.first}"
        for row in rows
        if not row.good
    ]
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
