"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalight.data.indexed import IndexedDataset, IndexedWriter


def write(prefix: Path, lengths: Sequence[int], dtype: str = "uint16", first: int = 0) -> IndexedDataset:
    """One document of each length; token ``k`` of the file is ``first + k``."""
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_documents(np.arange(first, first + sum(lengths)), list(lengths))
    return IndexedDataset(prefix)
