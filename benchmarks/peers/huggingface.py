"""``transformers``' Llama in a plain loop: autocast, fused AdamW, optionally with compiled layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.meter import Meter, random_rows
from benchmarks.peers import world_size
from benchmarks.step import Step, only_of
from megalight.imports import has


class Runner:
    """Trains on one device.

    Args:
        compiled: whether to apply ``torch.compile`` to each layer.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def why_not(self, step: Step) -> str | None:
        if not has("transformers"):
            return "transformers is not installed"
        if world_size() > 1:
            return "this runner is of one device"
        return "this runner has no fp8" if step.precision == "fp8" else only_of(step, ())

    def check(self, step: Step) -> dict[str, Any]:
        return {}

    def run(self, step: Step, meter: Meter) -> None:
        model = llama(step)
        if self.compiled:
            for layer in model.model.layers:
                layer.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        meter.start()
        for index in range(meter.total):
            for micro in range(step.micro):
                with torch.autocast(step.device, torch.bfloat16, enabled=step.precision == "bf16"):
                    loss = loss_of(model, step, index * step.micro + micro)
                (loss / step.micro).backward()
            finish(model, optimizer)
            meter.tick()


def llama(step: Step, dtype: torch.dtype = torch.float32) -> Any:
    """Make a Llama with the step's shape, on its device. Its values are the same on all ranks and calls."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=step.vocab,
        hidden_size=step.hidden,
        intermediate_size=step.ffn,
        num_hidden_layers=step.layers,
        num_attention_heads=step.heads,
        num_key_value_heads=step.kv,
        max_position_embeddings=step.seq,
        attn_implementation="sdpa",
        # A layer writes the cache at its own number, so each would be compiled anew, up to the limit of torch.compile.
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    with torch.device(step.device):
        return LlamaForCausalLM._from_config(config, dtype=dtype)


def loss_of(model: nn.Module, step: Step, seed: int) -> torch.Tensor:
    """Return the mean cross entropy on a random micro-batch, which ``seed`` decides."""
    ids = random_rows(step, step.mbs, seed)
    ids = ids.pin_memory().cuda(non_blocking=True) if step.device == "cuda" else ids
    logits = model(ids[:, :-1]).logits
    return functional.cross_entropy(logits.float().view(-1, step.vocab), ids[:, 1:].reshape(-1))


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip gradients, update parameters, and zero gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
