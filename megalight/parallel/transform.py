"""Changes of a model's structure: adapters, quantizers, draft heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import nn

from megalight.attachments import APPLIED
from megalight.nn.canonical import parts
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.shard import ShardSpec
from megalight.registry import Registry

if TYPE_CHECKING:
    from megalight.parallel.model import ParallelModel


class ModelTransform(ABC):
    """A change of a model's structure. Subclasses are frozen dataclasses of plain values, which checkpoints record.

    A run has a list of transforms. Each method is called for all of them, in order, before the next method is called.

    Attributes:
        name: the name under which it is registered.
        training_only: what names of its tensors in the model begin with, if the model computes the same without it:
            those who use a checkpoint's weights leave them out. None: it changes what the model computes.
        given_by: what users write to have it, for messages. Empty: they list it themselves.
        writes_in_place: :meth:`with_values` only reads parameters and writes into them, so they may be shards that are
            gathered for it. If not, it may replace them, and sharded ones are refused.
        by_units: :meth:`with_values` leaves sharded parameters to :meth:`~.model.ParallelModel.store`, which gathers
            one unit at a time. It is called before that of the others, which read the weights that it leaves.
    """

    name: ClassVar[str]
    given_by: ClassVar[str] = ""
    training_only: ClassVar[str | None] = None
    writes_in_place: ClassVar[bool] = False
    by_units: ClassVar[bool] = False

    @abstractmethod
    def change(self, model: nn.Module) -> None:
        """Change the single-device model in place, before it is split.

        Create new parameters on the device of their neighbors, often meta. Their modules state their initial values
        and canonical names.

        Raises:
            ConfigurationError: the model has no place for the change.
        """

    def plan(self, model: nn.Module, plan: ParallelizePlan) -> ParallelizePlan:
        """Return the model's earlier plan with rules for new modules. Default: no new rule is needed."""
        return plan

    def change_split(self, model: ParallelModel) -> Mapping[str, ShardSpec]:
        """Change this rank's part of the model, which is already split and cut into stages, and may lack values.

        Returns:
            local name of each parameter and persistent buffer that it made -> the part that it holds.
        """
        return {}

    def with_values(self, model: ParallelModel) -> None:  # noqa: B027 - most transforms have nothing to do here
        """Act on a model that has its values: initial ones, or those of a source."""


TRANSFORMS: Registry[type[ModelTransform]] = Registry("model transform")
"""Name -> class."""

TransformT = TypeVar("TransformT", bound=ModelTransform)


def register(transform: type[TransformT]) -> type[TransformT]:
    """Class decorator: register a transform under its ``name``."""
    TRANSFORMS.register(transform.name)(transform)
    return transform


def apply_transforms(model: nn.Module, transforms: Sequence[ModelTransform]) -> list[frozenset[str]]:
    """Apply those transforms to a single-device model that have not changed it yet.

    Returns:
        for each transform of the model, canonical names of the tensors that it made.
    """
    done: list[tuple[ModelTransform, frozenset[str]]] = APPLIED.setdefault(model, [])
    for transform in transforms:
        # A second fit asks for the same transforms again.
        if all(transform != other for other, _ in done):
            before = {part.name for part in parts(model)}
            transform.change(model)
            done.append((transform, frozenset({part.name for part in parts(model)} - before)))
    return [made for _, made in done]


def share_transforms(whole: nn.Module, part: nn.Module) -> None:
    """Let a part that was taken out of a model count as changed by the transforms of the whole."""
    APPLIED.set(part, APPLIED.setdefault(whole, []))


def unknown_to(known: Container[str], made: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return the tensors of transforms that a source does not know: it may have been written before them.

    Args:
        known: names of the source's tensors. If it has one of a transform's tensors, it must have all.
        made: names of the tensors of each transform.
    """
    return frozenset().union(*(names for names in made if not any(name in known for name in names)))
