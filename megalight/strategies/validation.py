"""Refuse what MegatronStrategy cannot do, before anything is built: state the value, the rule and the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy

from megalight.attachments import overridden
from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.parallel.layers import is_transformers
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.strategies import _lightning


def check_checkpoint_io(plugin: CheckpointIO | None) -> None:
    """Refuse plugins that write checkpoints in another way."""
    if plugin is not None:
        raise ConfigurationError(
            f"{type(plugin).__name__} cannot be used: MegatronStrategy writes sharded checkpoint folders itself. "
            "Remove the CheckpointIO plugin."
        )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks of another Lightning package."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, pl.Callback):
            raise ConfigurationError(
                f"the callback {type(callback).__name__} comes from {type(callback).__module__}, and this Trainer "
                "knows none of its classes. Use lightning.pytorch throughout: pytorch_lightning is another package "
                "with equal names."
            )


def check_not_compiled(strategy: str, module: pl.LightningModule) -> None:
    """Refuse a module whose steps are compiled, and give it its own steps again, so that it can be trained.

    Args:
        strategy: name of the strategy's class.
    """
    if not _lightning.is_compiled(module):
        return
    to_uncompiled(module)
    name = type(module).__name__
    where = "In build_model" if isinstance(module, MegalightModule) else "Before training"
    raise ConfigurationError(
        f"torch.compile({name}(...)) compiles whole steps, and {strategy} divides them into passes of its own. Pass "
        f"the {name} itself. {where}, compile its layers, layer.forward = torch.compile(layer.forward), which "
        "keeps their names in checkpoints."
    )


def check_pruning(trainer: pl.Trainer, module: pl.LightningModule, mesh: ParallelMesh) -> None:
    """Refuse Lightning's ``ModelPruning`` where it would find no layers, or prune each part by a bound of its own."""
    if not any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return
    name = type(module).__name__
    if isinstance(module, MegalightModule):
        raise ConfigurationError(
            f"ModelPruning looks for layers before {name} has built its model, and finds none. Remove it. To prune a "
            "trained model, read its checkpoint in one process, megalight.strategies.load_weights(module, path), and "
            "call torch.nn.utils.prune on module.model."
        )
    split = [f"{axis}={mesh.size(axis)}" for axis in ("tp", "ep") if mesh.size(axis) > 1]
    if split:
        raise ConfigurationError(
            f"ModelPruning compares the weights of whole layers, but {' and '.join(split)} divide those of {name}. "
            "Leave these degrees at 1, where replicas and sharded weights are pruned as on one device."
        )


def check_tuners(trainer: pl.Trainer, module: pl.LightningModule, data: Any, ranks: int) -> None:
    """Refuse callbacks of Lightning that change an attribute, or a layer, of modules that have none.

    Args:
        data: the data module, or None.
        ranks: the number of processes.
    """
    name, ours = type(module).__name__, isinstance(module, MegalightModule)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BackboneFinetuning) and ours:
            raise ConfigurationError(
                f"BackboneFinetuning freezes module.backbone before {name} has built its model, and finds none. "
                "Remove it. To train a part of the model, write build_model in a subclass, and there call "
                "requires_grad_(False) on the others; or train adapters (megalight.callbacks.Adapters)."
            )
        if isinstance(callback, LearningRateFinder) and ours:
            wanted = _lightning.attributes_for_rate(callback)
            if wanted and not any(_has(module, each) for each in wanted):
                raise ConfigurationError(
                    f"LearningRateFinder writes the rate that it finds to {' or '.join(wanted)} of {name}, which has "
                    "none. Pass LearningRateFinder(update_attr=False): callback.optimal_lr.suggestion() then says what "
                    "to give to the optimizer of a new run."
                )
        if isinstance(callback, BatchSizeFinder):
            size = _lightning.attribute_for_batch(callback)
            if ranks > 1:
                raise ConfigurationError(
                    f"BatchSizeFinder tries batches in one process, and there are {ranks}. Remove it, and use "
                    "MegatronStrategy(micro_batch_size='auto'), which finds the samples that fit into each GPU."
                )
            if size == "global_batch_size" and hasattr(data, size):
                raise ConfigurationError(
                    "BatchSizeFinder would change global_batch_size, by which a run counts its position in the data, "
                    "and with it what the model learns. Remove it, and use MegatronStrategy(micro_batch_size='auto'), "
                    "which finds the samples that fit into the GPU and leaves the global batch as it is."
                )
            if ours and not any(_has(owner, size) for owner in (module, data)):
                raise ConfigurationError(
                    f"BatchSizeFinder changes {size} of {name} or its data, and there is none. Remove it, and use "
                    "MegatronStrategy(micro_batch_size='auto'), which finds the samples that fit into the GPU and "
                    "leaves the global batch as it is."
                )


