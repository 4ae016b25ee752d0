"""Quantizers of linear layers, by a preset of ModelOpt, as a transform of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.nn import Attention, InnerAttention, LatentAttention, Linear
from megalight.nn.embedding import Embedding, TokenEmbedding
from megalight.nn.moe import Experts
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardSpec
from megalight.parallel.transform import ModelTransform
from megalight.plugins.modelopt.layers import ATTENTIONS, HEADS, LINEARS, register_layers
from megalight.plugins.modelopt.package import modelopt
from megalight.plugins.modelopt.places import matrices, places, sites
from megalight.plugins.modelopt.presets import Preset
from megalight.plugins.modelopt.specs import amax_spec, check_tokens, features_spec

NAMED = "megalight_quantized"
"""Attribute of a model: the paths of the modules that the preset names."""


@dataclass(frozen=True)
class Quantizers(ModelTransform):
    """Rounds inputs and weights of linear layers, keys and values to the values of a narrow format (fake quantization).

    Each quantizer keeps ``amax``, the largest magnitude that it represents. It is NaN until calibration, so a model
    that was not calibrated computes no numbers. Gradients pass as if nothing were rounded (straight-through).

    Args:
        preset: a preset of ModelOpt, for example ``FP8_DEFAULT_CFG``, or a recipe of its library, for example
            ``general/ptq/fp8_default-kv_fp8``.
        head: also quantize the output layer, which presets leave out.
        kv: a preset for keys and values of attention (``FP8_KV_CFG``), which most presets leave out; None: they keep
            their dtype.
    """

    name: ClassVar[str] = "modelopt"
    given_by: ClassVar[str] = "the callback ModelOptQuantization"

    preset: str = "FP8_DEFAULT_CFG"
    head: bool = False
    kv: str | None = None

    def read(self) -> Preset:
        """Return the rules of the presets."""
        return Preset.read(self.preset, self.head, self.kv)

    def change(self, model: nn.Module) -> None:
        """Note the modules that the preset names. The quantizers themselves come after the split.

        Raises:
            ConfigurationError: the preset is unknown or not supported, names no layer, or names one that cannot be
                quantized.
            MissingPackageError: ModelOpt is not installed.
        """
        preset = self.read()
        named, others = set(), []
        for path, module in model.named_modules():
            inner = f"{path}.inner"
            if isinstance(module, Attention | LatentAttention) and preset.names(f"{inner}.k_bmm_quantizer"):
                if isinstance(module, LatentAttention) or not isinstance(module.inner, InnerAttention):
                    raise ConfigurationError(
                        f"{path} is a {type(module).__name__} over {type(module.inner).__name__}, which does not keep "
                        "keys and values of each token as they are attended to, so a preset for them cannot round "
                        "them. Leave kv out, or use a preset without it."
                    )
                named.add(inner)
            if not preset.names(f"{path}.weight_quantizer"):
                continue
            if isinstance(module, nn.Linear | Linear | Experts):
                named.add(path)
            elif not isinstance(module, nn.Embedding | Embedding | TokenEmbedding):
                held = [name for name, tensor in module.named_parameters(recurse=False) if tensor.dim() > 1]
                others += [f"{path} ({type(module).__name__})"] * bool(held)
        if others:
            # A layer left out in silence would be a model that is quantized in part.
            raise ConfigurationError(
                f"preset {self.preset!r} names layers that cannot be quantized here: {', '.join(others[:4])}"
                f"{f' and {len(others) - 4} more' if len(others) > 4 else ''}. Linear layers "
                "and stacks of experts can."
            )
        if not named:
            raise ConfigurationError(
                f"preset {self.preset!r} names no linear layer of {type(model).__name__}; give it a model whose layers "
                "it does not leave out."
            )
        if self.kv is not None and not any(path.endswith(".inner") for path in named):
            raise ConfigurationError(
                f"kv={self.kv!r}: {type(model).__name__} has no attention that keeps keys and values. Leave kv out."
            )
        model.__dict__[NAMED] = frozenset(named)

    def change_split(self, model: ParallelModel) -> Mapping[str, ShardSpec]:
        """Put quantizers into this rank's layers; return what their ``amax`` hold.

        Raises:
            ConfigurationError: a layer that the preset names got no quantizer.
        """
        preset = self.read()
        register_layers()
        conversion = modelopt("torch.quantization.conversion")
        replacement = modelopt("torch.quantization.nn.modules.quant_module").QuantModuleRegistry
        named = model.root.__dict__[NAMED]
        modules = dict(model.root.named_modules())
        here = {path for path in named if path in modules}
        for path in here:
            # Only modules that are named: ModelOpt would convert norms and embeddings too.
            if type(modules[path]) not in (*LINEARS, *ATTENTIONS, Experts):
                raise ConfigurationError(
                    f"preset {self.preset!r} names {path}, which was split into a {type(modules[path]).__name__}: that "
                    "kind cannot be quantized. Use another layout, or a preset without it."
                )
            replacement.convert(modules[path])
        for path, module in modules.items():
            if type(module) in HEADS and f"{path}.output_layer" in here:
                replacement.convert(module)
        conversion.set_quantizer_by_cfg(model.root, [dict(rule) for rule in preset.rules])
        found = {place.path for place in places(model.root) if place.quantizer.is_enabled}
        if found != here:
            raise ConfigurationError(
                f"preset {self.preset!r} names {len(here)} modules on this rank, and ModelOpt quantizes {len(found)}; "
                f"they differ in {', '.join(sorted(found ^ here)[:4])}. This is a defect: please report it."
            )
        for chunk in model.chunks if preset.only_cuda else ():
            # a model may be loaded and exported elsewhere
            chunk.register_forward_pre_hook(lambda *_: check_device(preset, model.device))
        specs: dict[str, ShardSpec] = {}
        for matrix in matrices(model.root):
            check_tokens(model, matrix)
        for place in places(model.root):
            if place.has_amax:
                spec = amax_spec(model, place)
                # NaN, and not 0: a quantizer without calibration must not pass for one.
                place.quantizer.amax = torch.full(spec.shape, torch.nan, device=_device(modules[place.path], model))
                specs[f"{place.name}._amax"] = spec
        for site in sites(model.root) if preset.searches else ():
            spec = features_spec(model, site)
            device = site.matrices[0].weight.device
            site.quantizer._enable_pre_quant_scale = True
            site.quantizer.pre_quant_scale = torch.full(spec.shape, torch.nan, device=device)
            specs[f"{site.name}._pre_quant_scale"] = spec
        return specs


def check_device(preset: Preset, device: torch.device) -> None:
    """Raise if a device cannot round to the formats of a preset.

    Raises:
        ConfigurationError: ModelOpt has kernels for CUDA alone.
    """
    if preset.only_cuda and device.type != "cuda":
        raise ConfigurationError(
            f"preset {preset.name!r} gives {preset.only_cuda} a format to which ModelOpt rounds on CUDA alone, and "
            f"this is device '{device.type}'. Run on a GPU, or use a preset of FP8, INT8 or INT4."
        )


def _device(module: nn.Module, model: ParallelModel) -> torch.device:
    """Return the device of a module; of one without parameters, that of the model's others."""
    tensor = next(module.parameters(), None)
    return (next(model.root.parameters()) if tensor is None else tensor).device
