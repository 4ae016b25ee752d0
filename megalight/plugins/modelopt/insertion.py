"""Put quantizers into this rank's layers, and take them out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megalight.nn.moe import Experts
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardSpec
from megalight.plugins.modelopt.layers import ATTENTIONS, HEADS, LINEARS, register_layers
from megalight.plugins.modelopt.package import modelopt
from megalight.plugins.modelopt.places import places, sites
from megalight.plugins.modelopt.presets import Preset
from megalight.plugins.modelopt.specs import amax_spec, features_spec

KINDS: tuple[type[nn.Module], ...] = (*LINEARS, *ATTENTIONS, Experts)
"""Modules that can have quantizers, after the split."""


def convert(root: nn.Module, paths: Iterable[str]) -> None:
    """Make modules quantized ones, whose quantizers do nothing yet; heads of output layers too."""
    register_layers()
    replacement = modelopt("torch.quantization.nn.modules.quant_module").QuantModuleRegistry
    modules = dict(root.named_modules())
    for path in paths:
        replacement.convert(modules[path])
        put(modules[path], take_nothing(modules[path]))
    for path, module in modules.items():
        if type(module) in HEADS and f"{path}.output_layer" in paths:
            replacement.convert(module)


def quantizers_of(module: Any) -> dict[str, Any]:
    """Return the quantizers of a module, or lists of them, by attribute."""
    return {name: child for name, child in module.named_children() if "quantizer" in name}


def take_nothing(module: Any) -> dict[str, Any]:
    """Return new quantizers for a module, which do nothing."""
    kind = modelopt("torch.quantization.nn").TensorQuantizer

    def idle() -> Any:
        quantizer = kind()
        quantizer.disable()
        return quantizer

    return {
        name: nn.ModuleList(idle() for _ in old) if type(old) is nn.ModuleList else idle()
        for name, old in quantizers_of(module).items()
    }


def put(module: Any, quantizers: Mapping[str, Any]) -> None:
    """Replace the quantizers of a module."""
    for name, quantizer in quantizers.items():
        setattr(module, name, quantizer)


def apply_rules(module: Any, preset: Preset) -> None:
    """Give a converted module the quantizers of a preset."""
    put(module, take_nothing(module))
    conversion = modelopt("torch.quantization.conversion")
    conversion.set_quantizer_by_cfg(module, [dict(rule) for rule in preset.enabling])
    module.algorithm = dict(preset.algorithm)


def empty(model: ParallelModel) -> dict[str, ShardSpec]:
    """Give all quantizers tensors of NaN for what calibration finds; return what they hold of the whole model."""
    specs: dict[str, ShardSpec] = {}
    for place in places(model.root):
        if place.has_amax:
            spec = amax_spec(model, place)
            # NaN, and not 0: a quantizer without calibration must not pass for one.
            place.quantizer.amax = torch.full(spec.shape, torch.nan, device=_device(model, place.path))
            specs[f"{place.name}._amax"] = spec
    for site in sites(model.root):
        if site.method is not None:
            spec = features_spec(model, site)
            site.quantizer._enable_pre_quant_scale = True
            site.quantizer.pre_quant_scale = torch.full(spec.shape, torch.nan, device=_device(model, site.path))
            specs[f"{site.name}._pre_quant_scale"] = spec
    return specs


def _device(model: ParallelModel, path: str) -> torch.device:
    """Return the device of a module; of one without parameters, that of the model's others."""
    tensor = next(model.root.get_submodule(path).parameters(), None)
    return (next(model.root.parameters()) if tensor is None else tensor).device
