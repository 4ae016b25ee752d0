"""Shampoo: the gradient of a matrix between inverse roots of its second moments over rows and over columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.common import wide
from megalight.optim.whole_matrices import GATHER_BYTES, WholeMatrixOptimizer
from megalight.optim.whole_matrix_config import WholeMatrixConfig


class Shampoo(WholeMatrixOptimizer):
    """Shampoo (Gupta et al. 2018) with moving averages (Anil et al. 2020) and updates of the size of Adam's.

    For a matrix ``W [m, n]`` with gradient ``G``::

        L = beta L + (1 - beta) G G^T        R = beta R + (1 - beta) G^T G        M = momentum M + (1 - momentum) G
        U = (L / |L| + eps)^(-1/4)  M  (R / |R| + eps)^(-1/4)
        W = W - lr weight_decay W - lr 0.2 sqrt(m n) U / |U|

    with Frobenius norms. All three lie on the home rank of the matrix, and so do the roots, which are computed anew
    every ``root_every`` steps. Groups without ``whole_matrices=True`` are updated by Adam.

    Args:
        params: parameter groups; those with ``whole_matrices=True`` hold matrices, or stacks of them.
        lr, betas, eps, weight_decay: of groups that do not say it themselves.
        momentum: decay of the mean gradient per step.
        beta: decay of the second moments per step.
        root_eps: least eigenvalue of a second moment, as a part of its norm.
        root_every: steps from one computation of the roots to the next.
        dtype: in which matrices travel.
        gather_bytes: the largest number of bytes of a batch of gathered matrices, on each rank.
        backend: backend of the op ``adam``.

    Raises:
        ConfigurationError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.9,
        beta: float = 0.95,
        root_eps: float = 1e-6,
        root_every: int = 10,
        dtype: torch.dtype = torch.float32,
        gather_bytes: int = GATHER_BYTES,
        backend: str = "auto",
    ) -> None:
        check_shampoo(momentum, beta, root_eps, root_every)
        self.momentum, self.beta, self.root_eps, self.root_every = momentum, beta, root_eps, root_every
        super().__init__(
            params, lr, betas, eps, weight_decay, dtype=dtype, gather_bytes=gather_bytes, backend=backend
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. It counts its steps, as checkpoints keep the options of groups."""
        super().add_param_group({"steps": 0, **param_group})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. If ``closure`` is given, it is called first and its result is returned."""
        loss = super().step(closure)
        for group in self.param_groups:
            group["steps"] += 1
        return loss

    def home_state(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of both second moments, their roots, and the mean gradient."""
        m, n = shape
        return {"left": (m, m), "right": (n, n), "left_root": (m, m), "right_root": (n, n), "mean": (m, n)}

    def update(self, matrices: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return preconditioned means, ``[B, m, n]``, scaled."""
        gradients = matrices.to(wide(matrices.dtype))
        # A matrix without a gradient in this step has the weight 0, so that its state stays.
        seen = gradients.flatten(1).any(1)[:, None, None].to(gradients.dtype)
        state["mean"].lerp_(gradients, seen * (1 - self.momentum))
        state["left"].lerp_(gradients @ gradients.mT, seen * (1 - self.beta))
        state["right"].lerp_(gradients.mT @ gradients, seen * (1 - self.beta))
        if self.param_groups[0]["steps"] % self.root_every == 0:
            for side in ("left", "right"):
                state[f"{side}_root"].copy_(inverse_root(state[side], self.root_eps))
        moved = state["left_root"] @ state["mean"] @ state["right_root"]
        size = torch.linalg.matrix_norm(moved, keepdim=True).clamp(min=torch.finfo(moved.dtype).tiny)
        return moved.mul_(0.2 * sqrt(moved[0].numel()) / size).to(matrices.dtype)

    def flops(self, shape: tuple[int, int]) -> float:
        """Return the operations of one matrix: an eigendecomposition of each side counts as 25 cubes."""
        m, n = shape
        return 25 * (m**3 + n**3) / self.root_every + 4 * (m * m * n + m * n * n)


def inverse_root(moments: Tensor, eps: float, power: int = 4) -> Tensor:
    """Return ``(S / |S| + eps)^(-1/power)`` of symmetric, positive matrices ``S [B, m, m]``."""
    size = torch.linalg.matrix_norm(moments, keepdim=True)
    values, vectors = torch.linalg.eigh(moments / size.clamp(min=torch.finfo(moments.dtype).tiny))
    # Rounding makes small eigenvalues negative.
    roots = (values.clamp(min=0) + eps) ** (-1 / power)
    found: Tensor = (vectors * roots[:, None, :]) @ vectors.mT
    return found


def check_shampoo(momentum: float, beta: float, root_eps: float, root_every: int) -> None:
    """Refuse options with which no step makes sense.

    Raises:
        ConfigurationError: one is out of range.
    """
    for name, value, good, rule in (
        ("momentum", momentum, 0 <= momentum < 1, "at least 0 and below 1"),
        ("beta", beta, 0 <= beta < 1, "at least 0 and below 1"),
        ("root_eps", root_eps, root_eps > 0, "above 0"),
        ("root_every", root_every, root_every >= 1, "at least 1"),
    ):
        if not good:
            raise ConfigurationError(f"{name} of Shampoo is {value!r}; it must be {rule}.")


@dataclass(frozen=True, kw_only=True)
class ShampooConfig(WholeMatrixConfig):
    """Which parameters Shampoo updates, and how: for the field ``matrices`` of :class:`~megalight.optim.AdamConfig`.

    Attributes:
        momentum, beta, root_eps, root_every, dtype: see :class:`~megalight.optim.Shampoo`.

    Raises:
        ConfigurationError: a number is out of range.
    """

    momentum: float = 0.9
    beta: float = 0.95
    root_eps: float = 1e-6
    root_every: int = 10
    dtype: str = "float32"

    optimizer = "Shampoo"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shampoo(self.momentum, self.beta, self.root_eps, self.root_every)
        if self.dtype not in ("bfloat16", "float32", "float64"):
            raise ConfigurationError(
                f"dtype of Shampoo is {self.dtype!r}; it must be one of bfloat16, float32, float64."
            )

    def build(self, groups: Iterable[Any], **adam: Any) -> Shampoo:
        """Create the optimizer over groups of both kinds; ``adam`` are arguments for the rest."""
        return Shampoo(
            groups,
            momentum=self.momentum,
            beta=self.beta,
            root_eps=self.root_eps,
            root_every=self.root_every,
            dtype=getattr(torch, self.dtype),
            gather_bytes=self.gather_bytes,
            **adam,
        )
