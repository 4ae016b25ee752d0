"""Quantizers of linear layers, by a preset of ModelOpt, as a transform of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn import Linear
from megalight.nn.embedding import Embedding, TokenEmbedding
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import Piece, ShardSpec
from megalight.parallel.transform import ModelTransform
from megalight.plugins.modelopt.layers import HEADS, LINEARS, register_layers
from megalight.plugins.modelopt.package import modelopt
from megalight.plugins.modelopt.presets import Preset

NAMED = "megalight_quantized"
"""Attribute of a model: the paths of the linear layers whose weights the preset names."""


@dataclass(frozen=True)
class Quantizers(ModelTransform):
    """Rounds inputs and weights of linear layers to the values of a narrow format (fake quantization).

    Each quantizer keeps ``amax``, the largest magnitude that it represents. It is NaN until calibration, so a model
    that was not calibrated computes no numbers. Gradients pass as if nothing were rounded (straight-through).

    Args:
        preset: a preset of ModelOpt, for example ``FP8_DEFAULT_CFG``.
        head: also quantize the output layer, which presets leave out.
    """

    name: ClassVar[str] = "modelopt"
    given_by: ClassVar[str] = "the callback ModelOptQuantization"

    preset: str = "FP8_DEFAULT_CFG"
    head: bool = False

    def change(self, model: nn.Module) -> None:
        """Note the layers that the preset names. The quantizers themselves come after the split.

        Raises:
            ConfigurationError: the preset is unknown or not supported, names no layer, or names one that cannot be
                quantized.
            MissingPackageError: ModelOpt is not installed.
        """
        preset = Preset.read(self.preset, self.head)
        named, others = set(), []
        for path, module in model.named_modules():
            if not preset.names(f"{path}.weight_quantizer"):
                continue
            if isinstance(module, nn.Linear | Linear):
                named.add(path)
            elif not isinstance(module, nn.Embedding | Embedding | TokenEmbedding):
                matrices = [name for name, tensor in module.named_parameters(recurse=False) if tensor.dim() > 1]
                others += [f"{path} ({type(module).__name__})"] * bool(matrices)
        if others:
            # A layer left out in silence would be a model that is quantized in part.
            raise ConfigurationError(
                f"preset {self.preset!r} names layers that cannot be quantized here: {', '.join(others[:4])}"
                f"{f' and {len(others) - 4} more' if len(others) > 4 else ''}. Only linear layers can."
            )
        if not named:
            raise ConfigurationError(
                f"preset {self.preset!r} names no linear layer of {type(model).__name__}; give it a model whose layers "
                "it does not leave out."
            )
        model.__dict__[NAMED] = frozenset(named)

    def change_split(self, model: ParallelModel) -> Mapping[str, ShardSpec]:
        """Put quantizers into this rank's layers; return what their ``amax`` hold.

        Raises:
            ConfigurationError: a layer that the preset names got no quantizer.
        """
        preset = Preset.read(self.preset, self.head)
        register_layers()
        conversion = modelopt("torch.quantization.conversion")
        replacement = modelopt("torch.quantization.nn.modules.quant_module").QuantModuleRegistry
        named = model.root.__dict__[NAMED]
        modules = dict(model.root.named_modules())
        here = {path for path in named if path in modules}
        for path in here:
            # Only layers that are named: ModelOpt would convert norms and embeddings too.
            if type(modules[path]) not in LINEARS:
                raise ConfigurationError(
                    f"preset {self.preset!r} names {path}, which was split into a {type(modules[path]).__name__}: that "
                    "kind cannot be quantized. Use another layout, or a preset without it."
                )
            replacement.convert(modules[path])
        for path, module in modules.items():
            if type(module) in HEADS and f"{path}.output_layer" in here:
                replacement.convert(module)
        conversion.set_quantizer_by_cfg(model.root, [dict(rule) for rule in preset.rules])
        found = {path for path, layer in quantized(model.root) if layer.weight_quantizer.is_enabled}
        if found != here:
            raise ConfigurationError(
                f"preset {self.preset!r} names {len(here)} layers on this rank, and ModelOpt quantizes {len(found)}; "
                f"they differ in {', '.join(sorted(found ^ here)[:4])}. This is a defect: please report it."
            )
        specs: dict[str, ShardSpec] = {}
        for path, layer in quantized(model.root):
            for kind, quantizer in static_quantizers(layer):
                spec = _spec(model, path, layer, kind, quantizer)
                # NaN, and not 0: a layer without calibration must not pass for one.
                quantizer.amax = torch.full(spec.shape, torch.nan, device=layer.weight.device)
                specs[f"{path}.{kind}._amax"] = spec
            if preset.searches and layer.weight_quantizer.is_enabled:
                spec = _features(model, path)
                layer.input_quantizer._enable_pre_quant_scale = True
                layer.input_quantizer.pre_quant_scale = torch.full(spec.shape, torch.nan, device=layer.weight.device)
                specs[f"{path}.input_quantizer._pre_quant_scale"] = spec
        return specs


def quantized(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path of each quantized linear layer, and the layer."""
    for path, module in root.named_modules():
        if hasattr(module, "weight_quantizer"):
            yield path, module


