"""Our fused ops inside models of ``transformers``, whose modules, names and weights stay as they are.

:func:`fuse` gives each module whose numbers one of our ops computes (``fused_forms.py``) a subclass of its class with
another ``forward``: norms together with the sum before them, gated activations, experts, rotary embedding, attention,
and the head together with its loss.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalight.attachments import FUSED_FORM
from megalight.errors import ConfigurationError
from megalight.models import fused_forms as forms
from megalight.nn.transformers_attention import CALL, CAUSAL, NAME, use_attention
from megalight.ops.activation import gated, gated_pair
from megalight.ops.common import wide
from megalight.ops.cross_entropy import linear_cross_entropy
from megalight.ops.grouped_linear import grouped_bias, grouped_linear
from megalight.ops.linear import linear
from megalight.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megalight.ops.permute import permutation, permute, unpermute
from megalight.ops.rotary import apply_rotary
from megalight.parallel.layers import is_transformers
from megalight.parallel.tensor.linear import column_linears
from megalight.parallel.transform import ModelTransform, register


class FusedModule(nn.Module):
    """Goes before a class of ``transformers`` among the bases of a fused class.

    Attributes:
        fused_form: what the module computes.
    """

    fused_form: Any

    @classmethod
    def of_transformers(cls) -> type:
        """Return the class of ``transformers``."""
        return cls.__bases__[1]

    @property
    def stands_for(self) -> type:
        """The class for which rules of a plan take the module."""
        return self.of_transformers()


# Norms


class Norm(FusedModule):
    """A norm over the last dim."""

    fused_form: forms.NormForm
    weight: nn.Parameter

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, with_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Norm the last dim of ``[..., h]``.

        Args:
            hidden_states: the input, or one term of it.
            residual: the other term.
            with_sum: also return the sum that was normed; its gradient is added in the same kernel.
        """
        form = self.fused_form
        weight: Tensor = self.weight
        if form.offset:
            weight = weight.to(wide(weight.dtype)) + form.offset
        if form.kind == "rms":
            if not with_sum:
                return rms_norm(hidden_states, weight, form.eps)
            return add_rms_norm(hidden_states, residual, weight, form.eps)
        bias = self._parameters.get("bias")
        if not with_sum:
            return layer_norm(hidden_states, weight, bias, form.eps)
        return add_layer_norm(hidden_states, residual, weight, bias, form.eps)


# Gated MLPs


class GatedMLP(FusedModule):
    """A gated feed-forward layer, whose activation and product are one kernel."""

    fused_form: forms.FeedForwardForm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., h] -> [..., h]``."""
        form = self.fused_form
        wide_states = column_linears(hidden_states, [self.get_submodule(name) for name in form.ups])
        act: Any = gated_pair if len(wide_states) == 2 else gated
        hidden: Tensor = self.get_submodule(form.down)(act(*wide_states, form.kind))
        return hidden


# Experts


class FusedExperts(FusedModule):
    """A stack of experts, whose products are grouped, and whose activation is one kernel."""

    fused_form: forms.ExpertsForm
    num_experts: int
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, h]``, and ``[T, k]`` numbers and weights of experts ``-> [T, h]``."""
        form = self.fused_form
        where = permutation(top_k_index, self.num_experts)
        rows, probs = permute(hidden_states, where, top_k_weights.to(wide(top_k_weights.dtype)))
        assert probs is not None
        hidden = self._product(rows, "gate_up_proj", where.offsets)
        if self.has_bias:
            hidden = grouped_bias(hidden, self._parameters["gate_up_proj_bias"], where.offsets)  # type: ignore[arg-type]
        if not self.is_concatenated:
            hidden = hidden.view(len(hidden), -1, 2).transpose(1, 2).flatten(1)
        hidden = gated(hidden, form.kind, weights=probs, offset=form.offset, clamp=form.clamp)
        hidden = self._product(hidden, "down_proj", where.offsets)
        if self.has_bias:
            hidden = grouped_bias(hidden, self._parameters["down_proj_bias"], where.offsets, probs)  # type: ignore[arg-type]
        return unpermute(hidden, where)

    def _product(self, rows: Tensor, name: str, offsets: Tensor) -> Tensor:
        weight = self._parameters[name]
        assert weight is not None
        return grouped_linear(rows, weight, offsets, input_first=self.is_transposed)


