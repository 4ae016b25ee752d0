"""Full sharding of any torch module in a plain training loop, without Lightning.

::

    sharded = megalight.fully_shard(model, optimizer)
    for batch in batches:
        model(batch).loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    sharded.save("checkpoint")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from megalight.checkpoint.run import PlainRun
from megalight.errors import ConfigurationError
from megalight.optim import shard_optimizer
from megalight.optim.sharded import sharding_of
from megalight.parallel.data_parallel import DataParallelOptions, clip_coefficient
from megalight.parallel.data_parallel.grad_norm import refuse_clipping
from megalight.parallel.initial_values import broadcast_values
from megalight.parallel.mesh import ParallelMesh, uses_backend
from megalight.parallel.model import ParallelModel
from megalight.parallel.run_engine import engine_over

log = logging.getLogger(__name__)

SPLITS = ("tp", "cp", "pp", "ep")
"""Usual names of dims of a mesh over which a module, or its tokens, are split."""
UNCLIPPED = (
    "cannot clip a module under megalight.fully_shard: a rank has gradients of its shards only, and their sums over "
    "ranks are complete in optimizer.step(). Call sharded.clip_grad_norm_(max_norm) on all ranks instead (what "
    "fully_shard returned is `sharded`)."
)
"""Why torch's functions that clip are refused for its parameters."""


