"""A causal language model of ``transformers`` on packed tokens. Its code stays as it is."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.models.fused import CausalLM
from megalight.models.hf.config import HFConfig
from megalight.nn.transformers_attention import Core, calling, plain, use_attention
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class HFOutput:
    """The output of an :class:`HFModel`: one of them.

    Attributes:
        losses: ``[T]``, if labels are given.
        logits: ``[T, V]``, if none are.
    """

    losses: Tensor | None = None
    logits: Tensor | None = None


class HFModel(nn.Module):
    """Packs rows into what a model of ``transformers`` takes, and its logits or losses into rows again.

    Args:
        config: its configuration.

    Attributes:
        net: the model of ``transformers``.
        core: what computes attention.
    """

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        made: Any = AutoModelForCausalLM
        self.net = made.from_config(config.read, dtype=torch.get_default_dtype())
        self.core: Core = plain
        # Models off the interface attend to all earlier tokens of a row, and know no documents.
        self.packs = use_attention(self.net) > 0
        self.positions = "position_ids" in inspect.signature(self.net.forward).parameters

    def forward(self, tokens: Tensor, sequences: PackedSequences, labels: Tensor | None = None) -> HFOutput:
        """``tokens [T] -> losses [T]`` of ``labels [T]``, or ``logits [T, V]``. Negative labels have no loss.

        Raises:
            LayoutError: the tokens are packed, and the model takes whole rows only.
        """
        rows = sequences.uniform or (1, len(tokens))
        whole = sequences.uniform is not None and sequences.context is None
        inputs: dict[str, Any] = {"input_ids": tokens.view(rows)}
        if self.positions:
            inputs["position_ids"] = sequences.positions.view(rows)
        if not whole and not (self.packs and self.positions):
            raise LayoutError(
                f"{type(self.net).__name__} does not use the attention interface of transformers with positions, so it "
                "takes whole rows only. Give rows of one document each, and do not divide them."
            )
        # Fused models have a head that never makes all logits.
        losses = self.net._losses if labels is not None and isinstance(self.net, CausalLM) else None
        with calling(sequences, self.core):
            if losses is not None:
                hidden = self.net.model(**inputs, use_cache=False).last_hidden_state
                return HFOutput(losses=losses(hidden.flatten(0, 1), labels))
            logits = self.net(**inputs, use_cache=False).logits.flatten(0, 1)
        if labels is None:
            return HFOutput(logits=logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return HFOutput(losses=nn.functional.cross_entropy(logits.to(wide), labels, reduction="none"))
