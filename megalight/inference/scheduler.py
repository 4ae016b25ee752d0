"""Continuous batching: which tokens of which requests run in the next forward pass.

It plans with numbers on the host alone, so all ranks plan the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from megalight.inference.cache import Cache
from megalight.inference.request_record import RequestEvent, RequestRecord, RequestSegment, RequestStatus
from megalight.inference.sampling import SamplingParams

Reason = Literal["end", "stop", "length", "error"]
"""Why a completion ended: with an end token (or where its grammar ends), by ``stop``, at its longest, or because the
logits of its next token hold NaN or infinity, or its grammar needs too much work."""
Stop = Callable[[Sequence[int]], bool]
"""Whether a completion ends, given its tokens so far."""


class Completion(NamedTuple):
    """A completion that has ended.

    Attributes:
        tokens: the new tokens, with the one that ended it.
        log_probs: for each of them its log-probability by the model, before all that the sampling parameters change
            (or after it, if asked so); None: nobody asked.
        reason: why it ended.
        top_log_probs: for each of them the most probable tokens, with their log-probabilities; None: nobody asked.
        prompt_log_probs: those of the prompt's tokens but the first, by the model; None: nobody asked.
    """

    tokens: list[int]
    log_probs: list[float] | None
    reason: Reason
    top_log_probs: list[dict[int, float]] | None = None
    prompt_log_probs: list[float] | None = None


@dataclass(eq=False)
class Request:
    """A request: a prompt that is being completed.

    Attributes:
        number: in the order in which requests came.
        tokens: the prompt, and what followed so far.
        prompt_length: how many of them are the prompt.
        max_new_tokens: maximum length of the completion.
        sampling_params: how tokens are chosen.
        ends: tokens that end it.
        stop: ends it, too, if this is true of the completion so far.
        seed: the request's own, so that its samples do not depend on other requests.
        log_probs: of the completion's tokens, or None.
        top_count: how many of the most probable tokens are wanted with theirs, for each token.
        processed: whether log-probabilities are those of the distribution that is sampled from.
        top_log_probs: of these tokens.
        prompt_log_probs: of the prompt's tokens but the first, or None. Those that are not known are NaN.
        matcher: follows the completion by a grammar, or None; see :mod:`megalight.inference.grammar`.
        slot: its slot in the cache while it runs.
        suspect: whether its logits were NaN or infinite in a pass with others, so that it runs alone next.
        failed: whether they are when it runs alone.
        pending: how many tokens follow ``tokens`` for sure that only the device knows yet.
        unchecked: how many more may follow: guesses in passes whose results the host does not know yet.
        events: what happened to it.
        earlier: its segments in other engines.
        draft_tokens: what a speculator guesses to follow, for the next pass. Only the device may know them.
    """

    number: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    ends: Collection[int] = ()
    stop: Stop | None = None
    seed: int = 0
    log_probs: list[float] | None = None
    top_count: int = 0
    processed: bool = False
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    prompt_log_probs: list[float] | None = None
    matcher: Any = None
    slot: int | None = None
    suspect: bool = False
    failed: bool = False
    pending: int = 0
    unchecked: int = 0
    events: list[RequestEvent] = field(default_factory=list)
    earlier: Sequence[RequestSegment] = ()
    draft_tokens: list[int] = field(default_factory=list)

    def record(self, status: RequestStatus) -> RequestRecord:
        """Return it as plain values."""
        known = [len(each.tokens) for each in self.earlier]
        begin = self.prompt_length + sum(known)
        segment = RequestSegment(
            prompt=self.tokens[:begin],
            max_new_tokens=self.max_new_tokens - sum(known),
            tokens=self.tokens[begin:],
            log_probs=None if self.log_probs is None else self.log_probs[sum(known) :],
            top_log_probs=self.top_log_probs[sum(known) :],
            events=[*self.events],
        )
        return RequestRecord(
            request_id=self.number,
            status=status,
            sampling_params=asdict(self.sampling_params),
            ends=sorted(self.ends),
            seed=self.seed,
            top_count=self.top_count,
            processed=self.processed,
            constrained=self.matcher is not None,
            prompt_log_probs=None if self.prompt_log_probs is None else [*self.prompt_log_probs],
            segments=[*self.earlier, segment],
        )

    @property
    def length(self) -> int:
        """Number of tokens, with those that only the device knows yet."""
        return len(self.tokens) + self.pending

    @property
    def extent(self) -> int:
        """Number of tokens, with all guesses."""
        return self.length + self.unchecked + len(self.draft_tokens)

    @property
    def left(self) -> int:
        """How many tokens the completion still gets, if all guesses that are being checked are right."""
        return self.max_new_tokens - (self.length + self.unchecked - self.prompt_length)

    def take(self, token: int, log_probs: Sequence[float] = ()) -> None:
        """Add the next token, with results of :class:`~megalight.inference.sampler.PassSampling` that follow it."""
        self.tokens.append(token)
        if self.matcher is not None and not self.matcher.consume_token(token):
            self.failed = True
        if self.log_probs is not None:
            self.log_probs.append(log_probs[0])
        if self.top_count:
            most = (len(log_probs) - 1) // 2
            ids, values = log_probs[1 : 1 + self.top_count], log_probs[1 + most :]
            self.top_log_probs.append({int(each): value for each, value in zip(ids, values, strict=False)})

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and not known, so that all of its tokens must run."""
        known = self.prompt_log_probs
        return known is not None and len(known) > 0 and math.isnan(known[-1])  # they come in order

    def ended(self) -> Completion | None:
        """Return the completion if it ends."""
        reason: Reason | None = None
        # Without a copy of the tokens, where nobody asks for it: sequences may be long.
        if self.failed:
            reason = "error"
        elif self.tokens[-1] in self.ends or (self.matcher is not None and self.matcher.is_stopped()):
            reason = "end"
        elif self._stops():
            reason = "stop"
        elif len(self.tokens) - self.prompt_length == self.max_new_tokens:
            reason = "length"
        if reason is None:
            return None
        top = self.top_log_probs if self.top_count else None
        return Completion(self.tokens[self.prompt_length :], self.log_probs, reason, top, self.prompt_log_probs)

    def _stops(self) -> bool:
        # Asked in any case, as it may keep what it has read.
        new = len(self.tokens) - self.prompt_length
        return (
            self.stop is not None
            and self.stop(self.tokens[self.prompt_length :])
            and new >= self.sampling_params.min_new_tokens
        )


