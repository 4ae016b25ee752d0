"""Low-rank adapters of linear layers (LoRA, https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megalight.nn.canonical import Section, joined
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.ops.linear import linear
from megalight.ops.low_rank import add_low_rank
from megalight.ops.quantized_weight import readable

DEFAULT = "default"
"""Name of an adapter that was given none. Names of its tensors leave it out."""


class AdapterSet(nn.ModuleDict):
    """The adapters of one linear layer, or of one projection of a stack of experts, by name.

    Attributes:
        active: name of the adapter that computes. None, or one that this layer does not have: the layer computes as
            without adapters.
    """

    active: str | None = None

    @property
    def current(self) -> nn.Module | None:
        """The active adapter, if this layer has it."""
        return None if self.active is None else self.find(self.active)

    def find(self, name: str) -> nn.Module | None:
        """Return the adapter with that name; None: this layer has none."""
        found: nn.Module | None = self._modules.get(name)
        return found

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``y`` with what the active adapter adds; see :meth:`Adapter.forward`."""
        found = self.current
        return y if found is None else cast(Tensor, found(x, y, weight, bias))

    def extra_repr(self) -> str:
        """Return the active one, for printing."""
        return f"active={self.active!r}"


def tensor_name(weight: str, matrix: str, adapter: str) -> str:
    """Return the canonical name of an adapter's tensor: ``(q, A, code) -> q.lora_A.code.weight``.

    Args:
        weight: canonical name of the adapted weight, without ``.weight``.
        matrix: ``A``, ``B`` or ``magnitude_vector``.
        adapter: the adapter's name; :data:`DEFAULT` is left out.
    """
    return joined(weight, f"lora_{matrix}", "" if adapter == DEFAULT else adapter, "weight")


def parse_tensor_name(name: str) -> tuple[str, str, str] | None:
    """Return the three arguments of :func:`tensor_name`; None for the name of another tensor."""
    weight, found, rest = name.rpartition(".lora_")
    matrix, *adapter, leaf = rest.split(".") if found else ("", "")
    if not found or leaf != "weight" or len(adapter) > 1:
        return None
    return weight, matrix, adapter[0] if adapter else DEFAULT