# Linear layers


class FusedLinear(nn.Linear):
    """A linear layer whose weight gradient is added to the main gradient by its product, if there is one.

    Attributes:
        stands_for: the layer that styles of a plan take it for.
    """

    stands_for: ClassVar = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        return linear(input, self.weight, self.bias)


class Head(FusedLinear):
    """A linear layer to the vocabulary that also returns losses, without all logits in float32."""

    def losses(self, hidden: Tensor, labels: Tensor, softcap: float | None, backend: str) -> Tensor:
        """Return losses ``[T]`` of ``labels [T]`` from hidden states ``[T, h]``."""
        return linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, softcap=softcap, backend=backend)


# Decoder layers


class Layer(FusedModule):
    """A decoder layer, each of whose norms adds to the residual stream in its kernel."""

    fused_form: forms.LayerForm

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[B, S, h] -> [B, S, h]``; further arguments are those of the attention."""
        form = self.fused_form
        kwargs = _by_name(self.of_transformers(), args, kwargs)
        if not form.any_argument:
            kwargs = {name: value for name, value in kwargs.items() if name in form.arguments}
        before, after, second, last = (self._modules.get(name) if name else None for name in form.norms)
        stream = streamed(hidden_states)
        normed = stream
        if before is not None:
            normed, stream = before(stream, with_sum=True)
        added = self._modules[form.attention](hidden_states=normed, **kwargs)[0]  # type: ignore[misc]
        added = self._scaled(added if after is None else after(added))
        if form.parallel:
            # Both norms may be one.
            normed = normed if second is before or second is None else second(stream)
            stream = stream + added
        elif second is None:
            normed = stream = stream + added
        else:
            normed, stream = second(added, residual=stream, with_sum=True)
        added = self._modules[form.feed_forward](normed)  # type: ignore[misc]
        added = added[0] if form.takes_tuple else added
        # Some experts return rows without batches.
        return stream + self._scaled(added if last is None else last(added)).view(stream.shape)

    def _scaled(self, x: Tensor) -> Tensor:
        scale = self.fused_form.scale
        return x if scale == 1.0 else x * scale


@cache
def _names(theirs: Any) -> list[str]:
    """Return the names of the arguments of a layer, without its own and hidden states."""
    return _arguments(theirs)[1:]


def _by_name(theirs: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments after hidden states by their names."""
    return {**dict(zip(_names(theirs), args, strict=False)), **kwargs} if args else kwargs


def streamed(hidden: Tensor) -> Tensor:
    """Return hidden states in the dtype of autocast, if it is on: embeddings are float32 then."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


# The decoder


class Decoder(FusedModule):
    """A decoder, all of whose masks say no more than the windows of its attentions.

    ``transformers`` looks for packed documents in the positions, for which the host waits in every step, and fills a
    cache that training never reads. Where the caller gives no positions, there are none to look for, and attention
    needs no mask.

    Attributes:
        fused_form: the implementation of attention that the model had.
    """

    fused_form: str
    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``transformers``."""
        kwargs = {**dict(zip(_arguments(self.of_transformers()), args, strict=False)), **kwargs}
        given = any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", "past_key_values"))
        weights = kwargs.get("output_attentions") or getattr(self.config, "output_attentions", False)
        if not self.training or given or weights or CALL.get() is not None:
            return super().forward(**kwargs)
        with _without_masks(self.config):
            return super().forward(**{**kwargs, "use_cache": False})


@cache
def _arguments(theirs: Any) -> list[str]:
    return [*inspect.signature(theirs.forward).parameters][1:]


