"""From a one-device model to this rank's part of a parallel one. The order matters:

1. *Split by the plan, then cut into stages*: on meta tensors, so no rank ever holds more than its part. Whatever
   changes the tree of modules comes before: a layer added later would not be split. Cutting comes second: plans name
   modules of the whole model, and tied weights are seen only while both ends are there.
2. *Precision* before values: casting afterwards would round initial values twice.
3. *Values*: draw, or read the checkpoint, straight into the local parameters; tensors are read once.
4. *Recompute* acts on the modules that are there now, before anything runs, and *low precision* on the parameters.
5. *Optimizer groups* need the parameters that exist now, and say which belong together.
6. *Data-parallel buffers* take the parameters' storage over: anything that replaces a parameter later would be lost.
7. *The optimizer* is pointed at the buffers' shards last; its state must not be made for parameters it will not step.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.module import CANONICAL_PREFIX, MegalightModule
from megalight.optim import shard_optimizer
from megalight.parallel.apply import check_overlap, parallelize
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo
from megalight.parallel.initialise import initialise, materialise
from megalight.parallel.pipeline.stages import cut
from megalight.parallel.plan import Plan
from megalight.parallel.plans import plan_for
from megalight.parallel.recompute import apply_recompute, check_recompute
from megalight.parallel.tensor.overlap.options import TensorOptions
from megalight.strategies import _lightning, refusals
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.persistence import Loaded
from megalight.strategies.tree import Split, root_of

log = logging.getLogger(__name__)


def build(strategy: MeshStrategy, module: pl.LightningModule, loaded: Loaded | None) -> Split:
    """Steps 1 to 4; returns this rank's part of the model."""
    root = root_of(module)
    assert strategy.streams is not None
    seed = int(strategy.broadcast(torch.initial_seed()))
    split = _split_before(strategy, root) or _split(strategy, module, root)
    _apply_precision(strategy, module, root)
    fresh = any(parameter.is_meta for parameter in root.parameters())
    materialise(root, strategy.root_device)
    module.to(strategy.root_device)
    if fresh:
        # also before a load: checkpoints lack buffers that modules compute, and what strict=False lets be missing
        initialise(root, split.specs, seed_of(module, seed))
    if loaded is not None:
        strategy.split = split
        loaded.read_model(strategy)
    for chunk in split.chunks:
        apply_recompute(chunk, strategy.recompute, whole=strategy.mesh.pp == 1)
    cut_layers = sum(len(stage.layers) for stage in split.layout.stages)
    strategy.precision.prepare(root, strategy.mesh, cut_layers or None)
    check_overlap(root, strategy.root_device)
    strategy.fresh = fresh and loaded is None
    strategy.streams.seed(seed)
    return split


