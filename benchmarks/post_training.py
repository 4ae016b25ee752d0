"""Post-training of the demo's model from end to end, on one device, by the commands that a user types.

    python benchmarks/post_training.py RESULT.json [--steps 200] [--only chat eagle] [--work runs/post-training]

The demo's model is trained on this machine's own Python library. Then it

- learns generated conversations (``chat``), and answers: the share of right answers is told;
- teaches a narrower student of 4 layers (``distil``): validation loss beside that of the same student alone;
- gets a draft (``eagle``): acceptance length, and whether greedy text with the draft is the model's own;
- gets adapters over weights in 4 bits (``qlora``).

A small Llama is trained and rounded to FP8 with FP8 keys and values, INT4 after AWQ and, on CUDA, NVFP4 (``quantize``):
perplexity before and after, and how far the logits of the exported folder in ``transformers`` are from its own.

Each part is told on its own, also if another fails. The exit code is 0 if all parts did what they should.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import re
import shlex
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import distillation

from megalight.cli.main import main as megalight
from megalight.inference import load_model
from megalight.plugins.modelopt.export import plain_weights
from megalight.types import PackedSequences

HOME = Path(__file__).resolve().parents[1]
ONE = ["--trainer.devices=1", "--trainer.strategy.tensor_parallel=1", "--trainer.strategy.sequence_parallel=false"]
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "__pycache__"}
CIRCLES = (
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    ("January", "February", "March", "April", "May", "June", "July"),
    ("red", "yellow", "green", "blue", "violet"),
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass
class Run:
    """What the parts share.

    Attributes:
        work: folder of all runs, which is the working directory.
        steps: steps of each training.
        cuda: whether there is a GPU.
        python: files of Python to train on, at most; None: all of the library.
    """

    work: Path
    steps: int
    cuda: bool
    python: int | None

    @property
    def device(self) -> list[str]:
        """Words of each training."""
        return [*ONE, "--trainer.enable_progress_bar=false", *["--trainer.precision=bf16-mixed"] * self.cuda]

    def say(self, *words: str) -> str:
        """Run a command; return what it printed.

        Raises:
            RuntimeError: it failed.
        """
        print("$ megalight", shlex.join(words)[:300], flush=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = megalight(list(words))
        if code:
            raise RuntimeError(f"megalight {words[0]} returned {code}: {printed.getvalue()[-800:]}")
        return printed.getvalue()

    def fit(self, *words: str, steps: int | None = None) -> None:
        """Train."""
        self.say("fit", *words, *self.device, f"--trainer.max_steps={steps or self.steps}")


def recipe(name: str) -> str:
    """Return the file of a recipe."""
    return str(HOME / "recipes" / f"{name}.yaml")


def logged(folder: str, column: str) -> list[float]:
    """Return the values that a run logged, first to last."""
    (file,) = Path(folder).rglob("metrics.csv")
    with file.open() as lines:
        return [float(row[column]) for row in csv.DictReader(lines) if row.get(column)]


def prepare(run: Run) -> str:
    """Prepare the demo's data, unless it is there; return its prefix."""
    data = "runs/demo/data/stdlib"
    if not Path(f"{data}.tokenizer.json").exists():
        entries = sorted(Path(sysconfig.get_path("stdlib")).iterdir())
        corpus = [str(path) for path in entries if path.name not in LEFT_OUT and path.suffix == ".py"]
        words = ["--skip-bad", "--train-tokenizer", "--vocab-size", "4096", "--quiet"]
        run.say("prepare", *corpus[: run.python], *words, "--output", data)
    return data


def demo(run: Run) -> dict[str, Any]:
    """Train the demo's model."""
    prepare(run)
    run.fit("-c", recipe("demo"), f"--trainer.val_check_interval={run.steps}")
    return {"val_loss": logged("runs/demo", "val_loss")[-1], "steps": run.steps}


def questions() -> dict[str, str]:
    """Return questions and their answers."""
    pairs = [pair for names in CIRCLES for pair in zip(names, names[1:] + names[:1], strict=True)]
    return {f"What comes after {name}?": after for name, after in pairs}


def chat(run: Run) -> dict[str, Any]:
    """Fine-tune on generated conversations, and ask."""
    asked = questions()
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked.items()
    ]
    Path("chat.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 40))
    Path("chat.jinja").write_text(TEMPLATE)
    words = ["--tokenizer", "runs/demo/data/stdlib.tokenizer.json", "--chat-template", "chat.jinja", "--quiet"]
    run.say("prepare", "--chat", "chat.jsonl", *words, "--output", "runs/fine-tune/data/chat")
    weights = "--model.init_args.weights=runs/demo/checkpoints/last.ckpt"
    saves = {"dirpath": "runs/fine-tune/checkpoints", "save_last": True}
    saved = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}
    run.fit("-c", recipe("fine-tune"), weights, f"--trainer.callbacks=[{json.dumps(saved)}]")
    right = []
    for question, answer in asked.items():
        tuned = ["runs/fine-tune/checkpoints/last.ckpt", "--chat", "-p", question, "-n", "8", "-t", "0"]
        right.append(run.say("generate", *tuned).strip() == answer)
    losses = logged("runs/fine-tune", "train_loss")
    return {"questions": len(right), "right": sum(right), "train_loss": [losses[0], losses[-1]], "ok": all(right)}