@contextmanager
def _without_masks(config: Any) -> Iterator[None]:
    """Let a model make no masks: attention is causal, in its window."""
    before = config._attn_implementation
    config._attn_implementation_internal = CAUSAL
    try:
        yield
    finally:
        config._attn_implementation_internal = before


# Attention


class FusedRotary(FusedModule):
    """Makes the tables of angles in float32, whatever the dtype of hidden states; the kernel rounds only its result."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[B, S, D]`` of positions ``[B, S]``. ``x`` gives only the device."""
        tables: tuple[Tensor, Tensor] = super().forward(x.new_empty(0, dtype=torch.float32), *args, **kwargs)
        return tables


class FusedAttention(FusedModule):
    """An attention whose rotary embedding is one kernel, and whose projections sum their input gradient once.

    It calls the attention in its configuration, through the interface of ``transformers``.
    """

    fused_form: forms.AttentionForm
    config: Any
    layer_idx: int
    head_dim: int

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs ``[B, S, h]`` and, if the implementation has them, weights.

        Args:
            hidden_states: ``[B, S, h]``.
            position_embeddings: cosines and sines ``[B or 1, S, D]``.
            attention_mask: mask for the implementation, or None.
            past_key_values: cache of earlier keys and values, or None.
            kwargs: further arguments of the implementation.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend: Any = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        if attend is None:  # a function of the family
            more = {"position_embeddings": position_embeddings, "past_key_values": past_key_values, **kwargs}
            found: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask=attention_mask, **more)
            return found
        form, (batch, length) = self.fused_form, hidden_states.shape[:2]
        projected = column_linears(hidden_states, [self.get_submodule(name) for name in form.layers])
        if len(projected) == 1:
            groups: int = self.num_key_value_groups  # type: ignore[assignment]
            heads = projected[0].shape[-1] // self.head_dim // (groups + 2)
            sizes = [each * heads * self.head_dim for each in (groups, 1, 1)]
            projected = list(torch.split(projected[0], sizes, -1))
        if form.norms and form.wide_norms:
            projected[:2] = [self._normed(x, number) for number, x in enumerate(projected[:2])]
        query, key, value = (x.reshape(batch, length, -1, self.head_dim) for x in projected)
        if form.norms and not form.wide_norms and not form.norms_last:
            query, key = self._normed(query, 0), self._normed(key, 1)
        if form.table is not None:
            cos, sin = (_rows(table, form.table, batch) for table in position_embeddings)
            query, key = (apply_rotary(x.flatten(0, 1), cos, sin, form.interleaved).view(x.shape) for x in (query, key))
        if form.norms_last:
            query, key = self._normed(query, 0), self._normed(key, 1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        options = {**dict(form.options), **kwargs}
        if form.sink is not None:
            options["s_aux"] = self._parameters[form.sink]
        dropout = form.dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, dropout=dropout, **options)
        return self.get_submodule(form.output)(output.reshape(batch, length, -1).contiguous()), weights

    def _normed(self, x: Tensor, number: int) -> Tensor:
        found: Tensor = self.get_submodule(self.fused_form.norms[number])(x)
        return found


