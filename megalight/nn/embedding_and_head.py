"""Embeddings, from token ids to hidden states; and heads: language model with its loss, masked one, pooler, classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn.init import Initializer, Normal
from megalight.nn.linear import Linear
from megalight.nn.mlp import Activation
from megalight.ops.batch_invariant import MODE
from megalight.ops.batch_invariant.cross_entropy import capped
from megalight.ops.cross_entropy import linear_cross_entropy, top_token
from megalight.ops.divergence import Projection, linear_divergence
from megalight.ops.embedding import embedding
from megalight.types import PackedSequences, TopTokens


class Embedding(nn.Module):
    """A lookup table with one row of ``weight`` per id.

    Attributes:
        weight: ``[num, h]``, initially normal with standard deviation ``std``.
    """

    def __init__(self, num: int, hidden_size: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, ids: Tensor) -> Tensor:
        """``[T] -> [T, h]``."""
        return embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """Return rows and width, for printing."""
        return f"{self.weight.shape[0]} -> {self.weight.shape[1]}"


class TokenEmbedding(nn.Module):
    """Sum of the scaled word embedding and optional embeddings of position and token type; then norm and dropout.

    Args:
        word: rows by token id.
        position: rows by position in the sequence, or None.
        token_type: rows by type (in BERT, the first or the second sentence), or None.
        norm: applied to the sum, or None.
        multiplier: factor of the word embedding (``sqrt(h)`` in Gemma).
        dropout: dropout probability.
    """

    def __init__(
        self,
        word: Embedding,
        position: Embedding | None = None,
        token_type: Embedding | None = None,
        norm: nn.Module | None = None,
        *,
        multiplier: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.token_type = token_type
        self.norm = norm
        self.multiplier = multiplier
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T], positions [T], token_types [T]`` (None: all 0) ``-> [T, h]``."""
        hidden: Tensor = self.word(tokens)
        # skip a multiplication by 1, which would cost a pass over memory
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.position is not None:
            hidden = hidden + self.position(positions)
        if self.token_type is not None:
            # Type 0 for all tokens, as in text of one part: its row is added all the same, since it is trained.
            hidden = hidden + self.token_type(torch.zeros_like(tokens) if token_types is None else token_types)
        # The norm is over the sum of all embeddings.
        if self.norm is not None:
            hidden = self.norm(hidden)
        dropped: Tensor = self.dropout(hidden)
        return dropped


class DistillationTarget(NamedTuple):
    """What a head learns from a teacher.

    Attributes:
        teacher: the teacher's logits, not computed yet, over the same rows of the vocabulary as the head's weight; or
            its most likely tokens ``[T, K]`` of the whole vocabulary.
        kind: name of the divergence; see :mod:`megalight.ops.divergence.spec`.
        temperature: divides the logits of both.
        own: compute the cross entropy of the labels, too.
    """

    teacher: Projection | TopTokens
    kind: str = "forward_kl"
    temperature: float = 1.0
    own: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the op that are not tensors."""
        return {"kind": self.kind, "temperature": self.temperature, "own": self.own}


class LMHead(nn.Module):
    """Final norm and projection to the vocabulary.

    With labels it computes losses: projection and cross entropy run together in chunks, so the full logits are never
    stored.

    Args:
        norm: applied before the projection.
        output_layer: ``h -> V``. Its weight may be tied to the word embedding.
        softcap: if set, logits become ``softcap * tanh(logits / softcap)``.
        backend: backend of the loss op.
    """

    def __init__(
        self, norm: nn.Module, output_layer: Linear, *, softcap: float | None = None, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.norm = norm
        self.output_layer = output_layer
        self.softcap = softcap
        self.backend = backend

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        normed: bool = False,
        target: DistillationTarget | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """``[T, h]`` and labels ``[T] ->`` losses ``[T]``, float32 or float64; without labels, logits ``[T, V]``.

        With ``target`` and labels: see :meth:`learn`. ``normed`` hidden states have passed another norm, and skip the
        one here.
        """
        if target is not None and labels is not None:
            return self.learn(hidden, labels, target, normed=normed)
        # Before both branches: losses and logits are of the same normed states.
        hidden = hidden if normed else self.norm(hidden)
        if labels is not None:
            head = self._plain_layer()
            # The weight goes in, not logits: the op makes a chunk of logits at a time, forward and backward.
            return linear_cross_entropy(
                hidden, head.weight, labels, bias=head.bias, softcap=self.softcap, backend=self.backend
            )
        logits: Tensor = self.output_layer(hidden)
        if MODE.on and self.softcap is not None:
            return capped(logits, self.softcap)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def learn(
        self, hidden: Tensor, labels: Tensor, target: DistillationTarget, *, normed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return divergences from the teacher ``[T]``, and losses ``[T]`` if the target asks for them."""
        layer = self._plain_layer()
        hidden = hidden if normed else self.norm(hidden)
        student = Projection(hidden, layer.weight, layer.bias, self.softcap)
        return linear_divergence(student, target.teacher, labels, **target.options)

    def top(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Return the most likely token of each of ``hidden [T, h]``: ``[T]``, without a gradient."""
        layer = self._plain_layer()
        return top_token(hidden if normed else self.norm(hidden), layer.weight, layer.bias)

    def _plain_layer(self) -> Linear:
        # Losses read the weight, past the layer's forward: an adapter would change logits alone, and never learn.
        if getattr(self.output_layer, "adapter", None) is not None:
            raise ConfigurationError(
                "the output layer has an adapter, and losses use its weight alone. Leave output_layer out of the "
                "targets, or merge the adapters first (megalight merge)."
            )
        return self.output_layer


class MaskedLMHead(nn.Module):
    """``output_layer(norm(act(dense(x))))`` (BERT, https://arxiv.org/abs/1810.04805).

    Args:
        dense: ``h -> h``.
        act: activation after ``dense``.
        lm: norm and projection to the vocabulary.
    """

    def __init__(self, dense: Linear, act: Activation, lm: LMHead) -> None:
        super().__init__()
        self.dense = dense
        self.act = act
        self.lm = lm

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """``[T, h]`` and labels ``[T]`` (negative: no loss) to losses ``[T]``; without labels, to logits ``[T, V]``."""
        answer: Tensor = self.lm(self.act(self.dense(hidden)), labels)
        return answer


class Pooler(nn.Module):
    """``tanh(dense(x))`` of the first token of each sequence (BERT, https://arxiv.org/abs/1810.04805).

    Args:
        dense: ``h -> h``.
    """

    def __init__(self, dense: Linear) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """``[T, h] -> [n, h]``: one row for each of the ``n`` sequences, also for sequences of padding."""
        # `cu_seqlens[:-1]` are the places of the first tokens.
        # Chosen before `dense`: it then multiplies a row for each sequence instead of each token.
        return torch.tanh(self.dense(hidden.index_select(0, sequences.cu_seqlens[:-1])))


class SequenceHead(nn.Module):
    """Classification of whole sequences.

    Args:
        pooler: gives one row per sequence.
        output: ``h -> classes``.
    """

    def __init__(self, pooler: Pooler, output: Linear) -> None:
        super().__init__()
        self.pooler = pooler
        self.output = output

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """``[T, h] -> [n, classes]`` logits."""
        logits: Tensor = self.output(self.pooler(hidden, sequences))
        return logits
