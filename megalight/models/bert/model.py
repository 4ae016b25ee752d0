"""BERT: ``embed | layers | head`` over packed tokens ``[T, h]``. Every token sees its whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megalight.errors import DataError
from megalight.models.bert.config import BertConfig
from megalight.nn import (
    MLP,
    Activation,
    Attention,
    Embedding,
    InnerAttention,
    LayerContext,
    LayerNorm,
    Linear,
    LMHead,
    MaskedLMHead,
    Pooler,
    PostNormLayer,
    SequenceHead,
    TokenEmbedding,
    run_layers,
)
from megalight.ops.row_indexing import take_rows
from megalight.types import PackedSequences


@dataclass(frozen=True)
class BertOutput:
    """The output of a BERT or of a part of it: hidden states, or the results of the head.

    Attributes:
        hidden: ``[T, h]``, if this part has no head, or one that only pools.
        losses: ``[T]``, or ``[M]`` for chosen rows, if labels are given. Negative labels give 0.
        logits: ``[T, V]`` or ``[M, V]``, if no labels are given.
        order: ``[n, 2]`` logits for "in order" and "swapped", one row for each sequence, also for the dummy sequence of
            padding. None if the model has no such head.
        pooled: ``[n, h]``, a row for each sequence, if the head only pools.
    """

    hidden: Tensor | None = None
    losses: Tensor | None = None
    logits: Tensor | None = None
    order: Tensor | None = None
    pooled: Tensor | None = None


class PoolerHead(nn.Module):
    """Gives the hidden states, and a row for each sequence.

    Args:
        pooler: from hidden states to one row per sequence.
    """

    def __init__(self, pooler: Pooler) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(
        self, hidden: Tensor, sequences: PackedSequences, labels: Tensor | None = None, rows: Tensor | None = None
    ) -> BertOutput:
        """From ``[T, h]`` to the fields ``hidden`` and ``pooled`` of :class:`BertOutput`. There is nothing to label."""
        return BertOutput(hidden=hidden, pooled=self.pooler(hidden, sequences))


class BertHead(nn.Module):
    """Predicts masked tokens and, if configured, the order of segments.

    Args:
        masked: from hidden states to the vocabulary.
        order: from first tokens to two classes, or None.
    """

    def __init__(self, masked: MaskedLMHead, order: SequenceHead | None) -> None:
        super().__init__()
        self.masked = masked
        self.order = order

    def forward(
        self, hidden: Tensor, sequences: PackedSequences, labels: Tensor | None = None, rows: Tensor | None = None
    ) -> BertOutput:
        """From ``[T, h]`` and labels ``[T]`` (or None), or their ``rows [M]``, to the fields of :class:`BertOutput`."""
        # Before rows are chosen: it reads the first tokens, which are not among them.
        order = None if self.order is None else self.order(hidden, sequences)
        if rows is not None:
            # Choose rows before the projection: it is the larger part of the head's work.
            hidden, labels = take_rows(hidden, rows), None if labels is None else labels[rows]
        answer = self.masked(hidden, labels)
        return BertOutput(logits=answer, order=order) if labels is None else BertOutput(losses=answer, order=order)


def build_norm(config: BertConfig) -> LayerNorm:
    """Build a layer norm over hidden states."""
    return LayerNorm(config.hidden_size, config.norm_eps, backend=config.backends.norm)


def build_embedding(config: BertConfig) -> TokenEmbedding:
    """Build the embedding of words, positions and token types, with its norm."""
    rows = (config.vocab_size, config.max_sequence_length, config.num_token_types)
    word, position, token_type = (Embedding(count, config.hidden_size, config.init.std) for count in rows)
    return TokenEmbedding(word, position, token_type, build_norm(config), dropout=config.dropout.embedding)


def build_layer(config: BertConfig) -> PostNormLayer:
    """Build an encoder layer. All layers are the same."""
    attention = Attention(
        config.hidden_size,
        config.num_heads,
        config.num_heads,
        config.head_dim,
        InnerAttention(causal=False, dropout=config.dropout.attention, backend=config.backends.attention),
        qkv_bias=True,
        proj_bias=True,
        std=config.init.std,
        proj_std=config.residual_std,
    )
    mlp = MLP(
        config.hidden_size,
        config.ffn_hidden_size,
        config.activation,
        bias=True,
        std=config.init.std,
        down_std=config.residual_std,
        backend=config.backends.activation,
    )
    return PostNormLayer(attention, build_norm(config), mlp, build_norm(config), dropout=config.dropout.hidden)


def build_head(config: BertConfig) -> BertHead | PoolerHead | None:
    """Build the masked-LM head and, if configured, the pooler and the head for the order of segments."""
    size, std = config.hidden_size, config.init.std
    if config.head != "pretraining":
        return PoolerHead(Pooler(Linear(size, size, bias=True, std=std))) if config.head == "pooler" else None
    output_layer = Linear(size, config.vocab_size, bias=True, std=std)
    masked = MaskedLMHead(
        Linear(size, size, bias=True, std=std),
        Activation(config.activation, config.backends.activation),
        LMHead(build_norm(config), output_layer, backend=config.backends.cross_entropy),
    )
    if not config.sentence_order:
        return BertHead(masked, None)
    pooler = Pooler(Linear(size, size, bias=True, std=std))
    return BertHead(masked, SequenceHead(pooler, Linear(size, 2, bias=True, std=std)))


class Bert(nn.Module):
    """A bidirectional encoder. Parameters have no values until they are initialized or loaded.

    It may be a part of a model: without ``embed`` its input is hidden states, without ``head`` its output is hidden
    states, and ``layers`` keeps the global indices of its layers.

    Attributes:
        embed: from token ids to hidden states, or None.
        layers: encoder layers in order, by global index as a string.
        head: from hidden states to losses or logits, or None.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: TokenEmbedding | None = build_embedding(config)
        # Keys are global indices, which a part of the model keeps.
        self.layers = nn.ModuleDict({str(i): build_layer(config) for i in range(config.num_layers)})
        self.head: BertHead | PoolerHead | None = build_head(config)
        if config.tie_embeddings and isinstance(self.head, BertHead):
            # The same parameter object at both ends: one set of values, and gradients of both uses are summed.
            self.head.masked.lm.output_layer.weight = self.embed.word.weight

    def forward(
        self,
        tokens: Tensor | None,
        sequences: PackedSequences,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> BertOutput:
        """Run the parts that this model has.

        Args:
            tokens: ``[T]`` ids, the input of ``embed``.
            sequences: how the tokens divide into sequences. Rows of different lengths are packed without padding.
            token_types: ``[T]``, the segment of each token. None means 0 for all.
            labels: ``[T]``, the original ids of masked tokens, negative elsewhere. With labels, the head returns
                losses.
            hidden: ``[T, h]``, the input of a model without ``embed``.
            rows: ``[M]`` indices of the tokens for which to compute losses or logits. With the masked tokens only, the
                head does a seventh of the work. None means all tokens.

        Raises:
            DataError: a sequence is longer than ``max_sequence_length``, or the input of this part is missing.
        """
        sequences.check_longest(self.config.max_sequence_length)
        if self.embed is not None:
            if tokens is None:
                raise DataError("tokens is None, but this model begins with its embedding; pass token ids [T].")
            hidden = self.embed(tokens, sequences.positions, token_types)
        if hidden is None:
            raise DataError("hidden is None, but this model has no embedding; pass hidden states [T, h].")
        hidden = run_layers(self.layers, hidden, LayerContext(sequences))
        if self.head is None:
            return BertOutput(hidden=hidden)
        output: BertOutput = self.head(hidden, sequences, labels, rows)
        return output
