"""Transformer layers: pre-norm, post-norm and one-sublayer layers, and the loop over the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megalight.nn.attention import Attention
from megalight.nn.mlp import MLP
from megalight.nn.norm import norm_and_sum
from megalight.nn.state import LayerContext, Slots
from megalight.ops.row_indexing import take_rows


def drop(dropout: nn.Module, x: Tensor) -> Tensor:
    """Return ``dropout(x)``, or ``x`` itself if ``dropout`` is torch's own and its probability is 0.

    A layer has two of them, nearly always with 0, and a call that does nothing costs the host as much as a small op.
    The probability is read at each call, so that it may be changed. Subclasses, and modules with hooks, are called.
    """
    if (
        dropout.__class__ is nn.Dropout
        and dropout.p == 0.0
        and not (dropout._forward_hooks or dropout._forward_pre_hooks)
        and not (dropout._backward_hooks or dropout._backward_pre_hooks)
    ):
        return x
    out: Tensor = dropout(x)
    return out


class TransformerLayer(nn.Module):
    """Pre-norm residual layer: ``x += mixer(norm(x))``, then ``x += mlp(norm(x))``.

    With norms after the sublayers (Gemma-2): ``x += norm(mixer(norm(x)))``, then ``x += norm(mlp(norm(x)))``.

    The mixer is called as ``mixer(hidden, context, state, memory)``; see :mod:`megalight.nn.layer`. Its submodules are
    named after it: ``attention``, ``attention_norm`` and ``attention_dropout``. The MLP is called as
    ``mlp(hidden, context)``.

    Args:
        mixer_norm: norm before the mixer.
        mixer: mixes tokens.
        mlp_norm: norm before the MLP.
        mlp: mixes features.
        name: name of the mixer.
        dropout: dropout probability of the outputs of mixer and MLP.
        mixer_post_norm, mlp_post_norm: norms of these outputs, or None.

    Attributes:
        adds: which of several memories ``[N, T, h]`` is added to the output, such as features of images; None: none.
        narrows: whether the layer goes on with the rows of the context alone; see :meth:`narrow`.
    """

    adds: int | None = None
    narrows: bool = False

    def __init__(
        self,
        mixer_norm: nn.Module,
        mixer: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        name: str = "attention",
        dropout: float = 0.0,
        mixer_post_norm: nn.Module | None = None,
        mlp_post_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        # Names follow the mixer, so that checkpoints show what a layer mixes with.
        self.names = f"{name}_norm", name, f"{name}_dropout", f"{name}_post_norm"
        for child, module in zip(self.names, (mixer_norm, mixer, nn.Dropout(dropout), mixer_post_norm), strict=True):
            self.add_module(child, module)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)
        self.add_module("mlp_post_norm", mlp_post_norm)  # an entry also where there is none

    def make_state(self, slots: Slots) -> Any:
        """Make the mixer's state, which holds what it needs of earlier tokens."""
        return self.get_submodule(self.names[1]).make_state(slots)  # type: ignore[operator]

    def narrow(self, on: bool = True) -> None:
        """Let the layer go on with the rows of the context alone, once its mixer has read all of them; or not.

        It is for the last layer: no mixer reads the other rows, so the rest of the layer need not compute them.
        """
        self.narrows = on
        mixer = self.get_submodule(self.names[1])
        if isinstance(mixer, Attention):
            mixer.narrows = on

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``, or ``[M, h]`` if the layer narrows. The mixer gets ``state`` and ``memory``."""
        norm, mixer, dropout, post_norm = self.names
        # Attribute access of modules costs a microsecond each, several times per layer; the dict does not.
        modules: dict[str, Any] = self._modules
        # From here on `hidden` is the residual stream `[T, h]`, which only additions touch.
        # Both come from one op: its backward adds the gradients of the norm and of the residual in one pass.
        normed, hidden = norm_and_sum(modules[norm], hidden)
        mixed = modules[mixer](normed, context, state, memory)
        if self.narrows and context.rows is not None:
            hidden = take_rows(hidden, context.rows)
            # An attention has projected these alone.
            if len(mixed) != len(hidden):
                mixed = take_rows(mixed, context.rows)
        if (after := modules[post_norm]) is not None:
            mixed = after(mixed)
        mixed = drop(modules[dropout], mixed)
        # the sum with the residual and the next norm run as one op
        normed, hidden = norm_and_sum(modules["mlp_norm"], mixed, hidden)
        feed, after = modules["mlp"], modules["mlp_post_norm"]
        # One token of inference: the products of the MLP do the rest of the layer, too.
        single = not self.training and after is None and feed.__class__ is MLP and normed.shape[0] == 1
        if not single or (summed := feed.of_single(normed, hidden)) is None:
            added: Tensor = feed(normed, context)
            if after is not None:
                added = after(added)
            summed = hidden + drop(modules["mlp_dropout"], added)
        hidden = summed
        return hidden if self.adds is None or memory is None else hidden + memory[self.adds]


# The transformer layer with norms after its sums (post-norm, https://arxiv.org/abs/1706.03762, used by BERT).


class PostNormLayer(nn.Module):
    """``x = norm(x + attention(x))``, then ``x = norm(x + mlp(x))``.

    Args:
        attention: mixes tokens.
        attention_norm: norm after attention.
        mlp: mixes features.
        mlp_norm: norm after the MLP.
        dropout: dropout probability of the outputs of attention and MLP.
    """

    def __init__(
        self,
        attention: nn.Module,
        attention_norm: nn.Module,
        mlp: nn.Module,
        mlp_norm: nn.Module,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)
        self.mlp_norm = mlp_norm

    def make_state(self, slots: Slots) -> Any:
        """Make the state of attention, which holds what it needs of earlier tokens."""
        return self.attention.make_state(slots)  # type: ignore[operator]

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. Attention gets ``state`` and ``memory``."""
        attended = self.attention_dropout(self.attention(hidden, context, state, memory))
        # The sum is dropped: in post-norm the residual stream is the normed tensor.
        hidden, _ = norm_and_sum(self.attention_norm, attended, hidden)
        return norm_and_sum(self.mlp_norm, self.mlp_dropout(self.mlp(hidden)), hidden)[0]


