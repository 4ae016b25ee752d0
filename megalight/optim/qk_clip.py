"""QK-clip: attention logits stay below a threshold, by scaling the query and key weights of the heads that exceed it.

Muon lets logits grow, where Adam does not (Kimi K2, https://arxiv.org/abs/2507.20534). While a model is trained, the
largest logit of each head is noted. After the step, with ``g = min(1, threshold / largest)``, head by head:

- The weights of a query head and of its key head get the factor ``sqrt(g)`` each. If several query heads read a key
  head, the key head gets that of the smallest ``g``, and query heads the rest of theirs.
- In latent attention, so do the parts without position; rotated features of queries get ``g``. Rotated features of keys
  are shared by all heads, and stay.

No kernel of attention returns its largest logit, so a pass over blocks of scores computes it: the products of queries
and keys once more, and nothing else of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn import InnerAttention
from megalight.nn.attention import Attention
from megalight.nn.latent_attention import LatentAttention
from megalight.parallel.data_parallel.buffers import FlatShard
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import boxes
from megalight.types import PackedSequences

BLOCK_BYTES = 256 * 2**20
"""Memory of one block of scores."""


@torch.no_grad()
def largest_logits(
    q: Tensor, k: Tensor, sequences: PackedSequences, inner: InnerAttention, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the largest scaled score of each query head, ``[H]``, of the pairs that attention sees.

    Args:
        q, k: ``[T, H, D], [T, Hkv, D]``, of this rank's share of the tokens.
        sequences: of these tokens.
        inner: says which pairs attention sees.
        group: the ranks with the other shares. All call it together.
    """
    sequence = sequences.expand(torch.arange(len(sequences.lengths), device=q.device))
    place, share = sequences.positions, sequences.context
    if share is not None:
        # Padding has no sequence. That of a share lies behind the real tokens of each sequence.
        lengths = torch.tensor(share.real_lengths[: sequences.num_sequences] + (0,) * share.num_dummies).to(q.device)
        sequence = sequence.where(place < lengths[sequence], -1)
    elif sequences.num_padding:
        sequence[-sequences.num_padding :] = -1
    about = torch.stack([sequence, place])
    keys, known = (_gathered(k, group), _gathered(about.T.contiguous(), group).T) if share is not None else (k, about)
    heads, kv_heads = q.shape[1], keys.shape[1]
    queries = q.view(len(q), kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)  # [Hkv, H / Hkv, T, D]
    transposed = keys.permute(1, 2, 0)  # [Hkv, D, Tk]
    found = q.new_full((heads,), -torch.inf)
    rows = max(1, BLOCK_BYTES // (heads * len(keys) * max(4, q.element_size())))
    for first in range(0, len(q), rows):
        last = min(first + rows, len(q))
        # Whole sequences lie behind each other: a block needs no key before its first sequence, or behind its own end.
        low, high = (_start(sequences, first), _end(sequences, last)) if share is None else (0, len(keys))
        high = min(high, last) if inner.causal and share is None else high
        (row, at), (column, to) = about[:, first:last, None], known[:, None, low:high]
        seen = (row == column) & (row >= 0)
        if inner.causal:
            seen &= to <= at
        if inner.window is not None:
            seen &= at - to <= inner.window
        if inner.chunk is not None:
            seen &= at // inner.chunk == to // inner.chunk
        block = queries[:, :, first:last].flatten(1, 2) @ transposed[:, :, low:high]
        block = block.view(heads, last - first, high - low).masked_fill_(~seen, -torch.inf)
        found = torch.maximum(found, block.amax((1, 2)))
    scale = q.shape[-1] ** -0.5 if inner.scale is None else inner.scale
    return found * scale


def _start(sequences: PackedSequences, token: int) -> int:
    """Return the first token of the sequence of a token."""
    start = 0
    for length in sequences.lengths:
        if token < start + length:
            break
        start += length
    return start


def _end(sequences: PackedSequences, token: int) -> int:
    """Return the end of the sequence of the token before this one."""
    end = 0
    for length in sequences.lengths:
        end += length
        if token <= end:
            break
    return end


def _gathered(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return own
    whole = own.new_empty(group.size() * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
    return whole


@dataclass(eq=False)
class ClippedLayer:
    """An attention layer whose logits are watched.

    Attributes:
        name: its canonical name.
        layer: the module.
        heads: query heads and key heads of the whole layer.
        first: first query head on this rank.
        largest: ``[H]`` of the whole layer, in this step so far; heads of other ranks are -inf.
    """

    name: str
    layer: Attention | LatentAttention
    heads: tuple[int, int]
    first: int
    largest: Tensor

    def factors(self, threshold: float) -> Iterator[tuple[str, Tensor]]:
        """Yield names of weights and biases, each with the factor of each of its rows."""
        layer, (heads, kv_heads) = self.layer, self.heads
        # Without a token in this step it is -inf, and nothing is scaled.
        g = (threshold / self.largest.clamp(min=threshold)).double()
        if isinstance(layer, LatentAttention):
            ones = torch.ones_like(g)
            columns = [g.sqrt()] * layer.head_dim + [g] * layer.rotary_dim
            yield f"{self.name}.q_up.weight", torch.stack(columns, 1).view(-1)
            columns = [g.sqrt()] * layer.head_dim + [ones] * layer.value_dim
            yield f"{self.name}.kv_up.weight", torch.stack(columns, 1).view(-1)
            return
        shared = g.view(kv_heads, heads // kv_heads)
        key = shared.amin(1).sqrt()
        for part, factor in (("q", (shared / key[:, None]).view(-1)), ("k", key)):
            rows = factor.repeat_interleave(layer.head_dim)
            yield f"{self.name}.{part}.weight", rows
            yield f"{self.name}.{part}.bias", rows


class QKClip:
    """Watches the attention layers of a model, and scales the rows of their weights in shards.

    Args:
        threshold: largest logit.
        model: the parts of the model on this rank.

    Attributes:
        rows: name of a weight or a bias -> the factor of each of its rows, in this step.

    Raises:
        ConfigurationError: a layer normalizes queries or keys, so that their weights do not scale logits; tokens of an
            image see each other; a weight is frozen; or there is no attention.
    """

    def __init__(self, threshold: float, model: ParallelModel) -> None:
        self.threshold = threshold
        self.rows: dict[str, Tensor] = {}
        self.mesh: ParallelMesh = model.mesh
        named = {id(tensor): name for name, tensor in model.root.named_parameters()}
        self.layers = [
            _clipped(name, module, model, named)
            for name, module in model.root.named_modules()
            if isinstance(module, Attention | LatentAttention)
        ]
        # Of all stages: one may have layers without attention alone.
        counts = [len(self.layers)]
        if (group := model.mesh.group("pp")) is not None:
            every: list[Any] = [None] * group.size()
            dist.all_gather_object(every, counts[0], group=group)
            counts = every
        if not any(counts):
            raise ConfigurationError("qk_clip is set, and the model has no attention; leave qk_clip out.")
        # A model outlives the optimizer of one fit.
        watching = weakref.ref(self)
        for each in self.layers:
            each.layer.inner.register_forward_pre_hook(partial(_watch, watching, each))

    def note(self, layer: ClippedLayer, module: nn.Module, q: Tensor, k: Tensor, sequences: PackedSequences) -> None:
        """Note the largest logits of a micro-batch."""
        group = None if sequences.context is None else self.mesh.group("cp")
        found = largest_logits(q, k, sequences, _core(module), group)
        own = layer.largest[layer.first : layer.first + len(found)]
        torch.maximum(own, found.to(own.dtype), out=own)

    @torch.no_grad()
    def begin(self) -> None:
        """Make the factors of this step from the logits that all ranks have seen, and forget these.

        All ranks of a pipeline stage call it together.
        """
        if not self.layers:
            return
        together = torch.cat([each.largest for each in self.layers])
        if (group := self.mesh.group("dp", "cp", "tp")) is not None:
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        self.rows = {}
        sizes = [each.heads[0] for each in self.layers]
        for each, largest in zip(self.layers, torch.split(together, sizes), strict=True):
            each.largest.copy_(largest)
            self.rows |= dict(each.factors(self.threshold))
            each.largest.fill_(-torch.inf)

    @torch.no_grad()
    def scale(self, part: FlatShard) -> bool:
        """Scale the rows of weights that lie in a part of a shard. Returns whether there are any."""
        any_row = False
        for piece, first, last, start in part.intervals():
            if (rows := self.rows.get(piece.name)) is None:
                continue
            any_row = True
            for offset, extent, at in boxes(piece.size, first, last):
                row = piece.offset[0] + offset[0]
                begin = start + at - first
                values = part.master.detach()[begin : begin + prod(extent)].view(extent[0], -1)
                values.mul_(rows[row : row + extent[0], None].to(values.device, values.dtype))
        return any_row


def _watch(watching: weakref.ref[QKClip], layer: ClippedLayer, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    clip = watching()
    if clip is not None and module.training:
        q, k, _, sequences = inputs[:4]
        clip.note(layer, module, q, k, sequences)


def _core(inner: nn.Module) -> InnerAttention:
    core = inner if isinstance(inner, InnerAttention) else getattr(inner, "inner", None)
    assert isinstance(core, InnerAttention)
    return core


def _clipped(
    name: str, layer: Attention | LatentAttention, model: ParallelModel, named: dict[int, str]
) -> ClippedLayer:
    def refused(why: str) -> ConfigurationError:
        return ConfigurationError(f"qk_clip cannot serve {name}: {why}. Leave qk_clip out.")

    inner = layer.inner if isinstance(layer.inner, InnerAttention) else getattr(layer.inner, "inner", None)
    if not isinstance(inner, InnerAttention):
        raise refused(f"its attention is {type(layer.inner).__name__}, whose logits are unknown")
    if inner.mutual:
        raise refused("tokens of an image see each other (mutual)")
    latent = isinstance(layer, LatentAttention)
    if isinstance(layer, Attention) and (layer.q_norm is not None or layer.k_norm is not None):
        raise refused("it normalizes queries and keys (attention.qk_norm), which bounds their logits already")
    projections = (layer.q_up, layer.kv_up) if isinstance(layer, LatentAttention) else (layer.qkv,)
    for projection in projections:
        if not projection.weight.requires_grad:
            raise refused("its query and key weights are frozen")
    weight = projections[0].weight
    pieces = model.specs[named[id(weight)]].pieces
    size = layer.head_dim + layer.rotary_dim if isinstance(layer, LatentAttention) else layer.head_dim
    query = pieces[0]
    heads = query.shape[0] // size
    kv_heads = heads if latent else pieces[1].shape[0] // size
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    largest = torch.full((heads,), -torch.inf, dtype=dtype, device=weight.device)
    return ClippedLayer(query.name.rsplit(".", 2)[0], layer, (heads, kv_heads), query.offset[0] // size, largest)
