"""Generate in Python: :class:`LLM` for many prompts at once, :class:`AsyncLLM` for requests that come at any time."""

from __future__ import annotations

import asyncio
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import lightning.pytorch as pl
import torch

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.chat.template import ChatTemplate
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, LayoutError, MegalightError, integer
from megalight.evaluation import Continuation, LogLikelihood, log_likelihoods
from megalight.inference import SamplingParams, TextGenerator
from megalight.inference.blocks import BLOCK_SIZE
from megalight.inference.grammar import GrammarSource
from megalight.inference.parallel import GenerativeModel
from megalight.inference.scheduler import Reason
from megalight.inference.text import NEW_TOKENS, begun
from megalight.inference.weights import LoadedWeights, NewWeights
from megalight.parallel.mesh import ParallelMesh, join_ranks
from megalight.serving.asynchronous import QueueShutDown, get_asyncio_loop
from megalight.serving.embeddings import EmbeddingModel, EmbeddingOutput, has_embeddings
from megalight.serving.engine_loop import (
    Abort,
    EngineLoop,
    EngineOptions,
    EngineOutput,
    EngineRequest,
    EngineThread,
    OutputQueue,
)
from megalight.serving.engine_status import EngineStatus
from megalight.serving.rank_processes import LedWeights, RankProcesses, ReplicaRanks
from megalight.strategies.inference import InferenceModel, model_of

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": "user", "content": "Hello"}]``."""


NO_EMBEDDINGS = "generates text, and has no embeddings; ask a model that was trained for them."
InFlight: TypeAlias = Literal["keep", "wait"]
"""What becomes of requests that run when weights are replaced."""
T = TypeVar("T")


def check_in_flight(in_flight: str) -> None:
    """Refuse another word than those of :data:`InFlight`.

    Raises:
        ConfigurationError: it is one.
    """
    if in_flight not in get_args(InFlight):
        raise ConfigurationError(f"in_flight is {in_flight!r}; choose 'keep' or 'wait'.")


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A completion.

    Attributes:
        text: the new text, up to a stop text. Empty without a tokenizer.
        tokens: its tokens, with the one that ended it.
        reason: why it ended: an ``end`` token, a ``stop`` text, its ``length``, or an ``error``: NaN or infinity in the
            logits.
        log_probs: of its tokens, before temperature, top-k and top-p; None: nobody asked.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that did not run, because the prefix cache had them.
    """

    text: str
    tokens: list[int]
    reason: Reason
    log_probs: list[float] | None
    prompt_tokens: int
    cached_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens, under the names of OpenAI's API."""
        new = len(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }


@dataclass(kw_only=True)
class ModelText:
    """What requests to a model are made of. The weights may be in other processes.

    Attributes:
        tokenizer: converts text to token ids and back; None: prompts are ids, and completions have no text.
        ends: tokens that end a completion.
        start: tokens that are put before texts that do not begin with them.
        max_sequence_length: of the model, in tokens.
        num_blocks: blocks of an engine's cache.
    """

    tokenizer: Tokenizer | None
    ends: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    vocab_size: int
    max_sequence_length: int
    num_blocks: int

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template.

        Raises:
            DataError: there is none.
        """
        return ChatTemplate.of(self.words)

    @cached_property
    def template_ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.template.ends(self.words))

    def grammar_ends(self) -> frozenset[int]:
        """Return the tokens that end a text of a grammar: those of documents, and of answers if there is a template."""
        return self.ends if self.words.chat_template is None else self.ends | self.template_ends

    @property
    def words(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigurationError: there is none.
        """
        if self.tokenizer is None:
            raise ConfigurationError("there is no tokenizer, so prompts must be token ids; give tokenizer=, too.")
        return self.tokenizer

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. An empty text is the end of a document, as in front of a new one.

        Raises:
            ConfigurationError: it is a text, and there is no tokenizer.
            DataError: the text holds half of a surrogate pair.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        eod = self.words.eod_id
        return begun(self.words.encode(prompt), self.start) or ([] if eod is None else [eod])

    def chat_ids(self, messages: Messages, tools: list[Any] | None = None) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            DataError: there is no template, or it refuses the messages.
        """
        return self.ids_of(self.template.render(messages, tools, answer=True))

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens a completion of this prompt can have: the model's, and the cache's; at least 1."""
        return max(1, min(self.max_sequence_length, self.num_blocks * BLOCK_SIZE + 1) - len(prompt))


