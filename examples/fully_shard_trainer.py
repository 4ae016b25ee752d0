"""Full sharding of a `transformers` Llama in an ordinary LightningModule: only the strategy is Megalight's.

python examples/fully_shard_trainer.py --devices 2
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from megalight.strategies import MegatronFSDPStrategy

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, use_cache=False
)


class Llama(pl.LightningModule):
    """Next-token prediction. Nothing here is Megalight's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(CONFIG)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    pl.seed_everything(0)
    rows = TensorDataset((torch.arange(128)[:, None] + torch.arange(16)) * 5 % CONFIG.vocab_size)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=MegatronFSDPStrategy(auto_wrap_policy=["LlamaDecoderLayer"]),
        max_epochs=6,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Llama(), DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, batch_size=16))
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


if __name__ == "__main__":
    main()
