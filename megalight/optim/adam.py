"""Adam and AdamW on flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.errors import ConfigurationError
from megalight.ops.adam import adam_step


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), by default with decoupled weight decay (AdamW, Loshchilov and Hutter 2019).

    Equal to ``torch.optim.AdamW`` (``torch.optim.Adam`` without decoupling), and reads their state dicts. Made for few
    large tensors, such as the masters of the data-parallel engine.

    Args:
        params: tensors or parameter groups.
        lr: learning rate.
        betas: decay of the first and of the second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: decay coefficient.
        decoupled_weight_decay: the decay scales the parameter (AdamW); otherwise it is added to the gradient.
        capturable: keep step counts on the device, so that a step can be captured in a CUDA graph.
        backend: of the adam op.

    Attributes:
        elementwise: each element is updated from its own gradient alone, so that flat shards can be stepped on.
        grad_scale: 0-dim tensor on the device that multiplies the gradients of the next step only; None: nothing does.
        copies: tensor -> flat low-precision tensor that receives its new values in the same pass.

    Raises:
        ConfigurationError: a hyper-parameter outside its range.
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
                raise ConfigurationError(f"Adam: {name}={value}; it must not be negative, and betas must be below 1.")
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
        self.copies: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; ``closure``, where given, is called first, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.grad_scale = None
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            device = parameter.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        adam_step(
            parameter,
            parameter.grad,  # type: ignore[arg-type]
            state["exp_avg"],
            state["exp_avg_sq"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=state["step"] if group["capturable"] else state["step"].item(),
            decoupled=group["decoupled_weight_decay"],
            grad_scale=self.grad_scale,
            out=self.copies.get(parameter),
            backend=self.backend,
        )
