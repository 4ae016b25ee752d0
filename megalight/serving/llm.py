"""Generate in Python, for many prompts at once: :class:`LLM`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.evaluation import Continuation, LogLikelihood, log_likelihoods
from megalight.inference import SamplingParams
from megalight.inference.scheduler import Reason
from megalight.inference.text import NEW_TOKENS
from megalight.inference.weights import NewWeights
from megalight.serving.embeddings import EmbeddingModel, EmbeddingOutput, has_embeddings
from megalight.serving.engine_loop import EngineOptions, EngineOutput, EngineRequest
from megalight.serving.served_model import NO_EMBEDDINGS, Messages, Prompt, ServedModel
from megalight.strategies.inference import InferenceModel, model_of


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
        cache_tokens, max_sequences, step_tokens, kv_cache_dtype, batch_invariant, draft, num_speculative_tokens: see
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
        num_speculative_tokens: int = 4,
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
                draft=draft,
                num_speculative_tokens=num_speculative_tokens,
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
        **sizes: Any,
    ) -> LLM:
        """Return one for the model of a LightningModule: in a notebook, or between two training steps.

        Under :class:`~megalight.strategies.MegatronStrategy` it computes in the layout of the training; all ranks make
        the same calls. Each call reads the weights that the module has then, and gives the cache's memory back.

        Args:
            module: a module with a GPT as ``model``, such as ``GPTModule``, or with a causal language model of
                ``transformers``, such as ``HFCausalLM`` or one of your own.
            tokenizer: the tokenizer, a ``tokenizer.json``, its folder, or its name. None: prompts are token ids, and
                completions have no text.
            sizes: fields of :class:`EngineOptions`, without those of drafts.

        Raises:
            ConfigurationError: the model does not generate text, or is sharded by a strategy of Lightning's.
        """
        strategy = None if module._trainer is None else module._trainer.strategy
        trained = InferenceModel(model_of(module), strategy)
        words = tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
        ends = frozenset[int]() if words is None or words.eod_id is None else frozenset([words.eod_id])
        found = cls.__new__(cls)
        found._served = ServedModel.of(trained.model, words, ends, options=EngineOptions(**sizes))
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
