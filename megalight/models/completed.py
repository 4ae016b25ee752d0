"""Weights for all names of a model, from a source that lacks some of them or has others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from megalight.checkpoint.compare import compare
from megalight.checkpoint.ranks import Ranks, alone
from megalight.checkpoint.sources.lenient import Lenient, report
from megalight.errors import CheckpointError
from megalight.nn.canonical import canonical_tensors, parts
from megalight.nn.init import Initializer, draw, initializers
from megalight.parallel.source import Filled, Request, Source, Stored, Wrapped


@dataclass(frozen=True)
class Drawn:
    """A tensor that gets its initial value.

    Attributes:
        shape: global shape.
        dtype: torch's name of the dtype to store it in; it is drawn in float32.
        initializer: its distribution.
    """

    shape: tuple[int, ...]
    dtype: str
    initializer: Initializer


@dataclass(frozen=True)
class Completed(Wrapped):
    """A source with the names of a model: initial values stand in for what it lacks, and others are not shown.

    Attributes:
        drawn: canonical name -> tensor that ``source`` lacks.
        hidden: names of ``source`` that the model does not have.
        seed: seed of the initial values.
    """

    drawn: Mapping[str, Drawn]
    hidden: frozenset[str]
    seed: int

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors of the model."""
        shown = {name: stored for name, stored in self.source.tensors.items() if name not in self.hidden}
        return {**shown, **self.drawn}

    def before(self, request: Request) -> Request:
        """See :meth:`~megalight.parallel.source.Wrapped.before`."""
        stored = [target for target in request.targets if target.name not in self.drawn]
        return replace(request, targets=stored, strict=False)

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        for box in request.targets:
            if box.name in self.drawn:
                initializer, size = self.drawn[box.name].initializer, tuple(box.data.shape)
                box.data.copy_(draw(initializer, box.name, box.shape, box.offset, size, self.seed, box.data.device))
        return Filled(filled.missing, tuple(name for name in filled.unexpected if name not in self.hidden))


def completed(lenient: Lenient, model: nn.Module, prefix: str, dtype: torch.dtype, seed: int) -> Source:
    """Return the weights of a whole model from a source whose names need not be those of the model.

    Args:
        lenient: the source, and whether the names that differ are logged.
        model: the one-device model, on any device.
        prefix: before the canonical names of its tensors in the source.
        dtype: dtype of tensors that the source lacks.
        seed: seed of their values.

    Raises:
        CheckpointError: shapes differ; the source lacks a tensor that has no initial value, such as a buffer.
    """
    shapes = {prefix + name: tuple(tensor.shape) for name, tensor in canonical_tensors(model).items()}
    given = {name: initializer for name, _, _, initializer in initializers(model)}
    stated = {prefix + part.name: given[part.parameter] for part in parts(model) if part.parameter in given}
    stored, where, label = lenient.source.tensors, lenient.where, lenient.label
    with alone() as group:  # names are those of the whole model, on every rank
        compared = compare(Ranks(group), where, stored, shapes, strict=False, prefix=prefix, label=label)
    missing, extra = compared.missing, compared.unexpected
    if lost := [name for name in missing if name not in stated]:
        raise CheckpointError(
            f"{where} lacks {', '.join(map(label, lost))}, which has no initial value to take its place."
        )
    if lenient.say:
        report(where, label, missing, [*map(label, extra), *map(repr, lenient.skipped)])
    kind = str(dtype).removeprefix("torch.")
    drawn = {name: Drawn(shapes[name], kind, stated[name]) for name in missing}
    return Completed(lenient.source, drawn, frozenset(extra), seed)
