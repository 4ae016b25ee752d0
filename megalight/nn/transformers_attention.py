"""Our attention behind the attention interface of ``transformers``, for every family that uses it.

Models of ``transformers`` look up attention and the making of masks by a name in their configuration
(``ALL_ATTENTION_FUNCTIONS``, ``ALL_MASK_ATTENTION_FUNCTIONS``). Under :data:`NAME`, a mask says what it means
(:class:`Visible`): causal, a window, chunks, packed sequences, padding. The attention op has kernels for these. Its
numbers are computed only for layers that read them (:class:`LazyMask`). A mask of another form, such as that of images
or of a static cache, is a tensor as with ``sdpa``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megalight.errors import LayoutError
from megalight.ops.attention import attention
from megalight.types import PackedSequences

NAME = "megalight"
"""Name of our attention in a configuration (``attn_implementation``)."""
CAUSAL = "megalight_causal"
"""The same for models that make no masks: each query sees all earlier keys of its window."""
MIXERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers that mix tokens by attention alone."""
SPARSE = (
    "deepseek_sparse_attention",
    "minimax_m3_sparse",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
"""Types of layers whose attention sees the keys that the layer itself chooses, for each query."""
STRETCHED = ("dynamic", "longrope")
"""Rotary embeddings whose angles follow from the longest position of a call."""


@dataclass(frozen=True)
class MaskPattern:
    """What all sequences of a mask have in common.

    Attributes:
        causal: whether a query sees no later key.
        window: number of earlier tokens that a query sees besides itself; None: all.
        chunk: tokens of a chunk, outside of which a query sees nothing; None: there are no chunks.
        documents: ``[B, S]``: the number of the document in its row that a token belongs to; None: a row is one.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None


class Core(Protocol):
    """Computes attention of packed tokens."""

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        pattern: MaskPattern,
        *,
        scale: float | None,
        softcap: float | None,
        dropout: float,
        sink: Tensor | None,
    ) -> Tensor:
        """``q [T, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] -> [T, H, Dv]``, of the layer whose attention is ``module``.

        Other arguments are those of :func:`megalight.ops.attention.attention`.
        """


def plain(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, pattern: MaskPattern, **options: Any
) -> Tensor:
    """Attention within the sequences that are here: a :class:`Core`."""
    options |= {"causal": pattern.causal, "window": pattern.window, "chunk": pattern.chunk}
    return attention(q, k, v, sequences, **options)


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys each query sees, in place of a mask.

    Attributes:
        pattern: what all sequences have in common.
        sequences: how queries, and keys if they differ, divide into sequences.
        queries: ``[T]``: the queries that are tokens, of all ``B * Sq``; None: all are. Others get zeros.
        keys: ``[Tk]``: the keys that are tokens, of all ``B * Sk``; None: all are.
        core: what computes attention. It is here, as layers may run again in the backward pass.
    """

    pattern: MaskPattern
    sequences: PackedSequences
    queries: Tensor | None = None
    keys: Tensor | None = None
    core: Core = plain


class LazyMask(Tensor):
    """What a query sees, as a mask ``[B, 1, Sq, Sk]`` of 0 and the lowest number, whose memory is made when it is read.

    Args:
        visible: what it means.
        shape: ``B, 1, Sq, Sk``.
        dtype: of hidden states.
        make: returns the mask.
    """

    visible: Visible
    make: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, visible: Visible, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Callable[[], Tensor]
    ) -> LazyMask:
        """Make a mask without memory."""
        found: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        found.visible, found.make = visible, make
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute any operation with the mask itself."""
        if func is torch.ops.aten.detach.default:  # layers that run again in the backward pass
            mask = args[0]
            return LazyMask(mask.visible, tuple(mask.shape), mask.dtype, mask.device, mask.make)
        args, kwargs = tree_map_only(LazyMask, lambda mask: mask.make(), (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@dataclass(eq=False)
class Call:
    """A call of a model whose caller knows its sequences.

    Attributes:
        sequences: how its tokens, packed, divide into sequences.
        core: what computes attention.
        layers: attention modules that have asked for it so far.
    """

    sequences: PackedSequences
    core: Core = plain
    layers: set[int] = field(default_factory=set)


CALL: ContextVar[Call | None] = ContextVar("CALL", default=None)
"""The call that is running; None: positions and masks say what the sequences are."""


@contextmanager
def calling(sequences: PackedSequences, core: Core = plain) -> Iterator[Call]:
    """Let models inside attend within these sequences, whatever their positions are. They get no mask."""
    call = Call(sequences, core)
    token = CALL.set(call)
    try:
        yield call
    finally:
        CALL.reset(token)


def why_not_packed(model: nn.Module) -> str | None:
    """Return why tokens of several sequences, or a part of one, cannot go through a model; None: they can."""
    config = getattr(model, "config").get_text_config()  # noqa: B009
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - set(MIXERS)):
        return f"has layers of type {', '.join(other)}, which mix tokens of a sequence outside of attention"
    if not getattr(model, "_supports_attention_backend", False):
        return "does not use the attention interface of transformers"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids, which say where tokens are"
    if mixing := next((n for n, m in _without_towers(model) if isinstance(m, nn.Conv1d | nn.RNNBase)), None):
        return f"mixes tokens of a sequence in {mixing}, outside of attention"
    if own := next((n for n, m in model.named_modules() if hasattr(m, "create_position_ids_from_input_ids")), None):
        return f"counts positions from padding in {own}, in a way of its own"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)]
    if stretched := next((kind for kind in kinds if kind in STRETCHED), None):
        return f"has rotary embedding of type {stretched!r}, whose angles follow from the longest position of a call"
    return None


def _without_towers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by their names, but those of models inside that do not embed its tokens."""
    embedding, towers = model.get_input_embeddings(), list[str]()
    for name, module in model.named_modules():
        if name and hasattr(module, "get_input_embeddings") and all(each is not embedding for each in module.modules()):
            towers.append(f"{name}.")
        if not f"{name}.".startswith(tuple(towers)):
            yield name, module


