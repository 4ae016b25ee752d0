"""The linear layer, optionally fused from named sections, and the fusion of a module between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalight.attachments import GATHER_HOOK
from megalight.nn.canonical import Section, section_parts
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.ops.linear import linear, takes_gemv
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.parameter import known_state


class Linear(nn.Module):
    """``y = x W^T + b``.

    Args:
        in_features: width of ``x``.
        out_features: width of ``y``, or the named sections of a fused weight; their sizes add up to the width.
        bias: whether to add a bias, initially 0.
        std: standard deviation of the initial weight.

    Attributes:
        weight: ``[out, in]``. A fused weight holds its sections one after the other along dim 0.
        sections: the named sections, or None.
        section_sizes: output features of each section, for ``torch.split``. One entry if there are no sections.
        adapter: an :class:`~megalight.nn.adapter.AdapterSet`, or None.
    """

    def __init__(
        self, in_features: int, out_features: int | Sequence[Section], *, bias: bool = False, std: float = 0.02
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.sections: tuple[Section, ...] | None = None
        if isinstance(out_features, int):
            self.section_sizes = [out_features]
        else:
            self.sections = tuple(out_features)
            self.section_sizes = [section.size for section in self.sections]
        self.out_features = sum(self.section_sizes)
        # Sections lie one after the other in one weight: one product reads the input once for all of them.
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_features)) if bias else None)
        self.initializers: dict[str, Initializer] = {"weight": Normal(std), "bias": ConstantInit(0.0)}
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        y = linear(x, self.weight, self.bias)
        return y if self.adapter is None else self.adapter(x, y, self.weight, self.bias)

    @property
    def is_product(self) -> bool:
        """Whether the output is ``x W^T + b``, and not what a subclass makes of it."""
        return type(self) is Linear

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the sections; each name replaces the layer's name. See :mod:`megalight.nn.canonical`."""
        return section_parts(self.sections, path, local, tuple(getattr(self, local).shape))

    def extra_repr(self) -> str:
        """Return shape and sections, for printing."""
        names = "|".join(s.name for s in self.sections) if self.sections else ""
        return (
            f"{self.in_features} -> {self.out_features}{f' ({names})' if names else ''}, bias={self.bias is not None}"
        )


def takes_single(layer: nn.Module, x: Tensor) -> bool:
    """Return whether a layer is a plain product that the kernel of single tokens computes: see ``takes_gemv``."""
    found: Any = layer
    if not getattr(layer, "is_product", False) or found.adapter is not None:
        return False
    if layer._forward_hooks or layer._forward_pre_hooks:
        return False
    state = known_state(found.weight)
    plain = state is None or (state.main_grad is None and state.precision is None)
    return plain and takes_gemv(x, found.weight)


class Fusion(NamedTuple):
    """The two linear layers beside a module that has no parameters.

    Attributes:
        before: makes the module's input.
        after: reads its output.
    """

    before: nn.Module
    after: nn.Module

    def output_is_elided(self, module: nn.Module) -> bool:
        """Return whether the output of ``module`` need not be written: the next layer alone reads it, quantized."""
        return _casting(self.after) is not None and not (_is_watched(self.after) or _is_watched(module))

    def gradient_is_elided(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether the gradient of the input ``x`` of ``module`` need not be written."""
        return gradient_is_elided(self.before, x) and not _is_watched(module)


def gradient_is_elided(layer: nn.Module, y: Tensor) -> bool:
    """Return whether the gradient of a linear layer's output ``y`` need not be written.

    So it is where the layer multiplies in 8 bits with a scale that is known beforehand, and nothing else reads the
    gradient: no bias, adapter, hook, or compiler.
    """
    casting = _casting(layer)
    return (
        casting is not None
        and casting.bias is None
        and y.dim() == 2
        and not _is_watched(casting)
        and not torch.compiler.is_compiling()
    )


def _casting(layer: nn.Module) -> Linear | None:
    """Return the layer if it quantizes elided outputs itself."""
    if type(layer) is not Linear or layer.adapter is not None:
        return None
    precision = precision_of(layer.weight)
    # What writes quantized values alone adds no zeros to them.
    reads = precision is not None and precision.reads_elided and not precision.fills(layer.weight)
    return layer if reads else None


def _is_watched(module: nn.Module) -> bool:
    # The hook that waits for parameters reads no tensor.
    waits = getattr(GATHER_HOOK.get(module), "id", None)
    before = [key for key in module._forward_pre_hooks if key != waits]
    return bool(before or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
