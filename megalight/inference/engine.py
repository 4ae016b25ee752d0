"""Continuous batching (dynamic inference): requests that come at any time run together.

Each step is one forward pass. It runs the newest token of running requests, and parts of prompts,
packed. Keys and values lie in blocks, which a request takes as it grows and gives back when it ends.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from megalight.errors import ConfigurationError, DataError, integer
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache
from megalight.inference.cache_memory import CacheForms, Memory, check_memory
from megalight.inference.generate import check_prompts, device_of, end_ids, new_seed
from megalight.inference.grammar import Grammar
from megalight.inference.graphs import PENDING, DecodeGraphs
from megalight.inference.parallel import ParallelGPT, evaluating
from megalight.inference.request_record import (
    RequestError,
    RequestEvent,
    RequestEventKind,
    RequestRecord,
    RequestStatus,
)
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.sampling import FAILED, LARGEST_SEED, SamplingParams, check_seed
from megalight.inference.scheduler import Completion, Request, Scheduler, Stop
from megalight.inference.speculator import Speculator
from megalight.inference.suspend import HostWeights, ManagedPages
from megalight.models.gpt import GPT, GPTConfig
from megalight.types import to_device

NOT_FINITE = "the logits of its next token hold NaN or infinity"
_Call = tuple[str, tuple[Any, ...]]
"""A method, and its arguments."""


class EngineStep(NamedTuple):
    """What a step did, by the numbers of requests.

    Attributes:
        tokens: the new token of each request that got one.
        finished: the completions that ended, by an ``error``, too.
        preempted: requests that gave their blocks back, to begin again later. They keep their tokens.
        shared: how many tokens of new requests did not run, because the prefix cache had them.
    """

    tokens: dict[int, int]
    finished: dict[int, Completion]
    preempted: list[int]
    shared: dict[int, int]


class _OpenStep(NamedTuple):
    """A step whose requests have their tokens, while it is not yet known of all of them whether they end.

    Attributes:
        step: what is known.
        undecided: the other requests.
    """

    step: EngineStep
    undecided: deque[Request]

    def close(self) -> EngineStep:
        """Find the requests that end. After an error this resumes with the same request."""
        while self.undecided:
            request = self.undecided[0]
            try:
                completion = request.ended()
            except Exception as error:
                error.add_note(f"The stop of request {request.number} raised it; cancel it to go on without.")
                raise
            if request not in self.undecided:
                continue  # its stop has cancelled it
            self.undecided.remove(request)
            if completion is not None:
                self.step.finished[request.number] = completion
        return self.step

    def leave(self, request: Request) -> None:
        """Forget a request that was cancelled."""
        self.step.tokens.pop(request.number, None)
        self.step.finished.pop(request.number, None)
        self.step.shared.pop(request.number, None)
        if request.number in self.step.preempted:
            self.step.preempted.remove(request.number)
        if request in self.undecided:
            self.undecided.remove(request)


class _Results(NamedTuple):
    """What a pass gives.

    Attributes:
        values: of :class:`~megalight.inference.sampler.PassSampling`, then its scores, on the host, in one dimension.
        done: when they are there; None: they are.
    """

    values: Tensor
    done: torch.cuda.Event | None

    def get(self) -> list[float]:
        """Wait for the values."""
        if self.done is not None:
            self.done.synchronize()
        values: list[float] = self.values.tolist()
        return values


class _PendingPass(NamedTuple):
    """A forward pass whose tokens the host does not know yet.

    Attributes:
        requests: those that get a token.
        results: None: the last stage of the pipeline has them.
        scored: whose prompts were scored: from which token on, and how many.
        step: what is known.
        guesses: those after the newest token of a request; it has a result for each of them, too.
    """

    requests: list[Request]
    results: _Results | None
    scored: list[tuple[Request, int, int]]
    step: EngineStep
    guesses: dict[Request, list[int]]


class DynamicEngine:
    """Completes requests together, each as if it were alone.

    A completion follows from its own request, not from others, from how its prompt was divided, or from preemption: it
    has its own random numbers. Logits are equal up to rounding, as shapes of products differ.

    On a model that is divided over ranks, all ranks of a replica make the same calls. Or the first of them makes all
    calls, and the others call :meth:`follow`.

    Args:
        model: a whole model on any device, or this rank's part of a model. Its weights may change while the engine is
            suspended.
        num_blocks: blocks of the cache. Each layer has ``num_blocks * block_size`` rows. Or give ``cache_memory``.
        cache_memory: the memory of the cache on this rank: a number of bytes; or, between 0 and 1, a share of the
            memory that is free beside weights and a forward pass. All ranks take the smallest number of blocks.
        block_size: tokens of a block.
        max_sequences: maximum number of sequences in a step.
        step_tokens: maximum number of tokens in a step. Longer prompts run in parts.
        cuda_graphs: for about how many numbers of sequences decode steps are recorded, where they can be
            (:class:`~megalight.inference.graphs.DecodeGraphs`). 0: for none.
        speculator: guesses tokens, which a pass checks together; see :mod:`megalight.inference.speculator`. A step
            still gives one token of each request; those that were guessed come without a pass.
        memory_level: 0: the cache is in the device's own memory. 1: it is in managed memory, so that graphs survive a
            suspend. 2: the weights are moved there, too. Without such memory on a rank, it warns and takes 0.
        first_rank_only: on a divided model, the first rank of a replica makes all calls, and tells the other ranks.
        sampling_params: those of requests that have none; it warns, as each request should have its own.

    Attributes:
        blocks: who has which blocks.
        suspended: whether the cache is given back.
        memory_level: the level that all ranks have.

    Raises:
        ConfigurationError: a number is no integer of at least 1, no block fits into ``cache_memory``, a layer has no
            state, or what a token becomes depends on the others in its forward pass; or the model reads images.
    """

    def __init__(
        self,
        model: GPT | ParallelGPT,
        *,
        num_blocks: int | None = None,
        cache_memory: Memory | None = None,
        block_size: int = 16,
        max_sequences: int = 64,
        step_tokens: int = 512,
        cuda_graphs: int = 16,
        speculator: Speculator | None = None,
        memory_level: int = 0,
        first_rank_only: bool = False,
        sampling_params: SamplingParams | None = None,
    ) -> None:
        _check_model(model)
        if (num_blocks is None) == (cache_memory is None):
            raise ConfigurationError("an engine needs either num_blocks or cache_memory, not both.")
        num_blocks = None if num_blocks is None else integer("num_blocks", num_blocks)
        cache_memory = None if cache_memory is None else check_memory(cache_memory)
        if sampling_params is not None:
            warnings.warn(
                "sampling_params of the engine are those of requests without their own; give them to each request "
                "(add).",
                stacklevel=2,
            )
        self._sampling_params = SamplingParams.of(sampling_params)
        block_size = integer("block_size", block_size)
        max_sequences = integer("max_sequences", max_sequences)
        step_tokens = integer("step_tokens", step_tokens)
        self._model = model
        self._parallel = model if isinstance(model, ParallelGPT) else None
        capacity = model.config.max_sequence_length
        # A share of the free memory is what the largest pass leaves.
        forms = CacheForms.of(model, min(step_tokens, capacity) if isinstance(cache_memory, float) else 1, block_size)
        # Texts begin in the order in which they came, so few beginnings are wanted at a time.
        snapshots = -(-max_sequences // 16)
        if num_blocks is None:
            assert cache_memory is not None
            entries, most = max_sequences + snapshots + 1, max_sequences * -(-capacity // block_size)
            num_blocks = forms.blocks(cache_memory, block_size, entries, most)
            # Stages may have other layers, and must plan the same.
            num_blocks = num_blocks if self._parallel is None else self._parallel.least(num_blocks)
        self.blocks = BlockPool(max_sequences, num_blocks, block_size, snapshots=snapshots)
        cache = Cache(model.layers, max_sequences, capacity, self.blocks)
        self._forms = forms.forms
        self._released: HostWeights | None = None
        self._pages = None
        if integer("memory_level", memory_level, 0, 2):
            self._pages = ManagedPages.of(device_of(model), self._every)
        self.memory_level = memory_level if self._pages is not None else 0
        if self._pages is not None:
            if self.memory_level == 2:
                self._pages.take(model)
            self._pages.check(forms.bytes(num_blocks * block_size, cache.dummy_slot + 1))
            with self._pages.memory.allocating():
                cache.allocate(self._forms)
        else:
            cache.allocate(self._forms)
        # Ranks of a replica may hold different layers, and must plan the same.
        self._schedule = Scheduler(cache, step_tokens, states=not self._every(cache.reversible))
        # The newest token of each slot; on a GPU, the next pass begins before the host knows it.
        self._newest = torch.zeros(cache.dummy_slot + 1, dtype=torch.int64, device=device_of(model))
        self._token_counts = TokenCounts(max_sequences)
        self._graphs = DecodeGraphs.of(model, cache, self._newest, cuda_graphs)
        # How many passes may have begun before the host knows the tokens of the first: with a pipeline one in each
        # stage, of other requests; else a second one of the same requests, which takes their tokens on the device.
        self._stages = self._parallel.stages if self._parallel is not None else 1
        self._runs_ahead = self._newest.device.type == "cuda" and self._stages == 1 and speculator is None
        self._speculator = speculator
        if speculator is not None and (self._shares_experts or self._schedule.states):
            raise ConfigurationError(
                "a speculator needs layers that can forget wrong guesses, which those with one state for all earlier "
                "tokens (Mamba, convolutions) cannot, and no experts on ranks of several replicas, which run equally "
                "often. Leave it out."
            )
        self._leads = self._follows = False
        if first_rank_only and self._parallel is not None:
            self._leads, self._follows = self._parallel.first, not self._parallel.first
        self._calls: list[_Call] = []
        self._agreement: Callable[[], int] | None = None
        self._flights: deque[_PendingPass] = deque()
        self._requests: dict[int, Request] = {}
        self._count = 0
        self._seeds: Generator | None = None
        # Kept after an error: the step that it stopped, and the completions that `run` has not returned.
        self._open: _OpenStep | None = None
        self._ended: dict[int, Completion] = {}
        self._finished: dict[int, RequestRecord] = {}
        self.suspended = False

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling_params: SamplingParams | None = None,
        eos_id: int | Collection[int] | None = None,
        stop: Stop | None = None,
        seed: int | None = None,
        n: int = 1,
        log_probs: bool = False,
        top_log_probs: int = 0,
        processed_log_probs: bool = False,
        prompt_log_probs: bool = False,
        grammar: Grammar | None = None,
    ) -> int:
        """Add a request; return its number, or that of its first completion. It begins when those before it leave room.

        If the logits of its next token hold NaN or infinity when it runs alone, it ends with the reason ``error``, and
        others go on.

        Args:
            prompt: token ids, at least one; integers of numpy and torch are accepted, here and below.
            max_new_tokens: maximum length of the completion.
            sampling_params: how tokens are chosen.
            eos_id: the completion ends with this token, or with one of these.
            stop: called with the completion's tokens after each of them; the completion ends if it returns True, which
                must be the same on all ranks.
            seed: seed of its samples, from 0 to ``2**63 - 1``. They are those of ``generate`` with this prompt alone
                and this seed. None: a new one.
            n: how many completions. The numbers of the others follow that of the first, as their seeds do (0 follows
                the largest). The prompt runs once, but for the tokens after its last full block.
            log_probs: whether the completion has the log-probabilities of its tokens.
            top_log_probs: for how many of the most probable tokens it has them, too, with ``log_probs``.
            processed_log_probs: both are those of the distribution that is sampled from, not of the model: after
                penalties, biases, temperature (if it is not 0), top-k, top-p and min-p.
            prompt_log_probs: whether it has the log-probabilities of the prompt's tokens but the first, by the model.
                The prompt then shares no prefix, as all of it must run.
            grammar: what the completion may be, of :class:`~megalight.inference.grammar.GrammarCompiler`. Its ends are
                those of the completion, too.

        Raises:
            DataError: the prompt is empty or holds no token ids, an id is outside the vocabulary, or prompt and
                completion are too long together for the model, or for all blocks of the cache.
            ConfigurationError: another value is of the wrong kind or out of range.
        """
        self._check_asked()
        (prompt,), max_new_tokens = check_prompts(self._model, [prompt], max_new_tokens)
        sampling_params = self._sampling_params if sampling_params is None else SamplingParams.of(sampling_params)
        sampling_params.check(self._model.config.vocab_size, max_new_tokens)
        if stop is not None and not callable(stop):
            raise ConfigurationError(f"stop is {stop!r}; it must be a function of the completion's tokens.")
        self._check_room(len(prompt), max_new_tokens)
        top_log_probs = integer("top_log_probs", top_log_probs, 0, self._model.config.vocab_size)
        if (top_log_probs or processed_log_probs) and not log_probs:
            raise ConfigurationError(
                f"top_log_probs is {top_log_probs} and processed_log_probs {processed_log_probs!r}, but log_probs is "
                "False; set it to True."
            )
        ends, number = end_ids(self._model, eos_id), self._count
        if grammar is not None:
            self._check_grammar(grammar, sampling_params)
            ends |= grammar.ends
        first = self._new_seed() if seed is None else check_seed(seed)
        for place in range(integer("n", n)):
            request = Request(
                self._count,
                [*prompt],
                len(prompt),
                max_new_tokens,
                sampling_params,
                ends,
                stop,
                (first + place) % (LARGEST_SEED + 1),
                [] if log_probs else None,
                top_log_probs,
                processed_log_probs,
                prompt_log_probs=[math.nan] * (len(prompt) - 1) if prompt_log_probs else None,
                matcher=None if grammar is None else grammar.start(),
            )
            self._enter(request)
            # What a request does after each token, its first rank alone knows.
            self._tell("_enter", replace(request, tokens=[*prompt], stop=None))
        return number

    def _check_grammar(self, grammar: Grammar, sampling_params: SamplingParams) -> None:
        if not isinstance(grammar, Grammar):
            raise ConfigurationError(f"grammar is {grammar!r}; it must be a Grammar, which GrammarCompiler makes.")
        if grammar.vocab_size != self._model.config.vocab_size:
            raise ConfigurationError(
                f"the grammar is for a vocabulary of {grammar.vocab_size}, and the model has "
                f"{self._model.config.vocab_size}; make it for this one."
            )
        if sampling_params.min_new_tokens:
            raise ConfigurationError(
                f"min_new_tokens is {sampling_params.min_new_tokens}, but a grammar says itself when a text may end; "
                "leave it 0."
            )
        if self._leads:
            raise ConfigurationError(
                "a grammar needs equal calls on all ranks; make the engine with first_rank_only=False."
            )

    def restore(self, record: RequestRecord, *, stop: Stop | None = None) -> int:
        """Add a request of another engine, with the tokens that it has; return its number.

        Its text is what it would have been there: samples follow from the seed and the position of a token.

        Args:
            record: what :meth:`record` returned there.
            stop: see :meth:`add`; a record has none.

        Raises:
            DataError, ConfigurationError: see :meth:`add`; or the request has ended, or has a grammar.
        """
        self._check_asked()
        if record.constrained:
            raise DataError(f"request {record.request_id} has a grammar, which a record does not hold; add it again.")
        record = deepcopy(record)
        record.checkpoint()
        merged = record.merge()
        (tokens,), left = check_prompts(
            self._model, [record.segments[-1].prompt], merged.max_new_tokens - len(merged.tokens)
        )
        self._check_room(len(tokens), left)
        request = Request(
            self._count,
            tokens,
            len(merged.prompt),
            merged.max_new_tokens,
            SamplingParams(**record.sampling_params),
            end_ids(self._model, record.ends),
            stop,
            check_seed(record.seed),
            merged.log_probs,
            record.top_count,
            record.processed,
            merged.top_log_probs,
            record.prompt_log_probs,
            earlier=record.segments[:-1],
        )
        self._enter(request)
        self._tell("_enter", replace(request, tokens=[*tokens], stop=None, events=[]))
        return request.number

    def record(self, number: int) -> RequestRecord:
        """Return a request as plain values: its status, its events, and all that another engine needs to go on with it.

        Requests that have ended have a record until the next step.

        Raises:
            DataError: there is no such request, or it ended in an earlier step.
        """
        if number in self._finished:
            return self._finished[number]
        if number not in self._requests:
            raise DataError(f"there is no request {number}, or it has ended.")
        request = self._requests[number]
        status = RequestStatus.ACTIVE_AND_GENERATING_TOKENS
        if request.slot is None:
            status = RequestStatus.WAITING_IN_QUEUE
        elif self.suspended or self._schedule.unread(request) > 1 or len(request.tokens) == request.prompt_length:
            status = RequestStatus.ACTIVE_BUT_NOT_GENERATING_TOKENS
        return request.record(status)

    def _check_room(self, length: int, max_new_tokens: int) -> None:
        # The last token of a completion never runs.
        longest = length + max_new_tokens - 1
        if self.blocks.holding(longest) > self.blocks.count:
            raise DataError(
                f"a prompt of {length} tokens and {max_new_tokens} new ones need {self.blocks.holding(longest)} "
                f"blocks of {self.blocks.size} tokens, and the cache has {self.blocks.count}: the request could never "
                "end. Lower max_new_tokens (--max-new-tokens), or raise num_blocks (--cache-tokens)."
            )

    def _enter(self, request: Request) -> None:
        self._count = request.number + 1
        request.events.append(RequestEvent.now(RequestEventKind.ADD))
        self._requests[request.number] = request
        self._schedule.waiting.append(request)

    def cancel(self, number: int) -> None:
        """Take a request out, wherever it is.

        Raises:
            DataError: there is no such request, or it has ended.
        """
        self._check_asked()
        if number not in self._requests:
            raise DataError(f"there is no request {number}, or it has ended.")
        self._leave(number)
        self._tell("_leave", number)

    def _leave(self, number: int) -> None:
        """Take a request out, unless it has ended."""
        if number not in self._requests:
            return
        request = self._requests.pop(number)
        self._schedule.end(request)
        if self._open is not None:
            self._open.leave(request)
        if not self._requests:
            self._open = None
            self._flights.clear()

    @property
    def model(self) -> GPT | ParallelGPT:
        """The model."""
        return self._model

    @property
    def unfinished(self) -> list[int]:
        """The numbers of requests that have not ended, in the order in which they came."""
        return list(self._requests)

    def step(self) -> EngineStep | None:
        """Run one forward pass; return what it did, or None if no request is left.

        If experts are on ranks of several replicas, all these replicas call this equally often, until it returns None.

        Raises:
            ConfigurationError: the engine is suspended.
            Exception: what the forward pass raises: all requests then start again in the next step. Or what a ``stop``
                raises: the next step asks it again, and returns what this one did. Cancel the request to go on without.
        """
        self._check_asked()
        if self.suspended:
            raise ConfigurationError("the engine is suspended and has no cache; call resume() first.")
        if self._calls or self._shares_experts or (self._requests and self._open is None):
            self._tell("_advance", self._open is not None)
        return self._advance()

    def _advance(self, kept: bool = False) -> EngineStep | None:
        """Do what :meth:`step` does. ``kept``: no pass is run here, as the first rank still closes the last one."""
        if not self._another():
            return None
        self._finished.clear()
        if self._open is None and not kept:
            self._open = self._pass()
        elif self._shares_experts:
            self._accompany()
        if self._open is None:
            return None
        step = self._open.close()
        self._open = None
        for number, completion in step.finished.items():
            request = self._requests.pop(number)
            self._schedule.end(request)
            self._finished[number] = _ended(request, completion)
            if completion.reason == "stop":  # the other ranks do not know it
                self._tell("_leave", number)
        if not self._requests:
            self._flights.clear()
        return step

    @property
    def _shares_experts(self) -> bool:
        return self._parallel is not None and self._parallel.shares_experts

    def _another(self) -> bool:
        """Return whether another pass follows, here or in a replica that shares experts."""
        wanted = bool(self._requests)
        if self._parallel is None or not self._shares_experts:
            return wanted
        # The replicas agree while the pass before runs, so that none waits for another. At the end they accompany a
        # pass of nobody.
        if self._agreement is None or not self._agreement():
            self._agreement = None
            if not self._parallel.any_replica(wanted):
                return False
        self._agreement = self._parallel.asking_replicas(int(wanted))
        return True

    def follow(self) -> None:
        """Do what the first rank of the replica is asked to do, until its :meth:`close`. The other ranks call this.

        Raises:
            ConfigurationError: this rank is the first, or all ranks make the same calls.
        """
        if self._parallel is None or not self._follows:
            raise ConfigurationError(
                "this rank follows no other: it is the first rank of its replica, or all ranks make the same calls "
                "(first_rank_only=False)."
            )
        while True:
            for name, argument in self._parallel.call(list[_Call]()):
                if name == "close":
                    return
                getattr(self, name)(*argument)

    def close(self) -> None:
        """Let the other ranks return from :meth:`follow`. It does nothing where all ranks make the same calls."""
        self._check_asked()
        self._tell("close")

    def _check_asked(self) -> None:
        if self._follows:
            raise ConfigurationError(
                "the first rank of the replica makes all calls (first_rank_only=True); call follow() on this rank."
            )

    def _tell(self, name: str, *arguments: Any) -> None:
        """Let the other ranks do what the first one does, now or with the next pass."""
        if not self._leads:
            return
        self._calls.append((name, arguments))
        if name not in ("_enter", "_leave"):
            assert self._parallel is not None
            calls, self._calls = self._calls, []
            self._parallel.call(calls)

    def _accompany(self) -> None:
        """Take part in a pass of another replica, which needs the experts that this one holds."""
        assert self._parallel is not None
        with evaluating(self._parallel):
            self._parallel.accompany()

    def _pass(self) -> _OpenStep:
        """Let passes begin, as many as may be on their way; return what the first of them gave."""
        schedule, flights = self._schedule, self._flights
        shares = self._shares_experts
        depth = 2 if self._runs_ahead else self._stages
        try:
            # Passes of requests that have all ended are of no use.
            while flights and not self._alive(flights[0]):
                flights.popleft()
            begun = False
            while len(flights) < depth and (not flights or schedule.may_run_ahead()):
                begun = self._launch()
                # Replicas that share experts begin one pass in each step.
                if not begun or shares:
                    break
            if shares and not begun:
                self._accompany()
            if shares and begun and len(flights) < depth:
                return _OpenStep(EngineStep({}, {}, [], {}), deque())
            return self._collect()
        except BaseException as error:
            # Out of memory, or stopped by the user: some layers have the new tokens, others do not.
            self._abandon()
            for request in schedule.running:
                request.guesses = []
                request.events.append(RequestEvent.of(RequestError(request.number, f"a pass failed: {error!r}")))
            schedule.preempt_all()
            self.blocks.prefixes.clear()
            raise

    def _alive(self, flight: _PendingPass) -> bool:
        concerned = [*flight.requests, *(request for request, _, _ in flight.scored)]
        return not flight.requests or any(request.number in self._requests for request in concerned)

    def _launch(self) -> bool:
        """Run a forward pass, and sample the next token of each request that is ready; wait for nothing.

        Return False if there is nothing to run.
        """
        schedule = self._schedule
        self._guess()
        stages = self._stages - len(self._flights) if self._stages > 1 else 1
        plan = schedule.plan(stages, pending=self._stages == 1)
        counts = plan.counts
        if not counts:
            return False
        slots = [request.slot for request in counts if request.slot is not None]
        fresh: list[list[int]] = []
        for request, count in counts.items():
            first = request.extent - schedule.unread(request)
            known = request.tokens[first : first + count]
            known += request.guesses[: count - len(known)]
            fresh.append(known + [PENDING] * (count - len(known)))
        schedule.cache.copy_states(plan.restored)
        # A part of a prompt has no next token yet.
        requests = [request for request, count in counts.items() if schedule.unread(request) == count]
        scored, places = _scored(counts, fresh, schedule)
        guesses = {request: request.guesses for request in requests if request.guesses}
        sampling, rows = self._sampling(counts, requests, guesses, self._there(places))
        logits = None
        if self._graphs is not None and not (plan.restored or scored) and all(len(ids) == 1 for ids in fresh):
            logits = self._graphs.run(slots, [ids[0] for ids in fresh])
        results = self._run(slots, fresh, sampling, rows) if logits is None else sampling(logits)
        schedule.cache.copy_states(plan.kept)
        if results is not None and self._runs_ahead:
            # For the next pass, which may begin before the host knows them.
            own = to_device([request.slot or 0 for request in requests], torch.int64, results.device)
            self._newest[own] = results[:, 0].long()
        for request in requests:
            request.pending += 1
            request.guesses = []
        for request in plan.preempted:
            request.events.append(RequestEvent.now(RequestEventKind.EVICT))
        found = {request.number: count for request, count in plan.shared.items()}
        step = EngineStep({}, {}, [request.number for request in plan.preempted], found)
        found_results = None
        if results is not None:
            scores = [] if sampling.scores is None else [sampling.scores]
            found_results = _to_host(torch.cat([results.flatten(), *scores]))
        self._flights.append(_PendingPass(requests, found_results, scored, step, guesses))
        return True

    def _there(self, places: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor] | None:
        """Copy rows and labels to the device."""
        if not places[0]:
            return None
        rows, labels = to_device([*places[0], *places[1]], torch.int64, self._newest.device).view(2, -1)
        return rows, labels

    def _guess(self) -> None:
        """Let tokens be guessed after those of requests whose prompt has run."""
        if self._speculator is None:
            return
        asked: dict[Request, int] = {}
        for request in self._schedule.running:
            request.guesses = []
            # Penalties and grammars depend on the tokens before. The base adds a token to the right guesses.
            plain = not request.sampling_params.penalized and request.matcher is None
            free = not request.pending and not request.suspect
            left = request.max_new_tokens - (len(request.tokens) - request.prompt_length) - 1
            if plain and free and left and self._schedule.unread(request) == 1:
                asked[request] = left
        if asked:
            for request, guesses in zip(asked, self._speculator.guess([*asked], [*asked.values()]), strict=True):
                request.guesses = guesses

    def _sampling(
        self,
        counts: Mapping[Request, int],
        requests: Sequence[Request],
        guesses: Mapping[Request, Sequence[int]],
        scored: tuple[Tensor, Tensor] | None,
    ) -> tuple[PassSampling, list[int] | None]:
        """Return what samples, and of which tokens it needs logits; None: of the last of each request."""
        if not guesses:
            wanted = {*requests}
            ready = [place for place, request in enumerate(counts) if request in wanted]
            return PassSampling(self._token_counts, requests, ready, scored=scored), None
        rows: list[int] = []
        each: list[tuple[Request, int]] = []
        end, known = 0, {*requests}
        for request, count in counts.items():
            end += count
            if request in known:
                more = len(guesses.get(request, ()))
                rows += range(end - 1 - more, end)
                each += [(request, place) for place in range(more + 1)]
        ahead = [place for _, place in each]
        return PassSampling(self._token_counts, [request for request, _ in each], None, ahead, scored), rows

    def _run(
        self, slots: Sequence[int], fresh: Sequence[Sequence[int]], sampling: PassSampling, rows: Sequence[int] | None
    ) -> Tensor | None:
        """Run the new tokens of each slot, and sample; return the results, which only the last stage of a pipeline has.

        A token :data:`PENDING` is the newest of its slot.
        """
        cache, device = self._schedule.cache, self._newest.device
        with torch.no_grad(), evaluating(self._model):
            sequences = cache.extend(slots, [len(ids) for ids in fresh], device)
            # End to end, without padding: prompts of any lengths run in one pass.
            tokens = to_device([token for ids in fresh for token in ids], torch.int64, device)
            if any(ids[-1] == PENDING for ids in fresh):
                assert sequences.pages is not None
                # Where sampling failed there is no token, and the host will drop what follows.
                there = sequences.expand(self._newest[sequences.pages.state_slot].clamp(min=0))
                tokens = torch.where(tokens == PENDING, there, tokens)
            # Only the last token of each sequence needs logits: `[N, V]` instead of `[T, V]`.
            last = sequences.cu_seqlens[1:].long() - 1 if rows is None else to_device(rows, torch.int64, device)
            if self._parallel is not None:
                return self._parallel.on_last_stage(tokens, sequences, sampling, states=cache.states, rows=last)
            more = {} if sampling.scored is None else {"scored": sampling.scored}
            output = self._model(tokens, sequences, states=cache.states, rows=last, **more)
            return sampling(output.logits, losses=output.losses)

    def _collect(self) -> _OpenStep:
        """Wait for the oldest pass, and give its tokens to the requests that still run."""
        schedule = self._schedule
        if not self._flights:
            return _OpenStep(EngineStep({}, {}, [], {}), deque())
        flight = self._flights.popleft()
        values = None if flight.results is None else flight.results.get()
        if self._stages > 1:
            assert self._parallel is not None
            values = self._parallel.agree(values, -1)
        assert values is not None
        for request, first, count in flight.scored[::-1]:
            assert request.prompt_log_probs is not None
            request.prompt_log_probs[first : first + count] = values[-count:]
            del values[-count:]
        count = len(flight.requests) + sum(map(len, flight.guesses.values()))
        width = len(values) // max(1, count)
        results = [values[place * width : (place + 1) * width] for place in range(count)]
        if flight.guesses:
            results = self._accept(flight, results)
        suspects: list[Request] = []
        undecided: deque[Request] = deque()
        step = flight.step
        for request, (number, *log_probs) in zip(flight.requests, results, strict=True):
            request.pending -= 1
            if request.number not in self._requests:
                continue  # it has ended, or was cancelled, after the pass began
            token = int(number)
            if token == FAILED and not request.suspect:
                suspects.append(request)
                request.events.append(RequestEvent.of(RequestError(request.number, f"{NOT_FINITE}; it runs alone now")))
                continue
            undecided.append(request)
            request.failed = token == FAILED
            if not request.failed:
                request.take(token, log_probs)
                step.tokens[request.number] = token
            if request.suspect:
                # It has run alone, and waits until the others have.
                request.suspect = False
                suspects = [other for other in schedule.waiting if other.suspect]
        if suspects:
            # NaN may have spread to what the next pass has read.
            self._abandon()
            step.preempted.extend(request.number for request in schedule.isolate(suspects))
        return _OpenStep(step, undecided)

    def _accept(self, flight: _PendingPass, rows: Sequence[list[float]]) -> list[list[float]]:
        """Return the first result of each request. Those after right guesses come like results of passes to follow."""
        first: list[list[float]] = []
        later: list[list[tuple[Request, list[float]]]] = []
        at, cache = 0, self._schedule.cache
        for request in flight.requests:
            guesses = flight.guesses.get(request, [])
            own, at = rows[at : at + 1 + len(guesses)], at + 1 + len(guesses)
            first.append(own[0])
            if request.slot is None:  # it has ended
                continue
            right = 0
            while right < len(guesses) and own[right][0] == guesses[right] and own[right + 1][0] != FAILED:
                right += 1
            if guesses:
                cache.truncate(request.slot, cache.lengths[request.slot] - len(guesses) + right)
            for place, row in enumerate(own[1 : right + 1]):
                later += [[]] if place == len(later) else []
                later[place].append((request, row))
                request.pending += 1
        for each in later[::-1]:
            results = _Results(torch.tensor([row for _, row in each], dtype=torch.float64).flatten(), None)
            step = EngineStep({}, {}, [], {})
            self._flights.appendleft(_PendingPass([request for request, _ in each], results, [], step, {}))
        return first

    def _abandon(self) -> None:
        """Forget the passes whose tokens the host does not know. The same tokens are sampled again."""
        while self._flights:
            for request in self._flights.popleft().requests:
                request.pending -= 1
        self._token_counts.forget()

    def __iter__(self) -> Iterator[EngineStep]:
        """Step until no request is left; requests may be added meanwhile."""
        while (step := self.step()) is not None:
            yield step

    def run(self) -> dict[int, Completion]:
        """Step until no request is left; return the completions by the numbers of their requests.

        After an error, the next call returns those that ended before it, too.
        """
        for step in self:
            self._ended |= step.finished
        found, self._ended = self._ended, {}
        return dict(sorted(found.items()))

    def suspend(self, *, keep_cache: bool = False, weights: bool = False) -> None:
        """Give the memory of the cache back. Requests keep their tokens and their order, and more may be added.

        A second call gives back what the first one has left.

        Args:
            keep_cache: keep keys, values and states on the host. Requests then go on where they were; otherwise their
                tokens run again. The weights must stay those of now.
            weights: move the weights to the host, too. The model cannot run until :meth:`resume`.
        """
        self._check_asked()
        self._tell("_suspend", keep_cache, weights)
        self._suspend(keep_cache, weights)

    def _suspend(self, keep_cache: bool, weights: bool) -> None:
        cache, pages = self._schedule.cache, self._pages
        for request in [] if self.suspended else self._schedule.running:
            request.events.append(RequestEvent.now(RequestEventKind.PAUSE))
        if not keep_cache:
            self._abandon()
            self._schedule.preempt_all()
            cache.clear()
        if self._speculator is not None:
            self._speculator.drop()
        # Results of a pass that is on its way are on the host, or come there.
        if pages is None:
            if not keep_cache:
                cache.drop()
            elif not self.suspended:
                cache.keep()
        elif not self.suspended:
            pages.move(cache.tensors, torch.device("cpu"), False)
        if weights and pages is not None and pages.has_weights:
            pages.move([], torch.device("cpu"), True)
        elif weights and self._released is None:
            self._released = HostWeights(self._model)
        # They hold addresses of what is gone.
        if self._graphs is not None and (pages is None or self._released is not None):
            self._graphs.drop()
        self.suspended = True

    def resume(self) -> None:
        """Go on, with the weights that the model has now: after a suspend that kept the cache where requests were,
        otherwise from the first token of each.
        """
        self._check_asked()
        self._tell("_resume")
        self._resume()

    def _resume(self) -> None:
        if self._released is not None:
            self._released.restore()
            self._released = None
        if self.suspended and self._pages is not None:
            self._pages.move(self._schedule.cache.tensors, self._newest.device, True)
        elif self.suspended:
            self._schedule.cache.allocate(self._forms)
        self.suspended = False

    def _every(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks of the replica."""
        return flag if self._parallel is None else bool(self._parallel.least(int(flag)))

    def create_cuda_graphs(self) -> None:
        """Record all decode steps now. Otherwise each is recorded when it is first needed; so it is after a suspend."""
        if self._graphs is not None:
            self._graphs.create()

    @property
    def graph_uses(self) -> dict[int, int]:
        """How often the recorded step of each number of sequences was used."""
        return {} if self._graphs is None else dict(self._graphs.uses)

    def _new_seed(self) -> int:
        if self._seeds is None:
            # On the host, where it makes no one wait.
            seed = secrets.randbelow(LARGEST_SEED + 1) if self._leads else new_seed(self._model)
            self._seeds = Generator().manual_seed(seed)
        return int(torch.randint(2**62, (), generator=self._seeds))


