"""Models of `transformers` in a plain LightningModule: one GPU with FusedOps, and two GPUs with tensor parallelism.

    python benchmarks/hf_modules.py RESULT.json --part qwen3
    torchrun --nproc-per-node 2 benchmarks/hf_modules.py RESULT.json --part qwen3
    python benchmarks/hf_modules.py RESULT.json --part tiny      # on the CPU, to try the script
    ... --rows "megatron true fused" --profile                   # kernels of a step by time

Each shape is that of a published model with fewer layers, with random weights. On one GPU, rows train it with
Lightning's DDP (also with `torch.compile`) and with our strategy (bf16-mixed, or bf16 weights with float32 masters).
On two, with the tensor parallelism of `transformers`, which `accelerate` uses, too (`tp_plan="auto"`, bf16 weights, a
plain loop), with ours, with our own GPT in the same layout, and with torch's FSDP2. All rows of a call run one after
the other in the same processes, and the file keeps those of earlier calls. Figures are medians of late steps, and
first losses must agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    },
    "glm4": {
        "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 2,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "tiny": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
    },
}  # fmt: skip
"""Qwen3-8B, Gemma-3 4B and GLM-4 9B with 8 layers, gpt-oss 20B with 2, and one for the CPU."""
ROWS = {
    1: ("ddp", "ddp compile", "megatron", "megatron fused", "megatron true fused"),
    2: ("transformers tp2", "megatron true tp2", "megatron true tp2 fused", "gpt true tp2", "fsdp2"),
}
"""GPUs -> names of rows, whose words say what they are; ``true``: bf16 weights with float32 masters."""
TOLERANCE = 2e-2
"""Relative difference of first losses. bf16 rounds each row otherwise."""
SEQUENCE, SAMPLES, STEPS = 2048, 4, 12


class Measured:
    """One row: its device and batches, and the time and loss of its steps.

    Args:
        part: name of the shape.
        row: name of the row.
        profile: record kernels. Rates are lower then.
    """

    def __init__(self, part: str, row: str, profile: bool = False) -> None:
        import torch

        from megalight.models.hf_causal_lm import HFConfig

        self.words, self.tiny = set(row.split()), part == "tiny"
        self.profile, self.profiler = profile and not self.tiny, None
        self.config: Any = HFConfig(SHAPES[part]).read
        self.device = torch.device("cpu" if self.tiny else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.marks: list[float] = []
        self.losses: list[float] = []

    def batches(self) -> Iterator[Any]:
        """Yield the same random rows ``[B, S]`` in every row of a part."""
        import torch

        draws = torch.Generator().manual_seed(0)
        for _ in range(4 if self.tiny else STEPS):
            yield torch.randint(self.config.vocab_size, (2, 16) if self.tiny else (SAMPLES, SEQUENCE), generator=draws)

    def net(self, dtype: Any) -> Any:
        """Return the model with random weights, which are equal on all ranks."""
        import torch
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        torch.manual_seed(0)
        with self.device:
            return loader.from_config(self.config, dtype=dtype).train()

    def mark(self, loss: Any) -> None:
        """Note the end of a step. With ``profile``, record the steps but the first half."""
        import torch

        if not self.losses:
            self.losses.append(float(loss))
        if not self.tiny:
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        if self.profile and len(self.marks) == STEPS // 2:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()

    def steps(self) -> list[float]:
        """Return the seconds of late steps."""
        return [b - a for a, b in pairwise(self.marks[len(self.marks) // 2 - 1 :])]

    def figures(self) -> dict[str, Any]:
        """Return the median rate of late steps, the peak of memory, and the first loss."""
        import torch

        seconds = statistics.median(self.steps())
        peak = 0.0 if self.tiny else torch.cuda.max_memory_allocated() / 2**30
        rate = next(self.batches()).numel() / seconds
        found = {"tokens_per_second": rate, "peak_gib": peak, "loss": self.losses[0]}
        return found | ({"kernels": self.kernels()} if self.profiler else {})

    def kernels(self) -> list[str]:
        """Return the kernels that took the most time of a recorded step, as lines; the first is the sum."""
        assert self.profiler is not None
        self.profiler.stop()
        steps = len(self.marks) - STEPS // 2
        found = sorted(self.profiler.key_averages(), key=lambda each: -each.self_device_time_total)
        total = sum(each.self_device_time_total for each in found) / steps / 1e3
        lines = [f"{total:8.2f} ms on the device in a step of {statistics.median(self.steps()) * 1e3:.2f} ms"]
        for each in found[:32]:
            spent, count = each.self_device_time_total / steps / 1e3, each.count / steps
            lines.append(f"{spent:8.2f} ms  {count:6.1f} x {spent / count * 1e3:8.1f} us  {each.key[:110]}")
        return lines


def by_transformers(row: Measured) -> None:
    """Train with the tensor parallelism of ``transformers``, which splits a model while it reads a folder."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    shared = [tempfile.mkdtemp(dir=memory) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    try:
        if dist.get_rank() == 0:
            row.net(row.dtype).save_pretrained(shared[0])
        dist.barrier()
        model = loader.from_pretrained(shared[0], tp_plan="auto", dtype=row.dtype).train()
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(shared[0]))
    by_hand(row, model, lambda ids: ids)