def static_quantizers(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield kind and quantizer of those with an ``amax``: not those that find it anew for each token."""
    for kind in ("input_quantizer", "weight_quantizer"):
        quantizer = getattr(layer, kind)
        if quantizer.is_enabled and not quantizer._dynamic and (not quantizer.block_sizes or block_of(quantizer)):
            yield kind, quantizer


def block_of(quantizer: Any) -> int:
    """Return the number of features of a weight with one ``amax``, for blocks along rows; 0: there are none."""
    sizes = quantizer.block_sizes or {}
    return int(sizes[-1]) if sizes.get("type") == "static" else 0


def pre_quant_scale(layer: Any) -> Tensor | None:
    """Return what the input's features are multiplied by, or None."""
    found: Tensor | None = getattr(layer.input_quantizer, "_pre_quant_scale", None)
    return found


def per_row(quantizer: Any) -> bool:
    """Return whether each row of the weight has an ``amax`` of its own."""
    return quantizer.axis is not None or block_of(quantizer) > 0


def rows_are_split(spec: ShardSpec) -> bool:
    """Return whether ranks hold different rows of this weight."""
    return any(piece.size[0] != piece.shape[0] for piece in spec.pieces)


def _spec(model: ParallelModel, path: str, layer: Any, kind: str, quantizer: Any) -> ShardSpec:
    first = model.mesh.rank("tp") == 0
    if kind == "input_quantizer" or not per_row(quantizer):
        return ShardSpec.replicated(f"{model.prefix}{path}.{kind}.amax", (), owner=first)
    weight = model.specs[f"{path}.weight"]
    width, block = weight.shape[1], block_of(quantizer)
    if block and width % block:
        raise ConfigurationError(
            f"{path} has rows of {width} features on this rank, and blocks of {block} features do not divide them. Use "
            "a preset without blocks, or a layout that does not split these rows."
        )
    each = block or width

    def rows(piece: Piece) -> Piece:
        # Ranks with other columns of the same rows have the same `amax` if it is of whole rows: only one may own it.
        mine = block > 0 or piece.size[1] == piece.shape[1]
        return replace(
            piece,
            name=f"{piece.name}_quantizer.amax",
            shape=(piece.shape[0], piece.shape[1] // block if block else 1),
            offset=(piece.offset[0], piece.offset[1] // block if block else 0),
            size=(piece.size[0], piece.size[1] // block if block else 1),
            start=piece.start // each,
            partial=(),
            owner=piece.owner if mine else first,
        )

    return ShardSpec(tuple(map(rows, weight.pieces)), (weight.shape[0] * (width // each), 1), weight.data)


def _features(model: ParallelModel, path: str) -> ShardSpec:
    """Return what a rank holds of one number for each input feature of a layer."""
    piece = model.specs[f"{path}.weight"].pieces[0]
    (_, whole), (_, offset), (_, size) = piece.shape, piece.offset, piece.size
    # Ranks with other rows of the same columns have the same numbers.
    owner = size < whole or model.mesh.rank("tp") == 0
    name = f"{model.prefix}{path}.input_quantizer.pre_quant_scale"
    return ShardSpec((Piece(name, (whole,), (offset,), (size,), owner=owner),), (size,))


def amaxes(root: nn.Module) -> Iterator[tuple[str, str, Any, Tensor]]:
    """Yield path, kind, quantizer and ``amax`` of each quantizer that has one."""
    for path, layer in quantized(root):
        for kind, quantizer in static_quantizers(layer):
            yield path, kind, quantizer, quantizer.amax
