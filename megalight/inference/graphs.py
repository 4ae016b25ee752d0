"""CUDA graphs of steps: one for each of several dimensions, all in one memory pool.

Launches of a graph depend on its dimensions alone: tokens, positions, lengths, block tables and how tokens are sampled
lie in one buffer on the device, which one copy fills before each replay. What a graph has room for beyond a step is
padding: tokens are written to a dummy block and rows of padding are sampled for a dummy slot, which no one reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.errors import MegalightError, integer
from megalight.inference.batch_dimensions import (
    CUDAGraphBatchDimensionBuilder,
    InferenceBatchDimensions,
    match_graph_config,
    with_draft_tokens,
)
from megalight.inference.cache import PENDING, Cache, InputBuffer, NewestTokens
from megalight.inference.parallel import GenerativeModel, ParallelGPT, evaluating
from megalight.inference.sampler import PassSampling, rows_of
from megalight.inference.sampling import ALL
from megalight.inference.speculator import EagleSpeculator, Speculator
from megalight.models.gpt import GPTConfig
from megalight.models.hf_causal_lm import HFConfig
from megalight.models.hidden import KEPT, keeping
from megalight.nn.gated_delta_net import GatedDeltaNet
from megalight.nn.mamba2 import Mamba2
from megalight.nn.moe import MoE
from megalight.ops.common import HALF
from megalight.ops.jit import overlapping
from megalight.ops.sample_tokens import sample_tokens
from megalight.parallel.graphs.recorder import CUDARecorder, Recorder, Recording
from megalight.types import PackedSequences, Pages, to_device

log = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Tokens of the largest recorded step with prompts: the device takes longer for more of them than the host."""

BOUNDED = 64
"""Tokens of a step for all of which each expert may get room, where products need sizes on the host."""


def dimensions_of(fresh: Sequence[Sequence[int]]) -> InferenceBatchDimensions:
    """Return the dimensions of a step, given the new tokens of its sequences."""
    decodes = next((place for place, ids in enumerate(fresh) if len(ids) != 1), len(fresh))
    return InferenceBatchDimensions(sum(map(len, fresh)), len(fresh) - decodes, decodes)


