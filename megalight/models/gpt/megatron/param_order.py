"""Which parts of weights each model-parallel rank of Megatron-core holds, in the order of its modules.

A module's own parameters come before those of its children, and these in the order in which they are assigned. Ranks
are numbered by tensor parallelism first, then by experts, then by pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalight.checkpoint.foreign.torch_dcp import TorchTensor
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.megatron.param_mapping import HALVES
from megalight.nn.mlp import is_gated

WHOLE, ROWS, COLUMNS, HALVED = "whole", "rows", "columns", "halved"
"""How tensor parallelism divides a weight. The last one divides the rows of the gate and those behind it apart."""

FIRST = (("embedding.word_embeddings.weight", ROWS), ("embedding.position_embeddings.weight", WHOLE))
LAST = (
    *((f"decoder.final_{norm}.{leaf}", WHOLE) for norm in ("layernorm", "norm") for leaf in ("weight", "bias")),
    ("output_layer.weight", ROWS),
)
NORMS = ("weight", "bias")
FC1, FC2 = (("weight", HALVED), ("bias", HALVED)), (("weight", COLUMNS), ("bias", WHOLE))
BEFORE_EXPERTS = (
    *((f"input_layernorm.{leaf}", WHOLE) for leaf in NORMS),
    ("self_attention.core_attention.softmax_offset", ROWS),
    ("self_attention.linear_proj.weight", COLUMNS),
    ("self_attention.linear_proj.bias", WHOLE),
    *((f"self_attention.linear_qkv.layer_norm_{leaf}", WHOLE) for leaf in NORMS),
    *((f"self_attention.linear_qkv.{leaf}", ROWS) for leaf in NORMS),
    *((f"self_attention.{part}_layernorm.{leaf}", WHOLE) for part in "qk" for leaf in NORMS),
    *((f"pre_mlp_layernorm.{leaf}", WHOLE) for leaf in NORMS),
    *((f"mlp.linear_fc1.layer_norm_{leaf}", WHOLE) for leaf in NORMS),
    *((f"mlp.linear_fc1.{leaf}", kind) for leaf, kind in FC1),
    *((f"mlp.linear_fc2.{leaf}", kind) for leaf, kind in FC2),
    *((f"mlp.router.{leaf}", WHOLE) for leaf in NORMS),
)
AFTER_EXPERTS = (
    ("mlp.shared_experts.gate_weight", WHOLE),
    *((f"mlp.shared_experts.linear_fc1.{leaf}", kind) for leaf, kind in FC1),
    *((f"mlp.shared_experts.linear_fc2.{leaf}", kind) for leaf, kind in FC2),
)
"""Their tensors of a layer, in the order of Transformer Engine's modules. A layer has some of them."""

FUSED = tuple((f"self_attention.linear_qkv.layer_norm_{leaf}", WHOLE) for leaf in NORMS)
"""A norm that modules without Transformer Engine have before attention, and store under the same key."""

OTHERS = {
    "decoder_first_pipeline_num_layers": "stages with other numbers of layers",
    "decoder_last_pipeline_num_layers": "stages with other numbers of layers",
    "account_for_embedding_in_pipeline_split": "stages with other numbers of layers",
    "account_for_loss_in_pipeline_split": "stages with other numbers of layers",
    "pipeline_model_parallel_layout": "stages with other numbers of layers",
    "standalone_embedding_stage": "a stage for the embedding",
    "overlap_param_gather_with_optimizer_step": "an optimizer for the first chunk",
    "moe_use_legacy_grouped_gemm": "experts in one weight",
    "freeze_LM": "frozen weights",
}
"""Arguments that change which parameters lie where, in ways that are not followed."""


