"""GPT: ``embed | layers | head`` over packed tokens ``[T, h]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalight.errors import DataError
from megalight.models.gpt.config import GPTConfig
from megalight.nn import (
    MLP,
    Activation,
    Attention,
    DistillationTarget,
    Embedding,
    GatedDeltaNet,
    InnerAttention,
    L2Norm,
    LatentAttention,
    LayerContext,
    LayerNorm,
    Linear,
    LMHead,
    Mamba2,
    MultiTokenPrediction,
    PredictionDepth,
    ResidualLayer,
    RMSNorm,
    Rotary,
    ShortConv,
    Temperature,
    TokenEmbedding,
    TransformerLayer,
    run_layers,
)
from megalight.nn.moe import Experts, MoE, Router
from megalight.ops.row_indexing import take_rows
from megalight.types import PackedSequences

ROTARY, LOCAL = "rotary", "local"
"""Names of the rotary tables in the context: that of all layers, and that of layers with a window of their own base."""


class MultiTokenTarget(NamedTuple):
    """What one depth of multi-token prediction reads and predicts.

    Attributes:
        tokens: ``[T]``: depth ``k`` reads the id ``k`` places later in the same sequence; any id where there is none.
        labels: ``[T]``: the label of that token; one without a loss where there is none.
    """

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class GPTOutput:
    """The output of a GPT or of a part of it.

    One of the first three is set, unless only divergences are asked for, or rows are scored beside the logits.

    Attributes:
        hidden: ``[T, h]``, if this part has no head.
        losses: ``[T]``, if labels are given; ``[M]`` of scored rows.
        logits: ``[T, V]``, if no labels are given.
        depths: for each depth of multi-token prediction, losses ``[T]``; hidden states ``[T, h]``, if this part has no
            head. Empty if there are no depths before or in this part, or if they were not asked for.
        divergences: ``[T]``, from the teacher of a distillation target.
        memory: ``[N, T, h]``: what layers of the next part read, beside ``hidden``.
    """

    hidden: Tensor | None = None
    losses: Tensor | None = None
    logits: Tensor | None = None
    depths: tuple[Tensor, ...] = ()
    divergences: Tensor | None = None
    memory: Tensor | None = None


def build_norm(config: GPTConfig, size: int) -> nn.Module:
    """Build the configured norm over ``size`` features."""
    # Both kinds take a size and an eps, and differ in nothing else here.
    if config.norm.kind == "layer":
        return LayerNorm(size, config.norm.eps, backend=config.backends.norm)
    return RMSNorm(size, config.norm.eps, config.backends.norm, around_zero=config.norm.around_zero)


def rotary_of(config: GPTConfig, index: int) -> str | None:
    """Return the name of the rotary table of the layer with this global index, or None."""
    if not config.position.rotates(index):
        return None
    return LOCAL if config.position.local_base is not None and config.attention.is_local(index) else ROTARY


def build_inner(config: GPTConfig, index: int, scale: float | None) -> InnerAttention:
    """Build the attention between the projections."""
    return InnerAttention(
        scale=scale,
        window=config.attention.window_of(index),
        chunk=config.attention.chunk_of(index),
        softcap=config.attention.softcap,
        dropout=config.dropout.attention,
        softmax=config.attention.softmax,
        backend=config.backends.attention,
    )


def build_attention(config: GPTConfig, index: int) -> Attention:
    """Build the attention of the layer with this global index."""
    inner = build_inner(config, index, config.attention.scale)
    # layers that rotate know how far a key is, and need no temperature
    tuned = None if config.position.rotates(index) else config.attention.temperature
    whole = config.attention.qk_norm_whole

    def norm_of(heads: int) -> nn.Module | None:
        if config.attention.qk_l2_norm:  # a rotation does not change it, so before and after are the same
            return L2Norm(config.norm.eps) if config.position.rotates(index) else None
        return build_norm(config, config.head_dim * (heads if whole else 1)) if config.attention.qk_norm else None

    return Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        inner,
        qkv_bias=config.attention.qkv_bias,
        proj_bias=config.attention.proj_bias,
        q_norm=norm_of(config.num_heads),
        k_norm=norm_of(config.num_kv_heads),
        norm_whole=whole,
        gate=config.attention.output_gate,
        temperature=Temperature(tuned.length, tuned.scale) if tuned is not None else None,
        sink=config.attention.softmax == "learnable",
        rotary=rotary_of(config, index),
        std=config.init.std,
        proj_std=config.residual_std,
    )


def build_latent_attention(config: GPTConfig, index: int) -> LatentAttention:
    """Build the latent attention of the layer with this global index."""
    latent, scaling, scale = config.latent, config.position.scaling, config.attention.scale
    assert latent is not None
    if scale is None:
        # DeepSeek moves the concentration of YaRN to the scores, so that features that are not rotated get it too
        scale = config.head_dim**-0.5 * (1.0 if scaling is None else scaling.score_factor)
    return LatentAttention(
        config.hidden_size,
        config.num_heads,
        latent.q_rank,
        latent.kv_rank,
        latent.head_dim,
        latent.rotary_dim,
        latent.value_dim,
        build_inner(config, index, scale),
        norm_eps=latent.norm_eps,
        rotary=rotary_of(config, index),
        std=config.init.std,
        proj_std=config.residual_std,
        norm_backend=config.backends.norm,
    )


def build_conv(config: GPTConfig, index: int) -> ShortConv:
    """Build the convolution of a layer. All convolutions are the same."""
    return ShortConv(config.hidden_size, config.conv_kernel, std=config.init.std, proj_std=config.residual_std)


def build_mamba(config: GPTConfig, index: int) -> Mamba2:
    """Build the Mamba-2 mixer of a layer. All are the same."""
    mamba = config.mamba
    assert mamba is not None
    return Mamba2(
        config.hidden_size,
        mamba.num_heads,
        mamba.head_dim,
        mamba.state_size,
        mamba.num_groups,
        conv_kernel=mamba.conv_kernel,
        conv_bias=mamba.conv_bias,
        norm_groups=mamba.norm_groups,
        norm_eps=config.norm.eps if mamba.norm_eps is None else mamba.norm_eps,
        steps=mamba.step_range,
        step_floor=mamba.step_floor,
        std=config.init.std,
        proj_std=config.residual_std,
        conv_backend=config.backends.conv,
        scan_backend=config.backends.scan,
        norm_backend=config.backends.norm,
    )


def build_delta_net(config: GPTConfig, index: int) -> GatedDeltaNet:
    """Build the Gated DeltaNet of a layer. All are the same."""
    delta = config.delta
    assert delta is not None
    return GatedDeltaNet(
        config.hidden_size,
        delta.num_heads,
        delta.num_key_heads,
        delta.head_dim,
        delta.key_dim,
        conv_kernel=delta.conv_kernel,
        norm_eps=config.norm.eps,
        steps=delta.step_range,
        step_floor=delta.step_floor,
        std=config.init.std,
        proj_std=config.residual_std,
        conv_backend=config.backends.conv,
        rule_backend=config.backends.delta_rule,
        norm_backend=config.backends.norm,
    )


MIXERS: dict[str, tuple[str, Callable[[GPTConfig, int], nn.Module]]] = {
    "attention": ("attention", build_attention),
    "latent_attention": ("attention", build_latent_attention),
    "conv": ("conv", build_conv),
    "mamba": ("mamba", build_mamba),
    "gated_delta_net": ("delta", build_delta_net),
}
"""Name in ``mixer_pattern`` -> name of the layer's submodule, and function that builds the mixer of a layer index."""


