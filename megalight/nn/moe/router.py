"""The router: it chooses the experts of each token, and keeps them equally busy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.init import Initializer, Normal
from megalight.nn.moe.balance import losses
from megalight.nn.moe.config import BalanceConfig, RouterConfig
from megalight.nn.moe.pool import Pool
from megalight.ops.common import apply, once_differentiable
from megalight.ops.router import Routes, route


class Router(nn.Module):
    """Scores all experts for each token, and chooses ``top_k`` of them.

    Its losses are side losses (:mod:`megalight.nn.side_losses`), summed over layers: ``router_aux_loss`` and so on.

    Args:
        hidden_size: ``h``.
        num_experts: ``E``.
        config: how it chooses.
        balance: coefficients of its losses.
        std: standard deviation of the initial weight.

    Attributes:
        weight: ``[E, h]``.
        pool: where the tokens of a micro-batch are.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        config: RouterConfig | None = None,
        balance: BalanceConfig | None = None,
        *,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.config = config or RouterConfig()
        self.balance = balance or BalanceConfig()
        self.pool = Pool()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, hidden: Tensor, context: LayerContext) -> Routes:
        """``[T, h]`` -> the experts of each token, and their weights."""
        logits = self.logits(hidden)
        probs, experts = route(logits, self.config.rule)
        if self.training and torch.is_grad_enabled():
            probs = self._with_losses(probs, logits, context)
        return Routes(probs, experts)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, h] -> [T, E]``, in the router's dtype."""
        dtype = hidden.dtype
        if self.config.dtype is not None:
            dtype = torch.promote_types(dtype, getattr(torch, self.config.dtype))
        if hidden.dtype == self.weight.dtype == dtype:
            return F.linear(hidden, self.weight)
        out: Tensor = apply(_WideProduct, hidden, self.weight, dtype)
        return out

    def _with_losses(self, probs: Tensor, logits: Tensor, context: LayerContext) -> Tensor:
        """Attach the losses to the probabilities, whose gradient always arrives."""
        config, sequences = self.config, context.sequences
        found = losses(logits, config.top_k, config.score, self.balance, self.pool, sequences)
        for name, value in found.items():
            coefficient = getattr(self.balance, name)
            probs = context.side_losses.attach(f"router_{name}", coefficient * value, probs)
        return probs

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return f"{self.weight.shape[1]} -> {self.config.top_k} of {self.weight.shape[0]}"


class _WideProduct(torch.autograd.Function):
    """``x W^T`` in a wider dtype. It keeps ``x`` and ``W`` as they are; gradients have their dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return (grad @ weight.to(grad.dtype)).to(x.dtype), (grad.T @ x.to(grad.dtype)).to(weight.dtype), None
