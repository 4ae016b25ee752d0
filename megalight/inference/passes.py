"""Forward passes of the engine that are in flight: what a pass runs, its launch, and its results one step late.

The next pass begins before the host knows the tokens of the one before it: on a GPU it takes them on the device, after
as many right guesses as there were; in a pipeline it runs other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.inference.cache import PENDING, Cache, NewestTokens, to_device_packed
from megalight.inference.graphs import StepGraphs, accept_sampled, dimensions_of, sampled_rows
from megalight.inference.parallel import GenerativeModel, ParallelGPT, device_of, evaluating
from megalight.inference.request_record import RequestError, RequestEvent, RequestEventKind
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.sampling import FAILED
from megalight.inference.scheduler import Completion, Request, Scheduler
from megalight.inference.speculator import DraftRound, DraftRounds, EagleSpeculator, Speculator
from megalight.inference.step_log import StepLog, StepRecord
from megalight.models.hidden import KEPT, keeping
from megalight.models.vision import PackedImages
from megalight.nn.latent_attention import LatentAttention
from megalight.nn.moe.dispatch import HostCounts
from megalight.ops.batch_invariant import batch_invariant_mode
from megalight.ops.linear.low_precision import precision_of
from megalight.types import PackedSequences, to_device

NOT_FINITE = "the logits of its next token hold NaN or infinity"


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


class OpenStep(NamedTuple):
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
        num_speculative_tokens: how many follow the newest token of a request; it has a result for each of them, too.
        launched: its dimensions, those of its graph, and when its launch began and ended; None: it is the rest of a
            pass whose guesses were right.
    """

    requests: list[Request]
    results: _Results | None
    scored: list[tuple[Request, int, int]]
    step: EngineStep
    draft_tokens: dict[Request, int]
    launched: tuple[InferenceBatchDimensions, InferenceBatchDimensions | None, float, float] | None = None