def build_mlp(config: GPTConfig) -> MLP:
    """Build a dense feed-forward layer."""
    return MLP(
        config.hidden_size,
        config.ffn_hidden_size,
        config.activation,
        bias=config.mlp_bias,
        std=config.init.std,
        down_std=config.residual_std,
        backend=config.backends.activation,
    )


def build_experts(config: GPTConfig) -> MoE:
    """Build a router and its experts."""
    moe, std, down_std = config.moe, config.init.std, config.residual_std
    assert moe is not None
    experts = Experts(
        moe.num_experts,
        config.hidden_size,
        config.expert_ffn_hidden_size,
        Activation(
            config.activation,
            config.backends.activation,
            offset=moe.glu_offset,
            clamp=moe.clamp,
            fp8_input_store=moe.fp8_input_store,
        ),
        bias=moe.bias,
        weigh_input=moe.weigh_input,
        std=std,
        down_std=down_std,
        backend=config.backends.experts,
    )
    router = Router(config.hidden_size, moe.num_experts, moe.router, moe.balance, moe.capacity, std=std)
    if moe.shared is None:
        return MoE(router, experts)
    shared = MLP(
        config.hidden_size,
        moe.shared.ffn_hidden_size,
        config.activation,
        std=std,
        down_std=down_std,
        backend=config.backends.activation,
    )
    return MoE(router, experts, shared, Linear(config.hidden_size, 1, std=std) if moe.shared.gate else None)


