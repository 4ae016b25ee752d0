"""The forward pass of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megalight.models.batches import pack
from megalight.models.family import Family
from megalight.models.hidden import keeping
from megalight.nn import Linear
from megalight.parallel.pipeline.carry import Carry
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Boundary

HEAD, WHOLE = "head", "head.whole"


class LastNorm(nn.Module):
    """The end of a teacher: the final norm, without the output layer.

    Attributes:
        whole: takes hidden states of layers, for which a plan may have a rule.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.whole = nn.Identity()

    def forward(self, hidden: Tensor, labels: None = None) -> Tensor:
        """``[T, h] -> [T, h]``."""
        output: Tensor = self.norm(hidden)
        return output


class OutputLayer(nn.Module):
    """The teacher's projection to the vocabulary, ``h -> V``."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.layer = Linear(hidden_size, vocab_size)


class Teacher:
    """The forward pass of a teacher: to the normed hidden states of the real tokens, ``hidden [T, h]``.

    Args:
        known: its family, whose models are ``embed | layers | head``.
        config: its configuration.
        places: modules inside it whose outputs ``[T, h]`` are results, too; see :mod:`megalight.models.hidden`.

    Attributes:
        submodule: its output layer on the ranks of the student's last stage, once the run has built it.
    """

    def __init__(self, known: Family, config: Any, places: Sequence[str] = ()) -> None:
        self.family = known
        # Depths of multi-token prediction say nothing of the next token.
        self.config = replace(config, mtp=None)
        self.places = tuple(places)
        self.token_multiple = 1
        self.submodule: OutputLayer | None = None

    def build_model(self) -> nn.Module:
        """Build the model without its output layer."""
        model = self.family.model(self.config)
        model.head = LastNorm(model.head.norm)  # type: ignore[arg-type]
        return model

    def plan(self, model: nn.Module) -> ParallelizePlan:
        """Return the family's plan; the results are those of all tokens, whoever computed them."""
        return self.family.plan(model) | ParallelizePlan({HEAD: Boundary(leave="join"), WHOLE: Boundary(leave="join")})

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """See :class:`~megalight.parallel.frozen_model.FrozenTask`. Hidden states of layers travel with the carry."""
        sequences = batch.sequences.pad_to(self.token_multiple)
        hidden = None if carry is None else carry["hidden"]
        with keeping(model, self.places, carry) as kept:
            output = model(pack(batch.tokens, sequences, 0), sequences, hidden=hidden)
        if output.logits is None:
            return {"hidden": output.hidden, **kept}
        found = {"hidden": output.logits, **{name: model.head.whole(state) for name, state in kept.items()}}  # type: ignore[union-attr, operator]
        # The student pads to a multiple of its own.
        return {name: state[: batch.tokens.numel()] for name, state in found.items()}
