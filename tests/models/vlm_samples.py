"""A small vision-language model, and rows with no, one and several images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megalight.data.multimodal.batch import Images, ImageTextBatch, with_images
from megalight.models.gpt import GPTConfig
from megalight.models.vision import VisionConfig
from megalight.models.vlm import VLMConfig
from megalight.types import TokenBatch

VISION = VisionConfig(num_layers=2, hidden_size=16, num_heads=4, ffn_hidden_size=24, image_size=8, patch_size=4)
LANGUAGE = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    vocab_size=101,
    max_sequence_length=24,
)
IMAGE = 100
CONFIG = VLMConfig(language=LANGUAGE, vision=VISION, image_token=IMAGE)


def images(counts: tuple[int, ...], generator: torch.Generator, vision: VisionConfig = VISION) -> Images:
    """Random pictures of these numbers per sample."""
    number, rows = sum(counts), vision.num_rows
    pixels = torch.randn(number, rows, vision.patch_values, generator=generator, dtype=torch.float64)
    if vision.class_token:
        pixels[:, 0] = 0
    return Images(pixels.flatten(0, 1), torch.arange(rows).repeat(number), (rows,) * number, counts)


def batch(
    counts: tuple[int, ...] = (1, 0, 2, 3), *, seed: int = 0, length: int = 24, config: VLMConfig = CONFIG
) -> ImageTextBatch:
    """Rows with these numbers of images at random places, in two documents each; image tokens have no loss."""
    generator = torch.Generator().manual_seed(seed)
    size, shape = config.image_tokens, (len(counts), length)
    tokens = torch.randint(0, config.image_token, shape, generator=generator)
    for row, count in enumerate(counts):
        for number in range(count):
            start = number * length // max(1, count) + int(torch.randint(0, 3, (), generator=generator))
            tokens[row, start : start + size] = config.image_token
    labels = torch.randint(0, config.image_token, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.7).float() * (tokens != config.image_token)
    text = TokenBatch(tokens, labels, mask, ((length // 2, length - length // 2),) * len(counts))
    found = images(counts, generator, config.vision)
    options = {"class_token": config.vision.class_token, "newline": config.newline}
    return with_images(text, found, config.image_token, **options)


def small(**options: Any) -> VLMConfig:
    """The model with other options of its tower."""
    return replace(CONFIG, vision=replace(VISION, **options))
