"""Make the table and the plot of the performance page from the results in benchmarks/results/*.json.

    python benchmarks/render.py            # rewrite docs/performance/index.md and the table of README.md; with
                                           # matplotlib, the charts too
    python benchmarks/render.py --check    # exit 1 if a page differs from the results

A result belongs to the row of :data:`benchmarks.rows.ROWS` with the same step. Rooflines are computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.breakdown import PARTS
from benchmarks.roofline import RATES, roofline
from benchmarks.rows import ROWS, Row
from benchmarks.step import Step
from megalight.imports import has, require

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance" / "index.md"
PLOT, PARTS_PLOT, README_PLOT = (PAGE.with_name(f"{name}.svg") for name in ("rows", "parts", "speed"))
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS = "megalight"

HEADLINES = (
    "8b-16l-bf16", "8b-16l-fp8-delayed", "qwen3-moe-8l", "llama3-8b-dp4-graph-copies-mbs2", "llama3-8b-dp4-full",
    "llama3-8b-tp4-graph-flash", "llama3-8b-pp4-vpp4-zb-flash", "llama3-8b-cp4-128k-all-gather-offload",
)  # fmt: skip
"""Rows of the README's table."""

HOPPER = {"bf16": 989, "fp8": 1979}
PEAKS = {"NVIDIA H200": HOPPER, "NVIDIA H100 80GB HBM3": HOPPER}
"""Dense TFLOP/s by the vendor's data sheet."""

PLACES = (*PARTS[:-1], "computing", PARTS[-1], "idle", "accounted")
"""Parts of a breakdown, in the order of the table."""

LABELS = ("matmuls", "attention", "optimizer", "other kernels", "exposed communication", "idle")

ABOUT = {
    "8b-16l-bf16": "8B width, 16 layers, 4096 tokens, bf16",
    "8b-16l-fp8-delayed": "8B width, 16 layers, FP8, delayed scaling",
    "qwen3-moe-8l": "Qwen3-30B-A3B cut to 8 layers, balanced routing",
    "llama3-8b-dp4-graph-copies-mbs2": "Llama-3-8B, DP=4, CUDA graph",
    "llama3-8b-dp4-full": "Llama-3-8B, full sharding, DP=4",
    "llama3-8b-tp4-graph-flash": "Llama-3-8B, TP=4 with SP, CUDA graph, flash-attn 4",
    "llama3-8b-pp4-vpp4-zb-flash": "Llama-3-8B, PP=4, VPP=4, zero bubble, flash-attn 4",
    "llama3-8b-cp4-128k-all-gather-offload": "Llama-3-8B, CP=4, 131,072 tokens, activations offloaded",
}
"""Short names of the rows in the README."""

Record = dict[str, Any]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Format a markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


def fitting(tflops: float) -> str:
    return number(tflops, ".0f" if tflops >= 10 else ".3g")


def identity(step: Step) -> Step:
    """Return the step without the numbers of steps, which may differ between runs of the same row."""
    return replace(step, steps=0, warmup=0)


def steps_of(record: Record) -> Iterator[tuple[str, Step, Record]]:
    """Yield peer, step and measured row of each run in a file of :mod:`benchmarks.dense_step`."""
    base = Step.of_record(record["shape"])
    for row in record["rows"]:
        peer, _, change = row["peer"].partition(" ")
        yield peer, base.but(change), row


def collect(folder: Path = RESULTS, files: str = "*.json") -> dict[str, Record]:
    """Return row -> device, GPUs, file, and measured rows by peer. Files of ``megalight bench`` have priority."""
    names = {(identity(row.step), row.gpus): name for name, row in ROWS.items()}
    found: dict[str, Record] = {}
    for path in sorted(folder.glob(files), key=lambda path: (path.stem not in ROWS, path.name)):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not {"shape", "rows", "device", "gpus"} <= set(record) or "layers" not in record["shape"]:
            continue
        if not all("peer" in row for row in record["rows"]):
            continue
        for peer, step, row in steps_of(record):
            name = names.get((identity(step), record["gpus"]))
            if name and "seconds" in row:
                entry = found.setdefault(
                    name, {"file": path.name, "device": record["device"], "gpus": record["gpus"], "peers": {}}
                )
                if entry["file"] == path.name:
                    entry["peers"].setdefault(peer, row)
    return found