@dataclass(kw_only=True)
class ServedModel(ModelText):
    """A model with its tokenizer and its engine: what :class:`LLM` and :class:`AsyncLLM` have in common.

    Attributes:
        model: the model, whole or this rank's part.
        ranks: the processes that this one has started for other parts of the model.
        weights: the model's; None: no others may take their place.
    """

    model: GenerativeModel
    options: EngineOptions
    ranks: RankProcesses | None = None
    weights: LoadedWeights | None = None

    @classmethod
    def of(
        cls,
        model: GenerativeModel,
        tokenizer: Tokenizer | None,
        ends: frozenset[int],
        start: tuple[int, ...] = (),
        options: EngineOptions | None = None,
    ) -> ServedModel:
        """Return one for a model."""
        options, longest = options or EngineOptions(), model.config.max_sequence_length
        return cls(
            tokenizer=tokenizer,
            ends=ends,
            start=start,
            vocab_size=model.config.vocab_size,
            max_sequence_length=longest,
            num_blocks=options.num_blocks(longest),
            model=model,
            options=options,
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        tensor_parallel: int = 1,
        replica: ReplicaRanks | None = None,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
        **weights: Any,
    ) -> ServedModel:
        """Load a model; see :class:`LLM`. ``replica``: its ranks, if experts are divided."""
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        world, ranks = int(os.environ.get("WORLD_SIZE") or 1), None
        if integer("tensor_parallel", tensor_parallel) != world and world > 1:
            raise LayoutError(
                f"tensor_parallel is {tensor_parallel}, and there are {world} processes; start the program by torchrun "
                f"--nproc-per-node {tensor_parallel}, or by itself."
            )
        mesh: ParallelMesh | None
        if tensor_parallel > world or replica is not None:
            replica = replica or ReplicaRanks(tensor_parallel=tensor_parallel)
            ranks = RankProcesses(path, replica, where, options or EngineOptions(), weights)
            mesh, where = ranks.mesh, ranks.device
        else:
            mesh, where = join_ranks(where, tp=tensor_parallel)
        try:
            found = TextGenerator.from_checkpoint(path, device=where, mesh=mesh, **weights)
            served = cls.of(found.model, found.tokenizer, frozenset(found.all_ends()), found.start, options)
            served.ranks, served.weights = ranks, found.weights
            if ranks is not None:
                _ = served.loop  # the other ranks make theirs now
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        return served

    @cached_property
    def loop(self) -> EngineLoop:
        """The engine's loop, which the first caller makes."""
        engine = self.options.engine(self.model, self.tokenizer, first_rank_only=self.ranks is not None)
        engine.create_cuda_graphs()  # no request waits for a recording later
        weights = self.weights
        if self.ranks is not None and weights is not None:
            weights = LedWeights(weights, engine)
        return EngineLoop(engine, self.tokenizer, self.grammar_ends, weights)

    def close(self) -> None:
        """End the processes of the other ranks."""
        if self.ranks is not None:
            self.ranks.close()


