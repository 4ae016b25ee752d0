"""Hidden states of a base for the samples of a run, on disk; see :mod:`megalight.data.records`.

A record holds ``hidden [S, h]`` and ``auxiliary [S, n h]``. The base's ends (its embedding and output layer) lie beside
them, in the checkpoint ``ends``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.gpt.dataset import Sample
from megalight.data.records import Records, RecordsMeta
from megalight.errors import DataError
from megalight.types import BaseStates

DTYPES = {
    "bfloat16": ("<i2", torch.int16),
    "float16": ("<f2", None),
    "float32": ("<f4", None),
    "float64": ("<f8", None),
}
"""Dtype -> that of the record, and that as which its bits are seen, as NumPy has no bfloat16."""

ENDS = "ends"
"""Name of the checkpoint in the folder."""


@dataclass(frozen=True, kw_only=True)
class StatesMeta(RecordsMeta):
    """Facts about a folder.

    Attributes:
        hidden_size: ``h``.
        layers: after how many layers the auxiliary hidden states lie, in their order.
        dtype: of both.
    """

    kind: ClassVar[str] = "states"
    command: ClassVar[str] = "megalight hidden-states"

    hidden_size: int
    layers: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.dtype not in DTYPES:
            raise DataError(f"hidden states have the dtype {self.dtype!r}; known are {', '.join(DTYPES)}.")

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """See :attr:`.RecordsMeta.fields`."""
        stored, length, width = DTYPES[self.dtype][0], self.sequence_length, self.hidden_size
        return [("hidden", stored, (length, width)), ("auxiliary", stored, (length, len(self.layers) * width))]


class StatesStore(Records[StatesMeta]):
    """Reads a folder."""

    meta_type = StatesMeta

    def read(self, index: int, sample: Sample, split: str = "train") -> BaseStates:
        """Return the hidden states of sample ``index``: ``[S, ...]``.

        Raises:
            DataError: the record is damaged, or was written for other tokens.
        """
        return self._of(self.record(split, index, sample))

    def empty(self) -> BaseStates:
        """Return the same for a sample without loss."""
        return self._of(np.zeros((), self.meta.record))

    def _of(self, record: Any) -> BaseStates:
        bits, dtype = DTYPES[self.meta.dtype][1], getattr(torch, self.meta.dtype)
        found = [torch.from_numpy(record[name].copy()) for name in ("hidden", "auxiliary")]
        return BaseStates(*(tensor if bits is None else tensor.view(dtype) for tensor in found))


def values_of(states: Mapping[str, Tensor], dtype: str) -> dict[str, NDArray[Any]]:
    """Return hidden states as values of a record."""
    bits, kind = DTYPES[dtype][1], getattr(torch, dtype)
    found = {name: tensor.to(kind).cpu().contiguous() for name, tensor in states.items()}
    return {name: (tensor if bits is None else tensor.view(bits)).numpy() for name, tensor in found.items()}
