"""A Llama of the transformers package over a pipeline: its own modules, put together as embed | layers | head.

python examples/llama_pipeline.py --devices 2 --pipeline-parallel 2 --virtual-pipeline 2
python examples/llama_pipeline.py --devices 4 --pipeline-parallel 2 --tensor-parallel 2 --sequence-parallel
"""

from __future__ import annotations

import argparse
from dataclasses import replace
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
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="sdpa",  # causal where it is given no mask
)


class Head(nn.Module):
    """The last norm and the output layer."""

    def __init__(self, whole: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm = whole.model.norm
        self.lm_head = whole.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


class PipelineLlama(nn.Module):
    """``embed | layers | head`` of a ``LlamaForCausalLM``. A stage lacks one end or both, and holds some layers.

    ``rotary`` has no weights: every stage keeps it and makes the table itself.
    """

    def __init__(self, whole: LlamaForCausalLM) -> None:
        super().__init__()
        self._init_weights = whole._init_weights  # how its modules draw their initial values
        self.embed: nn.Module | None = whole.model.embed_tokens
        self.rotary = whole.model.rotary_emb
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(whole.model.layers)})
        self.head: nn.Module | None = Head(whole)

    def forward(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Ids ``[B, S]`` and what the stage before returned to hidden states ``[B, S, h]``, or to logits at the end."""
        if hidden is None:
            assert self.embed is not None
            hidden = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        table = self.rotary(hidden, position_ids=positions)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=table)
        return hidden if self.head is None else self.head(hidden)


class LlamaPipelineModule(MegalightModule):
    """Next-token prediction."""

    def __init__(self, config: LlamaConfig = CONFIG) -> None:
        super().__init__()
        self.config = config

    def build_model(self) -> nn.Module:
        return PipelineLlama(LlamaForCausalLM(self.config))

    def plan(self, model: nn.Module) -> Plan:
        """The plan of the whole Llama, with the names that its modules have here."""
        ends = {"model.embed_tokens": "embed", "model.norm": "head.norm", "lm_head": "head.lm_head"}
        whole = llama(self.config)
        return replace(whole, rules={ends.get(name, name.removeprefix("model.")): s for name, s in whole.rules.items()})

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return {"hidden": model(batch[0][:, :-1], carry["hidden"] if carry else None)}

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        logits, labels = carry["hidden"].flatten(0, 1), batch[0][:, 1:].flatten()
        return Loss(sum=nn.functional.cross_entropy(logits, labels, reduction="sum"))

    def loss_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(float(batch[0][:, 1:].numel()), device=batch[0].device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--virtual-pipeline", type=int, default=1)
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
            pipeline_parallel=options.pipeline_parallel,
            virtual_pipeline=options.virtual_pipeline,
            tensor_parallel=options.tensor_parallel,
            sequence_parallel=options.sequence_parallel,
            micro_batch_size=8,
        ),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(data, batch_size=32, shuffle=True)
    trainer.fit(LlamaPipelineModule(), loader, DataLoader(data, batch_size=128))
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


if __name__ == "__main__":
    main()
