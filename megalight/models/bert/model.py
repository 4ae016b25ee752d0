"""BERT: ``embed | layers | head`` over packed tokens ``[T, h]``, every token seeing all of its sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megalight.errors import DataError
from megalight.models.bert.config import BertConfig
from megalight.models.lengths import check_length
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
from megalight.types import PackedSequences


@dataclass(frozen=True)
class Output:
    """What a BERT, or a part of one, hands on: hidden states without the head, else the head's answers.

    Attributes:
        hidden: ``[T, h]``, of a part without the head.
        losses: ``[T]``, or ``[M]`` of chosen rows, where labels were given; 0 where a label is negative.
        logits: ``[T, V]`` or ``[M, V]``, where not.
        order: ``[n, 2]`` logits, one row for each sequence (padding's dummy sequence among them): the segments are in
            order, or swapped. None where the model has no such head.
    """

    hidden: Tensor | None = None
    losses: Tensor | None = None
    logits: Tensor | None = None
    order: Tensor | None = None


class BertHead(nn.Module):
    """Masked tokens, and the order of segments where configured.

    Args:
        masked: hidden states to the vocabulary.
        order: first tokens to two classes, or None.
    """

    def __init__(self, masked: MaskedLMHead, order: SequenceHead | None) -> None:
        super().__init__()
        self.masked = masked
        self.order = order

    def forward(
        self, hidden: Tensor, sequences: PackedSequences, labels: Tensor | None = None, rows: Tensor | None = None
    ) -> Output:
        """``[T, h]`` and labels ``[T]`` (or None), of which ``rows [M]`` count, to what :class:`Output` describes."""
        order = None if self.order is None else self.order(hidden, sequences)
        if rows is not None:
            hidden, labels = hidden.index_select(0, rows), None if labels is None else labels[rows]
        answer = self.masked(hidden, labels)
        return Output(logits=answer, order=order) if labels is None else Output(losses=answer, order=order)


def build_norm(config: BertConfig) -> LayerNorm:
    """Layer norm over hidden states."""
    return LayerNorm(config.hidden_size, config.norm_eps, backend=config.backends.norm)


def build_embedding(config: BertConfig) -> TokenEmbedding:
    """Word, position and token type, normed."""
    rows = (config.vocab_size, config.max_sequence_length, config.num_token_types)
    word, position, token_type = (Embedding(count, config.hidden_size, config.init.std) for count in rows)
    return TokenEmbedding(word, position, token_type, build_norm(config), dropout=config.dropout.embedding)


def build_layer(config: BertConfig) -> PostNormLayer:
    """One encoder layer; all are alike."""
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


def build_head(config: BertConfig) -> BertHead:
    """Masked-LM head and, where configured, pooler and order of segments."""
    size, std = config.hidden_size, config.init.std
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
    """A bidirectional encoder. Parameters hold no values until they are initialised or loaded.

    A model may be cut: without ``embed`` it takes hidden states, without ``head`` it gives them, and ``layers`` keeps
    the global indices of those it has.

    Attributes:
        embed: token ids to hidden states, or None.
        layers: encoder layers by global index, as strings, in order.
        head: hidden states to losses or logits, or None.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: TokenEmbedding | None = build_embedding(config)
        self.layers = nn.ModuleDict({str(i): build_layer(config) for i in range(config.num_layers)})
        self.head: BertHead | None = build_head(config)
        if config.tie_embeddings:
            self.head.masked.lm.output_layer.weight = self.embed.word.weight

    def forward(
        self,
        tokens: Tensor | None,
        sequences: PackedSequences,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Output:
        """Run the parts that are there.

        Args:
            tokens: ``[T]`` ids; read by ``embed``.
            sequences: how the tokens divide into sequences. Rows of different lengths are packed without padding.
            token_types: ``[T]``, the segment of each token; None: all are of segment 0.
            labels: ``[T]`` ids that belong in the place of masked ones, negative elsewhere; given, the head answers
                with losses.
            hidden: ``[T, h]``, for a model without ``embed``.
            rows: ``[M]`` places of the tokens whose losses or logits are wanted (the masked ones: a seventh of the
                work of the head); None: of all.

        Raises:
            DataError: a sequence longer than ``max_sequence_length``, or the input that this part reads is missing.
        """
        check_length(sequences, self.config.max_sequence_length)
        if self.embed is not None:
            if tokens is None:
                raise DataError("tokens is None, but this model begins with its embedding; pass token ids [T].")
            hidden = self.embed(tokens, sequences.positions, token_types)
        if hidden is None:
            raise DataError("hidden is None, but this model has no embedding; pass hidden states [T, h].")
        hidden = run_layers(self.layers, hidden, LayerContext(sequences))
        if self.head is None:
            return Output(hidden=hidden)
        output: Output = self.head(hidden, sequences, labels, rows)
        return output
