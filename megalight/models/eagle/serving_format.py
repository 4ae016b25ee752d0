"""The format of drafts that vLLM, SGLang and TensorRT-LLM read (``LlamaForCausalLMEagle3``): export and import."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.disk.files import sync_directory, write_file
from megalight.checkpoint.disk.publish import absolute, begin_folder, check_new
from megalight.checkpoint.foreign.transformers_folder import CONFIG, WEIGHTS, is_folder, read_config
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.sources import TensorSource
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.eagle.architecture import config_of, ids_of
from megalight.models.eagle.base import BaseModel
from megalight.models.eagle.config import EagleConfig
from megalight.models.eagle.model import DraftModel
from megalight.models.family import family
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.hugging_face.common import rotary_to
from megalight.models.loading import PREFIX, saved_model
from megalight.models.stored import StoredModel, open_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.source import Target

LLAMA, KIMI = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
"""Architectures in ``config.json``."""

LAYERS = {LLAMA: "midlayer.", KIMI: "layers.0."}
"""What names of the layer's tensors begin with. Engines read both; ModelOpt writes the second for all."""

COMMON = {
    "fuse": "fc",
    "layer.embed_norm": "{layer}input_layernorm",
    "layer.hidden_norm": "{layer}hidden_norm",
    "layer.attention.proj": "{layer}self_attn.o_proj",
    "layer.mlp_norm": "{layer}post_attention_layernorm",
    "layer.mlp.gate": "{layer}mlp.gate_proj",
    "layer.mlp.up": "{layer}mlp.up_proj",
    "layer.mlp.down": "{layer}mlp.down_proj",
    "head.norm": "norm",
    "head.output_layer": "lm_head",
}
HEADS = {f"layer.attention.{name}": f"{{layer}}self_attn.{name}_proj" for name in "qkv"}
LATENT = {
    "layer.attention.q_down": "{layer}self_attn.q_a_proj",
    "layer.attention.q_latent_norm": "{layer}self_attn.q_a_layernorm",
    "layer.attention.q_up": "{layer}self_attn.q_b_proj",
    "layer.attention.kv_down": "{layer}self_attn.kv_a_proj_with_mqa",
    "layer.attention.kv_latent_norm": "{layer}self_attn.kv_a_layernorm",
    "layer.attention.kv_up": "{layer}self_attn.kv_b_proj",
}


def architecture_of(config: EagleConfig) -> str:
    """Return the architecture of a draft."""
    return LLAMA if config.latent is None else KIMI


def names_of(config: EagleConfig) -> dict[str, str]:
    """Return our name of each module -> theirs."""
    if config.latent is None:
        found = COMMON | HEADS
    elif config.latent.q_rank is not None:
        found = COMMON | LATENT
    else:
        # Queries without a latent are one projection, as in DeepSeek-V2-Lite.
        rest = {ours: theirs for ours, theirs in LATENT.items() if ".q_" not in ours}
        found = COMMON | rest | {"layer.attention.q_up": "{layer}self_attn.q_proj"}
    layer = LAYERS[architecture_of(config)]
    return {ours: theirs.format(layer=layer) for ours, theirs in found.items()}


def values_of(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    layers = sorted(set(config.auxiliary_layers))
    return {
        "architectures": [architecture_of(config)],
        "model_type": "llama" if config.latent is None else "kimi_k2",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        **_sizes(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        **rotary_to(config.layer.position),
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": config.std,
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
            "has_lm_head": config.head == "own",
        },
    }


def _sizes(config: EagleConfig) -> Mapping[str, Any]:
    latent = config.latent
    if latent is None:
        return {"head_dim": config.head_dim}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.head_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        # The layer is dense: a model of this kind has experts from a later layer on.
        "first_k_dense_replace": 1,
    }


# Export


def export_draft(
    source: str | os.PathLike[str], path: str | os.PathLike[str], dtype: torch.dtype | None = torch.bfloat16
) -> None:
    """Write a draft as a folder with ``config.json`` and ``model.safetensors``.

    It has no embedding: engines take that of the base.

    Args:
        source: a checkpoint of a draft.
        path: the folder to write, which appears when it is complete.
        dtype: dtype of the weights. None: as they were saved.

    Raises:
        CheckpointError: the source is not complete, or ``path`` is there or cannot be written. Nothing is left of a
            folder whose writing failed.
        ConfigurationError: the source holds another model.
    """
    target = absolute(path)
    check_new(target)
    opened = checkpoint.open(source)
    if not holds_draft(source):
        raise ConfigurationError(
            f"{source} holds no draft model of the family eagle; "
            "for other families, use megalight.models.hugging_face.export."
        )
    model = saved_model(opened).root
    config: EagleConfig = model.config  # type: ignore[assignment]
    dtype = dtype or next(model.parameters()).dtype
    tensors, names = {}, names_of(config)
    for name, tensor in canonical_tensors(model).items():
        module, _, leaf = name.rpartition(".")
        tensor = in_order(tensor, config.auxiliary_layers) if module == "fuse" else tensor
        tensors[f"{names[module]}.{leaf}"] = tensor.to(dtype).contiguous()
    ids = torch.tensor(config.draft_ids or range(config.vocab_size))
    # The token of row `i` is `i + d2t[i]`; `t2d` says which tokens have a row.
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    partial = begin_folder(target)
    try:
        write_file(partial.folder / WEIGHTS, save(tensors, {"format": "pt"}))
        content = json.dumps(values_of(config, dtype), indent=2) + "\n"
        write_file(partial.folder / CONFIG, content.encode())
        sync_directory(partial.folder)
        partial.publish()
    except BaseException:
        partial.discard()
        raise


