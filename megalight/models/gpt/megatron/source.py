"""Checkpoints of Megatron-core (``torch_dist`` folders) of GPT models: their arguments, keys and shapes.

Layers share one key, with the layer as the first dim, or have a key each. Fused tensors have queries, keys and values
of one group of heads after another, and all rows of the gate before those of ``up``.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megalight.checkpoint.compare import compare
from megalight.checkpoint.disk.files import TORCH_METADATA, parse_json
from megalight.checkpoint.foreign import pickles
from megalight.checkpoint.foreign.torch_folder import TorchFolder, TorchTensor, Wanted
from megalight.checkpoint.ranks import Ranks
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt.config import AttentionConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.gpt.model import GPT
from megalight.nn.canonical import canonical_tensors
from megalight.nn.mlp import is_gated
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig
from megalight.ops.rotary import RotaryScaling
from megalight.parallel.source import Filled, Target

log = logging.getLogger(__name__)

COMMON = "common.pt"
BACKEND = "metadata.json"
NEWEST = "latest_checkpointed_iteration.txt"
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""Their keys of optimizer state. Models with experts have several optimizers, which are numbered."""

ENDS = {
    "embed.word": "embedding.word_embeddings",
    "embed.position": "embedding.position_embeddings",
    "head.norm": "decoder.final_layernorm",
    "head.output_layer": "output_layer",
}
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

REFUSED = {
    "multi_latent_attention": "multi-latent attention",
    "mtp_num_layers": "multi-token prediction",
    "apply_layernorm_1p": "norms with weights around zero",
    "apply_residual_connection_post_layernorm": "residual connections behind the norm",
    "rotary_seq_len_interpolation_factor": "interpolated rotary positions",
    "heterogeneous_layers_config_path": "layers of several kinds",
    "is_hybrid_model": "hybrid models",
    "window_size": "sliding windows",
    "no_rope_freq": "layers without rotary positions",
    "qk_l2_norm": "L2 norms of queries and keys",
    "moe_apply_probs_on_input": "experts with weighted inputs",
    "glu_linear_offset": "gates with an offset",
    "activation_func_clamp_value": "activations with a limit",
    "attention_output_gate": "attention with a gate behind it",
    "experimental_attention_variant": "other kinds of attention",
    "fp8_param_gather": "weights in 8 bits",
}
"""Arguments that change the model in ways that are not imported."""


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a checkpoint of Megatron-core, or a folder with several."""
    return (located(path) / COMMON).is_file()


def located(path: str | os.PathLike[str]) -> Path:
    """Return the newest checkpoint in a folder that Megatron-LM saves to. Other paths stay as they are."""
    folder = Path(path)
    if not (folder / NEWEST).is_file():
        return folder
    newest = (folder / NEWEST).read_text(encoding="utf-8").strip()
    if newest != "release" and not newest.isdecimal():
        raise CheckpointError(f"{folder / NEWEST} holds {newest[:40]!r}; a number of an iteration is expected.")
    return folder / (newest if newest == "release" else f"iter_{int(newest):07d}")


@dataclass(frozen=True)
class Place:
    """Where a canonical tensor is in one of theirs.

    Attributes:
        key: their tensor.
        index: layer and expert in it, where it has dims for them.
        runs: ``(ours, theirs, rows)``: so many rows from ours on are those from theirs on.
        shape: shape of the canonical tensor.
        dtype: torch's name of its dtype.
    """

    key: str
    index: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]
    dtype: str

    def wanted(self, box: Target) -> Iterator[Wanted]:
        """Yield the boxes of their tensor that a box of ours is made of."""
        first, last = box.offset[0], box.offset[0] + len(box.data)
        for ours, theirs, rows in self.runs:
            low, high = max(first, ours), min(last, ours + rows)
            # Ours and theirs have rows in other orders, so one box may become several.
            if low < high:
                data = box.data[low - first : high - first]
                offset = (*self.index, theirs + low - ours, *box.offset[1:])
                # Theirs may have dims for layer and expert, where a box of ours has none.
                yield Wanted(self.key, offset, data.view((1,) * len(self.index) + tuple(data.shape)))


class MegatronFolder:
    """A ``torch_dist`` folder of a GPT model, as a :class:`~megalight.parallel.source.Source` of its weights.

    Attributes:
        config: the configuration that its arguments describe.
        tensors: canonical name -> shape, dtype and place.

    Raises:
        CheckpointError: metadata is missing or damaged, or tensors do not fit the arguments. The message lists key,
            shape and shards.
        ConfigurationError: the model has parts that are not imported.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str) -> None:
        self.path = located(path)
        _check_backend(self.path)
        self.config = config_of(_arguments(self.path))
        self._folder = TorchFolder(self.path)
        keys = {_plain(key): key for key in self._folder.tensors}
        found = {plain: self._folder.tensors[key] for plain, key in keys.items()}
        places, problems = _places(self.config, found)
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(
                f"{len(problems)} tensors in {self.path} do not fit the model that its arguments describe: "
                f"{'; '.join(problems[:10])}{more}."
            )
        self.tensors = {prefix + name: replace(place, key=keys[place.key]) for name, place in places.items()}
        # The model's own keys decide. Which prefix a wrapper has added does not matter.
        if any(OPTIMIZER.match(key) for key in found):
            log.warning(
                "%s holds optimizer state, which is not imported: training goes on from its weights with new optimizer "
                "state.",
                self.path,
            )

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
        """See :meth:`megalight.parallel.source.Source.fill`; a shard that a box touches is read as a whole."""
        boxes, ranks = [target for target in targets if target.data.numel()], Ranks(process_group)
        asked = {box.name: box.shape for box in boxes}
        # Checked on all ranks before any of them reads.
        filled = compare(ranks, str(self.path), self.tensors, asked, strict=strict, prefix=prefix)
        wanted = [each for box in boxes if box.name in self.tensors for each in self.tensors[box.name].wanted(box)]
        ranks.together(f"reading {self.path}", partial(self._folder.fill, wanted))
        return filled


