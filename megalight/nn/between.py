"""What lies between two linear layers, and whether anything else may read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalight.nn.linear import Linear
from megalight.ops.parameter import precision_of


class Between(NamedTuple):
    """The two linear layers beside a module that has no parameters.

    Attributes:
        before: makes the module's input.
        after: reads its output.
    """

    before: nn.Module
    after: nn.Module

    def output_is_unwritten(self, module: nn.Module) -> bool:
        """Return whether the output of ``module`` need not be written: the next layer alone reads it, as codes."""
        return _casting(self.after) is not None and not (_is_watched(self.after) or _is_watched(module))

    def gradient_is_unwritten(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether the gradient of the input ``x`` of ``module`` need not be written."""
        return gradient_is_unwritten(self.before, x) and not _is_watched(module)


def gradient_is_unwritten(layer: nn.Module, y: Tensor) -> bool:
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
    """Return the layer if it casts what is not written, without help from others."""
    if type(layer) is not Linear or layer.adapter is not None:
        return None
    precision = precision_of(layer.weight)
    # What writes codes alone adds no zeros to them.
    reads = precision is not None and precision.reads_unwritten and not precision.fills(layer.weight)
    return layer if reads else None


def _is_watched(module: nn.Module) -> bool:
    # The hook that waits for parameters reads no tensor.
    waits = getattr(module.__dict__.get("gathering"), "id", None)
    before = [key for key in module._forward_pre_hooks if key != waits]
    return bool(before or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
