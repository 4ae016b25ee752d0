"""``megalight bench ROW``: measure rows of the performance table on this machine, beside other frameworks."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from megalight.errors import ConfigurationError, integer

DESCRIPTION = "time training steps beside other frameworks, row by row of the performance table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run, one after another; none: list them")
    parser.add_argument("--list", action="store_true", help="list the rows and what they need")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench"),
        metavar="DIR",
        help="folder for one JSON file per row (default: runs/bench)",
    )
    parser.add_argument(
        "--peers", nargs="*", help="frameworks to run beside Megalight; without a name, none (default: as in the row)"
    )
    parser.add_argument("--steps", type=int, help="steps to time (default: as in the row)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="limit per peer and row (default: 900)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands without running them")


def run(arguments: argparse.Namespace) -> int:
    """Run or list the rows. Returns 1 if Megalight failed in a row."""
    if arguments.steps is not None:
        integer("--steps", arguments.steps)
    if not arguments.timeout > 0:
        raise ConfigurationError(f"--timeout is {arguments.timeout:g} seconds; it must be above 0.")
    bench = benchmarks()
    if arguments.peers and not (arguments.rows or arguments.list):
        # `--peers hf tiny-cpu` takes the row for a peer; a list of rows would not say why nothing ran.
        raise ConfigurationError(
            f"--peers {' '.join(arguments.peers)} leaves no row; name rows first: megalight bench ROW --peers "
            f"{arguments.peers[0]}. See: megalight bench --list"
        )
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
    """Import ``benchmarks.bench`` from a checkout of the repository.

    Args:
        places: folders to look in. None: the folder this package was installed from, and the working directory.

    Raises:
        ConfigurationError: no folder is a checkout; benchmarks are not part of the installed package.
    """
    # A checkout has benchmarks beside the package. An installed package has none.
    for place in places if places is not None else (Path(__file__).resolve().parents[3], Path.cwd()):
        if (place / "benchmarks" / "bench.py").is_file():
            if str(place) not in sys.path:
                sys.path.insert(0, str(place))
            return importlib.import_module("benchmarks.bench")
    raise ConfigurationError(
        "megalight bench needs the repository, because benchmarks are not part of the installed package. Clone it, and "
        "run the command in its folder or install it from there: pip install -e ."
    )