class ResidualLayer(nn.Module):
    """``x += inner(norm(x))``, where ``inner`` mixes tokens or features.

    Submodules are named as in :class:`~megalight.nn.TransformerLayer`: ``mamba_norm``, ``mamba`` and
    ``mamba_dropout``; or ``mlp_norm``, ``mlp`` and ``mlp_dropout``.

    Args:
        norm: norm before ``inner``.
        inner: a mixer, called as ``inner(hidden, context, state, memory)``, or a feed-forward layer, called as
            ``inner(hidden, context)``. A mixer has ``make_state``.
        name: name of ``inner``.
        dropout: dropout probability of the output of ``inner``.
    """

    def __init__(self, norm: nn.Module, inner: nn.Module, *, name: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.names = f"{name}_norm", name, f"{name}_dropout"
        for child, module in zip(self.names, (norm, inner, nn.Dropout(dropout)), strict=True):
            self.add_module(child, module)
        self.mixes = hasattr(inner, "make_state")

    def make_state(self, slots: Slots) -> Any:
        """Make the mixer's state; None for a feed-forward layer, which needs nothing of earlier tokens."""
        return self.get_submodule(self.names[1]).make_state(slots) if self.mixes else None  # type: ignore[operator]

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. A mixer gets ``state`` and ``memory``."""
        # As in the transformer layer: looking up modules by attribute costs more than the dict.
        norm, inner, dropout = self.names
        modules: dict[str, Any] = self._modules
        normed, hidden = norm_and_sum(modules[norm], hidden)
        feed = modules[inner]
        added: Tensor = feed(normed, context, state, memory) if self.mixes else feed(normed, context)
        return hidden + drop(modules[dropout], added)


def run_layers(
    layers: Mapping[str, nn.Module] | nn.ModuleDict,
    hidden: Tensor,
    context: LayerContext,
    states: Mapping[str, Any] | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """Run the layers in order: ``hidden = layer(hidden, context, state, memory)``. ``[T, h] -> [T, h]``.

    All models run their layers here.

    Args:
        layers: layers in order, by global index. A part of a model has only some of them.
        hidden: ``[T, h]``.
        context: the context that all layers share.
        states: the state of each layer, by the layer's name. None if there are no earlier tokens.
        memory: ``[Tm, h]``, read by layers with cross attention. It may require a gradient.
    """
    for name, layer in layers.items():
        hidden = layer(hidden, context, None if states is None else states[name], memory)
    return hidden
