"""Other weights for a model that generates: from a checkpoint, a folder of ``transformers``, or tensors of a trainer.

They are read into the memory of the old ones, so CUDA graphs stay. Names and shapes are compared before any of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from megalight import checkpoint
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.checkpoint.foreign.transformers_folder import is_folder, read_config
from megalight.checkpoint.loading import compare
from megalight.checkpoint.ranks import Ranks, alone
from megalight.checkpoint.sources import TensorSource
from megalight.errors import CheckpointError
from megalight.models.config import compare as compare_configs
from megalight.models.family import SHOWN, family, family_of_transformers
from megalight.models.loading import (
    description,
    holds_base,
    initial_config,
    saved_config,
    whole_source,
    without_training_parts,
)
from megalight.parallel.model import ParallelModel
from megalight.parallel.source import Source
from megalight.parallel.transform import unknown_to

NewWeights: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]
"""A checkpoint, a run's folder (its newest one), a folder of ``transformers``; or whole tensors by canonical name."""


class LoadedWeights:
    """The weights of a model that was loaded. Others may take their place.

    Args:
        model: the model, or this rank's part of it. All of its ranks make the same calls.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model

    def check(self, weights: NewWeights) -> None:
        """Compare names and shapes.

        Raises:
            CheckpointError: there are none, or they are of another model.
            ConfigurationError: the model's weights are stored quantized.
        """
        with self._readers() as group:
            self._open(weights, group)

    def read(self, weights: NewWeights) -> None:
        """Compare names and shapes, and read.

        Raises:
            CheckpointError: as of :meth:`check`, or a file is damaged. The old weights are there still.
            ConfigurationError: see :meth:`check`.
        """
        with self._readers() as group:
            source, only_added = self._open(weights, group)
            self._model.read(source, only_added=only_added, process_group=group)

    @contextmanager
    def _readers(self) -> Iterator[ProcessGroup | None]:
        if self._model.mesh.world_size > 1:
            yield None
            return
        with alone() as group:
            yield group

    def _open(self, weights: NewWeights, group: ProcessGroup | None) -> tuple[Source, bool]:
        """Return a source, and whether it has only what transforms have added."""
        model, ranks, found = self._model, Ranks(group), list[tuple[Source, bool, str]]()
        model.check_readable()
        # Together: a rank that does not find the folder would leave the others in a collective.
        ranks.together("opening new weights", lambda: found.append(self._source(weights)))
        source, only_added, where = found[0]
        asked = {piece.name: piece.shape for spec in model.specs.values() for piece in spec.pieces}
        lacking = frozenset[str]() if only_added else unknown_to(source.tensors, model.made)
        asked = {
            name: shape for name, shape in asked.items() if (name in model.added if only_added else name not in lacking)
        }
        compare(ranks, where, source.tensors, asked, strict=True, prefix=model.prefix, remedy="Is it of another model?")
        return source, only_added

    def _source(self, weights: NewWeights) -> tuple[Source, bool, str]:
        if isinstance(weights, Mapping):
            return TensorSource({self._model.prefix + name: each for name, each in weights.items()}), False, "memory"
        path, config = latest_checkpoint(weights), self._model.root.config
        if path.is_file():
            raise CheckpointError(f"{path} is a single file; give the folder of a checkpoint, or of transformers.")
        opened = None if is_folder(path) else checkpoint.open(path)
        described = {} if opened is None else description(opened)
        known = family_of_transformers(read_config(path)) if opened is None else family(described["family"])
        if not isinstance(config, known.config):
            raise CheckpointError(f"{path} holds a {known.name} model, and one of {type(config).__name__} is loaded.")
        found = initial_config(path, known) if opened is None else saved_config(described, path)
        if differences := compare_configs(config.to_dict(), found.to_dict(), str(path)):
            raise CheckpointError(f"{path} is of another model: {'; '.join(differences[:SHOWN])}.")
        if opened is None:
            return whole_source(path, known, found), False, str(path)
        return without_training_parts(opened, described), not holds_base(opened.common), f"checkpoint {path}"
