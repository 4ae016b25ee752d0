"""Checkpoints of Megatron-core: weights and configurations are those that were written, and nothing in them is run."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint import Box, View
from megalight.checkpoint.foreign import pickles
from megalight.checkpoint.foreign.torch_dcp import TorchFolder, WantedBox
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt import (
    AttentionConfig,
    GPTConfig,
    MambaConfig,
    MultiTokenConfig,
    NormConfig,
    PositionConfig,
)
from megalight.models.gpt.megatron import MegatronFolder, config_of
from megalight.models.gpt.model import GPT
from megalight.models.loading import saved_model
from megalight.nn.canonical import canonical_tensors
from megalight.nn.mamba2 import GatedNorm
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig
from megalight.optim.schedules import CosineDecay
from megalight.parallel.source import Target
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_transformers_export import pl_trainer
from tests.strategies.training import ADAM, CLIP, SEED, Losses, WithData

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LLAMA = GPTConfig(
    num_layers=3,
    hidden_size=16,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    ffn_hidden_size=20,
    vocab_size=37,
    max_sequence_length=24,
    position=PositionConfig(base=5e5),
    attention=AttentionConfig(qk_norm=True),
    norm=NormConfig(eps=1e-6),
)
GPT2 = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    ffn_hidden_size=64,
    vocab_size=37,
    max_sequence_length=24,
    activation="gelu_tanh",
    mlp_bias=True,
    tie_embeddings=True,
    norm=NormConfig(kind="layer"),
    position=PositionConfig(kind="learned"),
    attention=AttentionConfig(qkv_bias=True, proj_bias=True),
)
SINKS = replace(LLAMA, attention=AttentionConfig(softmax="learnable"))
EXPERTS = replace(
    LLAMA,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        router=RouterConfig(top_k=2, score="sigmoid", expert_bias=True, scale=2.5),
        shared=SharedConfig(ffn_hidden_size=8, gate=True),
    ),
)


HYBRID = replace(
    LLAMA,
    num_layers=5,
    attention=AttentionConfig(),
    layer_pattern="M*M-E",
    mamba=MambaConfig(num_heads=4, head_dim=6, state_size=5, num_groups=2, norm_eps=1e-5),
    activation="squared_relu",
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        router=RouterConfig(top_k=2, score="sigmoid", expert_bias=True, scale=2.5),
        shared=SharedConfig(ffn_hidden_size=8),
    ),
)
HYBRID_DEPTHS = replace(HYBRID, mtp=MultiTokenConfig(num_layers=2, loss_scale=0.3, pattern="*ME"))
DEPTHS = replace(LLAMA, mtp=MultiTokenConfig(num_layers=2, loss_scale=0.3))
DEPTHS_EXPERTS = replace(EXPERTS, mtp=MultiTokenConfig())


def arguments(config: GPTConfig, **changes: Any) -> argparse.Namespace:
    """What Megatron-LM keeps of its command line."""
    values: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "group_query_attention": config.num_kv_heads != config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": 48,
        "max_position_embeddings": config.max_sequence_length,
        "swiglu": config.activation == "swiglu",
        "add_bias_linear": config.mlp_bias,
        "untie_embeddings_and_output_weights": not config.tie_embeddings,
        "normalization": "RMSNorm" if config.norm.kind == "rms" else "LayerNorm",
        "norm_epsilon": config.norm.eps,
        "position_embedding_type": "learned_absolute" if config.position.kind == "learned" else "rope",
        "rotary_base": config.position.base,
        "qk_layernorm": config.attention.qk_norm,
        "softmax_type": config.attention.softmax,
        "params_dtype": torch.bfloat16,
    }
    if config.moe is not None:
        assert config.moe.shared is not None
        values |= {
            "num_experts": config.moe.num_experts,
            "moe_ffn_hidden_size": config.moe.ffn_hidden_size,
            "moe_router_topk": 2,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config.moe.router.scale,
            "moe_shared_expert_intermediate_size": config.moe.shared.ffn_hidden_size,
            "moe_shared_expert_gate": config.moe.shared.gate,
        }
    if config.mamba is not None:
        values |= {
            "is_hybrid_model": True,
            "hybrid_override_pattern": config.layer_pattern,
            "mtp_hybrid_override_pattern": config.mtp and config.mtp.pattern,
            "squared_relu": True,
            "mamba_num_heads": config.mamba.num_heads,
            "mamba_head_dim": config.mamba.head_dim,
            "mamba_state_dim": config.mamba.state_size,
            "mamba_num_groups": config.mamba.num_groups,
        }
    if config.mtp is not None:
        values |= {"mtp_num_layers": config.mtp.num_layers, "mtp_loss_scaling_factor": config.mtp.loss_scale}
    return argparse.Namespace(**values | changes)


def weights(config: GPTConfig) -> dict[str, Tensor]:
    """All canonical tensors, every element another number."""
    torch.manual_seed(3)
    found = {name: torch.randn(tensor.shape) for name, tensor in canonical_tensors(GPT(config)).items()}
    if config.moe is not None:
        for name in [name for name in found if name.endswith("mlp.router.weight")]:
            found[name.replace("weight", "expert_bias")] = torch.randn(config.moe.num_experts)
    return found


def theirs(config: GPTConfig, ours: dict[str, Tensor], experts_apart: bool = False) -> dict[str, Tensor]:
    """Megatron's tensors with a key per layer, put together in loops, head by head."""
    made: dict[str, Tensor] = {}

    def vocabulary(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.full((-len(tensor) % 16, tensor.shape[1]), torch.nan, dtype=tensor.dtype)])

    made["embedding.word_embeddings.weight"] = vocabulary(ours["embed.word.weight"])
    if not config.tie_embeddings:
        made["output_layer.weight"] = vocabulary(ours["head.output_layer.weight"])
    if config.position.kind == "learned":
        made["embedding.position_embeddings.weight"] = ours["embed.position.weight"]
    for layer in range(config.num_layers):
        old, new = f"layers.{layer}.", f"decoder.layers.{layer}."
        for leaf in ("weight", "bias"):
            if f"{old}attention.q.{leaf}" in ours:
                q, k, v = (ours[f"{old}attention.{part}.{leaf}"] for part in "qkv")
                size, queries = config.head_dim, config.num_heads // config.num_kv_heads
                rows = []
                for group in range(config.num_kv_heads):
                    for head in range(group * queries, (group + 1) * queries):
                        rows += [q[head * size : (head + 1) * size]]
                    rows += [part[group * size : (group + 1) * size] for part in (k, v)]
                made[f"{new}self_attention.linear_qkv.{leaf}"] = torch.cat(rows)
            norms = "linear_qkv.layer_norm_"
            if f"{old}attention_norm.{leaf}" in ours:
                made[f"{new}self_attention.{norms}{leaf}"] = ours[f"{old}attention_norm.{leaf}"]
                key = "pre_mlp_layernorm." if config.moe else "mlp.linear_fc1.layer_norm_"
                made[f"{new}{key}{leaf}"] = ours[f"{old}mlp_norm.{leaf}"]
                made[f"decoder.final_layernorm.{leaf}"] = ours[f"head.norm.{leaf}"]
            if f"{old}attention.proj.{leaf}" in ours:
                made[f"{new}self_attention.linear_proj.{leaf}"] = ours[f"{old}attention.proj.{leaf}"]
            for mine, its in (("mlp.", "mlp."), ("mlp.shared.", "mlp.shared_experts.")):
                if f"{old}{mine}down.{leaf}" in ours:
                    parts = [ours[f"{old}{mine}{p}.{leaf}"] for p in ("gate", "up") if f"{old}{mine}{p}.{leaf}" in ours]
                    made[f"{new}{its}linear_fc1.{leaf}"] = torch.cat(parts)
                    made[f"{new}{its}linear_fc2.{leaf}"] = ours[f"{old}{mine}down.{leaf}"]
        if config.attention.softmax == "learnable":
            made[f"{new}self_attention.core_attention.softmax_offset"] = ours[f"{old}attention.sink.offset"]
        if config.attention.qk_norm:
            for part in "qk":
                made[f"{new}self_attention.{part}_layernorm.weight"] = ours[f"{old}attention.{part}_norm.weight"]
        if config.moe is not None:
            made[f"{new}mlp.router.weight"] = ours[f"{old}mlp.router.weight"]
            made[f"{new}mlp.router.expert_bias"] = ours[f"{old}mlp.router.expert_bias"]
            made[f"{new}mlp.shared_experts.gate_weight"] = ours[f"{old}mlp.shared_gate.weight"]
            each = range(config.moe.num_experts)
            gates, ups, downs = (
                [ours[f"{old}mlp.experts.{e}.{part}.weight"] for e in each] for part in ("gate", "up", "down")
            )
            if experts_apart:
                for e in each:
                    made[f"{new}mlp.experts.{e}.linear_fc1.weight_w"] = gates[e]
                    made[f"{new}mlp.experts.{e}.linear_fc1.weight_v"] = ups[e]
                    made[f"{new}mlp.experts.{e}.linear_fc2.weight"] = downs[e]
            else:
                fused = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
                made[f"{new}mlp.experts.experts.linear_fc1.weight"] = torch.stack(fused)
                made[f"{new}mlp.experts.experts.linear_fc2.weight"] = torch.stack(downs)
    return made


