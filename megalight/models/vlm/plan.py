"""The parallel plan of a vision-language model: how its modules are split."""

from __future__ import annotations

from megalight.models.gpt.plan import RULES as GPT_RULES
from megalight.models.vision.model import LayerScale
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import AllRows, Boundary, Column, Dropout, Row, RowExchange, SequenceRegion

TOWER = ParallelizePlan(
    {
        # Pixels and positions are whole, so each module takes its share of the rows.
        "*tower.patch": SequenceRegion(split_input=True),
        "*tower.class_token": SequenceRegion(split_input=True),
        "*tower.registers": SequenceRegion(split_input=True),
        "*tower.position": SequenceRegion(split_input=True),
        LayerScale: SequenceRegion(),
        # Images are not cut for context parallelism: each rank reads the rows that its share of the text has.
        "*tower.layers.*.attention.inner": Dropout(split=True),
        # Rows of patches start over where class tokens and registers are left out.
        "*projector.patches": Boundary(enter="join", leave="split"),
        "*projector.proj": SequenceRegion(),
        "*projector.up": Column(),
        "*projector.down": Row(),
        # A rank's share of the text may have images from all shares of the rows.
        "*projector": Boundary(leave="gather"),
        "*embed.images": SequenceRegion(split_input=True),
        "*embed.newline": SequenceRegion(split_input=True),
    }
)
"""Rules for the tower and the projector, besides those of layers, which are the same as in the language model."""

REMOTE_FEATURES = ParallelizePlan({"*embed.remote_features": Boundary(enter="split", leave="gather")})
"""Features that arrive are whole. Each rank's share of the text reads some of them, so their gradients are summed."""

RULES = GPT_RULES | TOWER | REMOTE_FEATURES

APART = RULES | ParallelizePlan(
    {
        "*projector": Boundary(leave="join"),
        # Under context parallelism, ranks hold runs of the rows of all images.
        "*tower.layers.*.attention.inner": (RowExchange(), Dropout(split=True)),
        # What the boundary gathers is this rank's run.
        "*projector.patches": (Boundary(enter="join", leave="split"), AllRows()),
    }
)
"""Rules for a tower without a language model behind it: gradients of its features come whole to all of its ranks."""

vlm_plan = RULES.of
"""Returns the plan of a vision-language model, of a part of it, or of a module that contains one."""

tower_plan = APART.of
"""Returns the plan of a tower and a projector on their own."""
