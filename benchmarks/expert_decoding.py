"""Generation of the Qwen3-30B-A3B shape with 64 texts, random weights in bf16: on one GPU, or over two with EP.

python benchmarks/expert_decoding.py RESULT.json    # grouped products alone first
torchrun --nproc-per-node 2 benchmarks/expert_decoding.py RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoding import Row, clock, copy_bandwidth, llama, median, requests


def grouped_gb_per_s() -> Row:
    """Return GB/s of products with 64 experts of Qwen3-30B-A3B that have 4 tokens each, recorded as one graph."""
    from megalight.ops.grouped_linear import few_rows, grouped_linear
    from megalight.ops.jit import overlapping
    from megalight.ops.quantized_weight import store, stored_of

    found: Row = {}
    offsets = torch.arange(4, 260, 4, dtype=torch.int32, device="cuda")
    for out, size in ((1536, 2048), (2048, 768)):
        x = torch.randn(512, size, device="cuda").bfloat16()
        stacks = [torch.randn(64, out, size, device="cuda").bfloat16() / 64 for _ in range(2)]
        stacks = [torch.nn.Parameter(stack, requires_grad=False) for stack in stacks]
        plain: Row = {name: partial(grouped_linear, backend=name) for name in ("triton", "grouped_mm")}
        plain["few_rows"] = few_rows.few_rows_product
        for name in (*plain, "decoded e4m3", "e4m3"):
            if name == "decoded e4m3":
                for stack in stacks:
                    store(stack, "fp8", 128)
            forms = ((64, 128), (32, 128), (64, 64), (128, 64)) if name in ("few_rows", "e4m3") else ((64, 128),)
            for few_rows.ROWS, few_rows.COLUMNS in forms:
                product = plain.get(name, few_rows.few_rows_product)

                def run(product: Any = product, x: Any = x, stacks: Any = stacks, name: str = name) -> None:
                    for stack in stacks:
                        if name == "decoded e4m3":
                            grouped_linear(x, stored_of(stack).values(), offsets)
                        else:
                            product(x, stack, offsets)

                with torch.no_grad():
                    run()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph), overlapping(x.device):
                        run()
                read = 2 * 64 * out * size * (1 if "e4m3" in name else 2)
                key = f"{out} x {size} {name} {(few_rows.ROWS, few_rows.COLUMNS)}"
                found[key] = read / median(graph.replay, 10) / 1e9
                del graph
            few_rows.ROWS, few_rows.COLUMNS = 64, 128
        del stacks, plain
        torch.cuda.empty_cache()
    return found


def touched_share(model: Any, engine: Any, greedy: Any, asked: list[list[int]]) -> float:
    """Return which share of the experts some text chooses in a decode step, over all ranks and layers."""
    import torch.distributed as dist

    from megalight.nn.moe.router import Router

    chosen: list[Any] = []
    routers = [module for module in model.modules() if isinstance(module, Router)]

    def keep(router: Any, given: Any, routes: Any) -> None:
        # Other steps read prompts, or some texts have ended.
        if len(routes.experts) == len(asked):
            chosen.append(routes.experts)

    hooks = [each.register_forward_hook(keep) for each in routers]
    for prompt in asked:
        engine.add(prompt, max_new_tokens=64, sampling_params=greedy)
    engine.run()
    for hook in hooks:
        hook.remove()
    counts = torch.stack([torch.bincount(each.flatten(), minlength=128) for each in chosen[-len(routers) :]])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return float((counts > 0).double().mean())


def experts() -> Row:
    """Time the Qwen3-30B-A3B shape with 64 texts: over several GPUs with EP, or on one.

    The roofline reads what a step needs: weights outside of experts, the experts that some text chooses, and keys.
    """
    import torch.distributed as dist

    import megalight
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.inference.parallel import ParallelGPT
    from megalight.models.gpt import GPT
    from megalight.models.gpt.presets import preset

    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device, greedy = torch.device("cuda", rank), SamplingParams(temperature=0)
    torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group()
    # Kernels of one GPU take half of a minute to compile, and are timed on one.
    bandwidth, out = copy_bandwidth(), Row() if ranks > 1 else Row(grouped=grouped_gb_per_s())
    print(json.dumps(out, indent=1), flush=True)
    if ranks > 1:
        with torch.device("meta"):
            root = GPT(preset("qwen3_30b_a3b"))
        layout = megalight.Layout(expert_parallel=ranks)
        split = megalight.parallelize(root, layout, device=device, dtype=torch.bfloat16, seed=0, fill=True)
        model: Any = ParallelGPT(split).eval()
    else:
        model = llama(48, "qwen3_30b_a3b")
    own = 64 // ranks
    asked = requests()[rank * own :][:own]
    options: Row = {"num_blocks": 6000, "block_size": 16, "max_sequences": own, "step_tokens": 2048}
    print("weights are there after", round(time.perf_counter()), "s", flush=True)
    eager = DynamicEngine(model, cuda_graphs=0, **(options | {"num_blocks": 4200}))
    share = touched_share(model, eager, greedy, asked)
    print("of the experts, touched:", share, "after", round(time.perf_counter()), "s", flush=True)
    del eager
    torch.cuda.empty_cache()
    engine, new = DynamicEngine(model, **options), 192
    for turn in range(3):  # kernels are compiled, and graphs recorded, in the first two
        for prompt in asked:
            engine.add(prompt, max_new_tokens=new if turn == 2 else 24, sampling_params=greedy)
        if turn < 2:
            engine.run()
    for number in range(160):
        if number == 32:
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
        if number == 40:
            torch.cuda.synchronize()
            profile.stop()
        engine.step()
    seconds, _ = clock(lambda: [engine.step() for _ in range(16)])
    engine.run()
    parameters = dict(model.named_parameters())
    inside, every = (
        sum(each.nbytes for name, each in parameters.items() if "embed" not in name and part in name)
        for part in (".experts.", "")
    )
    keys = (sum(map(len, asked)) + own * 176) * 48 * 2 * 4 * 128 * 2
    needed = every - inside + share * inside + keys
    out |= {
        "gpus": ranks,
        "touched_share": share,
        "bytes": needed,
        "step_ms": seconds / 16 * 1e3,
        "tokens_per_s": 64 * 16 / seconds,
        "of_roofline": needed / bandwidth / (seconds / 16),
    }
    if not rank:
        print(
            profile.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60), flush=True
        )
    if ranks > 1:
        dist.destroy_process_group()
    return out


def main() -> None:
    """Write the figures to the file that is named."""
    torch.manual_seed(0)
    found = experts() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    print(f"RESULT experts {found}", flush=True)


if __name__ == "__main__":
    main()
