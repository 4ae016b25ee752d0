"""Our fused ops inside models of ``transformers``, whose modules, names and weights stay as they are.

:func:`fuse` gives each known module a subclass of its class with another ``forward``: norms together with the sum
before them, the gated activation, rotary embedding, causal attention, and the head together with its loss. It knows the
families in :data:`FAMILIES`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from torch import nn

from megalight.models.fused.attention import Attention, Rotary
from megalight.models.fused.causal_lm import CausalLM
from megalight.models.fused.decoder import Decoder
from megalight.models.fused.head import Head
from megalight.models.fused.layer import Layer
from megalight.models.fused.mlp import GatedMLP
from megalight.models.fused.norm import Norm
from megalight.models.fused.part import Part

FAMILIES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
"""Prefix of the classes of a family -> its folder in ``transformers.models``."""

PARTS: dict[str, type[Part]] = {
    "RMSNorm": Norm,
    "RotaryEmbedding": Rotary,
    "Attention": Attention,
    "MLP": GatedMLP,
    "DecoderLayer": Layer,
    "Model": Decoder,
    "ForCausalLM": CausalLM,
}
"""The rest of the name of a class -> what its fused form adds."""


def fuse(model: nn.Module) -> int:
    """Let all known modules in ``model`` run fused ops. Results are equal up to rounding.

    Under autocast, hidden states between layers have its dtype; ``transformers`` keeps them in float32. In training
    with ``labels``, the output has a loss and no logits, which are never made as a whole.

    Returns:
        the number of decoder layers that are fused now, or were before.
    """
    layers = 0
    for module in list(model.modules()):
        place = _place_of(type(module))
        if place is not None and PARTS[place[1]].fits(module):
            module.__class__ = _fused(*place)
        if isinstance(module, CausalLM) and type(head := module.lm_head) is nn.Linear:
            head.__class__ = Head
        layers += isinstance(module, Layer)
    return layers


def unfuse(model: nn.Module) -> None:
    """Give the modules in ``model`` their own classes back."""
    for module in list(model.modules()):
        if type(module) is Head:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, Part):
            module.__class__ = type(module).of_transformers()


def _place_of(kind: type) -> tuple[str, str] | None:
    """Return the family and the part of a class of ``transformers``; None: it is not known."""
    # By exact class: a subclass may compute something else.
    for prefix, folder in FAMILIES.items():
        part = kind.__name__.removeprefix(prefix)
        if kind.__module__ == f"transformers.models.{folder}.modeling_{folder}" and part in PARTS:
            return prefix, part
    return None


@cache
def _fused(prefix: str, part: str) -> type[nn.Module]:
    """Return the class that is derived from one of ``transformers``, with its name: folders are written with it."""
    folder = FAMILIES[prefix]
    theirs = getattr(sys.modules[f"transformers.models.{folder}.modeling_{folder}"], prefix + part)
    ours = type(theirs.__name__, (PARTS[part], theirs), {"__module__": __name__, "__doc__": theirs.__doc__})
    # `transformers` looks up by class what it can record on request (`output_hidden_states`).
    capturing = sys.modules.get("transformers.utils.output_capturing")
    getattr(capturing, "_CAN_RECORD_REGISTRY", {})[str(ours)] = getattr(theirs, "_can_record_outputs", None)
    return ours


def __getattr__(name: str) -> Any:
    """Return a fused class by name, so that modules can be pickled."""
    for prefix, folder in FAMILIES.items():
        if name.startswith(prefix) and name.removeprefix(prefix) in PARTS:
            __import__(f"transformers.models.{folder}.modeling_{folder}")
            return _fused(prefix, name.removeprefix(prefix))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
