"""flash-attn 2 (https://arxiv.org/abs/2307.08691). It has all features of the op."""

from __future__ import annotations

from megalight.plugins.flash_attn.release import Release
from megalight.plugins.package import Package

PACKAGE = Package("flash_attn", "flash-attn", "pip install --no-build-isolation 'megalight[flash-attn]'")
MINIMUM = "2.6"
"""The first version with a soft cap on scores."""
RELEASE = Release(PACKAGE, "flash_attn", MINIMUM, dropout=True)
why_not = RELEASE.why_not
attention = RELEASE.attention
