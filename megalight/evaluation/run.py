"""Runs of ``lm-eval`` tasks: names, scores, the table and the JSON of results."""

from __future__ import annotations

import functools
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
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]
from lm_eval.tasks._index import Kind  # type: ignore[import-untyped]
from lm_eval.utils import handle_non_serializable, make_table, simple_parse_args_string  # type: ignore[import-untyped]

from megalight.errors import ConfigurationError, DataError, MegalightError, nearest
from megalight.evaluation.lm import MegalightLM


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
