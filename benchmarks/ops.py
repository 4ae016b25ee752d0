"""Check and time every backend of every op, and compare with the limits of memory and matrix units.

    python benchmarks/ops.py RESULTS.json [--only rms_norm adam ...] [--shapes 128256] [--backends triton] [--sweep]

A backend whose outputs or gradients differ from the float64 reference is reported and not timed. Times are medians of
CUDA graph replays, so they include no launch gaps. `floor` is the time for the bytes at 4.3 TB/s or the operations at
800 TFLOP/s (measured limits of an H200). With `--turns 5`, backends run in turn, five times, and the median of each
counts; otherwise the first one would run on a cooler device. `--sweep` also tries other settings: block shapes of the
Triton kernels and, for cross entropy, the memory for logits and the way to add weight gradients. `--small` uses tiny
shapes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalight.ops.linear import WGRAD, WeightGradientSpec
from megalight.registry import choose

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.errors import BackendError
from megalight.imports import version
from megalight.ops import use_backends
from megalight.ops.activation import ACTIVATION, GATED, activation, gated
from megalight.ops.adam import ADAM, adam_step
from megalight.ops.attention import ATTENTION, attention
from megalight.ops.cross_entropy import CROSS_ENTROPY, linear_cross_entropy
from megalight.ops.norm import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    RMS_NORM,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from megalight.ops.parameter import collect
from megalight.ops.rotary import ROTATE_QKV, rotary_table, rotate_qkv
from megalight.types import PackedSequences

BYTES_PER_SECOND = 4.3e12
OPERATIONS_PER_SECOND = 800e12
TOLERANCE = 2e-2
WARMUP = 6
"""Calls before the first that is timed: kernels are compiled and chosen in them."""
TIMED = 600.0
"""Total milliseconds of replays. Their number stays between 7 and 41."""
NAMES = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rotate_qkv", "gated", "activation",
         "weight_gradient", "linear_cross_entropy", "attention", "adam")  # fmt: skip


@dataclass
class Case:
    """One op at one shape.

    ``make(tokens)`` returns the differentiable inputs and ``fn(backend, *inputs)``. ``work`` is the bytes or operations
    of forward, and of forward and backward. Without differentiable outputs, ``fn`` returns the tensors that it wrote. A
    sweep sets ``knobs``, values of constants in modules, and ``choices``, backends of other ops that this op calls.
    """

    op: str
    shape: str
    backends: list[str]
    make: Callable[[int], tuple[list[Tensor], Callable[..., Any]]]
    tokens: int
    work: tuple[float, float]
    unit: str = "bytes"
    backward: bool = True
    knobs: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Row:
    op: str
    shape: str
    part: str
    backend: str
    microseconds: float
    floor: float
    rate: str
    knobs: str = ""


def names(registry: Any) -> list[str]:
    return list(registry._backends)


class Shapes:
    """The sizes of an 8-billion-parameter model, or tiny ones."""

    def __init__(self, small: bool, device: str) -> None:
        self.device = device
        self.dtype = torch.bfloat16
        self.tokens, self.batch = (64, 2) if small else (8192, 2)
        self.hidden, self.ffn, self.heads, self.kv, self.dim = (
            (64, 96, 4, 2, 16) if small else (4096, 14336, 32, 8, 128)
        )
        self.vocabularies = (100,) if small else (32000, 128256)
        self.parameters = 1000 if small else 1 << 28
        self.linears: tuple[tuple[int, int], ...] = ((96, 64),)
        if not small:
            self.linears = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def norms(self) -> Iterator[Case]:
        knobs = {"megalight.ops.norm.triton": {"WARPS_PER_SM": [8, 16, 24, 32], "STAGES": [1, 2, 3]}}
        for rows, size in ((self.tokens, self.hidden), (self.tokens * self.heads, self.dim)):
            unit = rows * size * 2.0
            shape = f"{rows} x {size}"

            def make(tokens: int, size: int = size, inputs: int = 1, fn: Any = None) -> Any:
                count = tokens if size == self.hidden else tokens * self.heads
                tensors = [self.random(count, size) for _ in range(inputs)] + [self.random(size)]
                return tensors, fn

            def rms(backend: str, x: Tensor, w: Tensor) -> Any:
                return rms_norm(x, w, 1e-5, backend)

            def layer(backend: str, x: Tensor, w: Tensor) -> Any:
                return layer_norm(x, w, w, 1e-5, backend)

            def add(backend: str, x: Tensor, r: Tensor, w: Tensor) -> Any:
                return add_rms_norm(x, r, w, 1e-5, backend)

            def add_layer(backend: str, x: Tensor, r: Tensor, w: Tensor) -> Any:
                return add_layer_norm(x, r, w, w, 1e-5, backend)

            yield Case("rms_norm", shape, names(RMS_NORM), partial(make, fn=rms), self.tokens, (2 * unit, 5 * unit),
                       knobs=knobs)  # fmt: skip
            if size == self.hidden:
                yield Case("layer_norm", shape, names(LAYER_NORM), partial(make, fn=layer), self.tokens,
                           (2 * unit, 5 * unit), knobs=knobs)  # fmt: skip
                yield Case("add_rms_norm", shape, names(ADD_RMS_NORM), partial(make, fn=add, inputs=2), self.tokens,
                           (4 * unit, 8 * unit), knobs=knobs)  # fmt: skip
                yield Case("add_layer_norm", shape, names(ADD_LAYER_NORM), partial(make, fn=add_layer, inputs=2),
                           self.tokens, (4 * unit, 8 * unit), knobs=knobs)  # fmt: skip

    def rotary(self) -> Iterator[Case]:
        width = (self.heads + 2 * self.kv) * self.dim

        def make(tokens: int) -> Any:
            cos, sin = rotary_table(torch.arange(tokens, device=self.device), self.dim, 5e5)

            def fn(backend: str, qkv: Tensor) -> Any:
                table = (cos.double(), sin.double()) if qkv.dtype == torch.float64 else (cos, sin)
                return rotate_qkv(qkv, self.heads, self.kv, self.dim, *table, backend=backend)

            return [self.random(tokens, width)], fn

        unit = self.tokens * width * 2.0
        yield Case("rotate_qkv", f"{self.tokens} x {width}", names(ROTATE_QKV), make, self.tokens, (2 * unit, 4 * unit))

    def activations(self) -> Iterator[Case]:
        knobs = {"megalight.ops.activation.triton": {"BLOCK": [1024, 2048, 4096]}}
        unit = self.tokens * self.ffn * 2.0
        shape = f"{self.tokens} x {self.ffn}"
        yield Case("gated", shape, names(GATED),
                   lambda tokens: ([self.random(tokens, 2 * self.ffn)], lambda b, x: gated(x, "silu", b)),
                   self.tokens, (3 * unit, 8 * unit), knobs=knobs)  # fmt: skip
        yield Case("activation", shape, names(ACTIVATION),
                   lambda tokens: ([self.random(tokens, self.ffn)], lambda b, x: activation(x, "squared_relu", b)),
                   self.tokens, (2 * unit, 5 * unit), knobs=knobs)  # fmt: skip

    def linear(self) -> Iterator[Case]:
        tiles = [
            {"BLOCK_OUT": out, "BLOCK_IN": width, "BLOCK_TOKENS": 64, "GROUP": 8, "num_warps": 8, "num_stages": stages}
            for (out, width), stages in itertools.product(((128, 256), (256, 128), (128, 128)), (3, 4))
        ]
        for out, width in self.linears:

            def make(tokens: int, out: int = out, width: int = width) -> Any:
                grad_y, x = self.random(tokens, out), self.random(tokens, width)
                main = torch.zeros(out, width, device=self.device)

                def fn(backend: str, grad_y: Tensor, x: Tensor) -> Tensor:
                    exact = grad_y.dtype == torch.float64
                    target = torch.zeros_like(main, dtype=torch.float64) if exact else main
                    choose(
                        WGRAD,
                        WeightGradientSpec(self.device, grad_y.dtype, target.dtype),
                        backend,
                    )(target, grad_y, x, False)
                    return target

                return [grad_y, x], fn

            yield Case("weight_gradient", f"{self.tokens} x {out} x {width}", names(WGRAD), make,
                       self.tokens, (2.0 * self.tokens * out * width,) * 2, "operations", backward=False,
                       knobs={"megalight.ops.linear": {"TILE": tiles}})  # fmt: skip

    def losses(self) -> Iterator[Case]:
        # With 140 GiB these keep all logits, or those of three chunks of five, or none of two chunks.
        knobs = {"megalight.ops.cross_entropy": {"SHARE": [1 / 32, 1 / 80], "CHUNKS": [4, 1]},
                 "megalight.ops.cross_entropy.triton": {"STATISTICS_BLOCK": [4096, 16384],
                                                        "GRADIENT_BLOCK": [2048, 8192]}}  # fmt: skip
        choices = {"weight_gradient": ["addmm_fp32", "triton"]}
        for size in self.vocabularies:

            def make(tokens: int, size: int = size) -> Any:
                labels = torch.randint(0, size, (tokens,), device=self.device)
                weight = self.random(size, self.hidden) * self.hidden**-0.5
                if tokens == self.tokens:  # time it as in training, where the weight gradient is added to a buffer
                    collect(weight, torch.zeros_like(weight, dtype=torch.float32))
                return [self.random(tokens, self.hidden), weight], lambda b, h, w: linear_cross_entropy(
                    h, w, labels, backend=b
                )

            unit = 2.0 * self.tokens * size * self.hidden
            yield Case("linear_cross_entropy", f"{self.tokens} x {size} x {self.hidden}", names(CROSS_ENTROPY), make,
                       self.tokens, (unit, 3 * unit), "operations", knobs=knobs, choices=choices)  # fmt: skip

    def attentions(self) -> Iterator[Case]:
        length = self.tokens // self.batch
        packs = {
            "uniform": [length] * self.batch,
            "ragged": [length // 2, length // 4 + 3, length // 4 - 3, length // 2 + 5, length // 2 - 5],
            "documents": [max(1, (40 + 11 * (n % 16)) * self.tokens // 7840) for n in range(64)],
        }
        for label, lengths in packs.items():

            def make(tokens: int, lengths: list[int] = lengths) -> Any:
                scaled = lengths if tokens == self.tokens else [max(1, n * tokens // self.tokens) for n in lengths]
                sequences = PackedSequences.of_lengths(scaled, self.device)
                tensors = [self.random(sequences.num_tokens, n, self.dim) for n in (self.heads, self.kv, self.kv)]
                return tensors, lambda b, q, k, v: attention(q, k, v, sequences, backend=b)

            shape = f"{label} {len(lengths)} x {sum(lengths) // len(lengths)}"
            unit = sum(2.0 * n * n * self.heads * self.dim for n in lengths)  # half of two products, as it is causal
            yield Case("attention", shape, names(ATTENTION), make, self.tokens,
                       (unit, 3.5 * unit), "operations")  # fmt: skip

    def optimizer(self) -> Iterator[Case]:
        def make(tokens: int) -> Any:
            n = self.parameters if tokens == self.tokens else 100_003
            state = [torch.rand(n, device=self.device) for _ in range(4)]
            low = torch.empty(n, dtype=torch.bfloat16, device=self.device)
            scale = torch.tensor(0.5, device=self.device)

            def fn(backend: str, *tensors: Tensor) -> Any:
                exact = tensors[0].dtype == torch.float64
                adam_step(*tensors, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, backend=backend,
                          grad_scale=scale.double() if exact else scale, out=None if exact else low)  # fmt: skip
                return tensors[0], tensors[2], tensors[3]

            return state, fn

        work = 30.0 * self.parameters
        yield Case("adam", f"{self.parameters}", names(ADAM), make, self.tokens, (work, work), backward=False,
                   knobs={"megalight.ops.adam.triton": {"BLOCK": [512, 1024, 2048, 4096]}})  # fmt: skip

    def cases(self) -> Iterable[Case]:
        return itertools.chain(self.norms(), self.rotary(), self.activations(), self.linear(), self.losses(),
                               self.attentions(), self.optimizer())  # fmt: skip


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def outcome(
    case: Case, fn: Callable[..., Any], backend: str, inputs: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """Return outputs and gradients."""
    if not case.backward:
        return [t.clone() for t in as_tuple(fn(backend, *(t.clone() for t in inputs)))]
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = as_tuple(fn(backend, *leaves))
    if not grads:
        grads.extend(torch.randn_like(t) for t in outputs)
    given = [g.to(t.dtype) for g, t in zip(grads, outputs, strict=True)]
    return [t.detach() for t in (*outputs, *torch.autograd.grad(outputs, leaves, given))]


def verdict(case: Case, backend: str) -> str | None:
    """Return what is wrong with a backend's results, or None. The check uses an odd number of tokens."""
    torch.manual_seed(0)
    inputs, fn = case.make(min(case.tokens - 1, 999))
    grads: list[Tensor] = []
    exact = outcome(case, fn, "reference", [t.double() for t in inputs], grads)
    try:
        found = outcome(case, fn, backend, inputs, grads)
    except BackendError as error:
        return str(error).partition(f"{backend}: ")[2].partition(";")[0] or str(error)
    errors = [float((a.double() - e).norm() / e.norm()) for a, e in zip(found, exact, strict=True)]
    return None if all(e < TOLERANCE for e in errors) else f"WRONG, relative errors {errors}"