class PassesInFlight:
    """The passes of an engine whose tokens the host does not know yet.

    Args:
        model: the model of the engine.
        scheduler: plans the passes.
        requests: those that have not ended, by number.
        cuda_graphs, cuda_graph_mixed_prefill_count: see :class:`~megalight.inference.DynamicEngine`.
        speculator: guesses tokens; None: none are guessed.
        step_log: gets a record of each pass.
        batch_invariant: run passes in batch-invariant mode, but not guesses.

    Attributes:
        newest: where sequences are on the device.
        graphs: recorded steps; None: there are none.
        stages: stages of the pipeline.
        runs_ahead: whether a second pass begins before the host knows the tokens of the first.
        flights: the passes, the oldest first.
        rounds: what became of guesses.
    """

    def __init__(
        self,
        model: GenerativeModel,
        scheduler: Scheduler,
        requests: Mapping[int, Request],
        cuda_graphs: int,
        cuda_graph_mixed_prefill_count: int,
        speculator: Speculator | None,
        step_log: StepLog,
        batch_invariant: bool = False,
    ) -> None:
        self._batch_invariant = batch_invariant
        self.step_log, self._results_came = step_log, 0.0
        self._model, self._scheduler, self._requests, self._speculator = model, scheduler, requests, speculator
        self._parallel = model if isinstance(model, ParallelGPT) else None
        self._eagle = speculator if isinstance(speculator, EagleSpeculator) else None
        cache = scheduler.cache
        # On a GPU, the next pass begins before the host knows the tokens of the last one.
        guesses = 0 if speculator is None else speculator.num_speculative_tokens
        self.newest = NewestTokens(cache.dummy_slot + 1, device_of(model), guesses)
        if speculator is not None:
            speculator.join(cache, self.newest)
        # By slot: the requests whose newest token is known there, and those for which guesses are made.
        self._there: dict[int | None, Request] = {}
        self._drafted: dict[int | None, Request] = {}
        self._token_counts = TokenCounts(cache.num_slots)
        self.graphs = StepGraphs.of(
            model,
            cache,
            self.newest,
            cuda_graphs,
            scheduler.step_tokens,
            cuda_graph_mixed_prefill_count,
            speculator,
        )
        # How many passes may have begun before the host knows the tokens of the first: with a pipeline one in each
        # stage, of other requests; else a second one of the same requests, which takes their tokens on the device.
        self.stages = self._parallel.stages if self._parallel is not None else 1
        self.runs_ahead = self.newest.device.type == "cuda" and self.stages == 1
        self.runs_ahead &= speculator is None or not any(map(_needs_lengths, model.modules()))
        self.flights: deque[_PendingPass] = deque()
        self.rounds = DraftRounds()

    @property
    def depth(self) -> int:
        """How many passes may be in flight."""
        if self._eagle is not None and self.stages > 1:
            return 1  # all stages wait for what its draft reads
        return 2 if self.runs_ahead else self.stages

    def begin(self, one: bool = False) -> bool:
        """Let passes begin, as many as may be in flight, or one; return whether the last one did."""
        # Passes of requests that have all ended are of no use.
        while self.flights and not self._alive(self.flights[0]):
            self.flights.popleft()
        begun = False
        while len(self.flights) < self.depth and (
            not self.flights or self._scheduler.may_run_ahead(self.newest.num_speculative_tokens)
        ):
            begun = self.launch()
            if not begun or one:
                break
        return begun

    def _alive(self, flight: _PendingPass) -> bool:
        concerned = [*flight.requests, *(request for request, _, _ in flight.scored)]
        return not flight.requests or any(request.number in self._requests for request in concerned)

    def launch(self) -> bool:
        """Run a forward pass, and sample the next token of each request that is ready; wait for nothing.

        Return False if there is nothing to run.
        """
        begun = perf_counter()
        with batch_invariant_mode(self._batch_invariant):
            return self._launch(begun)

    def record(self) -> None:
        """Record all steps now."""
        assert self.graphs is not None
        with batch_invariant_mode(self._batch_invariant):
            self.graphs.create()

    def _launch(self, begun: float) -> bool:
        schedule = self._scheduler
        passes = self.depth - len(self.flights) if self.stages > 1 else 1
        self._ask()
        plan = schedule.plan(passes, self._waits)
        counts = plan.counts
        for request in schedule.running:
            request.draft_tokens = request.draft_tokens if request in counts else []
        if not counts:
            return False
        self._propose(counts)
        slots = [request.slot for request in counts if request.slot is not None]
        fresh: list[list[int]] = []
        for request, count in counts.items():
            first = schedule.cache.lengths[request.slot or 0]
            known = request.tokens[first : first + count]
            known += [PENDING] * min(1, count - len(known)) if request.pending else []
            fresh.append(known + request.draft_tokens[: count - len(known)])
        schedule.cache.copy_states(plan.restored)
        # A part of a prompt has no next token yet.
        requests = [request for request, count in counts.items() if schedule.unread(request) == count]
        scored, places = _scored(counts, fresh, schedule)
        guesses = {request: len(request.draft_tokens) for request in requests if request.draft_tokens}
        sampling, guessed = self._sampling(counts, requests, self._to_device(places))
        results: Tensor | None = None
        given = graph = None
        following = [] if self._eagle is None else _following(counts, schedule)
        if self.graphs is not None:
            results = self.graphs.run(slots, fresh, sampling, guessed, following, recordable=not scored)
            given, graph = self.graphs.given, self.graphs.last
        if graph is None and self._speculator is not None:
            results, given = self._run_drafted(slots, fresh, sampling, guessed, following)
        elif graph is None:
            results = self._run(slots, fresh, sampling)
            if results is not None and self.runs_ahead:
                # For the next pass, which may begin before the host knows them.
                own = to_device([request.slot or 0 for request in requests], torch.int64, results.device)
                self.newest.tokens[:, 0].index_copy_(0, own, results[:, 0].long())
        schedule.cache.copy_states(plan.kept)
        for request in requests:
            request.pending += 1
            request.unchecked += len(request.draft_tokens)
            request.draft_tokens = []
        if self._speculator is not None:
            self._there = {slot: each for slot, each in self._there.items() if each not in counts}
            self._there |= {request.slot: request for request in requests}
        for request in plan.preempted:
            request.events.append(RequestEvent.now(RequestEventKind.EVICT))
        found = {request.number: count for request, count in plan.shared.items()}
        step = EngineStep({}, {}, [request.number for request in plan.preempted], found)
        found_results = None
        if results is not None:
            parts = [results.flatten(), *([] if given is None else [given.double()])]
            parts += [] if sampling.scores is None else [sampling.scores]
            found_results = _to_host(parts[0] if len(parts) == 1 else torch.cat(parts))
        launched = dimensions_of(fresh), graph, begun, perf_counter()
        self.flights.append(_PendingPass(requests, found_results, scored, step, guesses, launched))
        return True

    def accompany(self) -> None:
        """Take part in a pass of another replica, which needs the experts that this one holds."""
        assert self._parallel is not None
        if self.graphs is None or not self.graphs.accompany():
            with evaluating(self._parallel):
                self._parallel.accompany()

    def _to_device(self, places: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor] | None:
        """Copy rows and labels to the device."""
        if not places[0]:
            return None
        rows, labels = to_device([*places[0], *places[1]], torch.int64, self.newest.device).view(2, -1)
        return rows, labels

    def _waits(self, request: Request) -> bool:
        """Return whether a request runs only if the host knows all of its tokens."""
        if self.stages > 1 or request.matcher is not None:
            return True
        if self._speculator is None:
            return False
        # What is changed in logits depends on the number of tokens, or on these.
        params = request.sampling_params
        early = request.length - request.prompt_length < params.min_new_tokens
        return params.penalized or (early and len(request.ends) > 0)

    def _ask(self) -> None:
        """Let guesses follow the tokens of requests whose prompt has run, as many as there may be."""
        if self._speculator is None:
            return
        lengths = self._scheduler.cache.lengths
        for request in self._scheduler.running:
            request.draft_tokens = []
            stored = lengths[request.slot or 0]
            if request.suspect or self._scheduler.unread(request) != 1 or self._there.get(request.slot) is not request:
                continue
            if request.pending and (self._waits(request) or request.left <= 0):
                continue
            # Who begins needs all tokens that have run.
            if self._drafted.get(request.slot) is not request and stored > len(request.tokens):
                continue
            # The base adds a token to the right guesses.
            most = min(self._speculator.num_speculative_tokens, request.left - 1, self._speculator.longest - stored)
            request.draft_tokens = [PENDING] * most

    def _propose(self, counts: dict[Request, int]) -> None:
        """Let tokens be guessed, as many as are planned; the host waits for them only where their rows depend on them.

        Args:
            counts: those of the plan, which may become less.
        """
        if self._speculator is None:
            return
        asked = {request: len(request.draft_tokens) for request in counts if request.draft_tokens}
        self._drafted = {slot: each for slot, each in self._drafted.items() if each not in counts or each in asked}
        if not asked:
            return
        slots = [request.slot or 0 for request in asked]
        if self.stages > 1:
            self.newest.put(slots, [request.tokens for request in asked])
        with batch_invariant_mode(False):
            if begin := [request for request in asked if self._drafted.get(request.slot) is not request]:
                self._speculator.begin(begin)
                self._drafted |= {request.slot: request for request in begin}
            found = self._speculator.propose([*asked], [*asked.values()])
        own = to_device(slots, torch.int64, found.device)
        self.newest.tokens[:, 1 : 1 + found.shape[1]].index_copy_(0, own, found)
        if not any(request.matcher is not None or request.sampling_params.penalized for request in asked):
            return
        for request, row in zip(asked, HostCounts(found.flatten()).wait(*[found.shape[1]] * len(asked)), strict=True):
            if request.matcher is None and not request.sampling_params.penalized:
                continue
            known = row[: asked[request]]
            known = known[: known.index(PENDING)] if PENDING in known else known
            if request.matcher is not None:
                known = known[: request.matcher.validate_tokens(known)]
            request.draft_tokens = known
            counts[request] -= asked[request] - len(known)

    def _sampling(
        self, counts: Mapping[Request, int], requests: Sequence[Request], scored: tuple[Tensor, Tensor] | None
    ) -> tuple[PassSampling, list[int]]:
        """Return what samples; with a speculator also how many guesses each of a pass has, or -1 without a sample."""
        ready = {*requests}
        if self._speculator is None:
            places = [place for place, request in enumerate(counts) if request in ready]
            return PassSampling(self._token_counts, requests, places, scored=scored), []
        guessed = [len(request.draft_tokens) if request in ready else -1 for request in counts]
        each = [(request, place) for request in requests for place in range(1 + len(request.draft_tokens))]
        ahead = [place for _, place in each]
        return PassSampling(self._token_counts, [request for request, _ in each], None, ahead, scored), guessed

    def _run(self, slots: Sequence[int], fresh: Sequence[Sequence[int]], sampling: PassSampling) -> Tensor | None:
        """Run the new tokens of each slot, and sample; return the results, which only the last stage of a pipeline has.

        A token :data:`PENDING` is the newest of its slot.
        """
        with torch.no_grad(), evaluating(self._model):
            sequences = self._scheduler.cache.extend(slots, [*map(len, fresh)], self.newest.device)
            # End to end, without padding: prompts of any lengths run in one pass.
            (tokens,) = to_device_packed([self.newest.encode(slots, fresh)], self.newest.device)
            if any(ids[-1] == PENDING for ids in fresh):
                # Where sampling failed there is no token, and the host will drop what follows.
                tokens = self.newest.decode(tokens).clamp(min=0)
            # Only the last token of each sequence needs logits: `[N, V]` instead of `[T, V]`.
            return self._sampled(tokens, sequences, sampling, sequences.cu_seqlens[1:].long() - 1)

    def _sampled(
        self, tokens: Tensor, sequences: PackedSequences, sampling: PassSampling, rows: Tensor
    ) -> Tensor | None:
        states = self._scheduler.cache.states
        if self._parallel is not None:
            return self._parallel.on_last_stage(tokens, sequences, sampling, states=states, rows=rows)
        more = {} if sampling.scored is None else {"scored": sampling.scored}
        output = self._model(tokens, sequences, states=states, rows=rows, **more)
        return sampling(output.logits, losses=output.losses)

    def _run_drafted(
        self,
        slots: Sequence[int],
        fresh: Sequence[Sequence[int]],
        sampling: PassSampling,
        guessed: Sequence[int],
        following: Sequence[int],
    ) -> tuple[Tensor | None, Tensor]:
        """Run new tokens, guesses among them, and accept these; a draft reads what the base has read.

        Args:
            slots: the slots.
            fresh: new tokens of each.
            sampling: samples after the newest token of each, and after its guesses.
            guessed: how many of its new tokens are guesses; -1: none is sampled.
            following: for a draft, the token after each, or :data:`PENDING` where the pass samples it.

        Returns:
            results ``[n, r]``, which the last stage of a pipeline alone has, and the tokens ``[n]`` that they follow.
        """
        cache, newest, eagle = self._scheduler.cache, self.newest, self._eagle
        most = [cache.lengths[slot] if ids[0] == PENDING else -1 for slot, ids in zip(slots, fresh, strict=True)]
        with torch.no_grad(), evaluating(self._model):
            sequences = cache.extend(slots, [*map(len, fresh)], newest.device)
            encoded, after, before, rows = to_device_packed(
                [
                    *(newest.encode(slots, fresh), np.array(following, np.int64), np.array(most)),
                    np.array(sampled_rows(fresh, guessed), np.int64),
                ],
                newest.device,
            )
            if max(most) >= 0:
                sequences = newest.locate(sequences, before)
            tokens = newest.decode(encoded)
            given, sampling.positions = tokens[rows], sequences.positions[rows] + 1
            # Where sampling failed there is no token, and the host will drop what follows.
            read, states = tokens.clamp(min=0), None
            if eagle is None:
                results = self._sampled(read, sequences, sampling, rows)
            elif self._parallel is not None:
                results, states = self._parallel.with_states(
                    read, sequences, sampling, eagle.places, states=cache.states, rows=rows
                )
            else:
                with keeping(self._model, eagle.places) as kept:
                    results = self._sampled(read, sequences, sampling, rows)
                states = torch.cat([kept[KEPT + name] for name in eagle.places], -1)
            if results is None:
                return None, given
            own, last = accept_sampled(newest, slots, guessed, given, sampling, results)
            if eagle is not None and states is not None:
                after = after.index_copy(0, rows, results[:, 0].long().clamp(min=0))
                eagle.stand(own, eagle.read(after, sequences, states)[rows[last]])
            return results, given

    def collect(self) -> OpenStep:
        """Wait for the oldest pass, and give its tokens to the requests that still run."""
        schedule = self._scheduler
        if not self.flights:
            return OpenStep(EngineStep({}, {}, [], {}), deque())
        flight, waited = self.flights.popleft(), perf_counter()
        values = None if flight.results is None else flight.results.get()
        if self.stages > 1:
            assert self._parallel is not None
            values = self._parallel.agree(values, -1)
        assert values is not None
        if flight.launched is not None:
            dimensions, graph, begun, ended = flight.launched
            now, before = perf_counter(), max(begun, self._results_came)
            self._results_came = now
            self.step_log.add(StepRecord(dimensions, graph, now - before, ended - begun, now - waited))
        for request, first, count in flight.scored[::-1]:
            assert request.prompt_log_probs is not None
            request.prompt_log_probs[first : first + count] = values[-count:]
            del values[-count:]
        count = len(flight.requests) + sum(flight.draft_tokens.values())
        given: list[int] = []
        if self._speculator is not None and flight.launched is not None:
            given = [int(token) for token in values[-count:]] if count else []
            del values[len(values) - count :]
        width = len(values) // max(1, count)
        results = [values[place * width : (place + 1) * width] for place in range(count)]
        if given:
            results = self._accept(flight, results, given)
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
            self.abandon()
            step.preempted.extend(request.number for request in schedule.isolate(suspects))
        return OpenStep(step, undecided)

    def _accept(self, flight: _PendingPass, rows: Sequence[list[float]], given: Sequence[int]) -> list[list[float]]:
        """Return the first result of each request. Those after right guesses come like results of passes to follow."""
        first: list[list[float]] = []
        later: list[list[tuple[Request, list[float]]]] = []
        at, cache = 0, self._scheduler.cache
        for request in flight.requests:
            count = flight.draft_tokens.get(request, 0)
            own, guesses = rows[at : at + 1 + count], given[at + 1 : at + 1 + count]
            at += 1 + count
            first.append(own[0])
            request.unchecked -= count
            if request.slot is None:  # it has ended
                continue
            guesses = guesses[: guesses.index(PENDING)] if PENDING in guesses else guesses
            right = 0
            while right < len(guesses) and own[right][0] == guesses[right] and own[right + 1][0] != FAILED:
                right += 1
            if guesses:
                tokens = [int(row[0]) for row in own[: right + 1]]
                self.rounds[DraftRound.of(len(guesses), tokens, request.ends)] += 1
            if count > right:
                # The next pass has begun after those that are right, so it needs no more blocks.
                cache.truncate(request.slot, cache.lengths[request.slot] - count + right)
            for place, row in enumerate(own[1 : right + 1]):
                later += [[]] if place == len(later) else []
                later[place].append((request, row))
                request.pending += 1
        for each in later[::-1]:
            results = _Results(torch.tensor([row for _, row in each], dtype=torch.float64).flatten(), None)
            step = EngineStep({}, {}, [], {})
            self.flights.appendleft(_PendingPass([request for request, _ in each], results, [], step, {}))
        return first

    def abandon(self) -> None:
        """Forget the passes whose tokens the host does not know. The same tokens are sampled again."""
        while self.flights:
            flight = self.flights.popleft()
            for request in flight.requests:
                request.pending -= 1
                request.unchecked -= flight.draft_tokens.get(request, 0)
        self._token_counts.forget()
        self._there.clear()
        self._drafted.clear()

    def drop_speculator(self) -> None:
        """Give the memory of the speculator back."""
        if self._speculator is not None:
            self._speculator.drop()
            self._drafted.clear()