class Adapter(nn.Module):
    """Adds ``scale * (dropout(x) A^T) B^T`` to the output of a linear layer. It is in the layer's :class:`AdapterSet`.

    A fused layer has a pair ``A, B`` for each adapted section. The canonical names are the name of the section's weight
    with ``lora_A.weight`` or ``lora_B.weight`` in place of ``weight``, as in ``peft``; an adapter with a name of its
    own has ``lora_A.NAME.weight``. One parameter holds all ``A``, stacked along dim 0, and another holds all ``B``, so
    that one product with ``x`` is enough.

    Args:
        down: all ``A``, ``[n r, in]`` for ``n`` adapted sections.
        up: all ``B``, ``[output features of the adapted sections, r]``.
        units: name of each adapted section -> its number of indivisible units. A layer that is not fused is one
            section with the layer's name.
        section_sizes: output features of each section of the layer.
        adapted: for each section, whether it is adapted.
        scale: ``alpha / r``.
        dropout: applied to ``x``, or None.

    Attributes:
        magnitude: ``[output features of the adapted sections]``: learned lengths of the rows of the new weight
            (DoRA, https://arxiv.org/abs/2402.09353), or None.
    """

    magnitude: nn.Parameter | None

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
        self.register_parameter("magnitude", None)
        self.units = dict(units)
        self.section_sizes = list(section_sizes)
        self.adapted = list(adapted)
        self.scale = scale
        self.dropout = dropout
        # same variance as in torch's Linear.reset_parameters, which peft uses; B = 0, so the model starts unchanged
        std = (3 * down.shape[1]) ** -0.5
        self.initializers: dict[str, Initializer] = {"A": Normal(std), "B": ConstantInit(0.0)}

    @classmethod
    def of(
        cls, linear: nn.Module, name: str, wanted: Sequence[str], *, width: int, scale: float, dropout: float
    ) -> Adapter:
        """Make an adapter for a linear layer of one device.

        Args:
            linear: the layer. It has ``weight [out, in]``, and ``sections`` if it is fused.
            name: the layer's own name, without the names of the modules around it.
            wanted: names of the sections to adapt. For a layer without sections, the layer's own name.
            width: ``r``.
            scale: factor of the added term.
            dropout: dropout probability.
        """
        weight = linear.weight
        assert isinstance(weight, Tensor)
        own = (Section(name, weight.shape[0], weight.shape[0]),)
        sections: Sequence[Section] = getattr(linear, "sections", None) or own
        adapted = [section.name in wanted for section in sections]
        chosen = [section for section, yes in zip(sections, adapted, strict=True) if yes]
        return cls(
            # On the device and in the dtype of the weight, which may have no values yet.
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

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., in], y [..., out] -> [..., out]``, in place of ``y``; ``weight`` and ``bias`` are the layer's."""
        # The factor multiplies the narrow tensor, which is the smaller one.
        narrow = self.scale * self.meet(linear(x if self.dropout is None else self.dropout(x), self.A))
        if self.magnitude is not None:
            return self._with_lengths(narrow, y, weight, bias)
        return add_low_rank(y, narrow, self.B, self.section_sizes, self.adapted)

    def _with_lengths(self, narrow: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Give the rows of ``W + scale B A`` the lengths of ``magnitude``."""
        assert self.magnitude is not None
        lengths = dict(self.lengths(weight))
        wanted = torch.split(self.magnitude, self.sizes)
        terms, ups = torch.split(narrow, self.width, -1), torch.split(self.B, self.sizes)
        biases = [None] * len(self.adapted) if bias is None else torch.split(bias, self.section_sizes)
        found, count = [], 0
        for index, part in enumerate(torch.split(y, self.section_sizes, -1)):
            if index in lengths:
                factor = (wanted[count] / lengths[index]).to(y.dtype)
                shift = biases[index]
                # The bias is not part of a row, so it keeps its size.
                whole = (part if shift is None else part - shift) + linear(terms[count], ups[count])
                part = factor * whole if shift is None else factor * whole + shift
                count += 1
            found.append(part)
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @torch.no_grad()
    def lengths(self, weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each adapted section, and the lengths of its rows of ``W + scale B A``.

        They are ``||W||^2 + 2 s B (W A^T) + s^2 B (A A^T) B^T``, so that no second matrix as large as ``W`` is made.
        The paper treats them as constants, which saves the gradient through them. A weight that is quantized is
        decoded again for them.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        pairs = zip(self.A.split(self.width), self.B.split(self.sizes), strict=True)  # type: ignore[no-untyped-call]
        for index, rows in enumerate(torch.split(readable(weight), self.section_sizes)):
            if self.adapted[index]:
                w, (a, b) = rows.to(wide), (x.to(wide) for x in next(pairs))
                squares = w.square().sum(1) + (2 * self.scale * (w @ a.T) + self.scale**2 * b @ (a @ a.T)).mul(b).sum(1)
                yield index, self.total(squares).clamp_min(torch.finfo(wide).tiny).sqrt()

    def total(self, squares: Tensor) -> Tensor:
        """Return sums over all input features. On one device they are complete; a parallel adapter overrides this."""
        return squares

    def meet(self, narrow: Tensor) -> Tensor:
        """Return ``x A^T`` ready for ``B``. On one device it is unchanged; a parallel adapter overrides this."""
        return narrow

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield one tensor per adapted section, named after its weight; see :mod:`megalight.nn.canonical`."""
        # `layer.adapter.NAME`: the section's name takes the layer's place
        *around, _, _, adapter = path.split(".")
        for section, size in zip(self.units, self.sizes, strict=True):
            shapes = {"A": (self.width, self.A.shape[1]), "B": (size, self.width), "magnitude": (size,)}
            own = "magnitude_vector" if local == "magnitude" else local
            yield tensor_name(joined(*around, section), own, adapter), shapes[local]

    def extra_repr(self) -> str:
        """Shape and sections, for printing."""
        return f"{self.A.shape[1]} -> {self.width} -> {self.B.shape[0]} ({'|'.join(self.units)}), scale={self.scale:g}"


def add_adapter(layer: nn.Module, adapter: Adapter, name: str = DEFAULT) -> None:
    """Give a linear layer one more adapter, whose output it adds while that is the active one.

    A layer without an attribute ``adapter``, for example of another package, keeps its type and gets a forward hook.
    """
    # A class of another package does not read the attribute.
    if not hasattr(layer, "adapter"):
        layer.register_forward_hook(added)
    adapters = getattr(layer, "adapter", None)
    if not isinstance(adapters, AdapterSet):
        adapters = AdapterSet()
        setattr(layer, "adapter", adapters)  # noqa: B010
    adapters[name] = adapter


def remove_adapters(layer: nn.Module) -> None:
    """Undo all :func:`add_adapter` of a layer."""
    hooks = [key for key, hook in layer._forward_hooks.items() if hook is added]
    for key in hooks:
        del layer._forward_hooks[key]
    del layer.adapter
    # The layer's own class reads the attribute, so it must exist.
    if not hooks:
        setattr(layer, "adapter", None)  # noqa: B010


def added(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """Return an output with the adapters' own: the hook of layers that do not read the attribute."""
    summed: Tensor = layer.adapter(args[0], y, layer.weight, layer.bias)  # type: ignore[operator]
    return summed
