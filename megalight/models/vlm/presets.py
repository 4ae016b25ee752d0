"""Published models, by name and size."""

from __future__ import annotations

from dataclasses import replace

from megalight.models.gpt.config import AttentionConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.vision.config import VisionConfig
from megalight.models.vision.dynamic_config import DynamicConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.ops.rotary import RotaryAxes
from megalight.registry import Registry

PRESETS: Registry[VLMConfig] = Registry("VLM preset")
"""Name -> configuration. Other packages can add their own."""


def clip_large(image_size: int = 336) -> VisionConfig:
    """Configure CLIP ViT-L/14 without its last layer, as LLaVA-1.5 reads it (https://arxiv.org/abs/2310.03744)."""
    return VisionConfig(num_layers=23, hidden_size=1024, num_heads=16, image_size=image_size, patch_size=14)


def vicuna(num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int) -> GPTConfig:
    """Configure Vicuna-1.5, a Llama-2, with the vocabulary that LLaVA-1.5 pads it to."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=32064,
        max_sequence_length=4096,
        norm=NormConfig(eps=1e-5),
    )


def siglip_so400m() -> VisionConfig:
    """Configure SigLIP-so400m/14 at 384 pixels without its last layer, as LLaVA-OneVision reads it."""
    return VisionConfig(
        num_layers=26,
        hidden_size=1152,
        num_heads=16,
        ffn_hidden_size=4304,
        image_size=384,
        patch_size=14,
        margin=6,
        activation="gelu_tanh",
        class_token=False,
        patch_bias=True,
        input_norm=False,
        norm_eps=1e-6,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def qwen2(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_hidden_size: int,
    vocab_size: int,
    *,
    tie_embeddings: bool = False,
) -> GPTConfig:
    """Configure Qwen2 as LLaVA-OneVision (https://arxiv.org/abs/2408.03326) and Qwen2.5-VL have it."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=32768,
        tie_embeddings=tie_embeddings,
        norm=NormConfig(eps=1e-6),
        position=PositionConfig(base=1000000.0),
        attention=AttentionConfig(qkv_bias=True),
    )


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


def qwen2_5_vl(language: GPTConfig) -> VLMConfig:
    """Configure Qwen2.5-VL with a Qwen2 as its language model, whose tokens have positions on three axes."""
    axes = RotaryAxes((16, 24, 24))
    return VLMConfig(
        language=replace(language, max_sequence_length=128000, position=replace(language.position, axes=axes)),
        vision=qwen_tower(),
        projector=ProjectorConfig(merge=2, norm="rms", hidden_size=5120),
        image_token=151655,
    )


for _name, _language in {
    "llava_1_5_7b": vicuna(32, 4096, 32, 11008),
    "llava_1_5_13b": vicuna(40, 5120, 40, 13824),
}.items():
    PRESETS.register(_name)(VLMConfig(language=_language, vision=clip_large(), image_token=32000))

for _name, _language in {
    "llava_onevision_0_5b": qwen2(24, 896, 14, 2, 4864, 152000, tie_embeddings=True),
    "llava_onevision_7b": qwen2(28, 3584, 28, 4, 18944, 152128),
}.items():
    PRESETS.register(_name)(VLMConfig(language=_language, vision=siglip_so400m(), image_token=151646, newline=True))

for _name, _language in {
    "qwen2_5_vl_3b": qwen2(36, 2048, 16, 2, 11008, 151936, tie_embeddings=True),
    "qwen2_5_vl_7b": qwen2(28, 3584, 28, 4, 18944, 152064),
}.items():
    PRESETS.register(_name)(qwen2_5_vl(_language))
