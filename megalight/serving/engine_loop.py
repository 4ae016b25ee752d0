"""The loop around an engine, which all ways to generate share: requests in, text and tokens of each step out.

:class:`EngineLoop` runs in the thread that calls it. :class:`EngineThread` runs one in a thread of its own, so that
requests come in, and go, while a step runs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, MegalightError, integer
from megalight.inference import DynamicEngine, EngineStep, SamplingParams
from megalight.inference.blocks import BLOCK_SIZE
from megalight.inference.detokenizer import Detokenizer
from megalight.inference.grammar import Grammar, GrammarCompiler, GrammarSource
from megalight.inference.parallel import GenerativeModel
from megalight.inference.scheduler import Completion, Reason
from megalight.inference.speculator import EagleSpeculator, load_draft
from megalight.inference.text_requests import is_text
from megalight.inference.weights import LoadedWeights, NewWeights
from megalight.models.hf_causal_lm.config import UNBOUNDED
from megalight.serving.asynchronous import Queue
from megalight.serving.engine_status import EngineStatus

log = logging.getLogger(__name__)
KEPT_GRAMMARS = 64
"""How many compiled grammars a loop keeps, for requests to come."""
IDLE_SECONDS = 0.01
"""Time after which an idle replica asks again whether others, with which it shares experts, run a pass."""
END = 1
"""The number by which replicas that share experts meet to end."""
LOST_SECONDS = 2
"""Time after which a rank tells that it has lost the others."""


CACHE_TOKENS = 65_536
"""Tokens for which the cache has room where nobody says otherwise, if the model's longest sequence fits."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine, and who guesses.

    Attributes:
        cache_tokens: tokens for which the cache has room. None: 65,536, or as many as ``max_sequences`` sequences can
            have, and at least the model's longest sequence.
        max_sequences: maximum number of sequences in a step.
        step_tokens: maximum number of tokens in a step. Longer prompts run in parts.
        kv_cache_dtype: ``auto`` or ``fp8``; see :class:`~megalight.inference.DynamicEngine`.
        batch_invariant: see :class:`~megalight.inference.DynamicEngine`.
        draft: the checkpoint of a draft model (EAGLE-3), which guesses tokens; see
            :mod:`megalight.inference.speculator`. None: nobody does.
        num_speculative_tokens: the most that it guesses after a token.
    """

    cache_tokens: int | None = None
    max_sequences: int = 64
    step_tokens: int = 512
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
    draft: str | os.PathLike[str] | None = None
    num_speculative_tokens: int = 4

    def num_blocks(self, longest: int) -> int:
        """Return the number of blocks of a cache, for sequences of at most ``longest`` tokens.

        Raises:
            ConfigurationError: a number is out of range.
        """
        tokens = self.cache_tokens
        if tokens is None:
            longest = CACHE_TOKENS if longest == UNBOUNDED else longest
            tokens = max(longest, min(CACHE_TOKENS, integer("max_sequences", self.max_sequences) * longest))
        return -(-integer("cache_tokens", tokens) // BLOCK_SIZE)

    def engine(
        self, model: GenerativeModel, tokenizer: Tokenizer | None = None, *, first_rank_only: bool = False
    ) -> DynamicEngine:
        """Return a new engine. With a tokenizer, that of the draft must be the same.

        Raises:
            ConfigurationError: a number is out of range; or see :class:`DynamicEngine`.
            CheckpointError, DataError: see :func:`~megalight.inference.speculator.load_draft`.
        """
        speculator = None
        if self.draft is not None:
            speculator = EagleSpeculator(load_draft(self.draft, model, tokenizer), model, self.num_speculative_tokens)
        return DynamicEngine(
            model,
            num_blocks=self.num_blocks(model.config.max_sequence_length),
            block_size=BLOCK_SIZE,
            max_sequences=self.max_sequences,
            step_tokens=self.step_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            batch_invariant=self.batch_invariant,
            speculator=speculator,
            first_rank_only=first_rank_only,
        )


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A request to an engine.

    Attributes:
        id: the caller's name of it. No other request that runs has the same.
        prompt: token ids.
        max_new_tokens: maximum length of the completion, in tokens.
        sampling_params: how tokens are chosen.
        ends: tokens that end the completion.
        stop: texts that end it, which they are no part of.
        seed: of its samples; None: another one each time.
        log_probs: whether outputs have the log-probabilities of their tokens.
        top_log_probs: for how many of the most probable tokens they have them, too, with ``log_probs``.
        prompt_log_probs: whether the first output has those of the prompt's tokens but the first.
        special_text: special tokens that the text has, as others have none.
        grammar: what the completion may be; None: anything.
        generated: tokens of the completion that another engine has given before. Outputs go on from there.

    Raises:
        ConfigurationError: a stop text is empty, or no text.
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    ends: Collection[int] = ()
    stop: Sequence[str] = ()
    seed: int | None = None
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    grammar: GrammarSource | None = None
    special_text: Collection[int] = ()
    generated: Sequence[int] = ()

    def __post_init__(self) -> None:
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(is_text(text) and text for text in texts):
            raise ConfigurationError(f"stop is {self.stop!r}; it must be a text, or a list of texts, none empty.")
        object.__setattr__(self, "stop", texts)


@dataclass(kw_only=True, slots=True)
class EngineOutput:
    """What a step gave one request.

    Attributes:
        id: the request.
        text: new text, which later outputs continue. It may be empty.
        tokens: new tokens.
        reason: why the completion ended; None: it goes on.
        log_probs: of the new tokens, before temperature, top-k and top-p; None: nobody asked.
        top_log_probs: for each new token the most probable ones with theirs; None: nobody asked.
        prompt_log_probs: with the first token, of the prompt's tokens but the first; None: nobody asked.
        cached_tokens: tokens of the prompt that did not run, because the prefix cache had them.
        weights_epoch: how often the weights had been replaced that gave its tokens.
        error: why the request was refused, or lost. Nothing follows.
    """

    id: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None
    log_probs: list[float] | None = None
    top_log_probs: list[dict[int, float]] | None = None
    prompt_log_probs: list[float] | None = None
    cached_tokens: int = 0
    weights_epoch: int = 0
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.reason is not None or self.error is not None


class OutputQueue:
    """What steps give several requests, for the task that waits for it.

    Attributes:
        unfinished: ids of those that have not ended.
    """

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self.unfinished = {request.id for request in requests}
        self._queue = Queue[EngineOutput]()
        self._error: Exception | None = None
        self.put, self.shutdown = self._queue.put_nowait, self._queue.shutdown

    async def get(self) -> list[EngineOutput]:
        """Return all that has come meanwhile, at least one output.

        Raises:
            Exception: the first error of an output, after those in front of it.
            QueueShutDown: nothing more comes.
        """
        if self._error is not None:
            raise self._error
        found, output = list[EngineOutput](), await self._queue.get()
        while output.error is None:
            found.append(output)
            if output.reason is not None:
                self.unfinished.discard(output.id)
            if self._queue.empty():
                return found
            output = self._queue.get_nowait()
        self._error = output.error
        return found or await self.get()


class _Spans:
    """A number of spans of time, and their seconds together."""

    def __init__(self) -> None:
        self.of: tuple[int, float] = (0, 0.0)

    def add(self, count: int, seconds: float) -> None:
        """Count spans."""
        self.of = (self.of[0] + count, self.of[1] + seconds)


class _Running:
    """A request in the engine.

    Attributes:
        came, first: when it came, and got its first token.
        new: number of its tokens since.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self.id, self.stops = request.id, bool(request.stop)
        self.came = self.first = time.perf_counter()
        self.new = 0
        self._read, self._text = 0, ""
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, request.prompt, request.stop, request.special_text)
        self.log_probs, self.prompt_log_probs = request.log_probs, request.prompt_log_probs
        for token in request.generated:
            self.read(token)
        # Their text was sent, too.
        self._read, self._text = 0, ""

    def read(self, token: int) -> None:
        """Decode the next token."""
        self._read += 1
        if self._detokenizer is not None:
            self._text += self._detokenizer.add(token)

    def stop(self, tokens: Sequence[int]) -> bool:
        """Decode the tokens that are new; return whether a stop text has come. The engine calls it."""
        for token in tokens[self._read :]:
            self.read(token)
        return self._detokenizer is not None and self._detokenizer.stopped

    def text(self, *, ended: bool) -> str:
        """Return the new text."""
        if ended and self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        text, self._text = self._text, ""
        return text


