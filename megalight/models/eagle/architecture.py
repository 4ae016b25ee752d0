"""Drafts described in ModelOpt's JSON, as its plugin for Megatron reads it (``eagle_architecture.json``)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megalight.checkpoint.foreign.pickles import check_archive
from megalight.checkpoint.foreign.transformers_folder import WEIGHTS, json_object
from megalight.errors import ConfigurationError, nearest
from megalight.models.eagle.config import EagleConfig
from megalight.models.gpt import LatentConfig
from megalight.models.gpt.hugging_face.common import rotary_from

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "rope_theta": 10000,
        "initializer_range": 0.01,
        "rms_norm_eps": 1e-5,
    },
    "kimik2": {
        "num_attention_heads": 64,
        "intermediate_size": 18432,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
    },
}
"""Decoder -> ModelOpt's values of keys that a file leaves out."""

FIXED: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "position_embedding_type": ("rope", "yarn"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "tie_word_embeddings": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1, None),
    "parallel_draft_heads_num_layers": (1, None),
}
"""Key -> the values of it that a draft of EAGLE-3 can have here."""

READ = {
    *("hidden_size", "vocab_size", "draft_vocab_size", "max_position_embeddings", "has_lm_head"),
    *("eagle_aux_hidden_state_layer_ids", "eagle_decoder_type", "rope_parameters"),
    *(key for values in DEFAULTS.values() for key in values),
}

SILENT = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "use_cache", "pretraining_tp", "prefix", "num_return_sequences", "_attn_implementation"),
    *("output_attentions", "output_hidden_states", "output_scores"),
    # Of the experts of Kimi-K2, whose first layer has none. A draft is such a layer.
    *("aux_loss_alpha", "first_k_dense_replace", "moe_intermediate_size", "moe_layer_freq", "n_group"),
    *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_nextn_predict_layers"),
    *("routed_scaling_factor", "scoring_func", "seq_aux", "topk_group", "topk_method"),
}
"""Keys that change nothing in one dense layer."""


