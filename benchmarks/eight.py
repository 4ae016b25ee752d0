"""Rows of eight GPUs: predicted before any of them has run, measured one after another, and tried on two GPUs.

    python benchmarks/eight.py                                  # prints the tables of docs/performance/eight-gpus.md
    python benchmarks/eight.py --run FOLDER --minutes 9         # measures rows beside their peers, on eight GPUs
    python benchmarks/eight.py --run FOLDER --minutes 9 --two   # their twins of two GPUs: the same options, few layers

A row keeps the share of the roofline (``benchmarks/roofline.py``: operations and bytes, each at its measured rate) that
a row of the same kind of layout has reached, but for the bubble of its pipeline: ``(pp - 1) / (micro vpp + pp - 1)`` of
the time, which a row with other micro-batches has in another measure. What messages expose is part of that share. Eight
ranks send 7/8 of what they gather, four ranks 3/4, so it grows where nothing hides them.

Rows run in the order of :data:`benchmarks.rows.ROWS`, Megalight and its peers in one set of processes. What is measured
is printed and written at once, in the form of ``megalight bench``. What fails ends its processes and no others: the
next peer gets new ones, and a peer that failed behind another runs once more, alone. A row that would not end in time
is left for a later call. A row with a file in the folder is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench, render
from benchmarks.in_turn import add, in_turn, launcher
from benchmarks.meter import ALONE
from benchmarks.roofline import RATES, roofline
from benchmarks.rows import ROWS, Row
from benchmarks.step import Step

RESULTS = Path(__file__).with_name("results")
GPU = "NVIDIA H200"
EIGHT = [name for name, row in ROWS.items() if row.like]
TWINS = {
    "llama3-8b-dp8": "layers=4",
    "llama3-8b-dp8-full": "layers=4",
    "llama3-8b-tp2dp4": "layers=4",
    "llama3-8b-tp4pp2": "layers=4 tp=1 micro=4 layout=Et*3|tL",
    "llama3-8b-tp4pp2-graph": "layers=4 tp=1 micro=4 layout=Et*3|tL",
    "llama3-70b-48l-tp4pp2": "layers=2 tp=2 pp=1 micro=4",
    "llama3-70b-48l-tp4pp2-fp8": "layers=2 tp=2 pp=1 micro=4",
    "qwen3-30b-a3b-ep8": "layers=4 ep=2",
    "qwen3-30b-a3b-ep8-fp8": "layers=4 ep=2",
    "llama3-8b-cp8-256k": "layers=4 cp=2 seq=65536",
}
"""Row -> what its twin of two GPUs has otherwise."""
AIM, AIM_OF_FOUR = 1.05, 0.95
"""Factors of the TFLOP/s of Megatron-core in the same call, and of the row of four GPUs."""
START, PREPARE, LIMIT = 20.0, 25.0, 240.0
"""Seconds: expected start of a set of processes; check, build and compilation of a peer; most for a peer."""
SLOWER = 1.5
"""Factor of our predicted seconds that the step of a peer is expected to take."""
LONG = 5.0
"""Seconds of a step that is not profiled: the three steps more would take too much of a loan."""


class Prediction(NamedTuple):
    """Figures of a row, per GPU.

    Attributes:
        bound: TFLOP/s of the roofline.
        share: the share of its roofline that the other row has reached, without its bubble.
        bubble: the share of the time in which stages wait.
        tflops: predicted TFLOP/s.
        tokens: predicted tokens per second.
        seconds: predicted seconds of a step.
    """

    bound: float
    share: float
    bubble: float
    tflops: float
    tokens: float
    seconds: float


def bubble_of(step: Step) -> float:
    """Return the share of the time in which stages of 1F1B wait."""
    return (step.pp - 1) / (step.micro * step.vpp + step.pp - 1)


def measured(row: Row) -> dict[str, Any]:
    """Return Megalight's figures of the row of four GPUs by which a row is predicted."""
    found: dict[str, Any] = json.loads((RESULTS / f"{row.like}.json").read_text())["rows"][0]
    return found


