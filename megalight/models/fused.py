"""Our fused ops inside models of ``transformers``, whose modules, names and weights stay as they are.

:func:`fuse` gives each known module a subclass of its class with another ``forward``: norms together with the sum
before them, the gated activation, rotary embedding, causal attention, and the head together with its loss. It knows
classes whose code is that of a family in :data:`REFERENCES`.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn.transformers_attention import NAME
from megalight.ops.activation import gated_pair
from megalight.ops.attention import attention
from megalight.ops.cross_entropy import linear_cross_entropy
from megalight.ops.norm import add_rms_norm, rms_norm
from megalight.ops.rotary import apply_rotary
from megalight.parallel.tensor.linear import column_linears
from megalight.parallel.transform import ModelTransform, register
from megalight.types import PackedSequences


class FusedModule(nn.Module):
    """Goes before a class of ``transformers`` among the bases of a fused class."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Return whether a module of that class computes what this class does. Default: it does."""
        return True

    @classmethod
    def of_transformers(cls) -> type:
        """Return the class of ``transformers``."""
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith("transformers."))

    @classmethod
    def beside(cls, name: str) -> Any:
        """Return what the file of that class has under a name."""
        return getattr(sys.modules[cls.of_transformers().__module__], name)


# Norms


class Norm(FusedModule):
    """Has the attributes of an RMS norm of ``transformers``."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, with_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Norm the last dim of ``[..., h]``.

        Args:
            hidden_states: the input, or one term of it.
            residual: the other term.
            with_sum: also return the sum that was normed; its gradient is added in the same kernel.
        """
        if not with_sum:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon)


# Gated MLPs


KINDS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Name in a configuration of ``transformers`` -> name of our activation."""


class GatedMLP(FusedModule):
    """Has the attributes of a gated MLP of ``transformers``."""

    config: Any
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    act_fn: nn.Module

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Return whether our ops have the activation."""
        kind = _activation(module)
        # Families may take their activation from another entry.
        return kind in KINDS and type(module.act_fn) is type(cls.activations()[kind])

    @staticmethod
    def activations() -> Any:
        """Return the activations of ``transformers`` by name."""
        return sys.modules["transformers.activations"].ACT2FN

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h] -> [..., h]``."""
        gate, up = column_linears(x, (self.gate_proj, self.up_proj))
        hidden: Tensor = self.down_proj(gated_pair(gate, up, KINDS[_activation(self)]))
        return hidden


def _activation(module: Any) -> str:
    return str(getattr(getattr(module, "config", None), "hidden_act", None))


# The head and its loss


class Head(nn.Linear):
    """A linear layer to the vocabulary that also returns losses, without all logits in float32.

    Attributes:
        stands_for: the layer that a style of a plan replaces it as: heads that are split have losses of their own.
    """

    stands_for: ClassVar = nn.Linear

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits ``[..., V]``, or losses ``[T]`` of ``labels [T]`` from hidden states ``[T, h]``."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, labels, bias=self.bias)


# Decoder layers


class Layer(FusedModule):
    """Has the attributes of a decoder layer of ``transformers``."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Return whether the norms of a layer are those of its family, which get a fused form."""
        norms = (module.input_layernorm, module.post_attention_layernorm)
        return all(isinstance(norm, Norm) or part_of(norm.__class__) is Norm for norm in norms)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """``[B, S, h] -> [B, S, h]``; further arguments are those of the attention."""
        normed, residual = self.input_layernorm(streamed(hidden_states), with_sum=True)
        attended = self.self_attn(hidden_states=normed, **kwargs)[0]
        normed, residual = self.post_attention_layernorm(attended, residual=residual, with_sum=True)
        return residual + self.mlp(normed)  # type: ignore[no-any-return]


def streamed(hidden: Tensor) -> Tensor:
    """Return hidden states in the dtype of autocast, if it is on: embeddings are float32 then."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


# The decoder


class Decoder(FusedModule):
    """Has the attributes of a decoder of ``transformers``.

    That looks for packed documents in the positions, for which the host waits in every step, or fills a cache that
    training never reads. Where the caller gives no positions, there are none to look for.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output of ``transformers``: hidden states ``[B, S, h]`` after the last norm."""
        given = (attention_mask, position_ids, past_key_values)
        if not self.training or any(each is not None for each in given) or not self._is_plain(kwargs):
            return super().forward(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both.")
        hidden: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = hidden.shape[:2]
        if self._windows_shorter_than(length):
            return super().forward(inputs_embeds=hidden, use_cache=False, **kwargs)
        positions = torch.arange(length, device=hidden.device).unsqueeze(0)
        tables = self.rotary_emb(hidden, position_ids=positions)
        sequences = PackedSequences.of_uniform(batch, length, hidden.device)
        for layer in self.layers[: self.config.num_hidden_layers]:
            # Without a mask, torch's attention is causal too: a layer that is not fused needs no other arguments.
            places = {"position_ids": positions, "position_embeddings": tables}
            hidden = layer(hidden, attention_mask=None, **places, sequences=sequences, **kwargs)
        return self.beside("BaseModelOutputWithPast")(last_hidden_state=self.norm(hidden))

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the caller wants hidden states after the last norm and nothing else."""
        wanted = ("output_hidden_states", "output_attentions")
        recorded = any(kwargs.get(name) or getattr(self.config, name, False) for name in wanted)
        causal = getattr(self.config, "is_causal", True)
        ours = self.config._attn_implementation in ("sdpa", NAME)
        return ours and causal and not recorded and "is_causal" not in kwargs

    def _windows_shorter_than(self, length: int) -> bool:
        config = getattr(self.config, "sliding_window", None)
        # Qwen2 says in each layer whether it has one.
        windows = {getattr(layer.self_attn, "sliding_window", config) for layer in self.layers}
        return any(window is not None and window < length for window in windows)


