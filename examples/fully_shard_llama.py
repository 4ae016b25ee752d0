"""Full sharding of a `transformers` Llama in a plain torch loop, without Lightning.

python examples/fully_shard_llama.py
torchrun --nproc-per-node 8 examples/fully_shard_llama.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import megalight

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)


def train(steps: int) -> list[float]:
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = megalight.fully_shard(model, optimizer)
    losses = []
    for step in range(steps):
        ids = torch.arange(step, step + 16, device=sharded.engine.device).view(1, 16) * 5 % CONFIG.vocab_size
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    losses = train(40)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.5f} in the end")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
