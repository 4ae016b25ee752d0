"""Run rows of :data:`benchmarks.rows.ROWS`: Megalight, then its peers, each in its own processes."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import render
from benchmarks.peers import PEERS
from benchmarks.rows import ROWS, Row
from megalight.errors import ConfigurationError, nearest

SCRIPT = Path(__file__).with_name("dense_step.py")
SAID = ("RESULT", "REFUSED", "twin:", "loss ")
LAST_LINES = 25
PATIENCE = 40.0
"""Seconds that torchrun gets to end its workers."""

LAUNCHED = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip
"""Variables of a launcher. Machines of clusters may have them, and a row of one process would wait for others."""


def rows_of(names: Iterable[str]) -> dict[str, Row]:
    """Return the rows with these names.

    Raises:
        ConfigurationError: a row does not exist.
    """
    for name in names:
        if name not in ROWS:
            raise ConfigurationError(f"there is no row {name!r}.{nearest(name, ROWS)} See: megalight bench --list")
    return {name: ROWS[name] for name in names}


def peers_of(row: Row, asked: Sequence[str] | None) -> list[str]:
    """Return Megalight and its peers: the row's own, or those that were requested.

    Raises:
        ConfigurationError: a peer does not exist.
    """
    for name in asked or ():
        if name in ROWS:
            raise ConfigurationError(
                f"{name!r} after --peers is a row; name rows first: megalight bench {name} --peers"
            )
        if name not in PEERS:
            raise ConfigurationError(f"there is no peer {name!r}.{nearest(name, PEERS)} Peers: {', '.join(PEERS)}.")
    # Each once: a second run would take the place of the first one's log.
    return list(dict.fromkeys([render.OURS, *(row.peers if asked is None else asked)]))


def command(row: Row, peer: str, out: Path) -> list[str]:
    """Return the command that runs one peer: the script, with torchrun for several processes."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.gpus)] if row.gpus > 1 else []
    )
    words = ["--peers", peer, *row.step.words(), "--breakdown", "--out", str(out)]
    return [sys.executable, *launcher, str(SCRIPT), *words]


def enough(rows: dict[str, Row]) -> None:
    """Refuse rows that need more GPUs than there are.

    Raises:
        ConfigurationError: there are too few. The message has the row, and the GPUs it needs and finds.
    """
    import torch

    here = torch.cuda.device_count()
    for name, row in rows.items():
        if row.step.device == "cuda" and row.gpus > here:
            raise ConfigurationError(
                f"row {name!r} needs {row.gpus} GPU{'s' * (row.gpus > 1)}; this machine has {here}. "
                "See: megalight bench --list"
            )


def prepare(folder: Path) -> None:
    """Make the folder for results, before hours of measuring go into it.

    Raises:
        ConfigurationError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Only an attempt tells it, also of full and read-only disks.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(
            f"--out {folder} cannot be written ({error.strerror}); name another folder."
        ) from error


def call(words: Sequence[str], environment: Mapping[str, str], log: Path, limit: float) -> str | None:
    """Run a command with its output in a file; return why it failed, or None. It leaves no process behind."""
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words, env={**own, **environment}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            return f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            return f"not done after {limit:.0f} s"
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process if it still runs. SIGTERM comes first: torchrun then ends its workers, which have own groups."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


def measure(row: Row, peer: str, log: Path, limit: float) -> dict[str, Any]:
    """Run one peer and return its record. If it failed, the record's row has the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        problem = call(command(row, peer, out), row.environment, log, limit)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith(SAID):
                print(f"  {line}", flush=True)
        if problem is None and not out.is_file():
            problem = "no result was written"
        if problem is None:
            record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return record
    print(f"  FAILED {peer}, {problem}; the whole of what it said is in {log}", flush=True)
    return {"rows": [{"peer": peer, "failed": "\n".join([problem, *lines[-LAST_LINES:]])}]}


def bench(name: str, row: Row, peers: Sequence[str], folder: Path, limit: float) -> dict[str, Any]:
    """Run a row, print its table, write ``folder/<name>.json``, and return its content.

    The file is written after each peer, so that an interruption loses the one that runs, and no other.
    """
    print(f"{name}: {row.about}", flush=True)
    path, records = folder / f"{name}.json", list[dict[str, Any]]()
    result = dict[str, Any]()
    for peer in peers:
        log = folder / f"{name}.{peer}.log"
        records.append(measure(row, peer, log, limit))
        if "failed" not in records[-1]["rows"][0]:
            log.unlink()
        result = together(name, row, peers, records)
        write(path, result)
    print(f"\n{render.row_table(result)}\n{render.verdict(row, result, folder)}{path}\n", flush=True)
    return result


def together(name: str, row: Row, peers: Sequence[str], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a row from those of the peers that have run so far."""
    result: dict[str, Any] = {"row": name, "about": row.about, "aim": row.aim, "measured": _now()}
    for record in reversed(records):  # ours is the first in the list, so its values override the others
        result.update(record)
    result["command"] = shlex.join(["megalight", "bench", name, "--peers", *peers[1:]])
    result["rows"] = [found for record in records for found in record["rows"]]
    return result


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a record. An interruption leaves the one before."""
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def run(
    names: Sequence[str],
    *,
    out: Path,
    peers: Sequence[str] | None = None,
    steps: int | None = None,
    limit: float = 900.0,
    dry: bool = False,
) -> int:
    """Run rows one after another, with at most ``limit`` seconds per peer. With ``dry``, only print the commands.

    Returns:
        0, or 1 if Megalight itself failed in a row.

    Raises:
        ConfigurationError: a row or peer is unknown, there are too few GPUs, or ``out`` cannot be written.
    """
    rows = rows_of(names)
    chosen = {name: peers_of(row, peers) for name, row in rows.items()}
    if steps is not None:
        rows = {name: replace(row, step=replace(row.step, steps=steps)) for name, row in rows.items()}
    if dry:
        for name, row in rows.items():
            for peer in chosen[name]:
                variables = [f"{variable}={value}" for variable, value in row.environment.items()]
                print(shlex.join([*variables, *command(row, peer, out / f"{name}.json")]))
        return 0
    enough(rows)
    prepare(out)
    failed = 0
    for name, row in rows.items():
        result = bench(name, row, chosen[name], out, limit)
        failed += "seconds" not in result["rows"][0]
    return int(failed > 0)


def show() -> None:
    """Print every row: name, GPUs, aim, and peers."""
    wide = max(map(len, ROWS))
    for name, row in ROWS.items():
        needs = f"{row.gpus} GPU" if row.step.device == "cuda" else "CPU"
        aim = f"aim {row.aim:.0f}" if row.aim else f"aim {row.against[1]:g} x {row.against[0]}" if row.against else ""
        with contextlib.suppress(BrokenPipeError):
            beside = f"; beside it: {', '.join(row.peers)}" if row.peers else ""
            print(f"{name:<{wide}}  {needs:<6} {aim:<8}  {row.about}{beside}")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