def _needs_lengths(module: nn.Module) -> bool:
    """Return whether a layer reads the lengths of sequences on the host: it computes keys and values of all latents."""
    if not isinstance(module, LatentAttention):
        return False
    return module.kv_up.adapter is not None or precision_of(module.kv_up.weight) is not None


def _scored(
    counts: Mapping[Request, int], fresh: Sequence[Sequence[int]], schedule: Scheduler
) -> tuple[list[tuple[Request, int, int]], tuple[list[int], list[int]]]:
    """Return whose prompts are scored in a pass, and rows and labels of their tokens."""
    scored: list[tuple[Request, int, int]] = []
    rows: list[int] = []
    labels: list[int] = []
    if not any(request.unscored for request in counts):
        return scored, (rows, labels)
    row = 0
    for request, ids in zip(counts, fresh, strict=True):
        first = schedule.cache.lengths[request.slot or 0]
        # The last token of the prompt is followed by none of it.
        count = min(len(ids), request.prompt_length - 1 - first)
        if request.unscored and count > 0:
            scored.append((request, first, count))
            rows += range(row, row + count)
            labels += request.tokens[first + 1 : first + 1 + count]
        row += len(ids)
    return scored, (rows, labels)


def _following(counts: Mapping[Request, int], schedule: Scheduler) -> list[int]:
    """Return the token after each of a pass, or :data:`PENDING` where none is known, as the pass samples it."""
    found: list[int] = []
    for request, count in counts.items():
        first = schedule.cache.lengths[request.slot or 0] + 1
        known = request.tokens[first : first + count]
        found += known + [PENDING] * (count - len(known))
    return found


