"""Check and time every way to do each part of a linear layer in 8 bits, and the same parts in bf16.

    python benchmarks/low_precision_ops.py RESULTS.json [--tokens 8192] [--sweep] [--small]

For the four matrices of a layer of an 8-billion-parameter model: finding the largest magnitude, casting a matrix and
its transpose, transposing quantized values, the three products, and adding the weight gradient to a float32 gradient.
For SwiGLU, norm and rotation: finding the magnitudes of their results inside the op. For SwiGLU and gradients of SwiGLU
and
rotation: writing quantized values instead of them. A result that differs from its reference is reported and not timed.
Times are medians of CUDA graph replays.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalight.ops.linear import WGRAD, WeightGradientSpec
from megalight.registry import choose

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ops import median_seconds, setting
from megalight.errors import BackendError, MegalightError
from megalight.imports import version
from megalight.ops.activation import gated
from megalight.ops.activation.quantized import cast_activation, cast_activation_gradient
from megalight.ops.common import measuring
from megalight.ops.norm import add_rms_norm
from megalight.ops.quantize import Quantized, Scheme, amax_of, cast, transpose
from megalight.ops.quantize.amax_history import known_amax
from megalight.ops.rotary import rotary_table, rotate_qkv
from megalight.ops.rotary.quantized import cast_qkv_gradient
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, scaled_accumulate
from megalight.ops.scaled_mm import ScaledMatmulSpec, scaled_mm

X, GRADIENT = Scheme("e4m3"), Scheme("e5m2")
TOLERANCE = 5e-3
HIDDEN, FFN, QKV = 4096, 14336, 6144


@dataclass
class Row:
    """One part of the work for one matrix, done in one way."""

    part: str
    shape: str
    way: str
    microseconds: float
    rate: str


@dataclass
class Way:
    """One way to do a part. ``run`` is timed if ``error`` is small; rates count ``moved`` bytes or ``operations``."""

    part: str
    shape: str
    name: str
    run: Callable[[], Any]
    error: Callable[[], float]
    moved: float = 0.0
    operations: float = 0.0


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def quantized_error(found: Quantized | None, expected: Quantized | None) -> float:
    """Return the fraction of quantized values that differ."""
    if found is None or expected is None:
        return float(found is not expected)
    same = found.data.view(torch.uint8) == expected.data.view(torch.uint8)
    return float(1 - same.double().mean()) + float(found.scale != expected.scale)


def casts(shape: tuple[int, int], scheme: Scheme, x: Tensor) -> Iterator[Way]:
    label, numel = f"{shape[0]} x {shape[1]}", float(x.numel())
    amax = amax_of(x)
    backends = ("triton", "reference")
    yield Way("amax", label, "pass", lambda: amax_of(x), lambda: error(amax_of(x), x.abs().amax()), moved=2 * numel)
    for backend in backends:
        for name, given, tell, moved in (
            ("amax + cast", None, False, 6),
            ("cast", amax, False, 4),
            ("cast that tells", amax, True, 4),
        ):
            run = partial(cast, x, scheme, scheme, amax=given, amax_t=given, tell=tell, backend=backend)

            def wrong(run: Callable[[], Any] = run) -> float:
                pairs = zip(run(), cast(x, scheme, scheme, backend="reference"), strict=True)
                return sum(quantized_error(*pair) for pair in pairs)

            yield Way(name, label, backend, run, wrong, moved=moved * numel)
    quantized, _ = cast(x, scheme, None, amax=amax)
    assert quantized is not None
    for backend in backends:
        turn = partial(transpose, quantized, backend=backend)

        def wrong_turn(turn: Callable[[], Quantized] = turn, quantized: Quantized = quantized) -> float:
            return quantized_error(turn(), transpose(quantized, backend="reference"))

        yield Way("transpose quantized values", label, backend, turn, wrong_turn, moved=2 * numel)


def tiles() -> Iterator[tuple[str, dict[str, int]]]:
    """Yield other block shapes for the Triton kernel that adds weight gradients."""
    for rows, columns, tokens, warps, stages in (
        (128, 128, 128, 8, 3), (128, 128, 64, 8, 4), (128, 128, 128, 4, 4), (64, 256, 128, 8, 3), (128, 256, 128, 8, 3),
    ):  # fmt: skip
        tile = {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "BLOCK_TOKENS": tokens, "GROUP": 8}
        name = f"triton {rows}x{columns}x{tokens} {warps}w {stages}s"
        yield name, {**tile, "num_warps": warps, "num_stages": stages}


def products(out: int, width: int, x: Tensor, grad_y: Tensor, weight: Tensor, sweep: bool) -> Iterator[Way]:
    tokens = len(x)
    label, work = f"{tokens} x {width} -> {out}", 2.0 * tokens * out * width
    (x_r, x_t), (w_r, w_t), (g_r, g_t) = (cast(t, s, s) for t, s in ((x, X), (weight, X), (grad_y, GRADIENT)))

    def product(part: str, a: Quantized, b: Quantized, exact: Callable[[], Tensor]) -> Iterator[Way]:
        for name, fast in (("fast sums", True), ("full sums", False)):
            run = partial(scaled_mm, a, b, torch.bfloat16, fast=fast)

            def wrong(run: Callable[[], Tensor] = run, fast: bool = fast) -> float:
                return error(run(), exact()) / (4 if fast else 1)  # fast accumulation has fewer bits in sums

            yield Way(part, label, name, run, wrong, operations=work)

    def of(a: Quantized, b: Quantized) -> Callable[[], Tensor]:
        return lambda: a.dequantize(torch.float32) @ b.dequantize(torch.float32).T

    yield from product("forward", x_r, w_r, of(x_r, w_r))
    yield from product("input gradient", g_r, w_t, of(g_r, w_t))
    yield Way("forward", label, "bf16", lambda: x @ weight.T, lambda: 0.0, operations=work)
    main = torch.zeros(out, width, device=x.device)
    for row, _ in SCALED_ACCUMULATE.table(_spec(x.device.type)):
        for write in (False, True):
            run = partial(scaled_accumulate, main, g_t, x_t, write=write, backend=row.name)

            def wrong(run: Callable[[], None] = run, write: bool = write) -> float:
                expected = of(g_t, x_t)()
                if write:
                    main.fill_(torch.nan)
                else:
                    expected += main.normal_()
                run()
                return error(main, expected)

            if row.name != "reference" or x.device.type == "cpu":
                name = f"{row.name}{', written' * write}"
                yield Way("weight gradient", label, name, run, wrong, operations=work)
    for name, tile in tiles() if sweep else ():

        def run_tile(tile: dict[str, int] = tile) -> None:
            module = importlib.import_module("megalight.ops.scaled_accumulate")
            with setting(module, {"TILE": tile}):
                try:
                    scaled_accumulate(main, g_t, x_t, backend="triton")
                except Exception as reason:
                    raise BackendError(f"{type(reason).__name__}: {reason}") from reason  # it does not fit the device

        def wrong_tile(run: Callable[[], None] = run_tile) -> float:
            expected = main.normal_() + of(g_t, x_t)()
            run()
            return error(main, expected)

        yield Way("weight gradient", label, name, run_tile, wrong_tile, operations=work)
    spec = WeightGradientSpec(x.device.type, x.dtype, main.dtype)
    yield Way(
        "weight gradient",
        label,
        "bf16",
        lambda: choose(WGRAD, spec)(main, grad_y, x, False),
        lambda: 0.0,
        operations=work,
    )


def _spec(device: str) -> ScaledMatmulSpec:
    return ScaledMatmulSpec(device, GRADIENT, X, torch.float32)


def on_the_way(
    part: str, shape: str, make: Callable[[bool], tuple[Tensor, ...]], moved: float, passed: float
) -> Iterator[Way]:
    """Yield ways to find magnitudes of ``make(measure)``'s results: ``moved`` bytes; extra passes add ``passed``."""
    for measure in (False, True):

        def run(measure: bool = measure) -> list[Tensor]:
            made = make(measure)
            with torch.no_grad():
                return [known_amax(tensor) for tensor in made]

        def wrong(run: Callable[[], list[Tensor]] = run) -> float:
            return sum(error(found, amax_of(tensor.detach())) for found, tensor in zip(run(), make(False), strict=True))

        name = "magnitudes on the way" if measure else "magnitudes in passes"
        yield Way(part, shape, name, run, wrong, moved=moved if measure else moved + passed)


