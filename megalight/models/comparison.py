"""How a folder of ``transformers`` differs from another one, or from a checkpoint: by canonical names."""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray

from megalight.checkpoint.foreign.transformers_folder import describe, is_folder, read_config, values
from megalight.checkpoint.inspection.diff import Compared, Difference, Kind, Saved, differences
from megalight.models.family import family_of_transformers
from megalight.models.saved import PREFIX
from megalight.parallel.source import Target


class Weights:
    """The weights in a folder of ``transformers``, by canonical name. Packed ones are widened.

    A tensor without a canonical name keeps that of its file.

    Raises:
        CheckpointError: a file is missing or incomplete, or a fused tensor is of another size than the configuration.
        ConfigurationError: the family of the model is not known.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        known = family_of_transformers(read_config(path))
        assert known.weights is not None
        self._source = known.weights.source(path, known.weights.config_of(path), PREFIX, strict=False)
        stored = describe(path).tensors if self._source.skipped else {}
        self._others = {PREFIX + name: stored[name] for name in self._source.skipped if name in stored}
        self.tensors: dict[str, Kind] = {**self._others, **self._source.tensors}

    def values(self, name: str) -> NDArray[np.float64]:
        """See :meth:`megalight.checkpoint.inspection.diff.Compared.values`."""
        if name in self._others:
            return values(self._source.path, self._others[name])
        shape = self._source.tensors[name].shape
        whole = torch.empty(shape, dtype=torch.float64)
        self._source.fill([Target(name, shape, (0,) * len(shape), whole)], strict=False)
        return whole.numpy().reshape(*shape, 1)


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[Difference]:
    """Compare the weights of two models, each in a folder of ``transformers`` or in a checkpoint of ours.

    Optimizer state and averages are left out. Weights of a checkpoint are compared as they were saved, not as masters.

    Raises:
        CheckpointError: one of them is missing, unfinished or damaged.
        ConfigurationError: a folder holds a model of no known family.
    """
    return differences(_side(one), _side(other), PREFIX)


def _side(path: str | os.PathLike[str]) -> Compared:
    return Weights(path) if is_folder(path) else Saved(path)