class LLM:
    """A model that completes prompts together, in this process. Or an encoder, which gives :meth:`embed` alone.

    Args:
        path: a checkpoint, a run's folder (its newest checkpoint), a folder of ``transformers``, or a name of the
            Hugging Face Hub.
        tensor_parallel: number of processes that share every layer. This one starts the others, which end with it. Or
            torchrun has started all of them; then all make the same calls, and get the same results.
        tokenizer: a ``tokenizer.json``, its folder, or its name, to use instead of the one in ``path``.
        device: None: a GPU if there is one.
        dtype: dtype of the weights. None keeps the saved dtype.
        base: the weights that training began with, for a checkpoint of adapters.
        quantization: ``auto``: weights that were published in FP8 stay so; ``fp8``: those of all linear layers are
            stored in FP8; ``none``: all are widened.
        cache_tokens, max_sequences, step_tokens, kv_cache_dtype, batch_invariant, draft, guesses: see
            :class:`EngineOptions`.

    Raises:
        CheckpointError, DataError, ConfigurationError: see :meth:`TextGenerator.from_checkpoint`.
        LayoutError: there is another number of processes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tensor_parallel: int = 1,
        tokenizer: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        base: str | os.PathLike[str] | None = None,
        quantization: str = "auto",
        cache_tokens: int | None = None,
        max_sequences: int = 64,
        step_tokens: int = 512,
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
        draft: str | os.PathLike[str] | None = None,
        guesses: int = 4,
    ) -> None:
        self._trained: InferenceModel | None = None
        self._ids = itertools.count()
        self._served: ServedModel | None = None
        self._name, self._encoder = Path(os.fspath(path)).name, None
        if has_embeddings(path):
            self._encoder = EmbeddingModel(path, tokenizer=tokenizer, device=device, dtype=dtype)
            return
        self._served = ServedModel.from_checkpoint(
            path,
            tensor_parallel=tensor_parallel,
            device=device,
            options=EngineOptions(
                cache_tokens=cache_tokens,
                max_sequences=max_sequences,
                step_tokens=step_tokens,
                kv_cache_dtype=kv_cache_dtype,
                batch_invariant=batch_invariant,
                draft=None if draft is None else os.fspath(draft),
                guesses=guesses,
            ),
            tokenizer=tokenizer,
            dtype=dtype,
            base=base,
            quantization=quantization,
        )

    @property
    def served(self) -> ServedModel:
        """The model.

        Raises:
            ConfigurationError: it is an encoder.
        """
        if self._served is None:
            raise ConfigurationError(f"{self._name!r} is an encoder, which generates no text; ask for embeddings.")
        return self._served

    @classmethod
    def from_module(
        cls,
        module: pl.LightningModule,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        *,
        cache_tokens: int | None = None,
        max_sequences: int = 64,
        step_tokens: int = 512,
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
    ) -> LLM:
        """Return one for the model of a LightningModule: in a notebook, or between two training steps.

        Under :class:`~megalight.strategies.MegatronStrategy` it computes in the layout of the training; all ranks make
        the same calls. Each call reads the weights that the module has then, and gives the cache's memory back.

        Args:
            module: a module with a GPT as ``model``, such as ``GPTModule``, or with a causal language model of
                ``transformers``, such as ``HFCausalLM`` or one of your own.
            tokenizer: the tokenizer, a ``tokenizer.json``, its folder, or its name. None: prompts are token ids, and
                completions have no text.
            cache_tokens, max_sequences, step_tokens, kv_cache_dtype, batch_invariant: see :class:`EngineOptions`.

        Raises:
            ConfigurationError: the model does not generate text, or is sharded by a strategy of Lightning's.
        """
        strategy = None if module._trainer is None else module._trainer.strategy
        trained = InferenceModel(model_of(module), strategy)
        words = tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
        ends = frozenset[int]() if words is None or words.eod_id is None else frozenset([words.eod_id])
        options = EngineOptions(
            cache_tokens=cache_tokens,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            kv_cache_dtype=kv_cache_dtype,
            batch_invariant=batch_invariant,
        )
        found = cls.__new__(cls)
        found._served = ServedModel.of(trained.model, words, ends, options=options)
        found._name, found._encoder = type(module).__name__, None
        found._trained, found._ids = trained, itertools.count()
        return found

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ends: Collection[int] = (),
        seed: int | None = None,
        log_probs: bool = False,
    ) -> list[GenerationOutput]:
        """Complete prompts together; return the completions in their order.

        Args:
            prompts: one or several, as texts or token ids.
            sampling_params: how tokens are chosen, for all prompts or for each.
            max_new_tokens: maximum length of a completion, in tokens. None: 128, or fewer where the model's longest
                sequence ends.
            stop: texts that end a completion, which they are no part of.
            ends: further tokens that end a completion.
            seed: of the samples of the first prompt; each further prompt has the next one. None gives other results
                each time.
            log_probs: whether completions have the log-probabilities of their tokens.

        Raises:
            DataError, ConfigurationError: see :meth:`DynamicEngine.add`; no prompt runs then.
        """
        ids = [self.served.ids_of(prompt) for prompt in _several(prompts)]
        return self._run(ids, sampling_params, max_new_tokens, stop, {*ends, *self.served.ends}, seed, log_probs)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[Any] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        log_probs: bool = False,
    ) -> list[GenerationOutput]:
        """Answer one or several conversations, as the tokenizer's chat template writes them; see :meth:`generate`.

        Raises:
            DataError: there is no chat template, or it refuses the messages; or see :meth:`generate`.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        ids = [self.served.chat_ids(each, tools) for each in conversations]
        ends = self.served.ends | self.served.template_ends
        return self._run(ids, sampling_params, max_new_tokens, stop, ends, seed, log_probs)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Prompt]) -> list[LogLikelihood]:
        """Return the sum of log-probabilities of each completion after its prompt, and whether it is the greedy one.

        Raises:
            DataError: there is another number of completions, one is empty, or a token is outside the vocabulary.
        """
        if len(prompts) != len(completions):
            raise DataError(f"there are {len(prompts)} prompts and {len(completions)} completions; give equally many.")
        pairs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = self.served.words.encode(completion) if isinstance(completion, str) else completion
            pairs.append(Continuation(self.served.ids_of(prompt), tokens))
        with self._weights():
            if self.served.ranks is not None:
                return self.served.ranks.score(self.served.loop.engine, pairs)
            return log_likelihoods(self.served.model, pairs)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[EmbeddingOutput]:
        """Return the embeddings of one or several texts, or of token ids.

        Args:
            prompts: see :meth:`generate`. Ids stay as they are; texts get the tokens that the tokenizer puts around
                them.
            dimensions: the first so many numbers, scaled to length 1; None: all.

        Raises:
            ConfigurationError: the model generates text, and has no embeddings.
            DataError: see :meth:`EmbeddingModel.embed`.
        """
        if self._encoder is None:
            raise ConfigurationError(f"{self._name!r} {NO_EMBEDDINGS}")
        return self._encoder.embed([self._encoder.ids_of(prompt) for prompt in _several(prompts)], dimensions)

    def update_weights(self, weights: NewWeights) -> int:
        """Replace the weights; return how often that was done.

        Args:
            weights: a checkpoint, a run's folder (its newest one), a folder of ``transformers``; or, if one process has
                the whole model, its tensors by canonical name, as of ``canonical_tensors(model)``.

        Raises:
            CheckpointError: they are of another model, or damaged; nothing has changed.
            ConfigurationError: the model is not from a folder, or its weights are stored quantized.
        """
        return self.served.loop.update_weights(weights)

    def suspend(self) -> None:
        """Give the memory of the cache back. The next call allocates it again."""
        self.served.loop.engine.suspend()

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        max_new_tokens: int | None,
        stop: str | Sequence[str],
        ends: Collection[int],
        seed: int | None,
        log_probs: bool,
    ) -> list[GenerationOutput]:
        each = [sampling_params] * len(prompts) if not isinstance(sampling_params, Sequence) else [*sampling_params]
        if len(each) != len(prompts):
            raise DataError(f"there are {len(prompts)} prompts and {len(each)} sampling_params; give equally many.")
        loop, found = self.served.loop, dict[str, _Collected]()
        try:
            loop.engine.resume()
            for place, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
                limit = min(NEW_TOKENS, self.served.room(prompt)) if max_new_tokens is None else max_new_tokens
                request = EngineRequest(
                    id=str(next(self._ids)),
                    prompt=prompt,
                    max_new_tokens=limit,
                    sampling_params=SamplingParams.of(params),
                    ends=ends,
                    stop=stop,
                    seed=None if seed is None else seed + place,
                    log_probs=log_probs,
                )
                loop.add(request)
                found[request.id] = _Collected(len(prompt))
            with self._weights():
                while not loop.idle:
                    for output in loop.step():
                        found[output.id].add(output)
        finally:
            loop.abort_all()
            if self._trained is not None:
                # The next step of the training changes the weights, and needs the memory.
                loop.engine.suspend()
        return [collected.output() for collected in found.values()]

    @contextmanager
    def _weights(self) -> Iterator[None]:
        if self._trained is None:
            yield
            return
        with self._trained.with_weights(False):
            yield


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; what is given may be a single one."""
    if isinstance(prompts, str):
        return [prompts]
    every: list[Any] = [*prompts]
    # Rows of arrays are token ids, too.
    return [every] if every and not isinstance(every[0], str | Sequence) and not getattr(every[0], "ndim", 0) else every


class _Collected:
    """The outputs of one request, joined."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens, self._cached_tokens = prompt_tokens, 0
        self._text, self._tokens, self._log_probs = list[str](), list[int](), list[float]()
        self._last: EngineOutput | None = None

    def add(self, output: EngineOutput) -> None:
        self._text.append(output.text)
        self._tokens += output.tokens
        self._log_probs += output.log_probs or []
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._last = output

    def output(self) -> GenerationOutput:
        assert self._last is not None and self._last.reason is not None
        return GenerationOutput(
            text="".join(self._text),
            tokens=self._tokens,
            reason=self._last.reason,
            log_probs=None if self._last.log_probs is None else self._log_probs,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )


