"""A Llama of the transformers package over a pipeline: its own modules, put together as embed | layers | head.

python examples/llama_pipeline.py --devices 2 --pipeline-parallel 2 --virtual-pipeline 2
python examples/llama_pipeline.py --devices 4 --pipeline-parallel 2 --tensor-parallel 2 --sequence-parallel
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers_llama import LlamaModule, train

from megalight.models.module import Carry
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan


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


class LlamaPipelineModule(LlamaModule):
    """As the module of one stage, but that a stage hands on what it has."""

    def build_model(self) -> nn.Module:
        return PipelineLlama(LlamaForCausalLM(self.config))

    def plan(self, model: nn.Module) -> ParallelizePlan:
        """The plan of the whole Llama, with the names that its modules have here."""
        ends = {"model.embed_tokens": "embed", "model.norm": "head.norm", "lm_head": "head.lm_head"}
        with torch.device("meta"):
            whole = plan_for(LlamaForCausalLM(self.config))
        assert whole is not None
        return replace(whole, rules={ends.get(name, name.removeprefix("model.")): s for name, s in whole.rules.items()})

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return {"output": model(batch[0][:, :-1], carry["output"] if carry else None)}


def main() -> None:
    train(LlamaPipelineModule(), ["pipeline_parallel", "virtual_pipeline", "tensor_parallel"])


if __name__ == "__main__":
    main()
