"""Attention over several GPUs: a ring, its blocks alone, and the other kinds of context parallelism.

    torchrun --nproc_per_node 4 benchmarks/ring.py [--tokens 32768 131072] [--kinds ring all_gather] [--output OUT.json]

The heads are those of an 8-billion-parameter model (32 query and 8 key heads of 128) in bf16, with one causal sequence
divided in zigzag order over all ranks. "blocks alone" is the ring without its messages: the difference to the ring is
exposed communication. "one GPU" is attention over the whole sequence on one GPU, the limit per GPU. Before timing,
outputs and gradients of every kind are compared with one GPU's float32 attention on a short sequence. Times are medians
of the slowest rank. FLOPs count the lower triangle, and 2.5 times as many in the backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn import InnerAttention
from megalight.ops.attention import attention, reference_attention
from megalight.parallel.context import ring
from megalight.parallel.context.attention import Attend, choose
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.parallel.mesh import ParallelMesh
from megalight.types import PackedSequences

HEADS, KV_HEADS, DIM = 32, 8, 128
CHECKED_TOKENS = 8192
"""Of a sequence: enough that blocks are as long as those that kernels for Hopper serve."""
TOLERANCE = 1.5e-2


def inputs(tokens: int) -> list[Tensor]:
    """Make queries, keys, values and a gradient of the output, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(tokens, heads, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def check(call: Callable[..., Tensor], rank: int, size: int) -> None:
    """Stop the run if this rank's output or gradients differ from those of one GPU."""
    sequences = PackedSequences.of_uniform(1, CHECKED_TOKENS, "cuda")
    share, index = sequences.zigzag(rank, size)
    q, k, v, grad = inputs(CHECKED_TOKENS)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    wanted = reference_attention(*exact, sequences, True, None, None, None, 0.0)
    wanted.backward(grad.float())
    mine = [x[index].requires_grad_() for x in (q, k, v)]
    out = call(*mine, share)
    out.backward(grad[index])
    true = (wanted, *(x.grad for x in exact))
    for name, found, whole in zip(("output", "q", "k", "v"), (out, *(x.grad for x in mine)), true, strict=True):
        error = ((found.float() - whole[index]).norm() / whole[index].norm()).item()
        if not error <= TOLERANCE:
            raise SystemExit(f"rank {rank}: {name} is off by {error:.2e}; not timed")


def milliseconds(step: Callable[[], None], repeats: int, warm_up: int = 3) -> float:
    """Return the median of the slowest rank's times."""
    times = []
    for repeat in range(warm_up + repeats):
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        if repeat >= warm_up:
            times.append(start.elapsed_time(stop))
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def measure(
    call: Callable[..., Tensor], tensors: list[Tensor], sequences: PackedSequences, repeats: int
) -> list[float]:
    """Return milliseconds of the forward pass, and of forward and backward."""
    q, k, v, grad = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            call(q, k, v, sequences)

    def both() -> None:
        torch.autograd.grad(call(*leaves, sequences), leaves, grad)

    return [milliseconds(step, repeats) for step in (forward, both)]


@contextmanager
def no_messages() -> Iterator[None]:
    """Make rings compute every block with their own keys and send nothing."""
    with patch.object(ring._Ring, "send", lambda _, x: ring._Flight([], x, x)):
        yield


def urgent_group() -> ProcessGroup:
    """Make a group of all ranks whose messages have priority over computation that waits for SMs."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(pg_options=options)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="of the whole sequence")
    parser.add_argument("--kinds", nargs="+", default=["ring"], help="of context parallelism")
    parser.add_argument("--inner", type=int, default=2, help="ranks of the inner level of all_to_all_ring")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = ParallelMesh(size, rank, cp=size)
    plain, urgent = ContextGroups(mesh, arguments.inner), ContextGroups(mesh, arguments.inner)
    urgent.__dict__["all"] = urgent_group()
    inner = InnerAttention(causal=True)
    spec = ContextSpec(
        size,
        arguments.inner,
        (HEADS, KV_HEADS),
        causal=True,
        window=False,
        chunk=False,
        softcap=False,
        dropout=False,
        softmax="vanilla",
        backend=inner.backend,
    )

    def bound(attend: Attend, groups: ContextGroups) -> Callable[..., Tensor]:
        return lambda q, k, v, sequences: attend(inner, q, k, v, sequences, groups)

    calls = {kind: bound(choose("benchmark", spec, kind).fn, plain) for kind in arguments.kinds}
    if "ring" in calls:
        calls["ring, urgent messages"] = bound(ring.attend, urgent)
    for call in calls.values():
        check(call, rank, size)
    if "ring" in calls:
        calls["ring, blocks alone"] = calls["ring"]
    rows = []
    for tokens in arguments.tokens:
        whole = PackedSequences.of_uniform(1, tokens, "cuda")
        share, index = whole.zigzag(rank, size)
        repeats = max(3, arguments.repeats * 32768 // max(tokens, 32768))
        tensors = inputs(tokens)
        named = {}
        for name, call in calls.items():
            with no_messages() if name.endswith("alone") else nullcontext():
                named[name] = measure(call, [x[index] for x in tensors], share, repeats)
        named["one GPU"] = measure(attention, tensors, whole, 3)
        flops = 2 * tokens**2 * HEADS * DIM
        for name, times in named.items():
            each = flops if name == "one GPU" else flops / size
            rows.append(
                {
                    "tokens": tokens,
                    "kind": name,
                    "forward_ms": times[0],
                    "both_ms": times[1],
                    "forward_tflops": each / times[0] / 1e9,
                    "both_tflops": 3.5 * each / times[1] / 1e9,
                }
            )
    if rank == 0:
        machine = {
            "command": f"torchrun --nproc_per_node {size} benchmarks/ring.py --kinds {' '.join(arguments.kinds)}",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        print(machine)
        for row in rows:
            print(
                f"{row['tokens']:>7} {row['kind']:24} forward {row['forward_ms']:8.2f} ms {row['forward_tflops']:5.0f} "
                f"TFLOP/s   with backward {row['both_ms']:8.2f} ms {row['both_tflops']:5.0f} TFLOP/s per GPU"
            )
        if arguments.output:
            arguments.output.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