def read_architecture(path: str | os.PathLike[str], draft_ids: Sequence[int] = ()) -> EagleConfig:
    """Read a file with ModelOpt's ``eagle_architecture_config``. Keys that it leaves out have ModelOpt's values.

    Layers are counted from 0 there, by their outputs: ``eagle_aux_hidden_state_layer_ids: [1, 15, 28]`` are the hidden
    states after 2, 16 and 29 layers. Their order is kept.

    Args:
        path: the file.
        draft_ids: the ids that the draft predicts, of which the file has only the number (``draft_vocab_size``).

    Raises:
        ConfigurationError: there is no such file, a key is unknown, or a value has no counterpart here.
    """
    try:
        values = json_object(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ConfigurationError(f"architecture={path} cannot be read: {error}") from error
    # Files of all of ModelOpt's settings hold those of the draft in one entry.
    if "eagle_architecture_config" in values:
        outer, values = values, values["eagle_architecture_config"]
        values = {**{k: v for k, v in outer.items() if k == "eagle_decoder_type"}, **values}
        if others := sorted(outer.keys() - {"eagle_architecture_config", "eagle_decoder_type"}):
            raise ConfigurationError(
                f"{path} has {', '.join(others)} beside eagle_architecture_config; these are settings of training. "
                "Remove them, and set steps and decay of EagleModule."
            )
    inner = values.pop("eagle_config", None) or {}
    values = {**values, **inner}
    config = config_of(values, str(path), draft_ids)
    stated = values.get("draft_vocab_size") or values.get("vocab_size")
    if draft_ids and stated not in (None, len(draft_ids)):
        raise ConfigurationError(
            f"{path} has draft_vocab_size={stated}, and draft_vocabulary holds {len(draft_ids)} ids; give the file of "
            "this draft."
        )
    return config


def config_of(values: Mapping[str, Any], where: str, draft_ids: Sequence[int] = ()) -> EagleConfig:
    """Make a configuration of the keys of an architecture, or of a ``config.json`` of a draft.

    Args:
        where: what errors call the file.
        draft_ids: see :func:`read_architecture`.

    Raises:
        ConfigurationError: a key is unknown, or a value has no counterpart here.
    """
    known = READ | SILENT | FIXED.keys()
    for key in values:
        if key not in known:
            raise ConfigurationError(f"{where} has {key!r}, which is not known here; remove it.{nearest(key, known)}")
    for key, good in FIXED.items():
        if (found := values.get(key, good[0])) not in good:
            raise ConfigurationError(f"{where}: {key} is {found!r}; drafts of EAGLE-3 have {good[0]!r} here.")
    latent = "kv_lora_rank" in values or values.get("model_type") == "kimi_k2"
    decoder = values.get("eagle_decoder_type", "kimik2" if latent else "llama")
    if decoder not in DEFAULTS:
        raise ConfigurationError(f"{where}: eagle_decoder_type is {decoder!r}; known are {', '.join(DEFAULTS)}.")
    if decoder == "kimik2" and values.get("first_k_dense_replace", 1) < 1:
        raise ConfigurationError(
            f"{where}: first_k_dense_replace is 0, so the layer would have experts; a draft has a dense layer. Set 1."
        )
    rope = {"rope_parameters", "rope_scaling"} & values.keys()
    given = {key: value for key, value in DEFAULTS[decoder].items() if key != "rope_scaling" or not rope} | dict(values)
    smaller = given.get("draft_vocab_size") not in (None, given.get("vocab_size"))
    if smaller and not draft_ids:
        raise ConfigurationError(
            f"{where} has draft_vocab_size={given['draft_vocab_size']}, but not which ids these are; name a file with "
            "them by draft_vocabulary (megalight draft-vocabulary writes one), or leave draft_vocab_size out."
        )
    position = rotary_from(given)
    return EagleConfig(
        hidden_size=given.get("hidden_size") or 0,
        vocab_size=given.get("vocab_size") or 0,
        max_sequence_length=given.get("max_position_embeddings") or 0,
        num_heads=given["num_attention_heads"],
        num_kv_heads=given["num_attention_heads" if decoder == "kimik2" else "num_key_value_heads"],
        head_dim=0 if decoder == "kimik2" else given["head_dim"],
        ffn_hidden_size=given["intermediate_size"],
        norm_eps=given["rms_norm_eps"],
        rotary_base=position.base,
        rotary_scaling=position.scaling,
        latent=_latent(given) if decoder == "kimik2" else None,
        auxiliary_layers=tuple(layer + 1 for layer in given.get("eagle_aux_hidden_state_layer_ids") or ()),
        draft_ids=tuple(draft_ids),
        # ModelOpt's rule: a smaller vocabulary needs an output layer of its own, and without has_lm_head the base's is
        # taken.
        head="own" if draft_ids or given.get("has_lm_head") else "base",
        std=given["initializer_range"],
    )


def _latent(values: Mapping[str, Any]) -> LatentConfig:
    return LatentConfig(
        kv_rank=values["kv_lora_rank"],
        q_rank=values["q_lora_rank"],
        head_dim=values["qk_nope_head_dim"],
        rotary_dim=values["qk_rope_head_dim"],
        value_dim=values["v_head_dim"],
    )


def read_vocabulary(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Read the ids that a draft predicts.

    Args:
        path: a JSON list of ids; or their offsets ``d2t``, the id of row ``i`` being ``i + d2t[i]``: a folder or a file
            in safetensors that holds a tensor of this name, or ModelOpt's ``d2t.pt``.

    Raises:
        ConfigurationError: there is no such file, or it holds no such list.
    """
    file = Path(path)
    file = file / WEIGHTS if file.is_dir() else file
    try:
        if file.suffix == ".json":
            return ids_of(torch.tensor(json.loads(file.read_text(encoding="utf-8"))), offsets=False)
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                return ids_of(tensors.get_tensor("d2t"))
        check_archive(file)
        return ids_of(torch.load(file, weights_only=True))
    except Exception as error:  # of three formats, whose libraries have errors of their own
        raise ConfigurationError(
            f"draft_vocabulary={path} cannot be read ({error}); give a JSON list of ids, or a file with offsets d2t."
        ) from error


def ids_of(found: Any, *, offsets: bool = True) -> tuple[int, ...]:
    """Return ids as a tuple, from a tensor ``[n]`` of ids or of their offsets.

    Raises:
        ConfigurationError: it is no such tensor.
    """
    if not isinstance(found, torch.Tensor) or found.dim() != 1 or found.is_floating_point():
        raise ConfigurationError("it holds no list of whole numbers")
    ids: list[int] = (found + torch.arange(len(found)) if offsets else found).tolist()
    return tuple(ids)