def config_of(arguments: Mapping[str, Any]) -> GPTConfig:
    """Return the configuration of the model that Megatron-LM's arguments describe.

    Raises:
        ConfigurationError: the model has parts that are not imported.
        CheckpointError: an argument is missing.
    """
    get = arguments.get
    for name, what in REFUSED.items():
        if get(name):
            raise ConfigurationError(f"{name} is {get(name)!r}: {what} cannot be imported from Megatron-core.")
    balance = get("moe_router_load_balancing_type")  # a word, or a list of words
    if "sinkhorn" in (balance if isinstance(balance, list) else [balance]):
        raise ConfigurationError("routing by Sinkhorn's algorithm cannot be imported from Megatron-core.")
    kind = {"learned_absolute": "learned", "rope": "rope", "none": "none"}.get(str(get("position_embedding_type")))
    if kind is None:
        raise ConfigurationError(
            f"position_embedding_type is {get('position_embedding_type')!r}; it has no counterpart."
        )
    bias = bool(get("add_bias_linear"))
    try:
        heads = arguments["num_attention_heads"]
        return GPTConfig(
            num_layers=arguments["num_layers"],
            hidden_size=arguments["hidden_size"],
            num_heads=heads,
            num_kv_heads=arguments["num_query_groups"] if get("group_query_attention") else heads,
            head_dim=get("kv_channels") or 0,
            ffn_hidden_size=arguments["ffn_hidden_size"],
            # without a tokenizer's own size, rows of padding cannot be told from others, and are kept
            vocab_size=get("vocab_size") or arguments["padded_vocab_size"],
            max_sequence_length=get("max_position_embeddings") or arguments["seq_length"],
            activation=_activation(arguments),
            mlp_bias=bias,
            tie_embeddings=not get("untie_embeddings_and_output_weights"),
            norm=NormConfig(
                kind="rms" if get("normalization") == "RMSNorm" else "layer",
                eps=get("norm_epsilon") or get("layernorm_epsilon") or 1e-5,
            ),
            position=PositionConfig(
                kind=kind,  # type: ignore[arg-type]
                base=float(get("rotary_base") or 10000.0),
                fraction=get("rotary_percent") or 1.0,
                interleaved=bool(get("rotary_interleaved")),
                scaling=RotaryScaling(factor=get("rope_scaling_factor") or 8.0) if get("use_rope_scaling") else None,
            ),
            attention=AttentionConfig(
                qkv_bias=bias or bool(get("add_qkv_bias")),
                proj_bias=bias,
                qk_norm=bool(get("qk_layernorm")),
                softmax=get("softmax_type") or "vanilla",
            ),
            moe=_experts(arguments) if get("num_experts") else None,
        )
    except KeyError as missing:
        raise CheckpointError(f"the arguments in {COMMON} lack {missing}; is it a GPT of Megatron-LM?") from None


