"""Shapes of vision-language models with their batches, and narrow twins of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from megalight.data.multimodal.batch import ImageTextBatch, with_cuts
from megalight.data.multimodal.resolution import form_of
from megalight.data.multimodal.template import ImagePatches
from megalight.models.vision.config import Passes
from megalight.models.vlm import ProjectorConfig, VLMConfig
from megalight.models.vlm.module import Trained, flops_of_images, flops_of_losses, flops_per_token
from megalight.models.vlm.presets import PRESETS
from megalight.types import TokenBatch

GAP = 8
"""Tokens of text before each image."""
FROZEN_TOWER = Trained(tower=Passes(0.0, inputs=False))
"""Nobody needs the gradient of the frozen tower's features."""


@dataclass(frozen=True)
class Shape:
    """A model and the batches of one rank.

    Attributes:
        config: the model.
        sizes: height and width of the images of a row, in pixels.
        seq: tokens of a row.
        mbs: rows of a micro-batch.
        micro: micro-batches of a step.
    """

    config: VLMConfig
    sizes: tuple[tuple[int, int], ...]
    seq: int
    mbs: int
    micro: int = 2

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.mbs * self.micro

    def batch(self, seed: int, rows: int) -> tuple[ImageTextBatch, list[ImagePatches]]:
        """Return random rows, and their images."""
        random, form, token = np.random.default_rng(seed), form_of(self.config), self.config.image_token
        cuts = [
            [form.divided(random.integers(0, 256, (*size, 3), np.uint8)) for size in self.sizes] for _ in range(rows)
        ]
        # Of one part of the vocabulary, so that there is something to learn.
        tokens = torch.from_numpy(random.integers(0, min(token, 1000), (rows, self.seq)))
        at = 0
        for cut in cuts[0]:
            at += GAP
            tokens[:, at : at + len(cut.source)] = token
            at += len(cut.source)
        labels = tokens.roll(-1, 1)
        mask = (labels != token).float()
        mask[:, -1] = 0
        batch = with_cuts(TokenBatch(tokens, labels, mask), cuts, token, form)
        return batch.with_rows(), [cut for own in cuts for cut in own]

    def image_tokens(self) -> int:
        """Return the tokens of images in a row."""
        return sum(len(cut.source) for cut in self.batch(0, 1)[1])

    def flops(self, trained: Trained = FROZEN_TOWER) -> float:
        """Return the model FLOPs of a step."""
        return self.text_flops(trained) + self.image_flops(trained)

    def text_flops(self, trained: Trained = FROZEN_TOWER) -> float:
        """Return those of the language model. Tokens without a loss need nothing behind the last attention."""
        spared = self.seq - sum(self.batch(0, 1)[0].row_counts)
        tokens = self.seq * flops_per_token(self.config, self.seq, trained)
        return self.rows * (tokens - spared * flops_of_losses(self.config, trained))

    def image_flops(self, trained: Trained = FROZEN_TOWER) -> float:
        """Return those of the tower and the projector."""
        cuts = self.batch(0, 1)[1]
        windows = [part for cut in cuts for part in cut.windows]
        return self.rows * flops_of_images(self.config, [len(cut.pixels) for cut in cuts], windows, trained)


SHAPES = {
    "llava-1.5": Shape(PRESETS["llava_1_5_7b"], ((336, 336),), 1024, 8),
    "qwen2.5-vl": Shape(PRESETS["qwen2_5_vl_7b"], ((476, 644), (672, 1008), (448, 448)), 2048, 4),
}
WITH_TRAINED_TOWER = {"llava-1.5": 8, "qwen2.5-vl": 2}
"""Shape -> rows of a micro-batch, where activations of the tower must fit, too."""


def rows_of(name: str, trained: bool) -> int:
    """Return the rows of a micro-batch that an H200 has room for."""
    return WITH_TRAINED_TOWER[name] if trained else SHAPES[name].mbs


def shape_of(name: str, divisor: int = 1, trained: bool = False, mbs: int | None = None) -> Shape:
    """Return a shape.

    Args:
        name: one of :data:`SHAPES`.
        divisor: the language model has this part of its layers.
        trained: whether the tower is trained.
        mbs: rows of a micro-batch. None: what an H200 has room for.
    """
    shape = SHAPES[name]
    language = replace(shape.config.language, num_layers=shape.config.language.num_layers // divisor)
    rows = mbs or rows_of(name, trained)
    return replace(shape, config=replace(shape.config, language=language), mbs=rows)


def twin(shape: Shape) -> Shape:
    """Return a narrow model of the same kind, with few layers and short rows."""
    config = shape.config
    dynamic = config.vision.dynamic
    language = replace(config.language, num_layers=2, hidden_size=256, num_heads=2, num_kv_heads=2, ffn_hidden_size=512)
    language = replace(language, vocab_size=2048, head_dim=128, max_sequence_length=512)
    vision = replace(
        config.vision,
        num_layers=2,
        hidden_size=2 * config.vision.head_dim,
        num_heads=2,
        ffn_hidden_size=320 + config.vision.ffn_hidden_size % 16,  # as much more than what FP8 takes at a time
        dynamic=None if dynamic is None else replace(dynamic, full_layers=(1,)),
        image_size=0 if dynamic is not None else 112,
    )
    projector = ProjectorConfig(
        merge=config.projector.merge,
        norm=config.projector.norm,
        hidden_size=config.projector.merge**2 * vision.hidden_size if dynamic is not None else 0,
    )
    sizes = ((112, 112),) if dynamic is None else ((112, 168), (56, 140))
    small = replace(config, language=language, vision=vision, projector=projector, image_token=2047, video_token=None)
    return Shape(small, sizes, 256, 1, shape.micro)


def tiny(shape: Shape) -> Shape:
    """Return a shape for the CPU."""
    small = twin(shape)
    language = replace(small.config.language, hidden_size=128, num_heads=1, num_kv_heads=1, ffn_hidden_size=64)
    language = replace(language, vocab_size=128)
    return replace(small, config=replace(small.config, language=language, image_token=127), seq=128)