def _rows(table: Tensor, repeats: str, batch: int) -> Tensor:
    """Return the different angles of a table ``[B or 1, S, D]`` as rows ``[B S, D/2]``."""
    half = {"halves": table[..., : table.shape[-1] // 2], "pairs": table[..., ::2]}.get(repeats, table)
    return half.expand(batch, -1, -1).flatten(0, 1)


# Language models


IGNORED = -100
"""Label without a loss, unless ``ignore_index`` names another."""
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Further arguments of the loss of ``transformers``."""
KEPT = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
"""What the output of a decoder has besides the last hidden states."""


class CausalLM(FusedModule):
    """A language model, whose head returns losses.

    Attributes:
        sums_losses: its loss is a sum divided by ``num_items_in_batch``, if that is given.
    """

    sums_losses: ClassVar = True

    fused_form: forms.CausalLMForm
    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``transformers``; in training with labels ``[B, S]``, its ``logits`` are None."""
        kwargs = {**dict(zip(_arguments(self.of_transformers()), args, strict=False)), **kwargs}
        labels, losses = kwargs.get("labels"), self.losses_of()
        as_tuple = not kwargs.get("return_dict", getattr(self.config, "return_dict", True))
        routed = kwargs.get("output_router_logits", getattr(self.config, "output_router_logits", False))
        kept = kwargs.get("logits_to_keep", 0)
        part = not isinstance(kept, int) or kept != 0
        if labels is None or not self.training or losses is None or as_tuple or routed or part:
            return super().forward(**kwargs)
        options = {name: kwargs.pop(name) for name in LOSS_ARGUMENTS if name in kwargs}
        inputs = {name: value for name, value in kwargs.items() if name not in ("labels", "logits_to_keep")}
        output = self.get_submodule(self.fused_form.decoder)(**inputs)
        loss = mean_loss(losses, output.last_hidden_state, labels, **options)
        beside = {name: value for name, value in output.items() if name in KEPT}
        return self.fused_form.output(loss=loss, logits=None, **beside)

    def losses_of(self) -> Any:
        """Return the function of hidden states ``[T, h]`` and labels ``[T]`` to losses; None: the loss is another."""
        form = self.fused_form
        losses = getattr(self._modules[form.head], "losses", None)
        # A loss of a user may be any callable, without a name.
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss" or losses is None:
            return None
        return lambda hidden, labels: losses(_times(hidden, form.scale), labels, form.softcap, "auto")


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


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


def fuse(model: nn.Module) -> int:
    """Let all modules of ``transformers`` in ``model`` that compute what our ops do run these.

    Results are equal up to rounding. Under autocast, hidden states between fused layers have its dtype;
    ``transformers`` keeps them in float32. In training with ``labels``, the output of a language model has a loss and
    no logits, which are never made as a whole.

    Returns:
        the number of decoder layers that are fused now, or were before.
    """
    roots = list(_of_transformers(model))
    single = [root for root in roots if is_transformers(root)]
    # Layers of one model may lie in a module of the user's own.
    for together in ([root for root in roots if not is_transformers(root)], *([root] for root in single)):
        _fuse([each for root in together for each in reversed(list(root.modules()))])
    return sum(isinstance(module, Layer) for module in model.modules())


def _of_transformers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are models of ``transformers``, or of its classes."""
    if is_transformers(model) or type(model).__module__.startswith("transformers."):
        yield model
        return
    for child in model.children():
        yield from _of_transformers(child)


FORMS: tuple[tuple[type[FusedModule], Any], ...] = (
    (Norm, forms.norm_form),
    (GatedMLP, forms.feed_forward_form),
    (FusedExperts, forms.experts_form),
    (FusedAttention, forms.attention_form),
    (Layer, forms.layer_form),
)
"""A fused class -> what finds its form."""


def _fuse(modules: list[nn.Module]) -> None:
    # Children first: a layer knows its norms then.
    modules = [each for each in modules if not isinstance(each, FusedModule | FusedLinear)]
    found = set[str | None]().union(*(forms.rotary_tables(each) for each in modules))
    for module in modules:
        for part, find in FORMS:
            form = forms.tried(find, module)
            # The tables that an attention gets must repeat as those do with which it was tried.
            if form is None or (part is FusedAttention and form.table is not None and found != {form.table}):
                continue
            _change(module, part, form)
            break
    for module in modules:
        if is_transformers(module):
            _fuse_model(module)
    for module in modules:
        if type(module) is nn.Linear:
            module.__class__ = FusedLinear


def _fuse_model(model: Any) -> None:
    """Fuse what a model does besides its layers."""
    form = forms.tried(lambda module: forms.causal_lm_form(module, mean_loss), model)
    if form is not None and (type(head := model._modules[form.head]) is nn.Linear or hasattr(head, "losses")):
        _change(model, CausalLM, form)
        if type(head) is nn.Linear:
            head.__class__ = Head
        return
    layers = list(model._modules.get("layers") or ())
    inside = [[each for each in layer.modules() if isinstance(each, FusedAttention)] for layer in layers]
    takers = [each for layer in layers for each in layer.modules() if "position_embeddings" in forms.takes(each)[0]]
    alone = all(isinstance(each, FusedAttention) or any(each is layer for layer in layers) for each in takers)
    if not layers or not all(inside):
        return
    if alone:  # an attention of `transformers` needs tables in the dtype of hidden states
        for module in model.children():
            if forms.rotary_tables(module):
                _change(module, FusedRotary, None)
    before = model.config._attn_implementation
    use_attention(model)
    windows = forms.tried(forms.windows_of, model)
    known = [{each.fused_form.window for each in layer} for layer in inside]
    if model.config._attn_implementation == NAME and windows is not None and known == [{each} for each in windows]:
        _change(model, Decoder, before)
    else:
        model.config._attn_implementation_internal = before


def _change(module: nn.Module, part: Any, form: Any) -> None:
    theirs: Any = type(module)
    module.__class__ = _fused(part, theirs)
    FUSED_FORM.set(module, form)


def unfuse(model: nn.Module) -> None:
    """Give the modules in ``model`` their own classes back."""
    for module in list(model.modules()):
        if isinstance(module, FusedLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, FusedModule):
            form = FUSED_FORM.pop(module)
            if isinstance(module, Decoder):
                module.config._attn_implementation_internal = form
            module.__class__ = type(module).of_transformers()


@cache
def _fused(part: Any, theirs: Any) -> Any:
    """Return the class that is derived from one of ``transformers``, with its name: folders are written with it."""
    own: dict[str, Any] = {"__module__": __name__, "__doc__": theirs.__doc__}
    if part in (CausalLM, Decoder):
        # Callers look up by name what a model takes.
        @functools.wraps(theirs.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return part.forward(self, *args, **kwargs)

        own["forward"] = forward
    ours = type(theirs.__name__, (part, theirs), own)
    # Pickles find it by this: several families may have classes of one name.
    ours.__qualname__ = f"{part.__name__}:{theirs.__module__.replace('.', '/')}:{theirs.__qualname__}"
    # `transformers` looks up by class what it can record on request (`output_hidden_states`).
    capturing = sys.modules.get("transformers.utils.output_capturing")
    getattr(capturing, "_CAN_RECORD_REGISTRY", {})[str(ours)] = getattr(theirs, "_can_record_outputs", None)
    return ours


def __getattr__(name: str) -> Any:
    """Return a fused class by what it adds and its class (``Norm:FILE:LlamaRMSNorm``), so that modules are pickled."""
    part, _, theirs = name.partition(":")
    file, _, kind = theirs.partition(":")
    if kind:
        return _fused(globals()[part], getattr(import_module(file.replace("/", ".")), kind))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@register
@dataclass(frozen=True)
class Fused(ModelTransform):
    """Lets modules of ``transformers`` run our ops: see :func:`megalight.models.fused.fuse`."""

    name: ClassVar[str] = "fused"

    def change(self, model: nn.Module) -> None:
        """Change the classes of modules of known forms. Names, parameters and plans stay.

        Raises:
            ConfigurationError: there is none.
        """
        fuse(model)
        if not any(isinstance(module, FusedModule) for module in model.modules()):
            raise ConfigurationError(
                f"FusedOps finds no module in {type(model).__name__} that it knows: it serves models of transformers "
                "with an RMS norm or layer norm, a gated activation, experts, attention, a decoder layer or a head "
                "whose numbers our ops compute, and Megalight's own models run fused ops anyway. Remove FusedOps."
            )
