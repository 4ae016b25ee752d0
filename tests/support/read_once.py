"""Import this to have one command read here: each program that is forked later finds what that has cached.

A command reads the arguments of the classes that it names, which takes half a second.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megalight.cli.lightning import MegalightCLI, prepare
from tests.support.source import ROOT

WORDS = ["--config", str(ROOT / "recipes" / "demo.yaml")]


class _Reader(MegalightCLI):
    """Stops where a command has been read."""

    def parse_arguments(self, *args: Any) -> None:
        super().parse_arguments(*args)
        raise SystemExit


prepare()
with suppress(SystemExit):
    _Reader(args=["fit", *WORDS])
