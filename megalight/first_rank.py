"""Which process speaks for a run: rank 0 says what all ranks have alike."""

from __future__ import annotations

import logging
import os
import sys


def launch_rank() -> int:
    """Return the rank from the environment of torchrun, SLURM or Lightning's launcher; 0 without a launcher."""
    # Only numbers: some launchers set these variables to nothing.
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return int(os.environ.get("LOCAL_RANK") or 0) or int(os.environ.get("NODE_RANK") or 0)


def is_first() -> bool:
    """Return whether this process is rank 0 of its run, or alone."""
    # Forked and spawned workers have a process group, and no variables. Commands without torch have no group.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return launch_rank() == 0


def only_first(record: logging.LogRecord) -> bool:
    """Let a logger whose messages all ranks have alike speak on rank 0 alone: ``log.addFilter(only_first)``."""
    return is_first()