class AsyncClient(ABC):
    """Completes requests that come at any time, by engines in this process or in others. For ``asyncio``.

    Args:
        served: what requests are made of.

    Attributes:
        served: what requests are made of.
        failed: set when nothing completes requests any more.
        failure: why.
    """

    def __init__(self, served: ModelText) -> None:
        self.served = served
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._ids = itertools.count()

    @abstractmethod
    def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """Yield what steps have given several requests meanwhile, until all have ended.

        Whoever leaves the iteration aborts them.

        Raises:
            DataError, ConfigurationError: the engine refuses one of the requests.
            MegalightError: a step has failed, or :meth:`shutdown` was called.
        """

    async def submit(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Yield what each step gives a request, until it ends; see :meth:`subscribe`."""
        async with aclosing(self.subscribe([request])) as parts:  # type: ignore[type-var]
            async for outputs in parts:
                for output in outputs:
                    yield output

    @abstractmethod
    async def prepare(self, grammar: GrammarSource) -> None:
        """Compile the grammar of a request before it comes, where that spares a step a wait."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of requests that run or wait."""

    @property
    @abstractmethod
    def engines(self) -> Mapping[str, EngineStatus]:
        """What each engine has, and has done, by its name."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop after the step that runs. Requests wait."""

    @abstractmethod
    async def suspend(self) -> None:
        """Give the memory of the cache back. Requests keep their tokens, and wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on with all requests: after a suspend from their first token."""

    @abstractmethod
    async def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "keep") -> int:
        """Replace the weights of all engines, which stop meanwhile; return how often that was done.

        Outputs say by ``weights_epoch`` which weights have given them.

        Args:
            weights: see :meth:`LLM.update_weights`. They must stay where they are until the next ones come: engines
                that start again read them.
            in_flight: ``keep``: requests that run go on with the new weights, from the tokens that they have; their
                keys and values are computed again. ``wait``: they end with the old ones first, and others wait.

        Raises:
            CheckpointError, ConfigurationError: see :meth:`LLM.update_weights`; nothing has changed. Or requests that
                run cannot end, as engines are paused or suspended.
        """

    @abstractmethod
    async def shutdown(self) -> None:
        """End after the step that runs. Streams that have not ended raise a ``MegalightError``."""

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ends: Collection[int] = (),
        seed: int | None = None,
        log_probs: bool = False,
    ) -> AsyncIterator[EngineOutput]:
        """Yield the completion of a prompt in parts, as they come: see :meth:`LLM.generate`, and :meth:`submit`."""
        ids = self.served.ids_of(prompt)
        limit = min(NEW_TOKENS, self.served.room(ids)) if max_new_tokens is None else max_new_tokens
        request = EngineRequest(
            id=f"generate-{next(self._ids)}",
            prompt=ids,
            max_new_tokens=limit,
            sampling_params=SamplingParams.of(sampling_params),
            ends={*ends, *self.served.ends},
            stop=stop,
            seed=seed,
            log_probs=log_probs,
        )
        async for output in self.submit(request):
            yield output


