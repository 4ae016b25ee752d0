"""The single-device model of a module that is split over ranks, for those who count its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import rich
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich.table import Table
from torch import nn
from torch.nn.parameter import is_lazy

from megalight.attachments import shadow_of
from megalight.models.module import MegalightModule
from megalight.parallel.model import ParallelModel
from megalight.parallel.transform import apply_transforms
from megalight.strategies import _lightning


def outline(module: nn.Module, made: dict[int, Any] | None = None) -> nn.Module:
    """Return the tree of a module without memory: names, class names, modes, and parameters on meta. It cannot run.

    Args:
        module: the module, before it is divided.
        made: id of each module and parameter that has a shadow -> the shadow. None: none has one.
    """
    made = {} if made is None else made
    if isinstance(module, torch.jit.ScriptModule):  # its parameters are not Python's, and no plan divides them
        return module
    if id(module) not in made:
        # Nothing else of the module: its buffers, for example, would be kept alive, and methods of its class (such as
        # the hash of a metric) need attributes that the shadow lacks.
        shadow = made[id(module)] = type(type(module).__name__, (nn.Module,), {})()
        shadow.training = module.training
        for name, child in module._modules.items():
            shadow._modules[name] = None if child is None else outline(child, made)
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                made[id(parameter)] = _unmaterialized(parameter)
            shadow._parameters[name] = None if parameter is None else made[id(parameter)]
    found: nn.Module = made[id(module)]
    return found


def _unmaterialized(parameter: nn.Parameter) -> nn.Parameter:
    lazy: bool = is_lazy(parameter)
    if lazy:  # it has no shape yet
        return parameter
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, parameter.requires_grad)


def whole_model(module: pl.LightningModule, model: ParallelModel | None) -> nn.Module:
    """Return the one-device model without memory, or the module itself if no rank lacks any of it.

    Args:
        module: a Megalight module, which builds its model again; or a plain one.
        model: how the strategy has split it; None: no strategy of ours did.
    """
    if isinstance(module, MegalightModule):
        # On meta, and with the state of the generator kept: the run's values do not change.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            built = module.build_model()
            apply_transforms(built, module.transforms)
        return built
    if model is None or model.outline is None:
        return module
    # Its owner may have frozen parameters or changed modes since the split.
    parameters, modules = dict(module.named_parameters()), dict(module.named_modules())
    for name, parameter in model.outline.named_parameters():
        if name in parameters:
            parameter.requires_grad_(parameters[name].requires_grad)
    for name, part in model.outline.named_modules():
        if name in modules:
            part.training = modules[name].training
    return model.outline


def with_whole_model(module: pl.LightningModule, model: ParallelModel | None) -> pl.LightningModule:
    """Return a shadow of the module with the whole model in it, or the module itself if it is whole.

    The shadow has no example input, because a model without memory computes nothing.
    """
    whole = whole_model(module, model)
    if whole is module or (not isinstance(module, MegalightModule) and _numel(whole) == _numel(module)):
        return module
    shadow: pl.LightningModule
    if isinstance(module, MegalightModule):
        shadow = shadow_of(module, {**module._modules, "model": whole})
    else:
        shadow = shadow_of(module, whole._modules, _parameters=whole._parameters)
    shadow.example_input_array = None
    return shadow


def _numel(module: nn.Module) -> int:
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in module.parameters())


# Lightning's model summaries, without FLOPs where nobody counted any


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
