"""Batch-invariant mode: what a pass computes of a token does not depend on the tokens beside it.

Libraries divide a product, a sum or attention by the number of rows, so a token's numbers are rounded in another way
alone, among 64, and in a long prompt. In this mode they are not: log-probabilities of generated tokens are bitwise
those of a training forward of the same weights
(https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).

On the CPU each token is computed alone. On a GPU tiles are fixed: a row is summed in the same order wherever it is in
them, and keys are taken in blocks that are counted from the first token of a sequence. Gradients are the ordinary
ones. What has no such form raises.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.autograd import once_differentiable


class _Mode(threading.local):
    """Whether this thread is in batch-invariant mode."""

    on = False


MODE = _Mode()


@contextmanager
def batch_invariant_mode(on: bool = True) -> Iterator[None]:
    """Compute in batch-invariant mode, or not. Compiled code runs without its compilation.

    Example::

        with batch_invariant_mode():
            losses = model(tokens, sequences, labels).losses
        losses.sum().backward()

    Raises:
        ConfigurationError: inside, at what has no batch-invariant form.
    """
    before = MODE.on
    with ExitStack() as stack:
        # Its import takes seconds, and nothing is compiled without it.
        if on and not before and "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        MODE.on = on
        try:
            yield
        finally:
            MODE.on = before


def refuse(what: str) -> None:
    """In batch-invariant mode, raise for ``what``, which has no such form.

    Raises:
        ConfigurationError: the mode is on.
    """
    if MODE.on:
        raise ConfigurationError(f"batch-invariant mode has no form of {what}. Leave it out, or leave the mode.")


def rowwise(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Return ``function(*tensors)``, in which rows do not depend on each other; on the CPU of one row at a time.

    Args:
        function: ``[T, ...], ... -> [T, ...]``, or a tuple of such.
        tensors: ``[T, ...]``.
    """
    if tensors[0].device.type != "cpu" or not len(tensors[0]):
        return function(*tensors)
    # A copy, so that each call has the same shapes, strides and alignment.
    rows = zip(*(torch.split(tensor, 1) for tensor in tensors), strict=True)
    found = [function(*(row.clone(memory_format=torch.contiguous_format) for row in each)) for each in rows]
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def with_gradient_of(
    ordinary: Callable[..., Tensor], function: Callable[..., Tensor], tensors: Sequence[Tensor | None]
) -> Tensor:
    """Return ``function(*tensors)`` with the gradient of ``ordinary(*tensors)``, whose forward the backward runs.

    Parameters with a main gradient get theirs there, if ``ordinary`` puts it there.
    """
    if not torch.is_grad_enabled() or not any(each is not None and each.requires_grad for each in tensors):
        return function(*tensors)
    out: Tensor = _Substituted.apply(ordinary, function, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Substituted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ordinary: Callable[..., Tensor], function: Callable[..., Tensor], *tensors: Tensor | None
    ) -> Tensor:
        # Parameters by reference: a saved-tensor hook would return tensors without their state.
        ctx.kept = [each if each is None or each.is_leaf else None for each in tensors]
        ctx.save_for_backward(*(None if each is None or each.is_leaf else each for each in tensors))
        ctx.ordinary = ordinary
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            leaf if saved is None else saved.detach().requires_grad_(need)
            for leaf, saved, need in zip(ctx.kept, ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), batch_invariant_mode(False):
            out = ctx.ordinary(*inputs)
        wanted = [each for each, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)
