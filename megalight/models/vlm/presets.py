"""Published models, by name and size."""

from __future__ import annotations

from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.vision.config import VisionConfig
from megalight.models.vlm.config import VLMConfig
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


for _name, _language in {
    "llava_1_5_7b": vicuna(32, 4096, 32, 11008),
    "llava_1_5_13b": vicuna(40, 5120, 40, 13824),
}.items():
    PRESETS.register(_name)(VLMConfig(language=_language, vision=clip_large(), image_token=32000))
