"""A base whose hidden states lie on disk, in the place of one that runs beside its draft."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalight.data.records import BEGUN, MANIFEST
from megalight.data.states import ENDS, StatesStore
from megalight.errors import ConfigurationError, DataError
from megalight.parallel.frozen import Beside
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.carry import Carry
from megalight.types import BaseStates


def is_states(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds hidden states, perhaps not all yet."""
    folder = Path(path)
    return (folder / ENDS).is_dir() and any((folder / name).is_file() for name in (MANIFEST, BEGUN))


@dataclass(frozen=True)
class StoredBase:
    """Declares it in the place of a :class:`~megalight.parallel.frozen.FrozenModel`: batches bring the results.

    Attributes:
        beside: the base's ends, which the loss computes with.
        place: takes the ends on the ranks that hold them, and None on others.
    """

    beside: Beside
    place: Callable[[nn.Module | None], None]

    def check(self, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> None:
        """Check nothing: there is no layout of its own."""

    def build(self, name: str, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
        """Place the ends, and return what takes the results out of micro-batches."""
        self.place(self.beside.place(name, mesh, dtype, device))
        return lambda batches: replay(batches, dtype)


def replay(batches: Sequence[Any], dtype: torch.dtype) -> list[Carry]:
    """Return the results of the base for micro-batches that bring them: of all tokens, ``[T, ...]``.

    Raises:
        ConfigurationError: a batch brings none.
    """
    found = []
    for batch in batches:
        states = getattr(batch, "taught", None)
        if not isinstance(states, BaseStates):
            raise ConfigurationError(
                "a batch brings no hidden states of the base; train with a data module such as GPTDataModule or "
                "SFTDataModule, whose samples have numbers."
            )
        flat = states.each(lambda tensor: tensor.flatten(0, 1).to(dtype))
        found.append({"hidden": flat.hidden, "auxiliary": flat.auxiliary})
    return found


def serve(store: StatesStore, data: Any, layers: Sequence[int], stage: str) -> None:
    """Let batches bring hidden states.

    Args:
        store: where they are.
        data: the data of the run.
        layers: after how many layers of the base the draft reads them.
        stage: what the trainer does, such as ``fit``.

    Raises:
        ConfigurationError: the stage reads other samples than those of training and validation, the data has no
            numbered samples, or the draft reads other hidden states.
        DataError: the store was written for other samples, or has none for validation.
    """
    if stage not in ("fit", "validate"):
        raise ConfigurationError(
            f"{store.folder} holds hidden states of training and validation samples, and trainer.{stage} reads others; "
            "name the base itself by model.base."
        )
    if tuple(layers) != store.meta.layers:
        raise ConfigurationError(
            f"the draft reads hidden states after layers {list(layers)}, and {store.folder} holds those after "
            f"{list(store.meta.layers)}; set auxiliary_layers, or write the folder again with {store.meta.command}."
        )
    if not hasattr(data, "training_samples"):
        raise ConfigurationError(
            f"{store.folder} is read by numbers of samples, which {type(data).__name__} does not have; train with "
            "a data module such as GPTDataModule or SFTDataModule."
        )
    if stage == "fit":
        store.check(*data.training_samples())
    if data.validates and (validation := data.validation_samples()) is not None:
        if not store.has("validation"):
            raise DataError(
                f"{store.folder} has no validation samples, and the run validates; set trainer.limit_val_batches=0, or "
                f"write the folder again with {store.meta.command}."
            )
        samples, count = validation
        store.check(samples, count, "validation")
    data.taught = store
