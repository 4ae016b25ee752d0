"""Asynchronous saves: what the trainer does (:mod:`saves`), and the process that writes for it (:mod:`worker`).

Nothing here is imported by the package itself, so that a worker starts without torch.
"""

from __future__ import annotations
