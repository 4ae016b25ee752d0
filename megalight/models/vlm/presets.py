"""Published models, by name and size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.presets import preset
from megalight.models.vision.config import AnyResConfig, DynamicConfig, VisionConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.ops.rotary import RotaryAxes, RotaryScaling
from megalight.registry import Registry

PRESETS: Registry[VLMConfig] = Registry("VLM preset")
"""Name -> configuration. Other packages can add their own."""


def clip_large(image_size: int = 336) -> VisionConfig:
    """Configure CLIP ViT-L/14 without its last layer, as LLaVA-1.5 reads it (https://arxiv.org/abs/2310.03744)."""
    return VisionConfig(num_layers=23, hidden_size=1024, num_heads=16, image_size=image_size, patch_size=14)


def siglip_so400m(num_layers: int = 26, image_size: int = 384, **options: Any) -> VisionConfig:
    """Configure SigLIP-so400m/14 (https://arxiv.org/abs/2303.15343); LLaVA-OneVision reads it before its last layer.

    Args:
        num_layers: layers that are read, of 27.
        image_size: in pixels.
        options: further ones of ``VisionConfig``.
    """
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=1152,
        num_heads=16,
        ffn_hidden_size=4304,
        image_size=image_size,
        patch_size=14,
        margin=image_size % 14,
        activation="gelu_tanh",
        class_token=False,
        patch_bias=True,
        input_norm=False,
        norm_eps=1e-6,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        **options,
    )


def onevision_tower() -> VisionConfig:
    """Configure the tower of LLaVA-OneVision (https://arxiv.org/abs/2408.03326): up to 6 x 6 tiles of 384 pixels."""
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    return siglip_so400m(anyres=AnyResConfig(grids=grids, most=9, alone=True), resize="pad")


def qwen_tower() -> VisionConfig:
    """Configure the tower of Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""
    return VisionConfig(
        num_layers=32,
        hidden_size=1280,
        num_heads=16,
        ffn_hidden_size=3420,
        image_size=0,
        patch_size=14,
        activation="swiglu",
        class_token=False,
        input_norm=False,
        norm="rms",
        norm_eps=1e-6,
        dynamic=DynamicConfig(window=112, full_layers=(7, 15, 23, 31)),
    )


def internvit_300m() -> VisionConfig:
    """Configure InternViT-300M (https://arxiv.org/abs/2412.05271): tiles of 448 pixels, factors of sublayers."""
    return VisionConfig(
        num_layers=24,
        hidden_size=1024,
        num_heads=16,
        image_size=448,
        patch_size=14,
        tiles=12,
        resize="stretch",
        activation="gelu",
        patch_bias=True,
        input_norm=False,
        layer_scale=0.1,
        norm_eps=1e-6,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )


def internvl3(name: str) -> VLMConfig:
    """Configure InternVL3 (https://arxiv.org/abs/2504.10479) with a Qwen2.5: 256 tokens for each tile of an image.

    Vocabulary and image token are those of ``config.json`` in OpenGVLab's folders; the tower has the defaults of
    ``InternVLVisionConfig``.
    """
    text = replace(language(name, 151674), tie_embeddings=False)
    return VLMConfig(
        language=replace(text, position=replace(text.position, scaling=RotaryScaling("dynamic", 2.0))),
        vision=internvit_300m(),
        projector=ProjectorConfig(merge=2, norm="layer", norm_joined=True, norm_eps=1e-5),
        image_token=151667,
    )


def qwen3_tower(num_layers: int, hidden_size: int, ffn_hidden_size: int) -> VisionConfig:
    """Configure a tower of Qwen3-VL (https://arxiv.org/abs/2511.21631), after SigLIP2."""
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=16,
        ffn_hidden_size=ffn_hidden_size,
        image_size=0,
        patch_size=16,
        activation="gelu_tanh",
        class_token=False,
        patch_bias=True,
        input_norm=False,
        norm_eps=1e-6,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        dynamic=DynamicConfig(min_pixels=256 * 256, max_pixels=4096 * 4096, table=48),
    )


