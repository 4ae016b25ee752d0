"""Muon: momentum, orthogonalized by Newton-Schulz, for hidden matrices; Adam for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.common import wide
from megalight.ops.momentum import momentum_step, normalized
from megalight.ops.syrk import syrk
from megalight.optim.qk_clip import QKClip
from megalight.optim.whole_matrices import GATHER_BYTES, WholeMatrixOptimizer
from megalight.optim.whole_matrix_config import WholeMatrixConfig
from megalight.parallel.model import ParallelModel

UpdateScale = Literal["match_rms_adamw", "original"]
ProductDtype = Literal["bfloat16", "float32", "float64"]
HEAD_NAMES = ("*.attention.[qkv].weight",)
"""Canonical names of matrices that consist of attention heads."""


QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon: they raise small singular values quickly, and leave all of them between about 0.7 and 1.2."""


@torch.no_grad()
def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    factor: float = 1.0,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Replace the singular values of matrices by values near 1 (Newton-Schulz iteration; Jordan et al. 2024).

    With ``X = G / |G|`` (Frobenius norm), each step computes ``X = (a I + b S + c S^2) X``, where ``S = X X^T``; for
    tall matrices ``X = X (a I + b S + c S^2)``, where ``S = X^T X``. The polynomial has ``a`` on its diagonal, so that
    no product adds to ``X``, which ``torch.baddbmm`` would copy.

    Args:
        matrices: ``[B, m, n]``. A matrix of zeros stays zero.
        steps: number of steps.
        coefficients: ``(a, b, c)``.
        eps: least norm by which a matrix is divided.
        dtype: dtype of the GEMMs.
        factor: what the result is multiplied with, in the last polynomial.
        out: where the last GEMM writes, ``[B, m, n]`` in ``dtype``; it may be ``matrices``.
        backend: backend of the op ``syrk``, which computes ``S`` and the polynomial.

    Returns:
        ``[B, m, n]`` in ``dtype``.
    """
    a, b, c = coefficients
    # S is a product over the longer side, so that it is as small as can be.
    tall = was_tall = matrices.shape[-2] > matrices.shape[-1]
    x = normalized(matrices.to(dtype), eps)
    for step in range(steps):
        last = step == steps - 1
        by = factor if last else 1.0
        square = syrk(x.mT if tall else x, backend=backend)
        # S is symmetric: it may be read as its transpose, which is how the kernel reads fastest.
        polynomial = syrk(square.mT, square, alpha=by * c, beta=by * b, diagonal=by * a, backend=backend)
        if last and not was_tall:
            x = torch.bmm(polynomial, x.mT if tall else x, out=out)
        else:  # wide matrices lie transposed from the first product to the last one, for the same reason
            x = torch.bmm(x if tall else x.mT, polynomial, out=out if last else None)
            tall = True
    return x


def newton_schulz_flops(m: int, n: int, steps: int = 5) -> int:
    """Return the floating-point operations for one matrix ``[m, n]``: a multiplication and an addition count as two."""
    short, long = min(m, n), max(m, n)
    return steps * (4 * short * short * long + 2 * short**3)


class Muon(WholeMatrixOptimizer):
    """Muon (Jordan et al. 2024) with decoupled weight decay (Liu et al. 2025, "Muon is scalable for LLM training").

    For a matrix ``W [m, n]`` with gradient ``G``::

        M = momentum M + (1 - momentum) G
        U = momentum M + (1 - momentum) G        (Nesterov; else U = M)
        W = W - lr weight_decay W - lr scale(m, n) newton_schulz(U)

    It equals ``torch.optim.Muon``, whose scale and order of operations it has. Groups without ``whole_matrices=True``
    are updated by Adam. The data-parallel engine and any layout may divide the matrices: see
    :mod:`megalight.optim.whole_matrices`.

    Args:
        params: parameter groups; those with ``whole_matrices=True`` hold matrices, or stacks of them.
        lr, betas, eps, weight_decay: of groups that do not say it themselves.
        momentum: decay of the momentum per step.
        nesterov: whether the update looks ahead.
        scale: ``match_rms_adamw``: ``0.2 sqrt(max(m, n))``, so that Adam's learning rates serve; ``original``:
            ``sqrt(max(1, m / n))``.
        ns_steps, ns_coefficients, ns_eps, ns_dtype: see :func:`newton_schulz`.
        head_dim: rows of an attention head; each head of queries, keys and values is then a matrix of its own. 0: all
            heads of a name are one.
        head_names: patterns of canonical names with heads.
        gather_bytes: the largest number of bytes of a batch of gathered matrices, on each rank.
        qk_clip: threshold of attention logits; see :mod:`megalight.optim.qk_clip`. None: there is none.
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
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: UpdateScale = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        ns_eps: float = 1e-7,
        ns_dtype: ProductDtype = "bfloat16",
        head_dim: int = 0,
        head_names: Sequence[str] = HEAD_NAMES,
        gather_bytes: int = GATHER_BYTES,
        qk_clip: float | None = None,
        backend: str = "auto",
    ) -> None:
        check_muon(momentum, scale, ns_steps, ns_dtype, head_dim, gather_bytes, qk_clip)
        self.qk_clip = qk_clip
        self.momentum, self.nesterov, self.scale = momentum, nesterov, scale
        self.ns_steps, self.ns_coefficients, self.ns_eps = ns_steps, tuple(ns_coefficients), ns_eps
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            dtype=getattr(torch, ns_dtype),
            gather_bytes=gather_bytes,
            head_dim=head_dim,
            head_names=head_names,
            backend=backend,
        )

    def watch(self, model: ParallelModel) -> None:
        """Watch the attention logits of a model, if ``qk_clip`` is set.

        Raises:
            ConfigurationError: a layer cannot be clipped.
        """
        if self.qk_clip is not None:
            self.clip = QKClip(self.qk_clip, model)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. If ``closure`` is given, it is called first and its result is returned."""
        if self.qk_clip is not None and self.clip is None:
            raise ConfigurationError(
                "qk_clip of Muon is set, and nobody watches attention logits; train by megalight.Training or "
                "MegatronStrategy, or leave it out."
            )
        return super().step(closure)

    def direction(self, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        """Return the momentum of parts of matrices, ``[n]``."""
        out = torch.empty_like(gradient, dtype=wide(gradient.dtype))
        self.write_direction(out, gradient, None, state, group)
        return out

    def write_direction(
        self, out: Tensor, gradient: Tensor, scale: Tensor | None, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Write the momentum of ``scale gradient`` to ``out [n]``, in one pass over memory."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, dtype=wide(gradient.dtype))
        # Momentum may be on another device than what travels: that of masters in host memory.
        there = out if out.device == gradient.device else torch.empty_like(gradient, dtype=out.dtype)
        momentum = group.get("momentum", self.momentum)
        momentum_step(there, gradient, state["momentum_buffer"], momentum=momentum, nesterov=self.nesterov, scale=scale)
        if there is not out:
            out.copy_(there)

    def room_dtype(self, name: str, parameter: Tensor) -> torch.dtype | None:
        """Return the dtype in which saved state of a parameter is read."""
        return wide(parameter.dtype) if name == "momentum_buffer" else super().room_dtype(name, parameter)

    def update(self, matrices: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return scaled, orthogonalized matrices, ``[B, m, n]``, in the memory of ``matrices``."""
        m, n = matrices.shape[-2:]
        scale = 0.2 * sqrt(max(m, n)) if self.scale == "match_rms_adamw" else sqrt(max(1, m / n))
        a, b, c = self.ns_coefficients
        return newton_schulz(
            matrices,
            steps=self.ns_steps,
            coefficients=(a, b, c),
            eps=self.ns_eps,
            dtype=self.dtype,
            factor=scale,
            out=matrices,
        )

    def flops(self, shape: tuple[int, int]) -> float:
        """Return the floating-point operations of one matrix."""
        return newton_schulz_flops(*shape, self.ns_steps)


