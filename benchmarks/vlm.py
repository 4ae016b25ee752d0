"""Training steps of vision-language models on GPUs of a host: Megalight in bf16 and FP8, and `transformers`, compiled.

    python benchmarks/vlm.py RESULT.json
    python benchmarks/vlm.py RESULT.json --rows qwen2.5-vl
    python benchmarks/vlm.py RESULT.json --gpus 4
    python benchmarks/vlm.py RESULT.json --gpus 4 --level optim optim_grads_params --rows qwen2.5-vl
    python benchmarks/vlm.py RESULT.json --gpus 4 --level optim --graph iteration --rows llava-1.5
    python benchmarks/vlm.py RESULT.json --recipe delayed --rows fp8
    python benchmarks/vlm.py RESULT.json --gpus 4 --micro 2 1 --level optim optim_grads --rows llava-1.5
    python benchmarks/vlm.py RESULT.json --gpus 4 --micro 2 1 --level optim --graph iteration --recompute mlp.act
    python benchmarks/vlm.py RESULT.json --small [--gpus 2]        # tiny models on the CPU

Two shapes. ``llava-1.5``: CLIP-L/336 and 7B, rows of one image (576 tokens) and text. ``qwen2.5-vl``: the tower of
Qwen2.5-VL and 7B, rows of three images of different sizes and text. One GPU has half of the language model's layers and
a frozen tower. Several have the whole model, and train all of it (`--divisor` and `--tower` say otherwise), as replicas
with rows of their own.

All train by AdamW with clipping at norm 1 and float32 masters, on equal random pixels and tokens in every step. FP8 is
in both towers. `transformers` has no FP8 here. Its layers are compiled one by one, those of the dynamic tower only in
their MLPs, as its attention has loops over windows. On one GPU it has float32 weights under autocast, and a frozen
tower in bf16. On several it is sharded by FSDP2, layer by layer: bf16 computes, float32 are masters and sums of
gradients. Its level means what ours does: ``optim`` gathers a layer once for both passes and sums gradients after the
last micro-batch, ``optim_grads`` after each, and ``optim_grads_params`` gathers for each pass.

Before a row is timed, a narrow twin with weights that `transformers` drew is trained for a few steps in the row's
layout; its losses must be those of `transformers` in float32 on the global batch (`--unchecked` skips this).

Model FLOPs, per GPU: 6 x matmul weights of the language model (with the head, without the embedding) + causal
attention, but not what tokens without a loss skip behind the last attention; of the tower 6 x its weights +
attention for each patch, or 2 x if it is frozen; projector 6 x, but no gradient of its input for a frozen tower.
Recomputation is not counted.

Rows run in turn in a set of processes. The result is written after each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dense_step import PACKAGES
from benchmarks.image_text.measure import data_parallel_of, measure
from benchmarks.image_text.row import WAYS, Row
from benchmarks.image_text.shapes import SHAPES
from benchmarks.image_text.shapes import rows_of as rows_that_fit
from benchmarks.in_turn import add, in_turn, launcher
from megalight.errors import ConfigurationError
from megalight.imports import version
from megalight.parallel.data_parallel.options import Level
from megalight.parallel.mesh import end_at_exit

SCOPES = ("iteration", "layer")
RECIPES = ("delayed", "rowwise", "blockwise")
LEVELS = [level for level in get_args(Level) if level != "no_shard"]


def rows_of(a: argparse.Namespace) -> list[Row]:
    """Return the rows that were asked for, in the order of the words that ask for them."""
    several = a.gpus > 1
    every = [
        Row(
            shape,
            way,
            precision,
            a.gpus,
            level,
            tuple(a.sharding) if way == "megalight" else (),
            a.tower == "trained" if a.tower else several,
            a.divisor or (1 if several else 2),
            mbs,
            micro,
            a.small,
            a.unchecked,
            a.breakdown and way == "megalight",
            graph,
            recipe,
            recompute,
        )
        for level in (a.level or [LEVELS[-1] if several else LEVELS[0]])
        for shape in SHAPES
        for way, precision in WAYS
        for recipe in ("tensorwise", *(a.recipe if precision == "fp8" else ()))
        for graph in ("", *(a.graph if way == "megalight" else ()))
        for recompute in ((), *([tuple(a.recompute)] if a.recompute and way == "megalight" else []))
        for micro, mbs in batches_of(shape, a)
    ]
    asked = [
        row
        for word in a.rows
        for row in ([row for row in every if row.name == word] or [row for row in every if word in row.name])
    ]
    return list(dict.fromkeys(asked))


def batches_of(shape: str, a: argparse.Namespace) -> list[tuple[int, int | None]]:
    """Return numbers of micro-batches, and the rows of each: as many in a step as with the first number."""
    first = a.micro[0]
    rows = first * (a.mbs or rows_that_fit(shape, a.tower == "trained" if a.tower else a.gpus > 1))
    return [(micro, a.mbs if micro == first else rows // micro) for micro in a.micro]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Make a table, with the rate of each of our rows relative to the fastest one of `transformers` of its shape."""
    theirs = [row for row in rows if "transformers" in row["row"] and "seconds" in row]
    lines = ["| | s/step | TFLOP/s per GPU | tokens/s | peak GiB | x transformers |", "| --- |" + " ---: |" * 5]
    for row in rows:
        if "seconds" not in row:
            lines.append(f"| {row['row']} | {(row.get('refused') or row['failed']).splitlines()[0]} | | | | |")
            continue
        same = [peer["tokens_per_second"] for peer in theirs if peer["row"].split(",")[0] == row["row"].split(",")[0]]
        lines.append(
            f"| {row['row']} | {row['seconds']:.4f} | {row['tflops']:.1f} | {row['tokens_per_second']:.0f} | "
            f"{max(row['peak_gib']):.1f} | {format(row['tokens_per_second'] / max(same), '.2f') if same else ''} |"
        )
    return "\n".join(lines)


