"""Which tensors of Megatron-core hold ours: keys, shapes, and the order of rows.

Layers share one key, with the layer as the first dim, or have a key each. Fused tensors have queries, keys and values
of one group of heads after another, and all rows of the gate before those of ``up``. Those of Mamba-2 are stored apart,
with their names behind the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megalight.checkpoint.foreign.torch_dcp import TorchTensor, WantedBox
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.model import GPT
from megalight.nn.canonical import canonical_tensors
from megalight.nn.mlp import is_gated
from megalight.parallel.source import Target

ENDS = {
    "embed.word": ("embedding.word_embeddings",),
    "embed.position": ("embedding.position_embeddings",),
    # the second name in hybrid models
    "head.norm": ("decoder.final_layernorm", "decoder.final_norm"),
    "head.output_layer": ("output_layer",),
}
DEPTH = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "final_layernorm"}
"""Our module in a depth of multi-token prediction -> theirs. Its layers are like the others."""

DEPTH_LAYERS = ("transformer_layer", "mtp_model_layer")
"""Their names of that layer. The second one is newer, and stored under the first in most models."""

LAYER = {
    "attention_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "attention_norm.bias": ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
    "attention.q": ("self_attention.linear_qkv",),
    "attention.k": ("self_attention.linear_qkv",),
    "attention.v": ("self_attention.linear_qkv",),
    "attention.q_norm": ("self_attention.q_layernorm",),
    "attention.k_norm": ("self_attention.k_layernorm",),
    "attention.sink.offset": ("self_attention.core_attention.softmax_offset",),
    "attention.proj": ("self_attention.linear_proj",),
    "mamba_norm.weight": ("mixer.in_proj.layer_norm_weight", "norm.weight"),
    "mamba_norm.bias": ("mixer.in_proj.layer_norm_bias", "norm.bias"),
    **{f"mamba.{part}.weight": (f"mixer.in_proj.weight.{part}",) for part in ("z", "x", "B", "C", "dt")},
    **{
        f"mamba.conv_{part}.{leaf}": (f"mixer.conv1d.{leaf}.{part}",)
        for part in ("x", "B", "C")
        for leaf in ("weight", "bias")
    },
    "mamba.scan.A_log": ("mixer.A_log",),
    "mamba.scan.dt_bias": ("mixer.dt_bias",),
    "mamba.scan.D": ("mixer.D",),
    "mamba.norm": ("mixer.norm",),
    "mamba.proj": ("mixer.out_proj",),
    "mlp_norm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "mlp_norm.bias": ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
    "mlp.gate": ("mlp.linear_fc1",),
    "mlp.up": ("mlp.linear_fc1",),
    "mlp.down": ("mlp.linear_fc2",),
    "mlp.router.weight": ("mlp.router.weight",),
    "mlp.router.bias": ("mlp.router.bias",),
    "mlp.router.expert_bias": ("mlp.router.expert_bias",),
    "mlp.experts.N.gate": ("mlp.experts.experts.linear_fc1", "mlp.experts.N.linear_fc1"),
    "mlp.experts.N.up": ("mlp.experts.experts.linear_fc1", "mlp.experts.N.linear_fc1"),
    "mlp.experts.N.down": ("mlp.experts.experts.linear_fc2", "mlp.experts.N.linear_fc2"),
    "mlp.shared.gate": ("mlp.shared_experts.linear_fc1",),
    "mlp.shared.up": ("mlp.shared_experts.linear_fc1",),
    "mlp.shared.down": ("mlp.shared_experts.linear_fc2",),
    "mlp.shared_gate.weight": ("mlp.shared_experts.gate_weight",),
}
"""Our module or tensor in a layer -> theirs, in the order in which they are looked for."""

HALVES = {"gate": "_w", "up": "_v"}
"""Endings of their keys where the two halves of a gated weight are stored apart."""

OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""Their keys of optimizer state. Models with experts have several optimizers, which are numbered."""


@dataclass(frozen=True)
class ParamMapping:
    """Where a canonical tensor is in one of theirs.

    Attributes:
        key: their tensor.
        index: layer and expert in it, where it has dims for them.
        runs: ``(ours, theirs, rows)``: so many rows from ours on are those from theirs on.
        shape: shape of the canonical tensor.
        dtype: torch's name of its dtype.
        depthwise: they store ``[channels, k]`` as ``[channels, 1, k]`` (weights of a convolution).
    """

    key: str
    index: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]
    dtype: str
    depthwise: bool = False

    def wanted(self, box: Target) -> Iterator[WantedBox]:
        """Yield the boxes of their tensor that a box of ours is made of."""
        first, last = box.offset[0], box.offset[0] + len(box.data)
        for ours, theirs, rows in self.runs:
            low, high = max(first, ours), min(last, ours + rows)
            # Ours and theirs have rows in other orders, so one box may become several.
            if low < high:
                data = box.data[low - first : high - first]
                data = data[:, None] if self.depthwise else data
                offset = (*self.index, theirs + low - ours, *(0,) * self.depthwise, *box.offset[1:])
                # Theirs may have dims for layer and expert, where a box of ours has none.
                yield WantedBox(self.key, offset, data.view((1,) * len(self.index) + tuple(data.shape)))


