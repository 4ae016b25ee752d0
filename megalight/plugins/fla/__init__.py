"""flash-linear-attention: the gated delta rule in its Triton kernels.

Importing this folder imports nothing of the package; the backend does when its name is asked for.
"""

from __future__ import annotations

from megalight.ops.delta_rule import DELTA_RULE
from megalight.plugins.fla import rule
from megalight.registry import Backend

PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backend."""
    DELTA_RULE.register(Backend("fla", rule.delta_rule, PRIORITY, rule.why_not))
