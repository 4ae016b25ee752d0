"""A model class for ``lm-eval``: its requests, answered by a model of ours in any layout.

Every rank runs the tasks of ``lm-eval`` and makes the same calls, as its backends for tensor parallelism do. Replicas
share the requests inside each call, so scores do not depend on the number of replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance  # type: ignore[import-untyped]
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]

from megalight.data.chat.template import ChatTemplate
from megalight.errors import ConfigurationError, DataError
from megalight.evaluation.likelihood import BATCH_TOKENS, Continuation, Replicas, log_likelihoods
from megalight.inference import Completion, DynamicEngine, SamplingParams, TextGenerator
from megalight.inference.blocks import BLOCK_SIZE, blocks_at_once
from megalight.inference.parallel import device_of
from megalight.inference.text_requests import before, stop_at

NEW_TOKENS = 256
"""Length of an answer for which a task gives no limit, as in the ``hf`` backend."""


class MegalightLM(TemplateLM):  # type: ignore[misc]
    """Answers the requests of ``lm-eval`` with a model and its tokenizer.

    Args:
        text: model and tokenizer.
        batch_tokens: tokens of a forward pass.
        max_sequences: answers that are generated at a time, on each replica.
        max_length: tokens that the model reads at most. None: its ``max_sequence_length``.
        chat_template: a Jinja template; None: the tokenizer's.
        replicas: who shares the requests; None: the replicas of the model.
    """

    def __init__(
        self,
        text: TextGenerator,
        *,
        batch_tokens: int = BATCH_TOKENS,
        max_sequences: int = 64,
        max_length: int | None = None,
        chat_template: str | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__()
        self._text = text
        self.tokenizer = text.tokenizer
        self._batch_tokens = batch_tokens
        self._max_sequences = max_sequences
        longest = text.model.config.max_sequence_length
        self.max_length = longest if max_length is None else min(longest, max_length)
        self._template_source = chat_template
        self._replicas = Replicas.of(text.model) if replicas is None else replicas
        self._device = device_of(text.model)

    # Tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document.

        Raises:
            DataError: the tokenizer has none.
        """
        if self.tokenizer.eod_id is None:
            raise DataError(
                "the tokenizer has no end-of-document token, with which a document without a context begins; name it "
                "as eos_token in tokenizer_config.json."
            )
        return self.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a document without a context: ``bos_token``, or the end of the document before."""
        start = self.tokenizer.named.get("bos_token")
        return self.eot_token_id if start is None else self.tokenizer.vocabulary[start]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, behind the tokens with which ``transformers`` begins it, unless it has them."""
        ids = self.tokenizer.encode(string)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return [*self._text.start, *ids] if add_special_tokens else ids

    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [Continuation(context, tokens) for _, context, tokens in requests]
        found = log_likelihoods(
            self._text.model,
            asked,
            batch_tokens=self._batch_tokens,
            max_length=self.max_length,
            replicas=self._replicas,
        )
        for request, score in zip(requests, found, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], tuple(score))
        return [(score.total, score.greedy) for score in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts. Longer ones than the model reads are cut into windows."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            (text,) = request.args
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(window)) for window in cut]
            counts.append(len(windows) - sum(counts))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each request: up to the first of its stop texts, or to its limit of tokens."""
        asked = [(number, *request.args) for number, request in enumerate(requests)]
        # The longest first: replicas and steps then have equal work.
        contexts = [self.tok_encode(context) for _, context, _ in asked]
        order = sorted(range(len(asked)), key=lambda number: -len(contexts[number]))
        found = self._replicas.share(
            order, lambda own: self._answers([(number, contexts[number], asked[number][2]) for number in own])
        )
        answers = dict(zip(order, found, strict=True))
        for number, context, options in asked:
            self.cache_hook.add_partial("generate_until", (context, options), answers[number])
        return [answers[number] for number in range(len(asked))]

    def _answers(self, requests: Sequence[tuple[int, list[int], Mapping[str, Any]]]) -> list[str]:
        """Answer requests ``(number, context, options)`` on this replica."""
        settings = [normalize_gen_kwargs(dict(options), NEW_TOKENS) for _, _, options in requests]
        prompts = []
        for (_, context, _), options in zip(requests, settings, strict=True):
            room = self.max_length - options["max_gen_toks"]
            if room < 1:
                raise ConfigurationError(
                    f"a task asks for {options['max_gen_toks']} new tokens, and the model reads {self.max_length}; "
                    "lower max_gen_toks of the task (--gen-kwargs max_gen_toks=...)."
                )
            prompts.append(context[-room:])
        lengths = [len(p) + o["max_gen_toks"] for p, o in zip(prompts, settings, strict=True)]
        engine = DynamicEngine(
            self._text.model,
            num_blocks=blocks_at_once(lengths, self._max_sequences),
            block_size=BLOCK_SIZE,
            max_sequences=self._max_sequences,
            step_tokens=self._batch_tokens,
        )
        for (number, _, _), prompt, options in zip(requests, prompts, settings, strict=True):
            engine.add(
                prompt,
                max_new_tokens=options["max_gen_toks"],
                sampling_params=_sampling(options),
                eos_id=self._text.all_ends(),
                stop=stop_at(options["until"], self.tokenizer),
                # The same on every layout, and another one for each request.
                seed=number,
            )
        completions = engine.run().values()
        return [self._said(found, options["until"]) for found, options in zip(completions, settings, strict=True)]

    def _said(self, completion: Completion, until: Sequence[str]) -> str:
        text = self.tokenizer.decode(completion.tokens, skip_special=True)
        end = self.tokenizer.decode([self.eot_token_id])
        return before([each for each in (*until, end) if each], text)

    # Chat

    @property
    def tokenizer_name(self) -> str:
        """A name of tokenizer and template: requests that ``lm-eval`` keeps are made by them."""
        template = self._template_source or self.tokenizer.chat_template or ""
        return f"megalight-{self.tokenizer.identity}-{hashlib.sha256(template.encode()).hexdigest()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template that is used, for the record of the run."""
        return (self._template_source or self.tokenizer.chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of messages, up to where the assistant's answer begins, or goes on."""
        template = ChatTemplate.of(self.tokenizer, self._template_source)
        return template.render(chat_history, answer=add_generation_prompt, unfinished=not add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the record of a run says of the model."""
        parameters = list(self._text.model.parameters())
        return {
            "model_num_parameters": sum(each.numel() for each in parameters),
            "model_dtype": str(parameters[0].dtype),
        }


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    if not options.get("do_sample"):
        return SamplingParams(temperature=0.0)
    chosen = {key: options[key] for key in ("top_k", "top_p") if options.get(key)}
    return SamplingParams(temperature=options.get("temperature") or 1.0, **chosen)
