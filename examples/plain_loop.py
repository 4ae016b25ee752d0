"""A GPT over tensor, pipeline and data-parallel ranks in a plain torch loop, without Lightning.

python examples/plain_loop.py
torchrun --nproc-per-node 8 examples/plain_loop.py --tensor-parallel 2 --pipeline-parallel 2
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalight
from megalight.models.gpt import GPT, GPTConfig
from megalight.types import Loss, TokenBatch

CONFIG = GPTConfig(num_layers=4, hidden_size=32, num_heads=4, ffn_hidden_size=64, vocab_size=64, max_sequence_length=16)


class NextToken:
    """What the model is trained for, per micro-batch."""

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: dict[str, Tensor] | None = None) -> Any:
        hidden = None if carry is None else carry["hidden"]
        output = model(batch.tokens.flatten(), batch.sequences, labels=batch.labels.flatten(), hidden=hidden)
        return {"hidden": output.hidden} if output.losses is None else {"losses": output.losses}

    def loss_step(self, carry: dict[str, Tensor], batch: TokenBatch) -> Loss:
        return Loss(sum=carry["losses"].sum())

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        return batch.loss_mask.sum()


def global_batch(step: int) -> TokenBatch:
    """Eight rows in which each token follows from the one before."""
    rows = [torch.randint(CONFIG.vocab_size, (8,), generator=torch.Generator().manual_seed(step))]
    for _ in range(CONFIG.max_sequence_length):
        rows.append((5 * rows[-1] + 3) % CONFIG.vocab_size)
    ids = torch.stack(rows, dim=1)
    return TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(8, CONFIG.max_sequence_length))


def train(steps: int, dtype: torch.dtype | None = None, **layout: Any) -> tuple[megalight.Training, list[float]]:
    with torch.device("meta"):
        net = GPT(CONFIG)
    model = megalight.parallelize(net, megalight.Layout(**layout), dtype=dtype, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = megalight.Training(model, optimizer, NextToken())
    replica, replicas = model.mesh.rank("dp"), model.mesh.dp
    losses = []
    for step in range(steps):
        share = global_batch(step).split(8 // replicas)[replica].to(model.device)
        outcome = training.forward_backward(share.split(1))
        training.clip_grad_norm(1.0)
        optimizer.step()
        losses.append(float(outcome.loss))
    return training, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = vars(parser.parse_args())
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    _, losses = train(sequence_parallel=options["tensor_parallel"] > 1, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.5f} in the end")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