def _scored(
    counts: Mapping[Request, int], fresh: Sequence[Sequence[int]], schedule: Scheduler
) -> tuple[list[tuple[Request, int, int]], tuple[list[int], list[int]]]:
    """Return whose prompts are scored in a pass, and rows and labels of their tokens."""
    scored: list[tuple[Request, int, int]] = []
    rows: list[int] = []
    labels: list[int] = []
    row = 0
    for request, ids in zip(counts, fresh, strict=True):
        first = request.extent - schedule.unread(request)
        # The last token of the prompt is followed by none of it.
        count = min(len(ids), request.prompt_length - 1 - first)
        if request.unscored and count > 0:
            scored.append((request, first, count))
            rows += range(row, row + count)
            labels += request.tokens[first + 1 : first + 1 + count]
        row += len(ids)
    return scored, (rows, labels)


def _ended(request: Request, completion: Completion) -> RequestRecord:
    if completion.reason == "error":
        reason = NOT_FINITE if request.matcher is None else f"{NOT_FINITE}, or its grammar needs too much work"
        error = RequestError(request.number, reason, is_transient=False)
        request.events += [RequestEvent.of(error), RequestEvent.now(RequestEventKind.FAIL)]
        return request.record(RequestStatus.FAILED)
    request.events.append(RequestEvent.now(RequestEventKind.FINISH))
    return request.record(RequestStatus.COMPLETED)


def _to_host(results: Tensor) -> _Results:
    """Copy results to the host without a wait."""
    if results.device.type != "cuda":
        return _Results(results, None)
    there = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    there.copy_(results, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return _Results(there, done)


def _check_model(model: GPT | ParallelGPT) -> None:
    # VLM keeps its own configuration in the place of the language model's.
    config: object = model.config
    if not isinstance(config, GPTConfig):
        raise ConfigurationError("the engine completes text alone, and this model reads images; use generate.")
    if config.moe is not None and (config.moe.capacity is not None or config.moe.router.force_balance):
        raise ConfigurationError(
            "moe.capacity or moe.router.force_balance is set: which experts see a token depends on the other tokens of "
            "its forward pass, so requests would change each other. Use generate, or a model without them."
        )
