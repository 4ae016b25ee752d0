"""Layers of a Mamba-2 hybrid by Megatron-core: its stack with TransformerEngine's products and norms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mixing import Way, need
from benchmarks.peers.sharded_llama import process_group
from benchmarks.step import Step
from megalight.models.gpt import GPTConfig


@lru_cache
def groups() -> Any:
    """Return Megatron-core's process groups of this device alone."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with process_group(Step()):
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups()


def hybrid_layers(config: GPTConfig, layers: nn.ModuleDict) -> Way:
    """Return the layers of Megatron-core with the weights of ours."""
    need("megatron.core", "transformer_engine", "mamba_ssm", "causal_conv1d", "einops")
    from megatron.core.activations import squared_relu
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.transformer import TransformerConfig

    mamba = config.mamba
    assert mamba is not None
    theirs = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        activation_func=squared_relu,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm.eps,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        is_hybrid_model=True,
        mamba_state_dim=mamba.state_size,
        mamba_head_dim=mamba.head_dim,
        mamba_num_groups=mamba.num_groups,
        mamba_num_heads=mamba.num_heads,
    )
    stack: Any = HybridStack(
        theirs,
        hybrid_stack_spec.submodules,
        layer_type_list=list(config.layer_pattern),
        post_layer_norm=False,
        post_process=False,
        pg_collection=groups(),
    )
    stack = stack.cuda().train()
    with torch.no_grad():
        for layer, ours in zip(stack.layers, layers.values(), strict=True):
            fill(config, layer, dict(ours.named_parameters()))
    return Way(lambda hidden: stack(hidden[:, None], attention_mask=None)[:, 0], tuple(stack.parameters()))


def fill(config: GPTConfig, layer: Any, ours: dict[str, Tensor]) -> None:
    """Copy the weights of one of our layers into a layer of Megatron-core."""
    norm = next(value for name, value in ours.items() if name.endswith("_norm.weight"))
    if "mamba.in_proj.weight" in ours:
        mixer = layer.mixer
        first, last, out = mixer.in_proj, mixer.out_proj, "mamba.proj"
        weight = ours["mamba.in_proj.weight"]
        mixer.conv1d_weight.copy_(ours["mamba.conv.weight"][:, None])
        mixer.conv1d_bias.copy_(ours["mamba.conv.bias"])
        for name in ("A_log", "D", "dt_bias"):
            getattr(mixer, name).copy_(ours[f"mamba.scan.{name}"])
        mixer.norm.weight.copy_(ours["mamba.norm.weight"])
    elif "attention.qkv.weight" in ours:
        first, last, out = layer.self_attention.linear_qkv, layer.self_attention.linear_proj, "attention.proj"
        size, groups, per = config.head_dim, config.num_kv_heads, config.num_heads // config.num_kv_heads
        rows = ours["attention.qkv.weight"].split([config.num_heads * size, groups * size, groups * size])
        # The rows of a group stand together: its queries, its keys, its values.
        shares = [part.unflatten(0, (groups, count * size)) for part, count in zip(rows, (per, 1, 1), strict=True)]
        weight = torch.cat(shares, 1).flatten(0, 1)
    else:
        first, last, out = layer.mlp.linear_fc1, layer.mlp.linear_fc2, "mlp.down"
        weight = ours["mlp.up.weight"]
    first.layer_norm_weight.copy_(norm)
    first.weight.copy_(weight)
    last.weight.copy_(ours[f"{out}.weight"])
