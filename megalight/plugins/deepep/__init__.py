"""DeepEP (https://github.com/deepseek-ai/DeepEP): exchanges of tokens by kernels of its own, over NVLink and RDMA.

A token is sent once to each rank that has experts for it, instead of once for each expert. Importing this folder
imports nothing of the package; a dispatcher does when a model is split.
"""

from __future__ import annotations

from megalight.parallel.expert import DISPATCHERS
from megalight.plugins.deepep.hybrid import HybridEPDispatcher
from megalight.plugins.deepep.normal import DeepEPDispatcher


def register() -> None:
    """Add the dispatchers."""
    DISPATCHERS.register("deepep")(DeepEPDispatcher)
    DISPATCHERS.register("hybridep")(HybridEPDispatcher)
