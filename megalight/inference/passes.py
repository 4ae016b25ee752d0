"""Forward passes of the engine that are in flight: what a pass runs, its launch, and its results one step late.

The next pass begins before the host knows the tokens of the one before it: on a GPU it takes them on the device; in a
pipeline it runs other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.inference.cache import Cache
from megalight.inference.graphs import PENDING, StepGraphs, dimensions_of
from megalight.inference.parallel import GenerativeModel, ParallelGPT, device_of, evaluating
from megalight.inference.request_record import RequestError, RequestEvent, RequestEventKind
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.sampling import FAILED
from megalight.inference.scheduler import Completion, Request, Scheduler
from megalight.inference.speculator import DraftRound, DraftRounds, EagleSpeculator, Speculator
from megalight.inference.step_log import StepLog, StepRecord
from megalight.models.hidden import KEPT, keeping
from megalight.models.vision import PackedImages
from megalight.ops.batch_invariant import batch_invariant_mode
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
        guesses: those after the newest token of a request; it has a result for each of them, too.
        hidden: outputs ``[n, h]`` of a draft for the results, or None.
        launched: its dimensions, those of its graph, and when its launch began and ended; None: it is the rest of a
            pass whose guesses were right.
    """

    requests: list[Request]
    results: _Results | None
    scored: list[tuple[Request, int, int]]
    step: EngineStep
    guesses: dict[Request, list[int]]
    hidden: Tensor | None = None
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
        newest: ``[slots]``, the newest token of each slot on the device.
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
        # A draft goes on from what the newest pass has read, so there is one pass at a time.
        self._eagle = speculator if isinstance(speculator, EagleSpeculator) else None
        cache = scheduler.cache
        if self._eagle is not None:
            self._eagle.join(cache)
        # The newest token of each slot; on a GPU, the next pass begins before the host knows it.
        self.newest = torch.zeros(cache.dummy_slot + 1, dtype=torch.int64, device=device_of(model))
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
        self.runs_ahead = self.newest.device.type == "cuda" and self.stages == 1 and speculator is None
        self.flights: deque[_PendingPass] = deque()
        self.rounds = DraftRounds()

    @property
    def depth(self) -> int:
        """How many passes may be in flight."""
        if self._eagle is not None:
            return 1
        return 2 if self.runs_ahead else self.stages

    def begin(self, one: bool = False) -> bool:
        """Let passes begin, as many as may be in flight, or one; return whether the last one did."""
        # Passes of requests that have all ended are of no use.
        while self.flights and not self._alive(self.flights[0]):
            self.flights.popleft()
        begun = False
        while len(self.flights) < self.depth and (not self.flights or self._scheduler.may_run_ahead()):
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
        self._guess()
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
        plan = schedule.plan(passes, pending=self.stages == 1)
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
        results: Tensor | None = None
        hidden = graph = None
        following = [] if self._eagle is None else _following(counts, schedule)
        if self.graphs is not None:
            results = self.graphs.run(slots, fresh, sampling, rows, following, recordable=not scored)
            hidden, graph = self.graphs.hidden, self.graphs.last
        if graph is None and self._eagle is not None:
            results, hidden = self._run_drafted(slots, fresh, sampling, rows, following)
        elif graph is None:
            results = self._run(slots, fresh, sampling, rows)
            if results is not None and self.runs_ahead:
                # For the next pass, which may begin before the host knows them.
                own = to_device([request.slot or 0 for request in requests], torch.int64, results.device)
                self.newest[own] = results[:, 0].long()
        schedule.cache.copy_states(plan.kept)
        for request in requests:
            request.pending += 1
            request.guesses = []
        for request in plan.preempted:
            request.events.append(RequestEvent.now(RequestEventKind.EVICT))
        found = {request.number: count for request, count in plan.shared.items()}
        step = EngineStep({}, {}, [request.number for request in plan.preempted], found)
        found_results = None
        if results is not None:
            flat = results.flatten()
            found_results = _to_host(flat if sampling.scores is None else torch.cat([flat, sampling.scores]))
        launched = dimensions_of(fresh), graph, begun, perf_counter()
        self.flights.append(_PendingPass(requests, found_results, scored, step, guesses, hidden, launched))
        return True

    def accompany(self) -> None:
        """Take part in a pass of another replica, which needs the experts that this one holds."""
        assert self._parallel is not None
        if self.graphs is None or not self.graphs.accompany():
            with evaluating(self._parallel):
                self._parallel.accompany()

    def _there(self, places: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor] | None:
        """Copy rows and labels to the device."""
        if not places[0]:
            return None
        rows, labels = to_device([*places[0], *places[1]], torch.int64, self.newest.device).view(2, -1)
        return rows, labels

    def _guess(self) -> None:
        """Let tokens be guessed after those of requests whose prompt has run."""
        if self._speculator is None:
            return
        asked: dict[Request, int] = {}
        for request in self._scheduler.running:
            request.guesses = []
            # The base adds a token to the right guesses.
            left = request.max_new_tokens - (len(request.tokens) - request.prompt_length) - 1
            if not (request.pending or request.suspect) and left and self._scheduler.unread(request) == 1:
                asked[request] = left
        if asked:
            for request, guesses in zip(asked, self._speculator.guess([*asked], [*asked.values()]), strict=True):
                request.guesses = guesses
                if request.matcher is not None:
                    request.guesses = guesses[: request.matcher.validate_tokens(guesses)]

    def _sampling(
        self,
        counts: Mapping[Request, int],
        requests: Sequence[Request],
        guesses: Mapping[Request, Sequence[int]],
        scored: tuple[Tensor, Tensor] | None,
    ) -> tuple[PassSampling, list[int] | None]:
        """Return what samples, and of which tokens it needs logits; None: of the last of each request."""
        if not guesses and (self._eagle is None or not requests):
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
        cache, device = self._scheduler.cache, self.newest.device
        with torch.no_grad(), evaluating(self._model):
            sequences = cache.extend(slots, [len(ids) for ids in fresh], device)
            # End to end, without padding: prompts of any lengths run in one pass.
            tokens = to_device([token for ids in fresh for token in ids], torch.int64, device)
            if any(ids[-1] == PENDING for ids in fresh):
                assert sequences.pages is not None
                # Where sampling failed there is no token, and the host will drop what follows.
                there = sequences.expand(self.newest[sequences.pages.state_slot].clamp(min=0))
                tokens = torch.where(tokens == PENDING, there, tokens)
            # Only the last token of each sequence needs logits: `[N, V]` instead of `[T, V]`.
            last = sequences.cu_seqlens[1:].long() - 1 if rows is None else to_device(rows, torch.int64, device)
            if self._parallel is not None:
                return self._parallel.on_last_stage(tokens, sequences, sampling, states=cache.states, rows=last)
            return self._sampled(tokens, sequences, sampling, last)

    def _sampled(self, tokens: Tensor, sequences: PackedSequences, sampling: PassSampling, rows: Tensor) -> Tensor:
        more = {} if sampling.scored is None else {"scored": sampling.scored}
        output = self._model(tokens, sequences, states=self._scheduler.cache.states, rows=rows, **more)
        return sampling(output.logits, losses=output.losses)

    def _run_drafted(
        self,
        slots: Sequence[int],
        fresh: Sequence[Sequence[int]],
        sampling: PassSampling,
        rows: Sequence[int] | None,
        following: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Do the same, and let the draft read what the base has read; return its outputs ``[n, h]`` for the results.

        Args:
            following: the token after each, or :data:`PENDING` where the pass samples it.
        """
        assert self._eagle is not None
        cache, device, places = self._scheduler.cache, self.newest.device, self._eagle.places
        with torch.no_grad(), evaluating(self._model):
            sequences = cache.extend(slots, [len(ids) for ids in fresh], device)
            given = [token for ids in fresh for token in ids]
            tokens, after = to_device([*given, *following], torch.int64, device).view(2, -1)
            last = sequences.cu_seqlens[1:].long() - 1 if rows is None else to_device(rows, torch.int64, device)
            if self._parallel is not None:
                results, states = self._parallel.with_states(
                    tokens, sequences, sampling, places, states=cache.states, rows=last
                )
            else:
                with keeping(self._model, places) as kept:
                    results = self._sampled(tokens, sequences, sampling, last)
                states = torch.cat([kept[KEPT + name] for name in places], -1)
            if rows is not None:
                # Where sampling failed there is no token, and the host will drop what follows.
                after = after.index_copy(0, last, results[:, 0].long().clamp(min=0))
            outputs = self._eagle.read(after, sequences, states)
            return results, None if rows is None else outputs[last]

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
        count = len(flight.requests) + sum(map(len, flight.guesses.values()))
        width = len(values) // max(1, count)
        results = [values[place * width : (place + 1) * width] for place in range(count)]
        if flight.guesses or flight.hidden is not None:
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
            self.abandon()
            step.preempted.extend(request.number for request in schedule.isolate(suspects))
        return OpenStep(step, undecided)

    def _accept(self, flight: _PendingPass, rows: Sequence[list[float]]) -> list[list[float]]:
        """Return the first result of each request. Those after right guesses come like results of passes to follow."""
        first: list[list[float]] = []
        later: list[list[tuple[Request, list[float]]]] = []
        at, cache = 0, self._scheduler.cache
        for request in flight.requests:
            guesses = flight.guesses.get(request, [])
            own, at = rows[at : at + 1 + len(guesses)], at + 1 + len(guesses)
            first.append(own[0])
            if request.slot is None:  # it has ended
                continue
            right = 0
            while right < len(guesses) and own[right][0] == guesses[right] and own[right + 1][0] != FAILED:
                right += 1
            if self._eagle is not None and flight.hidden is not None:
                self._eagle.stand(request, flight.hidden[at - 1 - len(guesses) + right])
            if guesses:
                tokens = [int(row[0]) for row in own[: right + 1]]
                self.rounds[DraftRound.of(len(guesses), tokens, request.ends)] += 1
                cache.truncate(request.slot, cache.lengths[request.slot] - len(guesses) + right)
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
            for request in self.flights.popleft().requests:
                request.pending -= 1
        self._token_counts.forget()


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
        first = request.extent - schedule.unread(request)
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
        first = request.extent - schedule.unread(request) + 1
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
