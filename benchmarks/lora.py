"""Compare low-rank adapters on the Llama-3-8B shape with ``peft`` on ``transformers``: tokens per second and memory.

    python benchmarks/lora.py RESULT.json [--layers 16]
    python benchmarks/lora.py RESULT.json --tiny        # a tiny model on the CPU, to try the command

Each runner is a process of its own, started by the command of ``megalight bench``: one GPU, bf16, sequences of 4096
tokens, adapters of rank 16 on all linear layers of the layers, frozen weights in bf16. ``peft`` runs as it is, with
compiled layers, and with compiled layers and adapters in bf16; its best rate counts. Beside them we run with frozen
weights as int8 and as nf4 quantized values. Our losses are compared with float32 before anything is timed. The exit
code is 0 if we have 1.3 times the tokens per second at less memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import measure
from benchmarks.render import OURS
from benchmarks.rows import ROWS, Row

AIM = 1.3
"""Times the tokens per second of the best peer."""


def rows_of(layers: int | None, tiny: bool) -> list[tuple[str, Row]]:
    """Return peer and row of each process, in order."""
    row = ROWS["tiny-cpu-lora" if tiny else "llama3-8b-lora"]
    row = replace(row, step=replace(row.step, layers=layers or row.step.layers))
    stored = [replace(row, step=replace(row.step, base=form)) for form in ("int8", "nf4")]
    return [*((peer, row) for peer in (OURS, *row.peers)), *((OURS, each) for each in stored)]


def compare(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return our rate and memory relative to the fastest peer, and whether the aim is reached.

    Raises:
        SystemExit: a row failed, so there is nothing to compare.
    """
    done = [row for row in measured if "seconds" in row]
    others = [row for row in done if row["peer"].partition(" ")[0] != OURS]
    ours = done[0]
    if ours["peer"] != OURS or not others:
        raise SystemExit("nothing to compare: Megalight or all peers have failed")
    best = max(others, key=lambda row: float(row["tokens_per_second"]))
    times = ours["tokens_per_second"] / best["tokens_per_second"]
    return {
        "best_peer": best["peer"],
        "times_tokens_per_second": times,
        "times_memory": ours["peak_gib"] / best["peak_gib"],
        "met": times >= AIM and ours["peak_gib"] < best["peak_gib"],
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--layers", type=int, help="number of layers (default: all 32)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--timeout", type=float, default=240.0, help="limit in seconds for each process")
    arguments = parser.parse_args(words)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (peer, row) in enumerate(rows_of(arguments.layers, arguments.tiny)):
            print(f"{peer}: {row.about}", flush=True)
            record = measure(row, peer, Path(folder) / f"{number}.log", arguments.timeout)
            if row.step.base:
                record["rows"][0]["peer"] = f"{peer} base={row.step.base}"
            records.append(record)
    about = next((record for record in records if "device" in record), {})
    result = {
        **about,
        "command": " ".join(["benchmarks/lora.py", "RESULT.json", *sys.argv[2:]]),
        "rows": [row for record in records for row in record["rows"]],
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    found = result["comparison"] = compare(result["rows"])
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{found['times_tokens_per_second']:.2f} x {found['best_peer']} in tokens/s, "
        f"{found['times_memory']:.2f} x its memory",
        flush=True,
    )
    return 0 if found["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
