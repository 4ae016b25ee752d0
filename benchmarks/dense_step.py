"""One dense GPT training step on one or more GPUs: Megalight through Lightning, and peers in the same call.

    python benchmarks/dense_step.py --peers megalight hf-compile --out result.json
    torchrun --nproc-per-node 4 benchmarks/dense_step.py --tp 2

Every peer trains the same shape with AdamW, clipping at norm 1 and float32 gradients or masters, on random tokens.
Model FLOPs per token are 6 x matmul parameters (with the head, without the input embedding) + causal attention.
Before it times anything the script checks Megalight's loss on one batch against a float32 model with the same weights.
Prints and writes seconds per optimizer step (median), TFLOP/s, tokens/s and peak memory, per GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SUSTAINED_TFLOPS = {"NVIDIA H200": 667.0}
"""Measured sustained bf16 matmul rate, the honest ceiling of a training step."""


SIZES = {
    "layers": 16,
    "hidden": 4096,
    "ffn": 14336,
    "heads": 32,
    "kv": 8,
    "vocab": 32000,
    "seq": 4096,
    "mbs": 2,
    "micro": 4,
    "tp": 1,
    "steps": 8,
    "warmup": 4,
}
"""The shape's arguments with their defaults: the width of an 8B model, 16 layers."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=["megalight"], choices=["megalight", "hf", "hf-compile"])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", help="write a table of the time per kernel of one step here")
    parser.add_argument("--out", help="write the results here, as JSON")
    return parser.parse_args()


def flops_per_token(a: argparse.Namespace) -> float:
    head = a.hidden // a.heads
    projections = a.hidden * head * (2 * a.heads + 2 * a.kv)
    matmul = a.layers * (projections + 3 * a.hidden * a.ffn) + a.hidden * a.vocab
    return 6.0 * matmul + 6.0 * a.layers * a.heads * head * a.seq


def random_rows(a: argparse.Namespace, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, a.vocab, (count, a.seq + 1), generator=torch.Generator().manual_seed(seed))


class Clock:
    """Seconds between steps, from device-synchronised readings."""

    def __init__(self) -> None:
        self.readings: list[float] = []

    def tick(self) -> None:
        torch.cuda.synchronize()
        self.readings.append(time.perf_counter())

    def steps(self, warmup: int) -> list[float]:
        return [b - a for a, b in zip(self.readings, self.readings[1:], strict=False)][warmup - 1 :]


