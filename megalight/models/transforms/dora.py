"""DoRA: low-rank adapters that learn the length of each weight row apart (https://arxiv.org/abs/2402.09353)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from megalight.models.transforms.lora import LoRA
from megalight.nn.adapter import Adapter, AdapterSet
from megalight.nn.init import Constant
from megalight.nn.moe import Experts
from megalight.nn.moe.adapters import StackAdapter
from megalight.parallel.transform import register

if TYPE_CHECKING:
    from megalight.parallel.model import ParallelModel


@register
@dataclass(frozen=True)
class DoRA(LoRA):
    """Freezes a model and changes linear layers to ``y = m / ||W + s B A|| * (W + s B A) x``, row by row.

    ``m`` has one number for each output feature (of each expert) and begins as the length of the row of ``W``. No
    gradient goes through the length of ``W + s B A``, as in the paper. A bias is added unchanged. Of weights that are
    stored as codes, ``W`` is what the codes stand for. Arguments are those of :class:`LoRA`.
    """

    name: ClassVar[str] = "dora"
    writes_in_place: ClassVar[bool] = True

    def _adapt(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        super()._adapt(path, layer, wanted)
        self._add_magnitudes(layer)

    def _adapt_experts(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        super()._adapt_experts(path, layer, wanted)
        self._add_magnitudes(layer)

    def _add_magnitudes(self, layer: nn.Module) -> None:
        for _, adapter in self._adapters_of(layer):
            # a number for each row of B
            adapter.magnitude = nn.Parameter(adapter.B.new_empty(adapter.B.shape[:-1]))
            # 0 says that the lengths are not known yet: the values of the frozen weights come later.
            adapter.initializers["magnitude"] = Constant(0.0)

    @torch.no_grad()
    def with_values(self, model: ParallelModel) -> None:
        """Set magnitudes that no checkpoint has given."""
        for layer in model.root.modules():
            for projection, adapter in self._adapters_of(layer):
                if adapter.magnitude is None or adapter.magnitude.any():
                    continue
                if isinstance(adapter, StackAdapter):
                    assert isinstance(layer, Experts)
                    adapter.magnitude.copy_(adapter.lengths(layer.weight_of(projection)))
                else:
                    assert isinstance(layer.weight, Tensor)
                    adapter.magnitude.copy_(torch.cat([lengths for _, lengths in adapter.lengths(layer.weight)]))

    def _adapters_of(self, layer: nn.Module) -> Iterator[tuple[str, Adapter | StackAdapter]]:
        """Yield the adapters of this name that a layer has, with their projections; a linear layer has none."""
        sets = dict(layer.adapters) if isinstance(layer, Experts) else {"": getattr(layer, "adapter", None)}
        for projection, adapters in sets.items():
            adapter = adapters.find(self.adapter) if isinstance(adapters, AdapterSet) else None
            if isinstance(adapter, Adapter | StackAdapter):
                yield projection, adapter