def plain(key: str) -> str:
    """Return their key without the prefix that wrappers of the model add."""
    return re.sub(r"^(module\.|model\.)+", "", key)


def map_params(
    config: GPTConfig, found: Mapping[str, TorchTensor], *, buffers: bool = True
) -> tuple[dict[str, ParamMapping], list[str]]:
    """Return the place of each canonical tensor, and what does not fit, as lines for a message.

    Args:
        config: the model's configuration.
        found: their tensors by key.
        buffers: whether buffers are among them. Optimizer state has none.
    """
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(GPT(config)).items()}
    # The buffer is not among the parameters of the model on meta.
    if config.moe is not None and config.moe.router.expert_bias:
        modules = [f"layers.{layer}" for layer in range(config.num_layers) if config.has_experts(layer)]
        inside = [place for place, layer in enumerate(config.depth_layers) if config.has_experts(layer)]
        modules += [f"mtp.depths.{depth}.layers.{place}" for depth in range(config.num_depths) for place in inside]
        shapes |= {f"{module}.mlp.router.expert_bias": (config.moe.num_experts,) for module in modules}
    if not buffers:
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(".expert_bias")}
    places: dict[str, ParamMapping] = {}
    problems, used = [], set()
    for name, shape in shapes.items():
        options = list(_options(name, config))
        # Keys are tried in order. The first one that exists holds the tensor.
        option = next((option for option in options if option[0] in found), None)
        if option is None:
            problems.append(f"{options[0][0]} is missing (for {name} of shape {list(shape)})")
            continue
        key, index, lead = option
        used.add(key)
        runs, rows = _runs(name, key, shape, config)
        stored = found[key]
        depthwise = ".conv1d.weight." in key
        expected = (*lead, rows, *(1,) * depthwise, *shape[1:])
        # the vocabulary is padded for tensor parallelism: rows behind the end are dropped
        padded = name in ("embed.word.weight", "head.output_layer.weight") and stored.shape[1:] == expected[1:]
        if stored.shape != expected and not (padded and stored.shape[0] >= rows):
            shards = ", ".join(f"{list(shard.size)} at {list(shard.offset)}" for shard in stored.shards[:4])
            problems.append(f"{key} has shape {list(stored.shape)}, expected {list(expected)} (shards: {shards})")
        places[name] = ParamMapping(key, index, runs, shape, stored.dtype, depthwise)
    others = (key for key in found if key not in used and not OPTIMIZER.match(key) and not key.startswith("rng_state"))
    problems += [f"{key} of shape {list(found[key].shape)} has no counterpart" for key in sorted(others)]
    return places, problems


def _options(name: str, config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the keys that may hold a canonical tensor, each with the index in its first dims, and their sizes."""
    match = re.fullmatch(r"(layers|mtp\.depths)\.(\d+)\.(?:layers\.(\d+)\.)?(.+)", name)
    module, _, leaf = name.rpartition(".")
    if match is None:
        yield from ((f"{end}.{leaf}", (), ()) for end in ENDS[module])
        return
    layer, inside = int(match[2]), match[4]
    if inside.rpartition(".")[0] in DEPTH:
        yield f"mtp.layers.{layer}.{DEPTH[inside.rpartition('.')[0]]}.{leaf}", (), ()
        return
    number = re.search(r"(?<=experts\.)\d+", inside)
    template = re.sub(r"(?<=experts\.)\d+", "N", inside)
    module, _, leaf = template.rpartition(".")
    theirs = LAYER.get(template) or [f"{entry}.{leaf}" for entry in LAYER[module]]
    for entry in theirs:
        stacked = ".experts.experts." in entry and number is not None and config.moe is not None
        expert = (int(number.group()),) if stacked and number else ()
        experts = (config.moe.num_experts,) if stacked and config.moe else ()
        key = entry.replace("N", number.group()) if number else entry
        for ending in ("", HALVES.get(module.rpartition(".")[2], "")):
            if match[1] != "layers":
                # depths of a hybrid model have several
                outer = (f"mtp_model_layer.layers.{match[3]}",) if config.layer_pattern else DEPTH_LAYERS
                yield from ((f"mtp.layers.{layer}.{their}.{key}{ending}", expert, experts) for their in outer)
                continue
            # A key of the layer's own, or one for all layers with the layer as the first dim.
            yield f"decoder.layers.{layer}.{key}{ending}", expert, experts
            yield f"decoder.layers.{key}{ending}", (layer, *expert), (config.num_layers, *experts)


def _runs(
    name: str, key: str, shape: tuple[int, ...], config: GPTConfig
) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Return which rows of their tensor are those of a canonical tensor of ``shape``, and how many rows theirs has."""
    part, rows = name.split(".")[-2], shape[0]
    if ".attention." in name and part in "qkv":
        groups, size = config.num_kv_heads, config.head_dim
        # A group has its queries, one key head and one value head.
        queries = config.num_heads // groups
        first, heads = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[part]
        group = (queries + 2) * size
        runs = ((g * heads * size, g * group + first * size, heads * size) for g in range(groups))
        return tuple(runs), groups * group
    if "linear_fc1" in key and part in HALVES and not key.endswith(HALVES[part]) and is_gated(config.activation):
        return ((0, rows if part == "up" else 0, rows),), 2 * rows
    return ((0, 0, rows),), rows
