"""Time steps of Muon beside Adam on one or more GPUs, predicted first, and count what Newton-Schulz costs.

    python benchmarks/muon.py steps RESULT.json [--micro-batches 4 16 64] [--qk-clip 100]
    torchrun --nproc-per-node 2 benchmarks/muon.py steps RESULT.json --level optim_grads_params
    python benchmarks/muon.py experts RESULT.json       # Qwen3-30B-A3B cut to 8 layers
    python benchmarks/muon.py matmuls RESULT.json       # symmetric products of Newton-Schulz, beside torch's GEMMs
    python benchmarks/muon.py steps RESULT.json --tiny  # a tiny model on the CPU, to try the command

``steps``: an 8B model cut to 16 layers, 4096 tokens in a micro-batch. First one step of ``megalight.optim.Muon`` is
compared with ``torch.optim.Muon`` on the same gradients, and with that of ``emerging_optimizers``, which Megatron-core
uses, if it is installed (Python 3.12). Then whole steps are timed with both optimizers, and with
``--qk-clip`` also with that. Before, the seconds are predicted from counted FLOPs and bytes (`benchmarks/roofline.py`).
``aim_seconds`` is what the update of Muon may take: 1.1 times the FLOPs of Newton-Schulz on the busiest rank, at 0.7 of
the sustained rate of an H200. ``experts`` does the same with 128 experts in each layer, 8 of them for each token.

``matmuls``: ``X X^T`` and ``b S + c S^2`` of the matrices of an 8B layer (and of experts) by ``torch.baddbmm``, by
GEMMs of block rows of the lower triangle, and by the kernel of :mod:`megalight.ops.syrk` with several tiles; then all
of Newton-Schulz. Rates count full products, and errors are against float64.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalight
from benchmarks.peers.megalight import config_of
from benchmarks.roofline import RATES, roofline
from benchmarks.rows import QWEN3_MOE
from benchmarks.step import Step
from megalight.models.gpt import GPT
from megalight.models.gpt.module import GPTModule
from megalight.ops.syrk import reference_syrk, triton_syrk
from megalight.optim import AdamConfig, Muon, MuonConfig
from megalight.optim.muon import newton_schulz, newton_schulz_flops
from megalight.parallel.data_parallel.options import DataParallelOptions
from megalight.types import TokenBatch

RATES_OF_H200 = RATES["NVIDIA H200"]
NEWTON_SCHULZ = 515e12
"""FLOP/s of the whole update of Muon in an earlier run, by which a new one is predicted."""
SHARES = {"steps": 1.0, "experts": 0.86}
"""What steps with Adam have reached of the roofline (8b-16l-bf16 and qwen3-moe-8l of the table of figures)."""
STEPS = {"steps": Step().but("mbs=1 vocab=128256"), "experts": Step().but(f"{QWEN3_MOE} layers=8 mbs=1")}
TINY_STEP = "layers=2 hidden=64 heads=4 kv=4 dim=16 ffn=96 vocab=128 seq=64"
MICRO_BATCHES = (1, 4, 16)
SCORE_BYTES = 12
"""Bytes for each pair of a query and a key that QK-clip moves: scores are written, masked, read."""


def step_of(options: argparse.Namespace) -> Step:
    """Return the shape that is timed."""
    step = STEPS[options.mode]
    if options.tiny:
        step = step.but(TINY_STEP + (" experts=8 topk=2" if step.experts else ""))
    return replace(step, layers=options.layers or step.layers, tp=options.tensor_parallel)


def newton_schulz_of(step: Step) -> int:
    """Return the FLOPs of Newton-Schulz for all hidden matrices."""
    h, d, f = step.hidden, step.head_dim, step.ffn
    attention = ((step.heads * d, h), (step.kv * d, h), (step.kv * d, h), (h, step.heads * d))
    mlp = sum(newton_schulz_flops(m, n) for m, n in ((f, h), (f, h), (h, f))) * max(1, step.experts)
    return step.layers * (sum(newton_schulz_flops(m, n) for m, n in attention) + mlp)


def predict(mode: str, step: Step, counts: Sequence[int], ranks: int) -> dict[str, Any]:
    """Return the seconds of steps that counted work takes at rates measured before."""
    update = newton_schulz_of(step) / ranks / NEWTON_SCHULZ
    scores = step.layers * step.heads / step.tp * step.seq**2 / 2 * SCORE_BYTES / RATES_OF_H200.memory
    found: dict[str, Any] = {"newton_schulz_tflop": newton_schulz_of(step) / 1e12, "micro_batches": {}}
    for count in counts:
        adam = roofline(replace(step, micro=count), RATES_OF_H200, ranks // step.tp).seconds / SHARES[mode]
        found["micro_batches"][count] = {
            "adam": adam,
            "muon": adam + update,
            "ratio": 1 + update / adam,
            "qk_clip": adam + update + count * scores,
        }
    return found


def compare(device: torch.device, tiny: bool) -> dict[str, dict[str, float]]:
    """Return the seconds of a step of single matrices by each optimizer, and how far it is from torch's."""
    shapes = [(64, 64), (192, 64), (64, 192)] if tiny else [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
    torch.manual_seed(0)
    begin = [torch.randn(shape, device=device) * 0.02 for shape in shapes * 2]
    gradients = [torch.randn_like(each) for each in begin]
    optimizers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "torch": lambda parameters: torch.optim.Muon(parameters, 0.01, 0.1, adjust_lr_fn="match_rms_adamw"),
        "megalight": lambda parameters: Muon([{"params": parameters, "whole_matrices": True}], 0.01),
    }
    if find_spec("emerging_optimizers"):  # whose Muon is that of Megatron-core
        peer = import_module("emerging_optimizers.orthogonalized_optimizers").Muon
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "nesterov": True, "extra_scale_factor": 0.2}
        options["coefficient_type"] = "simple"
        # Megatron-core leaves its `use_syrk` out, which tunes 180 tiles for each shape: minutes, before the first step.
        optimizers["emerging_optimizers"] = partial(peer, **options)
    found: dict[str, dict[str, float]] = {}
    reference: list[Tensor] = []
    for name, make in optimizers.items():
        parameters = [nn.Parameter(each.clone()) for each in begin]
        optimizer, taken, step = make(parameters), [], []
        for _ in range(4):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            started = now(device)
            optimizer.step()
            taken.append(now(device) - started)
            step = step or [p.detach() - each for p, each in zip(parameters, begin, strict=True)]
        reference = reference or step
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(step, reference, strict=True))
        found[name] = {"seconds": min(taken), "difference": error}
    if found["megalight"]["difference"] > 0.03:
        raise SystemExit(f"a step differs from torch's by {found['megalight']['difference']:.3f}: nothing is timed")
    return found


