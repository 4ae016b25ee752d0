"""Frozen weights of linear layers stored in 8 or 4 bits, beside adapters (QLoRA, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.transforms.lora import linear_layers, matches
from megalight.nn import Linear
from megalight.nn.moe import Experts
from megalight.ops.grouped_linear.low_precision import stack_precision_of
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.quantized_weight import NVFP4_BLOCK, check, largest_of, store, stored_of
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.parallel.transform import ModelTransform, register

if TYPE_CHECKING:
    from megalight.parallel.model import ParallelModel


LAYERS = "layers.*"
"""Linear layers in the transformer layers; the embedding and the output layer keep their dtype, as in the paper."""
DECODED = (Linear, ColumnLinear, RowLinear, Experts)
"""Layers whose products decode their weight."""


@register
@dataclass(frozen=True)
class QuantizedBase(ModelTransform):
    """Quantizes the weights of all linear layers in transformer layers (:mod:`megalight.ops.quantized_weight`).

    Put it after :class:`~megalight.models.transforms.LoRA`, which freezes the weights. It serves training alone:
    whoever loads the adapters uses the weights that they were trained on, in their own dtype.

    Args:
        form: ``int8``, ``nf4`` or ``nvfp4``.
        block: number of input features with one scale; None: 64, and 16 for ``nvfp4``.

    Raises:
        ConfigurationError: the format is unknown, or the block is odd.
    """

    name: ClassVar[str] = "stored_base"
    training_only: ClassVar[str | None] = "stored_base."
    by_units: ClassVar[bool] = True

    form: str = "int8"
    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is None:
            object.__setattr__(self, "block", NVFP4_BLOCK if self.form == "nvfp4" else 64)
        assert self.block is not None
        check(self.block, self.form, self.block)

    def change(self, model: nn.Module) -> None:
        """Check that all layers can be stored; quantization follows with the values.

        Raises:
            ConfigurationError: there are no layers, or one is trained, of another class, or not divisible by the block.
        """
        found = [path for path, sections in linear_layers(model) if any(matches(each, LAYERS) for each in sections)]
        if not found:
            raise ConfigurationError(f"{type(model).__name__} has no linear layers under {LAYERS!r} to quantize.")
        for path in found:
            layer = model.get_submodule(path)
            if not isinstance(layer, Linear | Experts):
                raise ConfigurationError(
                    f"{path} is a {type(layer).__name__}, whose GEMM does not dequantize; only layers of "
                    "Megalight's models can be quantized."
                )
            for weight in weights_of(layer):
                if weight.requires_grad:
                    raise ConfigurationError(
                        f"{path} is trained, and quantized weights have no gradient. Add adapters first, which "
                        "freeze the model."
                    )
                self._check(path, weight.shape[-1])

    def change_split(self, model: ParallelModel) -> Mapping[str, ShardSpec]:
        """Check this rank's parts.

        Raises:
            ConfigurationError: a row is split into parts that the block does not divide, or a layer multiplies
                quantized values of its own.
        """
        for path, layer in self._layers(model.root):
            for weight in weights_of(layer):
                self._check(path, weight.shape[-1])
        return {}

    @torch.no_grad()
    def with_values(self, model: ParallelModel) -> None:
        """Quantize the weights, one layer or unit after the other."""
        weights = []
        for path, layer in self._layers(model.root):
            for weight in weights_of(layer):
                if precision_of(weight) is not None or stack_precision_of(weight) is not None:
                    raise ConfigurationError(
                        f"{path} multiplies in 8 or 4 bits by the Trainer's precision, and its weight is to be stored "
                        f"quantized ({self.form}). Use one of the two."
                    )
                if stored_of(weight) is None:
                    weights.append(weight)
        model.store(weights, partial(self._store, model))

    def _store(self, model: ParallelModel, weight: nn.Parameter) -> None:
        assert self.block is not None
        store(weight, self.form, self.block, self._largest(weight, model))

    def _largest(self, weight: Tensor, model: ParallelModel) -> Tensor | None:
        """Return the largest magnitude of a weight whose parts may be on several ranks, if the format needs it."""
        if self.form != "nvfp4":
            return None
        largest, axis = largest_of(weight), "tp" if weight.ndim == 2 else "etp"
        if model.mesh.size(axis) > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, model.mesh.group(axis))
        return largest

    def _layers(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for path, module in root.named_modules():
            if isinstance(module, DECODED) and matches(path, LAYERS):
                yield path, module

    def _check(self, path: str, features: int) -> None:
        assert self.block is not None
        try:
            check(features, self.form, self.block)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from error


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    """Return the matrices ``[out, in]`` or stacks ``[E, out, in]`` of a layer."""
    names = ("up", "down") if isinstance(layer, Experts) else ("weight",)
    return [layer.get_parameter(name) for name in names]