def pattern_of(function: Callable[..., Any]) -> MaskPattern | None:
    """Return what a mask function of ``transformers`` means; None: it has a form that is not known."""
    pattern = MaskPattern()
    for part in _joined_by_and(function):
        values = inspect.getclosurevars(part).nonlocals
        match part.__qualname__.partition(".")[0]:
            case "causal_mask_function":
                pattern = replace(pattern, causal=True)
            case "bidirectional_mask_function":
                pass
            case "sliding_window_overlay":
                pattern = replace(pattern, window=int(values["sliding_window"]) - 1)
            case "chunked_overlay":
                # It counts from the first token behind padding, as chunks of a packed sequence do.
                pattern = replace(pattern, chunk=int(values["chunk_size"]))
            case "packed_sequence_mask_function":
                pattern = replace(pattern, documents=values["packed_sequence_mask"])
            case _:
                return None
    # A window that is not causal looks in both directions, and chunks are made for causal attention.
    return pattern if pattern.causal or (pattern.window is None and pattern.chunk is None) else None


def _joined_by_and(function: Callable[..., Any]) -> Iterator[Any]:
    if function.__qualname__ != "and_masks.<locals>.and_mask":
        yield function
        return
    for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
        yield from _joined_by_and(part)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """Make a mask, as functions in ``ALL_MASK_ATTENTION_FUNCTIONS`` do.

    Args:
        batch_size: number of rows.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: place of the first query; a tensor with a static cache.
        kv_offset: place of the first key.
        mask_function: which places see which.
        attention_mask: ``[B, S]`` bool: False for padding. None: there is none.
        device: where the mask is needed.
        kwargs: arguments of the masks of ``sdpa``.

    Returns:
        :class:`LazyMask`, or a mask ``[B, 1, Sq, Sk]`` of bools if it has another form.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    function = mask_function or causal_mask_function
    shape, dtype = (batch_size, 1, q_length, kv_length), kwargs.get("dtype", torch.float32)
    if (call := CALL.get()) is not None:
        return LazyMask(_of_call(call, pattern_of(function), attention_mask), shape, dtype, device, _unread)
    pattern = None if torch.compiler.is_compiling() else pattern_of(function)
    visible = None
    # Behind the last query, a static cache has keys that are not written yet.
    if pattern is not None and (not pattern.causal or _ends_alike(q_offset, q_length, kv_offset, kv_length)):
        real = None if attention_mask is None else _padded(attention_mask, kv_offset, kv_length)
        # A cache that has dropped the first tokens of a chunk no longer knows where it began.
        if pattern.chunk is None or not kv_offset:
            visible = _visible(pattern, batch_size, q_length, kv_length, real, torch.device(device))
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    given = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, **kwargs}
    given |= {"kv_offset": kv_offset, "mask_function": function, "attention_mask": attention_mask, "device": device}
    if visible is None:
        return sdpa_mask(**given)
    return LazyMask(visible, shape, dtype, device, cache(lambda: eager_mask(**given)))


def _unread() -> Tensor:
    raise LayoutError(
        "a layer reads its attention mask, and sequences that are packed or divided have none that it could read. Give "
        "whole rows to the model."
    )


def _of_call(call: Call, pattern: MaskPattern | None, given: Tensor | None) -> Visible:
    """Return what a mask means in a call whose sequences are known.

    Raises:
        LayoutError: it has another form.
    """
    if given is not None and bool(given.all()):  # some families make one themselves
        given = None
    if pattern is None or given is not None:
        raise LayoutError(
            f"the model makes an attention mask {'from padding' if given is not None else 'of a form of its own'}, and "
            "sequences that are packed or divided have none. Leave attention_mask out, and give whole rows to a model "
            "with such masks."
        )
    return Visible(replace(pattern, documents=None), call.sequences, core=call.core)


def _ends_alike(q_offset: Any, q_length: int, kv_offset: int, kv_length: int) -> bool:
    return isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length


def _padded(attention_mask: Tensor, offset: int, length: int) -> Tensor:
    """Return which of ``length`` keys are tokens ``[B, Sk]``. Those that the mask does not reach are not."""
    missing = offset + length - attention_mask.shape[-1]
    return nn.functional.pad(attention_mask, (0, max(0, missing)))[:, offset : offset + length]


def _visible(
    pattern: MaskPattern, batch: int, queries: int, keys: int, real: Tensor | None, device: torch.device
) -> Visible | None:
    if pattern.documents is not None:
        if real is not None or queries != keys:
            return None
        documents = pattern.documents.expand(batch, -1)
        # Numbers count from 0 in each row; the first of a row begins another document than the last of the one before.
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = first.flatten().nonzero().flatten().tolist()
        lengths = [end - start for start, end in zip(starts, [*starts[1:], batch * queries], strict=True)]
        return Visible(replace(pattern, documents=None), PackedSequences.of_lengths(lengths, device))
    if real is None or bool(real.all()):
        return Visible(pattern, _of(((queries,) * batch), ((keys,) * batch), device))
    if not pattern.causal:
        seen = real.sum(1).tolist()
        if not all(seen):
            return None
        # Queries may be of another sequence, so padding of keys says nothing of them.
        sequences = _of((queries,) * batch, tuple(seen), device, same=False)
        return Visible(pattern, sequences, keys=real.flatten().nonzero().flatten())
    local = pattern.window is not None or pattern.chunk is not None
    # Without the padding inside of a row, its tokens would be nearer to each other.
    if local and bool((real.int().diff(dim=1, prepend=real.new_zeros(batch, 1).int()).clamp(min=0).sum(1) > 1).any()):
        return None
    tokens = real[:, -queries:]
    rows = tokens.any(1)
    sizes = torch.stack([tokens.sum(1), real.sum(1)])[:, rows].tolist()
    if not sizes[0]:
        return None
    sequences = _of(tuple(sizes[0]), tuple(sizes[1]), device)
    keep = (real & rows[:, None]).flatten().nonzero().flatten()
    return Visible(pattern, sequences, tokens.flatten().nonzero().flatten(), keep)


def _rows_of(batch: int, queries: int, keys: int, device: torch.device) -> PackedSequences:
    """Return sequences of whole rows."""
    if queries == keys:
        return PackedSequences.of_uniform(batch, queries, device)
    return _of((queries,) * batch, (keys,) * batch, device)


def _of(queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device, same: bool = True) -> PackedSequences:
    sequences = PackedSequences.of_lengths(queries, device)
    if same and queries == keys:
        return sequences
    return replace(sequences, keys=PackedSequences.of_lengths(keys, device))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention, as functions in ``ALL_ATTENTION_FUNCTIONS`` compute it.

    Args:
        module: the attention module.
        query: ``[B, H, Sq, D]``.
        key: ``[B, Hkv, Sk, D]``.
        value: ``[B, Hkv, Sk, Dv]``.
        attention_mask: what :func:`mask` made, a mask ``[B, 1, Sq, Sk]``, or None: ``is_causal`` says it all.
        dropout: probability to drop a weight.
        scaling: factor on scores.
        is_causal: without a mask, whether a query sees no later key. None: the module knows.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: ``[H]`` sinks.
        kwargs: further arguments of the interface. Windows are in the mask; without one, ``sliding_window`` says it.

    Returns:
        ``[B, Sq, H, Dv]``, and weights if they were asked for of a mask that is a tensor.
    """
    if chosen := next((name for name in ("indices", "block_indices") if kwargs.get(name) is not None), None):
        raise LayoutError(
            f"{type(module).__name__} attends to keys that it chooses itself ({chosen}), which attn_implementation="
            f"{NAME!r} does not do; use 'sdpa' or 'eager'."
        )
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.visible
    if attention_mask is None and kwargs.get("position_bias") is None:
        batch, _, queries, _ = query.shape
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # The window is that of the layer where no mask was made.
        window = kwargs.get("sliding_window") if causal else None
        pattern = MaskPattern(causal, None if window is None else window - 1)
        attention_mask = Visible(pattern, _rows_of(batch, queries, key.shape[2], query.device))
        if (call := CALL.get()) is not None:
            attention_mask = _of_call(call, attention_mask.pattern, None)
    if not isinstance(attention_mask, Visible):
        if (call := CALL.get()) is not None:
            _of_call(call, None, None)
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return _masked(module, query, key, value, attention_mask, softcap, s_aux, options)
    if (call := CALL.get()) is not None:
        call.layers.add(id(module))
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embedding leaves float32, as autocast does not reach it.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, length, _ = query.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    if attention_mask.queries is not None:
        q = q.index_select(0, attention_mask.queries)
    if attention_mask.keys is not None:
        k, v = k.index_select(0, attention_mask.keys), v.index_select(0, attention_mask.keys)
    out = attention_mask.core(
        module,
        q,
        k,
        v,
        attention_mask.sequences,
        attention_mask.pattern,
        scale=scaling,
        softcap=softcap,
        dropout=dropout,
        sink=None if s_aux is None else s_aux.to(q.dtype),
    )
    if attention_mask.queries is not None:
        out = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, attention_mask.queries, out)
    return out.view(batch, length, heads, -1), None


