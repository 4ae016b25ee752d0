"""Draw the pictures of the documentation anew.

make demo && python tools/docs_pictures.py    # curves of the demo, its bar in a terminal, a pipeline's timeline
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
DEMO = Path("runs/demo")
COLUMNS = 136
FIT = """megalight fit -c recipes/demo.yaml --trainer.devices=1 --trainer.strategy.tensor_parallel=1
--trainer.strategy.sequence_parallel=false --trainer.enable_model_summary=true --trainer.max_steps=30
--trainer.val_check_interval=10 --model.config.num_layers=2 --model.config.hidden_size=64
--trainer.callbacks=[] --trainer.enable_checkpointing=false --trainer.logger=false"""
TIMELINE = "megalight doctor --layers 8 --pipeline-parallel 4 --micro-batches 6 --output"
CODE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b.")


def in_terminal(command: list[str], columns: int) -> str:
    """Run a command in a terminal of ``columns`` columns, and return all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    with suppress(OSError):  # how Linux tells that the other end is closed
        while data := os.read(ours, 2**16):
            written += data
    os.close(ours)
    if code := process.wait():
        sys.exit(f"{shlex.join(command)} failed with {code}:\n{written.decode()}")
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end. Colors are dropped."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\r|\n|\x1b\[\d*[A-Za-z]|\x1b.)", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
        elif (code := CODE.fullmatch(part)) is not None:
            if code[2] == "A":
                row = max(0, row - int(code[1] or 1))
            elif code[2] == "K":
                lines[row] = lines[row][:column]
        elif part:
            lines[row] = f"{lines[row][:column]:<{column}}{part}{lines[row][column + len(part) :]}"
            column += len(part)
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def as_svg(lines: list[str]) -> str:
    """Return an image of a terminal with these lines."""
    width, height = 6.65 * COLUMNS + 24, 17 * len(lines) + 24
    rows = "\n".join(
        f'<text x="12" y="{17 * number + 25}" xml:space="preserve">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">\n'
        f'<rect width="100%" height="100%" rx="6" fill="#1e1e2e"/>\n'
        f'<g fill="#e4e4ef" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="11">\n{rows}\n</g>\n'
        "</svg>\n"
    )


def main() -> None:
    """Draw all pictures."""
    if not (DEMO / "lightning_logs").is_dir():
        sys.exit(f"{DEMO} holds no run; do `make demo` first.")
    runs = sorted((DEMO / "lightning_logs").iterdir(), key=lambda path: path.stat().st_mtime)
    subprocess.run(["megalight", "plot", "--join", *map(str, runs), "--output", str(ASSETS / "demo.svg")], check=True)
    subprocess.run([*TIMELINE.split(), str(ASSETS / "timeline.svg")], check=True)
    # Just before the end, as the last message stands behind the bar.
    written, _, _ = in_terminal(FIT.split(), COLUMNS).partition("`Trainer.fit`")
    shown = [line for line in screen(written) if line]
    (ASSETS / "bar.svg").write_text(as_svg([f"$ {FIT[: COLUMNS - 6]} ...", *shown]))


if __name__ == "__main__":
    main()
