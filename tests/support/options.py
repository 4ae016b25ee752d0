"""Options of data parallelism from flat names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megalight.parallel.data_parallel import AdvancedDataParallelOptions, DataParallelOptions


def data_parallel(**options: Any) -> DataParallelOptions:
    """Make options of data parallelism by name, those of the advanced group among them."""
    names = {each.name for each in fields(AdvancedDataParallelOptions)}
    advanced = AdvancedDataParallelOptions(**{name: options.pop(name) for name in names & options.keys()})
    return DataParallelOptions(**options, advanced=advanced)