def _to_host(results: Tensor) -> _Results:
    """Copy results to the host without a wait."""
    if results.device.type != "cuda":
        return _Results(results.clone(), None)
    there = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    there.copy_(results, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return _Results(there, done)


def run_pass(
    model: GenerativeModel,
    cache: Cache,
    slots: Sequence[int],
    fresh: Sequence[Sequence[int]],
    sampling: PassSampling,
    axis_positions: Sequence[Tensor] | None = None,
    packed_images: PackedImages | None = None,
) -> Tensor:
    """Run the new tokens of each slot, and sample from the logits of the last token of each: ``[n, r]``."""
    device = device_of(model)
    with torch.no_grad(), evaluating(model):
        sequences = cache.extend(slots, [len(ids) for ids in fresh], device, axis_positions)
        # End to end, without padding: prompts of any lengths run in one pass.
        tokens = to_device([token for ids in fresh for token in ids], torch.int64, device)
        # Only the last token of each sequence needs logits: `[N, V]` instead of `[T, V]`.
        seen = {} if packed_images is None else {"packed_images": packed_images}
        if packed_images is not None:
            sequences = replace(sequences, runs=packed_images.runs)
        last = sequences.cu_seqlens[1:].long() - 1
        if isinstance(model, ParallelGPT):
            return model.chosen(tokens, sequences, sampling, states=cache.states, rows=last, **seen)
        return sampling(model(tokens, sequences, states=cache.states, rows=last, **seen).logits)
