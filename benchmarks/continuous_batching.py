"""Throughput of requests of mixed lengths: static batches of ``generate`` beside the engine.

    python benchmarks/continuous_batching.py RESULT.json
    python benchmarks/continuous_batching.py RESULT.json --tiny    # a few seconds

Both complete the same requests with the same number of texts at once. Static batches take the requests in order, and
each lasts as long as its longest completion; tokens beyond what a request asked for do not count. The two are timed in
turn, and the median counts. On a CPU it is CPU time of one thread, which other programs disturb less.

Two more ways show what shared prompts save: requests in groups, each group with one prompt as in reinforcement
learning, and requests of the same lengths whose prompts all differ.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.meter import device_name, synchronize
from benchmarks.step import Step
from megalight.inference import DynamicEngine, generate
from megalight.models.gpt import GPT, GPTConfig
from megalight.nn.init import initialize

PROMPTS, COMPLETIONS = (8, 32, 64, 200), (8, 16, 32, 128)
"""Lengths, which are drawn with equal chances."""
BLOCK = 16


class Ask(NamedTuple):
    """A prompt, and the tokens that are wanted after it."""

    prompt: list[int]
    new: int


def asks(count: int, vocab_size: int, shrink: int = 1) -> list[Ask]:
    """Draw requests. All lengths are divided by ``shrink``."""
    draw = random.Random(0)
    lengths = [(draw.choice(PROMPTS) // shrink, draw.choice(COMPLETIONS) // shrink) for _ in range(count)]
    return [Ask([draw.randrange(vocab_size) for _ in range(length)], new) for length, new in lengths]


def in_groups(requests: list[Ask], group: int, vocab_size: int) -> tuple[list[Ask], list[Ask]]:
    """Give each ``group`` of requests the prompt of its first; in the second list as long prompts, which all differ."""
    draw = random.Random(1)
    equal = [Ask(requests[place // group * group].prompt, ask.new) for place, ask in enumerate(requests)]
    return equal, [Ask([draw.randrange(vocab_size) for _ in ask.prompt], ask.new) for ask in equal]


def static(model: GPT, requests: list[Ask], batch: int) -> None:
    """Complete the requests in batches, which begin and end together."""
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        generate(model, [ask.prompt for ask in part], max_new_tokens=max(ask.new for ask in part))


def engine(model: GPT, requests: list[Ask], batch: int, share: float = 1.0) -> None:
    """Complete the requests by the engine. Its cache holds a ``share`` of what all of them can use together."""
    needs = [-(-(len(ask.prompt) + ask.new) // BLOCK) for ask in requests]
    blocks = max(*needs, int(share * sum(needs)))
    serving = DynamicEngine(model, num_blocks=blocks, block_size=BLOCK, max_sequences=batch)
    for ask in requests:
        serving.add(ask.prompt, max_new_tokens=ask.new)
    serving.run()


def seconds(runs: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median time of each, timed in turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            synchronize()
            start = clock()
            run()
            synchronize()
            found[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def main(words: list[str] | None = None) -> int:
    """Measure, print a line for each way, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--group", type=int, default=8, help="requests with one prompt")
    arguments = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = time.perf_counter if device == "cuda" else time.process_time
    sizes = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 4096}
    if arguments.tiny:
        sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 64}
    model = GPT(GPTConfig(**sizes, max_sequence_length=512)).to(device)  # type: ignore[arg-type]
    initialize(model, 1)
    requests = asks(8 if arguments.tiny else 64, sizes["vocab_size"], 8 if arguments.tiny else 1)
    runs: dict[str, Callable[[], None]] = {}
    for batch in (4,) if arguments.tiny else (8, 16, 64):
        runs[f"static, {batch} at once"] = lambda batch=batch: static(model, requests, batch)  # type: ignore[misc]
        runs[f"engine, {batch} at once"] = lambda batch=batch: engine(model, requests, batch)  # type: ignore[misc]
    runs["engine, a fifth of the cache"] = lambda: engine(model, requests, len(requests), 0.2)
    group = min(arguments.group, len(requests))
    equal, other = in_groups(requests, group, sizes["vocab_size"])
    runs[f"engine, {group} texts of each prompt"] = lambda: engine(model, equal, len(requests))
    runs["engine, as long prompts that differ"] = lambda: engine(model, other, len(requests))
    tokens = sum(ask.new for ask in requests)
    speeds = {name: tokens / spent for name, spent in seconds(runs, arguments.repeats, clock).items()}
    for name, speed in speeds.items():
        print(f"{name:36} {speed:8.1f} tokens/s")
    command = f"python benchmarks/continuous_batching.py RESULT.json --repeats {arguments.repeats} --group {group}"
    result = {
        "command": command,
        "clock": clock.__name__,
        "device": device_name(Step(device=device)),
        "torch": torch.__version__,
        "tokens": tokens,
        "tokens_per_second": speeds,
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
