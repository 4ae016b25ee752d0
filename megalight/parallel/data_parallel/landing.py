"""Where autograd's gradients go: into the flat buffer, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.ops.parameter import collect


def land_gradients(
    parameter: nn.Parameter,
    main_grad: Tensor,
    arrived: Callable[[], None],
    announced: Callable[[], None],
    autograd_adds: bool,
) -> None:
    """Collect every gradient of ``parameter`` in ``main_grad``, and report each arrival.

    Args:
        parameter: already a view of the buffer. An earlier engine gets no further gradients of it.
        arrived: called after every backward of autograd through the parameter, also when the gradient is None.
        announced: called by ops that have added a gradient to ``main_grad`` themselves.
        autograd_adds: see :attr:`Bucket.autograd_adds`. If ``parameter.grad`` is None or may not be the buffer's view,
            autograd leaves the gradient there, and the hook adds it to the buffer.
    """
    state = collect(parameter, main_grad, announced)

    def after_accumulation(accumulated: Tensor) -> None:
        gradient = accumulated.grad
        if gradient is main_grad:
            state.unused = False  # autograd has added it in place
        # Autograd has put the gradient into a tensor of its own, because `.grad` was None or has another dtype.
        elif gradient is not None:
            if torch.is_grad_enabled():  # then autograd has accumulated out of place, into a new tensor
                raise MegalightError(
                    "backward(create_graph=True) reached a parameter whose gradients live in a flat buffer; "
                    "use torch.autograd.grad for gradients of gradients."
                )
            # An embedding with sparse=True has rows alone.
            state.add(gradient.to_dense() if gradient.is_sparse else gradient)
            accumulated.grad = main_grad if autograd_adds else None
        arrived()

    if autograd_adds:
        if main_grad.dtype != parameter.dtype:
            parameter.grad_dtype = None  # any dtype: autograd adds to the wider buffer without a cast first
        parameter.grad = main_grad
    state.landing = parameter.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
