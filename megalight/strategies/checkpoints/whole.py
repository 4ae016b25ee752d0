"""Read a checkpoint of any layout into a whole module in one process."""

from __future__ import annotations

import os
from contextlib import nullcontext

import lightning.pytorch as pl
import torch

from megalight.checkpoint.ranks import alone
from megalight.models.module import MegalightModule
from megalight.models.saved import holds_base, widest
from megalight.ops.quantized_weight import stored_of
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.plan import ParallelizePlan
from megalight.strategies.checkpoints.resuming import base_of, open_saved
from megalight.strategies.user_module import root_of, seed_of


def load_weights(module: pl.LightningModule, path: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint, saved in any layout, into a module in this one process.

    ``module.model`` is then the whole single-device model on the CPU, with the saved dtypes. Use it to generate,
    export, evaluate or train further, under any strategy. It replaces a model that the module already has. A plain
    LightningModule keeps its layers.

    Args:
        module: the module, constructed as for training.
        path: the checkpoint's folder, or the file that one of Lightning's own strategies wrote.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or of another model.
    """
    saved = open_saved(str(path), module)
    check = getattr(module, "check_checkpoint", None)
    if check is not None:
        check(saved.common)
    model = _fresh(module)
    model.place("cpu")
    # Everything is filled first: buffers that modules compute are in no checkpoint.
    model.draw(seed_of(module, 0))
    whole = holds_base(saved.common)
    if not whole:
        model.root.to(widest(saved))  # base weights get the dtype of the run, not that of their own files
    for name, tensor in model.tensors().items():
        # Each tensor keeps the dtype in which it was saved, whatever the module was built with.
        stored = saved.tensors.get(model.specs[name].pieces[0].name)
        if stored is not None:
            tensor.data = tensor.data.to(getattr(torch, stored.dtype))
    with alone() as group:
        if not whole:
            model.read(base_of(module, saved), process_group=group)
        model.read(saved, only_added=not whole, process_group=group)


def unsplit(module: MegalightModule, model: ParallelModel) -> bool:
    """Make the model that was split for one rank anew, with its values, so that it can be split for more.

    Args:
        module: its model is replaced.
        model: of that model; its mesh has one rank.

    Returns:
        Whether it could be made: not if its weights are quantized, or if it has other tensors than the module builds.
    """
    before, multiple = module.model, module.token_multiple
    values = model.tensors()
    whole = _fresh(module)
    if values.keys() - whole.tensors().keys() or any(stored_of(value) is not None for value in values.values()):
        module.model, module.token_multiple = before, multiple
        return False
    whole.place(model.device)
    whole.draw(seed_of(module, 0))
    for name, tensor in whole.tensors().items():
        if name in values:
            # A copy, as the values lie in the flat memory of the run before.
            tensor.data = values[name].detach().clone()
            tensor.requires_grad_(values[name].requires_grad)
    return True


def _fresh(module: pl.LightningModule) -> ParallelModel:
    """Build the whole model of a module anew, without values. A plain module keeps its layers."""
    with torch.device("meta") if isinstance(module, MegalightModule) else nullcontext():
        if isinstance(module, MegalightModule):
            module.model, module.token_multiple = None, 1
        module.configure_model()
    return ParallelModel(root_of(module), ParallelMesh(), Layout(plan=ParallelizePlan()))
