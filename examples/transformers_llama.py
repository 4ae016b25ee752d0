"""A Llama of the transformers package, its code untouched, split over two ranks by its plan.

python examples/transformers_llama.py --devices 2 --tensor-parallel 2 --sequence-parallel
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from megalight.models.module import Carry, MegalightModule
from megalight.parallel.plan import Plan
from megalight.parallel.plans.transformers import llama
from megalight.strategies import MegatronStrategy
from megalight.types import Loss

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


class LlamaModule(MegalightModule):
    """Next-token prediction."""

    def build_model(self) -> nn.Module:
        return LlamaForCausalLM(CONFIG)

    def plan(self, model: nn.Module) -> Plan:
        return llama(CONFIG)  # also found by itself, from the model's type

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return {"logits": model(input_ids=batch[0][:, :-1], use_cache=False).logits}

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        labels = batch[0][:, 1:].flatten()
        return Loss(sum=nn.functional.cross_entropy(carry["logits"].flatten(0, 1).float(), labels, reduction="sum"))

    def loss_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(float(batch[0][:, 1:].numel()), device=batch[0].device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    pl.seed_everything(0)
    starts, strides = torch.randint(64, (512, 1)), torch.randint(1, 4, (512, 1))
    data = TensorDataset((starts + strides * torch.arange(33)) % 64)  # counting in ones, twos or threes
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=MegatronStrategy(
            tensor_parallel=options.tensor_parallel,
            sequence_parallel=options.sequence_parallel,
            micro_batch_size=16,
        ),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(LlamaModule(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=128))
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


if __name__ == "__main__":
    main()