def holds_draft(source: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a checkpoint of a draft."""
    if not checkpoint.is_complete(source):
        return False
    return bool(checkpoint.open(source).common.get("model", {}).get("family") == "eagle")


def in_order(weight: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the weight ``[h, n h]`` of ``fuse`` for the same hidden states in ascending order, each of them once."""
    # Engines collect the states while the layers run, whatever the order in the configuration.
    blocks = dict.fromkeys(sorted(layers), torch.zeros(()).to(weight))
    for after, block in zip(layers, weight.chunk(len(layers), 1), strict=True):
        blocks[after] = blocks[after] + block
    return torch.cat(list(blocks.values()), 1)


# Import


HEAD = "head.output_layer.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_draft(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` looks like a folder with a draft for serving engines."""
    return is_folder(path) and any(name in LAYERS for name in read_config(path).get("architectures") or ())


def import_draft(
    source: str | os.PathLike[str], path: str | os.PathLike[str], base: str | os.PathLike[str] | None = None
) -> None:
    """Write a checkpoint of a draft. Its weights keep every bit.

    Args:
        source: a folder with ``config.json`` and ``model.safetensors``.
        path: the checkpoint, which is not there yet.
        base: the model that the draft serves. It is needed for a draft that does not say which hidden states it reads
            (they are then the usual ones of this base), and for a draft without an output layer (it uses that of the
            base).

    Raises:
        CheckpointError: a file is missing, or its tensors are not those of the configuration.
        ConfigurationError: the folder holds no draft, has an option without a counterpart here, or needs ``base``.
    """
    if not is_draft(source):
        raise ConfigurationError(f"{source} holds no draft; {CONFIG} of one names {' or '.join(LAYERS)}.")
    file = os.path.join(source, WEIGHTS)
    if not os.path.isfile(file):
        raise CheckpointError(f"{source} has no {WEIGHTS}; copy the folder again.")
    tensors = load_file(file)
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = () if offsets is None else ids_of(offsets)
    if ids and mask is not None and mask.nonzero().flatten().tolist() != list(ids):
        raise CheckpointError(f"{file}: d2t and t2d name different ids; copy the folder again.")
    config = _config(source, ids)
    if not config.auxiliary_layers:
        config = _usual(config, source, base)
    with torch.device("meta"):
        wanted = canonical_tensors(DraftModel(config))
    values = _renamed(tensors, config)
    if HEAD not in values and not config.draft_ids:
        # Engines let such a draft predict with the output layer of its base.
        config, values[HEAD] = replace(config, head="base"), _head_of(source, base)
    if values.keys() != wanted.keys():
        lost, extra = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
        raise CheckpointError(
            f"{file} does not hold the tensors of its {CONFIG}: it lacks {lost[:4]}, and {extra[:4]} have no "
            "counterpart. A draft here reads the embedding of its base, and has one layer."
        )
    for name, tensor in values.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{file}: {name} has the shape {list(tensor.shape)}, and {CONFIG} needs {list(wanted[name].shape)}."
            )
    held = TensorSource({PREFIX + name: tensor for name, tensor in values.items()})
    save_model(StoredModel(family("eagle"), config, held, {}), path)


def _config(source: str | os.PathLike[str], ids: tuple[int, ...]) -> EagleConfig:
    values = read_config(source)
    inner = values.pop("eagle_config", None) or {}
    if layers := values.pop(LAYER_IDS, None):
        # Engines count hidden states after so many layers; architectures count outputs of layers.
        inner = {**inner, LAYER_IDS: [layer - 1 for layer in layers]}
    for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
        if not values.get(key):
            raise CheckpointError(f"{source}/{CONFIG} has no {key}; copy the folder again.")
    if not ids and values.get("draft_vocab_size") not in (None, values["vocab_size"]):
        raise CheckpointError(
            f"{source}/{CONFIG} has draft_vocab_size={values['draft_vocab_size']}, and {WEIGHTS} has no d2t, which "
            "says which ids these are; copy the folder again."
        )
    # A map of all ids says nothing.
    return config_of(
        {"has_lm_head": True, **values, **inner}, f"{source}/{CONFIG}", () if len(ids) == values["vocab_size"] else ids
    )


def _usual(config: EagleConfig, source: object, base: str | os.PathLike[str] | None) -> EagleConfig:
    if base is None:
        raise ConfigurationError(
            f"{source}/{CONFIG} does not say which hidden states of its base the draft reads; name it by base (--base)."
        )
    served = open_model(base).config
    if not isinstance(served, GPTConfig):
        raise ConfigurationError(f"the base in {base} is no model of the family gpt, and drafts serve these.")
    return replace(config, auxiliary_layers=config.for_base(served).auxiliary_layers)


def _head_of(source: object, base: str | os.PathLike[str] | None) -> Tensor:
    """Return the weight of the output layer of the base."""
    if base is None:
        raise ConfigurationError(
            f"{source}/{WEIGHTS} has no lm_head, so the draft predicts with that of its base; name it by base (--base)."
        )
    head = BaseModel(base).head_source()
    ((name, stored),) = head.tensors.items()
    weight = torch.empty(tuple(stored.shape), dtype=getattr(torch, stored.dtype))
    with alone() as group:
        head.fill([Target(name, tuple(stored.shape), (0, 0), weight)], process_group=group)
    return weight


def _renamed(tensors: Mapping[str, Tensor], config: EagleConfig) -> dict[str, Tensor]:
    """Return the tensors by our names; those without a counterpart keep theirs."""
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in names_of(config).items()}
    layer, found = LAYERS[architecture_of(config)], {}
    for name, tensor in tensors.items():
        # Either beginning is in use.
        used = next((prefix for prefix in LAYERS.values() if name.startswith(prefix)), "")
        ours = layer + name.removeprefix(used) if used else name
        found[names.get(ours, name)] = tensor
    return found
