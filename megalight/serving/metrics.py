"""Metrics of a server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import zip_longest

import prometheus_client as prometheus
from prometheus_client import Counter, Gauge, Histogram
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
    """

    def __init__(self, llm: AsyncClient, model: str) -> None:
        self._llm, self._model = llm, model
        self.registry = prometheus.CollectorRegistry()

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"megalight_{name}", what, ["model"], registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"megalight_{name}", what, ["model", *labels], registry=self.registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"megalight_{name}_seconds", what, ["model"], registry=self.registry, buckets=SECONDS)

        def total(field: str) -> Callable[[], float]:
            return lambda: sum(getattr(each, field) for each in llm.engines.values())

        for name, what, field in (
            ("requests_unfinished", "Completions in the engines, running or waiting", "unfinished"),
            ("cache_blocks", "Blocks of the KV cache", "blocks"),
            ("cache_blocks_free", "Blocks that no running sequence holds", "blocks_free"),
        ):
            gauge(name, what).labels(model).set_function(total(field))
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
        first = True
        try:
            async with aclosing(self._llm.submit(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    now = time.perf_counter()
                    if output.cached_tokens:
                        self._cached.inc(output.cached_tokens)
                    if output.tokens:
                        (self._first if first else self._between).observe(now - last)
                        if first:
                            self._prompt.inc(len(request.prompt))
                        first, last = False, now
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