class AsyncLLM(AsyncClient):
    """A model that completes prompts which come at any time, in a thread of its own. For ``asyncio``.

    The first error of a step ends it: all streams raise it, and :attr:`failed` is set.

    Args:
        path: see :class:`LLM`; the others, too.

    Attributes:
        served: the model.
        failed: set when a step has failed.
        failure: its error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tensor_parallel: int = 1,
        tokenizer: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        base: str | os.PathLike[str] | None = None,
        quantization: str = "auto",
        cache_tokens: int | None = None,
        max_sequences: int = 64,
        step_tokens: int = 512,
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
        draft: str | os.PathLike[str] | None = None,
        guesses: int = 4,
    ) -> None:
        options = EngineOptions(
            cache_tokens=cache_tokens,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            kv_cache_dtype=kv_cache_dtype,
            batch_invariant=batch_invariant,
            draft=None if draft is None else os.fspath(draft),
            guesses=guesses,
        )
        served = ServedModel.from_checkpoint(
            path,
            tensor_parallel=tensor_parallel,
            device=device,
            options=options,
            tokenizer=tokenizer,
            dtype=dtype,
            base=base,
            quantization=quantization,
        )
        self._serve(served)

    @classmethod
    def of(cls, served: ServedModel) -> AsyncLLM:
        """Return one for a model that is loaded."""
        found = cls.__new__(cls)
        found._serve(served)
        return found

    served: ServedModel

    def _serve(self, served: ServedModel) -> None:
        super().__init__(served)
        self._streams: dict[str, OutputQueue] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._closed = False
        # Clear while requests end with the old weights.
        self._admits, self._ended_one = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._held = 0
        self._updating = asyncio.Lock()

    async def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """See :class:`AsyncClient`."""
        self._held += len(requests)
        try:
            await self._admits.wait()
        finally:
            self._held -= len(requests)
        self._check_open()
        for request in requests:
            if request.id in self._streams:
                raise ConfigurationError(f"a request {request.id!r} runs already; give each an id of its own.")
        thread, outputs = self._started(), OutputQueue(requests)
        for request in requests:
            self._streams[request.id] = outputs
            thread.submit(request)
        try:
            while outputs.unfinished:
                yield await outputs.get()
        except QueueShutDown:
            raise MegalightError("the engine has stopped, and the request is lost; send it again.") from self.failure
        finally:
            for request in requests:
                if self._streams.pop(request.id, None) is not None:
                    thread.submit(Abort(request.id))
                    self._ended_one.set()

    async def prepare(self, grammar: GrammarSource) -> None:
        """Compile the grammar in another thread than the engine's.

        Raises:
            ConfigurationError: it is wrong.
        """
        await asyncio.to_thread(self.served.loop.grammar, grammar)

    @property
    def unfinished(self) -> int:
        """Number of requests that run or wait."""
        return len(self._streams) + self._held

    @property
    def engines(self) -> Mapping[str, EngineStatus]:
        """What the engine has, and has done, as ``0``."""
        return {"0": self.served.loop.status}

    async def pause(self) -> None:
        """Stop after the step that runs. Requests wait."""
        await self._between_steps(lambda loop: setattr(loop, "paused", True))

    async def suspend(self) -> None:
        """Give the memory of the cache back. Requests keep their tokens, and wait."""
        await self._between_steps(lambda loop: loop.engine.suspend())

    async def resume(self) -> None:
        """Go on with all requests: after a suspend from their first token."""

        def act(loop: EngineLoop) -> None:
            loop.engine.resume()
            loop.paused = False

        await self._between_steps(act)

    async def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "keep") -> int:
        """See :class:`AsyncClient`."""
        self._check_open()
        check_in_flight(in_flight)
        if not isinstance(weights, Mapping):
            # Once: all ranks must read the same.
            weights = await asyncio.to_thread(latest_checkpoint, weights)
        async with self._updating:
            try:
                if in_flight == "wait":
                    await self._between_steps(lambda loop: loop.check_weights(weights))
                    await self._drain()
                return await self._between_steps(lambda loop: loop.update_weights(weights))
            finally:
                self._admits.set()

    async def _drain(self) -> None:
        """Admit no more requests, and wait until those that run have ended."""
        loop = self.served.loop
        if self._streams and (loop.paused or loop.engine.suspended):
            raise ConfigurationError("in_flight is 'wait', and requests wait for a resume; resume, or choose 'keep'.")
        self._admits.clear()
        while self._streams:
            self._ended_one.clear()
            await self._ended_one.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed or self.failure is not None:
            raise MegalightError("the engine has stopped; start it again.") from self.failure

    async def shutdown(self) -> None:
        """End after the step that runs. Streams that have not ended raise a ``MegalightError``."""
        self._closed = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self.served.close)
        self._end_streams()

    async def _between_steps(self, act: Callable[[EngineLoop], T]) -> T:
        thread, done = self._started(), get_asyncio_loop().create_future()

        def command(loop: EngineLoop) -> None:
            try:
                found = act(loop)
            except BaseException as error:
                events.call_soon_threadsafe(done.set_exception, error)
                if not isinstance(error, MegalightError):
                    raise
            else:
                events.call_soon_threadsafe(done.set_result, found)

        events = get_asyncio_loop()
        thread.submit(command)
        # Shielded: nobody sets a future that was cancelled.
        answer: T = await asyncio.shield(done)
        return answer

    def _started(self) -> EngineThread:
        if self._thread is None:
            self._events = get_asyncio_loop()
            self._thread = EngineThread(self.served.loop, self._arrived, self._ended)
            if self.served.ranks is not None:
                self.served.ranks.watch(self._ended)
        return self._thread

    def _arrived(self, outputs: list[EngineOutput]) -> None:
        assert self._events is not None
        self._events.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            # Nobody waits for a request that was aborted meanwhile.
            if (stream := self._streams.get(output.id)) is not None:
                stream.put(output)
                if output.last:
                    del self._streams[output.id]
                    self._ended_one.set()

    def _ended(self, error: BaseException) -> None:
        assert self._events is not None
        self._events.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.failed.set()
        self._end_streams()

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.shutdown()
        self._streams.clear()
        self._ended_one.set()