# Attention


class FusedRotary(FusedModule):
    """Makes the tables of angles in float32, whatever the dtype of hidden states; the kernel rounds only its result."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[B, S, D]`` of positions ``[B, S]``. ``x`` gives only the device."""
        tables: tuple[Tensor, Tensor] = super().forward(x.new_empty(0, dtype=torch.float32), position_ids)
        return tables


class FusedAttention(FusedModule):
    """Has the attributes of an attention of ``transformers``.

    It calls our attention where the decoder says that it is causal and has no mask, else the implementation in its
    configuration.
    """

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        sequences: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs ``[B, S, h]`` and, if the implementation has them, weights.

        Args:
            hidden_states: ``[B, S, h]``.
            position_embeddings: cosines and sines ``[B or 1, S, D]``.
            attention_mask: mask for the implementation, or None.
            past_key_values: cache of earlier keys and values, or None.
            sequences: the lengths of the rows, if each token sees all earlier ones of its row. None: see the mask.
            kwargs: further arguments of the implementation.
        """
        batch, length = hidden_states.shape[:2]
        heads = (batch, length, -1, self.head_dim)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (each.view(heads) for each in column_linears(hidden_states, layers))
        # Qwen3 norms each head.
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (_rows(table, batch) for table in position_embeddings)
        query, key = (apply_rotary(x.flatten(0, 1), cos, sin) for x in (query, key))
        dropout = self.attention_dropout if self.training else 0.0
        if sequences is not None and not dropout:
            packed = attention(query, key, value.flatten(0, 1), sequences, causal=True, scale=self.scaling)
            return self.o_proj(packed.reshape(batch, length, -1)), None
        query, key, value = (x.view(batch, length, -1, self.head_dim).transpose(1, 2) for x in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        functions = self.beside("ALL_ATTENTION_FUNCTIONS")
        attend = functions.get_interface(self.config._attn_implementation, self.beside("eager_attention_forward"))
        # Each family keeps its window in another place. Llama has none.
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        if window is not None:
            kwargs["sliding_window"] = window
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(batch, length, -1).contiguous()), weights


def _rows(table: Tensor, batch: int) -> Tensor:
    """Return the first half of a table ``[B or 1, S, D]``, which the second repeats, as rows ``[B S, D/2]``."""
    half = table[..., : table.shape[-1] // 2]
    return half.expand(batch, -1, -1).flatten(0, 1)


# Language models


IGNORED = -100
"""Label without a loss, unless ``ignore_index`` names another."""
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Further arguments of the loss of ``transformers``."""


class CausalLM(FusedModule):
    """Has the attributes of a ``...ForCausalLM`` of ``transformers``.

    Attributes:
        sums_losses: its loss is a sum divided by ``num_items_in_batch``, if that is given.
    """

    sums_losses: ClassVar = True

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


REFERENCES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
"""Prefix of the classes of a family whose code our parts compute -> its folder in ``transformers.models``."""

PARTS: dict[str, type[FusedModule]] = {
    "RMSNorm": Norm,
    "RotaryEmbedding": FusedRotary,
    "Attention": FusedAttention,
    "MLP": GatedMLP,
    "DecoderLayer": Layer,
    "Model": Decoder,
    "ForCausalLM": CausalLM,
}
"""The rest of the name of a class -> what its fused form adds."""
HELPERS = {"Attention": ("apply_rotary_pos_emb", "rotate_half")}
"""Part -> functions beside it that its code calls."""


@cache
def part_of(kind: Any) -> type[FusedModule] | None:
    """Return what computes the same as a class of ``transformers``; None: nothing is known to.

    Most families copy the code of others. A class is known if its ``forward`` has the instructions of a reference,
    but for names of the family.
    """
    path = kind.__module__.split(".")
    # By exact class: a subclass of a user may compute something else.
    if path[:2] != ["transformers", "models"] or not path[-1].startswith("modeling_"):
        return None
    part = next((part for part in PARTS if kind.__name__.endswith(part)), None)
    return PARTS[part] if part is not None and _code_of(kind, part) in _references(part) else None