def build_layer(config: GPTConfig, index: int) -> TransformerLayer | ResidualLayer:
    """Build the layer with this global index: mixer and MLP, or one of them in a model with a ``layer_pattern``."""
    sublayers: list[tuple[str, nn.Module]] = []
    if (mixer := config.mixer_of(index)) is not None:
        name, build = MIXERS[mixer]
        sublayers.append((name, build(config, index)))
    if config.has_mlp(index):
        sublayers.append(("mlp", build_experts(config) if config.has_experts(index) else build_mlp(config)))
    # Two modules, not one twice: each has a weight of its own.
    norms = [build_norm(config, config.hidden_size) for _ in sublayers]
    name, inner = sublayers[0]
    if len(sublayers) == 1:
        return ResidualLayer(norms[0], inner, name=name, dropout=config.dropout.hidden)
    after = [build_norm(config, config.hidden_size) if config.norm.after else None for _ in sublayers]
    return TransformerLayer(
        norms[0],
        inner,
        norms[1],
        sublayers[1][1],
        name=name,
        dropout=config.dropout.hidden,
        mixer_post_norm=after[0],
        mlp_post_norm=after[1],
    )


def build_embedding(config: GPTConfig) -> TokenEmbedding:
    """Build the embedding of words and, if configured, of positions."""
    word = Embedding(config.vocab_size, config.hidden_size, config.init.std)
    learned = config.position.kind == "learned"
    position = Embedding(config.max_sequence_length, config.hidden_size, config.init.std) if learned else None
    return TokenEmbedding(word, position, multiplier=config.embedding_multiplier, dropout=config.dropout.embedding)


def build_rotary(config: GPTConfig, *, local: bool = False) -> Rotary | None:
    """Build the rotary embedding, if configured; with ``local``, that of layers with a window, if it differs."""
    position = config.position
    base = position.local_base if local else position.base
    if position.kind != "rope" or base is None:
        return None
    return Rotary(
        config.rotary_dim,
        base,
        # a window is as long as in the first training, whatever the context
        scaling=None if local else position.scaling,
        axes=position.axes,
        interleaved=position.interleaved,
        backend=config.backends.rotary,
    )


def build_head(config: GPTConfig) -> LMHead:
    """Build the final norm and the output layer."""
    output_layer = Linear(config.hidden_size, config.vocab_size, std=config.init.std)
    return LMHead(
        build_norm(config, config.hidden_size),
        output_layer,
        softcap=config.logit_softcap,
        backend=config.backends.cross_entropy,
    )


def build_multi_token(config: GPTConfig, embed: TokenEmbedding, norm: nn.Module) -> MultiTokenPrediction:
    """Build the depths of multi-token prediction over the model's embedding and final norm."""

    def depth() -> PredictionDepth:
        norms = [build_norm(config, config.hidden_size) for _ in range(3)]
        join = Linear(2 * config.hidden_size, config.hidden_size, std=config.init.std)
        layers = [build_layer(config, index) for index in config.depth_layers]
        return PredictionDepth(norms[0], norms[1], join, layers, norms[2])

    return MultiTokenPrediction(embed, norm, [depth() for _ in range(config.num_depths)])