class StepPlan(NamedTuple):
    """A forward pass.

    Attributes:
        counts: how many of its next tokens each request runs.
        preempted: requests that have lost their blocks, and wait.
        shared: how many of the first tokens of requests that begin are in blocks that they share.
        restored: states to copy before the pass: from a snapshot, to a slot.
        kept: states to copy after the pass: from a slot, to a snapshot.
    """

    counts: dict[Request, int]
    preempted: list[Request]
    shared: dict[Request, int]
    restored: list[tuple[int, int]]
    kept: list[tuple[int, int]]


class Scheduler:
    """Requests that run, and those that wait. Plans count tokens, and need not know all of them.

    They begin in the order in which they came. No request overtakes another, so those that run are always the oldest.
    If a sequence that grows finds no free block, the youngest loses its own and waits. It begins again from its first
    token, then with the part of its completion that it has. So the oldest request always goes on, and all end.

    A request begins with the full blocks of the cache that hold its first tokens. Others may have them, or have had
    them, or write them in the same forward pass: what one request reads then, an older one has written in each layer.
    Layers with one state for all tokens of a sequence need the state at the end of these blocks, too. So a request
    stops where it and the one that waits next go on differently, and its state is kept; the other begins in the next
    pass.

    NaN spreads to all requests that share a block with it, and in some layers to all of the pass. So requests without
    finite logits run again alone, and share nothing (:meth:`isolate`).

    Args:
        cache: where sequences are kept.
        step_tokens: maximum number of tokens of a forward pass.
        states: whether layers have one state for all tokens of a sequence.

    Attributes:
        running: requests with a slot, from the oldest to the youngest.
        waiting: requests without, likewise.
    """

    def __init__(self, cache: Cache, step_tokens: int, states: bool) -> None:
        self.cache, self.step_tokens, self.states = cache, step_tokens, states
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def plan(
        self, passes: int = 1, waits: Callable[[Request], bool] = lambda request: request.matcher is not None
    ) -> StepPlan:
        """Choose the tokens of the next forward pass, and reserve their blocks. :meth:`Cache.extend` must follow.

        Args:
            passes: so many passes may begin before tokens are known, so each takes a part of the requests.
            waits: whether a request runs only if the host knows all of its tokens. Which tokens a grammar allows is
                known once the last one is.
        """
        left, plan, blocks = self.step_tokens, StepPlan({}, [], {}, [], []), self.cache.blocks
        going = [request for request in self.running if not (request.pending and waits(request))]
        going = going[: -(-len(going) // passes)]
        for request in self.running if blocks.spans else ():
            if request.slot is not None:
                # Guesses that ran may be wrong, and are forgotten then.
                blocks.slide(request.slot, min(self.cache.lengths[request.slot], len(request.tokens) - 1))
        # Only the youngest can have more than one token to run, as it began with what was left of a step. So a long
        # prompt does not stop those before it.
        for request in going:
            if request.pending and request.left <= 0:  # it waits for its last token
                continue
            count = min(self.unread(request), left)
            if not count:
                break
            if request.draft_tokens and request.slot is not None:
                # Nobody loses blocks for guesses.
                while request.draft_tokens and not blocks.fits({request.slot: request.extent}):
                    request.draft_tokens.pop()
                count = min(self.unread(request), left)
                request.draft_tokens = request.draft_tokens[: count - 1]
            # The others of its tokens have blocks already, or run as far as there are some.
            while request.slot is not None and not self._has_room(request.slot):
                plan.preempted.append(self.preempt())
            if request.slot is None:  # it has given its blocks to an older one, or found none for itself
                break
            left -= self._run(plan, request, request.slot, left)
        # A state that is kept can be copied after the pass alone, so those that wait for it begin in the next one.
        while left and not plan.kept and not any(request.suspect for request in plan.counts):
            if (new := self._next(plan)) is None:
                break
            left -= self._run(plan, *new, left)
        return plan

    def unread(self, request: Request) -> int:
        """Return how many tokens of a request have not run since it got its slot."""
        return request.extent - (0 if request.slot is None else self.cache.lengths[request.slot])

    def _has_room(self, slot: int) -> bool:
        """Return whether a slot can hold one more token. Where its last block is not full, no pool is asked."""
        stored = self.cache.lengths[slot]
        return stored % self.cache.blocks.size > 0 or self.cache.blocks.fits({slot: stored + 1})

    def may_run_ahead(self, num_speculative_tokens: int = 0) -> bool:
        """Return whether a pass can be planned while tokens are pending: none would be preempted, none runs alone.

        Args:
            num_speculative_tokens: the most that follow a newest token.
        """
        totals: dict[int, int] = {}
        for request in self.running:
            if request.suspect or request.slot is None:
                return False
            if request.left > 0:
                totals[request.slot] = (
                    self.cache.lengths[request.slot] + 1 + min(num_speculative_tokens, request.left - 1)
                )
        return self.cache.blocks.fits(totals) and not any(request.suspect for request in self.waiting)

    def preempt(self) -> Request:
        """Let the youngest request that runs wait; return it."""
        request = self.running[-1]
        self.end(request)
        self.waiting.appendleft(request)
        return request

    def preempt_all(self) -> None:
        """Let all requests wait."""
        while self.running:
            self.preempt()

    def isolate(self, requests: Sequence[Request]) -> list[Request]:
        """Let all requests wait, and these begin first, each in passes of its own; return those that ran."""
        ran = [*self.running]
        self.preempt_all()
        self.cache.blocks.prefixes.clear()
        for request in requests[::-1]:
            request.suspect = True
            self.waiting.remove(request)
            self.waiting.appendleft(request)
        return ran

    def end(self, request: Request) -> None:
        """Take a request out, and its slot and blocks back."""
        if request.slot is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.cache.release(request.slot)
        # Room for them is found where they are planned, and not where it begins again.
        request.slot, request.draft_tokens = None, []

    def _run(self, plan: StepPlan, request: Request, slot: int, left: int) -> int:
        """Plan the next tokens of a request, at most ``left``; return how many."""
        stored, blocks = self.cache.lengths[slot], self.cache.blocks
        end = min(stored + left, request.extent)
        if end > stored + 1 or stored % blocks.size == 0:
            end = min(end, blocks.reach(slot))
            blocks.grow({slot: end})
        if request.suspect:
            plan.counts[request] = end - stored
            return end - stored
        if fork := self._fork(request, stored, end):
            blocks.remember(slot, request.tokens, stored, fork)
            found = blocks.prefixes.find(request.tokens[:fork])
            # Fewer, if an older block has the tokens of one that this pass writes, and others follow.
            if len(found) * blocks.size == fork:
                plan.kept.append((slot, blocks.prefixes.snapshots.keep(found[-1])))
                end = fork
        blocks.remember(slot, request.tokens, stored, min(end, len(request.tokens)))
        plan.counts[request] = end - stored
        return end - stored

    def _fork(self, request: Request, stored: int, end: int) -> int:
        """Return where a request that runs its tokens up to ``end`` must stop for the one that waits next, or 0.

        That is at the end of the full blocks with which both begin, if no state at this place or later is kept.
        """
        if not self.states or not self.waiting or self.waiting[0].unscored or len(request.tokens) - stored < 2:
            return 0
        wanted, blocks = self.waiting[0].tokens[:-1], self.cache.blocks
        common = 0
        for after in range(blocks.size, min(end, len(wanted)) + 1, blocks.size):
            if request.tokens[common:after] != wanted[common:after]:
                break
            common = after
        kept = len(blocks.find(wanted, states=True)) * blocks.size
        return common if common > max(stored, kept) else 0

    def _next(self, plan: StepPlan) -> tuple[Request, int] | None:
        """Give the oldest request that waits a slot, and blocks for all of its tokens; None: it must wait."""
        taken = {request.slot for request in self.running}
        slot = next((slot for slot in range(self.cache.num_slots) if slot not in taken), None)
        if slot is None or not self.waiting:
            return None
        request, blocks = self.waiting[0], self.cache.blocks
        # Without the last token, which always runs: nobody has kept its logits.
        shared = [] if request.unscored else blocks.find(request.tokens[:-1], self.states)
        self.cache.begin(slot, shared)
        # All now, though it may run in parts: the rest of a prompt then never waits for blocks, and what was just
        # preempted cannot come back and be preempted again.
        if not blocks.reserve(slot, len(request.tokens)):
            self.cache.release(slot)
            return None
        request.slot = slot
        self.running.append(self.waiting.popleft())
        if request in plan.preempted:
            # It had a block of its own with the tokens of another, which it shares now.
            plan.preempted.remove(request)
        if shared:
            plan.shared[request] = len(shared) * blocks.size
            if self.states:
                plan.restored.append((blocks.prefixes.snapshots.use(shared[-1]), slot))
        return request, slot
