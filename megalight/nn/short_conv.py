"""Causal convolutions, and the gated short convolution of LFM2: a mixer that sees only the last few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn.canonical import Section, section_parts
from megalight.nn.init import Initializer, Normal
from megalight.nn.linear import Linear
from megalight.nn.state import LayerContext, SequencePool, Slots
from megalight.ops.batch_invariant import refuse
from megalight.ops.causal_conv import causal_conv
from megalight.types import PackedSequences, Pages


class CausalConv(nn.Module):
    """``y[t] = sum_j weight[:, k - 1 - j] * x[t - j] + bias`` for each channel. Before a sequence, ``x`` is 0.

    Half dtypes are summed in float32.

    Args:
        channels: number of channels, or named sections of them; their sizes add up to the number.
        kernel: number of tokens that the convolution sees, ``k``.
        bias: whether to add a bias.
        silu: whether to return ``silu(y)``.
        initializer: of weight and bias. By default, the standard deviation is ``1 / sqrt(k)``, which keeps the
            variance.
        backend: backend of the op.

    Attributes:
        weight: ``[channels, k]``. The last column is for the token itself.
        bias: ``[channels]``, or None.
        sections: the named sections, or None.
    """

    def __init__(
        self,
        channels: int | Sequence[Section],
        kernel: int,
        *,
        bias: bool = False,
        silu: bool = False,
        initializer: Initializer | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.sections: tuple[Section, ...] | None = None if isinstance(channels, int) else tuple(channels)
        count = channels if isinstance(channels, int) else sum(section.size for section in channels)
        self.silu, self.backend = silu, backend
        self.weight = nn.Parameter(torch.empty(count, kernel))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(count)) if bias else None)
        # The default keeps the variance of independent inputs.
        drawn = initializer or Normal(kernel**-0.5)
        self.initializers: dict[str, Initializer] = {"weight": drawn, "bias": drawn}

    def forward(
        self,
        x: Tensor,
        sequences: PackedSequences,
        state: SequencePool | None = None,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """``[T, channels] -> [T, channels]``.

        Args:
            x: the inputs.
            sequences: how the tokens divide into sequences.
            state: holds the last ``k - 1`` inputs of each sequence. None: there are no earlier tokens.
            select: takes the rows of weight and bias that belong to the channels in ``x``. None: all.

        Raises:
            LayoutError: the tokens are only a part of their sequences.
        """
        if sequences.context is not None:
            raise LayoutError(
                "a convolution needs whole sequences, and these tokens are only a part of theirs. Give it whole "
                "sequences, or use a model without convolutions."
            )
        # Only some of the channels may be computed here.
        take = select or (lambda rows: rows)
        weight, bias = take(self.weight), None if self.bias is None else take(self.bias)
        pages = sequences.pages
        if state is None or pages is None:
            return causal_conv(x, weight, bias, sequences, silu=self.silu, backend=self.backend)
        # each sequence gets its earlier inputs back, and their outputs are dropped
        x, sequences, new = _with_earlier(x, sequences, weight.shape[1] - 1, state, pages)
        return causal_conv(x, weight, bias, sequences, silu=self.silu, backend=self.backend)[new]

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the sections; each name replaces the module's name. See :mod:`megalight.nn.canonical`."""
        return section_parts(self.sections, path, local, tuple(getattr(self, local).shape))

    def extra_repr(self) -> str:
        """Return channels and width, for printing."""
        return f"{self.weight.shape[0]}, kernel={self.weight.shape[1]}"


def _with_earlier(
    x: Tensor, sequences: PackedSequences, kept: int, state: SequencePool, pages: Pages
) -> tuple[Tensor, PackedSequences, Tensor]:
    """Put the ``kept`` earlier inputs of each sequence before its new ones, and update the state.

    Returns:
        the rows ``[T + n kept, channels]``, their sequences, and the places ``[T]`` of the new rows.
    """
    pool = state.entries((kept, x.shape[1]), x)
    before = pages.read(pool)
    numbers = torch.arange(len(before), device=x.device)
    offsets = torch.arange(kept, device=x.device)
    # Every sequence before a token, and its own, pushes it back by the earlier inputs.
    new = torch.arange(len(x), device=x.device) + kept * (sequences.expand(numbers) + 1)
    old = sequences.cu_seqlens[:-1].long() + kept * numbers
    rows = x.new_empty(len(x) + before.shape[0] * kept, x.shape[1])
    rows[new], rows[old[:, None] + offsets] = x, before
    ends = sequences.cu_seqlens[1:].long() + kept * numbers
    # The next pass continues after the last new token; a short pass leaves some of the earlier inputs in the state.
    pages.store(pool, rows[ends[:, None] + offsets])
    # From the device's own offsets: those of a recorded pass are known there alone.
    starts = torch.repeat_interleave(old, sequences.sizes + kept, output_size=len(rows))
    positions = torch.arange(len(rows), device=x.device) - starts
    offsets = torch.cat([old, ends[-1:] + kept]).int()
    return rows, PackedSequences(tuple(kept + length for length in sequences.lengths), offsets, positions), new


class ShortConv(nn.Module):
    """``proj(out_gate * filter(in_gate * value))``, where gates and value are projections of the hidden states.

    Args:
        hidden_size: ``h``, also the number of channels of the convolution.
        kernel: number of tokens that the convolution sees, at least 2.
        std: standard deviation of the initial ``gates`` weights.
        proj_std: standard deviation of the initial ``proj`` weights.
    """

    def __init__(self, hidden_size: int, kernel: int, *, std: float = 0.02, proj_std: float = 0.02) -> None:
        super().__init__()
        # One product for gates and value, which all read the same hidden states.
        sections = [Section(name, hidden_size, hidden_size) for name in ("in_gate", "out_gate", "value")]
        self.gates = Linear(hidden_size, sections, std=std)
        self.filter = CausalConv(hidden_size, kernel)
        self.proj = Linear(hidden_size, hidden_size, std=proj_std)

    def make_state(self, slots: Slots) -> SequencePool:
        """Make the state: the last inputs of the convolution."""
        return slots.per_sequence()

    def forward(
        self, hidden: Tensor, context: LayerContext, state: SequencePool | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """``[T, h] -> [T, h]``. ``memory`` is unused."""
        refuse("layers of convolutions")
        in_gate, out_gate, value = torch.split(self.gates(hidden), self.gates.section_sizes, dim=-1)
        filtered = self.filter(in_gate * value, context.sequences, state)
        projected: Tensor = self.proj(out_gate * filtered)
        return projected
