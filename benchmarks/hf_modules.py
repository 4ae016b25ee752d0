"""Models of `transformers` in a plain LightningModule: one GPU with FusedOps, and two GPUs with tensor parallelism.

    python benchmarks/hf_modules.py RESULT.json
    python benchmarks/hf_modules.py RESULT.json --tiny      # tiny sizes on the CPU, to try the script

Each shape is that of a published model with fewer layers. On one GPU, rows train it with Lightning's DDP and with our
strategy (bf16-mixed, or bf16 weights with float32 masters); on two, with the tensor parallelism of `transformers`
(`tp_plan="auto"`, bf16 weights, a plain loop) and with ours. Each row has processes of its own. Figures are medians of
late steps, and first losses of a part must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B, 8 layers": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Gemma-3 4B, 8 layers": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    },
    "GLM-4 9B, 8 layers": {
        "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
    },
    "gpt-oss 20B, 4 layers": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4,
    },
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
    }
}  # fmt: skip
ROWS = {
    1: ("ddp", "megatron", "megatron fused", "megatron true fused"),
    2: ("transformers tp2", "megatron true tp2", "megatron true tp2 fused"),
}
"""GPUs -> names of rows, whose words say what they are; ``true``: bf16 weights with float32 masters."""
TOLERANCE = 2e-2
"""Relative difference of first losses. bf16 rounds each row otherwise."""
SEQUENCE, SAMPLES, STEPS = 2048, 4, 20


def batches(vocabulary: int, tiny: bool) -> Iterator[Any]:
    """Yield the same random rows ``[B, S]`` in every row of a part."""
    import torch

    draws = torch.Generator().manual_seed(0)
    for _ in range(4 if tiny else STEPS):
        yield torch.randint(vocabulary, (2, 16) if tiny else (SAMPLES, SEQUENCE), generator=draws)


def measure(values: dict[str, Any], row: str, tiny: bool) -> dict[str, Any]:
    """Train one row in this process, which may be one of two."""
    import torch

    from megalight.models.hf import HFConfig

    config = HFConfig(values).read
    device = torch.device("cpu" if tiny else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    marks: list[float] = []
    losses: list[float] = []

    def mark(loss: Any) -> None:
        if not losses:
            losses.append(float(loss))
        if not tiny:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    torch.manual_seed(0)
    (by_transformers if row.startswith("transformers") else by_lightning)(config, row, tiny, device, mark)
    seconds = statistics.median(
        b - a for a, b in zip(marks[len(marks) // 2 :], marks[len(marks) // 2 + 1 :], strict=False)
    )
    tokens = next(batches(values["vocab_size"], tiny)).numel()
    peak = 0.0 if tiny else torch.cuda.max_memory_allocated() / 2**30
    return {"tokens_per_second": tokens / seconds, "peak_gib": peak, "loss": losses[0]}


def by_transformers(config: Any, row: str, tiny: bool, device: Any, mark: Any) -> None:
    """Train with the tensor parallelism of ``transformers``, which splits a model while it reads a folder."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo" if tiny else "nccl")
    loader: Any = AutoModelForCausalLM
    dtype = torch.float32 if tiny else torch.bfloat16
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        loader.from_config(config, dtype=dtype).save_pretrained(shared[0])
    dist.barrier()
    model = loader.from_pretrained(shared[0], tp_plan="auto", dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for ids in batches(config.vocab_size, tiny):
        loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mark(loss)
    dist.destroy_process_group()


def by_lightning(config: Any, row: str, tiny: bool, device: Any, mark: Any) -> None:
    """Train a plain LightningModule under Lightning's strategy or ours."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from megalight.callbacks import FusedOps
    from megalight.strategies import MegatronStrategy

    words = set(row.split())
    loader: Any = AutoModelForCausalLM

    class Chat(pl.LightningModule):
        reads_weights = False

        def __init__(self) -> None:
            super().__init__()
            self.net = loader.from_config(config, dtype=torch.float32).train()

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(input_ids=ids, labels=ids, use_cache=False).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    class Clock(pl.Callback):
        reads_weights = False

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
            mark(outputs["loss"])

    degree = 2 if "tp2" in words else 1
    half = "bf16-true" if "true" in words else "bf16-mixed"
    trainer = pl.Trainer(
        accelerator=device.type,
        devices=degree,
        strategy="ddp" if "ddp" in words else MegatronStrategy(tensor_parallel=degree),
        precision="32-true" if tiny else half,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[Clock(), *([FusedOps()] if "fused" in words else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data: Any = list(batches(config.vocab_size, tiny))
    trainer.fit(Chat(), DataLoader(data, batch_size=None))


def run(part: str, row: str, gpus: int, tiny: bool, limit: float) -> dict[str, Any]:
    """Measure one row in processes of its own, or return how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
        words = [sys.executable, *start, __file__, str(out), "--part", part, "--row", row, *["--tiny"] * tiny]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s"}
        if done.returncode:
            return {"failed": "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main(words: Sequence[str] | None = None) -> int:
    """Run all rows, or one; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--part", help="only this shape")
    parser.add_argument("--row", help="only this row, in this process")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="rows on so many GPUs")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a row may take")
    a = parser.parse_args(words)
    shapes = TINY if a.tiny else SHAPES
    if a.row is not None:
        found = measure(shapes[a.part], a.row, a.tiny)
        if os.environ.get("RANK", "0") == "0":
            a.result.write_text(json.dumps(found))
        return 0
    record: dict[str, dict[str, Any]] = {}
    for part in shapes if a.part is None else [a.part]:
        for gpus in a.gpus:
            rows = record.setdefault(f"{part}, {gpus} GPU{'s' * (gpus > 1)}", {})
            for row in ROWS[gpus]:
                rows[row] = found = run(part, row, gpus, a.tiny, a.limit)
                base = next((each for each in rows.values() if "loss" in each), found)
                if "loss" in found and abs(found["loss"] / base["loss"] - 1) > TOLERANCE:
                    found["failed"] = f"its first loss {found['loss']:.4f} differs from {base['loss']:.4f}"
                elif "loss" in found:
                    found["ratio"] = found["tokens_per_second"] / base["tokens_per_second"]
                print(part, "|", gpus, "|", row, "|", found, flush=True)
                # After each row: a call that is cut short has the rows before.
                a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return any("failed" in row for rows in record.values() for row in rows.values())


if __name__ == "__main__":
    raise SystemExit(main())
