"""Multi-token prediction (MTP) of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalight.nn.embedding_and_head import TokenEmbedding
from megalight.nn.layer import run_layers
from megalight.nn.linear import Linear
from megalight.nn.state import LayerContext


class PredictionDepth(nn.Module):
    """One depth: ``norm(layers(join([embed_norm(e); hidden_norm(h)])))``.

    Args:
        embed_norm: norm of the embedding ``e`` of a later token.
        hidden_norm: norm of the hidden states ``h`` of the depth before.
        join: ``2 h -> h``. The embedding is its first half, as in the weights of DeepSeek-V3.
        layers: layers like those of the model, in order, with weights of their own.
        norm: the final norm of this depth.
    """

    def __init__(
        self,
        embed_norm: nn.Module,
        hidden_norm: nn.Module,
        join: Linear,
        layers: Sequence[nn.Module],
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.embed_norm = embed_norm
        self.hidden_norm = hidden_norm
        self.join = join
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        self.norm = norm

    def forward(self, hidden: Tensor, embedded: Tensor, context: LayerContext) -> Tensor:
        """``hidden [T, h], embedded [T, h] -> [T, h]``, normed."""
        joined = self.join(torch.cat([self.embed_norm(embedded), self.hidden_norm(hidden)], -1))
        normed: Tensor = self.norm(run_layers(self.layers, joined, context))
        return normed


class MultiTokenPrediction(nn.Module):
    """Depth ``k`` predicts the token after the next ``k`` ones, from the hidden states of depth ``k - 1``.

    Embedding and head are those of the model. The depths are only there for training: they give each hidden state more
    to predict.

    Args:
        embed: the model's embedding.
        norm: the model's final norm, which the hidden states pass before the first depth.
        depths: in order.
    """

    def __init__(self, embed: TokenEmbedding, norm: nn.Module, depths: Sequence[PredictionDepth]) -> None:
        super().__init__()
        self.embed = embed
        self.norm = norm
        self.depths = nn.ModuleDict({str(number): depth for number, depth in enumerate(depths)})

    def forward(
        self, hidden: Tensor, tokens: Sequence[Tensor], positions: Sequence[Tensor], context: LayerContext
    ) -> list[Tensor]:
        """Return the normed hidden states ``[T, h]`` of each depth.

        Args:
            hidden: ``[T, h]``, the output of the last layer.
            tokens: for depth ``k``, the ids ``[T]`` of the tokens ``k`` places later in the same sequence. Any id where
                there is none: causal attention keeps it from earlier tokens, and no loss counts there.
            positions: ``[T]``, the positions of these tokens.
            context: the context of the model's layers.
        """
        found: list[Tensor] = []
        hidden = self.norm(hidden)
        for depth, ids, places in zip(self.depths.values(), tokens, positions, strict=True):
            # Each depth continues from the one before, so the order of causes is kept for all of them.
            hidden = depth(hidden, self.embed(ids, places), context)
            found.append(hidden)
        return found
