"""Mamba-2: a mixer whose state is a matrix per head (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log

import torch
from torch import Tensor, nn

from megalight.nn.canonical import Section
from megalight.nn.init import ConstantInit, Initializer, Uniform
from megalight.nn.linear import Linear
from megalight.nn.short_conv import CausalConv
from megalight.nn.state import LayerContext, SequencePool, Slots
from megalight.ops.batch_invariant import refuse
from megalight.ops.common import HALF, wide
from megalight.ops.gated_norm import check_backend, gated_norm
from megalight.ops.row_indexing import split
from megalight.ops.ssd import ssd, ssd_continued, step_sizes
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class MambaState:
    """What Mamba-2 keeps of each sequence.

    Attributes:
        conv: the last inputs of the convolution, ``[k - 1, channels]``.
        scan: the state of the scan, ``[H, P, N]``, in float32 for half dtypes.
    """

    conv: SequencePool
    scan: SequencePool


def _step_bias(logarithm: Tensor, floor: float) -> Tensor:
    """Return the bias whose softplus is a step size, given by its logarithm, of at least ``floor``."""
    # The floor keeps heads from starting with steps that never change their state.
    step = logarithm.exp().clamp(min=floor)
    # inverse of softplus; expm1 keeps the digits of small steps
    return step + torch.log(-torch.expm1(-step))


class Decays(nn.Module):
    """Decays of the states of heads, with parameters that stay in float32 when the model's dtype is a half one.

    Args:
        num_heads: ``H``.
        steps: range of the initial step sizes, before the floor.
        floor: least initial step size.
        backend: backend of the op that uses them.

    Attributes:
        A_log: ``[H]``; a state decays by ``exp(-exp(A_log) dt)`` per token. ``exp(A_log)`` begins between 1 and 16.
        dt_bias: ``[H]``; the step size is ``softplus(dt + dt_bias)``.
    """

    def __init__(self, num_heads: int, steps: tuple[float, float], floor: float, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.initializers: dict[str, Initializer] = {
            # The logarithm of a uniform value: heads begin with decays of different lengths.
            "A_log": Uniform(1.0, 16.0, torch.log),
            "dt_bias": Uniform(log(steps[0]), log(steps[1]), partial(_step_bias, floor=floor)),
        }

    def of_steps(self, dt: Tensor, select: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """From ``dt [T, H]``, before bias and softplus, to step sizes ``[T, H]`` and rates ``[H]``, below 0."""
        return step_sizes(dt, select(self.dt_bias)), self.rates(dt.dtype, select)

    def rates(self, dtype: torch.dtype, select: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rates ``[H]``, below 0, in float32 for half dtypes."""
        return -select(self.A_log).to(wide(dtype)).exp()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decays:
        """Keep float32 when the dtype changes to a half one: ``exp`` of a rounded ``A_log`` is another decay."""
        before = {name: parameter.data for name, parameter in self._parameters.items() if parameter is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Undone for half dtypes alone: a move to a device, or to float64, is kept.
        for name, values in before.items():
            parameter = self._parameters[name]
            assert parameter is not None
            if parameter.dtype in HALF and values.dtype not in HALF:
                parameter.data = values.to(parameter.device)
        return self


class Scan(Decays):
    """The scan of all heads with its parameters.

    Args:
        num_heads: ``H``.
        steps: range of the initial step sizes, before the floor.
        floor: least initial step size.
        backend: backend of the scan.

    Attributes:
        D: ``[H]``, factor of the input that is added to the output; initially 1.
    """

    def __init__(self, num_heads: int, steps: tuple[float, float], floor: float, backend: str = "auto") -> None:
        super().__init__(num_heads, steps, floor, backend)
        self.D = nn.Parameter(torch.empty(num_heads))
        self.initializers["D"] = ConstantInit(1.0)

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        sequences: PackedSequences,
        state: SequencePool | None,
        select: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """``x [T, H, P], dt [T, H], b, c [T, G, N] -> [T, H, P]``. ``select`` takes the heads in ``x``."""
        a, d = self.rates(dt.dtype, select), select(self.D).to(wide(dt.dtype))
        pages = sequences.pages
        if state is None or pages is None:
            return ssd(x, dt, a, b, c, d, sequences, bias=select(self.dt_bias), backend=self.backend)
        entries = state.entries((*x.shape[1:], b.shape[-1]), x.new_empty(0, dtype=wide(x.dtype)))
        # Backends of whole sequences, such as those of plugins, do not go on from a state.
        return ssd_continued(x, dt, a, b, c, d, entries, pages, bias=select(self.dt_bias))


class GatedNorm(nn.Module):
    """``rms_norm(y * silu(z)) * weight``, with the mean square over each of several groups of features.

    Attributes:
        weight: ``[size]``, initially 1.
        group_size: features here that are normalized together.
        average: if the features here are a part of those that are normalized together: mean squares here -> of all.
            None: they are all of them.
    """

    average: Callable[[Tensor], Tensor] | None = None

    def __init__(self, size: int, groups: int, eps: float, backend: str = "auto") -> None:
        super().__init__()
        self.group_size, self.eps, self.backend = size // groups, eps, backend
        self.weight = nn.Parameter(torch.empty(size))
        self.initializers: dict[str, Initializer] = {"weight": ConstantInit(1.0)}

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """``y, z [T, size] -> [T, size]``."""
        return gated_norm(y, z, self.weight, self.group_size, self.eps, average=self.average, backend=self.backend)

    def check_backend(self, device: torch.device) -> None:
        """Raise if the named backend cannot serve on ``device``; see :func:`~megalight.ops.norm.check_backend`."""
        check_backend(self.weight, self.group_size, device.type, self.backend, divided=self.average is not None)

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return f"{self.weight.numel()}, group_size={self.group_size}, eps={self.eps}"


class AllTokens(nn.Module):
    """Brings all tokens of a sequence together. They are together here; a plan replaces it where they are not."""

    def gather(
        self,
        rows: Tensor,
        dt: Tensor,
        sizes: tuple[int, int, int],
        units: tuple[int, int, int],
        packed: PackedSequences,
    ) -> tuple[Tensor, Tensor, PackedSequences]:
        """Return ``rows [T, sum(sizes)]`` and ``dt [T, H]`` of all tokens, for some of the heads, and their sequences.

        Args:
            rows: inputs of the convolution: ``x``, ``B`` and ``C``.
            dt: step sizes before bias and softplus.
            sizes: features of ``x``, ``B`` and ``C``.
            units: heads in ``x``, and groups in ``B`` and ``C``.
            packed: the sequences of the tokens.
        """
        return rows, dt, packed

    def restore(self, y: Tensor, packed: PackedSequences) -> Tensor:
        """Return ``y [T, H, P]`` of all heads for the tokens that :meth:`gather` got."""
        return y

    def select(self, values: Tensor, sizes: tuple[int, ...], units: tuple[int, ...], packed: PackedSequences) -> Tensor:
        """Return the rows of a parameter, of sections with ``sizes``, that belong to the heads that are computed."""
        return values


class Mamba2(nn.Module):
    """``proj(norm(scan(conv(x | B | C), dt), z))``, where ``z``, ``x``, ``B``, ``C`` and ``dt`` are one projection.

    Args:
        hidden_size: ``h``.
        num_heads: ``H``.
        head_dim: features of a head, ``P``.
        state_size: ``N``; a head's state is a matrix ``[P, N]``.
        num_groups: ``G``; ``H / G`` heads share each ``B`` and ``C``.
        conv_kernel: tokens that the convolution sees.
        conv_bias: whether the convolution has a bias.
        norm_groups: groups of features that the norm before ``proj`` treats on their own.
        norm_eps: eps of that norm.
        steps: range of the initial step sizes.
        step_floor: least initial step size.
        std: standard deviation of the initial ``in_proj`` weights.
        proj_std: standard deviation of the initial ``proj`` weights.
        conv_backend, scan_backend, norm_backend: backends of the ops.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        *,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        norm_groups: int = 1,
        norm_eps: float = 1e-5,
        steps: tuple[float, float] = (1e-3, 0.1),
        step_floor: float = 1e-4,
        std: float = 0.02,
        proj_std: float = 0.02,
        conv_backend: str = "auto",
        scan_backend: str = "auto",
        norm_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.head_dim, self.state_size = head_dim, state_size
        inner, shared = num_heads * head_dim, num_groups * state_size
        # In the order in which the weights of others lie in their projection.
        sizes = {"z": (inner, num_heads), "x": (inner, num_heads), "B": (shared, num_groups), "C": (shared, num_groups)}
        sections = [Section(name, size, units) for name, (size, units) in sizes.items()]
        self.in_proj = Linear(hidden_size, [*sections, Section("dt", num_heads, num_heads)], std=std)
        # as torch initializes a depthwise convolution
        bound = conv_kernel**-0.5
        # One convolution for all three, as each channel is filtered by itself.
        self.conv = CausalConv(
            [Section(f"conv_{section.name}", section.size, section.units) for section in sections[1:]],
            conv_kernel,
            bias=conv_bias,
            silu=True,
            initializer=Uniform(-bound, bound),
            backend=conv_backend,
        )
        self.tokens = AllTokens()
        self.scan = Scan(num_heads, steps, step_floor, scan_backend)
        self.norm = GatedNorm(inner, norm_groups, norm_eps, norm_backend)
        self.proj = Linear(inner, hidden_size, std=proj_std)

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of heads and of groups in the output of the projection."""
        return self.in_proj.section_sizes[-1], self.in_proj.section_sizes[2] // self.state_size

    def make_state(self, slots: Slots) -> MambaState:
        """Make the state: the last inputs of the convolution, and the state of the scan."""
        return MambaState(slots.per_sequence(), slots.per_sequence())

    def forward(
        self, hidden: Tensor, context: LayerContext, state: MambaState | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """``[T, h] -> [T, h]``. ``memory`` is unused."""
        refuse("Mamba-2 layers")
        inner, _, shared, _, _ = sections = self.in_proj.section_sizes
        heads, groups = self.heads
        sizes, units = (inner, shared, shared), (heads, groups, groups)
        z, rows, dt = split(self.in_proj(hidden), [inner, sum(sections[1:4]), heads])
        # The gate and the norm need no other tokens, so `z` stays.
        packed = context.sequences
        rows, dt, sequences = self.tokens.gather(rows, dt, sizes, units, packed)
        select = partial(self.tokens.select, packed=packed)
        rows = self.conv(rows, sequences, state and state.conv, partial(select, sizes=sizes, units=units))
        # of the heads that are computed here
        inner = dt.shape[1] * self.head_dim
        x, b, c = split(rows, [inner, *[(rows.shape[1] - inner) // 2] * 2])
        y = self.scan(
            x.view(len(x), -1, self.head_dim),
            dt,
            b.view(len(b), -1, self.state_size),
            c.view(len(c), -1, self.state_size),
            sequences,
            state and state.scan,
            partial(select, sizes=(heads,), units=(heads,)),
        )
        projected: Tensor = self.proj(self.norm(self.tokens.restore(y, packed).flatten(1), z))
        return projected
