"""Check and time every way to do each part of a mixture-of-experts layer, and compare with the limits of one GPU.

    python benchmarks/moe_ops.py RESULTS.json [--shapes mixtral] [--only product] [--skewed] [--sweep] [--small]

Parts are: the router, its statistics, finding the rows, permuting and unpermuting, weighted SwiGLU, the four grouped
products, both weight gradients, written and added, and all three products of each stack in 16 and in 8 bits, with
casts of tokens and gradients (those of weights are once a step). A way whose result differs from the first one's is
reported and not timed. Times are medians of CUDA graph replays, so the host's work does not count. `floor` is the
time for the bytes at 4.3 TB/s or the operations at 667 TFLOP/s, whichever is longer (measured limits of an H200).
`--skewed` gives the experts different numbers of tokens. `--sweep` also tries other tiles of the Triton kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ops import median_seconds, setting
from benchmarks.roofline import RATES
from megalight.errors import MegalightError
from megalight.imports import has, version
from megalight.ops.activation import gated
from megalight.ops.grouped_linear import PRODUCT, WGRAD, GroupedLinearSpec, grouped_linear
from megalight.ops.grouped_linear.low_precision import OneByOne, StackPrecision
from megalight.ops.grouped_linear.low_precision_stacks import Together
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.permute import permutation, permute, unpermute
from megalight.ops.quantize.recipes import recipe
from megalight.ops.router import Rule, route, statistics

TOLERANCE = 2e-2
LIMIT = RATES["NVIDIA H200"]
TILES = [
    {"ROWS": rows, "COLUMNS": columns, "DEPTH": 64, "GROUP": group, "num_warps": warps, "num_stages": stages}
    for (rows, columns, warps), stages, group in itertools.product(
        ((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4)), (3, 4), (4, 8, 16)
    )
]


@dataclass(frozen=True)
class Shape:
    """One layer: tokens, hidden size, inner width of an expert, experts, and experts of a token."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    k: int

    @property
    def rows(self) -> int:
        return self.tokens * self.k


SHAPES = {
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "qwen3-30b-a3b": Shape(8192, 2048, 768, 128, 8),
}
SMALL = {"small": Shape(64, 32, 16, 4, 2)}


@dataclass
class Row:
    """One part of one layer, done in one way."""

    shape: str
    part: str
    way: str
    microseconds: float
    floor: float
    knobs: str = ""


@dataclass
class Part:
    """One part: its name, bytes and operations, and the ways to do it. The first way is the one to compare with."""

    name: str
    moved: float
    operations: float
    ways: dict[str, Callable[[], Any]] = field(default_factory=dict)
    knobs: tuple[str, ...] = ()

    @property
    def floor(self) -> float:
        """Least seconds."""
        return max(self.moved / LIMIT.memory, self.operations / LIMIT.gemm)