def run_ranks(asked: Path, out: Path) -> None:
    """Be one of the processes that run rows in turn."""
    end_at_exit()
    for row in map(Row.of, json.loads(asked.read_text(encoding="utf-8"))):
        found = measure(row)
        if os.environ.get("RANK", "0") == "0":
            add(out, found)


def arguments() -> argparse.ArgumentParser:
    """Make the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[""],
        help="rows with these names or words in their names, in this order",
    )
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each with rows of its own")
    parser.add_argument("--level", nargs="+", choices=LEVELS, help="what several ranks shard; the last one by default")
    parser.add_argument(
        "--sharding", nargs="+", default=[], help="options of our DataParallelOptions, as 'gathers:auto'"
    )
    parser.add_argument("--graph", nargs="+", default=[], choices=SCOPES, help="further rows of ours, as CUDA graphs")
    parser.add_argument("--tower", choices=("frozen", "trained"), help="trained on several GPUs by default")
    parser.add_argument("--divisor", type=int, help="have this part of the layers: 2 on one GPU by default, or 1")
    parser.add_argument("--mbs", type=int, help="rows of a micro-batch; by default what an H200 has room for")
    parser.add_argument(
        "--micro",
        type=int,
        nargs="+",
        default=[2],
        help="micro-batches of a step; further numbers make further rows, with as many rows of data in a step",
    )
    parser.add_argument(
        "--recompute", nargs="+", default=[], metavar="MODULE", help="further rows of ours, with these computed again"
    )
    parser.add_argument("--recipe", nargs="+", default=[], choices=RECIPES, help="further rows in FP8, by this recipe")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--unchecked", action="store_true", help="do not train the twins")
    parser.add_argument("--breakdown", action="store_true", help="profile a step of Megalight, too")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a row may take")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = arguments()
    a = parser.parse_args(words)
    if a.level and a.gpus == 1:
        parser.error("--level says what several ranks shard; give --gpus, too")
    micro = " ".join(map(str, a.micro))
    if min(a.micro) < 1 or (a.mbs is not None and a.mbs < 1):
        parser.error(f"--mbs {a.mbs} --micro {micro}: a step has at least one micro-batch of one row")
    if any(a.micro[0] % number for number in a.micro):
        parser.error(f"--micro {micro}: further numbers must divide the first one, for equally many rows in a step")
    if a.graph and a.small:
        parser.error(f"--graph {' '.join(a.graph)}: there are no CUDA graphs on the CPU; leave out --small")
    chosen = rows_of(a)
    if whole := [row.name for row in chosen if row.graph == "iteration" and row.gpus > 1 and row.level != "optim"]:
        parser.error(f"row '{whole[0]}': whole steps are recorded at level 'optim' only; choose that, or --graph layer")
    try:
        for row in chosen:
            data_parallel_of(row)
    except (ConfigurationError, TypeError, ValueError) as error:
        parser.error(f"--sharding {' '.join(a.sharding)}: {error}")
    if not a.small and torch.cuda.device_count() < a.gpus:
        parser.error(f"--gpus {a.gpus}: this machine has {torch.cuda.device_count()}. Try --small on the CPU.")
    command = [*launcher(a.gpus), str(Path(__file__).resolve()), "--ranks"]
    records = in_turn(command, [row.record() for row in chosen], a.result.with_suffix(".log"), a.limit)
    rows = list[dict[str, Any]]()
    for row, found in zip(chosen, records, strict=True):
        rows.append({"row": row.name, "failed": found} if isinstance(found, str) else found)
        record = {
            "command": " ".join(["benchmarks/vlm.py", "RESULT.json", *(sys.argv[1:] if words is None else words)[1:]]),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}
            | {name: known for name in PACKAGES if (known := version(name))},
            "rows": rows,
        }
        a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a later row may end the call
        print(table(rows[-1:]).splitlines()[2], flush=True)
        if "failed" in rows[-1]:
            print(rows[-1]["failed"], flush=True)
    print(table(rows), flush=True)
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    if sys.argv[1] == "--ranks":
        run_ranks(*map(Path, sys.argv[2:]))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end with it
        raise SystemExit(main())
