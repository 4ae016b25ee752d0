"""The peers that run a training step: Megalight and others. Each has one file, which is imported on request.

A runner is a class with ``why_not(step) -> str | None``, which has only cheap imports, and ``run(step, meter)``, which
trains ``meter.total`` steps with AdamW, clipping at norm 1 and float32 gradients or masters on random tokens.
``check(step)`` runs first. It raises if the results are wrong.
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
    "peft": ("low_rank", {"compiled": False}),
    "peft-compile": ("low_rank", {"compiled": True}),
    "peft-compile-bf16": ("low_rank", {"compiled": True, "half": True}),
    "fully-shard": ("fully_shard", {}),
    "fsdp2": ("fsdp2", {}),
    "mfsdp": ("megatron_fsdp", {}),
    "mcore-te": ("megatron_core", {"te": True}),
    "mcore-local": ("megatron_core", {"te": False}),
}
"""Name -> the module in this package with its ``Runner``, and the arguments of that class."""


class Runner(Protocol):
    """The interface of ``Runner`` in each module."""

    def why_not(self, step: Step) -> str | None: ...

    def check(self, step: Step) -> dict[str, Any]: ...

    def run(self, step: Step, meter: Any) -> None: ...


def load(name: str) -> Runner:
    """Make the runner with this name."""
    module, arguments = PEERS[name]
    return cast(Runner, importlib.import_module(f"{__name__}.{module}").Runner(**arguments))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