def megalight(a: argparse.Namespace) -> list[float]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from megalight.models.gpt import GPTConfig
    from megalight.models.gpt.module import GPTModule
    from megalight.optim import AdamConfig
    from megalight.strategies import MegatronStrategy
    from megalight.types import TokenBatch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = GPTConfig(
        num_layers=a.layers,
        hidden_size=a.hidden,
        num_heads=a.heads,
        num_kv_heads=a.kv,
        ffn_hidden_size=a.ffn,
        vocab_size=a.vocab,
        max_sequence_length=a.seq,
    )
    rows = a.mbs * a.micro
    total = a.warmup + a.steps + 1

    class Rows(torch.utils.data.Dataset[TokenBatch]):
        def __len__(self) -> int:
            return total

        def __getitem__(self, index: int) -> TokenBatch:
            rank = int(os.environ.get("RANK", "0")) // a.tp
            ids = random_rows(a, rows, 1000 * rank + index)
            return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(rows, a.seq))

    clock = Clock()

    class Steps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
            clock.tick()

    Steps.__module__ = "megalight.benchmarks"  # it reads no weights: gathering may go on
    strategy = MegatronStrategy(tensor_parallel=a.tp, sequence_parallel=a.tp > 1, micro_batch_size=a.mbs)
    profiler: Any = None
    if a.profile:
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=total - 2, warmup=1, active=1), on_trace_ready=None
        )

        class Profile(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
                profiler.step()

        Profile.__module__ = "megalight.benchmarks"
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=world,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=total,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[Steps(), *([Profile()] if profiler else [])],
    )
    module = GPTModule(config, optimizer=AdamConfig(lr=1e-4))
    if profiler:
        profiler.start()
    trainer.fit(module, DataLoader(Rows(), batch_size=None, num_workers=2, pin_memory=True))
    if profiler:
        profiler.stop()
        Path(a.profile).write_text(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
    print(f"loss after {total} steps: {float(strategy.report.loss):.4f}", flush=True)
    check_loss(a, module, config)
    return clock.steps(a.warmup)


def check_loss(a: argparse.Namespace, module: Any, config: Any) -> None:
    """The trained bfloat16 model's loss against the same weights in float32; raises when they differ by over 0.5 %."""
    if a.tp > 1:
        return
    from megalight.models.gpt import GPT

    ids = random_rows(a, 1, 10**6).cuda()
    labels, tokens = ids[0, 1:], ids[0, :-1]
    from megalight.types import PackedSequences

    sequences = PackedSequences.of_uniform(1, a.seq, "cuda")
    with torch.no_grad():
        fast = module.model(tokens, sequences, labels=labels).losses.mean()
        with torch.device("meta"):
            wide = GPT(config)
        wide = wide.to_empty(device="cuda").float()
        for ours, theirs in zip(wide.parameters(), module.model.parameters(), strict=True):
            ours.copy_(theirs)
        exact = wide(tokens, sequences, labels=labels).losses.mean()
    error = abs(float(fast) - float(exact)) / float(exact)
    print(f"loss in bf16 {float(fast):.5f}, in float32 {float(exact):.5f}, relative difference {error:.1e}", flush=True)
    if not error < 5e-3:
        raise SystemExit("the loss is wrong; nothing is reported")


def transformers(a: argparse.Namespace, compiled: bool) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=a.vocab,
        hidden_size=a.hidden,
        intermediate_size=a.ffn,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv,
        max_position_embeddings=a.seq,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        index = 0
        while True:
            ids = random_rows(a, a.mbs, index).cuda()
            index += 1
            yield ids[:, :-1], ids[:, 1:]

    source, clock = batches(), Clock()
    for _ in range(a.warmup + a.steps + 1):
        for _ in range(a.micro):
            tokens, labels = next(source)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens).logits
                loss = torch.nn.functional.cross_entropy(logits.float().view(-1, a.vocab), labels.reshape(-1))
            (loss / a.micro).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock.steps(a.warmup)


PEERS: dict[str, Callable[[argparse.Namespace], list[float]]] = {
    "megalight": megalight,
    "hf": lambda a: transformers(a, False),
    "hf-compile": lambda a: transformers(a, True),
}


def main() -> None:
    a = arguments()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.cuda.get_device_name()
    tokens = a.mbs * a.seq * a.micro / a.tp
    rows = []
    for peer in a.peers:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = PEERS[peer](a)
        median = statistics.median(seconds)
        rate = flops_per_token(a) * tokens / median / 1e12
        row = {
            "peer": peer,
            "seconds": median,
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "tflops": rate,
            "share_of_sustained": rate / SUSTAINED_TFLOPS[device] if device in SUSTAINED_TFLOPS else None,
            "tokens_per_second": tokens / median,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        rows.append(row)
        if rank == 0:
            print(
                f"RESULT {peer}: {median:.4f} s/step, {rate:.1f} TFLOP/s, {tokens / median:.0f} tokens/s, "
                f"peak {row['peak_gib']:.1f} GiB",
                flush=True,
            )
    if a.out and rank == 0:
        words = [word for word in sys.argv[1:] if word not in ("--out", a.out, "--profile", a.profile)]
        record = {
            "command": " ".join(["benchmarks/dense_step.py", *words]),
            "device": device,
            "gpus": int(os.environ.get("WORLD_SIZE", "1")),
            "versions": {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda},
            "shape": {name: getattr(a, name) for name in SIZES},
            "rows": rows,
        }
        Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