def fully_shard(
    module: nn.Module,
    optimizer: Optimizer,
    mesh: ParallelMesh | DeviceMesh | None = None,
    *,
    units: Sequence[str | type[nn.Module]] = (),
    data_parallel: DataParallelOptions | None = None,
    average: bool = True,
    broadcast_buffers: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> FullyShard:
    """Shard parameters, gradients and optimizer state of a module over all ranks; module and optimizer stay in use.

    All ranks call this together, after ``torch.distributed.init_process_group``, and then run the module equally often.
    A module with values gets those of rank 0. One on the meta device is drawn shard by shard, so that no rank ever
    holds it whole.

    Args:
        module: changed in place.
        optimizer: over ``module.parameters()``, in any parameter groups; it updates each element by itself (Adam, SGD).
        mesh: the ranks; None: all of them hold replicas. A ``DeviceMesh`` over all ranks has one dim, or two as for
            torch's ``fully_shard``: replicas of all shards, and the shards (hybrid sharding).
        units: classes of the modules that are sharded and gathered as a whole, or their names. Empty: repeated layers.
        data_parallel: further options; the level is ``optim_grads_params`` unless they name another one than ``optim``.
        average: gradients are means over ranks, for losses that are means over each rank's batch. False: sums.
        broadcast_buffers: whether all ranks take over the buffers of rank 0 (running statistics of batch norms, say)
            after each step, as under ``DistributedDataParallel``.
        device: of the parameters; None: that of a ``DeviceMesh``, or where they are. A module on the meta device, or in
            host memory where the process group speaks NCCL only, goes to the current GPU.
        dtype: of floating-point parameters; None: as they are. bfloat16 ones get float32 masters.
        seed: of the initial values of a module on the meta device.

    Raises:
        ConfigurationError: the optimizer cannot step on shards, or lacks a trainable parameter; or a mesh that splits
            the module, or lacks ranks.
    """
    given = data_parallel or DataParallelOptions()
    if isinstance(mesh, DeviceMesh):
        given = replace(given, replicate=_replicas(mesh, given.replicate))
        device = device or _device_of(module, mesh.device_type)
        mesh = None
    if mesh is None:
        mesh = ParallelMesh(dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else ParallelMesh()
    if mesh.tp * mesh.cp * mesh.pp > 1:
        raise ConfigurationError(
            f"fully_shard got the mesh {mesh.describe()}, and splits no module; use megalight.parallelize and "
            "megalight.Training with data_parallel=DataParallelOptions(level='optim_grads_params')."
        )
    # The default level shards less than the name of the function promises.
    level = "optim_grads_params" if given.level == DataParallelOptions.level else given.level
    if level == "optim_grads_params" and given.reduce_each_micro_batch is None:
        # The loop does not say which backward pass is the last one, so whole gradients would be reduced after all of
        # them, with nothing to hide the messages.
        given = replace(given, reduce_each_micro_batch=True)
    given = given.finding_unused(True)
    return FullyShard(
        module,
        optimizer,
        mesh,
        replace(given, level=level, units=tuple(units) or given.units),
        average,
        broadcast_buffers,
        torch.device(device) if device is not None else _device_of(module),
        dtype,
        seed,
    )


class FullyShard(PlainRun):
    """A module that :func:`fully_shard` has sharded, with its optimizer.

    Gradients are reduced inside ``backward()`` and kept as shards, so ``parameter.grad`` is None. Backward passes
    before ``optimizer.step()`` add up, also those of a closure. ``optimizer.zero_grad()`` discards gradients; a step
    does so, too.

    Attributes:
        model: the module as a parallel model.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        mesh: ParallelMesh,
        options: DataParallelOptions,
        average: bool,
        broadcast_buffers: bool,
        device: torch.device,
        dtype: torch.dtype | None,
        seed: int,
    ) -> None:
        self.optimizer = optimizer
        # Before any layer is cut: ranks must begin from the same values.
        broadcast_values(module, device)
        before = list(module.parameters())
        self.model = ParallelModel.build(module, mesh, device=device, dtype=dtype, seed=seed, fill=False)
        moved = {id(old): new for old, new in zip(before, module.parameters(), strict=True)}
        for group in optimizer.param_groups:
            # The optimizer may hold parameters that are not of this module; those stay.
            group["params"] = [moved.get(id(parameter), parameter) for parameter in group["params"]]
        self.engine = engine_over([self.model], [group["params"] for group in optimizer.param_groups], options)
        # The optimizer of the user steps by itself, so the sums are completed in front of it. This hook comes first:
        # those of the shards send the sums to masters in host memory.
        optimizer.register_step_pre_hook(self._before_step)
        shard_optimizer(optimizer, self.engine)
        self._whole = self.engine.parameters.gatherer.buckets_of(module.parameters())
        # Made once: a copy from the host to the device would make the host wait in every step.
        self._scale = torch.tensor(1 / mesh.dp, dtype=torch.float64, device=self.engine.device) if average else None
        self._reduced = False
        self._broadcast_buffers = broadcast_buffers
        self.engine.zero_grad()
        # Weights of a step may still be on their way when the next forward begins.
        module.register_forward_pre_hook(lambda *_: self.engine.sync_parameters(self._whole))
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        # Gradients lie in the engine's buffers, which torch's own method would not clear.
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        compiled = {
            type(part).__name__ for part in module.modules() if part._compiled_call_impl and part._forward_pre_hooks
        }
        if compiled:
            log.warning(
                f"{', '.join(sorted(compiled))}.compile() also traces the hooks that gather parameters, and compiles "
                "anew for each module. Write module.forward = torch.compile(module.forward) instead."
            )
        refuse_clipping(module.parameters(), UNCLIPPED)
        self._loading = False
        # Of every submodule: a script may also ask a layer alone.
        for part in module.modules():
            part.register_state_dict_pre_hook(self._check_readable)  # type: ignore[no-untyped-call]
            part.register_load_state_dict_pre_hook(self._check_loading)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a global norm of ``max_norm`` at most; return the norm before, on the device."""
        self._reduce()
        norm = self.engine.grad_norm()
        self.engine.scale_gradients(clip_coefficient(norm, max_norm))
        return norm

    def full_parameters(self) -> AbstractContextManager[None]:
        """Make all parameters readable inside, on all ranks together. What is written there is lost."""
        self.engine.sync_parameters()
        return self.model.full_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the module's whole ``state_dict`` in host memory on rank 0, and an empty one on the others.

        All ranks call this together. It takes memory for the whole module, on each rank's device too; :meth:`save`
        does not.
        """
        with self.full_parameters():
            if not _first():
                return {}
            # Copies: tied weights become two of them, and what was gathered is about to go.
            return {
                name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in self.model.root.state_dict().items()
            }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole ``state_dict`` of the module into parameters and masters; the optimizer's averages stay.

        All ranks call this together. Rank 0's values count: the others may pass an empty one.

        Args:
            strict: whether names must be those of the module.

        Raises:
            ConfigurationError: on all ranks, before anything is written: names or shapes are not those of the module.
        """
        with self.full_parameters():
            trouble = [self._trouble(state, strict) if _first() else ""]
            if dist.is_initialized():
                dist.broadcast_object_list(trouble, 0, device=self.engine.device)
            if trouble[0]:
                raise ConfigurationError(trouble[0])
            if _first():
                self._loading = True
                try:
                    self.model.root.load_state_dict(state, strict=False)
                finally:
                    self._loading = False
            broadcast_values(self.model.root, self.engine.device)
            # Inside: afterwards only shards are left, which the masters would overwrite in the next step.
            self.engine.refresh_masters()

    def _trouble(self, state: Mapping[str, Any], strict: bool) -> str:
        """Return why a state cannot be loaded, or an empty text."""
        own = self.model.root.state_dict()
        for name, value in state.items():
            if isinstance(value, Tensor) and name in own and value.shape != own[name].shape:
                return f"{name} has the shape {list(value.shape)} in this state_dict and {list(own[name].shape)} here."
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if strict and (missing or unknown):
            return (
                f"This state_dict lacks {len(missing)} names of the module {missing[:3]}, and has {len(unknown)} that "
                f"the module lacks {unknown[:3]}. Pass strict=False to load the names that both have."
            )
        return ""

    def _check_readable(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse ``state_dict()`` where parameters are not whole: their values would be NaN. Wait for those that come.

        Weights of the last step may still be on their way.
        """
        unsharder = None if self.model.shards is None else self.model.shards.unsharder
        # With `keep_vars` the caller, as our own code, is after the names.
        if unsharder is not None and not unsharder.whole and not keep_vars:
            raise ConfigurationError(
                f"state_dict() of a sharded {type(module).__name__}, whose parameters are not whole here. Call "
                "sharded.state_dict() on all ranks (what fully_shard returned is `sharded`), or this method inside "
                "`with sharded.full_parameters():`, as save_pretrained() needs it."
            )
        # Waits for messages of the last step, and sends none: one rank may call this alone.
        self.engine.sync_parameters()

    def _check_loading(self, module: nn.Module, *_: Any) -> None:
        """Refuse ``module.load_state_dict()``: masters would not follow, and the next step would undo it."""
        if not self._loading:
            raise ConfigurationError(
                f"load_state_dict() of a sharded {type(module).__name__} does not reach its optimizer's masters. Call "
                "sharded.load_state_dict(state) on all ranks (what fully_shard returned is `sharded`)."
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run a step's closure first, as it may run backward passes, and complete the sums over ranks."""
        closure = args[1] if len(args) > 1 else named.pop("closure", None)
        if closure is None:
            self._reduce()
            return None
        first = [self._evaluate(closure)]

        def evaluate() -> Any:
            if first:
                return first.pop()
            sharding = sharding_of(optimizer)
            assert sharding is not None
            with sharding.interrupted():  # the optimizer has moved the masters since
                return self._evaluate(closure)

        return (args[0], evaluate, *args[2:]), named

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._reduce()
        return loss

    def _reduce(self) -> None:
        """Complete the sums over ranks, once per step."""
        if self._reduced:
            return
        self._reduced = True
        self.engine.finish_grad_sync()
        # After the reduction, in one pass over the shards, and not in each backward.
        if self._scale is not None:
            self.engine.scale_gradients(self._scale)

    def _stepped(self) -> None:
        self.engine.publish()
        if self._broadcast_buffers:
            self.model.broadcast_buffers()
        self._zero_grad()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._reduced = False
        self.engine.zero_grad()


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _replicas(mesh: DeviceMesh, given: int) -> int:
    """Return the number of groups of ranks that each hold all shards."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    splits = [name for name, size in zip(names, mesh.shape, strict=True) if name in SPLITS and size > 1]
    if mesh.ndim > 2 or splits:
        sizes = dict(zip(names, mesh.shape, strict=True)) if mesh.mesh_dim_names else tuple(mesh.shape)
        raise ConfigurationError(
            f"fully_shard got a DeviceMesh of {sizes}, and splits no module. Pass its data-parallel dims only, "
            "one (shards) or two (replicas, shards), or use megalight.parallelize."
        )
    ranks, world = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if ranks != list(range(world)):
        raise ConfigurationError(
            f"fully_shard got a DeviceMesh over ranks {ranks}, and there are {world}. It needs all of them, in order: "
            f"init_device_mesh({mesh.device_type!r}, ({world},))."
        )
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    if given not in (1, replicas):
        raise ConfigurationError(
            f"data_parallel.replicate={given}, and the DeviceMesh has {replicas} groups of replicas; leave replicate "
            "out."
        )
    return replicas


def _device_of(module: nn.Module, kind: str | None = None) -> torch.device:
    """Return the device for a module: its own, if ranks can send from there, else the current one of another kind.

    Args:
        kind: type of the device of a ``DeviceMesh``; None: there is no such mesh.
    """
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    backend = str(dist.get_backend()) if dist.is_initialized() else ""
    if device.type == "meta":
        kind = kind or ("cuda" if uses_backend("nccl", backend) else "cpu")
    # NCCL sends from device memory only.
    elif device.type == "cpu" and uses_backend("nccl", backend) and not uses_backend("gloo", backend):
        kind = "cuda"
    if kind in (None, device.type):
        return device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
