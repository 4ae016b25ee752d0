"""EAGLE-3 (https://arxiv.org/abs/2503.01840): a small draft model that reads hidden states of the model it serves.

At place ``t`` it reads hidden states ``f_t`` of the base and the embedding of the token at ``t + 1``, and predicts the
token at ``t + 2``. In further steps it reads its own output in place of ``f_t``, and the embedding of the next token
but one, and so on: training does what drafting will do ("training-time test").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalight.models.eagle.config import EagleConfig
from megalight.models.gpt.model import ROTARY, build_head, build_mlp, build_norm, build_rotary
from megalight.nn import (
    Attention,
    DistillationTarget,
    DraftAttention,
    DraftLatentAttention,
    DraftState,
    LayerContext,
    Linear,
)
from megalight.nn.norm import norm_and_sum
from megalight.nn.state import Slots
from megalight.types import PackedSequences


def build_attention(config: EagleConfig) -> Attention | DraftLatentAttention:
    """Build the attention, which reads embeddings and hidden states side by side."""
    width, latent, scaling = config.hidden_size, config.latent, config.rotary_scaling
    if latent is None:
        return Attention(
            width,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            DraftAttention(),
            input_size=2 * width,
            rotary=ROTARY,
            std=config.std,
            proj_std=config.std,
        )
    # As in DeepSeek's models, the concentration of YaRN is in the scores.
    scale = (latent.head_dim + latent.rotary_dim) ** -0.5 * (1.0 if scaling is None else scaling.score_factor)
    return DraftLatentAttention(
        width,
        config.num_heads,
        latent.q_rank,
        latent.kv_rank,
        latent.head_dim,
        latent.rotary_dim,
        latent.value_dim,
        DraftAttention(scale),
        input_size=2 * width,
        norm_eps=latent.norm_eps,
        rotary=ROTARY,
        std=config.std,
        proj_std=config.std,
    )


class DraftLayer(nn.Module):
    """A transformer layer whose attention reads the embedding of the next token beside the residual stream."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer, width = config.layer, config.hidden_size
        self.embed_norm = build_norm(layer, width)
        self.hidden_norm = build_norm(layer, width)
        self.attention = build_attention(config)
        self.mlp_norm = build_norm(layer, width)
        self.mlp = build_mlp(layer)

    def make_state(self, slots: Slots) -> Any:
        """Make what generation keeps of earlier tokens."""
        return self.attention.make_state(slots)

    def forward(self, hidden: Tensor, embedded: Tensor, context: LayerContext, state: Any) -> Tensor:
        """``hidden, embedded [T, h] -> [T, h]``. In training the state is a :class:`~megalight.nn.DraftState`."""
        # The embedding is the first half, as in the weights that serving engines read.
        joined = torch.cat([self.embed_norm(embedded), self.hidden_norm(hidden)], -1)
        mixed = self.attention(joined, context, state)
        # The residual is the stream alone, before its norm.
        normed, hidden = norm_and_sum(self.mlp_norm, mixed, hidden)
        added: Tensor = self.mlp(normed, context)
        return hidden + added


class Draft(NamedTuple):
    """The result of one step.

    Attributes:
        losses: ``[T]``, soft cross entropy with the base's distribution over the draft's vocabulary.
        top: ``[T]``, the most likely token, as an index into the draft's vocabulary.
    """

    losses: Tensor
    top: Tensor


class DraftModel(nn.Module):
    """The draft model. It has no embedding: it reads the base's.

    Attributes:
        fuse: from the base's hidden states, side by side, to one.
        layer: the one layer.
        head: final norm and projection to the draft's vocabulary.
        uncut: why it stays whole.
    """

    uncut = "it has one layer"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fuse = Linear(len(config.auxiliary_layers) * config.hidden_size, config.hidden_size, std=config.std)
        self.layer = DraftLayer(config)
        self.head = build_head(config.layer)
        # A base's output layer has its values from the base; see EagleModule.initial_weights.
        self.head.output_layer.weight.requires_grad_(config.head == "own")
        self.rotary = build_rotary(config.layer)

    def step(self, hidden: Tensor, embedded: Tensor, sequences: PackedSequences, state: DraftState) -> Tensor:
        """Return the hidden states ``[T, h]`` of the next step, before the final norm.

        Args:
            hidden: ``[T, h]``: the fused hidden states in the first step, then the result of the step before.
            embedded: ``[T, h]``: in step ``n``, the embedding of the token ``n + 1`` places later.
            sequences: how the places divide into sequences.
            state: what earlier steps left; this step adds to it.
        """
        # A guess lies as many positions behind its place as there were steps before.
        return self._run(hidden, embedded, sequences, sequences.rotary_positions + len(state.keys), state)

    def follow(self, hidden: Tensor, embedded: Tensor, sequences: PackedSequences, state: Any) -> Tensor:
        """Do the same in generation, where real tokens and guesses are tokens of one sequence.

        Args:
            hidden: ``[T, h]``: the fused hidden states of real tokens, or the draft's own output for the token before.
            embedded: ``[T, h]``: the embedding of the next token.
            sequences: new tokens, and the earlier ones as keys.
            state: what the layer keeps of earlier tokens; see :mod:`megalight.inference.cache`.
        """
        return self._run(hidden, embedded, sequences, sequences.rotary_positions, state)

    def _run(
        self, hidden: Tensor, embedded: Tensor, sequences: PackedSequences, positions: Tensor, state: Any
    ) -> Tensor:
        assert self.rotary is not None
        context = LayerContext(sequences, {ROTARY: self.rotary(positions, embedded.dtype)})
        found: Tensor = self.layer(hidden, embedded, context, state)
        return found

    def forward(
        self,
        auxiliary: Tensor,
        embedded: Sequence[Tensor],
        sequences: PackedSequences,
        labels: Sequence[Tensor],
        targets: Sequence[DistillationTarget],
    ) -> list[Draft]:
        """Return the result of each step.

        Args:
            auxiliary: ``[T, 3 h]``, the base's hidden states.
            embedded: see :meth:`step`; one for each step.
            sequences: how the places divide into sequences.
            labels: for each step ``[T]``, negative at places without a loss.
            targets: for each step, the base's logits of the tokens that the step predicts.

        Raises:
            DataError: a sequence is longer than ``max_sequence_length``.
        """
        sequences.check_longest(self.config.max_sequence_length)
        hidden, state, found = self.fuse(auxiliary), DraftState(), []
        for each, places, target in zip(embedded, labels, targets, strict=True):
            hidden = self.step(hidden, each, sequences, state)
            normed = self.head.norm(hidden)
            losses, _ = self.head(normed, places, target=target, normed=True)
            found.append(Draft(losses, self.head.top(normed, normed=True)))
        return found
