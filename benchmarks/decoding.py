"""Generation on one GPU: attention through block tables, and the Llama-3-8B shape with random weights in bf16.

    python benchmarks/decoding.py kernels RESULT.json    # checks, then GB/s of decode attention beside a copy
    python benchmarks/decoding.py splits RESULT.json     # attention of 64 mixed texts: rules that split their keys
    python benchmarks/decoding.py models RESULT.json     # batch 1, 64 mixed requests, a long prompt
    python benchmarks/decoding.py fp8 RESULT.json        # weights in bf16 and in FP8, one text and 64; kernels
    python benchmarks/decoding.py long RESULT.json       # 32 texts of 8,192 tokens, from steps at three lengths
    python benchmarks/decoding.py suspend RESULT.json    # suspend and resume: seconds, and bytes that they free
    python benchmarks/decoding.py graphs RESULT.json     # requests at random with no, decode and all graphs; captures
    python benchmarks/decoding.py guesses RESULT.json    # rounds with guesses that wait for the last one, and others
    python benchmarks/decoding.py peers RESULT.json      # `transformers` on the same shape
    python benchmarks/decoding.py invariant RESULT.json  # what batch-invariant mode costs, in half of the layers
    python benchmarks/decoding.py modules RESULT.json    # one of `transformers` (Qwen3-8B shape) on the engine
    torchrun --nproc-per-node 2 benchmarks/decoding.py divided RESULT.json  # shapes of 8B and 32B over GPUs

``--package FOLDER`` imports Megalight from another checkout, to time two in one call. Wrong kernels are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def median(run: Callable[[], Any], times: int = 30) -> float:
    """Return seconds of a call, by events."""
    for _ in range(5):
        run()
    spans = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in spans)[times // 2] / 1e3


def copy_bandwidth() -> float:
    """Return bytes per second of a large copy, read and written."""
    source = torch.randn(1 << 30, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 4.0 * source.numel() / median(lambda: target.copy_(source))


E4M3 = "e4m3"
"""In the place of ``shared``: latents in e4m3; where keys and values have equal sizes, these."""


def make(queries: list[int], totals: list[int], heads: tuple[int, int], sizes: tuple[int, int], shared: Any) -> Any:
    """Return queries, pools and pages, with blocks in any order; of e4m3 scales, too, and of latents rotated keys."""
    from megalight.types import Pages

    page, sequences = 16, len(totals)
    width = -(-max(totals) // page)
    order = torch.randperm(sequences * width, device="cuda").to(torch.int32)
    table = order.view(sequences, width)
    cu_queries = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32, device="cuda")
    lengths = torch.tensor(totals, dtype=torch.int32, device="cuda")
    nothing = torch.zeros(sum(queries), dtype=torch.int64, device="cuda")
    slots = torch.arange(sequences, device="cuda")
    pages = Pages(table, lengths, cu_queries, nothing, slots, page, tuple(queries), tuple(totals), True)
    rows = sequences * width * page
    k = torch.randn(rows, heads[1], sizes[0], device="cuda", dtype=torch.bfloat16)
    latent = shared and sizes[0] > sizes[1]
    v = k[..., : sizes[1]] if latent else torch.randn(rows, heads[1], sizes[1], device="cuda", dtype=torch.bfloat16)
    q = torch.randn(sum(queries), heads[0], sizes[0], device="cuda", dtype=torch.bfloat16)
    if shared != E4M3:
        return q, k, v, pages
    from megalight.ops.paged_append import quantize_heads

    values, scales = quantize_heads(v)
    if latent:
        return q, values, values, pages, (scales, scales), k[..., sizes[1] :].contiguous()
    keys, key_scales = quantize_heads(k)
    return q, keys, values, pages, (key_scales, scales)


CHECKS: list[tuple[list[int], list[int], tuple[int, int], tuple[int, int], Any, Row]] = [
    ([1] * 4, [5, 300, 1, 77], (32, 8), (128, 128), False, {}),
    ([1] * 4, [5, 300, 1, 77], (24, 8), (80, 80), False, {"window": 20, "softcap": 5.0}),
    ([1, 1, 3, 5], [9, 200, 130, 5], (8, 8), (64, 64), False, {"chunk": 16}),
    ([1, 1, 200, 300], [9, 200, 230, 300], (32, 8), (128, 128), False, {}),
    ([1, 1, 200], [9, 200, 230], (16, 2), (256, 256), False, {"window": 50, "sink": True}),
    ([1, 1, 3], [90, 2000, 230], (128, 1), (576, 512), True, {}),
    ([1, 100], [90, 300], (16, 1), (576, 512), True, {}),
    ([1, 1, 3], [90, 2000, 230], (32, 8), (128, 128), E4M3, {}),
    ([1, 1, 3], [90, 2000, 230], (128, 1), (576, 512), E4M3, {}),
    ([1, 100], [90, 300], (16, 1), (576, 512), E4M3, {}),
]


def check() -> float:
    """Compare the kernels with the reference in float64; return the largest relative error."""
    from megalight.ops.paged_attention import paged_attention

    worst = 0.0
    for queries, totals, heads, sizes, shared, options in CHECKS:
        q, k, v, pages, *eight = make(queries, totals, heads, sizes, shared)
        options = options | dict(zip(("scales", "rotary_pool"), eight, strict=False))
        if options.get("sink"):
            options["sink"] = torch.randn(heads[0], device="cuda", dtype=torch.bfloat16)
        found = paged_attention(q, k, v, pages, backend="triton", **options).double()
        options |= {"sink": options["sink"].double()} if "sink" in options else {}
        kd = k if eight else k.double()
        vd = v if eight else kd[..., : sizes[1]] if shared else v.double()
        exact = paged_attention(q.double(), kd, vd, pages, backend="reference", **options)
        error = float((found - exact).norm() / exact.norm())
        print(f"check {queries} {totals} {heads} {sizes} {list(options)}: {error:.1e}", flush=True)
        if not error < 8e-3:
            raise SystemExit("the kernels are wrong; nothing is timed")
        worst = max(worst, error)
    return worst


TIMED: list[tuple[str, int, int, tuple[int, int], tuple[int, int], Any]] = [
    ("64 x 8192", 64, 8192, (32, 8), (128, 128), False),
    ("1 x 131072", 1, 131072, (32, 8), (128, 128), False),
    ("64 x 1024", 64, 1024, (32, 8), (128, 128), False),
    ("MLA 64 x 8192, 16 heads", 64, 8192, (16, 1), (576, 512), True),
    ("MLA 64 x 8192, 128 heads", 64, 8192, (128, 1), (576, 512), True),
    ("e4m3 64 x 8192", 64, 8192, (32, 8), (128, 128), E4M3),
    ("MLA e4m3 64 x 8192, 16 heads", 64, 8192, (16, 1), (576, 512), E4M3),
    ("MLA e4m3 64 x 8192, 128 heads", 64, 8192, (128, 1), (576, 512), E4M3),
]


WIDE = [
    (16, 64, 4, 4),
    (16, 64, 4, 3),
    (16, 64, 4, 7),
    (16, 128, 4, 2),
    (16, 128, 8, 5),
    (16, 32, 4, 5),
    (16, 64, 2, 5),
]
LATENT = [(16, 32, 4, 2), (16, 64, 4, 2), (16, 64, 8, 2), (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2)]
LATENT_E4M3 = [(16, 32, 4, 3), (16, 64, 4, 5), (16, 64, 8, 5), (64, 64, 8, 3), (64, 32, 8, 5)]
LONG = [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)]


class Variants:
    """Times the kernels with other rows and keys of a block, warps and stages, and other parts of the keys."""

    def __init__(self) -> None:
        from megalight.ops.paged_attention import triton as module

        self.module, self.own = module, (module._blocks, module.splits_of)
        self.rows: list[Row] = []

    def seconds(self, given: Any, blocks: Any, splits: Any) -> float | None:
        """Return seconds of a call; None: it needs too much shared memory."""
        from megalight.ops.attention.batch_invariant import PagedAttentionOptions

        self.module._blocks = self.own[0] if blocks is None else lambda *_: blocks
        self.module.splits_of = self.own[1] if splits is None else lambda *_: splits
        options = PagedAttentionOptions(True, *[None] * 5, *given[4:])
        try:
            return median(lambda: self.module.paged_attention(*given[:4], options))
        except Exception as error:
            print(blocks, splits, type(error).__name__, flush=True)
            return None

    def decode(self, name: str, given: Any, size: int, copy: float, blocks: Any) -> None:
        """Time a decode step that reads ``size`` bytes: block shapes first, then parts with the best of them."""
        best: tuple[float, Any] = (1.0, None)
        for kind in (None, *blocks):
            seconds = self._row(name, given, size, copy, kind, None)
            best = min(best, (seconds, kind), key=lambda each: each[0])
        for splits in (1, 4, 16, 64) if blocks else ():
            self._row(name, given, size, copy, best[1], splits)

    def _row(self, name: str, given: Any, size: int, copy: float, blocks: Any, splits: Any) -> float:
        seconds = self.seconds(given, blocks, splits)
        if seconds is None:
            return 1.0
        rate = size / seconds
        self.rows.append({"shape": name, "blocks": blocks, "splits": splits, "gb_per_s": rate / 1e9})
        self.rows[-1]["of_copy"] = rate / copy
        print(f"{name:30} {blocks} {splits}: {rate / 1e9:.0f} GB/s, {rate / copy:.0%} of copy", flush=True)
        return seconds


def kernels(arguments: argparse.Namespace) -> Row:
    """Check and time the kernels, with several block shapes and splits unless only the chosen ones are asked for."""
    variants = Variants()
    worst, copy = check(), copy_bandwidth()
    for name, count, length, heads, sizes, shared in TIMED:
        if arguments.shapes not in name:
            continue
        latent = sizes[0] > sizes[1]
        size = count * length * heads[1] * (sizes[0] + (0 if latent else sizes[1])) * 2
        if shared == E4M3:
            # A byte less for each feature of a latent, or of a key and a value, and a scale.
            size -= count * length * heads[1] * (sizes[1] - 4) * (1 if latent else 2)
        given = make([1] * count, [length] * count, heads, sizes, shared)
        forms = [each for each in (LATENT_E4M3 if shared == E4M3 else LATENT) if each[0] <= max(16, heads[0])]
        variants.decode(name, given, size, copy, () if arguments.chosen else forms if latent else WIDE)
        del given
        torch.cuda.empty_cache()
    for queries, length in () if arguments.shapes else ((2048, 8192), (512, 8192)):
        given = make([queries], [length], (32, 8), (128, 128), False)
        work = 4 * 32 * 128 * (queries * (length - queries) + queries * queries / 2)
        for blocks in (None, *(() if arguments.chosen else LONG)):
            seconds = variants.seconds(given, blocks, None)
            if seconds is not None:
                rate = work / seconds / 1e12
                variants.rows.append({"shape": f"{queries} of {length}", "blocks": blocks, "tflop_per_s": rate})
                print(f"{queries} of {length} {blocks}: {rate:.0f} TFLOP/s", flush=True)
    return {"worst_error": worst, "copy": copy, "rows": variants.rows}


MIXED = {"1 x 131072": (32, 8), "64 x 8192": (32, 8), "64 mixed": (32, 8), "64 mixed, TP2": (16, 4)}
"""Heads of decode steps of texts."""


def splits(arguments: argparse.Namespace) -> Row:
    """Time attention of decode steps, mixed: of texts of 100 to 1,152 tokens, recorded as in the engine, by rules.

    A rule is the number of parts for each SM (1,000: every text as often as may be) and of stages of the kernel.
    """
    from megalight.ops.attention.batch_invariant import PagedAttentionOptions
    from megalight.ops.jit import overlapping
    from megalight.ops.paged_attention import triton as module

    worst, copy, rows = check(), copy_bandwidth(), []
    own, blocks, may = module.PARTS_PER_SM, module._blocks, module.splits_of
    rules = [(own, None), (3, 5), (1000, None), (None, None), (2, None), (8, None), (own, 5)]
    for name, heads in MIXED.items():
        draws = random.Random(0)
        lengths = [draws.randint(100, 1024) + draws.randint(0, 128) for _ in range(64)]
        lengths = {"1 x 131072": [131072], "64 x 8192": [8192] * 64}.get(name, lengths)
        # As many layers as no cache holds.
        size = sum(lengths) * heads[1] * 256 * 2
        layers = [make([1] * len(lengths), lengths, heads, (128, 128), False) for _ in range(-(-200_000_000 // size))]
        for parts, stages in rules:
            module.PARTS_PER_SM = parts or own
            module.splits_of = (lambda *_: 1) if parts is None else may
            module._blocks = blocks if stages is None else lambda *_, stages=stages: (16, 64, 4, stages)

            def run(layers: Any = layers) -> None:
                for each in layers:
                    module.paged_attention(*each, PagedAttentionOptions())

            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), overlapping(layers[0][0].device):
                run()
            seconds = median(graph.replay, 20) / len(layers)
            rows.append({"shape": name, "parts_per_sm": parts, "stages": stages, "us": seconds * 1e6})
            rows[-1]["of_copy"] = size / seconds / copy
            told = f"{seconds * 1e6:.1f} us, {size / seconds / copy:.0%} of copy"
            print(f"{name:16} parts {parts} stages {stages}: {told}", flush=True)
            del graph
        del layers
        torch.cuda.empty_cache()
    module.PARTS_PER_SM, module._blocks, module.splits_of = own, blocks, may
    return {"worst_error": worst, "copy": copy, "rows": rows}


def clock(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds of a call until the device is done, and its result."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    found = run()
    wait()
    return time.perf_counter() - begin, found


def requests(count: int = 64, seed: int = 0) -> list[list[int]]:
    """Return prompts of 100 to 1,024 tokens."""
    draws = random.Random(seed)
    return [[draws.randrange(10, 120000) for _ in range(draws.randint(100, 1024))] for _ in range(count)]


def llama(layers: int = 32, name: str = "llama3_8b") -> Any:
    """Return the Llama-3-8B shape with random weights, or another one."""
    from dataclasses import replace

    from megalight.models.gpt import GPT
    from megalight.models.gpt.presets import preset

    config = replace(preset(name), max_sequence_length=8192 + 64, num_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = GPT(config)
    torch.set_default_dtype(torch.float32)
    model = model.to("cuda", torch.bfloat16).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model


def models(arguments: argparse.Namespace) -> Row:
    """Time Megalight on the Llama-3-8B shape."""
    from megalight.inference import DynamicEngine, SamplingParams, generate

    model = llama()
    greedy, asked = SamplingParams(temperature=0), requests()
    out: Row = {}

    def complete(prompts: list[list[int]], new: int) -> Any:
        engine = DynamicEngine(model, num_blocks=6000, block_size=16, max_sequences=64, step_tokens=2048)
        for prompt in prompts:
            engine.add(prompt, max_new_tokens=new, sampling_params=greedy)
        return engine

    one = [asked[0][:128]]
    few = generate(model, one, max_new_tokens=8, temperature=0)
    generate(model, one, max_new_tokens=32, temperature=0)
    seconds, text = clock(lambda: generate(model, one, max_new_tokens=64, temperature=0))
    out["generate_batch_1"] = 64 / seconds
    engine = complete(one, 8)
    engine.run()
    for _ in range(3):  # kernels compile and graphs are recorded in the first two
        engine.add(one[0], max_new_tokens=256, sampling_params=greedy)
        seconds, found = clock(engine.run)
    out["engine_batch_1"] = 256 / seconds
    out["same_text"] = next(iter(found.values())).tokens[:64] == text[0] and few[0] == text[0][:8]
    print(out, flush=True)
    out |= steady(engine, one[0], greedy)
    del engine
    # Kernels are compiled first, those of long prompts, too: others would be when prompts first see enough keys.
    long = [[token % 100000 + 10 for token in range(8000)]]
    generate(model, long, max_new_tokens=1, temperature=0)
    seconds, _ = clock(lambda: generate(model, long, max_new_tokens=1, temperature=0))
    out["prefill_tflop_per_s"] = 2 * 8.03e9 * 8000 / seconds / 1e12
    complete(requests(seed=1), 24).run()
    engine = complete(asked, 256)
    if hasattr(engine, "create_cuda_graphs"):
        out["create_graphs_seconds"], _ = clock(engine.create_cuda_graphs)
    torch.cuda.reset_peak_memory_stats()
    spans: list[float] = []
    found = {}

    def run() -> None:
        begin = time.perf_counter()
        for step in engine:
            found.update(step.finished)
            spans.append(time.perf_counter() - begin)
            begin = time.perf_counter()

    seconds, _ = clock(run)
    slow = [span for span in spans if span > 0.02]
    out |= {"steps": len(spans), "steps_above_20_ms": len(slow), "seconds_of_these": sum(slow), "slowest": max(spans)}
    out["engine_64_mixed"] = sum(len(each.tokens) for each in found.values()) / seconds
    out["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    out["uses"] = {str(key): value for key, value in engine.step_log.graph_uses.items()}
    out |= steady(engine, asked[0], greedy, 64)
    print(out, flush=True)
    return out


def steady(engine: Any, prompt: list[int], greedy: Any, count: int = 1) -> Row:
    """Check that decode steps wait for nothing, and time a step beside the replay of its graph alone."""
    if not engine.step_log.graphed:
        return {}
    for _ in range(count):
        engine.add(prompt, max_new_tokens=96, sampling_params=greedy)
    for _ in range(32):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    for _ in range(48):
        engine.step()
    seconds = (time.perf_counter() - begin) / 48
    torch.cuda.set_sync_debug_mode("default")
    engine.run()
    steps = engine._passes.graphs._steps
    graph = next(each for size, each in steps.items() if size.token_count == size.decode_req_count == count)
    recorded = graph.recording
    torch.cuda.synchronize()
    begin = time.perf_counter()
    graph.fill(engine._scheduler.cache, [], [], [], [], None, [], [])
    host = time.perf_counter() - begin
    replay = median(recorded.replay)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        recorded.replay()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70), flush=True)
    return {f"step_ms_{count}": seconds * 1e3, f"replay_ms_{count}": replay * 1e3, f"fill_ms_{count}": host * 1e3}


SHAPES_8B = {
    "qkv": (6144, 4096, ""),
    "o": (4096, 4096, ""),
    "gate_up": (28672, 4096, "silu"),
    "down": (4096, 14336, ""),
}
"""Linear layers of the 8B shape: rows and columns of the weight, and the activation at the end."""


def weight_gb_per_s(tokens: int, block: int | None) -> Row:
    """Return GB/s of products that read so many bytes of weights that no cache holds them, recorded as one graph.

    Args:
        tokens: number of tokens.
        block: columns with one scale of weights in e4m3 (0: the row); None: bf16.
    """
    from megalight.ops.jit import overlapping
    from megalight.ops.linear import linear, single_product
    from megalight.ops.quantized_weight import store, stored_of

    found: Row = {}
    for name, (out, size, gate) in SHAPES_8B.items():
        weights = []
        for _ in range(-(-400_000_000 // (out * size * (2 if block is None else 1)))):
            weight = torch.nn.Parameter(torch.randn(out, size, device="cuda").bfloat16() / 64, requires_grad=False)
            if block is not None:
                store(weight, "fp8", block or size)
            weights.append(weight)
        codes = stored_of(weights[0])
        total = len(weights) * (weights[0].nbytes if codes is None else codes.nbytes)
        x = torch.randn(tokens, size, device="cuda").bfloat16()
        with torch.no_grad():

            def run(weights: Any = weights, x: Any = x, gate: str = gate) -> None:
                for weight in weights:
                    single_product(x, weight, None, gate=gate) if tokens == 1 and gate else linear(x, weight)

            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), overlapping(x.device):
                run()
            found[name] = total / median(graph.replay, 10) / 1e9
        del weights, graph
        torch.cuda.empty_cache()
    return found


def fp8(arguments: argparse.Namespace) -> Row:
    """Time one text and 64 with weights in bf16 and in FP8 (a scale for each row), and the kernels that read them."""
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.inference.fp8_weights import quantize_weights
    from megalight.ops.linear import gemv

    out: Row = {}
    for tokens, block in ((1, None), (1, 0), (1, 128), (16, None), (16, 0), (64, None), (64, 0), (64, 128)):
        out[f"gb_per_s {tokens} {'bf16' if block is None else block or 'row'}"] = weight_gb_per_s(tokens, block)
    print(json.dumps(out, indent=1), flush=True)
    own, best = (gemv.FP8_ROWS, gemv.FP8_COLUMNS, gemv.FP8_WARPS), {}
    for form in ((4, (4096, 2048), 4), (4, (2048,), 4), (8, (2048,), 4), (8, (4096, 2048), 8), (2, (4096, 2048), 4)):
        gemv.FP8_ROWS, gemv.FP8_COLUMNS, gemv.FP8_WARPS = form
        best[str(form)] = weight_gb_per_s(1, 0)
        print(form, best[str(form)], flush=True)
    gemv.FP8_ROWS, gemv.FP8_COLUMNS, gemv.FP8_WARPS = own
    model, greedy, prompt = llama(), SamplingParams(temperature=0), requests()[0][:128]
    for name in ("bf16", "fp8"):
        if name == "fp8":
            quantize_weights(model)
            torch.cuda.empty_cache()
        row: Row = {"gib": torch.cuda.memory_allocated() / 2**30}
        engine = DynamicEngine(model, num_blocks=2000, block_size=16, max_sequences=64, step_tokens=2048)
        for count in (1, 64):
            for turn in range(3):  # the first two compile kernels and record graphs; the second finds its prompts
                for _ in range(count):
                    engine.add(prompt, max_new_tokens=256 if turn == 2 else 8, sampling_params=greedy)
                seconds, found = clock(engine.run)
            row[f"tokens_per_s_{count}"] = sum(len(each.tokens) for each in found.values()) / seconds
        del engine
        out[name] = row
        print(name, row, flush=True)
    for count in (1, 64):
        out[f"ratio_{count}"] = out["fp8"][f"tokens_per_s_{count}"] / out["bf16"][f"tokens_per_s_{count}"]
    return out | {"forms": best}


def long(arguments: argparse.Namespace) -> Row:
    """Time 32 texts of 8,192 tokens each: decode steps at three lengths, and Simpson's rule between them.

    A step takes the longer the more keys it reads, which is linear. All 8,192 steps would take a minute or more.
    """
    from megalight.inference import DynamicEngine, SamplingParams

    model, greedy, count, timed = llama(), SamplingParams(temperature=0), 32, 32
    draws, out = random.Random(0), Row()
    engine = DynamicEngine(model, num_blocks=count * 516, block_size=16, max_sequences=count, step_tokens=4096)
    steps: list[float] = []
    for length in (96, 96, 4064, 8064):  # kernels are compiled and graphs recorded in the first
        for _ in range(count):
            # Other tokens for each: texts that begin equally would share their keys.
            prompt = [draws.randrange(10, 120000) for _ in range(length)]
            engine.add(prompt, max_new_tokens=timed + 96, sampling_params=greedy)
        begun: dict[int, int] = {}
        while len(begun) < count or min(begun.values()) < 4:
            step = engine.step()
            for number in step.tokens if step is not None else ():
                begun[number] = begun.get(number, 0) + 1
        seconds, _ = clock(lambda: [engine.step() for _ in range(timed)])
        steps.append(seconds / timed)
        engine.run()
    low, middle, high = steps[1:]
    out["step_ms"] = {"0": low * 1e3, "4096": middle * 1e3, "8192": high * 1e3}
    out["seconds_32_x_8192"] = 8192 * (low + 4 * middle + high) / 6
    weights = sum(each.nbytes for each in model.parameters()) - model.embed.word.weight.nbytes
    keys = count * 4096 * 32 * 2 * 8 * 128 * 2  # of all layers, at half of the length
    out["roofline_seconds"] = 8192 * (weights + keys) / copy_bandwidth()
    out["graphed_steps"] = {str(key): value for key, value in engine.step_log.graph_uses.items()}
    return out


def suspend(arguments: argparse.Namespace) -> Row:
    """Time two suspends and resumes of an engine with graphs and 32 running texts, and which share of bytes they free.

    The first pins memory of the host, and moves weights to addresses that stay. ``slowdown`` is that of the first step
    after the second; ``captures``: how many graphs are recorded after resume; "on demand": no page is prefetched at
    resume; "torch": level 0 in torch's own memory. ``others_take_s`` is how long an allocation takes that gets all that
    was free before, and 95 % of what the suspend gave back; None: it gets less. At levels 1 and 2 only plans "for
    others" try it: the first step then finds pages away.
    """
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.inference import engine as module
    from megalight.parallel.graphs.recorder import CUDARecorder

    model, greedy, out = llama(), SamplingParams(temperature=0), Row()
    record, captures, why_not = CUDARecorder.record, [0], module.why_not

    def counted(*given: Any, **options: Any) -> Any:
        captures[0] += 1
        return record(*given, **options)

    CUDARecorder.record = counted  # type: ignore[method-assign]
    kept: list[Any] = []  # pools of weights that other engines find there

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def others_take(size: int) -> float | None:
        begin = time.perf_counter()
        try:
            pieces = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(size >> 28)]
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        del pieces
        torch.cuda.empty_cache()
        return seconds

    plans: tuple[tuple[str, int, Row], ...] = (
        ("cache and weights, torch", 0, {"weights": True}),  # before they move
        ("cache and weights", 0, {"weights": True}),
        ("cache", 0, {}),
        ("kept cache", 0, {"keep_cache": True}),
        ("cache, torch", 0, {}),
        ("kept cache, torch", 0, {"keep_cache": True}),
        ("cache", 1, {}),
        ("cache for others", 1, {}),
        ("kept cache", 1, {"keep_cache": True}),
        ("cache and weights", 2, {"keep_cache": True, "weights": True}),
        ("cache and weights on demand", 2, {"keep_cache": True, "weights": True}),
    )
    for name, level, options in plans:
        if str(level) not in arguments.levels:
            continue
        begin = time.perf_counter()
        module.why_not = (lambda _: "torch's is asked for") if "torch" in name else why_not
        engine = DynamicEngine(model, num_blocks=4000, max_sequences=32, step_tokens=2048, memory_level=level)
        for prompt in requests(32):
            engine.add(prompt, max_new_tokens=200, sampling_params=greedy)
        for _ in range(24):
            engine.step()
        row: Row = {"level": engine.memory_level, "usual_step_s": clock(engine.step)[0]}
        cache = sum(each.nbytes for each in engine._scheduler.cache.tensors)
        row["cache_gib"] = cache / 2**30
        gone = cache + (sum(each.nbytes for each in model.parameters()) if "weights" in options else 0)
        for turn in ("first_", ""):
            before = free()
            row[f"{turn}suspend_s"], _ = clock(partial(engine.suspend, **options))
            row["freed_share"] = (free() - before) / gone
            if level == 0 or "others" in name:
                row["others_take_s"] = others_take(before + int(0.95 * gone) - 2**28)
            if "demand" in name:
                engine._held_cache.restore = engine._held_weights.restore = lambda: None  # type: ignore[method-assign]
            made = captures[0]
            row[f"{turn}resume_s"], _ = clock(engine.resume)
            row["first_step_s"], _ = clock(engine.step)
            if "demand" in name:
                del engine._held_cache.restore, engine._held_weights.restore
            for _ in range(16):  # prompts have run again after 11
                engine.step()
            row[f"{turn}captures"] = captures[0] - made
        row["slowdown"] = row["first_step_s"] / row["usual_step_s"] - 1
        kept.append(engine._held_weights)
        out[f"{name} {level}"] = row
        print(name, row, f"({time.perf_counter() - begin:.0f} s)", flush=True)
        del engine
        torch.cuda.empty_cache()
    return out


def arrive(engine: Any, count: int, seed: int) -> list[Any]:
    """Let requests come at random, one in about two steps; return the record of each step."""
    from megalight.inference import SamplingParams

    draws, records = random.Random(seed), []
    asked = requests(count, seed)
    while asked or engine.unfinished:
        while asked and (draws.random() < 0.4 or not engine.unfinished):
            params = SamplingParams(temperature=draws.choice([0, 0.7]), top_p=0.9)
            engine.add(asked.pop()[: draws.randint(20, 300)], max_new_tokens=128, sampling_params=params, seed=seed)
        engine.step()
        records.append(engine.step_log.last)
    return records


def busy(profile: Any) -> float:
    """Return seconds in which some kernel runs."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total = end = 0.0
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total / 1e6