def least(row: Row, device: str) -> float | None:
    """Return the roofline's TFLOP/s per GPU."""
    if device not in RATES:
        return None
    return roofline(row.step, RATES[device], row.gpus // row.step.model_ranks).tflops


def parts(measured: Record) -> dict[str, float]:
    """Return each part's fraction of the step, averaged over ranks. Older results do not divide computation further."""
    ranks = [found for found in measured.get("breakdown_by_rank", []) if found]
    if not ranks:
        return {}
    known = [part for part in (*PARTS, "computing", "idle") if part in ranks[0]]
    shares = {
        part: sum(found[part] / found.get("seconds", found["step"]) for found in ranks) / len(ranks) for part in known
    }
    sums = [found["accounted"] for found in ranks if "accounted" in found]
    return {**shares, **({"accounted": min(sums)} if sums else {})}


def page_table(found: dict[str, Record]) -> str:
    """Make a table with one line per measured row: Megalight, its roofline, the aim, and the peers."""
    lines = []
    for name, row in ROWS.items():
        if name not in found or OURS not in found[name]["peers"]:
            continue
        entry = found[name]
        ours = entry["peers"][OURS]
        bound = least(row, entry["device"])
        beside = [
            f"{peer} {fitting(it['tflops'])} ({it['peak_gib']:.1f} GiB): {ours['tflops'] / it['tflops']:.2f} x"
            for peer, it in entry["peers"].items()
            if peer != OURS
        ]
        lines.append(
            [
                f"`{name}`",
                f"{entry['gpus']} x {entry['device'].removeprefix('NVIDIA ')}",
                number(ours["seconds"], ".3f"),
                number(ours.get("seconds_alone"), ".3f"),
                fitting(ours["tflops"]),
                number(ours["tokens_per_second"]),
                number(ours["peak_gib"], ".1f"),
                number(bound),
                number(bound and ours["tflops"] / bound, ".0%"),
                aim_of(row, ours["tflops"], rate_of(found, row)),
                "yes" if "twin_losses" in ours.get("checks", {}) else "",
                ", ".join(beside),
                ", ".join(f"{peer} {number(rate)}" for peer, rate in row.figures.items()),
                f"[json](../../benchmarks/results/{entry['file']})",
            ]
        )
    columns = ["row", "on", "s per step", "alone", "TFLOP/s", "tokens/s", "GiB", "roofline", "of it", "aim", "checked",
               "peers", "earlier", "from"]  # fmt: skip
    return markdown(columns, lines)


def rate_of(found: dict[str, Record], row: Row) -> float | None:
    """Return the TFLOP/s of the row with which this one is compared."""
    if row.against is None or row.against[0] not in found:
        return None
    other: float | None = found[row.against[0]]["peers"].get(OURS, {}).get("tflops")
    return other


def aim_of(row: Row, tflops: float, other: float | None) -> str:
    """Format the aim of a row, and whether it is reached.

    Args:
        other: TFLOP/s of the row with which it is compared.
    """
    aim, words = row.aim, number(row.aim)
    if row.against:
        name, times = row.against
        aim = other and other * times
        words = f"{times:g} x `{name}`" + (f" = {aim:.0f}" if aim else "")
    if not aim:
        return words
    return f"{words}: met" if tflops >= aim else f"{words}: {1 - tflops / aim:.1%} short"


def missing(found: dict[str, Record]) -> str:
    """List the rows that have an aim but were not measured."""
    names = [f"`{name}`" for name, row in ROWS.items() if (row.aim or row.against) and name not in found]
    return f"Not measured: {', '.join(names)}.\n\n" if names else ""


def parts_table(found: dict[str, Record]) -> str:
    """Make a table with one line per profiled row: the parts of its time."""
    lines = []
    for name in ROWS:
        shares = parts(found.get(name, {}).get("peers", {}).get(OURS, {}))
        if shares:
            lines.append([f"`{name}`", *(number(shares.get(part), ".1%") for part in PLACES)])
    columns = ["row", "matmuls", "attention", "optimizer", "other kernels", "all computing", "exposed", "idle", "sum"]
    return markdown(columns, lines)


def rows_table() -> str:
    """Make a table of the steps of all rows."""
    lines = [
        [f"`{name}`", row.about, str(row.gpus), ", ".join(row.peers), " ".join(row.step.words()).replace("|", "\\|")]
        for name, row in ROWS.items()
    ]
    return markdown(["row", "what", "GPUs", "peers", "arguments of `benchmarks/dense_step.py`"], lines)


def row_table(record: Record) -> str:
    """Make the table of one run of a row: all peers, also failed ones, and the fractions of the step by part."""
    rows = record["rows"]
    ours = next((row for row in rows if row["peer"] == OURS and "seconds" in row), None)
    lines, notes = [], []
    for row in rows:
        if "seconds" not in row:
            notes.append(f"{row['peer']}: {'refused: ' + row['refused'] if 'refused' in row else 'failed'}")
            continue
        ratio = ours["tflops"] / row["tflops"] if ours else None
        lines.append(
            [
                row["peer"],
                number(row["seconds"], ".4f"),
                number(row.get("seconds_alone"), ".4f"),
                fitting(row["tflops"]),
                number(row["tokens_per_second"]),
                number(row["peak_gib"], ".1f"),
                number(ratio, ".2f"),
                number(row.get("share_of_roofline"), ".0%"),
                *(number(parts(row).get(part), ".1%") for part in PLACES),
            ]
        )
    columns = ["peer", "s/step", "alone", "TFLOP/s", "tokens/s", "GiB", "ours / it", "of roofline", "matmuls",
               "attention", "optimizer", "other", "computing", "exposed", "idle", "sum"]  # fmt: skip
    return "\n".join([markdown(columns, lines), *notes])


def verdict(row: Row, record: Record, folder: Path) -> str:
    """Format roofline and aim of one run and the speed relative to each peer, as far as known, in one line.

    Args:
        folder: the folder with the results of other rows.
    """
    bound = least(row, record.get("device", ""))
    words = [f"roofline {bound:.0f} TFLOP/s"] if bound else []
    ours = next((found for found in record["rows"] if found["peer"] == OURS and "seconds" in found), None)
    if (row.aim or row.against) and ours:
        # That row's file alone: a folder of the user may hold others, of any kind.
        found = collect(folder, f"{row.against[0]}.json") if row.against else {}
        words.append(f"aim {aim_of(row, ours['tflops'], rate_of(found, row))}")
    if ours:
        others = [found for found in record["rows"] if found is not ours and "seconds" in found]
        words += [f"{ours['tflops'] / it['tflops']:.2f} x {it['peer']}" for it in others]
    words += [f"measured earlier: {peer} {rate:.0f}" for peer, rate in row.figures.items()]
    return "; ".join(words) + "\n" if words else ""


def headlines(found: dict[str, Record]) -> str:
    """Make the README's table: the share of what the measured rates allow, and of the data sheet's peak."""
    lines = []
    for name in HEADLINES:
        row, entry = ROWS[name], found[name]
        ours, bound = entry["peers"][OURS], least(row, entry["device"])
        peak = PEAKS[entry["device"]]["fp8" if row.step.precision == "fp8" else "bf16"]
        peers = {peer: it["tflops"] for peer, it in entry["peers"].items() if peer != OURS} or row.figures
        lines.append(
            [
                ABOUT[name],
                f"{entry['gpus']} x {entry['device'].removeprefix('NVIDIA ')}",
                fitting(ours["tflops"]),
                number(bound and ours["tflops"] / bound, ".0%"),
                number(ours["tflops"] / peak, ".0%"),
                ", ".join(f"{peer} {fitting(rate)}" for peer, rate in peers.items()),
            ]
        )
    columns = ["", "on", "TFLOP/s per GPU", "of sustained rates", "of peak", "peers"]
    return markdown(columns, lines)


def blocks(found: dict[str, Record]) -> str:
    """Make the text between the page's markers."""
    return (
        f"{page_table(found)}\n\n{missing(found)}![TFLOP/s per GPU by row]({PLOT.name})\n\n"
        f"Where a step's time goes, Megalight, means over the ranks:\n\n"
        f"![Parts of a step]({PARTS_PLOT.name})\n\n{parts_table(found)}\n\n"
        f"The rows:\n\n{rows_table()}"
    )


def page(text: str, measured: str) -> str:
    """Return the page with a new measured part."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{measured}\n{END}", text, flags=re.DOTALL
    )


def pages(found: dict[str, Record]) -> dict[Path, str]:
    """Return the new text of each page with measured parts."""
    parts = {PAGE: blocks(found), README: headlines(found)}
    return {path: page(path.read_text(encoding="utf-8"), text) for path, text in parts.items()}


def points(found: dict[str, Record]) -> list[dict[str, Any]]:
    """Return the values that the plot shows."""
    return [
        {
            "row": name,
            "roofline": least(ROWS[name], found[name]["device"]),
            "aim": ROWS[name].aim,
            "peers": {peer: row["tflops"] for peer, row in found[name]["peers"].items()},
        }
        for name in ROWS
        if name in found and OURS in found[name]["peers"]
    ]


def headline_points(found: dict[str, Record]) -> list[dict[str, Any]]:
    """Return the values that the README's plot shows: its rows by their short names, with peers of earlier calls."""
    rows = {point["row"]: point for point in points(found)}
    peers = {name: {**ROWS[name].figures, **rows[name]["peers"]} for name in HEADLINES}
    return [
        {**rows[name], "row": "\n".join(wrap(ABOUT[name], 36)), "aim": None, "peers": peers[name]} for name in HEADLINES
    ]


def digest(shown: Any) -> str:
    """Return a hash of the points, which shows whether a plot is up to date."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def plot(shown: list[dict[str, Any]], output: Path) -> None:
    """Plot bars of TFLOP/s per GPU, with peers, aims and rooflines as marks."""
    matplotlib = require("matplotlib", "the plot")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "megalight"})
    pyplot = require("matplotlib.pyplot", "the plot")
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.4 * max(1, len(shown))), layout="constrained")
    places = range(len(shown))
    axes.barh(places, [point["peers"][OURS] for point in shown], height=0.6, color="#4c72b0", label="Megalight")
    for key, mark, color in (("roofline", "|", "black"), ("aim", "d", "#55a868")):
        some = [(point[key], place) for place, point in zip(places, shown, strict=True) if point[key]]
        if some:
            axes.scatter(*zip(*some, strict=True), marker=mark, s=60, color=color, label=key, zorder=3)
    others = sorted({peer for point in shown for peer in point["peers"]} - {OURS})
    for peer, color in zip(others, ("#c44e52", "#dd8452", "#8172b3", "#937860", "#da8bc3"), strict=False):
        some = [
            (point["peers"][peer], place) for place, point in zip(places, shown, strict=True) if peer in point["peers"]
        ]
        axes.scatter(*zip(*some, strict=True), marker="x", s=36, color=color, label=peer, zorder=3)
    axes.set_yticks(places, [point["row"] for point in shown])
    axes.invert_yaxis()
    axes.set_xlabel("model TFLOP/s per GPU")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(output, metadata={"Date": None, "Description": f"points {digest(shown)}"})
    pyplot.close(figure)


def shares(found: dict[str, Record]) -> dict[str, dict[str, float]]:
    """Return the parts of a step of each headline that was profiled in full."""
    known = {name: parts(found[name]["peers"][OURS]) for name in HEADLINES}
    return {name: part for name, part in known.items() if PARTS[0] in part}


def plot_parts(shown: dict[str, dict[str, float]], output: Path) -> None:
    """Plot where the time of a step goes: one bar per row, one color per part."""
    matplotlib = require("matplotlib", "the plot")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "megalight"})
    pyplot = require("matplotlib.pyplot", "the plot")
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.34 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    colors = ("#4c72b0", "#8172b3", "#937860", "#dd8452", "#c44e52", "#cccccc")
    for part, label, color in zip((*PARTS, "idle"), LABELS, colors, strict=True):
        widths = [100 * share[part] for share in shown.values()]
        axes.barh(list(shown), widths, left=left, height=0.6, color=color, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of a step")
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(output, metadata={"Date": None, "Description": f"points {digest(shown)}"})
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    check = parser.parse_args().check
    found = collect()
    after = pages(found)
    if check:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in after.items()))
    for path, text in after.items():
        path.write_text(text, encoding="utf-8")
    if has("matplotlib"):
        plot(points(found), PLOT)
        plot(headline_points(found), README_PLOT)
        plot_parts(shares(found), PARTS_PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
