"""Samples the next tokens of requests, each by its own settings. Nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.inference.cache import to_device_packed
from megalight.inference.sampling import reals_of, top_k_of
from megalight.inference.scheduler import Request
from megalight.ops.batch_invariant import MODE
from megalight.ops.batch_invariant.cross_entropy import log_sum_exp
from megalight.ops.sample_tokens import SamplingRows, VocabularyRanks, processed, sample_tokens
from megalight.types import to_device


class PassSampling:
    """Samples the next tokens of a forward pass, each by the settings of its request.

    Args:
        counts: of tokens of requests, which outlast the pass.
        requests: ``n`` requests, each with a slot of its own if it has penalties. With ``ahead`` some come several
            times.
        rows: the row of each among the logits. None: all rows, in order.
        ahead: how many guesses lie between the tokens of each request and the one that is sampled. None: none, and the
            one that is sampled follows for sure.
        scored: rows and labels ``[M]`` of tokens of prompts whose log-probabilities are wanted.

    Attributes:
        scores: these log-probabilities ``[M]``, once the pass has run.
        positions: ``[n]`` int64, the place of each sample in its sequence, if the device knows better than the host.
    """

    def __init__(
        self,
        counts: TokenCounts,
        requests: Sequence[Request],
        rows: Sequence[int] | None = None,
        ahead: Sequence[int] | None = None,
        scored: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.scored = scored
        self.scores: Tensor | None = None
        self.positions: Tensor | None = None
        self._counts, self._requests, self._rows = counts, requests, rows
        self._ahead = [0] * len(requests) if ahead is None else ahead
        self._follows = ahead is None

    @property
    def places(self) -> Sequence[int]:
        """The row of each request among the logits."""
        return range(len(self._requests)) if self._rows is None else self._rows

    @property
    def recordable(self) -> bool:
        """Whether it is all told by :meth:`host_rows`, so that it can be a part of a recorded step."""
        if self.scored is not None:
            return False
        for request in self._requests:
            params = request.sampling_params
            if params.penalized or params.logit_bias or request.matcher is not None or request.log_probs is not None:
                return False
            if request.ends and request.length - request.prompt_length < params.min_new_tokens:
                return False
        return True

    @property
    def whole(self) -> bool:
        """Whether it needs the logits of the whole vocabulary on one device."""
        return any(r.sampling_params.filtered or r.top_count or r.processed for r in self._requests)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the results."""
        wanted = any(request.log_probs is not None for request in self._requests)
        return len(self._requests), 1 + wanted + 2 * self._top

    @property
    def _top(self) -> int:
        return max((request.top_count for request in self._requests), default=0)

    def __call__(self, logits: Tensor, ranks: VocabularyRanks | None = None, losses: Tensor | None = None) -> Tensor:
        """Sample.

        Args:
            logits: ``[N, V]``.
            ranks: this rank has some columns of the logits.
            losses: ``[M]``, of the scored rows.

        Returns:
            ``[n, r]`` float64: tokens; if a request wants them, their log-probabilities; then, for as many of the most
            probable tokens as any request wants, these and their log-probabilities.
        """
        self.scores = None if losses is None else losses.neg().double()
        requests, counts = self._requests, self._counts
        if not requests:
            return torch.zeros(self.shape, dtype=torch.float64, device=logits.device)
        if self._rows is not None and len(self._rows) < len(logits):
            logits = logits[to_device(self._rows, torch.int64, logits.device)]
        penalized = any(request.sampling_params.penalized for request in requests)
        changed = counts.penalize(logits, requests, self._ahead, ranks) if penalized else logits
        changed = _biased(changed, requests, self._ahead, ranks)
        changed = _constrained(changed, requests, self._ahead, ranks)
        rows = self._sampling_rows(logits.device)
        tokens = sample_tokens(changed, rows, ranks=ranks)
        if penalized and self._follows:
            counts.add(tokens)
        results = tokens.double()[:, None]
        if self.shape[1] == 1:
            return results
        if any(request.processed for request in requests):
            own = to_device([request.processed for request in requests], torch.bool, logits.device)[:, None]
            changed = processed(changed, rows)
            logits = torch.where(own, changed, logits.to(changed.dtype))
        found = log_probs_of(logits, tokens, self._top, ranks)
        return torch.cat([results, found.double()], 1)

    def host_rows(self) -> NDArray[np.int64]:
        """Return ``[6, n]``: the columns of :class:`SamplingRows`, reals by their bits."""
        requests = self._requests
        each = [request.sampling_params for request in requests]
        host = np.empty((6, len(requests)), np.int64)
        host[:3].view(np.float64)[:] = np.array([reals_of(params) for params in each]).T
        host[3] = [top_k_of(params) for params in each]
        host[4] = [request.seed for request in requests]
        host[5] = [request.length + more for request, more in zip(requests, self._ahead, strict=True)]
        return host

    def _sampling_rows(self, device: torch.device) -> SamplingRows:
        (found,) = to_device_packed([self.host_rows().ravel()], device)
        if self.positions is not None:
            found.view(6, -1)[5] = self.positions
        each = [request.sampling_params for request in self._requests]
        greedy, filtered = all(one.temperature == 0 for one in each), any(one.filtered for one in each)
        return rows_of(found, greedy, filtered)


