"""What the towers of Qwen2.5-VL and Qwen3-VL share in ``transformers``: names of tensors, names of sizes, checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.vision import hugging_face as towers
from megalight.models.vision.config import VisionConfig
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.hugging_face import videos
from megalight.models.weights import Theirs

EPS = 1e-6
"""Of all norms of the towers. It is no setting of theirs."""
IMAGE_TOKEN, VIDEO_TOKEN = 151655, 151656
"""The ids that a ``config.json`` need not say."""

TOWER = {
    "embed.tower.patch": "visual.patch_embed.proj",
    "embed.tower.layers.N.attention_norm": "visual.blocks.N.norm1",
    "embed.tower.layers.N.attention.proj": "visual.blocks.N.attn.proj",
    "embed.tower.layers.N.mlp_norm": "visual.blocks.N.norm2",
}
"""Our module -> theirs. ``N``: a layer's index."""
SIZES = {
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "ffn_hidden_size": "intermediate_size",
    "patch_size": "patch_size",
    "channels": "in_channels",
}
"""Our size of a tower -> theirs."""


def places(config: VisionConfig, named: Mapping[str, str]) -> dict[str, Theirs]:
    """Return the places of a tower's tensors.

    Args:
        config: the tower.
        named: names beside those of :data:`TOWER`.
    """
    size = config.hidden_size
    # Queries, keys and values are one tensor.
    fused = {
        f"embed.tower.layers.N.attention.{part}": Theirs(
            "visual.blocks.N.attn.qkv", rows=range(number * size, (number + 1) * size)
        )
        for number, part in enumerate("qkv")
    }
    return {ours: Theirs(theirs) for ours, theirs in {**TOWER, **named}.items()} | fused


def sizes_from(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``VisionConfig`` from their ``vision_config``: sizes, and what all of these towers have."""
    return {ours: vision[theirs] for ours, theirs in SIZES.items()} | {
        "patch_size": towers.side_of("patch_size", vision),
        "image_size": 0,
        "class_token": False,
        "input_norm": False,
        "norm_eps": EPS,
    }


def tokens_from(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the ids of the tokens of images and videos, as arguments of ``VLMConfig``."""
    return {
        "image_token": values.get("image_token_id", IMAGE_TOKEN),
        "video_token": videos.token_from(values, "video_token_id", VIDEO_TOKEN, vocab_size),
    }


def language_from(
    values: Mapping[str, Any], text: Mapping[str, Any], kind: str, vision: Mapping[str, Any]
) -> GPTConfig:
    """Return the language model.

    Args:
        values: their configuration.
        text: the part of it about the language model.
        kind: its ``model_type`` without images.
        vision: the part about the tower.

    Raises:
        ConfigurationError: the projector does not end with its width.
    """
    tied = any(each.get("tie_word_embeddings", False) for each in (text, values))
    language = gpt_from({**text, "model_type": kind, "tie_word_embeddings": tied})
    require(
        vision.get("out_hidden_size", language.hidden_size) == language.hidden_size,
        f"vision_config.out_hidden_size is {vision.get('out_hidden_size')} and the language model has hidden_size "
        f"{language.hidden_size}; the projector ends with its width. Copy the configuration again.",
    )
    return language


def written(config: VLMConfig, model_type: str, text_type: str, **vision: Any) -> dict[str, Any]:
    """Return their configuration of a model.

    Args:
        config: the model.
        model_type: that of the whole; those of the parts begin with it.
        text_type: the language model's ``model_type`` without images.
        vision: settings of the tower beside its sizes.
    """
    tower = config.vision
    assert tower.dynamic is not None
    return {
        "text_config": gpt_to(config.language, text_type) | {"model_type": f"{model_type}_text"},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            **{theirs: getattr(tower, ours) for ours, theirs in SIZES.items()},
            "spatial_merge_size": config.projector.merge,
            "temporal_patch_size": tower.dynamic.frames,
            "out_hidden_size": config.language.hidden_size,
            **vision,
        },
        "image_token_id": config.image_token,
        **videos.token_to(config, "video_token_id"),
        "tie_word_embeddings": config.language.tie_embeddings,
    }
