"""Check and time sequence mixers forward and backward on one device, beside the packages that serve them.

    python benchmarks/mixers.py RESULTS.json [--only attention] [--cases "soft cap"] [--ways auto] [--small]

Groups: `attention` (windows, sinks, soft caps and ragged documents, beside plain causal attention by cuDNN, with the
heads of an 8B model), `mla` (latent attention at the sizes of DeepSeek-V3) and `mamba` (Mamba-2, its ops, layers of
Nemotron-H-8B, and the delta rule of Qwen3-Next). `auto` is what a model takes; other names are backends and peers.

A way whose output or input gradients differ from a float64 run is reported and not timed; nor is one that cannot serve,
or that is not ready after `--patience` seconds (some packages try many kernels at their first call).
Times are medians over runs of all ways in turn, with the host's work, as in training without CUDA graphs. `share` is
the rate of forward and backward, relative to the first way of the group's first case for attention, and to the best
peer of the same case for the others.

FLOPs: attention counts two products of visible pairs forward and five backward; layers six for each weight of a
projection or convolution; scans six for each multiplication of their chunked products, with chunks of 128 tokens (see
`megalight.models.gpt.flops`).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.mixing import GROUPS, Case, Way, attention, latent, mamba
from benchmarks.roofline import RATES
from megalight.errors import MegalightError
from megalight.imports import version

SHAPES: dict[str, Callable[[bool, str], Any]] = {
    "attention": attention.Shapes,
    "mla": latent.Shapes,
    "mamba": mamba.Shapes,
}
PACKAGES = ("triton", "transformers", "flash-linear-attention", "mamba-ssm", "causal-conv1d", "flash-attn",
            "transformer_engine")  # fmt: skip
OURS = "auto"
ROUNDS = 5
ROUND = 40.0
"""Milliseconds that a way runs in each round."""


@dataclass
class Row:
    """One way of one case: microseconds, the rate of forward and backward, and that rate relative to another."""

    group: str
    case: str
    way: str
    forward: float
    both: float
    rate: float
    unit: str
    share: float | None = None
    aim: float | None = None


class Slow(MegalightError):
    """A way is not ready in time."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the time of a block.

    Raises:
        Slow: it takes longer.
    """

    def stop(*_: Any) -> None:
        raise Slow(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Clock:
    """Time between two points of the device's work, in microseconds. On a CPU, every run is timed once."""

    def __init__(self, device: str, patience: float) -> None:
        self.device, self.patience = device, patience
        self.rounds = 1 if device == "cpu" else ROUNDS

    def count(self, run: Callable[[], Any]) -> int:
        """Return how many runs make up a round."""
        return 1 if self.device == "cpu" else max(1, min(100, int(ROUND * 1e3 / self.of(run, 1))))

    def of(self, run: Callable[[], Any], count: int) -> float:
        """Return the mean time of a run, of ``count`` in a row."""
        if self.device == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - start) * 1e6 / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3 / count


def problem(case: Case, make: Callable[[int], Way]) -> str | None:
    """Return what is wrong with the results of a way, or None."""
    torch.manual_seed(0)
    tokens = min(case.tokens, case.checked)
    inputs = [t.requires_grad_() for t in case.inputs(tokens)]
    way = make(tokens)
    with torch.no_grad():
        grad = torch.randn_like(way.output(inputs))
    found = way.gradients(inputs, grad)
    expected = case.exact(tokens).gradients([t.detach().double().requires_grad_() for t in inputs], grad.double())
    errors = [float((a.double() - e).norm() / e.norm()) for a, e in zip(found, expected, strict=True)]
    return None if all(e < case.tolerance for e in errors) else f"WRONG: relative errors {[f'{e:.1e}' for e in errors]}"


def runs_of(way: Way, inputs: list[Tensor]) -> list[Callable[[], Any]]:
    """Return what is timed: forward, and forward and backward."""
    with torch.no_grad():
        grad = torch.randn_like(way.output(inputs))

    def forward() -> None:
        with torch.no_grad():
            way.output(inputs)

    return [forward, lambda: way.gradients(inputs, grad)]