def rows_of(values: Tensor, greedy: bool, filtered: bool) -> SamplingRows:
    """Return the rows that ``values [6 * N]`` int64 describe; see :meth:`PassSampling.host_rows`."""
    values = values.view(6, -1)
    return SamplingRows(values[:3].view(torch.float64), values[3:], greedy, filtered)


def _biased(logits: Tensor, requests: Sequence[Request], ahead: Sequence[int], ranks: VocabularyRanks | None) -> Tensor:
    """Add the biases of requests, and exclude the tokens that would end them too early."""
    first, columns = (0 if ranks is None else ranks.first), logits.shape[1]
    places: list[int] = []
    values: list[float] = []
    for row, (request, more) in enumerate(zip(requests, ahead, strict=True)):
        params = request.sampling_params
        added = params.logit_bias
        if request.length + more - request.prompt_length < params.min_new_tokens:
            added = {**added, **dict.fromkeys(request.ends, -math.inf)}
        for token, value in added.items():
            if 0 <= token - first < columns:
                places.append(row * columns + token - first)
                values.append(value)
    if not places:
        return logits
    # A copy in any case: others read these logits.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    added_values = torch.tensor(values, dtype=wide.dtype, pin_memory=wide.device.type == "cuda")
    there = added_values.to(wide.device, non_blocking=True)
    wide.view(-1).index_add_(0, to_device(places, torch.int64, wide.device), there)
    return wide


def _constrained(
    logits: Tensor, requests: Sequence[Request], ahead: Sequence[int], ranks: VocabularyRanks | None
) -> Tensor:
    """Exclude the tokens that grammars of requests do not allow, after their guesses, too."""
    rows: list[int] = []
    masks: list[NDArray[np.int32]] = []
    for row, (request, more) in enumerate(zip(requests, ahead, strict=True)):
        if request.matcher is None:
            continue
        # A copy reads the guesses, as most of them may be wrong.
        matcher = request.matcher.deep_copy() if more else request.matcher
        if more:
            matcher.consume_tokens(request.draft_tokens[:more])
        rows.append(row)
        masks.append(np.frombuffer(matcher.compute_bitmask(), np.int32))
    if not rows:
        return logits
    there, numbers = to_device_packed([np.concatenate(masks), np.array(rows)], logits.device)
    words = there.view(len(rows), -1)
    first = 0 if ranks is None else ranks.first
    # Of padding any bit: its logits are excluded already.
    column = torch.arange(first, first + logits.shape[1], device=logits.device).clamp(max=32 * words.shape[1] - 1)
    allowed = words[:, column >> 5] >> (column & 31) & 1
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    wide[numbers] = wide[numbers].masked_fill(allowed == 0, -torch.inf)
    return wide


