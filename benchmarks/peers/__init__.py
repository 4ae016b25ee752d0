"""Who runs a training step: Megalight, and others beside it. One file each, loaded when asked for.

A runner is a class with ``why_not(step) -> str | None``, which imports nothing heavy, and ``run(step, meter)``, which
trains ``meter.total`` steps with AdamW, clipping at norm 1 and float32 gradients or masters on random tokens.
``check(step)`` comes first, where a runner has it: it raises when the results would be wrong.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol, cast

from benchmarks.step import Step

PEERS = {
    "megalight": ("megalight", {}),
    "hf": ("huggingface", {"compiled": False}),
    "hf-compile": ("huggingface", {"compiled": True}),
    "fsdp2": ("fsdp2", {}),
    "mcore-te": ("megatron_core", {"te": True}),
    "mcore-local": ("megatron_core", {"te": False}),
}
"""Name -> the module of this package whose ``Runner`` it is, and that one's arguments."""


class Runner(Protocol):
    """What ``Runner`` of each module does."""

    def why_not(self, step: Step) -> str | None: ...

    def check(self, step: Step) -> dict[str, Any]: ...

    def run(self, step: Step, meter: Any) -> None: ...


def load(name: str) -> Runner:
    """The runner of that name."""
    module, arguments = PEERS[name]
    return cast(Runner, importlib.import_module(f"{__name__}.{module}").Runner(**arguments))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