MATMULS = ((8, 4096, 4096), (32, 1024, 4096), (2, 4096, 14336), (16, 2048, 2048), (8, 2048, 8192), (85, 768, 2048))
"""Matrices in a batch of 256 MiB, and their sides: attention, keys and values, MLP of an 8B layer; two of a 2B model;
experts."""
TILES = tuple(
    {"ROWS": rows, "COLUMNS": columns, "DEPTH": 64, "GROUP": 8, "num_warps": warps, "num_stages": stages}
    for rows, columns, warps, stages in ((128, 128, 4, 3), (128, 128, 4, 2), (128, 128, 8, 3), (256, 128, 8, 4))
)
"""Tiles of the kernel to try."""


def seconds(function: Callable[[], Any], device: torch.device, least: float) -> float:
    """Return the mean seconds of a call over ``least`` seconds, after as many to warm up: clocks fall under load."""
    begun = now(device)
    function()
    one, count = now(device) - begun, 1
    for _ in range(2):
        begun = now(device)
        for _ in range(count):
            function()
        one = (now(device) - begun) / count
        count = max(1, round(least / one))
    return one


def block_rows(x: Tensor, c: Tensor | None, alpha: float, beta: float, size: int = 512) -> Tensor:
    """Symmetric rank-k update by one GEMM for each block of rows of the lower triangle, and copies across."""
    out = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    for row in range(0, x.shape[1], size):
        left, right = x[:, row : row + size], x[:, : row + size].mT
        place = out[:, row : row + size, : row + size]
        if c is None:
            place.copy_(left @ right)
        else:
            part = c[:, row : row + size, : row + size]
            place.copy_(torch.baddbmm(part, left, right, beta=beta, alpha=alpha))
        out[:, :row, row : row + size] = place[:, :, :row].mT
    return out


