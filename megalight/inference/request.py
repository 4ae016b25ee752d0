"""A text that the engine completes: what it may become, and what it has become so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Generator

from megalight.inference.sampling import Sampling

Reason = Literal["end", "stop", "length", "error"]
"""Why a completion ended: with an end token, by ``stop``, at its longest, or because the logits of its next token hold
NaN or infinity."""
Stop = Callable[[Sequence[int]], bool]
"""Whether a completion ends, given its tokens so far."""


class Completion(NamedTuple):
    """A completion that has ended.

    Attributes:
        tokens: the new tokens, with the one that ended it.
        log_probs: for each of them its log-probability by the model, before temperature, top-k and top-p; None: nobody
            asked.
        reason: why it ended.
    """

    tokens: list[int]
    log_probs: list[float] | None
    reason: Reason


@dataclass(eq=False)
class Request:
    """A text that is being completed.

    Attributes:
        number: in the order in which requests came.
        tokens: the prompt, and what followed so far.
        prompt_length: how many of them are the prompt.
        max_new_tokens: maximum length of the completion.
        sampling: how tokens are chosen.
        ends: tokens that end it.
        stop: ends it, too, if this is true of the completion so far.
        generator: the request's own, so that its draws do not depend on other requests.
        log_probs: of the completion's tokens, or None.
        slot: its slot in the cache while it runs.
        suspect: whether its logits were NaN or infinite in a pass with others, so that it runs alone next.
        failed: whether they are when it runs alone.
    """

    number: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: Collection[int] = ()
    stop: Stop | None = None
    generator: Generator | None = None
    log_probs: list[float] | None = None
    slot: int | None = None
    suspect: bool = False
    failed: bool = False

    def take(self, token: int, log_prob: float | None) -> None:
        """Add the next token."""
        self.tokens.append(token)
        if self.log_probs is not None and log_prob is not None:
            self.log_probs.append(log_prob)

    def ended(self) -> Completion | None:
        """Return the completion if it ends."""
        reason: Reason | None = None
        # Without a copy of the tokens, where nobody asks for it: texts may be long.
        if self.failed:
            reason = "error"
        elif self.tokens[-1] in self.ends:
            reason = "end"
        elif self.stop is not None and self.stop(self.tokens[self.prompt_length :]):
            reason = "stop"
        elif len(self.tokens) - self.prompt_length == self.max_new_tokens:
            reason = "length"
        return None if reason is None else Completion(self.tokens[self.prompt_length :], self.log_probs, reason)
