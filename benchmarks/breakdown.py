"""Where a step's time goes on one device, from the kernels of a profiled step.

Every instant of the step belongs to one part: the first of :data:`PARTS` with a running kernel, or ``idle``. So
communication that overlaps with computation is not counted. ``exposed`` is communication that runs alone, including the
time of waiting for another rank. ``accounted`` is the sum of all parts divided by the step's seconds on the host.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Spans = list[tuple[float, float]]
Kernel = tuple[str, float, float]
"""Name, start and end in seconds."""

PARTS = ("gemm", "attention", "optimizer", "other", "exposed")
"""Parts of a step, without idle time. Each instant belongs to the first part with a running kernel."""

NAMES: tuple[tuple[str, str], ...] = (
    ("exposed", r"nccl|gloo|symm_mem|multimem|all_?reduce|all_?gather|reduce_scatter|c10d|memcpy ptop|^_wait(_with)?$"),
    ("attention", r"flash|fmha|sdpa|attention|attn|dot_do_o|convert_dq|^_merge$"),
    (
        "optimizer",
        r"adam|multi_tensor|lp_?norm|l2norm|normtwoops|foreach|optimizer|clip_grad|linalg_vector_norm|^_step$",
    ),
    (
        "gemm",
        r"gemm|gemv|nvjet|cutlass|xmma|cublas|matmul|split_?k|wgrad|wgmma|triton_tem|^_(accumulate|product|weight_gradient)$"
        r"|aten::(addmm|mm|bmm|baddbmm|linear|_scaled_mm|mkldnn_linear)",
    ),
)
"""Part -> substrings of the names of its kernels, checked in this order. All other kernels are ``other``."""

_PATTERNS = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in NAMES)


def part_of(name: str) -> str:
    """Return the part of a step to which a kernel belongs, by its name."""
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), "other")


def union(spans: Spans) -> Spans:
    """Join overlapping spans, and sort them."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(spans: Spans) -> float:
    """Return the total length of joined spans."""
    return sum(end - start for start, end in spans)


def divide(kernels: Iterable[Kernel], seconds: float | None = None) -> dict[str, Any]:
    """Return a step's parts in seconds, their sum divided by ``seconds`` (host), the longest kernels, gaps and waits.

    ``computing`` is everything except communication and idle time. ``communicating`` is all communication, overlapped
    or not.
    """
    kernels = list(kernels)
    if not kernels:
        return {}
    spans: dict[str, Spans] = {part: [] for part in PARTS}
    for name, start, end in kernels:
        spans[part_of(name)].append((start, end))
    found: dict[str, Any] = {}
    covered: Spans = []
    for part in PARTS:
        before = length(covered)
        covered = union(covered + spans[part])
        found[part] = length(covered) - before
    step = covered[-1][1] - covered[0][0]
    found["idle"] = step - length(covered)
    found["step"] = step
    found["computing"] = sum(found[part] for part in PARTS if part != "exposed")
    found["communicating"] = length(union(spans["exposed"]))
    found["gaps"] = gaps(kernels)
    found["waits"] = waits(kernels)
    if seconds is not None:
        found["seconds"] = seconds
        found["accounted"] = step / seconds
    found["kernels"] = longest(kernels)
    return found


def longest(kernels: Iterable[Kernel], count: int = 32) -> list[dict[str, Any]]:
    """Return the kernels with the most time, by name: their part, number, and total seconds."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, start, end in kernels:
        sums[name][0] += 1
        sums[name][1] += end - start
    ranked = sorted(sums.items(), key=lambda item: -item[1][1])[:count]
    return [
        {"name": name[:120], "part": part_of(name), "calls": int(calls), "seconds": spent}
        for name, (calls, spent) in ranked
    ]


def gaps(kernels: Iterable[Kernel], count: int = 8) -> list[dict[str, Any]]:
    """Return the longest idle times: start (from the start of the step), seconds, kernels before and after."""
    found: list[dict[str, Any]] = []
    last, until, begin = "", None, 0.0
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if until is None:
            begin = start
        elif start > until:
            found.append({"at": until - begin, "seconds": start - until, "after": last[:80], "before": name[:80]})
        if until is None or end > until:
            last, until = name, end
    return sorted(found, key=lambda gap: -gap["seconds"])[:count]


def waits(kernels: Iterable[Kernel], count: int = 24) -> list[dict[str, Any]]:
    """Return the longest times with messages alone: start (from the step's), seconds, message, kernel after."""
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    messages = [kernel for kernel in ordered if part_of(kernel[0]) == "exposed"]
    found: list[dict[str, Any]] = []
    for first, last, after in _free(ordered):
        inside = [
            (max(start, first), min(end, last), name) for name, start, end in messages if start < last and end > first
        ]
        if inside:
            seconds = length(union([(start, end) for start, end, _ in inside]))
            message = max(inside, key=lambda part: part[1] - part[0])[2]
            at = first - ordered[0][1]
            found.append({"at": at, "seconds": seconds, "message": message[:80], "before": after[:80]})
    return sorted(found, key=lambda wait: -wait["seconds"])[:count]


def _free(ordered: list[Kernel]) -> Iterator[tuple[float, float, str]]:
    """Yield the times in which nothing is computed: start, end, and the kernel that ends it."""
    if not ordered:
        return
    until = ordered[0][1]
    for name, start, end in ordered:
        if part_of(name) == "exposed":
            continue
        if start > until:
            yield until, start, name
        until = max(until, end)
    yield until, max(end for _, _, end in ordered), ""


def between_flags(kernels: Iterable[Kernel], flag: str) -> list[Kernel]:
    """Return what lies between the first and the last kernel with ``flag`` in its name; others are cut at these ends.

    Raises:
        ValueError: there are not two such kernels.
    """
    kernels = list(kernels)
    ends = [(start, end) for name, start, end in kernels if flag in name]
    if len(ends) < 2:
        raise ValueError(f"{len(ends)} kernels are named {flag!r}; two mark the ends of a step.")
    first, last = min(end for _, end in ends), max(start for start, _ in ends)
    inside = [(name, max(start, first), min(end, last)) for name, start, end in kernels if flag not in name]
    return [(name, start, end) for name, start, end in inside if end > start]


def breakdown(profiler: Any, seconds: float, device: str, flag: str) -> dict[str, Any]:
    """Apply :func:`divide` to the step between two flags in the record of a stopped profiler.

    On CPU it uses torch's operators.
    """
    events = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type.name.lower() == device
        and not getattr(event, "is_user_annotation", False)
        and (device == "cuda" or event.name.startswith("aten::"))
    ]
    return divide(between_flags(events, flag), seconds)