@cache
def _references(part: str) -> frozenset[Hashable]:
    found = set()
    for prefix, folder in REFERENCES.items():
        beside = import_module(f"transformers.models.{folder}.modeling_{folder}")
        found.add(_code_of(getattr(beside, prefix + part), part))
    return frozenset(found)


def _code_of(kind: Any, part: str) -> Hashable:
    """Return what a part runs, in a form that families share: instructions, names and constants of its functions.

    None: a function has no code of Python.
    """
    functions = [inspect.unwrap(kind.forward)]
    functions += [getattr(sys.modules[kind.__module__], name, None) for name in HELPERS.get(part, ())]
    if not all(isinstance(function, FunctionType) for function in functions):
        return None
    prefix = re.compile(rf"\b{kind.__name__.removesuffix(part)}(?=[A-Z])")
    return tuple(
        (_instructions(each.__code__, prefix), repr((each.__defaults__, each.__kwdefaults__))) for each in functions
    )


def _instructions(code: CodeType, prefix: re.Pattern[str]) -> Hashable:
    """Return instructions with the names and constants that they use. Docstrings, types and comments are no part."""
    found: list[Hashable] = [code.co_flags, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    for each in dis.get_instructions(code):
        value = each.argval
        if isinstance(value, CodeType):
            value = _instructions(value, prefix)
        elif isinstance(value, str):
            value = prefix.sub("", value)
        # Of their type, too: 1 equals True.
        found.append((each.opcode, type(value), value))
    return tuple(found)


def fuse(model: nn.Module) -> int:
    """Let all known modules in ``model`` run fused ops. Results are equal up to rounding.

    Under autocast, hidden states between layers have its dtype; ``transformers`` keeps them in float32. In training
    with ``labels``, the output has a loss and no logits, which are never made as a whole.

    Returns:
        the number of decoder layers that are fused now, or were before.
    """
    layers = 0
    # Children first: a model knows then which attentions read its tables of angles.
    for module in reversed(list(model.modules())):
        part = part_of(type(module))  # type: ignore[arg-type]
        if part is not None and part is not FusedRotary and part.fits(module):
            module.__class__ = _fused(type(module))  # type: ignore[arg-type]
        for child in module.children():
            # An attention of `transformers` needs tables in the dtype of hidden states.
            if part_of(type(child)) is FusedRotary and all(  # type: ignore[arg-type]
                isinstance(getattr(layer, "self_attn", None), FusedAttention) for layer in getattr(module, "layers", ())
            ):
                child.__class__ = _fused(type(child))  # type: ignore[arg-type]
        if isinstance(module, CausalLM) and type(head := module.lm_head) is nn.Linear:
            head.__class__ = Head
        layers += isinstance(module, Layer)
    return layers


def unfuse(model: nn.Module) -> None:
    """Give the modules in ``model`` their own classes back."""
    for module in list(model.modules()):
        if type(module) is Head:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, FusedModule):
            module.__class__ = type(module).of_transformers()


@cache
def _fused(theirs: Any) -> type[nn.Module]:
    """Return the class that is derived from one of ``transformers``, with its name: folders are written with it."""
    part = part_of(theirs)
    assert part is not None
    ours = type(theirs.__name__, (part, theirs), {"__module__": __name__, "__doc__": theirs.__doc__})
    # Pickles find it by this: several families may have classes of one name.
    ours.__qualname__ = f"{theirs.__module__.split('.')[2]}:{theirs.__name__}"
    # `transformers` looks up by class what it can record on request (`output_hidden_states`).
    capturing = sys.modules.get("transformers.utils.output_capturing")
    getattr(capturing, "_CAN_RECORD_REGISTRY", {})[str(ours)] = getattr(theirs, "_can_record_outputs", None)
    return ours


def __getattr__(name: str) -> Any:
    """Return a fused class by its folder and its name (``llama:LlamaMLP``), so that modules can be pickled."""
    folder, _, kind = name.partition(":")
    if kind:
        theirs = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), kind, None)
        if theirs is not None and part_of(theirs) is not None:
            return _fused(theirs)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@register
@dataclass(frozen=True)
class Fused(ModelTransform):
    """Lets modules of known families of ``transformers`` run our ops: see :func:`megalight.models.fused.fuse`."""

    name: ClassVar[str] = "fused"

    def change(self, model: nn.Module) -> None:
        """Change the classes of the known modules. Names, parameters and plans stay.

        Raises:
            ConfigurationError: there is none.
        """
        fuse(model)
        if not any(isinstance(module, FusedModule) for module in model.modules()):
            raise ConfigurationError(
                f"FusedOps finds no module in {type(model).__name__} that it knows: it serves models of transformers "
                f"with parts whose code is that of {', '.join(REFERENCES)}, and Megalight's own models run fused ops "
                "anyway. Remove FusedOps."
            )
