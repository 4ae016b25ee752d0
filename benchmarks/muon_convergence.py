"""Train the same GPT by Adam and by Muon on the demo corpus: how many steps Muon needs for Adam's final loss.

    python benchmarks/muon_convergence.py RESULT.json --size 125m --steps 2000   # one GPU, some minutes
    python benchmarks/muon_convergence.py RESULT.json --size 125m --steps 2000 --resume EARLIER.json --corpus FOLDER
    python benchmarks/muon_convergence.py RESULT.json --size demo --steps 200 --tuning 0.25   # the CPU
    python benchmarks/muon_convergence.py RESULT.json --draw docs/assets/muon.svg

The corpus is Python's own source (for ``125m`` that of torch, too), every twentieth document held out. Both optimizers
see the same batches from the same initial values. First each rate of each optimizer is tried in a short run of its own;
the best one is taken. Adam then trains for all steps. Muon trains for all, three quarters and half of them, each time
with a whole schedule, so that no loss in the middle of a schedule is compared with one at its end.

RESULT.json is written after each run. ``--resume`` takes over the runs of an earlier file that have the same rates and
steps, and trains only the others, so that a call may be cut off. ``--corpus`` keeps the tokens for the next call.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megalight
from megalight.data.indexed import IndexedDataset
from megalight.data.prepare import prepare
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.optim import AdamConfig, LinearDecay, MuonConfig
from megalight.types import TokenBatch

FRACTIONS = (1.0, 0.75, 0.5)
"""Of Adam's steps: how long Muon trains."""
HELD_OUT = 20
"""Each of so many documents is held out."""
VALIDATIONS = 10
"""How often a run is validated."""


@dataclass(frozen=True)
class Size:
    """A model, its batch, and the rates to try: for Adam, and for Muon's matrices."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    length: int
    rows: int
    adam: tuple[float, ...]
    muon: tuple[float, ...]
    torch_source: bool = False


SIZES = {
    "125m": Size(
        12,
        768,
        12,
        2048,
        1024,
        8,
        adam=(1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3),
        muon=(6e-4, 1.2e-3, 2.4e-3, 4.8e-3, 9.6e-3),
        torch_source=True,
    ),
    "demo": Size(4, 128, 4, 352, 128, 8, (1e-3, 2e-3, 4e-3), (4e-3, 8e-3, 1.6e-2)),
    "tiny": Size(1, 32, 2, 64, 32, 4, (4e-3,), (4e-3, 8e-3)),
}
VOCABULARY = 4096
OTHERS = ("test", "tests", "site-packages")
"""Folders of Python's source that are no part of the corpus."""


class Corpus:
    """Tokens of documents to train on, and of those held out."""

    def __init__(self, size: Size, folder: str) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        folders = [library / name for name in ("asyncio", "email", "unittest")] if size is SIZES["tiny"] else [library]
        folders += [Path(torch.__file__).parent] if size.torch_source else []
        files = sorted(
            str(path)
            for each in folders
            for path in each.rglob("*.py")
            if not set(OTHERS).intersection(path.relative_to(each).parts)
        )
        if not Path(f"{folder}/corpus.idx").exists():
            prepare(
                files, f"{folder}/corpus", train_tokenizer=True, vocab_size=VOCABULARY, progress=False, on_bad="skip"
            )
        documents = IndexedDataset(f"{folder}/corpus")
        every = [np.asarray(documents[index], dtype=np.int64) for index in range(len(documents))]
        self.trained = torch.from_numpy(np.concatenate([d for i, d in enumerate(every) if i % HELD_OUT]))
        self.held_out = torch.from_numpy(np.concatenate(every[::HELD_OUT]))

    def batch(self, size: Size, seed: int, device: torch.device, held_out: bool = False) -> TokenBatch:
        tokens = self.held_out if held_out else self.trained
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(tokens) - size.length - 1, (size.rows, 1), generator=generator)
        ids = tokens[starts + torch.arange(size.length + 1)].to(device)
        return TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(size.rows, size.length, device=device))


