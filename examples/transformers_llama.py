"""A Llama of the transformers package, its code untouched, split over two ranks by its plan.

python examples/transformers_llama.py --devices 2 --tensor-parallel 2 --sequence-parallel
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from megalight.models.module import Carry, MegalightModule
from megalight.strategies import MegatronStrategy
from megalight.types import Loss

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="sdpa",  # causal where it is given no mask
)


class LlamaModule(MegalightModule):
    """Next-token prediction."""

    def __init__(self, config: LlamaConfig = CONFIG) -> None:
        super().__init__()
        self.config = config

    def build_model(self) -> nn.Module:
        return LlamaForCausalLM(self.config)

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return {"output": model(input_ids=batch[0][:, :-1], use_cache=False).logits}

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        logits, labels = carry["output"].flatten(0, 1), batch[0][:, 1:].flatten()
        return Loss(sum=nn.functional.cross_entropy(logits, labels, reduction="sum"))

    def loss_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(float(batch[0][:, 1:].numel()), device=batch[0].device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(module: LlamaModule, degrees: Sequence[str]) -> None:
    """Train and validate. ``degrees``: those of the strategy that the command line may set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    for degree in degrees:
        parser.add_argument("--" + degree.replace("_", "-"), type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    options = vars(parser.parse_args())
    pl.seed_everything(0)
    starts, strides = torch.randint(64, (512, 1)), torch.randint(1, 4, (512, 1))
    data = TensorDataset((starts + strides * torch.arange(33)) % 64)  # counting in ones, twos or threes
    trainer = pl.Trainer(
        accelerator=options.pop("accelerator"),
        devices=options.pop("devices"),
        strategy=MegatronStrategy(micro_batch_size=16, **options),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=128))
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


def main() -> None:
    train(LlamaModule(), ["tensor_parallel"])


if __name__ == "__main__":
    main()