def makers(tokens: int, hidden: int, ffn: int, heads: tuple[int, int, int], device: str) -> Iterator[Way]:
    """Yield ways for the ops whose results are cast: SwiGLU, norms and rotation."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    wide, grad_narrow = random(tokens, 2 * ffn).requires_grad_(), random(tokens, ffn)

    def swiglu(measure: bool) -> tuple[Tensor, ...]:
        y = gated(wide, "silu", backend=measuring("auto", measure))
        return y, *torch.autograd.grad(y, wide, grad_narrow)

    yield from on_the_way("SwiGLU both ways", f"{tokens} x {ffn}", swiglu, 16.0 * tokens * ffn, 6.0 * tokens * ffn)
    x, residual, weight = random(tokens, hidden).requires_grad_(), random(tokens, hidden), random(hidden)
    grads = random(tokens, hidden), random(tokens, hidden)

    def norm(measure: bool) -> tuple[Tensor, ...]:
        outputs = add_rms_norm(x, residual, weight, 1e-5, backend=measuring("auto", measure))
        return outputs[0], *torch.autograd.grad(outputs, x, grads)

    shape, numel = f"{tokens} x {hidden}", float(tokens * hidden)
    yield from on_the_way("add + norm both ways", shape, norm, 16 * numel, 4 * numel)
    queries, keys, dim = heads
    packed = random(tokens, (queries + 2 * keys) * dim).requires_grad_()
    table = rotary_table(torch.arange(tokens, device=device), dim, 5e5)
    turned = [random(tokens, count, dim) for count in (queries, keys, keys)]

    def rotary(measure: bool) -> tuple[Tensor, ...]:
        outputs = rotate_qkv(packed, *heads, *table, backend=measuring("auto", measure))
        return torch.autograd.grad(outputs, packed, turned)

    numel = float(packed.numel())
    yield from on_the_way("rotation both ways", f"{tokens} x {packed.shape[1]}", rotary, 8 * numel, 2 * numel)


def quantized_only(tokens: int, ffn: int, heads: tuple[int, int, int], device: str) -> Iterator[Way]:
    """Yield ways for SwiGLU, its gradient and that of rotation: written and cast, or written quantized alone."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    wide, grad_narrow = random(tokens, 2 * ffn).requires_grad_(), random(tokens, ffn)
    queries, keys, dim = heads
    packed = random(tokens, (queries + 2 * keys) * dim).requires_grad_()
    table = rotary_table(torch.arange(tokens, device=device), dim, 5e5)
    turned = [random(tokens, count, dim) for count in (queries, keys, keys)]
    y, outputs = gated(wide, "silu"), rotate_qkv(packed, *heads, *table)
    amax, values, numel = torch.tensor(8.0, device=device), float(tokens * ffn), float(packed.numel())
    for part, scheme, write, make, moved, saved in (
        (
            "SwiGLU",
            X,
            lambda: gated(wide, "silu"),
            partial(cast_activation, wide, "silu", True),
            6 * values,
            4 * values,
        ),
        (
            "gradient of SwiGLU",
            GRADIENT,
            lambda: torch.autograd.grad(y, wide, grad_narrow, retain_graph=True)[0],
            partial(cast_activation_gradient, grad_narrow, wide, "silu", True),
            10 * values,
            8 * values,
        ),
        (
            "gradient of rotation",
            GRADIENT,
            lambda: torch.autograd.grad(outputs, packed, turned, retain_graph=True)[0],
            partial(cast_qkv_gradient, turned[0], turned[1], turned[2], table[0], table[1], False),
            4 * numel,
            4 * numel,
        ),
    ):

        def both(write: Callable[[], Tensor] = write, scheme: Scheme = scheme) -> Any:
            return cast(write().detach(), scheme, scheme, amax=amax, amax_t=amax)

        def alone(make: Callable[..., Any] = make, scheme: Scheme = scheme) -> Any:
            with torch.no_grad():
                return make(scheme, scheme, amax)[0]

        for name, run, bytes_ in (
            ("written, then cast", both, moved + saved),
            ("quantized values alone", alone, moved),
        ):

            def wrong(run: Callable[[], Any] = run, both: Callable[[], Any] = both) -> float:
                return sum(quantized_error(*pair) for pair in zip(run(), both(), strict=True))

            yield Way(
                part, f"{tokens} x {ffn if 'SwiGLU' in part else packed.shape[1]}", name, run, wrong, moved=bytes_
            )


