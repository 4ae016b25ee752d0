"""Sampling of the next token from logits: temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from megalight.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for the choice of the next token. Temperature is applied first, then top-k, then top-p.

    Attributes:
        temperature: the logits are divided by this. 0 means the most probable token (greedy).
        top_k: sample from the ``k`` most probable tokens. None means all tokens.
        top_p: sample from the smallest set of tokens that together have at least this probability (nucleus sampling,
            https://arxiv.org/abs/1904.09751). None means all tokens.

    Raises:
        ConfigurationError: a value is out of range.
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
    """Set ``[N, V]`` to ``-inf`` except for the ``k`` largest of each row. Values equal to the ``k``-th are kept."""
    # Beyond the vocabulary, `k` means all tokens.
    least = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set ``[N, V]`` to ``-inf`` except for the smallest set of most probable tokens that reaches probability ``p``.

    The token that crosses the threshold is kept, so every row keeps at least one token.
    """
    # Stable, so that ranks with equal logits order equal values alike.
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    # The probability of all tokens before each one, in descending order.
    before = probabilities.cumsum(-1) - probabilities
    # Back to the order of the vocabulary.
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(dropped, -torch.inf)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution ``[N, V]`` to sample from: float32 (float64 for float64 logits), one-hot if greedy."""
    # A softmax in half precision loses the small probabilities, which top-p adds up.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, best, 1.0)
    # subtract the maximum before dividing, or a tiny temperature would overflow
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return logits.softmax(-1)


def sample(logits: Tensor, sampling: Sampling, generator: Generator | Sequence[Generator] | None = None) -> Tensor:
    """Sample token ids: ``[N, V] -> [N]``.

    Args:
        logits: ``[N, V]``.
        sampling: how a token is chosen.
        generator: on the logits' device, one for all rows or one for each; None is torch's default one.
    """
    chances = probabilities(logits, sampling)
    # for exponential e_i, the argmax of p_i / e_i is i with probability p_i; this needs no sync with the host
    exponential = torch.empty_like(chances)
    if isinstance(generator, Sequence):
        for row, own in zip(exponential, generator, strict=True):
            row.exponential_(generator=own)
    else:
        exponential.exponential_(generator=generator)
    return (chances / exponential).argmax(-1)
