"""The gated short convolution of LFM2: a mixer that sees only the last few tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn.canonical import Section
from megalight.nn.context import LayerContext
from megalight.nn.init import Initializer, Normal
from megalight.nn.linear import Linear
from megalight.nn.state import SequenceRows, Slots
from megalight.ops.common import wide
from megalight.types import PackedSequences


class CausalConv(nn.Module):
    """``y[t] = sum_j weight[:, k - 1 - j] * x[t - j]`` for each channel. Before the start of a sequence, ``x`` is 0.

    Half dtypes are summed in float32.

    Attributes:
        weight: ``[channels, k]``. The last column is for the token itself. The initial standard deviation is
            ``1 / sqrt(k)``, which keeps the variance.
    """

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.initializers: dict[str, Initializer] = {"weight": Normal(kernel**-0.5)}

    def forward(self, x: Tensor, sequences: PackedSequences, state: SequenceRows | None = None) -> Tensor:
        """``[T, channels] -> [T, channels]``. The state holds the last ``k - 1`` inputs of each sequence.

        Raises:
            LayoutError: the tokens are only a part of their sequences.
        """
        if sequences.context is not None:
            raise LayoutError(
                "a convolution needs whole sequences, and these tokens are only a part of theirs. Give it whole "
                "sequences, or use a model without convolutions."
            )
        # columns as a list, the token's own first
        # Wider than half: the sum has `k` terms.
        taps = self.weight.to(wide(x.dtype)).flip(1).unbind(1)
        inputs = _earlier(x, sequences, len(taps)) if state is None else _continued(x, sequences, len(taps), state)
        # The token's own term first. The order of the sum is the same with and without a
        # state, and so are its bits.
        y = taps[0] * inputs[0]
        for tap, earlier in zip(taps[1:], inputs[1:], strict=True):
            y = y + tap * earlier
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return channels and width, for printing."""
        return f"{self.weight.shape[0]}, kernel={self.weight.shape[1]}"


def _earlier(x: Tensor, sequences: PackedSequences, count: int) -> list[Tensor]:
    """Return ``x[t - j]`` for every token ``t`` and each ``j < count``, with 0 before the start of its sequence."""
    places = sequences.positions[:, None]
    # shift the packed tokens as one sequence, then clear places that crossed the start of their own sequence
    shifted = [F.pad(x, (0, 0, j, 0))[: len(x)].masked_fill(places < j, 0) for j in range(1, count)]
    # A token near the start of its sequence would see the last tokens of the one before.
    return [x, *shifted]


def _continued(x: Tensor, sequences: PackedSequences, count: int, state: SequenceRows) -> list[Tensor]:
    """Return the same for continued sequences. Earlier inputs come from the state, which is then updated."""
    kept = count - 1
    before = state.read((kept, x.shape[1]), x)
    # One tensor, so that a single index finds a row wherever it lies.
    # rows: the ``kept`` earlier inputs of every sequence, then all new tokens
    rows = torch.cat([before.flatten(0, 1), x])
    starts = sequences.cu_seqlens[:-1].long()
    numbers = torch.arange(len(starts), device=x.device)

    def at(sequence: Tensor, place: Tensor) -> Tensor:
        """Return rows by sequence and place among its new tokens. Negative places are earlier inputs."""
        new, old = len(starts) * kept + starts[sequence] + place, (sequence + 1) * kept + place
        return rows[torch.where(place >= 0, new, old)]

    last = torch.arange(-kept, 0, device=x.device)
    # Written before the outputs are formed, from the same rows: the next pass continues
    # after the last new token.
    state.write(at(numbers[:, None], sequences.sizes[:, None] + last))
    sequence = sequences.expand(numbers)
    place = torch.arange(len(x), device=x.device) - starts[sequence]
    return [x, *(at(sequence, place - j) for j in range(1, count))]


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

    def make_state(self, slots: Slots) -> SequenceRows:
        """Make the state: the last inputs of the convolution."""
        return slots.per_sequence()

    def forward(
        self, hidden: Tensor, context: LayerContext, state: SequenceRows | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """``[T, h] -> [T, h]``. ``memory`` is unused."""
        in_gate, out_gate, value = torch.split(self.gates(hidden), self.gates.section_sizes, dim=-1)
        filtered = self.filter(in_gate * value, context.sequences, state)
        projected: Tensor = self.proj(out_gate * filtered)
        return projected