def ways(tokens: int, small: bool, device: str, sweep: bool = False) -> Iterator[Way]:
    hidden, ffn, qkv = (64, 96, 80) if small else (HIDDEN, FFN, QKV)
    heads = (4, 2, 16) if small else (32, 8, 128)
    yield from makers(tokens, hidden, ffn, heads, device)
    yield from quantized_only(tokens, ffn, heads, device)
    for out, width in ((qkv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)):
        x, grad_y = (torch.randn(tokens, size, device=device).bfloat16() for size in (width, out))
        weight = (torch.randn(out, width, device=device) * 0.02).bfloat16()
        yield from casts((tokens, width), X, x)
        if out != hidden:
            yield from casts((tokens, out), GRADIENT, grad_y)
        yield from products(out, width, x, grad_y, weight, sweep)


def measured(all_ways: Iterator[Way], device: str) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    refused: list[str] = []
    for way in all_ways:
        name = f"{way.part}, {way.shape}, {way.name}"
        try:
            wrong = way.error()
        except MegalightError as reason:
            refused.append(f"{name}: {str(reason).splitlines()[0]}")
            continue
        if not wrong <= TOLERANCE:
            refused.append(f"{name}: WRONG, {wrong:.1e}")
            continue
        seconds = median_seconds(way.run, device)
        rate = f"{way.operations / seconds / 1e12:.0f} TFLOP/s" if way.operations else ""
        rows.append(Row(way.part, way.shape, way.name, seconds * 1e6, rate or f"{way.moved / seconds / 1e12:.2f} TB/s"))
        print(f"{way.part:20}{way.shape:24}{way.name:26}{seconds * 1e6:9.1f} us  {rows[-1].rate}", flush=True)
    return rows, refused


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that the script works")
    parser.add_argument("--sweep", action="store_true", help="other block shapes for the Triton kernel, too")
    arguments = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokens = 64 if arguments.small else arguments.tokens
    rows, refused = measured(ways(tokens, arguments.small, device, arguments.sweep), device)
    print("\n".join(refused))
    about = {
        "command": "python benchmarks/low_precision_ops.py " + " ".join(sys.argv[1:] if words is None else words),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
    }
    arguments.results.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows], "refused": refused}, indent=1))
    return 1 if any("WRONG" in reason for reason in refused) else 0


if __name__ == "__main__":
    raise SystemExit(main())
