"""Metrics of a server, for Prometheus."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, TextIO

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from megalight.errors import MegalightError
from megalight.serving.async_llm import AsyncClient
from megalight.serving.engine_loop import EngineOutput, EngineRequest

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Bounds of the histograms of times."""


@dataclass(slots=True)
class _Measured:
    """A request that has not ended: when it came and got its newest tokens, and how many of them there are."""

    request: EngineRequest
    start: float
    last: float
    new: int = 0
    cached: int = 0


class Metrics:
    """What a server has done, and what it does.

    Args:
        llm: whose requests are measured, by :meth:`measured`.
        model: the model's name, a label of all metrics.
        events: where a line of JSON goes for each event of a request; None: nowhere.
    """

    def __init__(self, llm: AsyncClient, model: str, events: TextIO | None = None) -> None:
        self._llm, self._model, self._events = llm, model, events
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(_Engines(llm, model))
        self.registry.register(_Drafts(llm, model))
        self._ended = prometheus.Counter(
            "megalight_completions",
            "Completions that have ended, by reason",
            ["model", "reason"],
            registry=self.registry,
        )
        self._prompt = _Count("prompt_tokens", "Tokens of prompts", model)
        self._cached = _Count("cached_prompt_tokens", "Tokens of prompts that the prefix cache had", model)
        self._new = _Count("completion_tokens", "Tokens of completions", model)
        self._first = _Times("time_to_first_token", "From a request to its first token", model)
        self._between = _Times("time_between_tokens", "From one token of a completion to its next", model)
        self._whole = _Times("completion", "From a request to its end", model)
        for each in (self._prompt, self._cached, self._new, self._first, self._between, self._whole):
            self.registry.register(each)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return prometheus.generate_latest(self.registry)

    async def measured(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """Yield the outputs of requests; see :meth:`AsyncClient.subscribe`."""
        start, reason = time.perf_counter(), "aborted"
        left = {request.id: _Measured(request, start, start) for request in requests}
        for request in requests:
            self._tell(request, "add", prompt_tokens=len(request.prompt), max_new_tokens=request.max_new_tokens)
        try:
            async with aclosing(self._llm.subscribe(requests)) as parts:  # type: ignore[type-var]
                async for outputs in parts:
                    now = time.perf_counter()
                    for output in outputs:
                        self._take(left[output.id], output, now)
                        if output.reason is not None:
                            self._end(left.pop(output.id), output.reason, now)
                    yield outputs
        except MegalightError:
            reason = "refused" if self._llm.failure is None else "lost"
            raise
        finally:
            for each in left.values():
                self._end(each, reason, time.perf_counter())

    def _take(self, measured: _Measured, output: EngineOutput, now: float) -> None:
        if output.cached_tokens:
            measured.cached = output.cached_tokens
            self._cached.value += output.cached_tokens
        if not (count := len(output.tokens)):
            return
        if measured.new:
            self._between.add(now - measured.last)
        else:
            self._first.add(now - measured.last)
            self._prompt.value += len(measured.request.prompt)
            self._tell(measured.request, "first_token", cached_tokens=measured.cached)
        measured.last = now
        measured.new += count
        self._new.value += count

    def _end(self, measured: _Measured, reason: str, now: float) -> None:
        self._ended.labels(self._model, reason).inc()
        kind = {"aborted": "abort", "refused": "fail", "lost": "fail", "error": "fail"}.get(reason, "finish")
        seconds = now - measured.start
        if reason not in ("aborted", "refused", "lost"):
            self._whole.add(seconds)
        self._tell(measured.request, kind, reason=reason, completion_tokens=measured.new, seconds=round(seconds, 6))

    def _tell(self, request: EngineRequest, kind: str, **values: Any) -> None:
        if self._events is not None:
            print(json.dumps({"time": time.time(), "id": request.id, "event": kind, **values}), file=self._events)


class _Count(Collector):
    """A number that only grows. Those of ``prometheus_client`` lock it each time: a microsecond for each token."""

    def __init__(self, name: str, what: str, model: str) -> None:
        self._name, self._what, self._model, self.value = name, what, model, 0

    def collect(self) -> Iterator[Metric]:
        """Yield the number."""
        family = CounterMetricFamily(f"megalight_{self._name}", self._what, labels=["model"])
        family.add_metric([self._model], self.value)
        yield family


class _Times(Collector):
    """A histogram of seconds; see :class:`_Count`."""

    def __init__(self, name: str, what: str, model: str) -> None:
        self._name, self._what, self._model = name, what, model
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count seconds."""
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        family = HistogramMetricFamily(f"megalight_{self._name}_seconds", self._what, labels=["model"])
        bounds = [*(str(float(each)) for each in SECONDS), "+Inf"]
        family.add_metric([self._model], [*zip(bounds, accumulate(self._counts), strict=True)], self._sum)
        yield family


class _Engines(Collector):
    """What each engine has, and has done."""

    def __init__(self, llm: AsyncClient, model: str) -> None:
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each with the names of the engines."""
        engines = self._llm.engines
        for kind, name, what, field in (
            (GaugeMetricFamily, "requests_running", "Completions that hold blocks", "running"),
            (GaugeMetricFamily, "requests_waiting", "Completions that hold no blocks yet, or no more", "waiting"),
            (GaugeMetricFamily, "cache_blocks", "Blocks of the KV cache", "blocks"),
            (GaugeMetricFamily, "cache_blocks_free", "Blocks that no running sequence holds", "blocks_free"),
            (CounterMetricFamily, "steps", "Forward passes", "steps"),
            (CounterMetricFamily, "step_seconds", "Seconds of forward passes", "step_seconds"),
            (CounterMetricFamily, "graphed_steps", "Forward passes that were a CUDA graph", "graphed"),
            (CounterMetricFamily, "preemptions", "Sequences that gave their blocks back", "preempted"),
            (GaugeMetricFamily, "weights_epoch", "How often the weights were replaced", "weights_epoch"),
            (CounterMetricFamily, "engine_prompt_tokens", "Tokens of prompts", "prompt_tokens"),
            (CounterMetricFamily, "engine_cached_prompt_tokens", "Those that the prefix cache had", "cached_tokens"),
            (CounterMetricFamily, "engine_completion_tokens", "Tokens of completions", "completion_tokens"),
        ):
            family = kind(f"megalight_{name}", what, labels=["model", "engine"])
            for engine, status in engines.items():
                family.add_metric([self._model, engine], getattr(status, field))
            yield family
        for name, what, field in (
            ("time_to_first_token", "From a request to its first token, in the engine", "first"),
            ("time_between_tokens", "From one token of a completion to its next, in the engine", "between"),
            ("completion", "From a request to its end, in the engine", "ended"),
        ):
            summary = SummaryMetricFamily(f"megalight_engine_{name}_seconds", what, labels=["model", "engine"])
            for engine, status in engines.items():
                count, seconds = getattr(status, field)
                summary.add_metric([self._model, engine], count_value=count, sum_value=seconds)
            yield summary


class _Drafts(Collector):
    """Guesses of drafts, in all engines."""

    def __init__(self, llm: AsyncClient, model: str) -> None:
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        """Yield nothing without a draft."""
        engines = [*self._llm.engines.values()]
        drafted = [sum(each) for each in zip_longest(*(engine.drafted for engine in engines), fillvalue=0)]
        accepted = [sum(each) for each in zip_longest(*(engine.accepted for engine in engines), fillvalue=0)]
        if not drafted:
            return
        for name, what, counts in (
            ("draft_tokens", "Tokens that a draft proposed, by their position after a token", drafted),
            ("draft_tokens_accepted", "Those of them that were right", accepted),
        ):
            family = CounterMetricFamily(f"megalight_{name}", what, labels=["model", "position"])
            for position, count in enumerate(counts, 1):
                family.add_metric([self._model, str(position)], count)
            yield family
        share = GaugeMetricFamily(
            "megalight_draft_acceptance", "Share of draft tokens that were accepted", labels=["model"]
        )
        share.add_metric([self._model], sum(accepted) / sum(drafted))
        yield share
