"""Which layouts a model of ``transformers`` takes, from its configuration alone: it is split on no memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from megalight.errors import MegalightError

Row = tuple[str, str, str]
"""A layout, ``yes`` or ``no``, and a reason or what it gives."""

LAYOUTS: tuple[Mapping[str, Any], ...] = (
    {"tensor_parallel": 2},
    {"tensor_parallel": 4},
    {"tensor_parallel": 8},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"context_parallel": 2},
    {"pipeline_parallel": 2},
    {"expert_parallel": 2},
)
"""Arguments of ``MegatronStrategy`` that are tried."""


def rows_of(path: str, degrees: Mapping[str, int] | None = None) -> Iterator[Row]:
    """Yield, for each layout, whether the model takes it.

    Args:
        path: a folder of ``transformers``, or a name of the Hugging Face Hub. Only its ``config.json`` is read.
        degrees: the one layout to try, by axis. None: those of :data:`LAYOUTS`.

    Raises:
        ConfigurationError: ``transformers`` has no such causal language model.
        CheckpointError: there is no such folder.
    """
    import torch

    from megalight.checkpoint.foreign.transformers_folder import read_config
    from megalight.hub import local
    from megalight.models.family import family_of_transformers
    from megalight.models.fused import FusedModule, fuse
    from megalight.models.hf import HFConfig, HFModel

    config = HFConfig(dict(read_config(local(path))))
    values = {**config.read.to_dict(), **config.values}
    with torch.device("meta"):
        model = HFModel(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    yield type(model.net).__name__, "", f"{values['model_type']}, {count / 1e9:.3g} B parameters"
    wanted = LAYOUTS if degrees is None else (arguments_of(degrees),)
    for options in wanted:
        label = ", ".join(f"{name}={value}" for name, value in options.items())
        # Of a plain module around the model: what `self.net = ...` gets.
        yield label, *_tried(copy.deepcopy(model.net), options, count)
    if degrees is not None:
        return
    yield "MegatronFSDPStrategy", "yes", "full sharding serves every model"
    on = "runs our attention" if model.packs else "does not use the attention interface: it keeps its own attention"
    yield "attention", "yes" if model.packs else "no", on
    layers = fuse(model)
    parts = sum(isinstance(module, FusedModule) for module in model.modules())
    yield "FusedOps", "yes" if parts else "no", f"{parts} modules, {layers} of them whole layers"
    try:
        family = family_of_transformers(values)
        if family.config is HFConfig:
            yield "own module", "no", "HFCausalLM trains it, with the layouts above"
            return
        assert family.weights is not None
        family.weights.config(values)
        yield "own module", "yes", f"{family.module().__name__} has code of ours for it, and every layout"
    except MegalightError as error:
        yield "own module", "no", str(error)


def arguments_of(degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the arguments of ``MegatronStrategy`` for degrees by axis; those of 1 are left out."""
    names = {
        "tp": "tensor_parallel",
        "cp": "context_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
        "etp": "expert_tensor_parallel",
    }
    return {names[axis]: degree for axis, degree in degrees.items() if axis in names and degree > 1}


def _tried(net: Any, options: Mapping[str, Any], count: int) -> tuple[str, str]:
    """Split a model on meta as the first rank would, and return the verdict with its reason."""
    from megalight.parallel.apply import split
    from megalight.parallel.layout import Layout

    layout = Layout(**options)
    ranks = 1
    for name, degree in options.items():
        ranks *= degree if name != "sequence_parallel" else 1
    try:
        # Stages are decided here, and cut only where there are processes.
        _, _, stages = split(net, layout.mesh(ranks), layout, "")
    except MegalightError as error:
        return "no", str(error)
    if layout.pipeline_parallel > 1:
        return "yes", f"stages {stages}"
    held = sum(parameter.numel() for parameter in net.parameters())
    return "yes", f"rank 0 of {ranks} holds {held / count:.0%} of the parameters"