def qwen3_vl(name: str, vision: VisionConfig, deepstack: tuple[int, ...]) -> VLMConfig:
    """Configure Qwen3-VL with a Qwen3 as its language model, whose pairs of features take turns on three axes.

    Sizes of the 8B's and the 32B's tower are the defaults of ``Qwen3VLVisionConfig``.
    """
    text = language(name, max_sequence_length=262144)
    axes = RotaryAxes((24, 20, 20), interleaved=True)
    return VLMConfig(
        language=replace(text, position=replace(text.position, base=5000000.0, axes=axes)),
        vision=vision,
        projector=ProjectorConfig(merge=2, norm="layer", hidden_size=4 * vision.hidden_size),
        image_token=151655,
        video_token=151656,
        deepstack=deepstack,
    )


def language(name: str, vocab_size: int = 0, max_sequence_length: int = 0) -> GPTConfig:
    """Return a GPT preset, with another vocabulary or another longest sequence where they are given."""
    base = preset(name)
    return replace(
        base,
        vocab_size=vocab_size or base.vocab_size,
        max_sequence_length=max_sequence_length or base.max_sequence_length,
    )


def gemma3(name: str) -> VLMConfig:
    """Configure Gemma-3 (https://arxiv.org/abs/2503.19786): an image has 256 tokens, which see each other.

    Sizes are those of ``config.json`` of ``gemma-3-4b-it``; the towers of all sizes are equal.
    """
    return VLMConfig(
        language=preset(name),
        vision=siglip_so400m(27, 896, output_norm=True, resize="stretch", resample="bilinear"),
        projector=ProjectorConfig(
            merge=4, pool=True, norm="rms", norm_joined=True, norm_around_zero=True, layers=1, bias=False
        ),
        image_token=262144,
        mutual=True,
    )


def qwen2_5_vl(name: str) -> VLMConfig:
    """Configure Qwen2.5-VL with a Qwen2.5 as its language model, whose tokens have positions on three axes."""
    text = language(name, max_sequence_length=128000)
    return VLMConfig(
        language=replace(text, position=replace(text.position, axes=RotaryAxes((16, 24, 24)))),
        vision=qwen_tower(),
        projector=ProjectorConfig(merge=2, norm="rms", hidden_size=5120),
        image_token=151655,
        video_token=151656,
    )


for _name, _language in {"llava_1_5_7b": "llama2_7b", "llava_1_5_13b": "llama2_13b"}.items():
    # Vicuna, a Llama 2 whose vocabulary LLaVA pads.
    _llava = VLMConfig(language=language(_language, 32064), vision=clip_large(), image_token=32000)
    PRESETS.register(_name)(_llava)
    # LLaVA-NeXT, also called LLaVA-1.6: tiles of the same size.
    _tiles = AnyResConfig(grids=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)))
    _next = replace(_llava, vision=replace(_llava.vision, anyres=_tiles), newline=True)
    PRESETS.register(_name.replace("1_5", "next"))(_next)

for _name, _text in {
    "llava_onevision_0_5b": language("qwen2_5_0_5b", 152000),
    "llava_onevision_7b": language("qwen2_5_7b", 152128),
}.items():
    # Qwen2, which has the shapes of Qwen2.5.
    _onevision = VLMConfig(
        language=_text, vision=onevision_tower(), image_token=151646, video_token=151647, newline=True
    )
    PRESETS.register(_name)(_onevision)

for _name, _language in {"qwen2_5_vl_3b": "qwen2_5_3b", "qwen2_5_vl_7b": "qwen2_5_7b"}.items():
    PRESETS.register(_name)(qwen2_5_vl(_language))

for _size in ("4b", "12b", "27b"):
    # With the tower: the GPT presets of these names are the language models.
    PRESETS.register(f"gemma3_{_size}")(gemma3(f"gemma3_{_size}"))

for _size, _base in {"1b": "qwen2_5_0_5b", "2b": "qwen2_5_1_5b", "8b": "qwen2_5_7b"}.items():
    PRESETS.register(f"internvl3_{_size}")(internvl3(_base))

for _size, _base in {"2b": "qwen3_1_7b", "4b": "qwen3_4b"}.items():
    PRESETS.register(f"qwen3_vl_{_size}")(qwen3_vl(_base, qwen3_tower(24, 1024, 4096), (5, 11, 17)))

for _size, _base in {"8b": "qwen3_8b", "32b": "qwen3_32b"}.items():
    PRESETS.register(f"qwen3_vl_{_size}")(qwen3_vl(_base, qwen3_tower(27, 1152, 4304), (8, 16, 24)))