def graphs(arguments: argparse.Namespace) -> Row:
    """Time captures, and steps of requests that come at random, with no graphs, with those of decode steps, and all."""
    from megalight.inference import DynamicEngine

    model, out = llama(), Row()
    for name, count, mixed in (("none", 0, 0), ("decode", 16, 0), ("all", 16, 16)):
        found: Row = {}
        path = arguments.result.with_suffix(f".{name}.jsonl")
        options: Row = {"cuda_graphs": count, "cuda_graph_mixed_prefill_count": mixed, "step_log": path}
        engine = DynamicEngine(model, num_blocks=6000, max_sequences=64, step_tokens=512, **options)
        arrive(engine, 8, 1)  # kernels are compiled
        for switch in ("0", "1") if count else ():
            # The first captures compile kernels.
            for _ in range(2):
                engine.suspend()
                engine.resume()
                os.environ["CUDA_GRAPH_CAPTURE_FREEZE_GC"] = switch
                before = torch.cuda.memory_allocated()
                found[f"capture_seconds_freeze_{switch}"], _ = clock(engine.create_cuda_graphs)
                found["capture_gib"] = (torch.cuda.memory_allocated() - before) / 2**30
        found["graphs"] = len(engine._passes.graphs.dimensions) if count else 0
        seconds, records = clock(lambda engine=engine: arrive(engine, 192, 2))
        found["tokens_per_s"] = 192 * 128 / seconds
        found["graphed_share"] = sum(each.graph is not None for each in records) / len(records)
        for kind, own in (("decode", False), ("prompts", True)):
            steps = [each for each in records if (each.dimensions.prefill_req_count > 0) == own]
            for what in ("seconds", "host_seconds", "wait_seconds"):
                ordered = sorted(getattr(each, what) for each in steps)
                found[f"{kind}_{what.removesuffix('seconds')}ms"] = ordered[len(ordered) // 2] * 1e3
            found[f"{kind}_steps"] = len(steps)
        # All the host did but wait.
        found["host_ms_per_step"] = (seconds - sum(each.wait_seconds for each in records)) / len(records) * 1e3
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            span, _ = clock(lambda engine=engine: arrive(engine, 24, 3))
        found["gpu_idle_share"] = 1 - busy(profile) / span
        found["uses"] = {str(key): value for key, value in engine.step_log.graph_uses.items()}
        print(name, found, flush=True)
        out[name] = found
        del engine
        torch.cuda.empty_cache()
    return out


def peers(arguments: argparse.Namespace) -> Row:
    """Time `transformers` on the same shape."""
    import transformers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    out: Row = {"transformers": transformers.__version__}
    ids = torch.randint(10, 1000, (1, 128), device="cuda")
    model.generate(ids, max_new_tokens=8, do_sample=False)
    seconds, _ = clock(lambda: model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False))
    out["generate_batch_1"] = 64 / seconds
    print(out, flush=True)
    model.set_attn_implementation("paged|sdpa")
    settings = GenerationConfig(
        max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=True
    )
    seconds, found = clock(lambda: model.generate_batch(inputs=requests(), generation_config=settings))
    out["generate_batch_64_mixed"] = sum(len(each.generated_tokens) for each in found.values()) / seconds
    return out


