"""Sampling of the next token from logits: temperature, top-k, top-p."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalight.errors import ConfigurationError, MegalightError, as_float, integer
from megalight.ops.draws import exponentials

LARGEST_SEED = 2**63 - 1
FAILED = -1
"""What :func:`sample` returns in the place of a token where the logits hold NaN or infinity."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings for the choice of the next token. Temperature is applied first, then top-k, then top-p.

    Attributes:
        temperature: the logits are divided by this finite number. 0 means the most probable token (greedy).
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
        # Plain numbers: requests with equal settings are sampled together.
        temperature = as_float(self.temperature)
        if isinstance(self.temperature, bool) or not 0 <= temperature < math.inf:
            raise ConfigurationError(
                f"temperature is {self.temperature!r}; it must be a finite number, at least 0 (0 is greedy)."
            )
        object.__setattr__(self, "temperature", temperature)
        if self.top_k is not None:
            object.__setattr__(self, "top_k", integer("top_k", self.top_k))
        if self.top_p is not None:
            top_p = as_float(self.top_p)
            if isinstance(self.top_p, bool) or not 0 < top_p <= 1:
                raise ConfigurationError(f"top_p is {self.top_p!r}; it must be a number above 0 and at most 1.")
            object.__setattr__(self, "top_p", top_p)

    @staticmethod
    def of(given: SamplingParams | None) -> SamplingParams:
        """Return what is given, or the defaults.

        Raises:
            ConfigurationError: it is no ``SamplingParams``.
        """
        if given is None:
            return SamplingParams()
        if not isinstance(given, SamplingParams):
            raise ConfigurationError(
                f"sampling_params is {given!r}; it must be SamplingParams, such as SamplingParams(temperature=0)."
            )
        return given


def check_seed(seed: int) -> int:
    """Return a seed as a plain integer.

    Raises:
        ConfigurationError: it is no integer from 0 to :data:`LARGEST_SEED`.
    """
    return integer("seed", seed, 0, LARGEST_SEED)


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


def probabilities(logits: Tensor, sampling_params: SamplingParams) -> Tensor:
    """Return the distribution ``[N, V]`` to sample from: float32 (float64 for float64 logits), one-hot if greedy."""
    # A softmax in half precision loses the small probabilities, which top-p adds up.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling_params.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, best, 1.0)
    # subtract the maximum before dividing, or a tiny temperature would overflow
    range_ = torch.finfo(logits.dtype)
    # In the logits' own dtype a temperature of 1e-300 is 0, and 0 / 0 is NaN.
    temperature = min(max(sampling_params.temperature, range_.tiny), range_.max)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling_params.top_k is not None:
        logits = keep_top_k(logits, sampling_params.top_k)
    if sampling_params.top_p is not None and sampling_params.top_p < 1:
        logits = keep_top_p(logits, sampling_params.top_p)
    return logits.softmax(-1)


def sample(logits: Tensor, sampling_params: SamplingParams, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample token ids: ``[N, V] -> [N]``. Rows with NaN or infinity give :data:`FAILED`.

    A sample follows from its row, its seed and its position alone (:mod:`megalight.ops.draws`).

    Args:
        logits: ``[N, V]``.
        sampling_params: how a token is chosen.
        seeds: ``[N]`` int64, from 0 to :data:`LARGEST_SEED`.
        positions: ``[N]`` integers: which token of its sequence each row chooses.
    """
    if sampling_params.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        chances = probabilities(logits, sampling_params)
        # for exponential e_i, the argmax of p_i / e_i is i with probability p_i; this needs no sync with the host
        chosen = (chances / exponentials(seeds, positions, chances.shape[-1])).argmax(-1)
    # A row's maximum is NaN where any of its values is. Without a wait for the device, as all of this.
    return torch.where(logits.amax(-1).isfinite(), chosen, FAILED)


def check_sampled(tokens: Mapping[int, Sequence[int]]) -> None:
    """Refuse samples from logits that are not finite.

    Args:
        tokens: by the number of its prompt, what was sampled.

    Raises:
        MegalightError: with the numbers of the prompts.
    """
    if failed := [prompt for prompt, found in tokens.items() if FAILED in found]:
        raise MegalightError(
            f"the logits after prompt {', '.join(map(str, failed[:8]))} hold NaN or infinity, so no token can be "
            "sampled; check the weights (megalight inspect), or compute in a wider dtype."
        )