def train(
    size: Size, optimizer: AdamConfig, steps: int, corpus: Corpus, device: torch.device, validations: int
) -> dict[str, Any]:
    """Return the validation losses, as ``[step, loss]``, and the seconds."""
    config = GPTConfig(
        num_layers=size.layers, hidden_size=size.hidden, num_heads=size.heads, ffn_hidden_size=size.ffn,
        vocab_size=VOCABULARY, max_sequence_length=size.length, activation="swiglu", tie_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        root = GPT(config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = megalight.parallelize(root, device=device, dtype=dtype, seed=1)
    stepper, scheduler = optimizer.build(root.named_parameters(), steps)
    assert scheduler is not None
    training = megalight.Training(model, stepper, GPTModule(config))
    held_out = [corpus.batch(size, seed, device, held_out=True) for seed in range(16)]
    curve, began = [], time.perf_counter()
    for step in range(steps):
        training.forward_backward([corpus.batch(size, step, device)])
        training.clip_grad_norm(1.0)
        stepper.step()
        scheduler.step()
        if (step + 1) % max(1, steps // validations) == 0 or step + 1 == steps:
            model.eval()
            curve.append([step + 1, float(training.evaluate(held_out)["loss"])])
            model.train()
    return {"steps": steps, "loss": curve[-1][1], "seconds": time.perf_counter() - began, "curve": curve}


def configured(size: Size, steps: int, adam: float, muon: float | None, device: torch.device) -> AdamConfig:
    how = None
    if muon is not None:
        how = MuonConfig(lr=muon, ns_dtype="bfloat16" if device.type == "cuda" else "float32")
    return AdamConfig(
        lr=adam, weight_decay=0.1, schedule=LinearDecay(warmup=max(1, steps // 20), min_ratio=0.0), muon=how
    )


def measure(options: argparse.Namespace, device: torch.device, note: Callable[[dict[str, Any]], None]) -> None:
    size, short = SIZES[options.size], max(2, round(options.steps * options.tuning))
    result: dict[str, Any] = {
        "command": "python benchmarks/muon_convergence.py " + " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "device": "CPU" if device.type == "cpu" else torch.cuda.get_device_name(),
        "size": options.size,
        "tokens_per_step": size.rows * size.length,
        "trials": [],
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(size, options.corpus or folder)
    result["tokens"] = len(corpus.trained)
    earlier: list[dict[str, Any]] = []
    if options.resume:
        found = json.loads(options.resume.read_text(encoding="utf-8"))
        if (found["size"], found["tokens"]) != (options.size, result["tokens"]):
            raise SystemExit(
                f"{options.resume} is of another size or corpus ({found['size']}, {found['tokens']} tokens)"
            )
        earlier = [*found["trials"], *found["runs"].values()]

    def trained(steps: int, adam: float, muon: float | None, validations: int) -> dict[str, Any]:
        """Return a run, that of the earlier file if it is there."""
        same = {"adam": adam, "muon": muon, "steps": steps}
        for each in earlier:
            if same.items() <= each.items() and len(each["curve"]) >= min(steps, validations):
                return each
        return same | train(size, configured(size, steps, adam, muon, device), steps, corpus, device, validations)

    best: dict[str, float] = {}
    for name, rates in (("adam", size.adam), ("muon", size.muon)):
        losses = {}
        for rate in rates:
            pair = (rate, None) if name == "adam" else (best["adam"], rate)
            result["trials"].append(trained(short, *pair, validations=1))
            losses[rate] = result["trials"][-1]["loss"]
            note(result)
        best[name] = min(losses, key=losses.__getitem__)
    result["rates"] = best
    for name, fraction in (("adam", 1.0), *(("muon", fraction) for fraction in FRACTIONS)):
        rate = best["muon"] if name == "muon" else None
        steps = round(options.steps * fraction)
        result["runs"][f"{name} {fraction:g}"] = trained(steps, best["adam"], rate, VALIDATIONS)
        note(result)
    aim = result["runs"]["adam 1"]["loss"]
    result["steps_of_muon"] = steps_for(aim, [result["runs"][f"muon {fraction:g}"] for fraction in FRACTIONS])
    result["share_of_steps"] = result["steps_of_muon"] and result["steps_of_muon"] / options.steps
    note(result)


def steps_for(loss: float, runs: list[dict[str, Any]]) -> float | None:
    """Return the length of a run that ends with a loss, between those of runs of several lengths.

    That of the shortest run if even that ends lower; None: not even the longest does.
    """
    ordered = sorted(runs, key=lambda run: run["steps"])
    lengths, losses = [run["steps"] for run in ordered], [run["loss"] for run in ordered]
    if losses[-1] > loss:
        return None
    return float(np.interp(-loss, [-each for each in losses], lengths))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the curves of validation losses."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "megalight"})
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, run in result["runs"].items():
        # Not from the beginning, whose losses would hide the differences.
        shown = [pair for pair in run["curve"] if pair[0] >= run["steps"] / 5]
        axes.plot(
            *zip(*shown, strict=True),
            color="tab:gray" if name == "adam 1" else None,
            label=f"{name.split()[0].capitalize()}, {run['steps']:,} steps",
        )
    axes.axhline(result["runs"]["adam 1"]["loss"], color="tab:gray", linewidth=0.8, linestyle=":")
    axes.set(xlabel="steps", ylabel="validation loss")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tuning", type=float, default=0.1, help="share of the steps in which each rate is tried")
    parser.add_argument("--resume", type=Path, help="an earlier result, whose runs are not repeated")
    parser.add_argument("--corpus", help="folder for the tokens, which a later call reads again")
    parser.add_argument("--draw", type=Path, help="draw the curves of RESULT.json into this file, and train nothing")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.result.read_text(encoding="utf-8")), options.draw)
        return
    device = torch.device("cpu" if options.size != "125m" or not torch.cuda.is_available() else "cuda")

    def note(result: dict[str, Any]) -> None:
        options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        runs = {name: run["loss"] for name, run in result["runs"].items()}
        trials = [[each["adam"], each["muon"], each["loss"]] for each in result["trials"]]
        print(json.dumps({"trials": trials, "runs": runs}), flush=True)

    measure(options, device, note)
    print(options.result.read_text(encoding="utf-8")[-80:])


if __name__ == "__main__":
    main()