def timed(case: Case, ways: dict[str, Way], clock: Clock) -> dict[str, list[float] | str]:
    """Return the microseconds of forward, and of forward and backward, of each way; or why it does not run."""
    inputs = [t.requires_grad_() for t in case.inputs(case.tokens)]
    runs: dict[str, list[tuple[Callable[[], Any], int]]] = {}
    found: dict[str, list[float] | str] = {}
    for name, way in ways.items():
        try:
            with within(clock.patience):
                parts = runs_of(way, inputs)
                for run in parts:
                    clock.of(run, clock.rounds)  # compiles, and chooses
                runs[name] = [(run, clock.count(run)) for run in parts]
        except (MegalightError, RuntimeError) as error:  # out of memory, for example
            found[name] = reason_of(error, name)
        torch.cuda.empty_cache()
    rounds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(clock.rounds):
        for name, parts in runs.items():
            rounds[name].append([clock.of(run, count) for run, count in parts])
    return {
        **found,
        **{name: [statistics.median(part) for part in zip(*of, strict=True)] for name, of in rounds.items()},
    }


def reason_of(error: BaseException, way: str) -> str:
    """Return the part of a message that tells why a way, or a backend of that name, cannot serve."""
    of_backend = str(error).partition(f" {way}: ")[2].partition(";")[0]
    return (of_backend or str(error).strip() or type(error).__name__).splitlines()[0][:200]


def measured(group: str, case: Case, wanted: Sequence[str], clock: Clock, refused: list[str]) -> Iterator[Row]:
    """Check and time one case."""
    ways: dict[str, Way] = {}
    for name, make in {**case.peers, **case.ways}.items():
        if wanted and name not in wanted:
            continue
        try:
            with within(clock.patience):
                reason = problem(case, make)
            if reason is None:
                ways[name] = make(case.tokens)
        except (MegalightError, RuntimeError, ImportError) as error:
            reason = reason_of(error, name)
        if reason is not None:
            refused.append(f"{group}: {case.name}: {name}: {reason}")
    for name, times in timed(case, ways, clock).items():
        if isinstance(times, str):
            refused.append(f"{group}: {case.name}: {name}: {times}")
            continue
        forward, both = times
        rate = case.work[1] / both / 1e6
        unit = "TB/s" if case.unit == "bytes" else "TFLOP/s"
        yield Row(group, case.name, name, forward, both, rate, unit, aim=case.aim)


def compare(found: list[Row], case: Case, first: Row | None) -> None:
    """Set the shares of a case's rows: of the rate of ``first``, or else of the best peer."""
    peers = [row for row in found if row.way in case.peers]
    base = first or max(peers, key=lambda row: row.rate, default=None)
    for row in found:
        row.share = None if base is None else row.rate / base.rate


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="*", default=GROUPS, choices=GROUPS)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--ways", nargs="*", default=(), help="only these")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds for each way to get ready")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that the script works")
    options = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Clock(device, options.patience)
    rows: list[Row] = []
    refused: list[str] = []
    said: list[str] = []
    print(f"{'group':11}{'case':30}{'way':24}{'forward us':>12}{'both us':>10}{'rate':>18}{'share':>8}{'aim':>6}")
    for group in options.only:
        shapes = SHAPES[group](options.small, device)
        for case in shapes.cases():
            if options.cases not in case.name:
                continue
            found = list(measured(group, case, options.ways, clock, refused))
            rows += found
            # attention in all its forms is compared with plain attention
            compare(found, case, next((row for row in rows if row.group == group == "attention"), None))
            for row in found:
                share = "" if row.share is None else f"{row.share:.2f}"
                head = f"{row.group:11}{row.case:30}{row.way:24}{row.forward:12.0f}{row.both:10.0f}"
                aim = "" if row.aim is None else f"{row.aim:.2f}"
                print(f"{head}{row.rate:10.1f} {row.unit:7}{share:>8}{aim:>6}", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
        said += shapes.said({row.case: row.both for row in rows if (row.group, row.way) == (group, OURS)})
    print("\n".join([*said, *refused]))
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = {
        "command": " ".join(["benchmarks/mixers.py", "RESULTS.json", *(words or sys.argv[1:])[1:]]),
        "device": name,
        "rates": asdict(RATES[name]) if name in RATES else None,
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **{package: found for package in PACKAGES if (found := version(package))},
        },
    }
    result = {**about, "rows": [asdict(row) for row in rows], "said": said, "refused": refused}
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    return int(any("WRONG" in reason for reason in refused))


if __name__ == "__main__":
    raise SystemExit(main())
