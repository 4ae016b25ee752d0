"""Metrics of a server, for Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import zip_longest
from typing import Any, TextIO

import prometheus_client as prometheus
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megalight.errors import MegalightError
from megalight.serving.engine_loop import EngineOutput, EngineRequest
from megalight.serving.llm import AsyncClient

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Bounds of the histograms of times."""


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

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"megalight_{name}", what, ["model", *labels], registry=self.registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"megalight_{name}_seconds", what, ["model"], registry=self.registry, buckets=SECONDS)

        self.registry.register(_Engines(llm, model))
        self.registry.register(_Drafts(llm, model))
        self._ended = counter("completions", "Completions that have ended, by reason", "reason")
        self._prompt = counter("prompt_tokens", "Tokens of prompts").labels(model)
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts that the prefix cache had").labels(model)
        self._new = counter("completion_tokens", "Tokens of completions").labels(model)
        self._first = histogram("time_to_first_token", "From a request to its first token").labels(model)
        self._between = histogram("time_between_tokens", "From one token of a completion to its next").labels(model)
        self._whole = histogram("completion", "From a request to its end").labels(model)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return prometheus.generate_latest(self.registry)

    async def measured(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Yield the outputs of a request; see :meth:`AsyncClient.submit`."""
        start = last = time.perf_counter()
        reason = "aborted"
        first, new, cached = True, 0, 0
        self._tell(request, "add", prompt_tokens=len(request.prompt), max_new_tokens=request.max_new_tokens)
        try:
            async with aclosing(self._llm.submit(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    now = time.perf_counter()
                    if output.cached_tokens:
                        cached = output.cached_tokens
                        self._cached.inc(output.cached_tokens)
                    if output.tokens:
                        (self._first if first else self._between).observe(now - last)
                        if first:
                            self._prompt.inc(len(request.prompt))
                            self._tell(request, "first_token", cached_tokens=cached)
                        first, last, new = False, now, new + len(output.tokens)
                        self._new.inc(len(output.tokens))
                    if output.reason is not None:
                        reason = output.reason
                        self._whole.observe(now - start)
                    yield output
        except MegalightError:
            reason = "refused" if self._llm.failure is None else "lost"
            raise
        finally:
            self._ended.labels(self._model, reason).inc()
            kind = {"aborted": "abort", "refused": "fail", "lost": "fail", "error": "fail"}.get(reason, "finish")
            seconds = round(time.perf_counter() - start, 6)
            self._tell(request, kind, reason=reason, completion_tokens=new, seconds=seconds)

    def _tell(self, request: EngineRequest, kind: str, **values: Any) -> None:
        if self._events is not None:
            print(json.dumps({"time": time.time(), "id": request.id, "event": kind, **values}), file=self._events)


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
            (CounterMetricFamily, "graphed_steps", "Forward passes that were a CUDA graph", "graphed"),
            (CounterMetricFamily, "preemptions", "Sequences that gave their blocks back", "preempted"),
            (GaugeMetricFamily, "weights_epoch", "How often the weights were replaced", "weights_epoch"),
        ):
            family = kind(f"megalight_{name}", what, labels=["model", "engine"])
            for engine, status in engines.items():
                family.add_metric([self._model, engine], getattr(status, field))
            yield family


class _Drafts(Collector):
    """Guesses of drafts, in all engines."""

    def __init__(self, llm: AsyncClient, model: str) -> None:
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        """Yield nothing if nobody guesses."""
        engines = [*self._llm.engines.values()]
        drafted = [sum(each) for each in zip_longest(*(engine.drafted for engine in engines), fillvalue=0)]
        accepted = [sum(each) for each in zip_longest(*(engine.accepted for engine in engines), fillvalue=0)]
        if not drafted:
            return
        for name, what, counts in (
            ("draft_tokens", "Tokens that a draft guessed, by their position after a token", drafted),
            ("draft_tokens_accepted", "Those of them that were right", accepted),
        ):
            family = CounterMetricFamily(f"megalight_{name}", what, labels=["model", "position"])
            for position, count in enumerate(counts, 1):
                family.add_metric([self._model, str(position)], count)
            yield family
        share = GaugeMetricFamily("megalight_draft_acceptance", "Share of guesses that were right", labels=["model"])
        share.add_metric([self._model], sum(accepted) / sum(drafted))
        yield share
