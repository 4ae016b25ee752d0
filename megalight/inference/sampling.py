"""From logits to the next token: temperature, top-k, top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from megalight.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature acts first, then top-k, then top-p.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: choose among the ``k`` most probable tokens; None: among all.
        top_p: choose among the fewest tokens that together have at least this probability; None: among all
            (nucleus sampling, https://arxiv.org/abs/1904.09751).

    Raises:
        ConfigurationError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigurationError(f"temperature is {self.temperature}; it must be at least 0 (0 is greedy).")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigurationError(f"top_k is {self.top_k}; it must be at least 1, or left out to allow all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """``[N, V]`` with ``-inf`` outside the ``k`` largest of each row. Equals of the ``k``-th stay."""
    least = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """``[N, V]`` with ``-inf`` outside the fewest most probable tokens of each row whose probabilities reach ``p``.

    The token that crosses the threshold stays, so at least one does.
    """
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(dropped, -torch.inf)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """``[N, V]`` the distribution to draw from: float32 (float64 for float64), one-hot when greedy."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, best, 1.0)
    # the largest is taken off first: a tiny temperature must not overflow
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return logits.softmax(-1)


def sample(logits: Tensor, sampling: Sampling, generator: Generator | None = None) -> Tensor:
    """``[N, V] -> [N]`` token ids, drawn with ``generator`` (on the logits' device; None is torch's own)."""
    chances = probabilities(logits, sampling)
    # the largest of p_i / e_i with exponential e_i falls on i with probability p_i, and no host waits for it
    exponential = torch.empty_like(chances).exponential_(generator=generator)
    return (chances / exponential).argmax(-1)
