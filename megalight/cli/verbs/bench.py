"""``megalight bench ROW``: rows of the performance table, measured here, with peers beside them."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from megalight.errors import ConfigurationError


def describe() -> str:
    """The verb's line in the overview."""
    return "time training steps beside other frameworks, row by row of the performance table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run, one after another; none: list them")
    parser.add_argument("--list", action="store_true", help="list the rows, and what they need")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="one JSON per row goes here (runs/bench)"
    )
    parser.add_argument(
        "--peers", nargs="*", help="who runs beside Megalight; no word: nobody (default: as the row says)"
    )
    parser.add_argument("--steps", type=int, help="steps to time (default: as the row says)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="for each peer in each row (900)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run them, or list them; returns 1 when Megalight failed in a row."""
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigurationError(f"--steps {arguments.steps}; at least 1 step must be timed.")
    bench = benchmarks()
    if arguments.list or not arguments.rows:
        bench.show()
        return 0
    return int(
        bench.run(
            arguments.rows,
            out=arguments.out,
            peers=arguments.peers,
            steps=arguments.steps,
            limit=arguments.timeout,
            dry=arguments.dry_run,
        )
    )


def benchmarks(places: tuple[Path, ...] | None = None) -> ModuleType:
    """The module ``benchmarks.bench`` of the repository.

    Args:
        places: folders to look in; None: where this package was installed from, and the working directory.

    Raises:
        ConfigurationError: none of them is a checkout: benchmarks are no part of the installed package.
    """
    for place in places if places is not None else (Path(__file__).resolve().parents[3], Path.cwd()):
        if (place / "benchmarks" / "bench.py").is_file():
            if str(place) not in sys.path:
                sys.path.insert(0, str(place))
            return importlib.import_module("benchmarks.bench")
    raise ConfigurationError(
        "megalight bench needs the repository, since benchmarks are no part of the installed package. "
        "Clone it, and run the command in its folder or install it from there: pip install -e ."
    )