class StepGraphs:
    """The recorded steps of a model.

    Args:
        model: a model, or this rank's part of it.
        cache: its cache. Its pools must keep their addresses until :meth:`drop`.
        newest: the tokens that the host gives as :data:`PENDING`. Steps write what they sample there.
        dimensions: those of graphs, in the order of recording.
        recorder: makes the recordings.
        speculator: guesses tokens; all tokens of a step are sampled then, and not the last one of each sequence. The
            draft of an :class:`EagleSpeculator` reads what each step has read, and its loop is recorded, too.

    Attributes:
        dimensions: those of graphs, in the order of recording.
        last: the graph of the last step; None: it had none.
        given: ``[n]``, with a speculator: the tokens that the results of the last step follow.
    """

    def __init__(
        self,
        model: GenerativeModel,
        cache: Cache,
        newest: NewestTokens,
        dimensions: Sequence[InferenceBatchDimensions],
        recorder: Recorder,
        speculator: Speculator | None = None,
    ) -> None:
        self._model, self._cache, self._newest, self._recorder = model, cache, newest, recorder
        self._dtype = next(model.parameters()).dtype
        self._all_rows = speculator is not None
        self._eagle = speculator if isinstance(speculator, EagleSpeculator) else None
        self._loop = None if speculator is None else speculator.loop
        if self._loop is not None:
            self._loop.record_with(recorder, [each.req_count for each in dimensions if not each.prefill_req_count])
        self._parallel = model if isinstance(model, ParallelGPT) else None
        self._shares_experts = self._parallel is not None and self._parallel.shares_experts
        self._experts = [module.experts for module in model.modules() if isinstance(module, MoE)]
        # Of a pipeline: what comes from the stage before, and whether another one follows.
        self._incoming: Tensor | None = None
        self._goes_on = False
        if self._parallel is not None and self._parallel.stages > 1:
            place, most = self._parallel.mesh.rank("pp"), max(each.token_count for each in dimensions)
            self._goes_on = place + 1 < self._parallel.stages
            if place:
                config = self._parallel.config
                assert isinstance(config, GPTConfig)
                self._incoming = torch.zeros(most, config.hidden_size, dtype=self._dtype, device=newest.device)
        self.dimensions = [*dimensions]
        self.last: InferenceBatchDimensions | None = None
        self._steps: dict[InferenceBatchDimensions, _Step] = {}
        # Whether all steps were asked for; after :meth:`drop` each is recorded again when it is needed.
        self._created = False
        # How often graphs were dropped, on the replica where that was most often.
        self._drops = 0
        # Whether steps with prefill, or without, cannot be recorded.
        self._failed: set[bool] = set()
        # Shared by all graphs: logits and samples; with guesses also the tokens before these, and their positions.
        self._outputs: tuple[Tensor, ...] | None = None
        self.given: Tensor | None = None

    @classmethod
    def of(
        cls,
        model: GenerativeModel,
        cache: Cache,
        newest: NewestTokens,
        count: int,
        max_tokens: int = 0,
        mixed_prefill_count: int = 0,
        speculator: Speculator | None = None,
    ) -> StepGraphs | None:
        """Return the graphs of a model; None: its steps are not recorded.

        Recorded are models of text on a GPU in half precision: otherwise attention reads all that a cache has room for.
        They may be divided over ranks, which record and replay equal steps, each its own part of them. Replicas that
        share experts agree on each step, and need equal engines. Left out are ranks with several stages of a pipeline,
        and experts that drop tokens, as padding would take the place of tokens.

        Args:
            model: a model.
            cache: its cache.
            newest: see :class:`StepGraphs`.
            count: about how many numbers of tokens are recorded.
            max_tokens: of a step with prompts, at most :data:`MAX_TOKENS`.
            mixed_prefill_count: sequences of such a step beside those that decode. 0: none is recorded.
            speculator: steps with its guesses are recorded instead of those with prompts.

        Raises:
            ConfigurationError: ``count`` or ``mixed_prefill_count`` is no integer of at least 0.
        """
        mixed_prefill_count = integer("cuda_graph_mixed_prefill_count", mixed_prefill_count, 0)
        if not integer("cuda_graphs", count, 0) or newest.device.type != "cuda":
            return None
        eagle = isinstance(speculator, EagleSpeculator)
        # A draft reads states inside of the model, which a divided one gives outside of recordings alone.
        if isinstance(model, ParallelGPT) and (len(model.chunks) > 1 or eagle):
            return None
        config: object = model.config
        # The code of transformers calls dispatchers with sizes that the host reads.
        if isinstance(model, ParallelGPT) and isinstance(config, HFConfig) and model.mesh.ep * model.mesh.etp > 1:
            return None
        # Steps of a model of transformers whose code waits for the device (experts) fail to record, and run without.
        if not isinstance(config, HFConfig | GPTConfig) or next(model.parameters()).dtype not in HALF:
            return None
        moe = config.moe if isinstance(config, GPTConfig) else None
        if moe is not None and (moe.capacity is not None or moe.router.force_balance):
            return None
        max_tokens = min(max_tokens, MAX_TOKENS)
        recorder = CUDARecorder(newest.device)
        if speculator is None:
            builder = CUDAGraphBatchDimensionBuilder(
                count, cache.num_slots, cache.capacity, max_tokens, mixed_prefill_count
            )
            dimensions = builder.build()
            scans = any(isinstance(module, Mamba2 | GatedDeltaNet) for module in model.modules())
            if not (model.every(not scans) if isinstance(model, ParallelGPT) else not scans):
                # Chunks are computed for each prompt for which there is room.
                dimensions = [each for each in dimensions if each.prefill_req_count <= mixed_prefill_count]
            return cls(model, cache, newest, dimensions, recorder)
        builder = CUDAGraphBatchDimensionBuilder(count, cache.num_slots, cache.capacity)
        dimensions = with_draft_tokens(builder.build(), speculator.num_speculative_tokens, max_tokens)
        return cls(model, cache, newest, dimensions, recorder, speculator)

    def create(self) -> None:
        """Record all steps now.

        Otherwise those without prompts are recorded when they are first needed, and those with prompts are not: there
        are many of them, and each would stop the sequences that decode.
        """
        self._created = True
        for dimensions in self.dimensions:
            self._step(dimensions)
        if self._loop is not None:
            self._loop.create()

    def drop(self) -> None:
        """Free the graphs, whose pools are given back. Replicas that share experts then record theirs again, too."""
        self._drops += 1
        self._free()
        if self._loop is not None:
            self._loop.drop()

    def _free(self) -> None:
        for step in self._steps.values():
            step.recording.drop()
        self._steps.clear()
        self._outputs = self.given = None

    def run(
        self,
        slots: Sequence[int],
        fresh: Sequence[Sequence[int]],
        sampling: PassSampling,
        guessed: Sequence[int] = (),
        following: Sequence[int] = (),
        recordable: bool = True,
    ) -> Tensor | None:
        """Run the new tokens of each slot, and sample; return the results until the next step.

        Args:
            slots: the slots.
            fresh: their new tokens.
            sampling: how tokens are sampled.
            guessed: with a speculator, how many of the last tokens of each are guesses; negative: none is sampled.
                Otherwise the last one of each sequence that ``sampling`` names is.
            following: for a draft, the token after each, or :data:`PENDING` where the step samples it.
            recordable: False: this step does what no graph does.

        Returns:
            the results; None: there is no graph for it (:attr:`last`), or a later stage has them.

        Raises:
            DataError: see :meth:`Cache.extend`.
        """
        self.last = self.given = None
        # A draft reads what is sampled, within the step.
        step = self._agreed(dimensions_of(fresh), recordable and (self._eagle is None or sampling.recordable))
        if step is None or self._outputs is None:
            return None
        totals = self._cache.reserve(slots, [*map(len, fresh)])
        recorded, sequences = sampling.recordable, [*range(len(slots))]
        # Rows of all logits, and those of the results.
        places = sampled_rows(fresh, guessed) if self._all_rows else [sequences[place] for place in sampling.places]
        rows = places if self._all_rows else sequences
        step.fill(
            self._cache, slots, totals, fresh, places, sampling.host_rows() if recorded else None, guessed, following
        )
        self._replay(step)
        self.last = step.dimensions
        if self._goes_on:
            return None
        logits, found, *more = self._outputs
        own = _rows_of(found, places)
        if more:
            given, positions = _rows_of(more[0], places).unbind(1)
            self.given, sampling.positions = given, positions + 1
        if recorded:
            return own
        results = sampling(_rows_of(logits, rows))
        if self.given is not None:
            accept_sampled(self._newest, slots, guessed, self.given, sampling, results)
        else:
            taken = to_device([slots[place] for place in places], torch.int64, found.device)
            self._newest.tokens[:, 0].index_copy_(0, taken, results[:, 0].long())
        return results

    def accompany(self) -> bool:
        """Replay the step of replicas that need the experts here, with padding alone; return whether it is a graph."""
        step = self._agreed(InferenceBatchDimensions(0, 0, 0), True)
        if step is None:
            return False
        step.fill(self._cache, [], [], [], [], None, [], [])
        self._replay(step)
        return True

    def _replay(self, step: _Step) -> None:
        if self._parallel is None or self._parallel.stages == 1:
            step.recording.replay()
            return
        count = step.dimensions.token_count

        def play(hidden: Tensor | None) -> Tensor:
            if hidden is not None and self._incoming is not None:
                self._incoming[:count].copy_(hidden)
            step.recording.replay()
            assert self._outputs is not None
            return self._outputs[0][:count]

        self._parallel.through_stages(step.ids, play)

    def _agreed(self, real: InferenceBatchDimensions, recordable: bool) -> _Step | None:
        """Return the recorded step that has room for this one, on all replicas that share experts."""
        if self._shares_experts:
            assert self._parallel is not None
            own = [real.token_count, real.prefill_req_count, real.decode_req_count]
            eager, drops, *most = self._parallel.most_of_replicas([int(not recordable), self._drops, *own])
            recordable, real = not eager, InferenceBatchDimensions(*most)
            if drops > self._drops:
                # To record takes all of them.
                self._drops = drops
                self._free()
        dimensions = match_graph_config(real, self.dimensions) if recordable else None
        if dimensions is None or (dimensions.prefill_req_count and not (self._all_rows or self._created)):
            return None
        return self._step(dimensions)

    def _step(self, dimensions: InferenceBatchDimensions) -> _Step | None:
        prefill = dimensions.prefill_req_count > 0
        if dimensions not in self._steps and prefill not in self._failed:
            kind = "steps with prompts" if prefill else "decode steps"
            step: _Step | None = None
            self._recorder.enter()
            try:
                with torch.no_grad(), evaluating(self._model), self._known_sizes(dimensions):
                    step = self._record(dimensions)
            except Exception:
                log.warning("%s cannot be recorded and run without graphs (%s)", kind, dimensions, exc_info=True)
            finally:
                self._recorder.leave()
            # On all ranks or on none: a graph holds messages that others must send, too.
            every = step is not None if self._parallel is None else self._parallel.every(step is not None)
            if step is not None and every:
                self._steps[dimensions] = step
            else:
                self._failed.add(prefill)
            if step is not None and not every:
                step.recording.drop()
                log.warning("%s run without graphs, as another rank cannot record them (%s)", kind, dimensions)
        return self._steps.get(dimensions)

    @contextmanager
    def _known_sizes(self, dimensions: InferenceBatchDimensions) -> Iterator[None]:
        """Let no size follow from how tokens choose experts.

        Where products need to know how many rows each expert has, these are as many as there are tokens.
        """
        own = [each.dispatcher for each in self._experts]
        for each in self._experts:
            waits, each.dispatcher = each.needs_sizes(self._dtype), each.dispatcher.recorded()
            each.dispatcher.bounded = waits
        try:
            if dimensions.token_count > BOUNDED and any(each.dispatcher.bounded for each in self._experts):
                raise MegalightError(f"each expert would get {dimensions.token_count} rows, more than {BOUNDED}.")
            yield
        finally:
            for each, dispatcher in zip(self._experts, own, strict=True):
                each.dispatcher.bounded = False
                each.dispatcher = dispatcher

    def _record(self, dimensions: InferenceBatchDimensions) -> _Step:
        step, eagle = _Step(self._cache, self._newest, dimensions, self._eagle is not None), self._eagle
        newest = self._newest

        def run() -> list[Tensor]:
            given, sequences = step.inputs()
            # Where sampling failed there is no token, and the host will drop what follows.
            ids = given.clamp(min=0)
            places = () if eagle is None else eagle.places
            states = self._cache.states
            if self._parallel is not None and self._parallel.stages > 1:
                hidden = None if self._incoming is None else self._incoming[: dimensions.token_count]
                logits = self._parallel.own_stage(ids, sequences, hidden, states=states, rows=step.rows)
                if self._goes_on:
                    return [logits]
            else:
                with keeping(self._model, places) as kept:
                    logits = self._model(ids, sequences, states=states, rows=step.rows).logits
            draws, positions = step.draws, sequences.positions
            if self._all_rows:
                draws = torch.cat([draws[: -len(positions)], positions + 1])
            # One kernel for all temperatures, with top-k and top-p: rows without them are done at once.
            tokens = sample_tokens(logits, rows_of(draws, greedy=False, filtered=True))
            results = [logits, tokens[:, None].double()]
            if not self._all_rows:
                newest.tokens[:, 0].index_copy_(0, step.slots, tokens)
                return results
            last = newest.accept(step.slots, step.first, step.guessed, given, positions, tokens)
            if eagle is not None:
                after = torch.where(step.following == PENDING, tokens.clamp(min=0), step.following)
                inside = torch.cat([kept[KEPT + name] for name in places], -1)
                eagle.stand(step.slots, eagle.read(after, sequences, inside)[last])
            return [*results, torch.stack([given, positions], 1)]

        def write() -> None:
            assert self._outputs is not None
            for output, found in zip(self._outputs, run(), strict=True):
                output[: len(found)].copy_(found)

        with overlapping(self._newest.device):
            if self._outputs is None:
                results = run()  # pools are allocated
                # Not in the pool of the graphs, each of which would keep its own.
                whole = self._all_rows or self._goes_on
                most = max(each.token_count if whole else each.req_count for each in self.dimensions)
                self._outputs = tuple(found.new_empty(most, *found.shape[1:]) for found in results)
            write()  # kernels are compiled
            step.recording = self._recorder.record(write, pool="steps", settle=False)
        return step


