"""Measure what one device can sustain, for :data:`benchmarks.roofline.RATES`: products, attention, copies.

    python benchmarks/ceilings.py RESULT.json
    python benchmarks/ceilings.py RESULT.json --small      # tiny, on the CPU

Each kind of work runs without a pause for `--seconds`. Sustained is the rate of the second half, when clocks have
fallen to what the power limit allows; the burst is that of the first calls after a second of rest.

- ``gemm``: square products of random bf16 matrices of 8192 rows.
- ``gemm_fp8``: the same with e4m3 quantized values, one scale for each matrix, and sums in the fast way.
- ``attention``: forward and backward by cuDNN, causal, two sequences of 4096, 32 heads of 128 features, 8 of keys. It
  counts 6 operations per token, head, feature and token of the sequence, as the roofline does.
- ``memory``: copies of 1 GiB; bytes read and written count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.meter import between, device_name, mark, synchronize
from benchmarks.step import Step
from megalight.ops.attention import attention
from megalight.types import PackedSequences

FIRST = 10
"""Calls of a burst. They are also as many as the host is ahead of the device."""
REST = 1.0

Work = tuple[float, Callable[[], object]]
"""Operations or bytes of a call, and the call."""


def products(device: str, size: int) -> Work:
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3, lambda: torch.mm(left, right, out=out)


def products_fp8(device: str, size: int) -> Work:
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return 2.0 * size**3, lambda: torch._scaled_mm(
        left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def attentions(device: str, length: int) -> Work:
    heads, keys, dim = 32, 8, 128
    sequences = PackedSequences.of_uniform(2, length, torch.device(device))
    wanted = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(2 * length, n, dim, device=device, dtype=wanted, requires_grad=True) for n in (heads, keys, keys)
    )
    gradient = torch.randn(2 * length, heads, dim, device=device, dtype=wanted)

    def call() -> None:
        out = attention(q, k, v, sequences, backend="cudnn" if device == "cuda" else "auto")
        torch.autograd.grad(out, (q, k, v), gradient.view_as(out))

    return 6.0 * heads * dim * length * 2 * length, call


def copies(device: str, size: int) -> Work:
    source = torch.empty(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * size, lambda: target.copy_(source)


KINDS: dict[str, tuple[Callable[[str, int], Work], int, int]] = {
    "gemm": (products, 8192, 128),
    "gemm_fp8": (products_fp8, 8192, 128),
    "attention": (attentions, 4096, 32),
    "memory": (copies, 2**30, 2**16),
}
"""Name of a rate -> what makes its work, its size, and its size on the CPU."""


def measure(work: Work, step: Step, seconds: float) -> dict[str, float]:
    """Return the rates of a burst and of the second half of ``seconds`` of work, per second."""
    amount, call = work
    call()  # kernels are chosen and compiled
    synchronize()
    time.sleep(REST if step.device == "cuda" else 0.0)
    marks = [mark(step)]
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds or len(marks) < 3:
        for _ in range(FIRST):
            call()
        marks.append(mark(step))
        if step.device == "cuda" and len(marks) > 2:
            marks[-2].synchronize()  # the host stays close ahead, so that its clock is the device's
    synchronize()
    half = len(marks) // 2
    return {
        "burst": FIRST * amount / between(marks[0], marks[1]),
        "sustained": FIRST * amount * (len(marks) - 1 - half) / between(marks[half], marks[-1]),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each kind of work")
    parser.add_argument("--small", action="store_true", help="tiny, on the CPU")
    a = parser.parse_args(words)
    step = Step(device="cpu" if a.small else "cuda")
    rates: dict[str, Any] = {}
    for name, (make, size, tiny) in KINDS.items():
        rates[name] = measure(make(step.device, tiny if a.small else size), step, a.seconds)
        print(f"{name}: {rates[name]['burst']:.4g} in a burst, {rates[name]['sustained']:.4g} sustained", flush=True)
    record = {
        "command": " ".join(["benchmarks/ceilings.py", "RESULT.json", *(sys.argv[1:] if words is None else words)[1:]]),
        "device": device_name(step),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "rates": rates,
    }
    a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