def median_seconds(run: Callable[[], Any], device: str) -> float:
    """Return the median time of ``run``. On a GPU it has no launch gaps."""
    if device == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(WARMUP):
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        run()  # warm up: some backends choose by the times of their first calls
    torch.cuda.synchronize()
    count = max(7, min(41, int(TIMED / max(1e-3, start.elapsed_time(end)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    for _ in range(3):
        graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def timed(case: Case, backend: str, device: str, knobs: str = "") -> Iterator[Row]:
    inputs, fn = case.make(case.tokens)
    leaves = [t.requires_grad_(case.backward) for t in inputs]
    runs: dict[str, Callable[[], Any]] = {"forward": lambda: fn(backend, *inputs)}
    if case.backward:
        outputs = as_tuple(fn(backend, *leaves))
        grads = [torch.randn_like(t) for t in outputs]
        del outputs
        runs["both"] = lambda: torch.autograd.grad(as_tuple(fn(backend, *leaves)), leaves, grads, allow_unused=True)
    for (part, run), work in zip(runs.items(), case.work[: len(runs)], strict=True):
        with torch.set_grad_enabled(part == "both"):
            seconds = median_seconds(run, device)
        is_bytes = case.unit == "bytes"
        floor = work / (BYTES_PER_SECOND if is_bytes else OPERATIONS_PER_SECOND)
        rate = f"{work / seconds / 1e12:.2f} TB/s" if is_bytes else f"{work / seconds / 1e12:.0f} TFLOP/s"
        yield Row(case.op, case.shape, part, backend, seconds * 1e6, floor * 1e6, rate, knobs)


@contextmanager
def setting(module: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def swept(case: Case, device: str) -> Iterator[Row]:
    """Time the Triton backend with all combinations of knobs that compile, and with all choices for other ops."""
    for op, found in case.choices.items():
        for name in found:
            use_backends(**{op: name})
            yield from timed(case, "triton", device, f"{op}={name}")
        use_backends(**{op: "auto"})
    for name, knobs in case.knobs.items():
        module = importlib.import_module(name)
        for combination in itertools.product(*knobs.values()):
            values = dict(zip(knobs, combination, strict=True))
            with setting(module, values):
                try:
                    yield from timed(case, "triton", device, str(values))
                except Exception as error:
                    print(f"{case.op} {case.shape} {values}: {type(error).__name__}", flush=True)


def in_turn(case: Case, backends: Sequence[str], device: str, turns: int) -> dict[str, list[Row]]:
    """Return the rows of each backend, for several turns those of the median time."""
    found: dict[str, list[tuple[Row, ...]]] = {backend: [] for backend in backends}
    for _ in range(turns):
        for backend in backends:
            found[backend].append(tuple(timed(case, backend, device)))
            if device == "cuda":
                torch.cuda.empty_cache()
    return {
        backend: [sorted(part, key=lambda row: row.microseconds)[turns // 2] for part in zip(*rounds, strict=True)]
        for backend, rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--backends", nargs="*", help="only these")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that the script works")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    refused: list[str] = []
    print(f"{'op':21}{'shape':24}{'part':9}{'backend':13}{'us':>9}{'floor':>9}  rate", flush=True)
    for case in Shapes(options.small, device).cases():
        if case.op not in options.only or options.shapes not in case.shape:
            continue
        serving = []
        for backend in options.backends or case.backends:
            if backend not in case.backends or (backend == "reference" and case.op == "attention"):
                continue  # this backend stores the whole matrix of scores: it is only for checks
            reason = verdict(case, backend)
            if reason is None:
                serving.append(backend)
            else:
                refused.append(f"{case.op} {case.shape} {backend}: {reason}")
        for backend, found in in_turn(case, serving, device, options.turns).items():
            found += swept(case, device) if options.sweep and backend == "triton" else ()
            rows += found
            for r in found:
                head = f"{r.op:21}{r.shape:24}{r.part:9}{r.backend:13}"
                print(f"{head}{r.microseconds:9.1f}{r.floor:9.1f}  {r.rate} {r.knobs}", flush=True)
    print("\n".join(refused))
    about = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
    }
    options.results.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows], "refused": refused}, indent=1))
    if any("WRONG" in reason for reason in refused):
        raise SystemExit("some results are wrong; see above")


if __name__ == "__main__":
    main()
