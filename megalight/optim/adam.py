"""Adam and AdamW on flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.errors import ConfigurationError
from megalight.ops.adam import adam_step
from megalight.ops.common import wide


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), by default with decoupled weight decay (AdamW, Loshchilov and Hutter 2019).

    It equals ``torch.optim.AdamW`` (without decoupling: ``torch.optim.Adam``) and reads their state dicts. It is made
    for a few large tensors, such as the master weights of the data-parallel engine.

    Args:
        params: tensors or parameter groups.
        lr: learning rate.
        betas: decay of the first and the second moment per step.
        eps: added to the root of the second moment.
        weight_decay: decay coefficient.
        decoupled_weight_decay: whether the decay scales the parameter (AdamW). If not, it is added to the gradient.
        capturable: whether to keep step counts on the device, so that a CUDA graph can capture a step.
        backend: backend of the op ``adam``.

    Attributes:
        elementwise: each element is updated from its own gradient only, so the optimizer can step on flat shards.
        grad_scale: 0-dim device tensor that multiplies the gradients of the next step. None: no scaling.
        host_scale: the same number in host memory, for parameters there; ``before`` waits for it, too.
        copies: tensor -> flat low-precision tensor that receives its new values in the same kernel.
        before: tensor -> function to call just before it is updated, which waits for its gradient.
        after: tensor -> function to call when it is updated.

    Raises:
        ConfigurationError: a hyperparameter is out of range.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decoupled_weight_decay: bool = True,
        capturable: bool = False,
        backend: str = "auto",
    ) -> None:
        for name, value, good in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not good:
                raise ConfigurationError(f"{name} of Adam is {value}; it must be at least 0, and betas below 1.")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "capturable": capturable,
        }
        self.backend = backend
        self.grad_scale: Tensor | None = None
        self.host_scale: Tensor | None = None
        self.copies: dict[Tensor, Tensor] = {}
        self.before: dict[Tensor, Callable[[], None]] = {}
        self.after: dict[Tensor, Callable[[], None]] = {}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. If ``closure`` is given, it is called first and its result is returned."""
        loss = None
        # The closure runs backward, and `step` itself runs without gradients.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                # No gradient: the batch was skipped, or the parameter is not used. Moments then stay as
                # they are, as in torch.
                if parameter.grad is not None:
                    if parameter in self.before:
                        self.before[parameter]()
                    self._update(parameter, group)
                    if parameter in self.after:
                        self.after[parameter]()
        # The factor is that of this step's clipping.
        self.grad_scale = self.host_scale = None
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # A step count on the host needs no kernel and no wait; a graph needs it on the device to count its replays.
            device = parameter.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            # Moments in the dtype of the masters, but never in half precision: there, 0.999 of a second moment rounds
            # back to all of it, and it would never fall.
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide(parameter.dtype))
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide(parameter.dtype))
        # Counted before the update: bias correction divides by 1 - beta^step, which is 0 for step 0.
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient, scale, lr = parameter.grad, self.grad_scale, group["lr"]
        assert gradient is not None
        if parameter.device.type == "cpu":
            # Masters in host memory. The fused kernel for CPUs needs gradients in the masters' dtype.
            gradient = gradient.to(wide(parameter.dtype))
            # Not `scale.to("cpu")`: the host would wait for all updates that the device has queued before these.
            scale = scale if self.host_scale is None else self.host_scale
            lr = lr.to(parameter.device) if isinstance(lr, Tensor) else lr
        adam_step(
            parameter,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            # `.item()` of a host tensor does not wait for the device.
            step=state["step"] if group["capturable"] else state["step"].item(),
            decoupled=group["decoupled_weight_decay"],
            grad_scale=scale,
            # Written while the new values are in registers, instead of by a second pass over the masters.
            out=self.copies.get(parameter),
            backend=self.backend,
        )