def sampled_rows(fresh: Sequence[Sequence[int]], guessed: Sequence[int]) -> list[int]:
    """Return the rows of the tokens that results follow: the last one of each sequence that is not a guess, and these.

    Args:
        fresh: new tokens of sequences.
        guessed: how many of them are guesses; negative: none is sampled.
    """
    ends = accumulate(map(len, fresh))
    return [row for end, count in zip(ends, guessed, strict=True) for row in range(end - 1 - count, end) if count >= 0]


def accept_sampled(
    newest: NewestTokens,
    slots: Sequence[int],
    guessed: Sequence[int],
    given: Tensor,
    sampling: PassSampling,
    results: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept guesses where sampling is not recorded; return slots ``[R]`` and rows of results with the newest tokens.

    Args:
        newest: see :meth:`NewestTokens.accept`.
        slots: of the sequences.
        guessed: see :func:`sampled_rows`.
        given: ``[n]``, the tokens that results follow.
        sampling: has sampled.
        results: ``[n, r]``.
    """
    assert sampling.positions is not None
    counts = [count for count in guessed if count >= 0]
    first = [end - 1 - count for end, count in zip(accumulate(count + 1 for count in counts), counts, strict=True)]
    own = [slot for slot, count in zip(slots, guessed, strict=True) if count >= 0]
    there, row, more = to_device([*own, *first, *counts], torch.int64, given.device).view(3, -1)
    return there, newest.accept(there, row, more, given, sampling.positions - 1, results[:, 0].long())


def _rows_of(found: Tensor, rows: Sequence[int]) -> Tensor:
    if [*rows] == [*range(len(rows))]:
        return found[: len(rows)]
    return found[to_device(rows, torch.int64, found.device)]


class _Step:
    """The buffer of the inputs of a recorded step: integers of 64 bits, then of 32.

    Attributes:
        dimensions: its dimensions.
        ids: ``[T]``, the tokens, or what stands for those that only the device knows.
        slots: ``[R]``, the slot of each sequence; with a speculator of each that is sampled.
        first, guessed: ``[R]``, see :meth:`NewestTokens.accept`.
        draws: ``[6 N]``, how each is sampled; see :meth:`PassSampling.host_rows`. With a speculator ``N`` is ``T``,
            otherwise ``R``.
        following: ``[T]``, the token after each, for a draft.
        rows: ``[R]``, the last token of each sequence; None: all tokens.
        recording: the step.
    """

    recording: Recording[None]

    def __init__(self, cache: Cache, newest: NewestTokens, dimensions: InferenceBatchDimensions, drafted: bool) -> None:
        tokens, decodes = dimensions.token_count, dimensions.decode_req_count
        self.dimensions, self._cache, self._newest = dimensions, cache, newest
        requests = dimensions.req_count
        # With prefill, padding is a sequence of its own, without stored tokens; otherwise there is one for each token.
        prefills = dimensions.prefill_req_count
        guesses = newest.num_speculative_tokens > 0
        self._sequences = requests + (prefills > 0)
        width = min(cache.blocks.holding(cache.capacity), cache.blocks.count)
        # Layers that see a span have rows to write and tables of their own, after those of the others.
        pools = len(cache.blocks.pools)
        wide = [tokens, tokens, tokens if drafted else 0, requests, requests, 6 * (tokens if guesses else requests)]
        wide += [self._sequences, *[requests * guesses] * 2, self._sequences * guesses, *[tokens] * pools]
        narrow = [self._sequences + 1, self._sequences, *[self._sequences * width] * pools]
        self._wide, self._buffer = len(wide), InputBuffer(wide, narrow, newest.device)
        parts = self._buffer.parts
        self._positions, self.ids, self.following, self.slots, last, self.draws, self._entries = parts[:7]
        self.first, self.guessed, self._before = parts[7:10]
        self._writes = parts[10 : self._wide]
        self._offsets, self._lengths, *self._tables = parts[self._wide :]
        self.rows = last if prefills and not guesses else None
        # On the host bounds alone. Sequences that decode have 1, and others may have no more.
        most = max(2, min(tokens, cache.capacity))
        self._most = (1,) * decodes + (most,) * (self._sequences - decodes)
        self._bounds = (min(cache.capacity, width * cache.blocks.size),) * self._sequences
        self.fill(cache, [], [], [], [], None, [], [])

    def inputs(self) -> tuple[Tensor, PackedSequences]:
        """Return tokens and sequences, anew for each run, as they remember what follows from them."""
        ids, sequences = self._newest.decode(self.ids), self._given()
        return ids, self._newest.locate(sequences, self._before) if self._newest.num_speculative_tokens else sequences

    def _given(self) -> PackedSequences:
        each = [
            Pages(
                table.view(self._sequences, -1),
                self._lengths,
                self._offsets,
                write,
                self._entries,
                self._cache.blocks.size,
                self._most,
                self._bounds,
                continued=True,
                recorded=True,
            )
            for write, table in zip(self._writes, self._tables, strict=True)
        ]
        pages = replace(each[0], spans=dict(zip(self._cache.blocks.spans, each[1:], strict=True)))
        size = self.dimensions
        nominal, uniform = self._most, (size.token_count, 1)
        if not size.prefill_req_count:
            return PackedSequences(nominal, self._offsets, self._positions, uniform, pages=pages)
        nominal = (1,) * size.decode_req_count + (0,) * size.prefill_req_count
        nominal += (size.token_count - size.decode_req_count,)
        return PackedSequences(nominal, self._offsets, self._positions, pages=pages)

    def fill(
        self,
        cache: Cache,
        slots: Sequence[int],
        totals: Sequence[int],
        fresh: Sequence[Sequence[int]],
        places: Sequence[int],
        draws: NDArray[np.int64] | None,
        guessed: Sequence[int],
        following: Sequence[int],
    ) -> None:
        """Copy a step's sequences to the device.

        Args:
            cache: where they lie.
            slots: their slots.
            totals: their numbers of stored tokens, with the new ones.
            fresh: their new tokens.
            places: rows that are sampled.
            draws: ``[6, n]``, how. None: it does not matter.
            guessed: see :meth:`StepGraphs.run`.
            following: the token after each, for a draft.
        """
        with self._buffer.filled() as parts:
            self._describe(parts, cache, slots, totals, fresh, places, draws, guessed, following)

    def _describe(
        self,
        parts: Sequence[NDArray[Any]],
        cache: Cache,
        slots: Sequence[int],
        totals: Sequence[int],
        fresh: Sequence[Sequence[int]],
        places: Sequence[int],
        draws: NDArray[np.int64] | None,
        guessed: Sequence[int],
        following: Sequence[int],
    ) -> None:
        size = self.dimensions
        positions, ids, after, own, last, own_draws, entries, first, more, before, *writes = parts[: self._wide]
        offsets, lengths, *tables = parts[self._wide :]
        after[: len(following)], after[len(following) :] = following, 0
        counts, rows = np.array([*map(len, fresh)], np.int64), np.asarray(slots, np.int64)
        count, tokens = len(counts), int(counts.sum())
        own[count:], last[count:], entries[:] = cache.dummy_slot, 0, cache.dummy_slot
        positions[tokens:], ids[tokens:] = 0, 0
        # Where each sequence is among those of the graph: places that decode, then those for prefill.
        decodes = int((counts == 1).cumprod().sum())
        decodes = min(decodes, size.decode_req_count)
        place = np.arange(count)
        place[decodes:] += size.decode_req_count - decodes
        if size.prefill_req_count:
            queries = np.zeros(self._sequences, np.int64)
            queries[-1] = size.token_count - tokens
            lengths[:] = 0
        else:
            queries = np.ones(self._sequences, np.int64)
            lengths[:] = 1
        queries[place], entries[place] = counts, rows
        offsets[0] = 0
        offsets[1:] = np.cumsum(queries)
        if count:
            lengths[place] = totals
            ends = np.cumsum(counts)
            own[:count], last[:count] = rows, ends - 1
            sequence = np.repeat(np.arange(count), counts)
            positions[:tokens] = at = np.arange(tokens) + (np.asarray(totals) - ends)[sequence]
            ids[:tokens] = self._newest.encode(slots, fresh)
        if len(before):
            first[:], more[:], before[:] = 0, 0, -1
        if count and len(before):
            guesses = np.asarray(guessed, np.int64)
            own[:count][guesses < 0] = cache.dummy_slot
            first[:count], more[:count] = ends - 1 - guesses.clip(0), guesses.clip(0)
            most = [total - len(each) if each[0] == PENDING else -1 for total, each in zip(totals, fresh, strict=True)]
            before[place] = most
        for blocks, write, table in zip(cache.blocks.pools, writes, tables, strict=True):
            write[tokens:], table[:] = blocks.count * blocks.size, blocks.count
            if count:
                write[:tokens] = blocks.table[rows[sequence], at // blocks.size].astype(np.int64) * blocks.size
                write[:tokens] += at % blocks.size
                each = table.reshape(self._sequences, -1)
                known = blocks.table[rows, : each.shape[1]]
                each[place, : known.shape[1]] = known
        own_draws = own_draws.reshape(6, -1)
        own_draws[:] = PLAIN
        if draws is not None and len(places):
            own_draws[:, [*places]] = draws


PLAIN = np.array([0, *np.array([1.0]).view(np.int64), 0, ALL, 0, 0], np.int64)[:, None]
"""The most probable token."""