def _split(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> Split:
    _lightning.sync_layers(strategy, module)
    if isinstance(module, MegalightModule):
        module.check_model(root)
        plan = strategy.plan or module.plan(root)
        module.token_multiple = strategy.tensor_parallel if strategy.sequence_parallel else 1
    else:
        plan = strategy.plan or plan_for(root) or Plan()
        _equalise(strategy, root)
    if strategy.tensor_parallel > 1 and not plan.rules:
        raise ConfigurationError(
            f"tensor_parallel={strategy.tensor_parallel}, but there is no plan for {type(root).__name__}, so nothing "
            "would be split. Pass MegatronStrategy(plan=...), or define plan(model) on your MegalightModule."
        )
    specs = parallelize(
        root,
        plan,
        strategy.mesh,
        sequence_parallel=strategy.sequence_parallel,
        context=strategy.context,
        tensor=strategy.tensor,
        prefix=CANONICAL_PREFIX,
    )
    layout = strategy.layout(root)
    chunks = [root]
    if strategy.mesh.pp > 1:
        check_recompute(root, strategy.recompute, [stage.layers for stage in layout.stages])
        log.info("pipeline layout %s\n%s", layout, layout.draw())
        if strategy.pipeline.schedule == "zero_bubble" and strategy.mesh.global_rank == 0:
            _tell_undeferred(root)
        specs, chunks = cut(root, specs, layout, strategy.mesh)
    split = root.__dict__[SPLIT] = Split(_asked(strategy), specs, layout, chunks)
    return split


def _tell_undeferred(root: nn.Module) -> None:
    """Name the linear layers of the whole model whose weight gradients wait in no queue: torch's own."""
    names = [
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module.weight.requires_grad
    ]
    if names:
        log.warning(
            "schedule 'zero_bubble': %d linear layer%s weight gradients at once, where they fill no pause: %s%s; use "
            "megalight.nn.Linear, or another schedule",
            len(names),
            "s compute" if len(names) > 1 else " computes",
            ", ".join(names[:3]),
            " ..." if names[3:] else "",
        )


SPLIT = "megalight_split"
"""Where a model that is split says so: another Trainer in this process may go on with it."""


def _split_before(strategy: MeshStrategy, root: nn.Module) -> Split | None:
    """What an earlier strategy of the same layout has made of a model."""
    split: Split | None = root.__dict__.get(SPLIT)
    if split is not None and split.asked != _asked(strategy):
        raise LayoutError(
            f"{type(root).__name__} was split for {split.asked} already and cannot become {_asked(strategy)}. Make a "
            "new module, and load a checkpoint of this one into it."
        )
    return split


def _asked(strategy: MeshStrategy) -> str:
    parts = [strategy.mesh.describe(), *["sequence parallel"] * strategy.sequence_parallel]
    parts += [repr(strategy.tensor)] * (strategy.tensor_parallel > 1 and strategy.tensor != TensorOptions())
    parts += [repr(strategy.context)] * (strategy.context_parallel > 1)
    if strategy.pipeline_parallel > 1:
        chunks = f"{strategy.virtual_pipeline} chunks per rank"
        parts += [strategy.pipeline_layout or chunks, repr(strategy.pipeline)]
    return ", ".join(parts)


def seed_of(module: pl.LightningModule, seed: int) -> int:
    """The seed of the initial weights: the module's own, or the run's."""
    return module.seed if isinstance(module, MegalightModule) else seed % 2**63


def build_engine(strategy: MeshStrategy, module: pl.LightningModule, optimizer: Optimizer) -> DataParallelEngine:
    """Steps 6 and 7."""
    root = root_of(module)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parts = reversed(list(enumerate(strategy.chunks)))  # a parameter of several is complete with the first of them
    chunks = {id(parameter): place for place, part in parts for parameter in part.parameters()}
    infos = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"the optimizer was given a parameter of shape {tuple(parameter.shape)} that is not part of "
                    f"{type(root).__name__}; return an optimizer over self.parameters()."
                )
            name = names[id(parameter)]
            infos.append(ParamInfo(name, parameter, strategy.specs[name], index, chunks.get(id(parameter), 0)))
    held = {info.name for info in infos}
    refusals.check_all_held(
        [name for name, parameter in root.named_parameters() if parameter.requires_grad and name not in held]
    )
    _check_equal_groups(strategy, len(optimizer.param_groups))
    order = {name: index for index, name in enumerate(names.values())}
    infos.sort(key=lambda info: order[info.name])
    options = strategy.data_parallel
    engine = DataParallelEngine(
        infos,
        strategy.mesh,
        level=options.level,
        grad_dtype=options.dtype(options.gradient_dtype),
        reduce_dtype=options.dtype(options.reduce_dtype),
        bucket_size=options.bucket_size,
        edge_bucket_size=options.edge_bucket_size,
        max_ctas=options.max_ctas,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        device=strategy.root_device,
    )
    if strategy.fresh and strategy.precision.dtype == torch.bfloat16 and isinstance(module, MegalightModule):
        # the parameters hold rounded values; the masters begin from the draws themselves
        initialise(root, strategy.specs, module.seed, on_values=engine.fill_masters)
        engine.recast()
    shard_optimizer(optimizer, engine)
    for kind, size in engine.memory().items():
        log.info("%s: %.3f GiB on this rank", kind, size / 2**30)
    return engine


def _check_equal_groups(strategy: MeshStrategy, count: int) -> None:
    """Checkpoints know an optimizer's groups by number: all pipeline stages must have the same ones."""
    group = strategy.mesh.group("pp")
    if group is None:
        return
    counts: list[Any] = [None] * group.size()
    dist.all_gather_object(counts, count, group=group)
    if len(set(counts)) > 1:
        raise ConfigurationError(
            f"configure_optimizers made {counts} parameter groups on the pipeline's ranks; make the same ones "
            "everywhere, without parameters where a stage has none."
        )


BETWEEN_STEPS = (
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_epoch_start",
    "on_validation_start",
)
"""Hooks that run while parameters are still being gathered, unless somebody waits."""


def reads_weights_between_steps(module: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Whether code that is neither Lightning's nor ours runs between two steps: gathering then ends with the step.

    A callback or module whose hooks there read no weights says ``reads_weights = False``.
    """
    for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]
        for hook in BETWEEN_STEPS if getattr(owner, "reads_weights", True) else ():
            if getattr(type(owner), hook).__module__.partition(".")[0] not in ("lightning", "megalight"):
                log.info("%s defines %s: parameters are gathered before it runs", type(owner).__name__, hook)
                return True
    return False


def _equalise(strategy: MeshStrategy, root: nn.Module) -> None:
    """Give every rank the weights of rank 0: a plain module may have drawn different ones on each."""
    if strategy.world_size == 1:
        return
    tensors = [*root.parameters(), *root.buffers()]
    with torch.no_grad():
        for tensor in tensors:
            if not tensor.is_meta:
                host = tensor.detach().cpu().contiguous()
                dist.broadcast(host, 0, group=strategy.host_group())
                tensor.copy_(host)


def _apply_precision(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> None:
    precision = strategy.precision
    precision.device_type = strategy.root_device.type
    precision.plain = not isinstance(module, MegalightModule)
    refusals.check_no_codes(root)
    if not precision.plain or precision.precision in ("64-true", "bf16-true"):
        root.to(dtype=precision.dtype)


def seed_workers(dataloader: Any, rank: int, seed: int) -> Any:
    """Make DataLoader workers draw by data-parallel rank where Lightning would seed them by global rank.

    The loader, and a sampler that shuffles, get a generator of their own, the same on all ranks of a replica: the
    default one differs between pipeline stages, and a resumed run's dropout would differ if data drew from it.
    """
    if hasattr(dataloader, "generator") and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(seed)
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = dataloader.generator
    if getattr(dataloader, "num_workers", 0) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    return dataloader
