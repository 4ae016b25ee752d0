"""MegatronFSDPStrategy: shard parameters, gradients and optimizer state of any LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

from torch import nn

from megalight.errors import ConfigurationError, LayoutError, nearest
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.data_parallel.options import Level
from megalight.parallel.mesh import ParallelMesh
from megalight.strategies.megatron import MegatronStrategy

LEVELS: dict[str, Level] = {
    "FULL_SHARD": "optim_grads_params",
    "HYBRID_SHARD": "optim_grads_params",
    "SHARD_GRAD_OP": "optim_grads",
    "NO_SHARD": "no_shard",
}
OWNED = {
    "level": "sharding_strategy",
    "units": "auto_wrap_policy",
    "replicate": "device_mesh",
    "reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
}
"""Options of data parallelism that are arguments of the strategy."""


class MegatronFSDPStrategy(MegatronStrategy):
    """Fully sharded data parallelism: each rank keeps its share of parameters, gradients and optimizer state.

    It trains any LightningModule with an ordinary ``configure_optimizers`` and without a plan. The arguments have the
    names of those of Lightning's ``FSDPStrategy`` where they mean the same. Layers are gathered just before they run,
    while the one before computes. docs/data-parallelism.md describes how.

    Args:
        sharding_strategy: ``FULL_SHARD``: parameters, gradients and optimizer state. ``SHARD_GRAD_OP``: gradients and
            optimizer state. ``NO_SHARD``: nothing. ``HYBRID_SHARD``: as ``FULL_SHARD``, inside groups of replicas.
        device_mesh: for ``HYBRID_SHARD``: number of groups, and number of data-parallel ranks in each.
        auto_wrap_policy: classes of the modules that are sharded and gathered as a whole (or their names). None: the
            repeated layers of the model.
        reduce_scatter_with_fp32_accumulation: sum gradients over ranks in float32, also if they travel in bfloat16.
        data_parallel: further options, such as ``gradient_dtype``. Its ``level`` and ``units`` follow from the above.
        **options: arguments of :class:`~megalight.strategies.MegatronStrategy`: tensor and context parallelism,
            recompute, ``micro_batch_size`` and so on.

    Raises:
        ConfigurationError: an unknown ``sharding_strategy`` or argument, or options that cannot be combined.
    """

    strategy_name = "megatron_fsdp"

    def __init__(
        self,
        sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD",
        auto_wrap_policy: Sequence[str | type[nn.Module]] | None = None,
        reduce_scatter_with_fp32_accumulation: bool = False,
        device_mesh: tuple[int, int] | None = None,
        data_parallel: DataParallelOptions | None = None,
        **options: Any,
    ) -> None:
        if sharding_strategy not in LEVELS:
            raise ConfigurationError(
                f"sharding_strategy={sharding_strategy!r}; it must be one of {', '.join(LEVELS)}."
                + nearest(sharding_strategy, LEVELS)
            )
        # Classes are known before anything is built; a function would be asked module by module.
        if callable(auto_wrap_policy):
            raise ConfigurationError(
                f"auto_wrap_policy={auto_wrap_policy!r} is a function; pass the classes to shard, as in "
                "auto_wrap_policy=[Block], or leave it out to shard repeated layers."
            )
        # Both or neither: groups without sizes, or sizes without groups, are a mistake.
        if (sharding_strategy == "HYBRID_SHARD") != (device_mesh is not None):
            raise ConfigurationError(
                f"sharding_strategy={sharding_strategy!r} with device_mesh={device_mesh}: HYBRID_SHARD needs "
                "device_mesh=(number of groups, ranks in each group), and the others have no groups."
            )
        if device_mesh is not None and not (isinstance(device_mesh, Sequence) and len(device_mesh) == 2):
            raise ConfigurationError(
                f"device_mesh={device_mesh}; pass two sizes, (number of groups, ranks in each group). The mesh "
                "itself is made when the ranks are known."
            )
        given = data_parallel or DataParallelOptions()
        default = DataParallelOptions()
        # Only what differs from the defaults was set by the user.
        owned = [name for name in OWNED if getattr(given, name) != getattr(default, name)]
        if owned:
            raise ConfigurationError(
                f"data_parallel.{owned[0]} is set; MegatronFSDPStrategy has an argument for it: {OWNED[owned[0]]}. Set "
                "that instead."
            )
        sharded = replace(
            given,
            level=LEVELS[sharding_strategy],
            units=tuple(auto_wrap_policy or ()),
            replicate=1 if device_mesh is None else device_mesh[0],
            reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation,
        )
        self.device_mesh = device_mesh
        super().__init__(data_parallel=sharded, **options)

    def grid(self, world_size: int, rank: int = 0) -> ParallelMesh:
        """Make the mesh of ``world_size`` ranks, as seen by ``rank``.

        Raises:
            LayoutError: the ranks do not divide into the groups of ``device_mesh``.
        """
        # The mesh first, as it tells how many ranks are left for data parallelism.
        mesh = super().grid(world_size, rank)
        if self.device_mesh is not None and mesh.dp != prod(self.device_mesh):
            raise LayoutError(
                f"device_mesh={self.device_mesh} describes {prod(self.device_mesh)} data-parallel ranks, and there are "
                f"{mesh.dp}; choose sizes whose product is {mesh.dp}."
            )
        return mesh

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        # `override`: a second import of the plugin must not fail.
        registry.register("megatron_fsdp", cls, "Fully sharded data parallelism for any LightningModule", override=True)
