"""Continuous batching (dynamic inference): requests that come at any time run together.

Each step is one forward pass. It runs the newest token of running requests, and parts of prompts,
packed. Keys and values lie in blocks, which a request takes as it grows and gives back when it ends.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

from megalight.errors import ConfigurationError, DataError, MegalightError, boolean, integer
from megalight.inference.blocks import BLOCK_SIZE, BlockPool, span_counts
from megalight.inference.cache import Cache
from megalight.inference.engine_memory import (
    CacheForms,
    HostWeights,
    ManagedPages,
    Memory,
    addresses_of,
    check_free,
    check_memory,
    layers_of,
    managed_memory,
    managed_weights,
)
from megalight.inference.grammar import Grammar, GrammarSource
from megalight.inference.parallel import GenerativeModel, ParallelGPT, device_of, generative
from megalight.inference.passes import NOT_FINITE, EngineStep, OpenStep, PassesInFlight
from megalight.inference.prompts import check_prompts, end_ids, new_seed
from megalight.inference.request_record import (
    RequestError,
    RequestEvent,
    RequestEventKind,
    RequestRecord,
    RequestStatus,
)
from megalight.inference.sampling import LARGEST_SEED, SamplingParams, check_seed
from megalight.inference.scheduler import Completion, Request, Scheduler, Stop
from megalight.inference.speculator import DraftRounds, EagleSpeculator, Speculator
from megalight.inference.step_log import StepLog
from megalight.models.gpt import GPTConfig
from megalight.models.hf_causal_lm import HFConfig
from megalight.nn.adapter import AdapterSet
from megalight.nn.attention import InnerAttention
from megalight.nn.gated_delta_net import GatedDeltaNet
from megalight.nn.mamba2 import Mamba2
from megalight.nn.short_conv import ShortConv
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.paged_attention import PAGE_SIZES, PAGED_ATTENTION
from megalight.parallel.virtual_memory import VirtualMemory, why_not
from megalight.types import AttentionSpan

_Call = tuple[str, tuple[Any, ...]]
"""A method, and its arguments."""
MOST = 2**31 - 1
"""The largest number of blocks, and of tokens of a block or a step: tables of blocks are int32."""
MOST_COMPLETIONS = 2**16
"""The largest ``n`` and ``max_sequences``: the host keeps a list for each."""


class DynamicEngine:
    """Completes requests together, each as if it were alone.

    A completion follows from its own request, not from others, from how its prompt was divided, or from preemption: it
    has its own random numbers. Logits are equal up to rounding, as shapes of products differ.

    On a model that is divided over ranks, all ranks of a replica make the same calls. Or the first of them makes all
    calls, and the others call :meth:`follow`.

    Args:
        model: a whole model on any device, or this rank's part of a model; or a causal language model of
            ``transformers`` whose layers use the attention interface. Its weights may change while the engine is
            suspended, and after :meth:`reset_cache`.
        num_blocks: blocks of the cache. Each layer has ``num_blocks * block_size`` rows; one with a window or chunks
            has fewer, if ``max_sequences`` sequences see fewer. Or give ``cache_memory``.
        cache_memory: the memory of the cache on this rank: a number of bytes; or, between 0 and 1, a share of the
            memory that is free beside weights and a forward pass. All ranks take the smallest number of blocks.
        block_size: tokens of a block; None: what the backend of attention needs, or 16.
        max_sequences: maximum number of sequences in a step.
        step_tokens: maximum number of tokens in a step. Longer prompts run in parts.
        kv_cache_dtype: ``auto``: keys and values are stored in the dtype of the layers. ``fp8``: in e4m3, each head of
            each token with its own scale; of latents each token.
        attention_backend: of attention to stored keys and values: ``auto``, or a name of
            :mod:`megalight.ops.paged_attention`, such as ``flash_attn``, ``flashinfer`` or
            ``flash_mla``.
        cuda_graphs: for about how many numbers of tokens steps are recorded, where they can be
            (:class:`~megalight.inference.graphs.StepGraphs`). 0: for none.
        cuda_graph_mixed_prefill_count: for how many prompts recorded steps have room beside sequences that decode. 0:
            steps with prompts are not recorded.
        speculator: guesses tokens, which a pass checks together; see :mod:`megalight.inference.speculator`. A step
            still gives one token of each request; those that were guessed come without a pass.
        memory_level: 0: the cache is in the device's own memory, at addresses that stay where the driver can map memory
            (:mod:`megalight.parallel.virtual_memory`): graphs survive a suspend, but the first one with weights. 1: it
            is in managed memory. 2: the weights are moved there, too. Without such memory on a rank, it warns and
            takes 0.
        first_rank_only: on a divided model, the first rank of a replica makes all calls, and tells the other ranks.
        sampling_params: those of requests that have none; it warns, as each request should have its own.
        step_log: a file to which a line of JSON is appended for each step: its dimensions, those of its graph and how
            often that was used, and seconds. None: nothing is written.
        batch_invariant: log-probabilities of tokens are bitwise those of a training forward in
            :func:`~megalight.ops.batch_invariant.batch_invariant_mode`, whatever else runs, however prompts are
            divided or shared, with graphs and without. Steps take longer.

    Attributes:
        step_log: counts of steps, and the last one (:class:`~megalight.inference.step_log.StepLog`).
        blocks: who has which blocks.
        num_blocks: of layers that see all tokens.
        suspended: whether the cache is given back.
        met: whether the last step found the same ``meet`` on all replicas that share experts.
        memory_level: the level that all ranks have.

    Raises:
        ConfigurationError: a number is no integer of at least 1, no block fits into ``cache_memory``, a layer has no
            state, or what a token becomes depends on the others in its forward pass; or the model reads images; or it
            has parts that are not ``batch_invariant``.
    """

    def __init__(
        self,
        model: GenerativeModel | nn.Module,
        *,
        num_blocks: int | None = None,
        cache_memory: Memory | None = None,
        block_size: int | None = None,
        max_sequences: int = 64,
        step_tokens: int = 512,
        kv_cache_dtype: str = "auto",
        attention_backend: str = "auto",
        cuda_graphs: int = 16,
        cuda_graph_mixed_prefill_count: int = 16,
        speculator: Speculator | None = None,
        memory_level: int = 0,
        first_rank_only: bool = False,
        sampling_params: SamplingParams | None = None,
        step_log: Path | str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        model = generative(model)
        _check_model(model)
        if boolean("batch_invariant", batch_invariant):
            check_batch_invariant(model, kv_cache_dtype, attention_backend)
        if (num_blocks is None) == (cache_memory is None):
            raise ConfigurationError("an engine needs either num_blocks or cache_memory, not both.")
        num_blocks = None if num_blocks is None else integer("num_blocks", num_blocks, 1, MOST)
        cache_memory = None if cache_memory is None else check_memory(cache_memory)
        if sampling_params is not None:
            warnings.warn(
                "sampling_params of the engine are those of requests without their own; give them to each request "
                "(add).",
                stacklevel=2,
            )
        self._sampling_params = SamplingParams.of(sampling_params)
        _choose_attention(model, attention_backend)
        if block_size is None:
            block_size = PAGE_SIZES.get(attention_backend, BLOCK_SIZE)
        block_size = integer("block_size", block_size, 1, MOST)
        max_sequences = integer("max_sequences", max_sequences, 1, MOST_COMPLETIONS)
        step_tokens = integer("step_tokens", step_tokens, 1, MOST)
        if kv_cache_dtype not in ("auto", "fp8"):
            raise ConfigurationError(f"kv_cache_dtype is {kv_cache_dtype!r}; choose 'auto' or 'fp8'.")
        quantized = kv_cache_dtype == "fp8"
        self._model = model
        self._parallel = model if isinstance(model, ParallelGPT) else None
        capacity = model.config.max_sequence_length
        # A share of the free memory is what the largest pass leaves.
        largest = min(step_tokens, capacity) if isinstance(cache_memory, float) else 1
        if speculator is not None and not isinstance(speculator, Speculator):
            raise ConfigurationError(
                f"speculator is {speculator!r}; it must be a Speculator, such as NGramSpeculator()."
            )
        eagle = speculator if isinstance(speculator, EagleSpeculator) else None
        forms = CacheForms.of(model, largest, block_size, eagle, quantized)
        # Texts begin in the order in which they came, so few beginnings are wanted at a time.
        snapshots = -(-max_sequences // 16)
        # Stages may have other layers, and must plan the same.
        spans = {*forms.token_bytes}
        spans = spans if self._parallel is None else self._parallel.union(spans)
        limited = sorted((span for span in spans if span is not None), key=str)

        def counts(number: int) -> dict[AttentionSpan | None, int]:
            own = span_counts(limited, number, block_size, max_sequences, step_tokens)
            return dict[AttentionSpan | None, int]({None: number}) | own

        most = max_sequences * -(-capacity // block_size)
        if num_blocks is None:
            assert cache_memory is not None
            num_blocks = forms.blocks(cache_memory, counts, block_size, max_sequences + snapshots + 1, most)
            num_blocks = num_blocks if self._parallel is None else self._parallel.least(num_blocks)
        # Without layers that see all tokens, blocks for all tokens are only numbers.
        count, held = num_blocks if None in spans or not limited else most, counts(num_blocks)
        self.num_blocks = num_blocks
        self.blocks = BlockPool(max_sequences, count, block_size, snapshots, {span: held[span] for span in limited})
        # Models of transformers may have no bound.
        capacity = min(capacity, count * block_size)
        cache = Cache(layers_of(model, eagle), max_sequences, capacity, self.blocks, quantized)
        drafts = [] if speculator is None or speculator.draft is None else [speculator.draft]
        # What graphs read.
        self._modules, self._addresses, device = nn.ModuleList([model, *drafts]), list[int](), device_of(model)
        managed = managed_memory(device, self._every) if integer("memory_level", memory_level, 0, 2) else None
        self.memory_level = 0 if managed is None else memory_level
        # Agreed, as graphs of all ranks are kept or none.
        fixed = self._every(why_not(device) is None)
        own = VirtualMemory(device) if fixed else None
        self._held_weights: HostWeights | ManagedPages = HostWeights(self._modules, own)
        self._held_cache: Cache | ManagedPages = cache
        if managed is None:
            cache.lie_in(VirtualMemory(device) if fixed else None)
            cache.allocate(forms.forms)
        else:
            if memory_level == 2:
                self._held_weights = ManagedPages(managed, managed_weights(self._modules, managed))
            check_free(managed, forms.bytes(held, block_size, cache.dummy_slot + 1))
            with managed.allocating():
                cache.allocate(forms.forms)
            self._held_cache = ManagedPages(managed, cache.tensors)
        # Ranks of a replica may hold different layers, and must plan the same.
        self._scheduler = Scheduler(cache, step_tokens, states=not self._every(cache.reversible))
        self._requests: dict[int, Request] = {}
        self.step_log = StepLog(step_log)
        self._passes = PassesInFlight(
            model,
            self._scheduler,
            self._requests,
            cuda_graphs,
            cuda_graph_mixed_prefill_count,
            speculator,
            self.step_log,
            batch_invariant,
        )
        if speculator is not None and (self.shares_experts or self._scheduler.states):
            raise ConfigurationError(
                "some layers keep one state for all earlier tokens (Mamba, convolutions), which cannot forget a wrong "
                "guess, or experts are on ranks of several replicas, which run equally often. Leave the speculator or "
                "the draft out."
            )
        self._leads = self._follows = False
        if boolean("first_rank_only", first_rank_only) and self._parallel is not None:
            self._leads, self._follows = self._parallel.first, not self._parallel.first
        self._calls: list[_Call] = []
        self._compile: Callable[[GrammarSource, frozenset[int]], Grammar] | None = None
        self._agreement: Callable[[], list[int]] | None = None
        self._count = 0
        self._seeds: Generator | None = None
        # Kept after an error: the step that it stopped, and the completions that `run` has not returned.
        self._open: OpenStep | None = None
        self._ended: dict[int, Completion] = {}
        self._finished: dict[int, RequestRecord] = {}
        self.suspended = self.met = False

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
            n: how many completions, at most 65,536. The numbers of the others follow that of the first, as their seeds
                do (0 follows the largest). The prompt runs once, but for the tokens after its last full block.
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
        boolean("log_probs", log_probs, " top_log_probs says how many of the most probable tokens have theirs.")
        boolean("processed_log_probs", processed_log_probs)
        boolean("prompt_log_probs", prompt_log_probs)
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
        for place in range(integer("n", n, 1, MOST_COMPLETIONS)):
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
            # What a request does after each token, its first rank alone knows. Each rank compiles its grammar.
            told = replace(request, tokens=[*prompt], stop=None, matcher=None)
            self._tell("_enter", told, *(() if grammar is None else (grammar.source, grammar.ends)))
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

    def log_probs(self, number: int) -> tuple[list[float] | None, list[dict[int, float]] | None, list[float] | None]:
        """Return those of a request so far, which grow: of its tokens, of the most probable ones, of its prompt.

        None: nobody asked; see :class:`Completion`.

        Raises:
            DataError: there is no such request, or it has ended.
        """
        if number not in self._requests:
            raise DataError(f"there is no request {number}, or it has ended.")
        request = self._requests[number]
        return request.log_probs, request.top_log_probs if request.top_count else None, request.prompt_log_probs

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
        sampling_params = SamplingParams(**record.sampling_params)
        sampling_params.check(self._model.config.vocab_size, merged.max_new_tokens)
        request = Request(
            self._count,
            tokens,
            len(merged.prompt),
            merged.max_new_tokens,
            sampling_params,
            end_ids(self._model, record.ends),
            stop,
            check_seed(record.seed),
            merged.log_probs,
            integer("top_log_probs", record.top_count, 0, self._model.config.vocab_size),
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
        elif self.suspended or self._scheduler.unread(request) > 1 or len(request.tokens) == request.prompt_length:
            status = RequestStatus.ACTIVE_BUT_NOT_GENERATING_TOKENS
        return request.record(status)

    def _check_room(self, length: int, max_new_tokens: int) -> None:
        # The last token of a completion never runs.
        longest = length + max_new_tokens - 1
        if longest > self.blocks.longest:
            raise DataError(
                f"a prompt of {length} tokens and {max_new_tokens} new ones need {self.blocks.holding(longest)} "
                f"blocks of {self.blocks.size} tokens, and the cache has {self.num_blocks}: the request could never "
                "end. Lower max_new_tokens (--max-new-tokens), or raise num_blocks (--cache-tokens)."
            )

    def _enter(self, request: Request, source: GrammarSource | None = None, ends: frozenset[int] = frozenset()) -> None:
        if source is not None:
            if self._compile is None:
                raise ConfigurationError("a request has a grammar, and follow() has no function that compiles it.")
            request.matcher = self._compile(source, ends).start()
        self._count = request.number + 1
        request.events.append(RequestEvent.now(RequestEventKind.ADD))
        self._requests[request.number] = request
        self._scheduler.waiting.append(request)

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
        self._scheduler.end(request)
        if self._open is not None:
            self._open.leave(request)
        if not self._requests:
            self._open = None
            self._passes.flights.clear()

    @property
    def model(self) -> GenerativeModel:
        """The model."""
        return self._model

    @property
    def unfinished(self) -> list[int]:
        """The numbers of requests that have not ended, in the order in which they came."""
        return list(self._requests)

    def step(self, *, hold: bool = False, meet: int = 0) -> EngineStep | None:
        """Run one forward pass; return what it did, or None if no request is left.

        If experts are on ranks of several replicas, all these replicas call this equally often, until it returns None.

        Args:
            hold: begin no pass. Replicas that share experts begin none either, once they know, so what changes on one
                of them changes while nothing is in flight: None says so.
            meet: hold, and set :attr:`met` when all of them do so with this number. 0: do not.

        Raises:
            ConfigurationError: the engine is suspended.
            Exception: what the forward pass raises: all requests then start again in the next step. Or what a ``stop``
                raises: the next step asks it again, and returns what this one did. Cancel the request to go on without.
        """
        self._check_asked()
        hold = hold or meet > 0
        if not hold:
            self._check_resumed()
        if self._calls or self.shares_experts or (self._requests and self._open is None):
            self._tell("_advance", self._open is not None, hold, meet)
        return self._advance(False, hold, meet)

    def _advance(self, kept: bool, hold: bool, meet: int) -> EngineStep | None:
        """Do what :meth:`step` does. ``kept``: no pass is run here, as the first rank still closes the last one."""
        if not self._another(hold, meet):
            return None
        self._finished.clear()
        if self._open is None and not kept:
            self._open = self._pass()
        elif self.shares_experts:
            self._passes.accompany()
        if self._open is None:
            return None
        step = self._open.close()
        self._open = None
        for number, completion in step.finished.items():
            request = self._requests.pop(number)
            self._scheduler.end(request)
            self._finished[number] = _ended(request, completion)
            if completion.reason == "stop":  # the other ranks do not know it
                self._tell("_leave", number)
        if not self._requests:
            self._passes.flights.clear()
        return step

    @property
    def shares_experts(self) -> bool:
        """Whether experts are on ranks of several replicas, which step equally often."""
        return self._parallel is not None and self._parallel.shares_experts

    def _another(self, hold: bool, meet: int) -> bool:
        """Return whether another pass follows, here or in a replica that shares experts."""
        wanted = bool(self._requests) and not hold
        if self._parallel is None or not self.shares_experts:
            return wanted
        own = [int(wanted), int(hold), meet, -meet]
        # The replicas agree while the pass before runs, so that none waits for another. At the end they accompany a
        # pass of nobody.
        if self._agreement is None or not _runs(self._agreement()):
            self._agreement = None
            most = self._parallel.most_of_replicas(own)
            self.met = most[2] == -most[3] > 0
            if not _runs(most):
                return False
        self._agreement = self._parallel.asking_replicas(own)
        return True

    def follow(self, grammar: Callable[[GrammarSource, frozenset[int]], Grammar] | None = None) -> None:
        """Do what the first rank of the replica is asked to do, until its :meth:`close`. The other ranks call this.

        Args:
            grammar: compiles the grammar of a request, whose text ends with one of the tokens. None: there are none.

        Raises:
            ConfigurationError: this rank is the first, or all ranks make the same calls; or there is a grammar.
        """
        if self._parallel is None or not self._follows:
            raise ConfigurationError(
                "this rank follows no other: it is the first rank of its replica, or all ranks make the same calls "
                "(first_rank_only=False)."
            )
        self._compile = grammar
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

    def _check_resumed(self) -> None:
        if self.suspended:
            raise ConfigurationError("the engine is suspended and has no cache; call resume() first.")

    def _pass(self) -> OpenStep:
        """Let passes begin, as many as may be in flight; return what the first of them gave."""
        passes, shares = self._passes, self.shares_experts
        try:
            # Replicas that share experts begin one pass in each step.
            begun = passes.begin(one=shares)
            if shares and not begun:
                passes.accompany()
            if shares and begun and len(passes.flights) < passes.depth:
                return OpenStep(EngineStep({}, {}, [], {}), deque())
            return passes.collect()
        except BaseException as error:
            # Out of memory, or stopped by the user: some layers have the new tokens, others do not.
            passes.abandon()
            for request in self._scheduler.running:
                request.events.append(RequestEvent.of(RequestError(request.number, f"a pass failed: {error!r}")))
            self._scheduler.preempt_all()
            self.blocks.prefixes.clear()
            raise

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
            weights: move the weights to the host, too, and those of a draft. They cannot run until :meth:`resume`.
        """
        self._check_asked()
        boolean("keep_cache", keep_cache)
        boolean("weights", weights)
        self._tell("_suspend", keep_cache, weights)
        self._suspend(keep_cache, weights)

    def _suspend(self, keep_cache: bool, weights: bool) -> None:
        for request in [] if self.suspended else self._scheduler.running:
            request.events.append(RequestEvent.now(RequestEventKind.PAUSE))
        if not keep_cache:
            self._restart()
        self._passes.drop_speculator()
        # Results of a pass that is on its way are on the host, or come there.
        if not self.suspended:
            self._addresses = addresses_of(self._modules)
        if not self.suspended or not keep_cache:
            self._held_cache.suspend(keep_cache)
        if weights:
            self._held_weights.suspend()
        if not (self._held_cache.addresses_stay and self._held_weights.addresses_stay):
            self._drop_graphs()
        self.suspended = True

    def _drop_graphs(self) -> None:
        # They hold addresses of what is gone.
        self._addresses.clear()
        if self._passes.graphs is not None:
            self._passes.graphs.drop()

    def resume(self) -> None:
        """Go on, with the weights that the model has now: after a suspend that kept the cache where requests were,
        otherwise from the first token of each.

        Raises:
            MegalightError: a rank cannot take the memory. The engine is still suspended; give memory back and call
                this again.
        """
        self._check_asked()
        self._tell("_resume")
        if (why := self._resume()) is not None:
            raise MegalightError(
                f"the engine is still suspended, as its memory cannot be taken: {why} Give memory back and call "
                "resume() again, or construct an engine with a smaller num_blocks or cache_memory."
            )

    def _resume(self) -> str | None:
        """Do what :meth:`resume` does, on all ranks or on none; return why not."""
        if not self.suspended:
            return None
        held, why = (self._held_cache, self._held_weights), None
        try:
            for each in held:
                each.allocate()
        except (torch.OutOfMemoryError, MegalightError) as error:
            why = str(error)
        if not self._every(why is None):
            for each in held:
                each.give_back()
            return why or "another rank of the replica has too little."
        for each in held:
            each.restore()
        # Training may have put weights elsewhere.
        if not self._every(self._addresses == addresses_of(self._modules)):
            self._drop_graphs()
        self.suspended = False
        return None

    def reset_cache(self) -> None:
        """Drop what is kept of all tokens, as the weights change now. No prefix is found, and requests start again
        with the next step, from the tokens that they have. Memory and CUDA graphs stay.
        """
        self._check_asked()
        self._tell("_reset_cache")
        self._reset_cache()

    def _reset_cache(self) -> None:
        if self.suspended:
            self._suspend(False, False)
            return
        self._restart()
        self._passes.drop_speculator()

    def _restart(self) -> None:
        self._passes.abandon()
        self._scheduler.preempt_all()
        self._scheduler.cache.clear()

    def _every(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks of the replica."""
        return flag if self._parallel is None else bool(self._parallel.least(int(flag)))

    def create_cuda_graphs(self, reset_context: bool = True) -> None:
        """Record all steps now. Otherwise decode steps are recorded when they are first needed, and steps with prompts
        are not. After a suspend that dropped them, each is recorded again when it is needed.

        Replicas that share experts call it together.

        Args:
            reset_context: whether running requests start again, and no prefix is found. Recording needs neither.

        Raises:
            ConfigurationError: the engine is suspended.
        """
        self._check_asked()
        self._check_resumed()
        self._tell("_create_cuda_graphs", reset_context)
        self._create_cuda_graphs(reset_context)

    def _create_cuda_graphs(self, reset_context: bool) -> None:
        if self._passes.graphs is None:
            return
        if reset_context:
            self._restart()
        self._passes.record()

    @property
    def running(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._scheduler.running)

    @property
    def draft_rounds(self) -> DraftRounds:
        """What became of the guesses of the speculator."""
        return self._passes.rounds

    def _new_seed(self) -> int:
        if self._seeds is None:
            # On the host, where it makes no one wait.
            seed = secrets.randbelow(LARGEST_SEED + 1) if self._leads else new_seed(self._model)
            self._seeds = Generator().manual_seed(seed)
        return int(torch.randint(2**62, (), generator=self._seeds))


def _runs(most: Sequence[int]) -> bool:
    """Return whether replicas run a pass: one wants it, and none holds."""
    return bool(most[0]) and not most[1]


def _ended(request: Request, completion: Completion) -> RequestRecord:
    if completion.reason == "error":
        reason = NOT_FINITE if request.matcher is None else f"{NOT_FINITE}, or its grammar needs too much work"
        error = RequestError(request.number, reason, is_transient=False)
        request.events += [RequestEvent.of(error), RequestEvent.now(RequestEventKind.FAIL)]
        return request.record(RequestStatus.FAILED)
    request.events.append(RequestEvent.now(RequestEventKind.FINISH))
    return request.record(RequestStatus.COMPLETED)


UNCOVERED = (Mamba2, GatedDeltaNet, ShortConv, AdapterSet)
"""Modules without a batch-invariant form."""


def check_batch_invariant(model: GenerativeModel, kv_cache_dtype: str, attention_backend: str) -> None:
    """Check that a model can run in batch-invariant mode.

    Raises:
        ConfigurationError: it cannot, with what stands against it.
    """
    if isinstance(model.config, HFConfig):
        why = "the code of transformers computes norms and products in its own ways"
    elif isinstance(model, ParallelGPT) and max(model.mesh.tp, model.mesh.cp, model.mesh.ep) > 1:
        why = "sums over tensor-, context- or expert-parallel ranks are rounded as messages are divided"
    elif kv_cache_dtype != "auto":
        why = f"kv_cache_dtype is {kv_cache_dtype!r}, and a training forward does not read keys in 8 bits"
    elif attention_backend != "auto":
        why = f"attention_backend is {attention_backend!r}, and all passes, of training too, have one kernel of ours"
    elif (found := next((each for each in model.modules() if isinstance(each, UNCOVERED)), None)) is not None:
        why = f"{type(found).__name__} has no batch-invariant form"
    elif any(precision_of(each) is not None for each in model.parameters()):
        why = "scales of products in 8 or 4 bits follow from the whole batch"
    else:
        return
    raise ConfigurationError(f"batch_invariant=True cannot hold: {why}. Leave it out, or change that.")


def _choose_attention(model: GenerativeModel, backend: str) -> None:
    """Let all layers read stored keys and values by a backend.

    Raises:
        BackendError: there is none of this name.
        ConfigurationError: the layers are those of ``transformers``.
    """
    PAGED_ATTENTION.check(backend)
    if backend != "auto" and isinstance(model.config, HFConfig):
        raise ConfigurationError(
            f"attention_backend is {backend!r}, and this is a model of transformers with its own code; leave it auto."
        )
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.paged_backend = backend


def _check_model(model: GenerativeModel) -> None:
    # VLM keeps its own configuration in the place of the language model's.
    config: object = model.config
    if isinstance(config, HFConfig):
        return
    if not isinstance(config, GPTConfig):
        raise ConfigurationError("the engine completes text alone, and this model reads images; use generate.")
    if config.moe is not None and (config.moe.capacity is not None or config.moe.router.force_balance):
        raise ConfigurationError(
            "moe.capacity or moe.router.force_balance is set: which experts see a token depends on the other tokens of "
            "its forward pass, so requests would change each other. Use generate without a draft, or a model without "
            "them."
        )
