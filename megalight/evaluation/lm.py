"""A model class for ``lm-eval``: its requests, answered by a model of ours in any layout.

Every rank runs the tasks of ``lm-eval`` and makes the same calls, as its backends for tensor parallelism do. Replicas
share the requests inside each call, so scores do not depend on the number of replicas. :func:`evaluate` runs tasks by
name, and returns scores, the table and the JSON of results.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval import simple_evaluate  # type: ignore[import-untyped]
from lm_eval.api.instance import Instance  # type: ignore[import-untyped]
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]
from lm_eval.tasks._index import Kind  # type: ignore[import-untyped]
from lm_eval.utils import (  # type: ignore[import-untyped]
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
    make_table,
    simple_parse_args_string,
)

from megalight.data.chat.template import ChatTemplate
from megalight.errors import ConfigurationError, DataError, MegalightError, nearest
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


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is evaluated; the options of ``lm-eval`` under their names.

    Attributes:
        tasks: names of tasks, groups and tags, patterns such as ``mmlu_*``, or paths of YAML files.
        num_fewshot: examples before each question; None: as each task says.
        limit: questions of each task; below 1, a part of them. None: all.
        include_path: a folder with more tasks.
        gen_kwargs: options of generation, which win over those of the tasks.
        apply_chat_template: ask as a user of the chat model.
        system_instruction: the system's message.
        fewshot_as_multiturn: give examples as messages, not within one. Needs the chat template.
        log_samples: keep what was asked and answered.
        bootstrap_iters: samples for the standard errors of metrics that have no formula for them; 0: no errors at all.
        seed: of the choice of examples.
    """

    tasks: Sequence[str]
    num_fewshot: int | None = None
    limit: float | None = None
    include_path: str | os.PathLike[str] | None = None
    gen_kwargs: Mapping[str, Any] | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    log_samples: bool = False
    bootstrap_iters: int = 100_000
    seed: int = 1234

    def __post_init__(self) -> None:
        if isinstance(self.tasks, str) or not self.tasks:
            raise ConfigurationError(f"tasks is {self.tasks!r}; it must be a list of names, such as ['hellaswag'].")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigurationError(f"include_path (--include-path) {os.fspath(self.include_path)!r} is no folder.")
        if self.limit is not None and self.limit <= 0:
            raise ConfigurationError(f"limit (--limit) is {self.limit}; it must be above 0.")


class Tasks(TaskManager):  # type: ignore[misc]
    """The tasks that ``lm-eval`` and a folder of the user have."""

    @staticmethod
    def having(wanted: Sequence[str], include_path: str | os.PathLike[str] | None) -> Tasks:
        """Return tasks with the wanted ones among them.

        If the folder has them all, the 13,000 files of ``lm-eval`` are not read, which takes 10 seconds.
        """
        folder = None if include_path is None else os.fspath(include_path)
        if folder is not None and (own := _indexed(folder, include_defaults=False)).has(wanted):
            return own
        return _indexed(folder, include_defaults=True)

    def has(self, wanted: Iterable[Any]) -> bool:
        """Return whether all these names are here, and what groups among them consist of."""
        for name in wanted:
            entry = self.task_index.get(name if isinstance(name, str) else name.get("task"))
            if entry is None or (entry.kind is Kind.GROUP and not self.has((entry.cfg or {}).get("task") or [])):
                return False
        return True

    def names(self, wanted: Sequence[str]) -> list[str]:
        """Return names for patterns.

        Raises:
            ConfigurationError: there is no such task.
        """
        found: dict[str, None] = {}
        for name in wanted:
            here = [name] if name in self.all_tasks else [each for each in self.all_tasks if fnmatch(each, name)]
            if not here and Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
                here = [name]
            if not here:
                raise ConfigurationError(
                    f"there is no task {name!r}.{nearest(name, self.all_tasks)} `megalight evaluate --list-tasks` "
                    "lists them; tasks of your own lie in a folder (--include-path)."
                )
            found |= dict.fromkeys(here)
        return list(found)

    def load(self, task_list: Any) -> Any:
        """Load tasks and their data.

        Raises:
            DataError: data of a task cannot be had.
        """
        try:
            return super().load(task_list)
        except MegalightError:
            raise
        except Exception as error:  # libraries of data sets, the network and the tasks' own code raise any kind
            names = ", ".join(map(str, task_list))
            raise DataError(f"tasks {names} cannot be loaded: {type(error).__name__}: {error}") from error


@functools.cache  # files are read again in a new process only
def _indexed(folder: str | None, *, include_defaults: bool) -> Tasks:
    return Tasks(include_path=folder, include_defaults=include_defaults)


def evaluate(lm: MegalightLM, options: EvaluationOptions) -> dict[str, Any]:
    """Run tasks; all ranks call this together, and get the results, those of the first rank.

    Random numbers of the process stay as they are.

    Returns:
        what ``lm_eval.simple_evaluate`` returns.

    Raises:
        ConfigurationError: there is no such task.
        DataError: data of a task cannot be had.
    """
    manager = Tasks.having(options.tasks, options.include_path)
    names = manager.names(options.tasks)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with ExitStack() as contexts:
        contexts.enter_context(_same_random_numbers(lm.device))
        if not first:
            # One progress bar is enough.
            contexts.enter_context(redirect_stderr(contexts.enter_context(open(os.devnull, "w"))))
        found = simple_evaluate(
            lm,
            tasks=names,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            # Only the first rank's results count.
            bootstrap_iters=options.bootstrap_iters if first else 0,
            log_samples=options.log_samples,
            system_instruction=options.system_instruction,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.fewshot_as_multiturn and options.apply_chat_template,
            gen_kwargs=dict(options.gen_kwargs) if options.gen_kwargs else None,
            task_manager=manager,
            fewshot_random_seed=options.seed,
        )
    if not dist.is_initialized():
        assert found is not None
        return dict(found)
    box = [found]
    dist.broadcast_object_list(box, 0, device=lm.device)
    assert box[0] is not None
    return dict(box[0])


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random states of the process, which ``lm-eval`` seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def parse_gen_kwargs(text: str) -> dict[str, Any]:
    """Return options of generation from ``key=value,key=value``.

    Raises:
        ConfigurationError: a part has no ``=``.
    """
    if any("=" not in part for part in text.split(",")):
        raise ConfigurationError(f"gen_kwargs (--gen-kwargs) is {text!r}; write key=value,key=value.")
    return dict(simple_parse_args_string(text))


def scores(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores by ``task/metric``, those of groups too; a filter that is not ``none`` follows the metric."""
    found: dict[str, float] = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                found[f"{task}/{metric}" + ("" if kind == "none" else f"/{kind}")] = float(value)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return the table of ``lm-eval``, and that of groups if there are any."""
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(text.strip() for text in tables)


def as_json(results: Mapping[str, Any]) -> str:
    """Return results as ``lm-eval`` writes them to its ``results_*.json``."""
    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
