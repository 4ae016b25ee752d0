"""Language models whose head and loss are one op in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalight.models.fused.head import Head
from megalight.models.fused.part import Part

IGNORED = -100
"""Label without a loss, unless ``ignore_index`` names another."""
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Further arguments of the loss of ``transformers``."""


class CausalLM(Part):
    """Has the attributes of a ``...ForCausalLM`` of ``transformers``."""

    config: Any
    model: nn.Module
    lm_head: nn.Module

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Return the output of ``transformers``; in training with labels ``[B, S]``, its ``logits`` are None."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }
        losses = self._losses
        as_tuple = not kwargs.get("return_dict", getattr(self.config, "return_dict", True))
        if labels is None or not self.training or losses is None or as_tuple or not _is_zero(logits_to_keep):
            return super().forward(**inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        options = {name: kwargs.pop(name) for name in LOSS_ARGUMENTS if name in kwargs}
        output = self.model(**inputs, **kwargs)
        loss = mean_loss(losses, output.last_hidden_state, labels, **options)
        return self.beside("CausalLMOutputWithPast")(
            loss=loss,
            logits=None,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    @property
    def _losses(self) -> Any:
        """The function of hidden states and labels that returns losses; None: the loss or the head is not known."""
        # A loss of a user may be any callable, without a name.
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            return None
        if isinstance(self.lm_head, Head):
            return self.lm_head
        # A head that is split over devices returns losses by itself.
        split = getattr(self.lm_head, "losses", None)
        return None if split is None else lambda hidden, labels: split(hidden, labels, None, "auto")


def mean_loss(
    losses: Any,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Return the mean loss of the next tokens, with the arguments of the loss of ``transformers``.

    Args:
        losses: hidden states ``[T, h]`` and labels ``[T]`` -> losses ``[T]``. Negative labels have none.
        hidden: ``[B, S, h]``.
        labels: ``[B, S]``: the tokens themselves.
        num_items_in_batch: divide the sum by this, instead of by the number of labels.
        ignore_index: label without a loss.
        shift_labels: ``[B, S]``: the next tokens, in place of ``labels``.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    following = shift_labels.reshape(-1).to(hidden.device)
    following = following.masked_fill(following == ignore_index, IGNORED)
    total: Tensor = losses(hidden.flatten(0, 1), following).sum()
    if num_items_in_batch is None:
        return total / (following >= 0).sum()
    return total / torch.as_tensor(num_items_in_batch, device=hidden.device)


def _is_zero(logits_to_keep: int | Tensor) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 0