QWEN3_8B: Row = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rope_theta": 1000000.0, "tie_word_embeddings": False,
}  # fmt: skip
TINY: Row = QWEN3_8B | {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def modules(arguments: argparse.Namespace) -> Row:
    """Time decoding of a model of `transformers`, one text and 64: its own `generate`, and the engine on its weights.

    Figures are tokens per second from the second token on. Without a GPU, a tiny shape tries the script.
    """
    import transformers

    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.models.fused import fuse
    from megalight.models.hf_causal_lm import HFConfig

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    config = HFConfig(QWEN3_8B if gpu else TINY).read
    made: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        model = made.from_config(config, dtype=dtype).eval()
    length, new = (128, 129) if gpu else (8, 9)
    ids = torch.randint(10, config.vocab_size, (64, length), device=device)
    out: Row = {"transformers": transformers.__version__}

    def timed(run: Callable[[int], Any]) -> tuple[float, Any]:
        """Return seconds of all tokens but the first, and the result."""
        run(new)  # kernels are compiled, and graphs recorded
        first, _ = clock(lambda: run(1))
        seconds, found = clock(lambda: run(new))
        return seconds - first, found

    texts: dict[int, list[list[int]]] = {}
    for batch in (1, 64):
        for cache in ("dynamic", "static") if gpu else ("dynamic",):
            options = {"do_sample": False, "pad_token_id": 0, "cache_implementation": cache}

            def alone(count: int, rows: Any = ids[:batch], options: Row = options) -> Any:
                mask = torch.ones_like(rows)
                return model.generate(rows, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, **options)

            seconds, found = timed(alone)
            out[f"generate_{cache}_{batch}"] = batch * (new - 1) / seconds
            if cache == "dynamic":
                texts[batch] = found[:, length:].tolist()
            print(out, flush=True)
    for name in ("engine", "engine_fused"):
        if name == "engine_fused":
            out["fused_layers"] = fuse(model)
        blocks = 64 * -(-(length + new) // 16)
        engine = DynamicEngine(model, num_blocks=blocks, block_size=16, max_sequences=64, step_tokens=64 * length)
        out[f"{name}_graphs_seconds"], _ = clock(engine.create_cuda_graphs)
        for batch in (1, 64):

            def together(count: int, engine: Any = engine, batch: int = batch) -> Any:
                for row in ids[:batch].tolist():
                    engine.add(row, max_new_tokens=count, sampling_params=SamplingParams(temperature=0))
                return [each.tokens for each in engine.run().values()]

            seconds, found = timed(together)
            out[f"{name}_{batch}"] = batch * (new - 1) / seconds
            # bf16 rounds otherwise, and texts differ behind the first token that does.
            same = torch.tensor(found) == torch.tensor(texts[batch])
            out[f"{name}_same_{batch}"] = float(same.double().mean())
            print(out, flush=True)
        out[f"{name}_graph_uses"] = {str(key): value for key, value in engine.step_log.graph_uses.items()}
        del engine
    return out


def divided(arguments: argparse.Namespace) -> Row:
    """Time the Qwen3-32B shape, and one of 8B, over all GPUs (TP), one text and 64."""
    import os

    import torch.distributed as dist

    import megalight
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.inference.parallel import ParallelGPT
    from megalight.models.gpt import GPT
    from megalight.models.gpt.presets import preset

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group()
    ranks, greedy, out = dist.get_world_size(), SamplingParams(temperature=0), {}
    bandwidth = copy_bandwidth()
    for name in ("llama3_8b", "qwen3_32b"):
        with torch.device("meta"):
            root = GPT(preset(name))
        layout = megalight.Layout(tensor_parallel=ranks)
        split = megalight.parallelize(root, layout, device=device, dtype=torch.bfloat16, seed=0, fill=True)
        model = ParallelGPT(split).eval()
        size = sum(each.numel() * each.element_size() for each in model.parameters())
        size -= sum(each.numel() * each.element_size() for each in model.chunks[0].embed.parameters())
        engine = DynamicEngine(model, num_blocks=6000, block_size=16, max_sequences=64, step_tokens=2048)
        row: Row = {"ranks": ranks, "weight_bytes": size, "copy_bytes_per_s": bandwidth}
        for prompts, new in (([requests()[0][:128]], 128), (requests(), 128)):
            # Kernels are compiled, and graphs recorded, in the first two: the second finds its prompts stored.
            for turn in range(3):
                for prompt in prompts:
                    engine.add(prompt, max_new_tokens=new if turn == 2 else 16, sampling_params=greedy)
                seconds, found = clock(engine.run)
            row[f"tokens_per_s_{len(prompts)}"] = sum(len(each.tokens) for each in found.values()) / seconds
        row["of_roofline_1"] = row["tokens_per_s_1"] * size / bandwidth
        row["uses"] = {str(key): value for key, value in engine.step_log.graph_uses.items()}
        out[name] = row
        if dist.get_rank() == 0:
            print(name, row, flush=True)
        del engine, model
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return out


def invariant(arguments: argparse.Namespace) -> Row:
    """Time half of the layers of the Llama-3-8B shape in batch-invariant mode and without it, in turn."""
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.ops.batch_invariant import batch_invariant_mode
    from megalight.types import PackedSequences

    model, greedy, out = llama(16), SamplingParams(temperature=0), {}
    texts: dict[bool, list[list[int]]] = {}
    tokens = torch.randint(10, 120000, (4097,), device="cuda")
    sequences = PackedSequences.of_lengths([4096], "cuda")
    for turn in range(2):
        for on in (False, True):
            name = "invariant" if on else "plain"
            engine = DynamicEngine(model, num_blocks=3000, max_sequences=64, step_tokens=2048, batch_invariant=on)
            for count, new in ((1, 64), (64, 48)):
                for prompts in (requests(count, seed=1), requests(count)):  # kernels and graphs come first
                    for prompt in prompts:
                        engine.add(prompt[:300], max_new_tokens=new, sampling_params=greedy, log_probs=True)
                    seconds, found = clock(engine.run)
                out[f"{name}_tokens_per_s_{count}_{turn}"] = count * new / seconds
            texts[on] = [each.tokens for each in found.values()]
            del engine

            def train(on: bool = on) -> None:
                with batch_invariant_mode(on):
                    loss = model(tokens[:-1], sequences, tokens[1:]).losses.sum()
                loss.backward()
                model.zero_grad()

            def forward(on: bool = on) -> None:
                with torch.no_grad(), batch_invariant_mode(on):
                    model(tokens[:-1], sequences, tokens[1:])

            forward()
            train()
            out[f"{name}_forward_ms_{turn}"] = clock(forward)[0] * 1e3
            out[f"{name}_training_ms_{turn}"] = clock(train)[0] * 1e3
            print(name, out, flush=True)
    out["equal_texts"] = sum(one == other for one, other in zip(texts[False], texts[True], strict=True))
    return out


def guesses(arguments: argparse.Namespace) -> Row:
    """Time guesses on half of the layers of the Llama-3-8B shape, rounds that wait for the last one and others in turn.

    A random model says again what it said, so n-grams are often right, and a random draft never is.
    """
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.inference.speculator import EagleSpeculator, NGramSpeculator
    from megalight.models.eagle import DraftModel, EagleConfig
    from megalight.nn.init import initialize

    model, greedy, out = llama(16), SamplingParams(temperature=0), {}
    draft = DraftModel(EagleConfig().for_base(model.config)).to("cuda", torch.bfloat16)
    initialize(draft, 3)
    for kind in ("none", "ngrams", "eagle"):
        speculator = {"none": lambda: None, "ngrams": NGramSpeculator, "eagle": lambda: EagleSpeculator(draft, model)}
        engine = DynamicEngine(
            model, num_blocks=3000, max_sequences=64, step_tokens=2048, speculator=speculator[kind](), cuda_graphs=4
        )
        for turn in range(3):  # kernels and graphs come first
            for ahead in (False, True):
                engine._passes.runs_ahead = ahead
                for count, new in ((1, 96), (64, 96)):
                    for prompt in requests(count):
                        engine.add(prompt[:100], max_new_tokens=new, sampling_params=greedy)
                    before = engine.step_log.wait_seconds, engine.draft_rounds.total()
                    seconds, _ = clock(engine.run)
                    name = f"{kind}_{count}_{'ahead' if ahead else 'waits'}_{turn}"
                    out[f"{name}_tokens_per_s"] = count * new / seconds
                    out[f"{name}_wait_share"] = (engine.step_log.wait_seconds - before[0]) / seconds
                    if kind != "none":
                        out[f"{name}_tokens_per_round"] = count * new / (engine.draft_rounds.total() - before[1])
        print(kind, out, flush=True)
        del engine
    return out


def main() -> None:
    """Run a part and write its figures."""
    ways = (kernels, splits, models, fp8, long, suspend, graphs, guesses, invariant, peers, modules, divided)
    parts = {each.__name__: each for each in ways}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("result", type=Path)
    parser.add_argument("--shapes", default="", help="kernels: only shapes of decode steps whose names have this")
    parser.add_argument("--chosen", action="store_true", help="kernels: no other blocks and splits")
    parser.add_argument("--levels", default="012", help="suspend: only these levels of memory, such as 12")
    parser.add_argument("--package", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.package))
    torch.manual_seed(0)
    found = parts[arguments.part](arguments)
    found |= {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}
    arguments.result.write_text(json.dumps(found, indent=1) + "\n")
    print(f"RESULT {arguments.part} { ({key: value for key, value in found.items() if key != 'rows'}) }", flush=True)


if __name__ == "__main__":
    main()