def matmuls(device: torch.device, tiny: bool, shapes: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Time symmetric products of every shape in every way."""
    found: list[dict[str, Any]] = []
    ways: dict[str, Callable[..., Tensor]] = {"baddbmm": reference_syrk, "block rows": block_rows}
    if device.type == "cuda":
        ways |= {"triton " + " ".join(map(str, tile.values())): partial(triton_syrk, tile=tile) for tile in TILES}
    least = 0.0 if tiny else 0.15

    def note(product: str, way: str, function: Callable[[], Tensor], flops: int, exact: Tensor | None = None) -> None:
        error = None if exact is None else float((function().double() - exact).norm() / exact.norm())
        taken = seconds(function, device, least)
        one = {"shape": shape, "product": product, "way": way, "seconds": taken, "tflops": flops / taken / 1e12}
        found.append(one | {"error": error})
        print(json.dumps(found[-1]), flush=True)

    torch.manual_seed(0)
    for shape in ((2, 64, 128),) if tiny else shapes:
        matrices = torch.randn(shape, device=device)
        x = (matrices / torch.linalg.matrix_norm(matrices, keepdim=True)).bfloat16()
        square = x @ x.mT
        for product, factor, c, alpha, beta in (("X X^T", x, None, 1.0, 0.0), ("S^2", square, square, 2.03, -4.78)):
            exact = alpha * (factor.double() @ factor.double().mT)
            if c is not None:
                exact += beta * c.double()
            flops = 2 * shape[0] * shape[1] ** 2 * factor.shape[2]
            for way, function in ways.items():
                note(product, way, partial(function, factor, c, alpha, beta), flops, exact)
        flops = shape[0] * newton_schulz_flops(*shape[1:])
        for backend in ("reference", "triton") if device.type == "cuda" else ("reference",):
            note("Newton-Schulz", backend, partial(newton_schulz, matrices, backend=backend), flops)
    return found


def kernels(step: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the kernels of a step that take longest, all launches of one together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        now(device)
    events = sorted(profile.key_averages(), key=lambda event: -float(event.device_time_total))[:20]
    return [{"ms": e.device_time_total / 1e3, "launches": e.count, "kernel": e.key[:110]} for e in events]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace, muon: MuonConfig | None, device: torch.device) -> dict[str, Any]:
    """Return the seconds of steps by number of micro-batches, and the peak of memory."""
    config = config_of(step_of(options))
    layout = megalight.Layout(
        tensor_parallel=options.tensor_parallel,
        sequence_parallel=options.tensor_parallel > 1,
        data_parallel=DataParallelOptions(level=options.level, overlap_param_gather=False),
    )
    with torch.device("meta"):
        root = GPT(config)
    model = megalight.parallelize(root, layout, device=device, dtype=torch.bfloat16)
    optimizer, _ = AdamConfig(lr=1e-4, muon=muon).build(root.named_parameters())
    training = megalight.Training(model, optimizer, GPTModule(config))
    length = config.max_sequence_length
    generator = torch.Generator(device).manual_seed(1 + model.mesh.rank("dp"))
    ids = torch.randint(0, config.vocab_size, (1, length + 1), device=device, generator=generator)
    batch = TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(1, length, device=device))
    found: dict[str, Any] = {"micro_batches": {}}
    for count in options.micro_batches:
        whole, stepped = [], []
        for _ in range(options.repeats + 2):
            started = now(device)
            loss = training.forward_backward([batch] * count).loss
            training.clip_grad_norm(1.0)
            middle = now(device)
            optimizer.step()
            ended = now(device)
            whole.append(ended - started)
            stepped.append(ended - middle)
        found["micro_batches"][count] = {
            "seconds": statistics.median(whole[2:]),
            "optimizer_seconds": statistics.median(stepped[2:]),
            "loss": float(loss),
        }
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if isinstance(optimizer, Muon):
        assert optimizer.exchanges is not None
        load = [sum(of_rank) for of_rank in zip(*(each.load for each, _ in optimizer.exchanges), strict=True)]
        found |= {
            "newton_schulz_tflop": [each / 1e12 for each in load],
            "batches": max(len(each.rounds) for each, _ in optimizer.exchanges),
            "largest_batch_bytes": max(
                sum(len(names) * m * n for (m, n), names in current.own.items()) * optimizer.dtype.itemsize
                for each, _ in optimizer.exchanges
                for current in each.rounds
            ),
            "busiest_over_mean": max(load) * len(load) / sum(load),
            "aim_seconds": 1.1 * max(load) / (0.7 * RATES_OF_H200.gemm),
        }
    print(json.dumps(found), flush=True)
    if muon is not None and options.kernels and device.type == "cuda":
        training.forward_backward([batch])
        found["kernels"] = kernels(optimizer.step, device)
        print(*map(json.dumps, found["kernels"]), sep="\n", flush=True)
    return found


def steps(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Compare one step with torch's, and time steps with Adam and with Muon."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    result: dict[str, Any] = {
        "shape": asdict(step_of(options)),
        "ranks": ranks,
        "level": options.level,
        "predicted": predict(options.mode, step_of(options), options.micro_batches, ranks),
    }
    print(json.dumps({"predicted": result["predicted"]}), flush=True)
    if not options.only:
        result["one_step"] = compare(device, options.tiny)
        print(json.dumps({"one_step": result["one_step"]}), flush=True)
    runs: dict[str, MuonConfig | None] = {"adam": None, "muon": MuonConfig(lr=1e-4)}
    if options.qk_clip:
        runs["qk_clip"] = MuonConfig(lr=1e-4, qk_clip=options.qk_clip)
    for name in [options.only] if options.only else runs:
        if device.type == "cuda":
            gc.collect()  # the model of the run before is in reference cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(name, flush=True)
        result[name] = measure(options, runs[name], device)
    if not options.only:
        result["ratios"] = {
            count: result["muon"]["micro_batches"][count]["seconds"] / taken["seconds"]
            for count, taken in result["adam"]["micro_batches"].items()
        }
    return result


def _shape(text: str) -> tuple[int, int, int]:
    matrices, rows, columns = map(int, text.split("x"))
    return matrices, rows, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=(*STEPS, "matmuls"))
    parser.add_argument("result", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="0: those of the mode")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--level", default="optim")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument("--qk-clip", type=float, help="also time steps with this threshold")
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", default=MATMULS, help="of matmuls: matrices x rows x columns"
    )
    parser.add_argument("--only", choices=("adam", "muon"), help="time these steps alone, without other optimizers")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of one update of Muon")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu")
    if not options.tiny:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group()
    result: dict[str, Any] = {
        "command": "python benchmarks/muon.py " + " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "device": "CPU" if options.tiny else torch.cuda.get_device_name(),
    }
    result |= (
        {"matmuls": matmuls(device, options.tiny, options.shapes)}
        if options.mode == "matmuls"
        else steps(options, device)
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        options.result.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result, indent=1), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
