"""How Lightning's own summaries show their figures under our strategies: without FLOPs where nobody counted any.

Lightning counts them while the module runs its ``example_input_array``. Without one, it would show 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import rich
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich.table import Table

from megalight.strategies import _lightning

Columns = list[tuple[str, list[str]]]


def shown_by(callback: ModelSummary) -> Callable[..., None]:
    """Return the function that shows the figures of a summary, in place of its ``summarize``."""
    lightnings = type(callback).summarize
    own = next((own for kind, own in OWN.items() if kind.summarize is lightnings), None)
    # A class with a way of its own to show figures keeps it.
    return lightnings if own is None else partial(_show, lightnings, own)


def _show(lightnings: Callable[..., None], own: Callable[..., None], data: Columns, *figures: Any, **how: Any) -> None:
    if how["total_flops"]:
        lightnings(data, *figures, **how)
    else:
        own([column for column in data if column[0] != "FLOPs"], *figures, header_style=how.get("header_style"))


def _as_text(columns: Columns, total: int, trainable: int, size: float, modes: dict[str, int], **_: Any) -> None:
    text = _lightning.format_summary(total, trainable, size, modes, 0, *columns)
    # The last line tells FLOPs. By Lightning's logger, so that its level decides here too.
    logging.getLogger(ModelSummary.__module__).info("\n%s", text.rpartition("\n")[0])


def _as_table(
    columns: Columns, total: int, trainable: int, size: float, modes: dict[str, int], header_style: str | None
) -> None:
    console, table = rich.get_console(), Table(header_style=header_style or "bold magenta")
    for name, _ in columns:
        table.add_column(name, justify="right" if name in ("Params", "In sizes", "Out sizes") else "left")
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    console.print(table)
    for what, figure in (
        ("Trainable params", get_human_readable_count(trainable)),
        ("Non-trainable params", get_human_readable_count(total - trainable)),
        ("Total params", get_human_readable_count(total)),
        ("Total estimated model params size (MB)", f"{size:,.3f}"),
        ("Modules in train mode", modes["train"]),
        ("Modules in eval mode", modes["eval"]),
    ):
        console.print(f"[bold]{what}[/]: {str(figure).strip()}", highlight=False)


OWN: dict[type[ModelSummary], Callable[..., None]] = {ModelSummary: _as_text, RichModelSummary: _as_table}
"""Lightning's summaries -> what shows the same figures without FLOPs."""