class Layer:
    """The tensors of one layer, and its parts."""

    def __init__(self, shape: Shape, device: str, skewed: bool) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(0)
        self.logits = torch.randn(shape.tokens, shape.experts, device=device)
        if skewed:  # the first expert gets several times the mean
            self.logits -= torch.linspace(0, 2, shape.experts, device=device)
        self.routes = route(self.logits, Rule(shape.k))
        self.where = permutation(self.routes.experts, shape.experts)
        ends = [0, *self.where.offsets.tolist()]
        self.sizes = [end - start for start, end in itertools.pairwise(ends)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(torch.bfloat16)

    def both(self, fn: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
        """Return a function that runs ``fn`` forward and backward, with the same gradients for every ``fn``."""
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        seeds: list[Tensor] = []

        def run() -> Any:
            outputs = as_tuple(fn(*leaves))
            if not seeds:
                torch.manual_seed(1)
                seeds.extend(torch.randn_like(t) for t in outputs)
            return torch.autograd.grad(outputs, leaves, seeds)

        return run

    def router(self) -> Iterator[Part]:
        shape, rule, experts = self.shape, Rule(self.shape.k), self.routes.experts
        logits, chosen = shape.tokens * shape.experts * 4.0, shape.rows * 12.0
        backends = ("reference", "triton")
        yield Part("route, both", 3 * logits + 2 * chosen, 0, {
            b: self.both(lambda x, b=b: route(x, rule, backend=b).probs, self.logits) for b in backends})  # fmt: skip
        yield Part("statistics, both", 3 * logits, 0, {
            b: self.both(lambda x, b=b: statistics(x, shape.k, backend=b).scores, self.logits)
            for b in backends})  # fmt: skip
        yield Part("permutation", shape.rows * 12.0, 0, {
            b: lambda b=b: permutation(experts, shape.experts, backend=b).positions for b in backends})  # fmt: skip

    def movement(self) -> Iterator[Part]:
        shape, where = self.shape, self.where
        x, rows, probs = (
            self.random(shape.tokens, shape.hidden),
            self.random(shape.rows, shape.hidden),
            self.routes.probs,
        )
        moved = (shape.tokens + shape.rows) * shape.hidden * 2.0
        backends = ("reference", "triton")
        yield Part("permute", moved, 0, {
            b: lambda b=b: permute(x, where, probs, b) for b in backends})  # fmt: skip
        yield Part("permute, both", 2 * moved, 0, {
            b: self.both(lambda x, p, b=b: permute(x, where, p, b), x, probs) for b in backends})  # fmt: skip
        yield Part("unpermute", moved, 0, {b: lambda b=b: unpermute(rows, where, None, b) for b in backends})
        yield Part("unpermute, both", 2 * moved, 0, {
            b: self.both(lambda r, b=b: unpermute(r, where, None, b), rows) for b in backends})  # fmt: skip
        yield Part("unpermute weighted, both", 2 * moved + shape.rows * shape.hidden * 2.0, 0, {
            b: self.both(lambda r, p, b=b: unpermute(r, where, p, b), rows, probs) for b in backends})  # fmt: skip

    def activation(self) -> Iterator[Part]:
        shape = self.shape
        x, weights = self.random(shape.rows, 2 * shape.ffn), torch.rand(shape.rows, device=self.device)
        unit = shape.rows * shape.ffn * 2.0

        def separate(x: Tensor, w: Tensor) -> Tensor:
            return (gated(x) * w[:, None]).to(x.dtype)

        backends = ("reference", "triton")
        yield Part("weighted swiglu", 3 * unit, 0, {
            **{b: lambda b=b: gated(x, "silu", b, weights=weights) for b in backends},
            "two kernels": lambda: separate(x, weights)})  # fmt: skip
        yield Part("weighted swiglu, both", 8 * unit, 0, {
            **{b: self.both(lambda x, w, b=b: gated(x, "silu", b, weights=w), x, weights) for b in backends},
            "two kernels": self.both(separate, x, weights)})  # fmt: skip

    def products(self) -> Iterator[Part]:
        shape, offsets = self.shape, self.where.offsets
        for name, out, width in (("up", 2 * shape.ffn, shape.hidden), ("down", shape.hidden, shape.ffn)):
            weight = self.random(shape.experts, out, width) * width**-0.5
            spec = GroupedLinearSpec.of(self.random(1, 8), weight, self.sizes)
            runs = {b.name: b.fn for b, reason in PRODUCT.table(spec) if reason is None and b.name != "reference"}
            operations = 2.0 * shape.rows * out * width
            for transposed, size in ((True, width), (False, out)):
                x = self.random(shape.rows, size)
                moved = 2.0 * (shape.rows * (out + width) + weight.numel())
                ways = {
                    way: lambda run=run, x=x, w=weight, t=transposed: run(x, w, offsets, self.sizes, t)
                    for way, run in runs.items()
                }
                if len(set(self.sizes)) == 1:
                    batch = x.view(shape.experts, -1, size), weight.mT if transposed else weight
                    ways["equal groups: bmm"] = lambda a=batch: torch.bmm(*a).flatten(0, 1)
                direction = "forward" if transposed else "input gradient"
                yield Part(f"product {name}, {direction}", moved, operations, ordered(ways), ("PRODUCT", "FEW"))

    def weight_gradients(self) -> Iterator[Part]:
        shape, offsets = self.shape, self.where.offsets
        for name, out, width in (("up", 2 * shape.ffn, shape.hidden), ("down", shape.hidden, shape.ffn)):
            x, grad_y = self.random(shape.rows, width), self.random(shape.rows, out)
            main_grad = torch.zeros(shape.experts, out, width, device=self.device)
            spec = GroupedLinearSpec.of(x, main_grad, self.sizes)
            runs = {b.name: b.fn for b, reason in WGRAD.table(spec) if reason is None and b.name != "reference"}
            if self.device == "cuda" and hasattr(F, "grouped_mm"):

                def temporary(main: Tensor, g: Tensor, x: Tensor, ends: Tensor, _: Any, write: bool) -> None:
                    made = F.grouped_mm(g.t(), x, offs=ends)
                    main.copy_(made) if write else main.add_(made)

                runs["grouped_mm, then add"] = temporary
            for write in (True, False):
                moved = 2.0 * shape.rows * (out + width) + main_grad.numel() * (4.0 if write else 8.0)
                ways = {
                    way: lambda run=run, m=main_grad, g=grad_y, x=x, w=write: run(m, g, x, offsets, self.sizes, w) or m
                    for way, run in runs.items()
                }
                verb = "written" if write else "added"
                operations = 2.0 * shape.rows * out * width
                # what is added grows from way to way: only what is written can be compared
                yield Part(f"weight gradient {name}, {verb}", moved, operations, ordered(ways), ("WGRAD", "PAIR"))

    def stacks(self) -> Iterator[Part]:
        shape, offsets = self.shape, self.where.offsets
        for name, out, width in (("up", 2 * shape.ffn, shape.hidden), ("down", shape.hidden, shape.ffn)):
            values, x = self.random(shape.experts, out, width) * width**-0.5, self.random(shape.rows, width)
            grad = self.random(shape.rows, out)
            operations, moved = 6.0 * shape.rows * out * width, 6.0 * (shape.rows * (out + width) + values.numel())

            def way(
                precision: StackPrecision | None,
                sizes: Sequence[int] | None = self.sizes,
                values: Tensor = values,
                x: Tensor = x,
                grad: Tensor = grad,
            ) -> Callable[[], Any]:
                weight, leaf = values.clone().requires_grad_(), x.clone().requires_grad_()
                state_of(weight).stack_precision = precision

                def run() -> Any:
                    y = grouped_linear(leaf, weight, offsets, sizes)
                    return y, *torch.autograd.grad(y, (leaf, weight), grad)

                return run

            yield Part(f"stack {name}, 16 bits", moved, operations, {"grouped": way(None)})
            for kind in ("tensorwise", "rowwise"):
                session, emulate = Session(), self.device == "cpu"
                session.inside = True  # as in a step, after the first micro-batch
                one = OneByOne([LowPrecision(recipe(kind), session, emulate=emulate) for _ in range(shape.experts)])
                ways = {"one by one": way(one)}
                if Together.why_not(values, recipe(kind), emulate) is None:
                    for kept, always in (("cast together", False), ("together", True)):
                        # Without `always`, large experts are cast together and multiplied one by one.
                        ways[kept] = way(
                            Together(recipe(kind), session, count=shape.experts, always=always, emulate=emulate)
                        )
                yield Part(f"stack {name}, {kind}", moved, operations, ways)

    def parts(self) -> Iterator[Part]:
        yield from self.router()
        yield from self.movement()
        yield from self.activation()
        yield from self.products()
        yield from self.weight_gradients()
        yield from self.stacks()


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def ordered(ways: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Put the loop over library products first."""
    return dict(sorted(ways.items(), key=lambda way: way[0] != "loop"))


def difference(part: Part, way: str, expected: list[Tensor]) -> float:
    """Return the largest relative difference of a way's results from those expected."""
    found = [t.detach().float() for t in as_tuple(part.ways[way]())]
    return max(float((a - e).norm() / e.norm().clamp(min=1e-20)) for a, e in zip(found, expected, strict=True))


def swept(part: Part, device: str) -> Iterator[tuple[str, float]]:
    """Yield the seconds of the Triton kernel for every tile that compiles."""
    from megalight.ops.grouped_linear import triton as module

    for tile in TILES:
        with setting(module, {name: dict(tile) for name in part.knobs}):
            try:
                yield str(tile), median_seconds(part.ways["triton"], device)
            except Exception as error:  # too much shared memory, for example
                print(f"{part.name} {tile}: {type(error).__name__}: {str(error)[:100]}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--only", default="", help="only parts whose name contains this")
    parser.add_argument("--skewed", action="store_true", help="experts get different numbers of tokens")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--small", action="store_true", help="a tiny shape: shows that the script works")
    options = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    wrong: list[str] = []
    print(f"{'shape':15}{'part':32}{'way':22}{'us':>10}{'floor':>9}", flush=True)
    for name, shape in (SMALL if options.small else SHAPES).items():
        if options.shapes not in name:
            continue
        for part in Layer(shape, device, options.skewed).parts():
            if options.only not in part.name:
                continue
            expected: list[Tensor] | None = None
            for way in part.ways:
                try:
                    if expected is None:
                        expected = [t.detach().float() for t in as_tuple(part.ways[way]())]
                    elif "added" not in part.name and not (found := difference(part, way, expected)) < TOLERANCE:
                        wrong.append(f"{name}: {part.name}: {way} differs by {found:.1e}")
                        continue
                    times = [("", median_seconds(part.ways[way], device))]
                except MegalightError as error:
                    print(f"{name:15}{part.name:32}{way:22} {str(error)[:120]}", flush=True)
                    continue
                except RuntimeError as error:  # a wait for the device cannot be captured
                    print(f"{name:15}{part.name:32}{way:22} not timed: {str(error).splitlines()[0]}", flush=True)
                    continue
                if options.sweep and way == "triton" and part.knobs:
                    times += swept(part, device)
                for knobs, seconds in times:
                    rows.append(Row(name, part.name, way, seconds * 1e6, part.floor * 1e6, knobs))
                    rate = f"{part.operations / seconds / 1e12:.0f} TFLOP/s" if part.operations else (
                        f"{part.moved / seconds / 1e12:.2f} TB/s")  # fmt: skip
                    head = f"{name:15}{part.name:32}{way:22}{seconds * 1e6:10.1f}{part.floor * 1e6:9.1f}"
                    print(f"{head}  {rate} {knobs}", flush=True)
            del part, expected
    about = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": version("triton") if has("triton") else None,
        "cuda": torch.version.cuda,
    }
    options.results.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows], "wrong": wrong}, indent=1))
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
