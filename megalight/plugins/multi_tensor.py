"""Adam with the multi-tensor kernels of Apex, or of TransformerEngine, which derive from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CORRECT_BIAS = 1


@lru_cache
def _no_overflow(device: torch.device) -> Tensor:
    """Return the flag with which the kernels skip a step; it is never set."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class MultiTensorAdam:
    """A backend of the op ``adam`` with one kernel. To scale the gradient takes a separate pass over memory.

    Attributes:
        applier: returns the function that calls a kernel on lists of tensors.
        kernel: returns a kernel by name.
        writes_out: whether the kernel also writes the low-precision copy if ``lr`` and ``step`` are numbers.
    """

    applier: Callable[[], Any]
    kernel: Callable[[str], Any]
    writes_out: bool

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: float | Tensor,
        decoupled: bool = True,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Implement :func:`megalight.ops.adam.adam_step`."""
        # A shard may be empty, and then there is nothing to launch.
        if not param.numel():
            return
        # A recorded step must not read numbers on the host, and tensors stay on the device.
        on_device = isinstance(lr, Tensor) or isinstance(step, Tensor)
        name, last = "multi_tensor_adam", list[Tensor]()
        # Not in place: the gradient belongs to the caller, and hooks may read it after the step.
        own = grad if grad_scale is None else grad.float() * grad_scale.float()
        lists = [[own], [param], [exp_avg], [exp_avg_sq]]
        if on_device:
            # This kernel multiplies the gradient by its last argument in place, so it gets a copy.
            lists[0] = [own.to(torch.float32, copy=own is grad)]
            lr = torch.as_tensor(lr, dtype=torch.float32, device=param.device)
            step = torch.as_tensor(step, device=param.device).to(torch.int32)
            # The last argument is the inverse of a loss scale, which is 1 here: scaling is done above.
            name, last = "multi_tensor_adam_capturable", [torch.ones(1, dtype=torch.float32, device=param.device)]
        else:
            lr, step = float(lr), int(step)
        # With a fifth list, the kernel reads and writes masters there, and writes the copy to the second list.
        if fused := out is not None and self.writes_out and not on_device:
            lists = [lists[0], [out], *lists[2:], [param]]
        numbers = (lr, beta1, beta2, eps, step, int(decoupled), CORRECT_BIAS, weight_decay, *last)
        # The flag says whether to skip the step. Ours is decided before, on all ranks together.
        self.applier()(self.kernel(name), _no_overflow(param.device), lists, *numbers)
        if out is not None and not fused:
            out.copy_(param)