class EngineLoop:
    """An engine that speaks of requests by their ids, and of text.

    Args:
        engine: the engine, with no requests of others.
        tokenizer: decodes tokens; None: outputs have no text.
        ends: returns the tokens that end a text of a grammar.
        weights: those of the engine's model; None: no others may take their place.

    Attributes:
        paused: whether no step is to run.
        weights_epoch: how often weights were replaced.
        recalled: whether nobody wants any more what other replicas are waited for. May be set in any thread.
        rests: whether the last step ran no pass, here or on replicas that share experts.
    """

    def __init__(
        self,
        engine: DynamicEngine,
        tokenizer: Tokenizer | None,
        ends: Callable[[], Collection[int]] = tuple,
        weights: LoadedWeights | None = None,
    ) -> None:
        self.engine, self._tokenizer, self._weights = engine, tokenizer, weights
        self.paused, self.weights_epoch, self.recalled, self.rests = False, 0, False, True
        self._ends, self._compiling = ends, threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._grammars: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._running: dict[int, _Running] = {}
        self._numbers: dict[str, int] = {}
        self._steps = self._preempted = self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._step_seconds = 0.0
        self._first, self._between, self._ended = _Spans(), _Spans(), _Spans()

    @property
    def status(self) -> EngineStatus:
        """What the engine has, and has done. May be read in any thread."""
        blocks, rounds = self.engine.blocks, self.engine.draft_rounds
        running = self.engine.running
        return EngineStatus(
            running=running,
            waiting=max(0, len(self._numbers) - running),
            blocks=blocks.count,
            blocks_free=blocks.free,
            cache_tokens=blocks.count * BLOCK_SIZE,
            steps=self._steps,
            step_seconds=self._step_seconds,
            graphed=self.engine.step_log.graphed,
            preempted=self._preempted,
            weights_epoch=self.weights_epoch,
            drafted=tuple(rounds.drafted),
            accepted=tuple(rounds.accepted),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            first=self._first.of,
            between=self._between.of,
            ended=self._ended.of,
        )

    def grammar(self, source: GrammarSource) -> Grammar:
        """Return a compiled grammar. Other threads may call this before they add a request, so that no step waits.

        Raises:
            ConfigurationError: there is no tokenizer; or see :class:`GrammarCompiler`.
        """
        with self._compiling:
            if self._compiler is None:
                if self._tokenizer is None:
                    raise ConfigurationError("a grammar needs a tokenizer; give one.")
                self._compiler = GrammarCompiler(self._tokenizer, self.engine.model.config.vocab_size, self._ends())
            found = self._grammars.pop(source, None) or self._compiler.compile(source)
            self._grammars[source] = found
            if len(self._grammars) > KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
            return found

    def add(self, request: EngineRequest) -> None:
        """Add a request.

        Raises:
            ConfigurationError: there are stop texts and no tokenizer, or a request of this id runs; or see
                :meth:`grammar` and :meth:`DynamicEngine.add`.
            DataError: see :meth:`DynamicEngine.add`.
        """
        if request.id in self._numbers:
            raise ConfigurationError(f"a request {request.id!r} runs already; give each an id of its own.")
        if request.stop and self._tokenizer is None:
            raise ConfigurationError("stop needs a tokenizer; give one, or end tokens.")
        if request.grammar is not None and request.generated:
            raise ConfigurationError("a request with a grammar cannot go on in another engine; send it again.")
        running = _Running(request, self._tokenizer)
        number = self.engine.add(
            [*request.prompt, *request.generated],
            max_new_tokens=request.max_new_tokens - len(request.generated),
            sampling_params=request.sampling_params,
            eos_id=request.ends or None,
            stop=running.stop if request.stop else None,
            seed=request.seed,
            log_probs=request.log_probs,
            top_log_probs=request.top_log_probs,
            prompt_log_probs=request.prompt_log_probs,
            grammar=None if request.grammar is None else self.grammar(request.grammar),
        )
        self._running[number], self._numbers[request.id] = running, number
        self._prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Take a request out and its blocks back. Nothing happens if it has ended."""
        number = self._numbers.pop(request_id, None)
        if number is not None:
            del self._running[number]
            self.engine.cancel(number)

    def abort_all(self) -> None:
        """Take all requests out."""
        for request_id in [*self._numbers]:
            self.abort(request_id)

    def check_weights(self, weights: NewWeights) -> None:
        """Compare names and shapes of other weights with those of the model.

        Raises:
            ConfigurationError: those of this model cannot be replaced.
            CheckpointError: see :meth:`LoadedWeights.check`.
        """
        if self._weights is None:
            raise ConfigurationError("the model is not from a folder, so its weights cannot be replaced.")
        self._weights.check(weights)

    def update_weights(self, weights: NewWeights, epoch: int | None = None) -> int:
        """Replace the weights; return the new epoch. Requests go on from the tokens that they have.

        Keys and values of the old weights are forgotten, those of prefixes, too.

        Args:
            epoch: None: the next one.

        Raises:
            ConfigurationError, CheckpointError: see :meth:`check_weights`; nothing has changed.
        """
        self.check_weights(weights)
        assert self._weights is not None
        self.engine.reset_cache()
        self._weights.read(weights)
        self.weights_epoch = self.weights_epoch + 1 if epoch is None else epoch
        return self.weights_epoch

    @property
    def idle(self) -> bool:
        """Whether no request is left, or the loop is paused, or the engine suspended."""
        return not self._numbers or self.paused or self.engine.suspended

    def step(self) -> list[EngineOutput]:
        """Run one forward pass; return what it gave each request. See :meth:`DynamicEngine.step` for errors.

        Where replicas share experts, all of them call this again and again, also idle ones: each takes part in the
        passes of the others, and a paused or suspended one holds them all.
        """
        held, begin = self.paused or self.engine.suspended, time.perf_counter()
        step = self.engine.step(hold=True) if held else self.engine.step()
        self.rests = step is None
        if step is not None:
            self._step_seconds += time.perf_counter() - begin
        return [] if step is None else self._outputs(step)

    def settle(self, meet: int = 0) -> Iterator[list[EngineOutput]]:
        """Let replicas that share experts begin no pass any more; yield what those in flight give.

        With ``meet``, it ends when all of them do this with the same number, together, or when :attr:`recalled` is set.
        It does nothing for a replica of its own.
        """
        if not self.engine.shares_experts:
            return
        while True:
            step = self.engine.step(hold=True, meet=meet)
            if step is not None:
                yield self._outputs(step)
            elif self.engine.met or not meet or self.recalled:
                return

    def _outputs(self, step: EngineStep) -> list[EngineOutput]:
        self._steps += 1
        self._preempted += len(step.preempted)
        self._cached_tokens += sum(step.shared.values())
        self._completion_tokens += len(step.tokens)
        outputs, now = [], time.perf_counter()
        for number in {**step.shared, **step.tokens, **step.finished}:
            # A pass that ran ahead may tell of a request that was aborted since.
            if (running := self._running.get(number)) is None:
                continue
            tokens = [step.tokens[number]] if number in step.tokens else []
            if tokens and not running.stops:
                running.read(tokens[0])
            completion = step.finished.get(number)
            if tokens and not running.new:
                running.first = now
                self._first.add(1, now - running.came)
            running.new += len(tokens)
            log_probs, top, prompt = self._log_probs(number, running, completion, len(tokens))
            outputs.append(
                EngineOutput(
                    id=running.id,
                    text=running.text(ended=completion is not None),
                    tokens=tokens,
                    reason=None if completion is None else completion.reason,
                    log_probs=log_probs,
                    top_log_probs=top,
                    prompt_log_probs=prompt,
                    cached_tokens=step.shared.get(number, 0),
                    weights_epoch=self.weights_epoch,
                )
            )
            if completion is not None:
                del self._running[number], self._numbers[running.id]
                self._ended.add(1, now - running.came)
                self._between.add(max(0, running.new - 1), now - running.first)
        return outputs

    def _log_probs(
        self, number: int, running: _Running, completion: Completion | None, new: int
    ) -> tuple[list[float] | None, list[dict[int, float]] | None, list[float] | None]:
        if not (running.log_probs or running.prompt_log_probs):
            return None, None, None
        if completion is None:
            log_probs, top, prompt = self.engine.log_probs(number)
        else:
            log_probs, top, prompt = completion.log_probs, completion.top_log_probs, completion.prompt_log_probs
        wanted = new and running.prompt_log_probs
        running.prompt_log_probs = running.prompt_log_probs and not wanted
        return (
            None if log_probs is None else log_probs[len(log_probs) - new :],
            None if top is None else top[len(top) - new :],
            prompt if wanted else None,
        )


@dataclass(frozen=True)
class Abort:
    """A command: take the request of this id out."""

    id: str


Command = EngineRequest | Abort | Callable[[EngineLoop], None]
"""What :class:`EngineThread` does between steps."""


class EngineThread:
    """Runs an :class:`EngineLoop` in a thread, which ends with the first error of a step.

    Where replicas share experts, an idle one asks the others every few milliseconds whether they run a pass.

    Args:
        loop: the loop, which nobody else uses meanwhile.
        sink: called in the thread with the outputs of each step.
        failed: called in the thread with the error that ended it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        sink: Callable[[list[EngineOutput]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._loop, self._sink, self._failed = loop, sink, failed
        self._shares_experts = loop.engine.shares_experts
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="megalight-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Do something before the next step. A request that is refused gets an output with the error."""
        self._commands.put(command)

    def close(self) -> None:
        """End the thread after the step that runs, and take all requests out. Replicas that share experts end together,
        so each of them must be closed.
        """
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                if outputs := self._loop.step():
                    self._sink(outputs)
            for _ in self._loop.settle(END):
                pass  # all requests are out
        except BaseException as error:
            if self._shares_experts:
                # If another replica has ended, whoever started this one ends it meanwhile.
                time.sleep(LOST_SECONDS)
            log.exception("the engine has stopped")
            self._failed(error)

    def _obey(self) -> bool:
        """Follow all commands, and wait for one if there is nothing else to do; return whether the thread goes on."""
        shares, rests = self._shares_experts, self._loop.rests
        while (rests if shares else self._loop.idle) or not self._commands.empty():
            try:
                command = self._commands.get(timeout=IDLE_SECONDS if shares else None)
            except Empty:
                return True
            rests = False
            if command is None:
                self._loop.abort_all()
                return False
            if isinstance(command, EngineRequest):
                try:
                    self._loop.add(command)
                except MegalightError as error:
                    self._sink([EngineOutput(id=command.id, error=error)])
            elif isinstance(command, Abort):
                self._loop.abort(command.id)
            else:
                command(self._loop)
        return True
