"""Import this to have one command read here: each program that is forked later finds what that has cached.

A command reads the source of the classes that it names, and their arguments by signature: half a second of each.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megalight.cli import unknown_keys
from megalight.cli.lightning import MegalightCLI, _prepare
from tests.support.source import ROOT

WORDS = ["--config", str(ROOT / "recipes" / "demo.yaml")]


class _Reader(MegalightCLI):
    """Stops where a command has been read."""

    def parse_arguments(self, *args: Any) -> None:
        super().parse_arguments(*args)
        raise SystemExit


_prepare()
for read in (lambda: unknown_keys.check("fit", WORDS), lambda: _Reader(args=["fit", *WORDS])):
    with suppress(Exception, SystemExit):  # there is no data; and tests of commands tell what else is wrong
        read()