@dataclass(frozen=True)
class MegatronDegrees:
    """Degrees of parallelism, from Megatron-LM's arguments.

    Attributes:
        tensor, pipeline, expert, expert_tensor: ranks per group.
        chunks: parts of the model per stage.
        data: data-parallel ranks, with those of context parallelism.
        grouped: whether the first weights of all experts lie before the second ones.
        fused: whether modules are those of Transformer Engine, with norms inside of them.
    """

    tensor: int
    pipeline: int
    chunks: int
    expert: int
    expert_tensor: int
    data: int
    grouped: bool
    fused: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> MegatronDegrees:
        """Return the layout that arguments describe."""

        def degree(name: str, default: int = 1) -> int:
            value = arguments.get(name)
            return value if type(value) is int and value > 0 else default

        tensor = degree("tensor_model_parallel_size")
        return cls(
            tensor=tensor,
            pipeline=degree("pipeline_model_parallel_size"),
            chunks=degree("virtual_pipeline_model_parallel_size"),
            expert=degree("expert_model_parallel_size"),
            expert_tensor=degree("expert_tensor_parallel_size", tensor),
            data=degree("data_parallel_size") * degree("context_parallel_size"),
            grouped=bool(arguments.get("moe_grouped_gemm")),
            fused=arguments.get("transformer_impl") != "local",
        )


@dataclass(frozen=True)
class ParamBox:
    """A box of a weight: its key, where it begins, and its extent, per dim of the stored tensor."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as a rank holds it.

    Attributes:
        parts: its boxes. Flattened, they lie one behind another.
        dtype: torch's name of its dtype.
        first: whether no rank before has the same elements.
    """

    parts: tuple[ParamBox, ...]
    dtype: str
    first: bool


