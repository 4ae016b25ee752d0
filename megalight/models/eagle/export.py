"""Drafts in the format that serving engines read (vLLM, SGLang, TensorRT-LLM: ``LlamaForCausalLMEagle3``)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megalight import checkpoint
from megalight.checkpoint.foreign.transformers_folder import CONFIG, WEIGHTS
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.eagle.config import EagleConfig
from megalight.models.saved import saved_model
from megalight.nn.canonical import canonical_tensors

NAMES = {
    "fuse": "fc",
    "layer.embed_norm": "midlayer.input_layernorm",
    "layer.hidden_norm": "midlayer.hidden_norm",
    "layer.attention.q": "midlayer.self_attn.q_proj",
    "layer.attention.k": "midlayer.self_attn.k_proj",
    "layer.attention.v": "midlayer.self_attn.v_proj",
    "layer.attention.proj": "midlayer.self_attn.o_proj",
    "layer.mlp_norm": "midlayer.post_attention_layernorm",
    "layer.mlp.gate": "midlayer.mlp.gate_proj",
    "layer.mlp.up": "midlayer.mlp.up_proj",
    "layer.mlp.down": "midlayer.mlp.down_proj",
    "head.norm": "norm",
    "head.output_layer": "lm_head",
}
"""Our module -> theirs."""


def export_draft(
    source: str | os.PathLike[str], path: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a draft as a folder with ``config.json`` and ``model.safetensors``.

    It has no embedding: engines take that of the base.

    Args:
        source: a checkpoint of a draft.
        path: the folder, which is not there yet.
        dtype: dtype of the weights.

    Raises:
        CheckpointError: the source is not complete, or ``path`` is there.
        ConfigurationError: the source holds another model.
    """
    opened, target = checkpoint.open(source), Path(path)
    if opened.common.get("model", {}).get("family") != "eagle":
        raise ConfigurationError(
            f"{source} holds no draft model of the family eagle; models of other families go through megalight convert."
        )
    if target.exists():
        raise CheckpointError(f"{target} is there already; remove it, or name another folder.")
    model = saved_model(opened).root
    config: EagleConfig = model.config  # type: ignore[assignment]
    tensors = {}
    for name, tensor in canonical_tensors(model).items():
        module, _, leaf = name.rpartition(".")
        tensor = in_order(tensor, config.auxiliary_layers) if module == "fuse" else tensor
        tensors[f"{NAMES[module]}.{leaf}"] = tensor.to(dtype).contiguous()
    ids = torch.tensor(config.draft_ids or range(config.vocab_size))
    # The token of row `i` is `i + d2t[i]`; `t2d` says which tokens have a row.
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    # Complete, or not there under its name.
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(values_of(config, dtype), indent=2) + "\n", encoding="utf-8")
    partial.rename(target)


def in_order(weight: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the weight ``[h, n h]`` of ``fuse`` for the same hidden states in ascending order, each of them once."""
    # Engines collect the states while the layers run, whatever the order in the configuration.
    blocks = dict.fromkeys(sorted(layers), torch.zeros(()).to(weight))
    for after, block in zip(layers, weight.chunk(len(layers), 1), strict=True):
        blocks[after] = blocks[after] + block
    return torch.cat(list(blocks.values()), 1)


def values_of(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    layers = sorted(set(config.auxiliary_layers))
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary_base,
        "max_position_embeddings": config.max_sequence_length,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        # Counted as in vLLM: hidden states after so many layers.
        "eagle_aux_hidden_state_layer_ids": layers,
        # Counted as in SGLang and ModelOpt: outputs of layers, the first being 0.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [after - 1 for after in layers],
        },
    }