def _masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Any,
    softcap: float | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention with a mask that is a tensor: that of ``transformers``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: tuple[Tensor, Tensor | None]
    if softcap is None and sinks is None:
        found = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, given, **options)
        return found
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        given = torch.zeros_like(given, dtype=query.dtype).masked_fill(~given, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    # Families take sinks from their module.
    found = eager(module, query, key, value, given, softcap=softcap, **options)
    return found


def use_attention(root: nn.Module) -> int:
    """Let models of ``transformers`` in ``root`` use our attention, and return how many do.

    A model keeps what its user chose if that is not the default (``sdpa``, or ``eager`` where a family lacks it), and
    if it declares layers that choose the keys for each query (:data:`SPARSE`). The name is not written into
    configurations that are saved.
    """
    if "transformers" not in sys.modules:
        return 0
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(CAUSAL, attend)
    AttentionMaskInterface.register(NAME, mask)
    changed = 0
    for module in root.modules():
        if not isinstance(module, PreTrainedModel) or not module._supports_attention_backend:
            continue
        config = module.config
        default = "sdpa" if module._supports_sdpa else "eager"
        plain = config._attn_implementation == default and not getattr(config, "output_attentions", False)
        if plain and not {*(getattr(config, "layer_types", None) or ())} & {*SPARSE}:
            # The public setter would set models inside, too, whose class may not use the interface.
            config._attn_implementation_internal = NAME
        changed += config._attn_implementation == NAME
    return changed
