"""Runs rows of a benchmark one after another in a set of processes, and goes on in a new set where one fails."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import PATIENCE, end

LAST_LINES = 60
"""Of what processes said; torchrun's own account of a failure takes twenty."""
PAUSE = 0.3
"""Seconds between looks for a new record."""


def launcher(gpus: int) -> list[str]:
    """Return the words that start a script with as many ranks."""
    own = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    return [sys.executable, *own]


def add(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file, for :func:`in_turn`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def in_turn(command: Sequence[str], rows: Sequence[dict[str, Any]], log: Path, limit: float) -> Iterator[Any]:
    """Yield the record of each row as soon as it is there, or a text that says why there is none.

    A row that fails or takes too long ends its processes. The rows behind it get new ones.

    Args:
        command: starts the processes. It gets two more words: a file with rows as JSON, and the file to which one of
            the processes calls :func:`add` after each of them.
        rows: they.
        log: file for what the processes say. It stays if a row failed.
        limit: seconds that a row may take; the first one of a set of processes has their start in it.
    """
    done, failed = 0, False
    with log.open("w", encoding="utf-8") as file:
        while done < len(rows):
            with tempfile.TemporaryDirectory() as folder:
                asked, out = Path(folder) / "rows.json", Path(folder) / "records.jsonl"
                asked.write_text(json.dumps(rows[done:]), encoding="utf-8")
                out.touch()
                process = subprocess.Popen(
                    [*command, str(asked), str(out)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
                try:
                    for record in _records(process, out, len(rows) - done, limit, log):
                        done += 1
                        failed |= isinstance(record, str)
                        yield record
                finally:
                    end(process)
    if not failed:
        log.unlink()


def _records(process: subprocess.Popen[bytes], out: Path, count: int, limit: float, log: Path) -> Iterator[Any]:
    """Yield the records of a set of processes, and last why one is missing."""
    seen, begun = 0, time.monotonic()
    while seen < count:
        code = process.poll()  # first: what was written before the end counts
        for line in out.read_text(encoding="utf-8").splitlines(keepends=True)[seen:]:
            if line.endswith("\n"):
                seen, begun = seen + 1, time.monotonic()
                yield json.loads(line)
        late = time.monotonic() - begun > limit
        if seen < count and (code is not None or late):
            problem = f"not done after {limit:.0f} s" if late else f"exit code {code}"
            said = log.read_text(encoding="utf-8", errors="replace").splitlines()
            yield "\n".join([problem, *said[-LAST_LINES:]])
            return
        time.sleep(PAUSE)
    with contextlib.suppress(subprocess.TimeoutExpired):  # all records are there; the caller ends it
        process.wait(PATIENCE)
