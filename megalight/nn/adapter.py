"""Low-rank adapters of linear layers (LoRA, https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megalight.nn.canonical import Section
from megalight.nn.init import Constant, Initializer, Normal
from megalight.ops.linear import linear


class Adapter(nn.Module):
    """Adds ``scale * (dropout(x) A^T) B^T`` to what a linear layer puts out. It is a child of that layer.

    A fused layer has a pair ``A, B`` for each section that is adapted. Their canonical names are those of the section's
    weight with ``lora_A.weight`` or ``lora_B.weight`` in place of ``weight``, as ``peft`` has it. All ``A`` lie in one
    parameter, one below the other, and so do all ``B``: one product takes ``x``.

    Args:
        down: all ``A``: ``[n r, in]``, for ``n`` sections that are adapted.
        up: all ``B``: ``[out of these sections, r]``.
        units: name of each adapted section -> how many indivisible units it has. A layer that is not fused is one
            section, named by the layer.
        section_sizes: output features of each section of the layer.
        adapted: which of these are adapted.
        scale: ``alpha / r``.
        dropout: of ``x``, or None.
    """

    def __init__(
        self,
        down: nn.Parameter,
        up: nn.Parameter,
        units: Mapping[str, int],
        section_sizes: Sequence[int],
        adapted: Sequence[bool],
        scale: float,
        dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.A = down
        self.B = up
        self.units = dict(units)
        self.section_sizes = list(section_sizes)
        self.adapted = list(adapted)
        self.scale = scale
        self.dropout = dropout
        # the variance that Linear.reset_parameters of torch gives, and that peft takes over
        std = (3 * down.shape[1]) ** -0.5
        self.initializers: dict[str, Initializer] = {"A": Normal(std), "B": Constant(0.0)}

    @classmethod
    def of(
        cls, linear: nn.Module, name: str, wanted: Sequence[str], *, width: int, scale: float, dropout: float
    ) -> Adapter:
        """An adapter for a linear layer of one device.

        Args:
            linear: with ``weight [out, in]``, and perhaps ``sections``.
            name: the layer's own, without the modules around it.
            wanted: sections to be adapted; the layer's own name, where it has none.
            width: ``r``.
            scale: of the sum.
            dropout: probability.
        """
        weight = linear.weight
        assert isinstance(weight, Tensor)
        own = (Section(name, weight.shape[0], weight.shape[0]),)
        sections: Sequence[Section] = getattr(linear, "sections", None) or own
        adapted = [section.name in wanted for section in sections]
        chosen = [section for section, yes in zip(sections, adapted, strict=True) if yes]
        return cls(
            nn.Parameter(weight.new_empty(width * len(chosen), weight.shape[1])),
            nn.Parameter(weight.new_empty(sum(section.size for section in chosen), width)),
            {section.name: section.units for section in chosen},
            [section.size for section in sections],
            adapted,
            scale,
            nn.Dropout(dropout) if dropout else None,
        )

    @property
    def sizes(self) -> list[int]:
        """Output features of the adapted sections."""
        return [size for size, adapted in zip(self.section_sizes, self.adapted, strict=True) if adapted]

    @property
    def width(self) -> int:
        """``r``."""
        return self.B.shape[1]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``x [..., in], y [..., out] -> [..., out]``."""
        narrow = self.scale * self.meet(linear(x if self.dropout is None else self.dropout(x), self.A))
        if len(self.adapted) == 1:
            return y + linear(narrow, self.B)
        pairs = zip(torch.split(narrow, self.width, -1), torch.split(self.B, self.sizes), strict=True)
        parts = zip(torch.split(y, self.section_sizes, -1), self.adapted, strict=True)
        return torch.cat([part + linear(*next(pairs)) if adapted else part for part, adapted in parts], -1)

    def meet(self, narrow: Tensor) -> Tensor:
        """What happens to ``x A^T`` before ``B``: nothing, on one device."""
        return narrow

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """A pair for each adapted section, named as the section's weight; see :mod:`megalight.nn.canonical`."""
        around = path.split(".")[:-2]
        for section, size in zip(self.units, self.sizes, strict=True):
            shape = (self.width, self.A.shape[1]) if local == "A" else (size, self.width)
            yield ".".join([*around, section, f"lora_{local}", "weight"]), shape

    def extra_repr(self) -> str:
        """Shape and sections, for printing."""
        return f"{self.A.shape[1]} -> {self.width} -> {self.B.shape[0]} ({'|'.join(self.units)}), scale={self.scale:g}"


def add_adapter(layer: nn.Module, adapter: Adapter) -> None:
    """Make an adapter a child of a linear layer, which from then on adds what it gives.

    Layers of other packages keep their type, so a hook adds it there.
    """
    if not hasattr(layer, "adapter"):
        layer.register_forward_hook(_add)
    setattr(layer, "adapter", adapter)  # noqa: B010


def remove_adapter(layer: nn.Module) -> None:
    """Undo :func:`add_adapter`."""
    hooks = [key for key, hook in layer._forward_hooks.items() if hook is _add]
    for key in hooks:
        del layer._forward_hooks[key]
    del layer.adapter
    if not hooks:
        setattr(layer, "adapter", None)  # noqa: B010


def _add(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    summed: Tensor = layer.adapter(args[0], y)  # type: ignore[operator]
    return summed
