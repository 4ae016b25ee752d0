"""Optimizer state of the format ``dp_reshardable``: flat buckets, as boxes of tensors shaped like parameters.

Each model-parallel rank has buffers, one per chunk of its model and dtype, and more where experts are divided.
A buffer has the rank's parameters from the last one to the first one, each from a multiple of 64 elements on, and is
cut into buckets between parameters. The metadata has the length of each bucket, without the padding at its end
(``fully_sharded_bucket_space``, the older format, counts it), and where each shard begins and ends: a shard lies in
one parameter, or inside padding. So the order of parameters says what is where, and each parameter must begin and end
where shards do. At last, masters must be what the weights were rounded from.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from megalight.checkpoint.foreign.torch_dcp import Shard, TorchFolder, TorchTensor, WantedBox
from megalight.errors import CheckpointError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.megatron.param_mapping import HALVES, OPTIMIZER, plain
from megalight.nn.mlp import is_gated
from megalight.parallel.shard import boxes

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


KEY = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\((?:torch\.)?(?P<dtype>\w+), [\w.]+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
"""Their key of a state of one bucket."""

MASTERS = "param"
STATES = (MASTERS, "exp_avg", "exp_avg_sq")

START = 64
"""Parameters begin at multiples of it."""

END = 128
"""Buckets end at multiples of it and of the data-parallel degree, or of :data:`LARGE_END` too."""

LARGE_END = 1 << 16

FORMAT = "dp_reshardable (fully_sharded_bucket_space in older releases)"
"""The format, for messages."""

PADDED = "fully_sharded_bucket_space"
"""Their name of the format in which lengths of buckets count the padding at the end."""


@dataclass(frozen=True)
class Range:
    """Elements ``[begin, end)`` of a bucket, which are those of a parameter. ``bucket`` is its key up to the state."""

    bucket: str
    begin: int
    end: int
    held: HeldParameter


@dataclass
class BucketBoxes:
    """What buckets hold.

    Attributes:
        tensors: state in the shapes of weights, by the key that it has in other formats.
        ranges: where each parameter lies, also those that several ranks have.
        problems: why buckets cannot be cut, as lines for a message.
    """

    tensors: dict[str, TorchTensor] = field(default_factory=dict)
    ranges: list[Range] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Bucket:
    name: str
    dtype: str
    states: Mapping[str, TorchTensor]

    @property
    def length(self) -> int:
        return self.states[MASTERS].shape[0]

    def bounds(self) -> set[int]:
        """Return where shards of all states begin and end."""
        ends = ({end for s in t.shards for end in (s.offset[0], s.offset[0] + s.size[0])} for t in self.states.values())
        return set.intersection(*ends)


def cut(config: GPTConfig, arguments: Mapping[str, Any], kind: str, tensors: Mapping[str, TorchTensor]) -> BucketBoxes:
    """Return what the buckets of a folder hold, or why that is not known. Nothing is read.

    Args:
        config: the model's configuration.
        arguments: Megatron-LM's arguments, which have the degrees of parallelism.
        kind: their name of the format.
        tensors: their tensors by key.
    """
    result = BucketBoxes()
    found = [(match, tensor) for key, tensor in tensors.items() if (match := KEY.fullmatch(key))]
    if not found:
        return result
    others = [f"{name} is {arguments[name]!r} ({what})" for name, what in OTHERS.items() if arguments.get(name)]
    if others:
        result.problems.append(f"the order of its parameters is not known: {'; '.join(others)}")
        return result
    layout = MegatronDegrees.of(arguments)
    keys = {plain(key): key for key in tensors}
    weights = {name: tensors[key] for name, key in keys.items()}
    try:
        buffers = _buffers(found)
        expected = _expected(ParamOrder(config, weights, layout))
        for place in sorted(set(buffers) ^ set(expected)):
            there = "not expected" if place in buffers else "missing"
            raise ValueError(f"the buffer {_name(place)} is {there} where arguments describe {layout}")
        most = lcm(layout.data, LARGE_END) + START if kind == PADDED else None
        for place in sorted(buffers):
            result.ranges += _ranges(_name(place), buffers[place], expected[place], most)
        _check_complete(weights, result.ranges)
        # From here on, keys are those of the folder.
        result.ranges = [replace(each, held=_renamed(each.held, keys)) for each in result.ranges]
        by_name = {bucket.name: bucket for each in buffers.values() for bucket in each}
        result.tensors = _shaped(result.ranges, by_name, tensors)
    except ValueError as error:
        return BucketBoxes(problems=[str(error)])
    return result


def verify(folder: TorchFolder, ranges: Sequence[Range]) -> None:
    """Compare masters with weights, one parameter of one rank at a time.

    A master between two values of the weights' dtype may have become either.

    Raises:
        CheckpointError: a weight is not its rounded master. The message names bucket, range and parameter.
    """
    for each in ranges:
        key = f"{each.bucket}.{MASTERS}"
        masters = torch.empty(each.end - each.begin, dtype=torch.float32)
        weights = [torch.empty(part.size, dtype=_dtype(each.held.dtype)) for part in each.held.parts]
        parts = (WantedBox(part.key, part.offset, data) for part, data in zip(each.held.parts, weights, strict=True))
        folder.fill([WantedBox(key, (each.begin,), masters), *parts])
        flat = torch.cat([data.flatten() for data in weights])
        wrong = ~_rounds(masters, flat)
        if wrong.any():
            raise CheckpointError(
                f"the optimizer state in {folder.path} cannot be imported: in {each.bucket}, the elements "
                f"[{each.begin}, {each.end}) are of {each.held.parts[0].key} by Megatron-core's order of parameters, "
                f"but {int(wrong.sum())} of these masters are not the weights, the first one at "
                f"{each.begin + int(wrong.nonzero()[0])}. Resume with Megatron-LM in the layout that saved it, and "
                "save once with --dist-ckpt-optim-fully-reshardable; or take the weights alone (--weights-only)."
            )


def _rounds(masters: Tensor, weights: Tensor) -> Tensor:
    """Return where weights are masters rounded to their dtype, to either side where a master lies in the middle."""
    near = masters.to(weights.dtype)
    right = (near == weights) | (near.isnan() & weights.isnan())
    for way in (-torch.inf, torch.inf):
        beside = torch.nextafter(masters, torch.full_like(masters, way)).to(weights.dtype)
        right |= (beside == weights) & (weights.dtype != masters.dtype)
    return right


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]


def _check_complete(weights: Mapping[str, TorchTensor], ranges: Sequence[Range]) -> None:
    """Refuse weights that train and are in no buffer."""
    covered = {part.key for each in ranges for part in each.held.parts}
    for key in sorted(set(weights) - covered):
        if not key.startswith("rng_state") and not key.endswith("router.expert_bias") and not OPTIMIZER.match(key):
            raise ValueError(f"{key} is in no buffer by the order of parameters")


def _name(place: tuple[bool, int, int]) -> str:
    return f"dp_group_idx_{place[1]}.gbuf_idx_{place[2]}" + " of experts" * place[0]


def _buffers(found: Sequence[tuple[re.Match[str], TorchTensor]]) -> dict[tuple[bool, int, int], list[_Bucket]]:
    """Return the buckets of each buffer, by whether it is of experts, group and number."""
    states: dict[tuple[bool, int, int], dict[int, dict[str, TorchTensor]]] = {}
    names: dict[tuple[bool, int, int, int], tuple[str, str]] = {}
    for match, tensor in found:
        state, bucket = match["state"], int(match["bucket"])
        if state not in STATES:
            raise ValueError(f"{match.string} is of an unknown state; {', '.join(STATES)} are read")
        if match["chained"] not in (None, "0", "1"):
            raise ValueError(f"{match.string} is of a third optimizer; those of dense weights and of experts are read")
        place = match["chained"] == "1", int(match["group"]), int(match["buffer"])
        name = match.string.rpartition(".")[0]
        if names.setdefault((*place, bucket), (name, match["dtype"]))[0] != name or len(tensor.shape) != 1:
            raise ValueError(f"{match.string} of shape {list(tensor.shape)} is not the only one, or no flat bucket")
        states.setdefault(place, {}).setdefault(bucket, {})[state] = tensor
    buffers: dict[tuple[bool, int, int], list[_Bucket]] = {}
    for place, buckets in states.items():
        for bucket, by_state in sorted(buckets.items()):
            name, dtype = names[*place, bucket]
            if len({tensor.shape for tensor in by_state.values()}) > 1 or set(by_state) != set(STATES):
                lengths = {state: tensor.shape[0] for state, tensor in sorted(by_state.items())}
                raise ValueError(f"{name} has states of lengths {lengths}; {', '.join(STATES)} of one length are read")
            if bucket != len(buffers.setdefault(place, [])):
                raise ValueError(f"{name} is there, and a bucket before it is not")
            buffers[place].append(_Bucket(name, dtype, by_state))
    return buffers


def _expected(order: ParamOrder) -> dict[tuple[bool, int, int], list[HeldParameter]]:
    """Return the parameters of each buffer in their order there: from the last module to the first one."""
    layout = order.layout
    expected: dict[tuple[bool, int, int], list[HeldParameter]] = {}

    def add(expert: bool, group: int, chunks: list[list[HeldParameter]]) -> None:
        number = 0
        for chunk in chunks:
            # Buffers stand in the order in which their dtypes come first.
            for dtype in dict.fromkeys(held.dtype for held in chunk):
                expected[expert, group, number] = [held for held in reversed(chunk) if held.dtype == dtype]
                number += 1

    for stage in range(layout.pipeline):
        for tensor in range(layout.tensor):
            chunks = [order.dense(tensor, stage, chunk) for chunk in range(layout.chunks)]
            add(False, tensor + layout.tensor * stage, chunks)
        for expert in range(layout.expert if layout.expert > 1 else 0):
            for tensor in range(layout.expert_tensor):
                chunks = [order.experts(tensor, expert, stage, chunk) for chunk in range(layout.chunks)]
                add(True, tensor + layout.expert_tensor * (expert + layout.expert * stage), chunks)
    return expected


def _ranges(name: str, buckets: Sequence[_Bucket], held: Sequence[HeldParameter], most: int | None) -> list[Range]:
    """Return where parameters lie in the buckets of a buffer, if there is just one way.

    Args:
        name: the buffer, for messages.
        buckets: the buckets.
        held: all parameters in their order.
        most: how long the padding at the end of a bucket may be, if lengths count it.
    """
    for bucket in buckets:
        if bucket.dtype != held[0].dtype.removeprefix("torch."):
            raise ValueError(f"{bucket.name} is of {bucket.dtype}, and {held[0].parts[0].key} of {held[0].dtype}")
    lengths = [sum(prod(part.size) for part in each.parts) for each in held]
    # The next parameter -> ways to get there, of which two are as bad as more.
    ways: dict[int, list[list[Range]]] = {0: [[]]}
    for bucket in buckets:
        bounds, stuck = bucket.bounds(), ""
        further: dict[int, list[list[Range]]] = {}
        for first, paths in ways.items():
            ranges: list[Range] = []
            end = 0
            for number in range(first, len(held)):
                begin = -(-end // START) * START
                end = begin + lengths[number]
                if end > bucket.length or begin not in bounds or end not in bounds:
                    stuck = f"[{begin}, {end}), of {held[number].parts[0].key}"
                    break
                ranges.append(Range(bucket.name, begin, end, held[number]))
                if _closes(bucket.length, end, most):
                    further.setdefault(number + 1, []).extend([*path, *ranges] for path in paths[:2])
        if not further:
            raise ValueError(
                f"{bucket.name} has {bucket.length} elements. By Megatron-core's order of parameters, these should be "
                f"among them: {stuck or 'none, as all parameters are in buckets before it'}; its shards lie otherwise"
            )
        ways = further
    whole = ways.get(len(held), [])
    if not whole:
        raise ValueError(f"the buckets of {name} end before {held[max(ways)].parts[0].key}")
    if len(whole) > 1:
        raise ValueError(f"the buckets of {name} can be cut into parameters in several ways")
    return whole[0]


def _closes(length: int, end: int, most: int | None) -> bool:
    """Return whether a bucket may end behind a parameter that ends at ``end``."""
    if most is not None:
        return length % END == 0 and length - end < most
    # A bucket that ends before a shared embedding counts the padding up to where that would have begun.
    return length in (end, -(-end // START) * START)


def _renamed(held: HeldParameter, keys: Mapping[str, str]) -> HeldParameter:
    return replace(held, parts=tuple(replace(part, key=keys[part.key]) for part in held.parts))


def _shaped(
    ranges: Sequence[Range], buckets: Mapping[str, _Bucket], tensors: Mapping[str, TorchTensor]
) -> dict[str, TorchTensor]:
    """Return all states in the shapes of weights."""
    shards: dict[tuple[str, str], list[Shard]] = {}
    dtypes = {}
    by_bucket = {
        (name, state): sorted(tensor.shards, key=lambda shard: shard.offset)
        for name, bucket in buckets.items()
        for state, tensor in bucket.states.items()
    }
    for each in ranges:
        if not each.held.first:
            continue
        for state in STATES:
            dtypes[state] = buckets[each.bucket].states[state].dtype
            begin = each.begin
            for part in each.held.parts:
                end = begin + prod(part.size)
                shards.setdefault((state, part.key), []).extend(_boxes(by_bucket[each.bucket, state], begin, end, part))
                begin = end
    made = {}
    for (state, key), found in shards.items():
        shape = tensors[key].shape
        if sum(prod(shard.size) for shard in found) != prod(shape):
            raise ValueError(f"{state} of {key} is not complete in the buckets of all ranks")
        made[f"optimizer.state.{state}.{key}"] = TorchTensor(shape, dtypes[state], tuple(found))
    return made


def _boxes(shards: Sequence[Shard], begin: int, end: int, part: ParamBox) -> Iterator[Shard]:
    """Yield the boxes of a weight that lie in ``[begin, end)`` of a bucket, whose shards are sorted."""
    number = max(0, bisect_right(shards, begin, key=lambda shard: shard.offset[0]) - 1)
    while number < len(shards) and shards[number].offset[0] < end:
        shard = shards[number]
        start = shard.offset[0]
        low, high = max(begin, start), min(end, start + shard.size[0])
        if low < high:
            for offset, extent, first in boxes(part.size, low - begin, high - begin):
                place = tuple(corner + inside for corner, inside in zip(part.offset, offset, strict=True))
                yield Shard(place, extent, shard.archive, shard.first + first + begin - start)
        number += 1