def check_muon(
    momentum: float, scale: str, ns_steps: int, ns_dtype: str, head_dim: int, gather_bytes: int, qk_clip: float | None
) -> None:
    """Refuse options with which no step makes sense.

    Raises:
        ConfigurationError: one is out of range.
    """
    for name, value, good, rule in (
        ("momentum", momentum, 0 <= momentum < 1, "at least 0 and below 1"),
        ("ns_steps", ns_steps, 1 <= ns_steps <= 100, "between 1 and 100"),
        ("scale", scale, scale in get_args(UpdateScale), f"one of {', '.join(get_args(UpdateScale))}"),
        ("ns_dtype", ns_dtype, ns_dtype in get_args(ProductDtype), f"one of {', '.join(get_args(ProductDtype))}"),
        ("head_dim", head_dim, head_dim >= 0, "at least 0"),
        ("gather_bytes", gather_bytes, gather_bytes > 0, "above 0"),
        ("qk_clip", qk_clip, qk_clip is None or qk_clip > 0, "above 0"),
    ):
        if not good:
            raise ConfigurationError(f"{name} of Muon is {value!r}; it must be {rule}.")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(WholeMatrixConfig):
    """Which parameters Muon updates, and how: the field ``muon`` of :class:`~megalight.optim.AdamConfig`.

    Attributes:
        momentum, nesterov, scale, ns_steps, ns_coefficients, ns_dtype, head_dim: see :class:`~megalight.optim.Muon`.
        qk_clip: threshold of attention logits (Kimi K2: 100), above which query and key weights are scaled down after
            a step; see :mod:`megalight.optim.qk_clip`. None: they grow as they do.

    Raises:
        ConfigurationError: a number is out of range.
    """

    momentum: float = 0.95
    nesterov: bool = True
    scale: UpdateScale = "match_rms_adamw"
    ns_steps: int = 5
    ns_coefficients: tuple[float, float, float] = QUINTIC
    ns_dtype: ProductDtype = "bfloat16"
    head_dim: int = 0
    qk_clip: float | None = None

    field = "muon"
    optimizer = "Muon"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_muon(
            self.momentum, self.scale, self.ns_steps, self.ns_dtype, self.head_dim, self.gather_bytes, self.qk_clip
        )

    def options(self) -> dict[str, Any]:
        """Return the options of each group."""
        return {"momentum": self.momentum}

    def build(self, groups: Iterable[Any], **adam: Any) -> Muon:
        """Create the optimizer over groups of both kinds; ``adam`` are arguments for the rest."""
        return Muon(
            groups,
            momentum=self.momentum,
            nesterov=self.nesterov,
            scale=self.scale,
            ns_steps=self.ns_steps,
            ns_coefficients=self.ns_coefficients,
            ns_dtype=self.ns_dtype,
            head_dim=self.head_dim,
            gather_bytes=self.gather_bytes,
            qk_clip=self.qk_clip,
            **adam,
        )
