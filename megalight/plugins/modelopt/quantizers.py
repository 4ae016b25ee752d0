"""Quantizers of linear layers, by presets of ModelOpt, as a transform of models."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from megalight.attachments import QUANTIZED
from megalight.errors import ConfigurationError
from megalight.nn import Attention, InnerAttention, LatentAttention, Linear
from megalight.nn.embedding_and_head import Embedding, TokenEmbedding
from megalight.nn.moe import Experts
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardSpec
from megalight.parallel.transform import ModelTransform
from megalight.plugins.modelopt.layers import ATTENTIONS, HEADS, LINEARS, register_layers
from megalight.plugins.modelopt.presets import Preset, modelopt
from megalight.plugins.modelopt.quantizer_sites import (
    amax_spec,
    check_blocks,
    features_spec,
    matrices,
    places,
    share_tokens,
    sites,
)

UNQUANTIZED = "none"
"""In place of a preset: the layer keeps its dtype."""


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
        layers: pairs of a glob over paths of layers and another preset for them, or ``none``; later pairs win.
    """

    name: ClassVar[str] = "modelopt"
    given_by: ClassVar[str] = "the callback ModelOptQuantization"

    preset: str = "FP8_DEFAULT_CFG"
    head: bool = False
    kv: str | None = None
    layers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        # A checkpoint brings lists.
        object.__setattr__(self, "layers", tuple((str(glob), str(name)) for glob, name in self.layers))

    def read(self) -> dict[str, Preset]:
        """Return the presets by name, that of the model first."""
        names = {name: None for _, name in self.layers if name not in (UNQUANTIZED, self.preset)}
        own = Preset.read(self.preset, self.head, self.kv)
        return {self.preset: own, **{name: Preset.read(name, self.head) for name in names}}

    def change(self, model: nn.Module) -> None:
        """Note the modules that the presets name. The quantizers themselves come after the split.

        Raises:
            ConfigurationError: a preset is unknown or not supported, names no layer, or names one that cannot be
                quantized; a glob matches no layer; a preset would change a weight that another module has, too.
            MissingPackageError: ModelOpt is not installed.
        """
        presets = self.read()
        own = presets[self.preset]
        named, others, matched = dict[str, str](), list[str](), set[str]()
        users: dict[int, list[str]] = defaultdict(list)
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                users[id(parameter)].append(path)
        for path, module in model.named_modules():
            inner = f"{path}.inner"
            if isinstance(module, Attention | LatentAttention) and own.names(f"{inner}.k_bmm_quantizer"):
                if isinstance(module, LatentAttention) or not isinstance(module.inner, InnerAttention):
                    raise ConfigurationError(
                        f"{path} is a {type(module).__name__} over {type(module.inner).__name__}, which does not keep "
                        "keys and values of each token as they are attended to, so a preset for them cannot round "
                        "them. Leave kv out, or use a preset without it."
                    )
                named[inner] = self.preset
            quantizable = isinstance(module, nn.Linear | Linear | Experts)
            chosen = self.preset
            for glob, name in self.layers if quantizable else ():
                if fnmatch.fnmatch(path, glob):
                    matched.add(glob)
                    chosen = name
            if chosen == UNQUANTIZED or not presets[chosen].names(f"{path}.weight_quantizer"):
                continue
            if quantizable:
                named[path] = chosen
                shared = users[id(getattr(module, "weight", None))]
                if presets[chosen].searches and len(shared) > 1:
                    raise ConfigurationError(
                        f"preset {chosen!r} divides the columns of {path}.weight, which is also that of "
                        f"{next(user for user in shared if user != path)}. Leave it out (head, layers), or use a "
                        "preset that changes no weights."
                    )
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
        for glob, name in self.layers:
            if glob not in matched:
                raise ConfigurationError(
                    f"layers gives {name!r} to {glob!r}, which matches no linear layer of {type(model).__name__}. "
                    "Give paths of layers, such as 'layers.0.mlp.down', or globs over them."
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
        QUANTIZED.set(model, named)

    def change_split(self, model: ParallelModel) -> Mapping[str, ShardSpec]:
        """Put quantizers into this rank's layers; return what their ``amax`` hold.

        Raises:
            ConfigurationError: a layer that a preset names got no quantizer.
        """
        presets = self.read()
        modules = dict(model.root.named_modules())
        here = {path: name for path, name in QUANTIZED.get(model.root).items() if path in modules}
        for path, name in here.items():
            # Only modules that are named: ModelOpt would convert norms and embeddings too.
            if type(modules[path]) not in KINDS:
                raise ConfigurationError(
                    f"preset {name!r} names {path}, which was split into a {type(modules[path]).__name__}: that "
                    "kind cannot be quantized. Use another layout, or a preset without it."
                )
        convert(model.root, here)
        for path, name in here.items():
            apply_rules(modules[path], presets[name])
        found = {place.path for place in places(model.root) if place.quantizer.is_enabled}
        if found != here.keys():
            raise ConfigurationError(
                f"preset {self.preset!r} names {len(here)} modules on this rank, and ModelOpt quantizes {len(found)}; "
                f"they differ in {', '.join(sorted(found ^ here.keys())[:4])}. This is a defect: please report it."
            )
        for preset in presets.values():
            for chunk in model.chunks if preset.only_cuda else ():
                # a model may be calibrated, loaded and exported elsewhere
                chunk.register_forward_pre_hook(partial(_check_rounding, preset))
        for matrix in matrices(model.root):
            share_tokens(model, matrix)
            check_blocks(model, matrix)
        return empty(model)


def _check_rounding(preset: Preset, chunk: nn.Module, _: object) -> None:
    """Raise if a pass would round to what the device cannot."""
    device = next(chunk.parameters()).device  # a loaded model may have been moved
    if device.type != "cuda" and any(place.rounds_blocks for place in places(chunk)):
        check_device(preset, device)


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


# Quantizers of the layers of this rank


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