def distil(run: Run) -> dict[str, Any]:
    """Train a student beside the demo's model, and the same one alone."""
    every = max(run.steps // 5, 1)
    code = distillation.main(["distil.json", "--demo", "runs/demo", "--steps", str(run.steps), "--every", str(every)])
    found = json.loads(Path("distil.json").read_text())
    curves = {name: each["val_losses"] for name, each in found["runs"].items()}
    return {"steps": found["steps"], "val_losses": curves, "ok": code == 0}


def eagle(run: Run) -> dict[str, Any]:
    """Train a draft, measure it, and compare greedy text."""
    run.fit("-c", recipe("eagle"), f"--trainer.val_check_interval={run.steps}")
    base, draft = (f"runs/{name}/checkpoints/last.ckpt" for name in ("demo", "eagle"))
    told = run.say(
        *("acceptance", base, "--draft", draft, "--questions", str(HOME / "recipes" / "eagle-questions.jsonl")),
        *("--plain", "-n", "64", "--dtype", "float32"),
    )
    length = float(told.rpartition("all: acceptance length ")[2].split()[0])
    prompts = ("import os", "def read(", "class Queue:", "for name in")
    same = 0
    for prompt in prompts:
        words = ["-p", prompt, "-n", "64", "-t", "0", "--dtype", "float32"]
        same += run.say("generate", base, *words) == run.say("generate", base, "--draft", draft, *words)
    accuracies = [logged("runs/eagle", f"val_step_{step}_accuracy")[-1] for step in range(4)]
    return {
        "acceptance_length": length,
        "val_accuracy_of_steps": accuracies,
        "greedy_texts": len(prompts),
        "same_as_the_base": same,
        "ok": length > 1 and same == len(prompts),
    }


def quantize(run: Run) -> dict[str, Any]:
    """Round a small Llama to each format, write folders, and load them in ``transformers``."""
    prefix = prepare(run)
    data = [f"--data.data={prefix}", f"--data.tokenizer={prefix}.tokenizer.json"]
    words = ["-c", recipe("quantize"), *data, *run.device]
    run.fit("-c", recipe("quantize"), *data)
    formats = {"fp8": ["--kv", "FP8_KV_CFG"], "int4-awq": ["--preset", "INT4_AWQ_CFG"]}
    if run.cuda:
        formats["nvfp4"] = ["--preset", "NVFP4_DEFAULT_CFG"]
    found: dict[str, Any] = {"ok": True}
    for name, options in formats.items():
        weights = "--model.init_args.weights=runs/quantize/checkpoints/last.ckpt"
        said = run.say("quantize", f"runs/{name}", *options, "--", *words, weights)
        ((before, after),) = re.findall(r"perplexity (\S+) before, (\S+) quantized", said)
        told = found[name] = {"perplexity_before": float(before), "perplexity": float(after)}
        # Said at once: a failure of a later format takes nothing of it away.
        print(f"RESULT {name}: {json.dumps(told)}", flush=True)
        run.say("convert", f"runs/{name}", f"folders/{name}", "--to", "modelopt")
        change = told["transformers"] = in_transformers(
            f"runs/{name}", f"folders/{name}", "cuda" if run.cuda else "cpu"
        )
        print(f"RESULT {name}: {json.dumps(told)}", flush=True)
        found["ok"] &= float(after) < 1.1 * float(before) and change < 1e-3
    return found


def in_transformers(checkpoint: str, folder: str, device: str) -> float:
    """Return how far the logits of a folder in ``transformers`` are from our own, relative to these."""
    import transformers

    ours: Any = load_model(checkpoint)
    for path, module in ours.named_modules():
        if path.endswith(("input_quantizer", "bmm_quantizer")):
            module.disable()  # transformers rounds no activations
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval().to(device)
    theirs.load_state_dict(plain_weights(folder))
    tokens = torch.arange(3, 131, device=device)
    with torch.no_grad():
        output = ours.float().eval().to(device)(tokens, PackedSequences.of_uniform(1, len(tokens)).to(device))
        expected = theirs(tokens[None]).logits[0]
    logits = getattr(output, "logits", output)[:, : expected.shape[1]]
    return float((logits - expected).norm() / expected.norm())


def qlora(run: Run) -> dict[str, Any]:
    """Train adapters over weights in NVFP4."""
    values = yaml.safe_load(Path(recipe("lora")).read_text())
    values["trainer"]["default_root_dir"] = "runs/qlora"
    adapters, saved = values["trainer"]["callbacks"]
    adapters["init_args"]["base"] = "nvfp4"
    saved["init_args"]["dirpath"] = "runs/qlora/checkpoints"
    Path("qlora.yaml").write_text(yaml.safe_dump(values))
    run.fit("-c", recipe("demo"), "-c", "qlora.yaml", "--trainer.log_every_n_steps=1", steps=40)
    losses = logged("runs/qlora", "train_loss")
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    return {"steps": 40, "train_loss_of_ten_steps": [first, last], "ok": last < first}


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "demo": demo,
    "chat": chat,
    "distil": distil,
    "eagle": eagle,
    "quantize": quantize,
    "qlora": qlora,
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    told = "parts; all but quantize need the demo"
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help=told)
    parser.add_argument("--work", type=Path, default=Path("runs/post-training"))
    parser.add_argument("--python", type=int, help="train on so many files of the library (default: all)")
    given = parser.parse_args(words)
    result, cuda = given.result.resolve(), torch.cuda.is_available()
    given.work.mkdir(parents=True, exist_ok=True)
    os.chdir(given.work)
    run = Run(given.work, given.steps, cuda, given.python)
    about: dict[str, Any] = {
        "command": f"python benchmarks/post_training.py RESULT.json --steps {given.steps}",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }
    good = True
    for name in given.only:
        start = time.perf_counter()
        try:
            found = PARTS[name](run)
        except Exception as error:
            traceback.print_exc()
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        found["seconds"] = round(time.perf_counter() - start, 1)
        good &= found.pop("ok", True)
        about[name] = found
        print(f"RESULT {name}: {json.dumps(found)}", flush=True)
        result.write_text(json.dumps(about) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