def by_fsdp2(row: Measured) -> None:
    """Train with torch's ``fully_shard``, each rank on its own samples."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = row.net(torch.float32)
    policy = MixedPrecisionPolicy(row.dtype, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    by_hand(row, model, lambda ids: ids.chunk(dist.get_world_size())[dist.get_rank()])


def by_hand(row: Measured, model: Any, share: Callable[[Any], Any]) -> None:
    """Train in a plain loop; ``share`` takes a rank's rows of a batch."""
    import torch
    import torch.distributed as dist

    # A fused step takes no group in which only some tensors are divided.
    groups: dict[type, list[Any]] = defaultdict(list)
    for parameter in model.parameters():
        groups[type(parameter.data)].append(parameter)
    optimizer = torch.optim.AdamW([{"params": each} for each in groups.values()], lr=1e-5, fused=True)
    for ids in row.batches():
        ids = share(ids).to(row.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        row.mark(mean / dist.get_world_size())


def by_lightning(row: Measured) -> None:
    """Train a plain LightningModule, or our own GPT, under Lightning's strategy or ours."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from megalight.callbacks import FusedOps
    from megalight.models.gpt import GPTModule
    from megalight.models.gpt.hugging_face import config_from_transformers
    from megalight.optim import AdamConfig
    from megalight.strategies import MegatronStrategy
    from megalight.types import TokenBatch

    words = row.words

    class Chat(pl.LightningModule):
        reads_weights = False

        def __init__(self) -> None:
            super().__init__()
            self.net = row.net(torch.float32)
            if "compile" in words:
                self.net.compile(backend="aot_eager" if row.tiny else "inductor")

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(input_ids=ids, labels=ids, use_cache=False).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    class Clock(pl.Callback):
        reads_weights = False

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
            row.mark(outputs["loss"])

    degree = 2 if "tp2" in words else 1
    # Our experts under tensor parallelism take each token once.
    experts = degree > 1 and "gpt" in words and hasattr(row.config, "num_local_experts")
    half = "bf16-true" if "true" in words else "bf16-mixed"
    trainer = pl.Trainer(
        accelerator=row.device.type,
        devices=degree,
        strategy="ddp" if "ddp" in words else MegatronStrategy(tensor_parallel=degree, sequence_parallel=experts),
        precision="32-true" if row.tiny else half,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[Clock(), *([FusedOps()] if "fused" in words else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data: Any = list(row.batches())
    module: pl.LightningModule
    if "gpt" in words:
        module = GPTModule(config_from_transformers(row.config.to_dict()), AdamConfig(lr=1e-5))
        # As many tokens as the others read; the last of a row has no loss there.
        mask = torch.ones(data[0].shape)
        mask[:, -1] = 0
        data = [TokenBatch(ids, ids.roll(-1, 1), mask) for ids in data]
    else:
        module = Chat()
    trainer.fit(module, DataLoader(data, batch_size=None))


def measure(part: str, name: str, profile: bool) -> dict[str, Any]:
    """Train one row in this process, which may be one of two, and free its memory."""
    import torch

    if not torch.cuda.is_available() and part != "tiny":
        return {"failed": "there is no GPU"}
    row = Measured(part, name, profile)
    if not row.tiny:
        # NCCL and `transformers` take the current device.
        torch.cuda.set_device(row.device)
        torch.cuda.reset_peak_memory_stats()
    run = by_transformers if "transformers" in row.words else by_fsdp2 if "fsdp2" in row.words else by_lightning
    began = time.perf_counter()
    try:
        run(row)
        found = row.figures()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:600]}
    found["seconds"] = time.perf_counter() - began
    torch.compiler.reset()
    gc.collect()
    if not row.tiny:
        torch.cuda.empty_cache()
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run rows of one shape in this process, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON file to write, or to add to")
    parser.add_argument("--part", choices=[*SHAPES], default=["qwen3"], nargs="+", help="shapes, one after the other")
    parser.add_argument("--rows", nargs="+", help="only these, each in quotes")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step by time")
    a = parser.parse_args(words)
    import torch.distributed as dist

    gpus, first = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("RANK", "0") == "0"
    if gpus > 1:
        dist.init_process_group("gloo" if a.part == ["tiny"] else "nccl")
    record: dict[str, Any] = json.loads(a.result.read_text()) if a.result.exists() else {}
    failed = False
    for part, row in ((part, row) for part in a.part for row in a.rows or ROWS[gpus]):
        rows = record.setdefault(f"{part}, {gpus} GPU{'s' * (gpus > 1)}", {})
        rows[row] = found = measure(part, row, a.profile)
        base = next((each for each in rows.values() if "loss" in each), found)
        if "loss" in found and abs(found["loss"] / base["loss"] - 1) > TOLERANCE:
            found["failed"] = f"its first loss {found['loss']:.4f} differs from {base['loss']:.4f}"
        elif "loss" in found:
            found["ratio"] = found["tokens_per_second"] / base["tokens_per_second"]
        failed |= "failed" in found
        if first:
            print("\n".join(found.get("kernels", [])))
            shown = {name: value for name, value in found.items() if name != "kernels"}
            print(part, "|", gpus, "|", row, "|", shown, flush=True)
            # After each row: a call that is cut short has the rows before.
            a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if gpus > 1:
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
