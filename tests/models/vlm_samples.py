"""A small vision-language model, and rows with no, one and several images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from megalight.data.multimodal.batch import ImageTextBatch, with_cuts, with_images
from megalight.data.multimodal.images import Images
from megalight.data.multimodal.resolution import form_of
from megalight.models.gpt import AttentionConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.vision import VisionConfig
from megalight.models.vision.config import AnyResConfig, DynamicConfig
from megalight.models.vlm import ProjectorConfig, VLMConfig
from megalight.ops.rotary import RotaryAxes
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
QWEN = VLMConfig(
    language=replace(
        LANGUAGE, position=PositionConfig(axes=RotaryAxes((1, 1, 2))), attention=AttentionConfig(qkv_bias=True)
    ),
    vision=replace(
        VISION,
        image_size=0,
        activation="swiglu",
        class_token=False,
        input_norm=False,
        norm="rms",
        dynamic=DynamicConfig(min_pixels=64, window=16, full_layers=(1,)),
    ),
    projector=ProjectorConfig(merge=2, norm="rms", hidden_size=40),
    image_token=IMAGE,
)
"""As Qwen2.5-VL: images of any size, windows, squares of patches that are one token, and positions on three axes."""
QWEN3 = replace(
    QWEN,
    language=replace(
        LANGUAGE,
        position=PositionConfig(axes=RotaryAxes((2, 1, 1), interleaved=True)),
        attention=AttentionConfig(qk_norm=True),
    ),
    vision=replace(
        QWEN.vision,
        num_layers=3,
        norm="layer",
        patch_bias=True,
        activation="gelu_tanh",
        dynamic=DynamicConfig(min_pixels=64, table=5),
    ),
    projector=ProjectorConfig(merge=2, norm="layer", hidden_size=40),
    deepstack=(0, 2),
)
"""As Qwen3-VL: a table of positions, and features of earlier layers that later layers of the language model get."""
NAFLEX = replace(
    CONFIG,
    vision=replace(
        QWEN3.vision,
        resample="bilinear",
        output_norm=True,
        dynamic=DynamicConfig(patches=8, frames=1, rotary=False, table=3, table_cells=True),
    ),
    projector=ProjectorConfig(merge=2),
)
"""As SigLIP2's NaFlex: images of up to so many patches, whose positions are those of a table that is resized."""
SQUARES = replace(VISION, image_size=16, class_token=False, input_norm=False)
GEMMA = VLMConfig(
    language=replace(
        LANGUAGE,
        norm=NormConfig(around_zero=True, after=True),
        attention=AttentionConfig(qk_norm=True, window=5, window_pattern=(True, False)),
        position=PositionConfig(local_base=100.0),
    ),
    vision=replace(SQUARES, patch_bias=True, output_norm=True),
    projector=ProjectorConfig(
        merge=2, pool=True, norm="rms", norm_joined=True, norm_around_zero=True, layers=1, bias=False
    ),
    image_token=IMAGE,
    mutual=True,
)
"""As Gemma-3: a token is the mean of a square of patches, and the tokens of an image see each other."""
INTERN = VLMConfig(
    language=replace(LANGUAGE, attention=AttentionConfig(qkv_bias=True)),
    vision=replace(SQUARES, class_token=True, qkv_bias=False, qk_norm=True, layer_scale=0.5),
    projector=ProjectorConfig(merge=2, norm="layer", norm_joined=True),
    image_token=IMAGE,
)
"""As InternVL: class tokens that no square of patches has, learned factors of sublayers, norms over all heads."""
RADIO = replace(
    CONFIG,
    vision=replace(SQUARES, register_tokens=3, qkv_bias=True),
    projector=ProjectorConfig(merge=2, norm="rms", norm_joined=True),
)
"""As RADIO: registers without a position, and squares of patches that are one token."""
TILES = replace(
    CONFIG,
    vision=replace(
        VISION, resize="pad", anyres=AnyResConfig(grids=((1, 1), (1, 2), (2, 1), (3, 1)), most=1, alone=True)
    ),
    newline=True,
)
"""As LLaVA-OneVision, and a class token: one image has tiles, whose features are shrunk where they are two or more."""
HUGE = -1
"""In place of a number of images: one that is most of its row."""
SIZES = [(8, 16), (16, 24), (8, 8), (24, 8)]
"""Height and width of images of it, which have 2, 6, 1 and 3 tokens. The second has two windows."""


def images(counts: tuple[int, ...], generator: torch.Generator, config: VLMConfig = CONFIG) -> Images:
    """Random pictures of these numbers per sample."""
    vision, alone = config.vision, config.added_rows > 0
    number, rows = sum(counts), vision.num_patches if alone else vision.num_rows
    pixels = torch.randn(number, rows, vision.patch_values, generator=generator, dtype=torch.float64)
    if vision.class_token and not alone:
        pixels[:, 0] = 0
    positions = torch.arange(rows).repeat(number)
    return Images(pixels.flatten(0, 1), positions, (rows,) * number, counts, joined=config.projector.merge**2)


def batch(
    counts: tuple[int, ...] = (1, 0, 2, 3), *, seed: int = 0, length: int = 24, config: VLMConfig = CONFIG
) -> ImageTextBatch:
    """Rows with these numbers of images at random places, in two documents each; image tokens have no loss."""
    if config.vision.dynamic is not None or config.vision.anyres is not None:
        return _of_any_size(counts, seed, length, config)
    generator = torch.Generator().manual_seed(seed)
    size, shape = config.image_tokens, (len(counts), length)
    tokens = torch.randint(0, config.image_token, shape, generator=generator)
    for row, count in enumerate(counts):
        for number in range(count):
            start = number * length // max(1, count) + int(torch.randint(0, 3, (), generator=generator))
            tokens[row, start : start + size] = config.image_token
    labels = torch.randint(0, config.image_token, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.7).float() * (tokens != config.image_token)
    first = length // 3 if config.mutual else length // 2
    text = TokenBatch(tokens, labels, mask, ((first, length - first),) * len(counts))
    found = images(counts, generator, config)
    options = {"class_token": config.vision.class_token and not config.added_rows, "newline": config.newline}
    options["mutual"] = config.mutual
    return with_images(text, found, config.image_token, **options)


def _of_any_size(counts: tuple[int, ...], seed: int, length: int, config: VLMConfig) -> ImageTextBatch:
    """The same with images of several sizes; none is in two documents."""
    random, form = np.random.default_rng(seed), form_of(config)
    sizes = iter(range(seed, seed + sum(map(abs, counts))))
    own_sizes = [[(40, 32) if count == HUGE else SIZES[next(sizes) % 4] for _ in range(abs(count))] for count in counts]
    cuts = [
        [form.among(len(own)).cut(Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8))) for size in own]
        for own in own_sizes
    ]
    tokens = torch.from_numpy(random.integers(0, config.image_token, (len(counts), length)))
    for row, own in enumerate(cuts):
        for number, cut in enumerate(own):
            start = number * length // max(1, len(own)) + int(random.integers(0, 3))
            tokens[row, start : start + len(cut.source)] = config.image_token
    labels = torch.from_numpy(random.integers(0, config.image_token, (len(counts), length)))
    mask = torch.from_numpy(random.random((len(counts), length)) < 0.7).float() * (tokens != config.image_token)
    documents = tuple((length,) if count == HUGE else (length // 3, length - length // 3) for count in counts)
    return with_cuts(TokenBatch(tokens, labels, mask, documents), cuts, config.image_token, form)


def small(**options: Any) -> VLMConfig:
    """The model with other options of its tower."""
    return replace(CONFIG, vision=replace(VISION, **options))
