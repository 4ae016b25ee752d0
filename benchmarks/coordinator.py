"""What a coordinator costs: CPU time for each token and request, and delay, with engines that have no model.

    python benchmarks/coordinator.py             # tokens, requests, delay
    python benchmarks/coordinator.py --routing   # requests with shared beginnings, by affinity and in turn
    python benchmarks/coordinator.py --profile

The coordinator, three engines and a client are processes of their own. Each engine runs the loop of a real one, which
decodes text. On a machine that others use, CPU times say more than tokens in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import json
import multiprocessing as mp
import pstats
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

from megalight.data.tokenizer import Tokenizer
from megalight.inference import EngineStep
from megalight.inference.scheduler import Completion
from megalight.serving import EngineLoop, EngineRequest
from megalight.serving.coordinator import DataParallelInferenceCoordinator
from megalight.serving.engine_worker import EngineWorker
from megalight.serving.inference_client import InferenceClient

ENGINES = 3
START = mp.get_context("forkserver")
START.set_forkserver_preload(["megalight.serving.replicas"])
TEXT = "The quick brown fox jumps over the lazy dog, and 東京 is a city.\n"


class TimedEngine:
    """Gives each of up to ``most`` requests a token in a step, and tells when: as the number of cached tokens.

    Args:
        step_seconds: duration of a step.
        prompt_seconds: further duration for each token of a prompt whose beginning is not cached.
        cached_tokens: tokens of prompts that are kept, those used last.
    """

    def __init__(self, tokens: Sequence[int], step_seconds: float, prompt_seconds: float, cached_tokens: int) -> None:
        self.suspended = self.shares_experts = False
        self.blocks = SimpleNamespace(count=cached_tokens // 16, free=0)
        self.draft_rounds = SimpleNamespace(drafted=(), accepted=())
        self.step_log = SimpleNamespace(graphed=0)
        self._tokens, self._step_seconds, self._prompt_seconds = tokens, step_seconds, prompt_seconds
        self._cached_tokens = cached_tokens
        self._cached: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._numbers = itertools.count()
        self._running: dict[int, list[Any]] = {}
        self._debt = 0.0

    @property
    def unfinished(self) -> list[int]:
        return [*self._running]

    @property
    def running(self) -> int:
        return len(self._running)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stop: Callable[[Sequence[int]], bool] | None,
        eos_id: Collection[int] | None,
        **_: Any,
    ) -> int:
        number = next(self._numbers)
        self._running[number] = [0, max_new_tokens]
        if self._prompt_seconds:
            beginning = tuple(prompt[:-16])
            if beginning not in self._cached:
                self._debt += len(beginning) * self._prompt_seconds
            self._debt += 16 * self._prompt_seconds
            self._cached[beginning] = None
            self._cached.move_to_end(beginning)
            while sum(map(len, self._cached)) > self._cached_tokens:
                self._cached.popitem(last=False)
        return number

    def cancel(self, number: int) -> None:
        del self._running[number]

    def step(self) -> EngineStep | None:
        if not self._running:
            return None
        time.sleep(self._step_seconds + self._debt)
        self._debt = 0.0
        found, finished, now = dict[int, int](), dict[int, Completion](), time.monotonic_ns() // 1000
        for number, request in self._running.items():
            found[number] = self._tokens[request[0] % len(self._tokens)]
            request[0] += 1
            if request[0] == request[1]:
                finished[number] = Completion([], None, "length")
        for number in finished:
            del self._running[number]
        return EngineStep(found, finished, [], dict.fromkeys(found, now))


class InTurn(DataParallelInferenceCoordinator):
    """Gives requests to engines in turn, whatever their beginnings and loads."""

    _turn = itertools.count()

    def _choose(self, pieces: Sequence[int]) -> Any:
        engines = [*self._engines.values()]
        return engines[next(self._turn) % len(engines)]


def run_engine(endpoint: str, results: Any, timing: tuple[float, float, int]) -> None:
    tokenizer = Tokenizer.train([TEXT] * 99, 300)
    engine = TimedEngine(tokenizer.encode(TEXT * 4), *timing)
    before = time.process_time()
    asyncio.run(EngineWorker(EngineLoop(engine, tokenizer), endpoint).run())  # type: ignore[arg-type]
    results.put(("engine", time.process_time() - before))


def run_coordinator(endpoint: str, results: Any, kind: type[DataParallelInferenceCoordinator], profile: bool) -> None:
    coordinator = kind(endpoint)
    profiler = cProfile.Profile()
    before = time.process_time()
    if profile:
        profiler.runcall(coordinator.run)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    else:
        coordinator.run()
    results.put(("coordinator", time.process_time() - before))


def run_client(endpoint: str, results: Any, load: dict[str, Any]) -> None:
    gc.freeze()  # as the server does, which is the client of a coordinator
    asyncio.run(_load(endpoint, results, **load))


async def _load(
    endpoint: str, results: Any, requests: int, at_once: int, tokens: int, prompt: int, shared: int, per_second: float
) -> None:
    prompts = [[(number * 7 + place) % 290 for place in range(prompt - 16)] for number in range(shared or requests)]
    delays, first = list[float](), list[float]()
    places = asyncio.Semaphore(at_once)

    async def one(client: InferenceClient, number: int) -> None:
        own = [*prompts[number % len(prompts)], *((number + place) % 290 for place in range(16))]
        start = time.monotonic()
        began = False
        async with places:
            async for output in client.submit(EngineRequest(id=str(number), prompt=own, max_new_tokens=tokens, seed=1)):
                now = time.monotonic()
                if not began:
                    first.append(now - start)
                began = True
                delays.append(now - output.cached_tokens / 1e6)

    async with InferenceClient(endpoint) as client:
        while len(client.engines) < ENGINES:
            await asyncio.sleep(0.1)
        start, cpu, tasks = time.monotonic(), time.process_time(), []
        for number in range(requests):
            if per_second:
                await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
            tasks.append(asyncio.create_task(one(client, number)))
        await asyncio.gather(*tasks)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        await client.stop()
    delays.sort()
    first.sort()
    times = {"seconds": seconds, "cpu": cpu, "first": first[len(first) // 2]}
    results.put(("client", times | {"p50": delays[len(delays) // 2], "p99": delays[len(delays) * 99 // 100]}))


def measure(
    load: dict[str, Any],
    timing: tuple[float, float, int] = (0.0, 0.0, 0),
    kind: type[DataParallelInferenceCoordinator] = DataParallelInferenceCoordinator,
    profile: bool = False,
) -> dict[str, float]:
    """Run a coordinator, engines and a client; return what they took."""
    load = {"requests": 1, "at_once": 1 << 20, "tokens": 1, "prompt": 64, "shared": 0, "per_second": 0.0} | load
    results = START.Queue()
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/socket"
        processes = [START.Process(target=run_coordinator, args=(endpoint, results, kind, profile))]
        processes += [START.Process(target=run_engine, args=(endpoint, results, timing)) for _ in range(ENGINES)]
        processes += [START.Process(target=run_client, args=(endpoint, results, load))]
        for process in processes:
            process.start()
        found = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    times: dict[str, float] = dict(next(value for name, value in found if name == "client"))
    count, tokens = load["requests"], load["requests"] * load["tokens"]
    coordinator = next(value for name, value in found if name == "coordinator")
    engines = sum(value for name, value in found if name == "engine")
    return {
        "tokens/s": tokens / times["seconds"],
        "requests/s": count / times["seconds"],
        "coordinator us/token": coordinator / tokens * 1e6,
        "coordinator us/request": coordinator / count * 1e6,
        "engine us/token": engines / tokens * 1e6,
        "client us/token": times["cpu"] / tokens * 1e6,
        "delay p50 ms": times["p50"] * 1e3,
        "delay p99 ms": times["p99"] * 1e3,
        "first token p50 ms": times["first"] * 1e3,
        "seconds": times["seconds"],
    }


LOADS: dict[str, dict[str, Any]] = {
    "tokens": {"requests": 384, "at_once": 192, "tokens": 256},
    "requests": {"requests": 6000, "at_once": 192, "tokens": 4, "prompt": 256},
    "half load": {"requests": 1200, "at_once": 600, "tokens": 64, "prompt": 256, "per_second": 240.0},
}
"""As fast as it goes: long and short answers. And 15,360 tokens in a second, in steps of 20 ms: half of the aim."""


def main() -> None:
    """Print a line of JSON for each load."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--routing", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.routing:
        # 16 prompts of 4K tokens; an engine computes 50,000 tokens in a second, and keeps 8 of them.
        load = {"requests": 240, "at_once": 48, "tokens": 32, "prompt": 4096 + 16, "shared": 16}
        for kind in (InTurn, DataParallelInferenceCoordinator):
            found = measure(load, (0.01, 1 / 50_000, 8 * 4096), kind)
            print(
                json.dumps({"routing": kind.__name__, **{name: round(each, 2) for name, each in found.items()}}),
                flush=True,
            )
        return
    for name, load in LOADS.items():
        timing = (0.02, 0.0, 0) if "per_second" in load else (0.0, 0.0, 0)
        found = measure(load, timing, profile=arguments.profile)
        print(json.dumps({"load": name, **{key: round(each, 2) for key, each in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