def _activation(arguments: Mapping[str, Any]) -> str:
    if arguments.get("swiglu"):
        return "swiglu"
    if arguments.get("quick_geglu"):
        return "quick_geglu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    # the fused kernel of bias and GELU, which is on by default, has the approximation by tanh
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear")
    return "gelu_tanh" if fused or arguments.get("openai_gelu") else "gelu"


def _experts(arguments: Mapping[str, Any]) -> MoEConfig:
    get = arguments.get
    frequency = get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(frequency)]
    shared = get("moe_shared_expert_intermediate_size")
    return MoEConfig(
        num_experts=arguments["num_experts"],
        ffn_hidden_size=get("moe_ffn_hidden_size") or 0,
        pattern=tuple(bool(entry) for entry in frequency),
        bias=bool(get("add_bias_linear")),
        router=RouterConfig(
            top_k=get("moe_router_topk") or 2,
            score=get("moe_router_score_function") or "softmax",
            pre_softmax=bool(get("moe_router_pre_softmax")),
            num_groups=get("moe_router_num_groups"),
            group_top_k=get("moe_router_group_topk"),
            scale=get("moe_router_topk_scaling_factor") or 1.0,
            expert_bias=bool(get("moe_router_enable_expert_bias")),
        ),
        shared=SharedConfig(ffn_hidden_size=shared, gate=bool(get("moe_shared_expert_gate"))) if shared else None,
    )


def _places(config: GPTConfig, found: Mapping[str, TorchTensor]) -> tuple[dict[str, Place], list[str]]:
    """Return the place of each canonical tensor, and what does not fit, as lines for a message."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(GPT(config)).items()}
    # The buffer is not among the parameters of the model on meta.
    if config.moe is not None and config.moe.router.expert_bias:
        layers = (layer for layer in range(config.num_layers) if config.has_experts(layer))
        shapes |= {f"layers.{layer}.mlp.router.expert_bias": (config.moe.num_experts,) for layer in layers}
    places: dict[str, Place] = {}
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
        expected = (*lead, rows, *shape[1:])
        # the vocabulary is padded for tensor parallelism: rows behind the end are dropped
        padded = name in ("embed.word.weight", "head.output_layer.weight") and stored.shape[1:] == expected[1:]
        if stored.shape != expected and not (padded and stored.shape[0] >= rows):
            shards = ", ".join(f"{list(shard.size)} at {list(shard.offset)}" for shard in stored.shards[:4])
            problems.append(f"{key} has shape {list(stored.shape)}, expected {list(expected)} (shards: {shards})")
        places[name] = Place(key, index, runs, shape, stored.dtype)
    others = (key for key in found if key not in used and not OPTIMIZER.match(key) and not key.startswith("rng_state"))
    problems += [f"{key} of shape {list(found[key].shape)} has no counterpart" for key in sorted(others)]
    return places, problems


def _options(name: str, config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the keys that may hold a canonical tensor, each with the index in its first dims, and their sizes."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match is None:
        module, _, leaf = name.rpartition(".")
        yield f"{ENDS[module]}.{leaf}", (), ()
        return
    layer, inside = int(match[1]), match[2]
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


def _plain(key: str) -> str:
    """Their key without the prefix that wrappers of the model add."""
    return re.sub(r"^(module\.|model\.)+", "", key)


def _arguments(path: Path) -> dict[str, Any]:
    common = pickles.read_file(path / COMMON)
    arguments = common.get("args") if isinstance(common, dict) else None
    state = arguments.state if isinstance(arguments, pickles.Record) else arguments
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / COMMON} holds no arguments of Megatron-LM ('args'), which describe the model.")
    return state


def _check_backend(path: Path) -> None:
    """Refuse folders of another format of Megatron-core."""
    if (path / BACKEND).is_file():
        values = parse_json((path / BACKEND).read_bytes(), str(path / BACKEND))
        backend = values.get("sharded_backend") if isinstance(values, dict) else None
        if backend != "torch_dist":
            raise CheckpointError(
                f"{path} is of Megatron-core's format {backend!r}; torch_dist is read. Load it with the Megatron-LM "
                "that wrote it, and save it again with --ckpt-format torch_dist."
            )
    elif not (path / TORCH_METADATA).is_file():
        raise CheckpointError(
            f"{path} has neither {BACKEND} nor {TORCH_METADATA}: it is a checkpoint of Megatron-LM's format torch, or "
            "not finished. Save it again with --ckpt-format torch_dist."
        )