def predict(row: Row) -> Prediction:
    """Return what a row is expected to reach."""
    known, step = ROWS[row.like], row.step
    reached = measured(row)["tflops"] / _bound(known) / (1 - bubble_of(known.step))
    flops = step.tokens_per_gpu * step.flops_per_token
    tflops = _bound(row) * reached * (1 - bubble_of(step))
    seconds = flops / tflops / 1e12
    return Prediction(_bound(row), reached, bubble_of(step), tflops, step.tokens_per_gpu / seconds, seconds)


def _bound(row: Row) -> float:
    return roofline(row.step, RATES[GPU], row.gpus // row.step.model_ranks).tflops


def twin_of(name: str) -> Row:
    """Return a row's twin of two GPUs."""
    row = ROWS[name]
    step = row.step.but(TWINS[name])
    step = replace(step, layout=step.layout if step.pp > 1 else None)
    return replace(row, about=f"{row.about}: two GPUs, {TWINS[name]}", step=step, gpus=2, like="")


def steps_in(row: Row) -> list[int]:
    """Return the number of steps of Megalight and of each peer."""
    least = row.step.warmup + row.step.steps + ALONE
    return [least + 3 * is_profiled(row), *[least] * len(row.peers)]


def is_profiled(row: Row) -> bool:
    return bool(row.like) and predict(row).seconds < LONG


def duration(row: Row) -> float:
    """Return the seconds that a row is expected to take beside its peers, with the start of their processes."""
    ours, *theirs = steps_in(row)
    return START + PREPARE * (1 + len(theirs)) + predict(row).seconds * (ours + SLOWER * sum(theirs))


def state_bytes(row: Row) -> float:
    """Return the bytes of weights, gradients, masters and moments on the first rank, by the package's estimate."""
    import torch
    from torch import nn

    from benchmarks.peers.megalight import config_of, sharding_of
    from megalight.models.gpt import GPT
    from megalight.parallel.data_parallel import DataParallelOptions
    from megalight.parallel.estimate import estimate
    from megalight.parallel.layout import Layout
    from megalight.parallel.mesh import ParallelMesh
    from megalight.parallel.model import ParallelModel

    step = row.step
    layout = Layout(
        tensor_parallel=step.tp,
        sequence_parallel=step.tp > 1,
        pipeline_parallel=step.pp,
        pipeline_layout=step.layout,
        context_parallel=step.cp,
        expert_parallel=step.ep,
    )
    with torch.device("meta"):
        model = GPT(config_of(step))
    mesh = ParallelMesh(row.gpus, 0, tp=step.tp, pp=step.pp, cp=step.cp, ep=step.ep)
    (root,) = ParallelModel(model, mesh, layout).chunks
    options = DataParallelOptions(level=step.level, **sharding_of(step))  # type: ignore[arg-type]
    if not step.experts:
        return estimate(root, mesh.dp * mesh.cp, options).device
    # Experts have fewer replicas than the rest.
    parts = [nn.ParameterList(), nn.ParameterList()]
    for name, parameter in root.named_parameters():
        parts[".experts." in name].append(parameter)
    ranks = (mesh.dp * mesh.cp, mesh.size("edp"))
    return sum(estimate(part, count, options).device for part, count in zip(parts, ranks, strict=True))


def activation_bytes(step: Step) -> float:
    """Return the bytes that layers of the first stage keep for the backward pass.

    For each token, in 16 bits: inputs of both norms and what they return, queries, keys and values, what attention
    returns, gate, up and what the activation returns; with experts the last three for each choice, and the token as it
    goes to an expert and comes back. What is recomputed is left out; by :data:`benchmarks.rows.LONGEST`, MLPs of all
    layers but every fifth.
    """
    layers, ffn = float(step.layers), step.ffn * max(1, step.topk if step.experts else 1)
    if step.pp > 1 and step.layout:
        first = step.layout.split("|")[0].removeprefix("Et*")  # of layouts in these rows
        layers = float(first) * min(step.pp, step.micro)  # micro-batches in flight
    again = set(step.recompute)
    kept = 2 * step.hidden + 2 * step.heads * step.head_dim + 2 * step.kv * step.head_dim
    kept += 2 * step.topk * step.hidden if step.experts else 0
    kept += step.hidden * (("attention_norm" not in again) + ("mlp_norm" not in again))
    kept += ffn * (2 * (6 / 32 if any("[1-4" in name for name in again) else 1) + ("mlp.act" not in again))
    return 2.0 * step.mbs * step.seq / step.tp / step.cp * layers * kept


def memory(row: Row) -> tuple[float, float]:
    """Return GiB of a row's state, and of its activations: those of the row on four GPUs in the formula's ratio."""
    known = ROWS[row.like]
    ratio = activation_bytes(row.step) / activation_bytes(known.step)
    return state_bytes(row) / 2**30, ratio * (measured(row)["peak_gib"] - state_bytes(known) / 2**30)


def memory_table() -> str:
    """Return the predicted memory and time of rows as a table in Markdown."""
    lines = ["| row | state, GiB | activations, GiB | peak, GiB | with peers, s |", "|---|---|---|---|---|"]
    for name in EIGHT:
        state, activations = memory(ROWS[name])
        lines.append(
            f"| `{name}` | {state:.0f} | {activations:.0f} | {state + activations:.0f} | {duration(ROWS[name]):.0f} |"
        )
    return "\n".join(lines)


def table() -> str:
    """Return the predictions of speed as a table in Markdown."""
    lines = [
        "| row | roofline, TFLOP/s | share, of row | bubble | predicted TFLOP/s | tokens/s per GPU | step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in EIGHT:
        found, row = predict(ROWS[name]), ROWS[name]
        lines.append(
            f"| `{name}` | {found.bound:.0f} | {found.share:.2f}, `{row.like}` | {found.bubble:.1%} | "
            f"{found.tflops:.0f} | {found.tokens:,.0f} | {found.seconds:.2f} |"
        )
    return "\n".join(lines)


def run(names: Sequence[str], folder: Path, minutes: float, two: bool, alone: bool) -> int:
    """Measure rows until the time is over; return 1 if Megalight failed in one of them, or one is left."""
    end = time.monotonic() + 60 * minutes
    rows = {f"{name}-two" if two else name: twin_of(name) if two else ROWS[name] for name in names}
    if alone:
        rows = {name: replace(row, peers=()) for name, row in rows.items()}
    rows = {name: row for name, row in rows.items() if not (folder / f"{name}.json").exists()}
    bench.enough(rows)
    bench.prepare(folder)
    failed = False
    for name, row in rows.items():
        left, needed = end - time.monotonic(), 0.0 if two else duration(row)
        if needed > left or left < 0:
            print(f"{name}: not run, it needs about {needed:.0f} s, and {left:.0f} s are left", flush=True)
            failed = True
            continue
        begun = time.monotonic()
        result = measure(name, row, folder, min(LIMIT, left))
        print(f"{name}: took {time.monotonic() - begun:.0f} s; set aside: {needed:.0f} s\n", flush=True)
        failed |= "seconds" not in result["rows"][0]
    return int(failed)


def measure(name: str, row: Row, folder: Path, limit: float) -> dict[str, Any]:
    """Run a row beside its peers, print and write each figure as soon as it is there, and return the record."""
    print(f"{name}: {row.about}", flush=True)
    peers, log, result = bench.peers_of(row, None), folder / f"{name}.log", dict[str, Any]()
    found = dict[str, dict[str, Any]]()
    for peer, record in run_peers(row, peers, log, limit):
        found[peer] = record
        result = write(name, row, peers, found, folder)
    # What is behind another may lack memory that this one has left in use.
    for failed in [peer for peer in peers[1:] if "failed" in found[peer]["rows"][0]]:
        for peer, record in run_peers(row, [failed], log, limit):
            found[peer] = record
            result = write(name, row, peers, found, folder)
    print(f"{render.row_table(result)}\n{verdict(row, result)}", flush=True)
    return result


def run_peers(row: Row, peers: Sequence[str], log: Path, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each peer and its record as soon as it is there. Peers share a set of processes until one fails."""
    ours = is_profiled(row) and render.OURS
    asked = [{"peer": peer, "step": asdict(row.step), "breakdown": peer == ours} for peer in peers]
    variables = [f"{variable}={value}" for variable, value in row.environment.items()]
    command = ["env", *variables, *launcher(row.gpus), str(Path(__file__).resolve()), "--ranks"]
    for peer, record in zip(peers, in_turn(command, asked, log, limit), strict=True):
        whole = {"rows": [{"peer": peer, "failed": record}]} if isinstance(record, str) else record
        print(f"  {line_of(whole['rows'][0])}", flush=True)
        yield peer, whole


def write(name: str, row: Row, peers: Sequence[str], found: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write and return the record of a row from those of its peers so far."""
    result = bench.together(name, row, peers, [*found.values()])
    if row.like:
        result["predicted"] = predict(row)._asdict()
    bench.write(folder / f"{name}.json", result)
    return result


def line_of(figures: dict[str, Any]) -> str:
    """Return what one peer reached, or why it did not."""
    peer = figures["peer"]
    if "seconds" not in figures:
        return (
            f"REFUSED {peer}: {figures['refused']}" if "refused" in figures else f"FAILED {peer}: {figures['failed']}"
        )
    checked = figures["checks"].get("twin_difference")
    return (
        f"RESULT {peer}: {figures['seconds']:.4f} s/step, {figures['tflops']:.1f} TFLOP/s, "
        f"{figures['tokens_per_second']:.0f} tokens/s, peak {figures['peak_gib']:.1f} GiB, "
        + ("unchecked" if checked is None else f"losses differ from float32 by {checked:.1e}")
    )


def verdict(row: Row, result: dict[str, Any]) -> str:
    """Return in one line how far Megalight is from its prediction, its peers, and the row of four GPUs."""
    ours, *others = result["rows"]
    if "seconds" not in ours:
        return ""
    words = [f"{ours['tflops'] / it['tflops']:.2f} x {it['peer']} (aim {AIM})" for it in others if "seconds" in it]
    if row.like:
        words.append(f"{ours['tflops'] / predict(row).tflops:.2f} x predicted")
        words.append(f"{ours['tflops'] / measured(row)['tflops']:.2f} x {row.like} (aim {AIM_OF_FOUR})")
    return "; ".join(words)


def run_ranks(asked: Path, out: Path) -> None:
    """Measure peers of a row as one rank of torchrun; the first rank writes what it found."""
    import torch

    from benchmarks import dense_step

    rows = json.loads(asked.read_text())
    if rows[0]["step"]["device"] == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    for row in rows:
        step, peer = Step.of_record(row["step"]), row["peer"]
        found = dense_step.measure(peer, peer, step, checked=True, breakdown=row["breakdown"])
        if int(os.environ.get("RANK", "0")) == 0:
            add(out, dense_step.record_of(step, "", [found]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all rows of eight GPUs")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="measure rows, with one JSON file for each here")
    parser.add_argument("--two", action="store_true", help="measure the rows' twins of two GPUs")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--minutes", type=float, default=math.inf, help="do not start what would not end in this time")
    a = parser.parse_args()
    if unknown := set(a.rows) - set(EIGHT):
        parser.error(f"no rows of eight GPUs: {', '.join(sorted(unknown))}. Rows: {', '.join(EIGHT)}")
    if a.run:
        return run(a.rows or EIGHT, a.run, a.minutes, a.two, a.alone)
    print(f"{table()}\n\n{memory_table()}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        run_ranks(*map(Path, sys.argv[2:]))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end with it
        raise SystemExit(main())
