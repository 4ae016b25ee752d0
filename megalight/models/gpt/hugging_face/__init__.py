"""Conversion of weights and configurations from ``transformers`` (Llama, Qwen, GPT-2 and others) to ours and back.

Our names are canonical: ``layers.0.attention.q.weight``, not the fused ``qkv``. Each file has a kind of model, or
several with the same names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face import deepseek, gemma, gpt2, gpt_oss, llama, llama4, mamba, moe, qwen3_next
from megalight.models.gpt.hugging_face.deepseek import without_missing_depths as without_missing_depths
from megalight.models.hugging_face.model_types import ModelType, ModelTypes

MODEL_TYPES: tuple[ModelType[GPTConfig], ...] = (
    *mamba.MODEL_TYPES,
    *qwen3_next.MODEL_TYPES,
    *deepseek.MODEL_TYPES,
    *gemma.MODEL_TYPES,
    *llama4.MODEL_TYPES,
    *gpt_oss.MODEL_TYPES,
    *moe.MODEL_TYPES,
    *gpt2.MODEL_TYPES,
    *llama.MODEL_TYPES,
)


def to_transformers(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert canonical tensors to names and shapes of ``transformers``, which does not store a tied head.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).write(tensors)


def from_transformers(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert a ``transformers`` state dict to canonical tensors.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).read(tensors)


def settings(config: GPTConfig) -> dict[str, Any]:
    """Return plain values, with the entries of all layers: different patterns can mean the same layers."""
    values = config.to_dict()
    if config.moe is not None:
        values["moe"]["pattern"] = [config.has_experts(layer) for layer in range(config.num_layers)]
        # 0 and the width itself mean the same.
        values["moe"]["ffn_hidden_size"] = config.expert_ffn_hidden_size
        del values["moe"]["balance"]  # losses are the user's choice
        if config.moe.router.num_groups is not None:
            values["moe"]["router"]["group_experts"] = config.moe.router.rule.best_of_group
    if config.mtp is not None:
        del values["mtp"]["loss_scale"]
    if config.delta is not None:
        del values["delta"]["step_range"], values["delta"]["step_floor"]  # initial values
    values["mixer_pattern"] = [config.mixer_of(layer) for layer in range(config.num_layers)]
    values["attention"]["scale"] = config.attention.scale or config.head_dim**-0.5
    values["attention"]["chunk"] = [config.attention.chunk_of(layer) for layer in range(config.num_layers)]
    values["attention"]["window"] = [config.attention.window_of(layer) for layer in range(config.num_layers)]
    values["position"]["pattern"] = [config.position.rotates(layer) for layer in range(config.num_layers)]
    del values["attention"]["window_pattern"]
    del values["attention_ratio"], values["mlp_ratio"]  # they only made the pattern
    return values


FAMILY = ModelTypes(MODEL_TYPES, settings, lambda config: f"position.kind={config.position.kind!r} with these parts")
weight_map = FAMILY.weight_map
config_from_transformers = FAMILY.read
config_to_transformers = FAMILY.write
READERS = FAMILY.readers
