"""DoRA: low-rank adapters that learn the length of each weight row apart (https://arxiv.org/abs/2402.09353)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.transforms.lora import LoRA
from megalight.nn.adapter import Adapter, AdapterSet
from megalight.nn.init import Constant
from megalight.parallel.transform import register

if TYPE_CHECKING:
    from megalight.parallel.model import ParallelModel


@register
@dataclass(frozen=True)
class DoRA(LoRA):
    """Freezes a model and changes linear layers to ``y = m / ||W + s B A|| * (W + s B A) x``, row by row.

    ``m`` has one number for each output feature and begins as the length of the row of ``W``. No gradient goes through
    the length of ``W + s B A``, as in the paper. A bias is added unchanged. Arguments are those of :class:`LoRA`.
    """

    name: ClassVar[str] = "dora"
    writes_in_place: ClassVar[bool] = True

    def _adapt(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        super()._adapt(path, layer, wanted)
        adapter = layer.adapter[self.adapter]  # type: ignore[index]
        assert isinstance(adapter, Adapter)
        adapter.magnitude = nn.Parameter(adapter.B.new_empty(sum(adapter.sizes)))
        # 0 says that the lengths are not known yet: the values of the frozen weights come later.
        adapter.initializers["magnitude"] = Constant(0.0)

    def _adapt_experts(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        raise ConfigurationError(
            f"DoRA does not learn the lengths of rows of stacked experts, and {path} is among the targets. Exclude "
            "'experts.*', or use LoRA."
        )

    @torch.no_grad()
    def with_values(self, model: ParallelModel) -> None:
        """Set magnitudes that no checkpoint has given."""
        for layer in model.root.modules():
            adapters = getattr(layer, "adapter", None)
            adapter = adapters.find(self.adapter) if isinstance(adapters, AdapterSet) else None
            if isinstance(adapter, Adapter) and adapter.magnitude is not None and not adapter.magnitude.any():
                assert isinstance(layer.weight, Tensor)
                adapter.magnitude.copy_(torch.cat([lengths for _, lengths in adapter.lengths(layer.weight)]))
