"""LoRA layers of ``peft``, split with the linear layer that they adapt.

Beside a layer with split output features, ``A`` is whole and ``B`` split like the weight: the backward sums the
gradient of the narrow features before it reaches ``A``. Beside one with split input features, ``A`` is split like the
weight, its narrow outputs are summed over ranks, and ``B`` is whole. Source: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.structural_plan import Rules
from megalight.parallel.styles import Dropout, Replicated, Row, SequenceRegion, Style

PARTS = ("base_layer", "lora_A", "lora_B", "lora_dropout")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer of ``peft`` around a layer of the model."""
    return "base_layer" in module._modules


def adapted_rules(name: str, module: nn.Module, style: Style) -> Rules:
    """Return the rules of an adapted layer.

    Args:
        name: its name.
        module: a layer of ``peft``.
        style: how the linear layer in it splits.

    Raises:
        LayoutError: the adapter is no plain LoRA, or the layer in it is no plain linear layer.
    """
    base, dropouts = module._modules["base_layer"], module._modules.get("lora_dropout")
    other = next((each for each, _ in module.named_parameters() if each.partition(".")[0] not in PARTS), None)
    if type(base) is not nn.Linear or other is not None or not isinstance(dropouts, nn.ModuleDict):
        what = f"around a {type(base).__name__}" if type(base) is not nn.Linear else f"with {other or 'no lora_A'}"
        raise LayoutError(
            f"{name} is an adapter of peft {what}, and tensor parallelism splits plain LoRA around nn.Linear. Leave "
            "the layer out of target_modules, use plain LoRA, or set tensor_parallel=1."
        )
    row = isinstance(style, Row)
    rules: Rules = {f"{name}.base_layer": style}
    for key, dropout in dropouts.items():
        rules[f"{name}.lora_A.{key}"] = Row() if row else Replicated()
        rules[f"{name}.lora_B.{key}"] = SequenceRegion() if row else style
        if isinstance(dropout, nn.Dropout):
            # Ranks have features of their own before a row layer, and the same ones before a column layer.
            rules[f"{name}.lora_dropout.{key}"] = Dropout(split=True) if row else Replicated()
    return rules
