"""The packages of Mamba's authors: the scan of ``mamba-ssm``, and the convolution of ``causal-conv1d``.

Importing this folder imports nothing of the packages; a backend does when its name is asked for.
"""

from __future__ import annotations

from megalight.ops.causal_conv import CAUSAL_CONV
from megalight.ops.ssd import SSD
from megalight.plugins.mamba_ssm import conv, scan
from megalight.registry import Backend

PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends."""
    SSD.register(Backend("mamba_ssm", scan.ssd, PRIORITY, scan.why_not))
    CAUSAL_CONV.register(Backend("causal_conv1d", conv.causal_conv, PRIORITY, conv.why_not))
