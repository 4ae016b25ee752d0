"""How the next token is sampled from logits: penalties, biases, temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalight.errors import ConfigurationError, MegalightError, as_float, integer, is_bool
from megalight.ops.sample_tokens import FAILED as FAILED
from megalight.ops.sample_tokens import SamplingRows, sample_tokens

LARGEST_SEED = 2**63 - 1
ALL = 2**62
"""The top-k of a row that keeps all tokens."""
HUGE = 1e30
"""The largest bias or penalty: logits, which may be float32, stay finite."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings for the choice of the next token. They are applied in the order of this list, but temperature after all
    that change logits, before what keeps only some tokens.

    Attributes:
        temperature: the logits are divided by this finite number. 0 means the most probable token (greedy).
        top_k: sample from the ``k`` most probable tokens. None means all tokens.
        top_p: sample from the smallest set of tokens that together have at least this probability (nucleus sampling,
            https://arxiv.org/abs/1904.09751). None means all tokens.
        min_p: sample from the tokens with at least this share of the largest probability
            (https://arxiv.org/abs/2407.01082).
        repetition_penalty: positive logits of tokens that the prompt or the completion has are divided by this number,
            negative ones multiplied (https://arxiv.org/abs/1909.05858). 1: no penalty.
        presence_penalty: subtracted from the logits of tokens that the completion has.
        frequency_penalty: the same for each time that it has them.
        logit_bias: what is added to the logits of tokens, by their ids; ``-inf`` excludes a token.
        min_new_tokens: before so many tokens no token that ends the completion is sampled, and no ``stop`` ends it.

    Raises:
        ConfigurationError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0 <= self._number("temperature") < math.inf, "finite number, at least 0 (0 is greedy)"),
            "top_p": (self.top_p is None or 0 < self._number("top_p") <= 1, "number above 0 and at most 1"),
            "min_p": (0 <= self._number("min_p") <= 1, "number from 0 to 1"),
            "repetition_penalty": (1 / HUGE <= self._number("repetition_penalty") <= HUGE, "number from 1e-30 to 1e30"),
            "presence_penalty": (abs(self._number("presence_penalty")) <= HUGE, "number from -1e30 to 1e30"),
            "frequency_penalty": (abs(self._number("frequency_penalty")) <= HUGE, "number from -1e30 to 1e30"),
        }
        for name, (holds, what) in ranges.items():
            if not holds:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be a {what}.")
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._number(name))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", integer("top_k", self.top_k, 1, ALL))
        object.__setattr__(self, "min_new_tokens", integer("min_new_tokens", self.min_new_tokens, 0))
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigurationError(f"logit_bias is {self.logit_bias!r}; it must be numbers by token id.")
        bias = {
            integer("token id of logit_bias", token, 0): as_float(value) for token, value in self.logit_bias.items()
        }
        for (token, value), given in zip(bias.items(), self.logit_bias.values(), strict=True):
            if is_bool(given) or not (abs(value) <= HUGE or value == -math.inf):
                raise ConfigurationError(
                    f"logit_bias[{token}] is {given!r}; it must be a number from -1e30 to 1e30, or -inf."
                )
        object.__setattr__(self, "logit_bias", bias)

    def _number(self, name: str) -> float:
        value = getattr(self, name)
        return math.nan if is_bool(value) else as_float(value)

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p keep only some tokens."""
        return self.temperature != 0 and (self.top_k is not None or (self.top_p is not None and self.top_p < 1))

    def check(self, vocab_size: int, max_new_tokens: int) -> None:
        """Refuse what a model or a request cannot do.

        Raises:
            ConfigurationError: a token of ``logit_bias`` is outside of the vocabulary, or ``min_new_tokens`` is above
                ``max_new_tokens``.
        """
        for token in self.logit_bias:
            integer("token id of logit_bias", token, 0, vocab_size - 1)
        integer("min_new_tokens", self.min_new_tokens, 0, max_new_tokens)

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


def reals_of(params: SamplingParams) -> tuple[float, float, float]:
    """Return the column of a row in :attr:`SamplingRows.reals`."""
    if params.temperature == 0:  # the most probable token, whatever else is kept
        return 0.0, 1.0, 0.0
    return params.temperature, 1.0 if params.top_p is None else params.top_p, params.min_p


def top_k_of(params: SamplingParams) -> int:
    """Return the top-k of a row in :attr:`SamplingRows.numbers`."""
    return ALL if params.top_k is None or params.temperature == 0 else params.top_k


def sample(logits: Tensor, sampling_params: SamplingParams, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample token ids: ``[N, V] -> [N]``. Rows with NaN or infinity give -1.

    A sample follows from its row, its seed and its position alone (:mod:`megalight.ops.sample_tokens`).

    Args:
        logits: ``[N, V]``.
        sampling_params: how a token is chosen. What depends on other tokens (penalties, ``min_new_tokens``) and biases
            are left out.
        seeds: ``[N]`` int64, from 0 to :data:`LARGEST_SEED`.
        positions: ``[N]`` integers: which token of its sequence each row chooses.
    """
    reals = torch.tensor(reals_of(sampling_params), dtype=torch.float64, device=logits.device)
    top_k = torch.full_like(seeds, top_k_of(sampling_params))
    rows = SamplingRows(
        reals[:, None].repeat(1, len(seeds)),
        torch.stack([top_k, seeds, positions.long()]),
        sampling_params.temperature == 0,
        sampling_params.filtered,
    )
    return sample_tokens(logits, rows)


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
