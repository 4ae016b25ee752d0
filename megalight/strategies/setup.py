"""From a one-device model to this rank's part of a parallel one. The order matters:

1. *Split by the plan*: on meta tensors, so no rank ever holds more than its part. Whatever changes the tree of modules
   comes before: a layer added later would not be split.
2. *Precision* before values: casting afterwards would round initial values twice.
3. *Values*: draw, or read the checkpoint, straight into the local parameters; tensors are read once.
4. *Optimizer groups* need the parameters that exist now, and say which belong together.
5. *Data-parallel buffers* take the parameters' storage over: anything that replaces a parameter later would be lost.
6. *The optimizer* is pointed at the buffers' shards last; its state must not be made for parameters it will not step.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.optim import Optimizer

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.module import CANONICAL_PREFIX, MegalightModule
from megalight.optim import shard_optimizer
from megalight.parallel.apply import parallelize
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo
from megalight.parallel.initialise import initialise, materialise
from megalight.parallel.plan import Plan
from megalight.parallel.plans import plan_for
from megalight.parallel.shard import ShardSpec
from megalight.strategies import _lightning, refusals
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.persistence import Loaded
from megalight.strategies.tree import root_of

log = logging.getLogger(__name__)


def build(strategy: MeshStrategy, module: pl.LightningModule, loaded: Loaded | None) -> dict[str, ShardSpec]:
    """Steps 1 to 3; returns what each local parameter and buffer of the root holds of the model."""
    root = root_of(module)
    assert strategy.streams is not None
    seed = int(strategy.broadcast(torch.initial_seed()))
    specs = _split_before(strategy, root) or _split(strategy, module, root)
    _apply_precision(strategy, module, root)
    fresh = any(parameter.is_meta for parameter in root.parameters())
    materialise(root, strategy.root_device)
    module.to(strategy.root_device)
    if fresh:
        # also before a load: checkpoints lack buffers that modules compute, and what strict=False lets be missing
        initialise(root, specs, seed_of(module, seed))
    if loaded is not None:
        strategy.specs = specs
        loaded.read_model(strategy)
    strategy.fresh = fresh and loaded is None
    strategy.streams.seed(seed)
    return specs


def _split(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> dict[str, ShardSpec]:
    _lightning.sync_layers(strategy, module)
    if isinstance(module, MegalightModule):
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
        prefix=CANONICAL_PREFIX,
    )
    SPLIT[root] = (_layout(strategy), specs)
    return specs


SPLIT: weakref.WeakKeyDictionary[nn.Module, tuple[str, dict[str, ShardSpec]]] = weakref.WeakKeyDictionary()
"""Models that are split already: another Trainer in this process may go on with them."""


def _split_before(strategy: MeshStrategy, root: nn.Module) -> dict[str, ShardSpec] | None:
    """What the tensors of a model hold that an earlier strategy of the same layout has split."""
    if root not in SPLIT:
        return None
    layout, specs = SPLIT[root]
    if layout != _layout(strategy):
        raise LayoutError(
            f"{type(root).__name__} was split for {layout} already and cannot become {_layout(strategy)}. Make a new "
            "module, and load a checkpoint of this one into it."
        )
    return specs


def _layout(strategy: MeshStrategy) -> str:
    return f"{strategy.mesh.describe()}{', sequence parallel' if strategy.sequence_parallel else ''}"


def seed_of(module: pl.LightningModule, seed: int) -> int:
    """The seed of the initial weights: the module's own, or the run's."""
    return module.seed if isinstance(module, MegalightModule) else seed % 2**63


def build_engine(strategy: MeshStrategy, module: pl.LightningModule, optimizer: Optimizer) -> DataParallelEngine:
    """Steps 5 and 6."""
    root = root_of(module)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    infos = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"the optimizer was given a parameter of shape {tuple(parameter.shape)} that is not part of "
                    f"{type(root).__name__}; return an optimizer over self.parameters()."
                )
            name = names[id(parameter)]
            infos.append(ParamInfo(name, parameter, strategy.specs[name], index))
    held = {info.name for info in infos}
    refusals.check_all_held(
        [name for name, parameter in root.named_parameters() if parameter.requires_grad and name not in held]
    )
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
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
    )
    if strategy.fresh and strategy.precision.dtype == torch.bfloat16 and isinstance(module, MegalightModule):
        # the parameters hold rounded values; the masters begin from the draws themselves
        initialise(root, strategy.specs, module.seed, on_values=engine.fill_masters)
    shard_optimizer(optimizer, engine)
    for kind, size in engine.memory().items():
        log.info("%s: %.3f GiB on this rank", kind, size / 2**30)
    return engine


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
    """Whether code that is neither Lightning's nor ours runs between two steps: gathering then ends with the step."""
    for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]
        for hook in BETWEEN_STEPS:
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
    if not precision.plain or precision.precision in ("64-true", "bf16-true"):
        root.to(dtype=precision.dtype)


def seed_workers(dataloader: Any, rank: int) -> Any:
    """Make DataLoader workers draw by data-parallel rank where Lightning would seed them by global rank.

    The loader also gets a generator of its own: it would otherwise draw from the default one when it starts, and a
    resumed run's dropout would differ.
    """
    if hasattr(dataloader, "generator") and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    if getattr(dataloader, "num_workers", 0) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    return dataloader
