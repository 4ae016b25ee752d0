"""Continuous batching (dynamic inference): requests that come at any time run together.

Each step is one forward pass. It runs the newest token of running requests, and parts of prompts,
packed. Keys and values lie in blocks, which a request takes as it grows and gives back when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from megalight.errors import ConfigurationError, DataError, integer
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache
from megalight.inference.generate import another, check_prompts, device_of, end_ids, last_logits, new_seed
from megalight.inference.graphs import PENDING, DecodeGraphs
from megalight.inference.parallel import ParallelGPT, evaluating
from megalight.inference.sampling import FAILED, SamplingParams, check_seed, sample
from megalight.inference.scheduler import Completion, Request, Scheduler, Stop
from megalight.models.gpt import GPT, GPTConfig
from megalight.types import to_device


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


class _PendingPass(NamedTuple):
    """A forward pass whose tokens the host does not know yet.

    Attributes:
        requests: those that get a token.
        results: ``[1, n]`` or ``[2, n]`` float64 on the host: tokens, and their log-probabilities if one is wanted.
        done: when the results are there; None: they are.
        step: what is known.
    """

    requests: list[Request]
    results: Tensor
    done: torch.cuda.Event | None
    step: EngineStep


class DynamicEngine:
    """Completes requests together, each as if it were alone.

    A completion follows from its own request, not from others, from how its prompt was divided, or from preemption: it
    has its own random numbers. Logits are equal up to rounding, as shapes of products differ. On a model that is
    divided over ranks, all ranks of a replica make the same calls.

    Args:
        model: a whole model on any device, or this rank's part of a model. Its weights may change while the engine is
            suspended.
        num_blocks: blocks of the cache. Each layer has ``num_blocks * block_size`` rows.
        block_size: tokens of a block.
        max_sequences: maximum number of sequences in a step.
        step_tokens: maximum number of tokens in a step. Longer prompts run in parts.
        cuda_graphs: for about how many numbers of sequences decode steps are recorded, where they can be
            (:class:`~megalight.inference.graphs.DecodeGraphs`). 0: for none.

    Attributes:
        blocks: who has which blocks.
        suspended: whether the cache is given back.

    Raises:
        ConfigurationError: a number is no integer of at least 1, a layer has no state, or what a token becomes depends
            on the others in its forward pass; or the model reads images.
    """

    def __init__(
        self,
        model: GPT | ParallelGPT,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_sequences: int = 64,
        step_tokens: int = 512,
        cuda_graphs: int = 16,
    ) -> None:
        _check_model(model)
        num_blocks = integer("num_blocks", num_blocks)
        block_size = integer("block_size", block_size)
        max_sequences = integer("max_sequences", max_sequences)
        step_tokens = integer("step_tokens", step_tokens)
        self._model = model
        # Texts begin in the order in which they came, so few beginnings are wanted at a time.
        self.blocks = BlockPool(max_sequences, num_blocks, block_size, snapshots=-(-max_sequences // 16))
        cache = Cache(model.layers, max_sequences, model.config.max_sequence_length, self.blocks)
        # Ranks of a replica may hold different layers, and must plan the same.
        rows = model.every(cache.reversible) if isinstance(model, ParallelGPT) else cache.reversible
        self._schedule = Scheduler(cache, step_tokens, states=not rows)
        # The newest token of each slot; on a GPU, the next pass begins before the host knows it.
        self._newest = torch.zeros(cache.dummy_slot + 1, dtype=torch.int64, device=device_of(model))
        self._graphs = DecodeGraphs.of(model, cache, self._newest, cuda_graphs)
        # Replicas that share experts step equally often, so none may be a pass ahead.
        shares = isinstance(model, ParallelGPT) and model.shares_experts
        self._runs_ahead = self._newest.device.type == "cuda" and not shares
        self._flights: deque[_PendingPass] = deque()
        self._requests: dict[int, Request] = {}
        self._count = 0
        self._seeds: Generator | None = None
        # Kept after an error: the step that it stopped, and the completions that `run` has not returned.
        self._open: _OpenStep | None = None
        self._ended: dict[int, Completion] = {}
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
        log_probs: bool = False,
    ) -> int:
        """Add a request; return its number. It begins when those before it leave room.

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
            log_probs: whether the completion has the log-probabilities of its tokens.

        Raises:
            DataError: the prompt is empty or holds no token ids, an id is outside the vocabulary, or prompt and
                completion are too long together for the model, or for all blocks of the cache.
            ConfigurationError: another value is of the wrong kind or out of range.
        """
        (prompt,), max_new_tokens = check_prompts(self._model, [prompt], max_new_tokens)
        if stop is not None and not callable(stop):
            raise ConfigurationError(f"stop is {stop!r}; it must be a function of the completion's tokens.")
        # The last token of a completion never runs.
        longest = len(prompt) + max_new_tokens - 1
        if self.blocks.holding(longest) > self.blocks.count:
            raise DataError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones need {self.blocks.holding(longest)} "
                f"blocks of {self.blocks.size} tokens, and the cache has {self.blocks.count}: the request could never "
                "end. Lower max_new_tokens (--max-new-tokens), or raise num_blocks (--cache-tokens)."
            )
        request = Request(
            self._count,
            prompt,
            len(prompt),
            max_new_tokens,
            SamplingParams.of(sampling_params),
            end_ids(self._model, eos_id),
            stop,
            self._new_seed() if seed is None else check_seed(seed),
            [] if log_probs else None,
        )
        self._count += 1
        self._requests[request.number] = request
        self._schedule.waiting.append(request)
        return request.number

    def cancel(self, number: int) -> None:
        """Take a request out, wherever it is.

        Raises:
            DataError: there is no such request, or it has ended.
        """
        if number not in self._requests:
            raise DataError(f"there is no request {number}, or it has ended.")
        request = self._requests.pop(number)
        self._schedule.end(request)
        if self._open is not None:
            self._open.leave(request)
        if not self._requests:
            self._open = None
            self._flights.clear()

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
        if self.suspended:
            raise ConfigurationError("the engine is suspended and has no cache; call resume() first.")
        if not another(self._model, bool(self._requests)):
            return None
        if self._requests and self._open is None:
            self._open = self._pass()
        elif isinstance(self._model, ParallelGPT) and self._model.shares_experts:
            # Another replica needs the experts that this one holds.
            with evaluating(self._model):
                self._model.accompany()
        if self._open is None:
            return EngineStep({}, {}, [], {})
        step = self._open.close()
        self._open = None
        for number in step.finished:
            self._schedule.end(self._requests.pop(number))
        if not self._requests:
            self._flights.clear()
        return step

    def _pass(self) -> _OpenStep:
        """Let a forward pass begin, and the next one after it; return what the first gave."""
        try:
            # Passes of requests that have all ended are of no use.
            while self._flights and not self._alive(self._flights[0]):
                self._flights.popleft()
            if not self._flights:
                self._launch()
            if self._runs_ahead and len(self._flights) == 1 and self._schedule.may_run_ahead():
                self._launch()
            return self._collect()
        except BaseException:
            # Out of memory, or stopped by the user: some layers have the new tokens, others do not.
            self._abandon()
            self._schedule.preempt_all()
            self.blocks.prefixes.clear()
            raise

    def _alive(self, flight: _PendingPass) -> bool:
        return not flight.requests or any(request.number in self._requests for request in flight.requests)

    def _launch(self) -> None:
        """Run a forward pass, and sample the next token of each request that is ready; wait for nothing."""
        schedule = self._schedule
        plan = schedule.plan()
        counts = plan.counts
        if not counts:
            return
        slots = [request.slot for request in counts if request.slot is not None]
        fresh: list[list[int]] = []
        for request, count in counts.items():
            first = request.length - schedule.unread(request)
            known = request.tokens[first : first + count]
            fresh.append(known + [PENDING] * (count - len(known)))
        schedule.cache.copy_states(plan.restored)
        logits = None
        if self._graphs is not None and not plan.restored and all(len(ids) == 1 for ids in fresh):
            logits = self._graphs.run(slots, [ids[0] for ids in fresh])
        if logits is None:
            logits = last_logits(self._model, schedule.cache, slots, fresh, newest=self._newest)
        schedule.cache.copy_states(plan.kept)
        # A part of a prompt has no next token yet.
        ready = [place for place, request in enumerate(counts) if not schedule.unread(request)]
        requests = [request for request in counts if not schedule.unread(request)]
        results = self._choose(requests, logits, ready)
        for request in requests:
            request.pending += 1
        found = {request.number: count for request, count in plan.shared.items()}
        step = EngineStep({}, {}, [request.number for request in plan.preempted], found)
        self._flights.append(_PendingPass(requests, *_to_host(results), step))

    def _choose(self, requests: Sequence[Request], logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Sample the next token of each request, and keep it for the next pass; return the results of the pass.

        Args:
            requests: ``n`` requests.
            logits: ``[N, V]``.
            rows: the row of each request.
        """
        device = logits.device
        if not requests:
            return torch.zeros(1, 0, dtype=torch.float64, device=device)
        numbers = [(request.slot or 0, request.seed, request.length) for request in requests]
        slots, seeds, positions = to_device(
            [*(n[0] for n in numbers), *(n[1] for n in numbers), *(n[2] for n in numbers)], torch.int64, device
        ).view(3, -1)
        if len(rows) < len(logits):
            logits = logits[to_device(rows, torch.int64, device)]
        tokens = _drawn(requests, logits, seeds, positions)
        self._newest[slots] = tokens
        results = tokens.double()[None]
        if any(request.log_probs is not None for request in requests):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = wide.log_softmax(-1).gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
            results = torch.stack([results[0], chosen.double()])
        return results

    def _collect(self) -> _OpenStep:
        """Wait for the oldest pass, and give its tokens to the requests that still run."""
        schedule = self._schedule
        if not self._flights:
            return _OpenStep(EngineStep({}, {}, [], {}), deque())
        flight = self._flights.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        tokens, *found = flight.results.tolist()
        log_probs = found[0] if found else [None] * len(tokens)
        suspects: list[Request] = []
        undecided: deque[Request] = deque()
        step = flight.step
        for request, number, log_prob in zip(flight.requests, tokens, log_probs, strict=True):
            request.pending -= 1
            if request.number not in self._requests:
                continue  # it has ended, or was cancelled, after the pass began
            token = int(number)
            if token == FAILED and not request.suspect:
                suspects.append(request)
                continue
            undecided.append(request)
            request.failed = token == FAILED
            if not request.failed:
                request.take(token, log_prob)
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

    def _abandon(self) -> None:
        """Forget the passes whose tokens the host does not know. The same tokens are sampled again."""
        while self._flights:
            for request in self._flights.popleft().requests:
                request.pending -= 1

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

    def suspend(self) -> None:
        """Give the memory of the cache back. Requests keep their tokens, and more may be added."""
        self._abandon()
        self._schedule.preempt_all()
        self._schedule.cache.drop()
        if self._graphs is not None:
            self._graphs.drop()
        self.suspended = True

    def resume(self) -> None:
        """Go on. Texts run again from their first token, with the weights that the model has now."""
        self.suspended = False

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
            self._seeds = Generator().manual_seed(new_seed(self._model))
        return int(torch.randint(2**62, (), generator=self._seeds))


def _to_host(results: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy results to the host without a wait; return them, and when they are there."""
    if results.device.type != "cuda":
        return results, None
    there = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    there.copy_(results, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return there, done


def _drawn(requests: Sequence[Request], logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the next token ``[n]`` of each request, from logits ``[n, V]``."""
    kinds: dict[SamplingParams, list[int]] = {}
    for place, request in enumerate(requests):
        kinds.setdefault(request.sampling_params, []).append(place)
    if len(kinds) == 1:
        return sample(logits, requests[0].sampling_params, seeds, positions)
    tokens = torch.empty(len(requests), dtype=torch.long, device=logits.device)
    for sampling_params, places in kinds.items():
        at = to_device(places, torch.int64, logits.device)
        tokens[at] = sample(logits[at], sampling_params, seeds[at], positions[at])
    return tokens


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