class TokenCounts:
    """How often requests with penalties have each token. They are allocated for the first of them.

    Args:
        num_slots: maximum number of requests.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Of which request each slot has counts, and of how many of its tokens.
        self._owners: dict[int, Request] = {}
        self._known: dict[int, int] = {}
        # One row more for requests without penalties, and one column for tokens of other ranks.
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._now: tuple[Tensor, list[int], int, int] | None = None

    def forget(self) -> None:
        """Forget the tokens of all requests: those that only the device knows will be sampled again."""
        self._owners.clear()
        self._known.clear()

    def penalize(
        self, logits: Tensor, requests: Sequence[Request], ahead: Sequence[int], ranks: VocabularyRanks | None
    ) -> Tensor:
        """Return logits ``[n, V]`` with the penalties of requests after their guesses, float32 or wider."""
        columns, first, device = logits.shape[1], (0 if ranks is None else ranks.first), logits.device
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(self._num_slots + 1, columns + 1, dtype=torch.int32, device=device)
            self._seen = torch.zeros(self._counts.shape, dtype=torch.bool, device=device)
        slots: list[int] = []
        for request in requests:
            if not request.sampling_params.penalized:
                slots.append(self._num_slots)
                continue
            assert request.slot is not None
            slots.append(request.slot)
            self._count(request, request.slot, first, columns)
        each = [request.sampling_params for request in requests]
        penalties = np.array([(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in each]).T
        there, numbers = to_device_packed(
            [np.ascontiguousarray(penalties).ravel().view(np.int64), np.array(slots)], device
        )
        self._now = numbers, slots, first, columns
        repetition, presence, frequency = (
            there.view(torch.float64).view(3, -1, 1).to(torch.promote_types(logits.dtype, torch.float32))
        )
        counts, seen = self._counts[numbers, :columns], self._seen[numbers, :columns]
        guessed = [
            row * columns + token - first
            for row, (request, more) in enumerate(zip(requests, ahead, strict=True))
            for token in request.draft_tokens[:more]
            if first <= token < first + columns
        ]
        if guessed:
            counts.view(-1).index_add_(0, *_once(guessed, device))
        factor = torch.where(seen | (counts > 0), repetition, 1.0)
        wide = logits.to(factor.dtype)
        wide = torch.where(wide > 0, wide / factor, wide * factor)
        return wide.sub_(presence * (counts > 0)).sub_(frequency * counts)

    def add(self, tokens: Tensor) -> None:
        """Count what was sampled from the logits that were penalized last: ``[n]``."""
        assert self._now is not None and self._counts is not None
        numbers, slots, first, columns = self._now
        own = (tokens >= first) & (tokens < first + columns)
        places = numbers * (columns + 1) + torch.where(own, tokens - first, columns)
        self._counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        for slot in slots:
            if slot in self._known:
                self._known[slot] += 1

    def _count(self, request: Request, slot: int, first: int, columns: int) -> None:
        """Count the tokens of a request that are not counted yet."""
        assert self._counts is not None and self._seen is not None
        if self._owners.get(slot) is not request:
            self._owners = {other: owner for other, owner in self._owners.items() if owner is not request}
            self._owners[slot], self._known[slot] = request, 0
            self._seen[slot], self._counts[slot] = False, 0
        known, length = self._known[slot], request.prompt_length
        if known >= len(request.tokens):
            return
        assert not request.pending
        self._known[slot] = len(request.tokens)
        tokens = [token - first if first <= token < first + columns else columns for token in request.tokens[known:]]
        if prompt := tokens[: max(0, length - known)]:
            self._seen[slot].index_fill_(0, to_device(prompt, torch.int64, self._seen.device), True)
        if new := tokens[max(0, length - known) :]:
            self._counts[slot].index_add_(0, *_once(new, self._counts.device))


def _once(places: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return places on the device, and a one for each."""
    there = to_device(places, torch.int64, device)
    return there, torch.ones_like(there, dtype=torch.int32)


def log_probs_of(logits: Tensor, tokens: Tensor, top: int, ranks: VocabularyRanks | None) -> Tensor:
    """Return log-probabilities ``[n, 1 + 2 top]``, float32 or wider.

    They are those of ``tokens [n]``; then the ``top`` most probable tokens, and theirs.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    local = tokens if ranks is None else tokens - ranks.first
    own = (local >= 0) & (local < logits.shape[1])
    chosen = wide.gather(-1, torch.where(own, local, 0)[:, None])[:, 0]
    total = log_sum_exp(logits) if MODE.on else wide.logsumexp(-1)
    if ranks is not None:
        total, chosen = ranks.combine(total, chosen.where(own, 0.0))
    found = [(chosen - total)[:, None]]
    if top:
        values, ids = wide.topk(top)
        found += [ids.to(wide.dtype), values - total[:, None]]
    return torch.cat(found, 1)