class ParamOrder:
    """The parameters of each rank and chunk, in the order of modules.

    Args:
        config: the model's configuration.
        tensors: their weights by key, without prefixes of wrappers.
        layout: degrees of parallelism.

    Raises:
        ValueError: the rule for this model or layout is not known; the message says why.
    """

    def __init__(self, config: GPTConfig, tensors: Mapping[str, TorchTensor], layout: MegatronDegrees) -> None:
        self.config, self.tensors, self.layout = config, tensors, layout
        if config.layer_pattern or config.mtp is not None:
            raise ValueError("the order of parameters is known without Mamba-2 and multi-token prediction alone")
        if layout.expert == 1 and layout.expert_tensor != layout.tensor and config.moe is not None:
            raise ValueError("without expert parallelism, experts with a tensor parallelism of their own are not read")
        if config.num_layers % (layout.pipeline * layout.chunks):
            raise ValueError(
                f"{config.num_layers} layers cannot be divided over {layout.pipeline} stages of {layout.chunks} chunks"
            )

    def dense(self, tensor: int, stage: int, chunk: int) -> list[HeldParameter]:
        """Return the parameters that data-parallel ranks of all kinds share."""
        return [held for expert, held in self._held(tensor, 0, tensor, stage, chunk) if not expert]

    def experts(self, tensor: int, expert: int, stage: int, chunk: int) -> list[HeldParameter]:
        """Return the parameters of experts, where these are divided."""
        return [held for of_expert, held in self._held(0, expert, tensor, stage, chunk) if of_expert]

    def _held(
        self, tensor: int, expert: int, expert_tensor: int, stage: int, chunk: int
    ) -> Iterator[tuple[bool, HeldParameter]]:
        """Yield each parameter, and whether it lies in the buffers of experts."""
        layout, count = self.layout, self.config.num_layers
        starts = stage == 0 and chunk == 0
        ends = stage == layout.pipeline - 1 and chunk == layout.chunks - 1
        each = count // (layout.pipeline * layout.chunks)
        begin = chunk * (count // layout.chunks) + stage * each
        for key, kind in FIRST if starts else ():
            yield from self._plain(key, (), kind, tensor)
        for layer in range(begin, begin + each):
            before = (
                BEFORE_EXPERTS if layout.fused else (*FUSED, *(each for each in BEFORE_EXPERTS if each not in FUSED))
            )
            for name, kind in before:
                yield from self._plain(*self._of_layer(layer, name), kind, tensor)
            if self.config.has_experts(layer):
                for held in self._experts(layer, expert, expert_tensor):
                    yield layout.expert > 1, held
            for name, kind in AFTER_EXPERTS:
                yield from self._plain(*self._of_layer(layer, name), kind, tensor)
        for key, kind in LAST if ends else ():
            yield from self._plain(key, (), kind, tensor)
        if ends and not starts and self.config.tie_embeddings:
            # A copy of the embedding, which ranks of the first stage have too.
            for expert_, held in self._plain(FIRST[0][0], (), ROWS, tensor):
                yield expert_, HeldParameter(held.parts, held.dtype, False)

    def _of_layer(self, layer: int, name: str) -> tuple[str, tuple[int, ...]]:
        own = f"decoder.layers.{layer}.{name}"
        return (own, ()) if own in self.tensors else (f"decoder.layers.{name}", (layer,))

    def _plain(self, key: str, index: tuple[int, ...], kind: str, rank: int) -> Iterator[tuple[bool, HeldParameter]]:
        if key in self.tensors:
            yield False, self._divided([(key, index)], kind, rank, self.layout.tensor)

    def _experts(self, layer: int, expert: int, rank: int) -> Iterator[HeldParameter]:
        assert self.config.moe is not None
        each, rest = divmod(self.config.moe.num_experts, self.layout.expert)
        if rest:
            raise ValueError(f"{self.config.moe.num_experts} experts cannot be divided over {self.layout.expert} ranks")
        numbers = range(expert * each, (expert + 1) * each)
        linears = (("linear_fc1", FC1), ("linear_fc2", FC2))
        # Grouped experts have a module for each of the two weights, others one for each expert.
        pairs = (
            [(number, *linear) for linear in linears for number in numbers]
            if self.layout.grouped
            else [(number, *linear) for number in numbers for linear in linears]
        )
        for number, name, leaves in pairs:
            for leaf, kind in leaves:
                keys = self._of_expert(layer, number, f"{name}.{leaf}")
                if keys:
                    yield self._divided(keys, kind, rank, self.layout.expert_tensor)

    def _of_expert(self, layer: int, number: int, name: str) -> list[tuple[str, tuple[int, ...]]]:
        key, index = self._of_layer(layer, f"mlp.experts.experts.{name}")
        if key in self.tensors:
            return [(key, (*index, number))]
        for ending in ("", *HALVES.values()):
            key, index = self._of_layer(layer, f"mlp.experts.{number}.{name}{ending}")
            if key in self.tensors:
                if not ending:
                    return [(key, index)]
                # The two halves have a key each.
                return [(key[: -len(ending)] + half, index) for half in HALVES.values()]
        return []

    def _divided(self, keys: list[tuple[str, tuple[int, ...]]], kind: str, rank: int, degree: int) -> HeldParameter:
        halves = kind == HALVED and len(keys) == 1 and is_gated(self.config.activation)
        parts = []
        for key, index in keys:
            shape = self.tensors[key].shape[len(index) :]
            dim = 1 if kind == COLUMNS else 0
            blocks = 2 if halves else 1
            if kind == WHOLE:
                parts.append(ParamBox(key, (*index, *(0,) * len(shape)), (*(1,) * len(index), *shape)))
                continue
            size, rest = divmod(shape[dim], blocks * degree)
            if rest:
                raise ValueError(f"{key} of shape {list(shape)} cannot be divided over {degree} ranks")
            for block in range(blocks):
                begin = (block * degree + rank) * size
                offset = tuple(begin if d == dim else 0 for d in range(len(shape)))
                extent = tuple(size if d == dim else n for d, n in enumerate(shape))
                parts.append(ParamBox(key, (*index, *offset), (*(1,) * len(index), *extent)))
        return HeldParameter(tuple(parts), self.tensors[keys[0][0]].dtype, rank == 0 or kind != WHOLE)