class GPT(nn.Module):
    """A decoder-only language model. Parameters have no values until they are initialized or loaded.

    It may be a part of a model: without ``embed`` its input is hidden states, without ``head`` its output is hidden
    states, and ``layers`` keeps the global indices of its layers.

    Attributes:
        embed: from token ids to hidden states, or None.
        layers: transformer layers in order, by global index as a string.
        head: from hidden states to losses or logits, or None.
        mtp: depths of multi-token prediction, or None. They have the embedding and the final norm of the whole model,
            also in a part without these.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: TokenEmbedding | None = build_embedding(config)
        # Outside of the layers, as all of them share its table.
        self.rotary = build_rotary(config)
        self.local_rotary = build_rotary(config, local=True)
        self.layers = nn.ModuleDict({str(i): build_layer(config, i) for i in range(config.num_layers)})
        self.last_layer = str(config.num_layers - 1)
        # Experts keep all tokens: their routers balance them.
        last = self.layers[self.last_layer]
        if isinstance(last, TransformerLayer) and isinstance(last.mlp, MLP):
            last.narrow()
        self.head: LMHead | None = build_head(config)
        self.mtp: MultiTokenPrediction | None = None
        if config.mtp is not None:
            # after the embedding and the head, whose names their shared modules keep
            self.mtp = build_multi_token(config, self.embed, self.head.norm)
        # one parameter with two names: canonical tensors and checkpoints use the first one, embed.word.weight
        if config.tie_embeddings:
            self.head.output_layer.weight = self.embed.word.weight

    def context(self, sequences: PackedSequences, dtype: torch.dtype, rows: Tensor | None = None) -> LayerContext:
        """Make what layers share, for hidden states of ``dtype``. ``rows``: those that the head reads; None: all."""
        # Made from the dtype of the hidden states, which sets how precise angles must be.
        rotations = {ROTARY: self.rotary, LOCAL: self.local_rotary}
        tables = {
            name: rotary(sequences.rotary_positions, dtype) for name, rotary in rotations.items() if rotary is not None
        }
        return LayerContext(sequences, tables, rows=rows)

    def forward(
        self,
        tokens: Tensor | None,
        sequences: PackedSequences,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        states: Mapping[str, Any] | None = None,
        rows: Tensor | None = None,
        later: Sequence[MultiTokenTarget] = (),
        depths: Sequence[Tensor] = (),
        target: DistillationTarget | None = None,
        memory: Tensor | None = None,
        scored: tuple[Tensor, Tensor] | None = None,
    ) -> GPTOutput:
        """Run the parts that this model has.

        Args:
            tokens: ``[T]`` ids, the input of ``embed``.
            sequences: how the tokens divide into sequences.
            labels: ``[T]``, the id that follows each token. With labels, the head returns losses.
            hidden: ``[T, h]``, the input of a model without ``embed``, or the output of ``embed`` if it ran before.
            states: the state of each layer (see :mod:`megalight.inference.cache`). None if there are no earlier tokens.
            rows: ``[N]`` indices of the tokens for which to compute losses or logits. None means all tokens.
            later: one entry for each depth of multi-token prediction. Empty: the depths do not run.
            depths: hidden states ``[T, h]`` of each depth, from the part before, if the depths were in that one.
            target: what the head learns from a teacher, with labels.
            memory: ``[N, T, h]``, of which layers add some to their output.
            scored: rows ``[M]`` and labels ``[M]``. Beside the logits, the output has the losses of these rows.

        Raises:
            DataError: a sequence is longer than ``max_sequence_length``, or the input of this part is missing.
        """
        sequences.check_longest(self.config.max_sequence_length)
        if self.embed is not None and hidden is None:
            if tokens is None:
                raise DataError("tokens is None, but this model begins with its embedding; pass token ids [T].")
            hidden = self.embed(tokens, sequences.positions)
        if hidden is None:
            raise DataError("hidden is None, but this model has no embedding; pass hidden states [T, h].")
        # The context is made once. Recompute of a layer then passes the same object.
        narrowed = rows if self._narrows(labels, later, target) else None
        context = self.context(sequences, hidden.dtype, narrowed)
        hidden = run_layers(self.layers, hidden, context, states, memory)
        if self.mtp is not None and later:
            depths = self.mtp(hidden, [each.tokens for each in later], self._positions(sequences, len(later)), context)
        if self.head is None:
            return GPTOutput(hidden=hidden, depths=tuple(depths))
        further = tuple(self.head(hidden, each.labels, normed=True) for hidden, each in zip(depths, later, strict=True))
        if target is not None and labels is not None:
            # By a call, so that hooks of the head run.
            divergences, losses = self.head(hidden, labels, target=target)
            return GPTOutput(losses=losses, depths=further, divergences=divergences)
        losses = None if scored is None else self.head(take_rows(hidden, scored[0]), scored[1])
        if rows is not None:
            # select rows before the head, whose product with the vocabulary is expensive
            hidden = hidden if narrowed is not None else take_rows(hidden, rows)
            labels = None if labels is None else labels[rows]
        answer = self.head(hidden, labels)
        return GPTOutput(logits=answer, losses=losses) if labels is None else GPTOutput(losses=answer, depths=further)

    def _narrows(
        self, labels: Tensor | None, later: Sequence[MultiTokenTarget], target: DistillationTarget | None
    ) -> bool:
        """Return whether the last layer returns the chosen rows only: it is here, and the head alone reads it."""
        if self.head is None or labels is None or later or target is not None or self.last_layer not in self.layers:
            return False
        return getattr(self.layers[self.last_layer], "narrows", False)

    def _positions(self, sequences: PackedSequences, depths: int) -> list[Tensor]:
        """Return the positions of the tokens that each depth reads."""
        # places behind the end of a sequence hold no token, but a learned embedding needs a row for them
        last = self.config.max_sequence_length - 1
        return [(sequences.positions + number).clamp(max=last) for number in range(1, depths + 1)]
