"""Gated DeltaNet: a mixer whose state forgets, and corrects what it holds (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalight.nn.canonical import Section
from megalight.nn.init import Uniform
from megalight.nn.linear import Linear
from megalight.nn.mamba2 import AllTokens, Decays, GatedNorm
from megalight.nn.short_conv import CausalConv
from megalight.nn.state import LayerContext, SequencePool, Slots
from megalight.ops.batch_invariant import refuse
from megalight.ops.common import wide
from megalight.ops.delta_rule import delta_rule, delta_rule_continued
from megalight.ops.gated_norm import gated_norm
from megalight.ops.norm import rms_norm
from megalight.ops.row_indexing import split
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class DeltaState:
    """What Gated DeltaNet keeps of each sequence.

    Attributes:
        conv: the last inputs of the convolution, ``[k - 1, channels]``.
        rule: the state of the delta rule, ``[H, K, V]``, in float32 for half dtypes.
    """

    conv: SequencePool
    rule: SequencePool


class DeltaRule(Decays):
    """The gated delta rule of all heads. Keys have length 1, and queries ``1 / sqrt(K)``.

    Args:
        num_heads: ``H``.
        steps: range of the initial step sizes, before the floor.
        floor: least initial step size.
        backend: backend of the rule.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: Tensor,
        rates: Tensor,
        sequences: PackedSequences,
        state: SequencePool | None,
        select: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """``q, k [T, G, K], v [T, H, V], steps, rates [T, H] -> [T, H, V]``. ``select`` takes the heads in ``v``.

        Steps are before bias and softplus, and rates before the sigmoid.
        """
        dt, a = self.of_steps(steps, select)
        # Normed after the convolution, which would change lengths.
        q, k = _unit(q, q.shape[-1] ** -0.5), _unit(k)
        pages = sequences.pages
        if state is None or pages is None:
            return delta_rule(q, k, v, dt * a, rates.sigmoid(), sequences, backend=self.backend)
        entries = state.entries((v.shape[1], k.shape[-1], v.shape[-1]), v.new_empty(0, dtype=wide(v.dtype)))
        # Backends of whole sequences, such as those of plugins, do not go on from a state.
        return delta_rule_continued(q, k, v, dt * a, rates.sigmoid(), entries, pages)


def _unit(rows: Tensor, length: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Return vectors of the given length. ``eps`` is added to the sum of squares, as in published models."""
    size = rows.shape[-1]
    # An RMS norm: the root of a mean is shorter by that of the size.
    factor = rows.new_full((size,), length * size**-0.5, dtype=wide(rows.dtype))
    return rms_norm(rows, factor, eps / size)


class HeadNorm(GatedNorm):
    """``rms_norm(y) * weight * silu(z)``, with the mean square over each head, and one weight for all heads.

    Attributes:
        weight: ``[head_dim]``, initially 1.
    """

    def __init__(self, head_dim: int, eps: float, backend: str = "auto") -> None:
        super().__init__(head_dim, 1, eps, backend)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """``y [T, H, V], z [T, H V] -> [T, H V]``."""
        return gated_norm(y.flatten(1), z, self.weight, self.group_size, self.eps, last=True, backend=self.backend)


class GatedDeltaNet(nn.Module):
    """``proj(norm(rule(conv(v | q | k), a, b)) * silu(z))``, where all six are one projection of the input.

    Args:
        hidden_size: ``h``.
        num_heads: value heads, ``H``.
        num_key_heads: heads of queries and keys, ``G``; ``H / G`` value heads share each.
        head_dim: features of a value head, ``V``.
        key_dim: features of a query and key head, ``K``.
        conv_kernel: tokens that the convolution sees.
        norm_eps: eps of the norm of each head, which sees the rule's output alone; the gate comes after it.
        steps: range of the initial step sizes.
        step_floor: least initial step size.
        std: standard deviation of the initial ``in_proj`` weights.
        proj_std: standard deviation of the initial ``proj`` weights.
        conv_backend, rule_backend, norm_backend: backends of the ops.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        key_dim: int,
        *,
        conv_kernel: int = 4,
        norm_eps: float = 1e-6,
        steps: tuple[float, float] = (1e-3, 0.1),
        step_floor: float = 1e-4,
        std: float = 0.02,
        proj_std: float = 0.02,
        conv_backend: str = "auto",
        rule_backend: str = "auto",
        norm_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.head_dim, self.key_dim = head_dim, key_dim
        inner, shared = num_heads * head_dim, num_key_heads * key_dim
        sizes = {"z": (inner, num_heads), "v": (inner, num_heads)}
        sizes |= {"q": (shared, num_key_heads), "k": (shared, num_key_heads)}
        sections = [Section(name, size, units) for name, (size, units) in sizes.items()]
        rates = [Section(name, num_heads, num_heads) for name in "ab"]
        self.in_proj = Linear(hidden_size, [*sections, *rates], std=std)
        # as torch initializes a depthwise convolution
        bound = conv_kernel**-0.5
        self.conv = CausalConv(
            [Section(f"conv_{section.name}", section.size, section.units) for section in sections[1:]],
            conv_kernel,
            silu=True,
            initializer=Uniform(-bound, bound),
            backend=conv_backend,
        )
        self.tokens = AllTokens()
        self.rule = DeltaRule(num_heads, steps, step_floor, rule_backend)
        self.norm = HeadNorm(head_dim, norm_eps, norm_backend)
        self.proj = Linear(inner, hidden_size, std=proj_std)

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of value heads and of key heads in the output of the projection."""
        return self.in_proj.section_sizes[-1], self.in_proj.section_sizes[2] // self.key_dim

    def make_state(self, slots: Slots) -> DeltaState:
        """Make the state: the last inputs of the convolution, and the state of the rule."""
        return DeltaState(slots.per_sequence(), slots.per_sequence())

    def forward(
        self, hidden: Tensor, context: LayerContext, state: DeltaState | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """``[T, h] -> [T, h]``. ``memory`` is unused."""
        refuse("Gated DeltaNet layers")
        inner, _, shared, *_ = sections = self.in_proj.section_sizes
        heads, groups = self.heads
        sizes, units = (inner, shared, shared), (heads, groups, groups)
        z, rows, a, b = split(self.in_proj(hidden), [inner, sum(sections[1:4]), heads, heads])
        packed = context.sequences
        # Both numbers of a head side by side, so that an exchange of heads keeps them together.
        rows, pairs, sequences = self.tokens.gather(rows, torch.stack([a, b], -1).flatten(1), sizes, units, packed)
        steps, rates = torch.unflatten(pairs, 1, (-1, 2)).unbind(-1)
        select = partial(self.tokens.select, packed=packed)
        rows = self.conv(rows, sequences, state and state.conv, partial(select, sizes=sizes, units=units))
        # of the heads that are computed here
        inner = steps.shape[1] * self.head_dim
        v, q, k = torch.split(rows, [inner, *[(rows.shape[1] - inner) // 2] * 2], -1)
        y = self.rule(
            torch.unflatten(q, 1, (-1, self.key_dim)),
            torch.unflatten(k, 1, (-1, self.key_dim)),
            torch.unflatten(v, 1, (-1, self.head_dim)),
            steps,
            rates,
            sequences,
            state and state.rule,
            partial(select, sizes=(heads,), units=(heads,)),
        )
        projected: Tensor = self.proj(self.norm(self.tokens.restore(y, packed), z))
        return projected
