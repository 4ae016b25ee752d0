"""flash-attn: attention by releases 2, 3 and 4, which are packages of their own and may stand side by side.

Release 4 also serves the blocks of ring attention, under the same name.

Importing this folder imports nothing of the packages; a backend does when its name is asked for.
"""

from __future__ import annotations

from megalight.ops.attention import ATTENTION
from megalight.ops.attention_block import ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD
from megalight.plugins.flash_attn import blocks, version_2, version_3, version_4
from megalight.registry import Backend

PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends."""
    # One name for each release: their numerics differ, and a run should not change with what is installed.
    ATTENTION.register(Backend("flash_attn", version_2.attention, PRIORITY, version_2.why_not))
    ATTENTION.register(Backend("flash_attn_3", version_3.attention, PRIORITY, version_3.why_not))
    ATTENTION.register(Backend("flash_attn_4", version_4.attention, PRIORITY, version_4.why_not))
    ATTENTION_BLOCK.register(Backend("flash_attn_4", blocks.forward, PRIORITY, blocks.why_not))
    ATTENTION_BLOCK_BACKWARD.register(Backend("flash_attn_4", blocks.backward, PRIORITY, blocks.why_not))