def depths(config: GPTConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multi-token prediction beside the layers, each depth with a layer like the others."""
    made = theirs(config, ours)
    one = replace(config, num_layers=1, mtp=None)
    for depth in range(config.num_depths):
        old, new = f"mtp.depths.{depth}.", f"mtp.layers.{depth}."
        inner = {name.replace(f"{old}layers.0.", "layers.0."): tensor for name, tensor in ours.items() if old in name}
        for key, tensor in theirs(one, {**ours, **inner}).items():
            if ".layers.0." in key:
                made[key.replace("decoder.layers.0.", f"{new}transformer_layer.")] = tensor
        made[f"{new}enorm.weight"] = ours[f"{old}embed_norm.weight"]
        made[f"{new}hnorm.weight"] = ours[f"{old}hidden_norm.weight"]
        made[f"{new}eh_proj.weight"] = ours[f"{old}join.weight"]
        made[f"{new}final_layernorm.weight"] = ours[f"{old}norm.weight"]
    return made


def hybrid(config: GPTConfig, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers of one kind each, and the parts of Mamba-2 under keys of their own."""
    made = {
        "embedding.word_embeddings.weight": ours["embed.word.weight"],
        "output_layer.weight": ours["head.output_layer.weight"],
        "decoder.final_norm.weight": ours["head.norm.weight"],
    }
    assert config.moe is not None
    stacks = [("layers.", "decoder.layers.", config.layer_pattern)]
    for depth in range(config.num_depths):
        assert config.mtp is not None
        old, new = f"mtp.depths.{depth}.", f"mtp.layers.{depth}."
        stacks.append((f"{old}layers.", f"{new}mtp_model_layer.layers.", config.mtp.pattern))
        made[f"{new}enorm.weight"] = ours[f"{old}embed_norm.weight"]
        made[f"{new}hnorm.weight"] = ours[f"{old}hidden_norm.weight"]
        made[f"{new}eh_proj.weight"] = ours[f"{old}join.weight"]
        made[f"{new}final_layernorm.weight"] = ours[f"{old}norm.weight"]
    for layer, symbol, outer, their in [
        (layer, symbol, outer, their) for outer, their, symbols in stacks for layer, symbol in enumerate(symbols)
    ]:
        old, new = f"{outer}{layer}.", f"{their}{layer}."
        if symbol == "M":
            for part in ("z", "x", "B", "C", "dt"):
                made[f"{new}mixer.in_proj.weight.{part}"] = ours[f"{old}mamba.{part}.weight"]
            for part in ("x", "B", "C"):
                made[f"{new}mixer.conv1d.weight.{part}"] = ours[f"{old}mamba.conv_{part}.weight"][:, None]
                made[f"{new}mixer.conv1d.bias.{part}"] = ours[f"{old}mamba.conv_{part}.bias"]
            for part in ("A_log", "D", "dt_bias"):
                made[f"{new}mixer.{part}"] = ours[f"{old}mamba.scan.{part}"]
            made[f"{new}mixer.norm.weight"] = ours[f"{old}mamba.norm.weight"]
            made[f"{new}mixer.out_proj.weight"] = ours[f"{old}mamba.proj.weight"]
            # fused with the projection in Transformer Engine's layers, and apart in others
            norm = "mixer.in_proj.layer_norm_weight" if layer else "norm.weight"
            made[new + norm] = ours[f"{old}mamba_norm.weight"]
        elif symbol == "*":
            q, k, v = (ours[f"{old}attention.{part}.weight"].split(config.head_dim) for part in "qkv")
            rows = [t for g in range(2) for t in (*q[3 * g : 3 * g + 3], k[g], v[g])]
            made[f"{new}self_attention.linear_qkv.weight"] = torch.cat(rows)
            made[f"{new}self_attention.linear_proj.weight"] = ours[f"{old}attention.proj.weight"]
            made[f"{new}self_attention.linear_qkv.layer_norm_weight"] = ours[f"{old}attention_norm.weight"]
        elif symbol == "-":
            made[f"{new}mlp.linear_fc1.weight"] = ours[f"{old}mlp.up.weight"]
            made[f"{new}mlp.linear_fc2.weight"] = ours[f"{old}mlp.down.weight"]
            made[f"{new}mlp.linear_fc1.layer_norm_weight"] = ours[f"{old}mlp_norm.weight"]
        else:
            made[f"{new}pre_mlp_layernorm.weight"] = ours[f"{old}mlp_norm.weight"]
            for leaf in ("weight", "expert_bias"):
                made[f"{new}mlp.router.{leaf}"] = ours[f"{old}mlp.router.{leaf}"]
            for mine, its in (("up", "linear_fc1"), ("down", "linear_fc2")):
                experts = [ours[f"{old}mlp.experts.{e}.{mine}.weight"] for e in range(config.moe.num_experts)]
                made[f"{new}mlp.experts.experts.{its}.weight"] = torch.stack(experts)
                made[f"{new}mlp.shared_experts.{its}.weight"] = ours[f"{old}mlp.shared.{mine}.weight"]
    return made


def stacked(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The same with one key for all layers."""
    made = {key: tensor for key, tensor in tensors.items() if ".layers." not in key}
    for key in tensors:
        if ".layers.0." in key:
            parts = [tensors[key.replace(".layers.0.", f".layers.{n}.")] for n in range(layers)]
            made[key.replace(".layers.0.", ".layers.")] = torch.stack(parts)
    return made


def sharded(key: str, tensor: Tensor) -> View:
    """A tensor as four ranks save it: cut in two along the first and the last dim."""
    boxes = [Box((0,) * tensor.ndim, tensor.clone())]
    for dim in {0, tensor.ndim - 1}:
        halves = []
        for box in boxes:
            middle = box.data.shape[dim] // 2
            for start, size in ((0, middle), (middle, box.data.shape[dim] - middle)):
                if size:
                    offset = tuple(o + start * (d == dim) for d, o in enumerate(box.offset))
                    halves.append(Box(offset, box.data.narrow(dim, start, size).contiguous()))
        boxes = halves
    return View(key, tensor.shape, boxes)


def save(
    path: Path,
    tensors: dict[str, Tensor],
    args: argparse.Namespace,
    optimizer: Any = None,
    iteration: int = 10,
    flat: dict[str, View] | None = None,
    notes: dict[str, Any] | None = None,
) -> Path:
    folder = path / "iter_0000010"
    views = {key: sharded(key, tensor) for key, tensor in tensors.items()}
    state = {**views, **(flat or {}), "decoder.layers.mlp._extra_state/shard_0_3": b"objects"}
    dcp.save(state, checkpoint_id=folder)
    if notes is not None:
        # Megatron-core's planner adds an attribute to torch's metadata.
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.mcore_data = notes
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    common = {"args": args, "iteration": iteration, "checkpoint_version": 3.0, "optimizer": optimizer}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    return path


CASES: dict[str, tuple[GPTConfig, Callable[[GPTConfig, dict[str, Tensor]], dict[str, Tensor]]]] = {
    "llama": (LLAMA, theirs),
    "llama, layers stacked": (LLAMA, lambda config, ours: stacked(theirs(config, ours), config.num_layers)),
    "gpt2, wrapped": (GPT2, lambda config, ours: {f"module.{k}": t for k, t in theirs(config, ours).items()}),
    "sinks": (SINKS, theirs),
    "sinks, layers stacked": (SINKS, lambda config, ours: stacked(theirs(config, ours), config.num_layers)),
    "experts": (EXPERTS, theirs),
    "experts, layers stacked": (EXPERTS, lambda config, ours: stacked(theirs(config, ours), config.num_layers)),
    "hybrid": (HYBRID, hybrid),
    "hybrid with depths": (HYBRID_DEPTHS, hybrid),
    "depths": (DEPTHS, depths),
    "depths of experts": (DEPTHS_EXPERTS, depths),
    "experts apart": (EXPERTS, lambda config, ours: theirs(config, ours, experts_apart=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_imported(case: str, tmp_path: Path) -> None:
    config, make = CASES[case]
    ours = weights(config)
    save(tmp_path / "run", make(config, ours), arguments(config))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--quiet"]) == 0
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert GPTConfig.from_dict(opened.common["model"]["config"]) == config
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in ours.items()}
    boxes = [Target(f"model.{name}", tuple(t.shape), (0,) * t.ndim, t) for name, t in found.items()]
    opened.fill(boxes, prefix="model.")
    for name, tensor in ours.items():
        assert torch.equal(found[name], tensor), name
    model = saved_model(opened).root
    assert torch.isfinite(model.embed.word.weight).all()


def test_a_box_of_a_fused_weight(tmp_path: Path) -> None:
    """Rows that begin and end inside groups of heads, and a few columns."""
    ours = weights(LLAMA)
    source = MegatronFolder(save(tmp_path, theirs(LLAMA, ours), arguments(LLAMA)), "model.")
    for name, low, high in (("attention.q", 3, 19), ("attention.v", 5, 7), ("mlp.up", 11, 20)):
        whole = ours[f"layers.1.{name}.weight"]
        data = torch.empty(high - low, 5, dtype=torch.float64)
        source.fill([Target(f"model.layers.1.{name}.weight", tuple(whole.shape), (low, 2), data)], strict=False)
        assert torch.equal(data, whole[low:high, 2:7].double())


def test_a_box_of_a_convolution(tmp_path: Path) -> None:
    ours = weights(HYBRID)
    source = MegatronFolder(save(tmp_path, hybrid(HYBRID, ours), arguments(HYBRID)), "model.")
    whole, data = ours["layers.2.mamba.conv_x.weight"], torch.empty(9, 2)
    source.fill([Target("model.layers.2.mamba.conv_x.weight", tuple(whole.shape), (8, 1), data)], strict=False)
    assert torch.equal(data, whole[8:17, 1:3])


def test_mismatches_list_key_shape_and_shard(tmp_path: Path) -> None:
    tensors = theirs(LLAMA, weights(LLAMA))
    tensors["decoder.layers.1.mlp.linear_fc1.weight"] = torch.zeros(44, 16)
    del tensors["decoder.layers.2.self_attention.linear_proj.weight"]
    tensors["mtp.layers.0.eh_proj.weight"] = torch.zeros(2, 4)
    save(tmp_path, tensors, arguments(LLAMA))
    with pytest.raises(CheckpointError) as error:
        MegatronFolder(tmp_path, "model.")
    message = str(error.value)
    assert "decoder.layers.1.mlp.linear_fc1.weight has shape [44, 16], expected [40, 16] (shards: [22, 8] at" in message
    assert (
        "decoder.layers.2.self_attention.linear_proj.weight is missing (for layers.2.attention.proj.weight" in message
    )
    assert "mtp.layers.0.eh_proj.weight of shape [2, 4] has no counterpart" in message


STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def often(*more: str) -> list[Any]:
    """Cases whose states are always looked at: dense layers, experts, mixers, depths; and some for full runs."""
    return ["llama", "hybrid with depths", "depths", *(pytest.param(each, marks=pytest.mark.full) for each in more)]


def assert_held(opened: checkpoint.Checkpoint, expected: dict[str, dict[str, Tensor]]) -> None:
    """Check that a checkpoint holds these tensors by the names of optimizer state and of parameters, bit by bit."""
    named = {f"optimizer.{state}.model.{n}": tensor for state, each in expected.items() for n, tensor in each.items()}
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in named.items()}
    opened.fill([Target(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in found.items()], strict=False)
    for name, tensor in named.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", often("llama, layers stacked", "experts", "hybrid"))
def test_optimizer_state_is_imported(case: str, tmp_path: Path) -> None:
    """Dense models have one optimizer, those with experts two, of which each has some of the parameters."""
    config, make = CASES[case]
    ours = weights(config)
    held = {name: tensor for name, tensor in ours.items() if "expert_bias" not in name}
    states = {state: {name: torch.randn_like(tensor) for name, tensor in held.items()} for state in STATES}
    saved = make(config, ours)
    for state, values in states.items():
        made = make(config, {**ours, **values})
        for key, tensor in made.items():
            number = f"chained_{int('experts.experts' in key)}." if config.moe else ""
            if "expert_bias" not in key:
                saved[f"{number}optimizer.state.{state}.module.{key}"] = tensor
    groups = [{"step": 9, "lr": 0.5}, {"step": 9}]
    optimizer = {"optimizer": {"param_groups": groups}}
    save(tmp_path / "run", saved, arguments(config), {0: optimizer, 1: optimizer} if config.moe else optimizer)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--dtype", "bfloat16", "--quiet"]) == 0
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert opened.common["global_step"] == 10
    assert opened.common["optimizer"]["groups"]["scalars"]["step"] == 9
    assert_held(opened, {STATES[key]: tensors for key, tensors in states.items()})
    assert opened.tensors["model.embed.word.weight"].dtype == "bfloat16"
    # Models of which weights alone are asked for.
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"), "--to", "checkpoint", "--quiet"]) == 0
    assert not [name for name in checkpoint.open(tmp_path / "b.ckpt").tensors if name.startswith("optimizer.")]


def pieces(key: str, tensor: Tensor) -> tuple[View, tuple[int, ...]]:
    """A tensor as ``fully_sharded_model_space`` stores it under TP2 and DP3, and the shape that it is noted with.

    Layers and experts are cut apart, rows (of both halves of a gate) in two, and each chunk at two odd places.
    """
    counts = [1] * tensor.ndim
    rows = tensor.ndim - 2
    if tensor.ndim > 1:
        counts[:rows] = tensor.shape[:rows]
        counts[rows] = 4 if "linear_fc1" in key and not key.endswith(("_w", "_v")) else 2
        counts[-1] = 2 if key.endswith("linear_proj.weight") else 1
    if any(size % count for size, count in zip(tensor.shape, counts, strict=True)):
        counts = [1] * tensor.ndim
    sizes = [size // count for size, count in zip(tensor.shape, counts, strict=True)]
    boxes = []
    for index in itertools.product(*map(range, counts)):
        chunk = tensor[tuple(slice(i * n, i * n + n) for i, n in zip(index, sizes, strict=True))].flatten()
        cuts = sorted({0, len(chunk) // 3 + 1, 2 * len(chunk) // 3 + 1, len(chunk)})
        for start, stop in itertools.pairwise(cuts):
            piece = chunk[start:stop].clone().view(*[1] * tensor.ndim, -1)
            boxes.append(Box((*index, start), piece))
    return View(key, (*counts, prod(sizes)), boxes), tuple(tensor.shape)


@pytest.mark.parametrize("case", often("llama, layers stacked", "experts", "experts apart", "hybrid"))
def test_optimizer_state_in_flat_pieces_is_imported(case: str, tmp_path: Path) -> None:
    config, make = CASES[case]
    ours = weights(config)
    states = {"fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    held = {name: tensor for name, tensor in ours.items() if "expert_bias" not in name}
    values = {state: {name: torch.randn_like(tensor) for name, tensor in held.items()} for state in states}
    flat: dict[str, View] = {}
    notes: dict[str, Any] = {}
    for state in states:
        for key, tensor in make(config, {**ours, **values[state]}).items():
            if "expert_bias" not in key:
                number = f"chained_{int('.experts.' in key)}." if config.moe else ""
                name = f"{number}optimizer.state.{state}.{key}"
                flat[name], shape = pieces(name, tensor)
                notes[name] = {"nd_reformulated_orig_global_shape": shape}
    optimizer = {"optimizer": {"param_groups": [{"step": 9}]}, "param_state_sharding_type": "fully_sharded_model_space"}
    save(tmp_path / "run", make(config, ours), arguments(config), {0: optimizer}, flat=flat, notes=notes)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--quiet"]) == 0
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert opened.common["optimizer"]["groups"]["scalars"]["step"] == 9
    assert_held(opened, {states[key]: tensors for key, tensors in values.items()})


@pytest.mark.parametrize("shape", [(5, 3), (24,), (4, 5), (4, -6), "x", (4.0, 6.0)])
def test_pieces_of_another_shape_are_refused(shape: Any, tmp_path: Path) -> None:
    key = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
    tensors, (view, _) = theirs(LLAMA, weights(LLAMA)), pieces(key, torch.randn(4, 6))
    notes = {key: {"nd_reformulated_orig_global_shape": shape}}
    save(tmp_path, tensors, arguments(LLAMA), flat={key: view}, notes=notes)
    with pytest.raises(CheckpointError, match=r"exp_avg\.decoder\.layers\.0.* flat pieces of .*which cannot be"):
        MegatronFolder(tmp_path, "model.")


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.full), "bf16-true"])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists", "ignore:You.re resuming from a checkpoint")
def test_training_goes_on_from_imported_state(precision: Any, tmp_path: Path) -> None:
    """The run that is written as Megatron writes it, imported and resumed is the run that never stopped."""
    config = replace(LLAMA, vocab_size=101)
    adam = replace(ADAM, schedule=CosineDecay(warmup=2, min_ratio=0.1))

    def fit(resume: str | None) -> tuple[list[float], list[float], int]:
        losses, module = Losses(), WithData(config, optimizer=adam, seed=SEED)
        losses.on_train_start = lambda *_: None  # type: ignore[method-assign]
        module.steps = 6
        every = ModelCheckpoint(tmp_path / "ours", "{step}", every_n_train_steps=4, save_top_k=-1)
        runner = pl_trainer(
            MegatronStrategy(micro_batch_size=2), callbacks=[losses, every], max_steps=6, limit_val_batches=0,
            gradient_clip_val=CLIP, use_distributed_sampler=False, precision=precision,
        )  # fmt: skip
        runner.fit(module, ckpt_path=resume)
        rates = [group["lr"] for group in runner.optimizers[0].param_groups]
        return losses.losses, rates, runner.global_step

    whole, rates, _ = fit(None)
    opened = checkpoint.open(tmp_path / "ours/step=4.ckpt")

    def read(prefix: str) -> dict[str, Tensor]:
        names = [name for name in opened.tensors if name.startswith(prefix)]
        found = {n: torch.empty(opened.tensors[n].shape, dtype=getattr(torch, opened.tensors[n].dtype)) for n in names}
        opened.fill([Target(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in found.items()], strict=False)
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    made = theirs(config, read("model."))
    for state, name in STATES.items():
        values = read(f"optimizer.{name}.model.")
        made |= {f"optimizer.state.{state}.{key}": t for key, t in theirs(config, values).items()} if values else {}
    save(tmp_path / "run", made, arguments(config), iteration=4)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--quiet"]) == 0
    assert fit(str(tmp_path / "a.ckpt")) == (whole[4:], rates, 6)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "there is no exp_avg_sq"),
        ("chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight", "embeddings.weight is missing"),
        (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param",
            "in the format dp_reshardable (fully_sharded_bucket_space in older releases), and optimizer.distributed.",
        ),
        ("optimizer.distributed.dp_group_idx_0.param_state", "in the format dp_zero_gather_scatter"),
        ("optimizer.state.momentum_buffer.decoder.final_layernorm.weight", "its keys are not known"),
    ],
)
def test_optimizer_state_of_another_form_is_refused_by_name(
    key: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = theirs(LLAMA, weights(LLAMA))
    tensors[key] = torch.zeros(16)
    save(tmp_path / "run", tensors, arguments(LLAMA))
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--quiet"]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "holds optimizer state that cannot be imported" in said
    assert message in said
    assert not (tmp_path / "a.ckpt").exists()
    assert main([*words, "--weights-only"]) == 0
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert "optimizer" not in opened.common
    assert all(name.startswith("model.") for name in opened.tensors)
    # A folder of transformers holds weights alone.
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "transformers", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "b.ckpt"), "--weights-only", "--quiet"]) == 2
    assert "--weights-only leaves optimizer state of Megatron-core out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention is True: multi-latent attention cannot be"),
        ({"mtp_num_layers": 2, "is_hybrid_model": True}, "multi-token prediction must state the same layers"),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, "depths of multi-token prediction that share a layer"),
        ({"hybrid_layer_pattern": "M*|M/M/*"}, "pattern of layers 'M\\*M/M/\\*': each depth"),
        ({"hybrid_layer_pattern": "M*M/M/M", "mtp_use_repeated_layer": True}, "depths .* that share a layer"),
        ({"mtp_num_layers": 2, "mtp_hsm": True}, "depths of multi-token prediction that mix hidden states"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "Sinkhorn's algorithm cannot be imported"),
        ({"position_embedding_type": "mrope"}, "'mrope'; it has no counterpart"),
        ({"window_size": (7, 7)}, r"window_size is \(7, 7\); windows that end at the token itself"),
        ({"window_size": [-1, 0]}, r"window_size is \(-1, 0\)"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_of(vars(arguments(LLAMA, **changes)))


def test_arguments_become_options() -> None:
    scaled = config_of(vars(arguments(LLAMA, use_rope_scaling=True, rope_scaling_factor=32.0, rotary_percent=0.5)))
    assert scaled.position.scaling is not None
    assert (scaled.position.scaling.factor, scaled.position.fraction) == (32.0, 0.5)
    assert scaled.attention.softmax == "vanilla"
    bars = config_of(vars(arguments(HYBRID, hybrid_override_pattern=None, hybrid_layer_pattern="M*|M-E")))
    assert bars == HYBRID
    slashes = {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M*|M-E/*ME/*ME"}
    depths = {"mtp_num_layers": None, "mtp_hybrid_override_pattern": None}  # newer releases state the pattern alone
    assert config_of(vars(arguments(HYBRID_DEPTHS, **slashes, **depths))) == HYBRID_DEPTHS
    ratios = {"hybrid_attention_ratio": 0.34, "hybrid_mlp_ratio": 0.34, "mamba_num_heads": None, "mamba_head_dim": 8}
    spread = config_of(vars(arguments(HYBRID, num_layers=3, hybrid_override_pattern=None, **ratios)))
    assert sorted(spread.layer_pattern) == ["*", "-", "M"]
    assert spread.mamba is not None
    assert (spread.mamba.num_heads, spread.moe) == (2 * 16 // 8, None)
    norms = [each.eps for each in GPT(bars).modules() if isinstance(each, GatedNorm)]
    assert norms == [1e-5, 1e-5]  # whatever the eps of the other norms is
    same = config_of(vars(arguments(HYBRID, norm_epsilon=1e-5)))
    assert same.mamba is not None
    assert same.mamba.norm_eps is None  # so that transformers, which has one eps, can express the model
    exact = config_of(vars(arguments(GPT2, bias_gelu_fusion=False)))
    assert exact.activation == "gelu"
    assert config_of(vars(arguments(LLAMA, softmax_type="off-by-one"))).attention.softmax == "off-by-one"
    for freq, pattern in ((3, (True, True, False)), ([1, 0, 1], (True, False, True)), (None, (True,))):
        limits = {"window_size": (7, 0), "window_attn_skip_freq": freq}
        windows = AttentionConfig(qk_norm=True, window=7, window_pattern=pattern)
        assert config_of(vars(arguments(LLAMA, **limits))).attention == windows
    assert config_of(vars(arguments(LLAMA, window_size=(-1, -1)))) == LLAMA
    for freq, pattern in ((3, (True, True, False)), ([0, 1, 0], (True, False, True))):
        unrotated = config_of(vars(arguments(LLAMA, no_rope_freq=freq)))
        assert unrotated == replace(LLAMA, position=replace(LLAMA.position, pattern=pattern))
    mixed = config_of(vars(arguments(EXPERTS, moe_layer_freq=2)))
    assert [mixed.has_experts(layer) for layer in range(3)] == [True, False, True]
    with pytest.raises(CheckpointError, match="lack 'num_layers'"):
        config_of({"position_embedding_type": "rope", "num_attention_heads": 2, "group_query_attention": False})


class Hostile:
    """Writes a file where its pickle is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


def test_nothing_in_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = pickles.read(pickle.dumps({"a": Hostile(), "b": {1, 2}}), "x")
    assert record["a"].kind.endswith(".system")
    assert (record["a"].arguments, record["b"]) == (("touch hostile",), {1, 2})
    folder = save(tmp_path / "run", theirs(LLAMA, weights(LLAMA)), arguments(LLAMA, hook=Hostile())) / "iter_0000010"
    MegatronFolder(tmp_path / "run", "model.")
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        TorchFolder(folder)
    for cut in range(0, len(metadata), len(metadata) // 40):
        (folder / ".metadata").write_bytes(metadata[:cut])
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            TorchFolder(folder)
    (folder / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../__0.distc"))
    with pytest.raises(CheckpointError, match="stay inside the folder"):
        read_all(tmp_path / "run")
    assert not (tmp_path / "hostile").exists()


def read_all(path: Path) -> None:
    source = MegatronFolder(path, "model.")
    shapes = {name: place.shape for name, place in source.tensors.items()}
    source.fill([Target(name, shape, (0,) * len(shape), torch.empty(shape)) for name, shape in shapes.items()])


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, theirs(LLAMA, weights(LLAMA)), arguments(LLAMA)) / "iter_0000010"
    read_all(tmp_path)
    data = folder / "__0_0.distcp"
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"the shard at \[\d+.* of shape \[.*\(__0_0\.distcp\) is damaged"):
        read_all(tmp_path)


def inflated(data: bytes) -> bytes:
    """An archive of ``torch.save`` whose tensor is compressed, and 16 MiB long."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as other:
        for info in archive.infolist():
            other.writestr(info.filename, bytes(1 << 24) if "/data/" in info.filename else archive.read(info))
    return out.getvalue()


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Torch would unpack all of an archive's entry before it compares sizes."""
    folder = save(tmp_path, theirs(LLAMA, weights(LLAMA)), arguments(LLAMA)) / "iter_0000010"
    opened = TorchFolder(folder)
    key, found = next(iter(opened.tensors.items()))
    shard, *others = found.shards
    held = shard.archive
    data = (folder / held.file).read_bytes()
    bomb = inflated(data[held.start : held.start + held.length])
    assert len(bomb) < 1 << 16
    (folder / "bomb").write_bytes(bomb)
    smaller = replace(shard, archive=replace(held, file="bomb", start=0, length=len(bomb)))
    opened.tensors[key] = replace(found, shards=(smaller, *others))
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(key)} in .* is damaged: it is compressed, .* 1677\d+ bytes"
    ):
        opened.fill([WantedBox(key, (0,) * len(found.shape), torch.empty(found.shape))])


def test_other_formats_are_refused_with_the_way_to_migrate(tmp_path: Path) -> None:
    folder = save(tmp_path, theirs(LLAMA, weights(LLAMA)), arguments(LLAMA)) / "iter_0000010"
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match=r"'zarr'; torch_dist is read.*--ckpt-format torch_dist"):
        MegatronFolder(tmp_path, "model.")
    (folder / "metadata.json").unlink()
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="format torch, or not finished"):
        MegatronFolder(tmp_path, "model.")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../10")
    with pytest.raises(CheckpointError, match="a number of an iteration is expected"):
        MegatronFolder(tmp_path, "model.")