def _has(owner: object, name: str) -> bool:
    """Return whether a module, or its data, has an attribute or a hyperparameter."""
    return hasattr(owner, name) or name in getattr(owner, "hparams", ())


@contextmanager
def optimizer_of_stage(module: pl.LightningModule, model: ParallelModel) -> Iterator[None]:
    """Say what to do if ``configure_optimizers`` finds no parameters on a pipeline stage that has none.

    Raises:
        ConfigurationError: the optimizer got no parameters and no groups.
    """
    configure = module.configure_optimizers
    empty = model.mesh.pp > 1 and not any(parameter.requires_grad for parameter in model.parameters())

    def checked() -> Any:
        try:
            return configure()
        except ValueError as error:
            if not empty:
                raise
            raise ConfigurationError(
                f"configure_optimizers found no trainable parameters on {' and '.join(map(str, model.stages))}. Pass "
                'the optimizer a parameter group, [{"params": ...}], which may be empty, or move a layer here.'
            ) from error

    # On the instance, because Lightning looks the method up there. The user's own one may lie there too.
    with overridden(module, configure_optimizers=checked):
        yield


def check_lazy(root: nn.Module) -> None:
    """Refuse parameters without a shape: how they are divided is decided before the first batch."""
    if lazy := [name for name, parameter in root.named_parameters() if is_lazy(parameter)]:
        raise ConfigurationError(
            f"{lazy[0]} has no shape yet, as its module is lazy, and weights are divided and stored before the first "
            f"batch. Run one batch through {type(root).__name__} before training, or give the layer its sizes."
        )


def check_whole_models(root: nn.Module, mesh: ParallelMesh) -> None:
    """Refuse models of a plain module that no rank can have a part of: compiled ones, packed weights, reentrant layers.

    Raises:
        ConfigurationError: names the model.
    """
    degrees = {each: mesh.size(each) for each in ("tp", "pp", "cp", "ep", "etp") if mesh.size(each) > 1}
    layout = ", ".join(f"{axis}={size}" for axis, size in degrees.items())
    for name, model in root.named_modules() if degrees else ():
        kind = type(model).__name__
        if isinstance(model, OptimizedModule):
            raise ConfigurationError(
                f"{name} is torch.compile({type(model._orig_mod).__name__}), and {layout} divides what it compiled. "
                "Compile the layers instead, before training: layer.forward = torch.compile(layer.forward)."
            )
        if is_transformers(model) and model._compiled_call_impl is not None and degrees.keys() & {"pp", "cp"}:
            raise ConfigurationError(
                f"{name} ({kind}) is compiled by {name}.compile(), and {layout} runs it in parts. Compile the layers "
                "instead: layer.compile()."
            )
        if getattr(model, "is_quantized", False) is True and degrees.keys() & {"tp", "ep", "etp"}:
            method = getattr(model, "quantization_method", "packed")
            raise ConfigurationError(
                f"{name} ({kind}) is quantized ({getattr(method, 'value', method)}), and {layout} divides weights, not "
                "packed ones. Load the model without quantization_config, or set these degrees to 1."
            )
        given = getattr(getattr(model, "_gradient_checkpointing_func", None), "keywords", {})
        if (
            getattr(model, "gradient_checkpointing", False)
            and given.get("use_reentrant")
            and degrees.keys() & {"tp", "pp"}
        ):
            raise ConfigurationError(
                f"{name} ({kind}) recomputes with use_reentrant=True, which {layout} does not serve. Call "
                "gradient_checkpointing_enable() without it, or leave that out and give recompute to the strategy."
            )


def check_no_quantized_weights(root: nn.Module) -> None:
    """Refuse weights that an interrupted run with ``primary_weights`` left quantized: their scales are lost."""
    for name, parameter in root.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() == 1:
            raise ConfigurationError(
                f"{name} is held as {parameter.dtype}, quantized, left by a run with primary_weights that did not come "
                "to its end. Load a checkpoint into a new module."
            )
