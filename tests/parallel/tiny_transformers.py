"""Tiny models of every family of ``transformers``, and the comparison of a layout with the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from tests.parallel.gathering import gather_canonical, relative_error

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "sliding_window": 4, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "moe_layer_freq": 1,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96, "mlp_bias": False, "use_cache": False,
    "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "rotary_dim": 4,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "dropout_rate": 0.0, "state_size": 8, "d_kv": 8,
    "attn_dropout": 0.0, "summary_last_dropout": 0.0, "chunk_size": 4, "mamba_chunk_size": 4, "word_embed_proj_dim": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "xlnet": {"n_head": 4, "d_head": 8, "d_model": 32, "d_inner": 48, "n_layer": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "bamba": {"attn_layer_indices": [1]},
    "reformer": {"is_decoder": True},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
}
"""Settings of single families."""


def tiny(family: str, **settings: Any) -> nn.Module:
    """A causal language model of a family, with weights that are not symmetric."""
    import transformers

    kind = type(transformers.AutoConfig.for_model(family))
    text = kind.sub_configs.get("text_config") if kind.sub_configs else None
    config = _sized(kind, family, settings) if text is None else kind(text_config=_sized(text, "", settings).to_dict())
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Grouped products of experts are not made for float64.
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found: nn.Module = model.double().train()
    return found


def _sized(kind: Any, family: str, settings: dict[str, Any]) -> Any:
    plain = kind()
    sizes = {name: value for name, value in SIZES.items() if name in vars(plain) or name in kind.attribute_map}
    if "kv_lora_rank" in sizes:  # latent attention has a key head for each query head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)  # that of the rotated part
    if "layer_types" in vars(plain) and plain.layer_types is None:
        sizes["layer_types"] = ["full_attention"] * 2
    return kind(**{**sizes, **OWN.get(family, {}), **settings})


@contextmanager
def float64() -> Iterator[None]:
    """Let models compute in float64 where their code asks for float32, so that nothing rounds."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def errors_of(family: str, sequence_parallel: bool = False, **settings: Any) -> dict[str, float]:
    """How far loss and gradients of a tensor-parallel model are from those of the plain one, on every rank."""
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    whole = tiny(family, **settings)
    model = copy.deepcopy(whole)
    plan = plan_for(model)
    assert plan is not None, "it declares no plan"
    specs = parallelize(model, plan, mesh, sequence_parallel=sequence_parallel)
    split = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in whole.parameters())
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    with float64():
        for one in (model, whole):
            out = one(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            losses.append(out.loss)
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, specs, mesh)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    errors = {name: relative_error(grads[name], wanted[name]) if name in grads else 1.0 for name in wanted}
    return {**errors, "loss": relative_error(*losses), "share of parameters": split}
