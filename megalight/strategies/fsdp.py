"""MegatronFSDPStrategy: shard parameters, gradients and optimizer state of any LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from megalight.errors import ConfigurationError, nearest
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.data_parallel.options import Level
from megalight.strategies.megatron import MegatronStrategy

LEVELS: dict[str, Level] = {
    "FULL_SHARD": "optim_grads_params",
    "SHARD_GRAD_OP": "optim_grads",
    "NO_SHARD": "no_shard",
}


class MegatronFSDPStrategy(MegatronStrategy):
    """Fully sharded data parallelism: each rank keeps its share of parameters, gradients and optimizer state.

    It trains any LightningModule with an ordinary ``configure_optimizers`` and without a plan. The arguments have the
    names of those of Lightning's ``FSDPStrategy`` where they mean the same. Layers are gathered just before they run,
    while the one before computes. docs/data-parallelism.md describes how.

    Args:
        sharding_strategy: ``FULL_SHARD``: parameters, gradients and optimizer state. ``SHARD_GRAD_OP``: gradients and
            optimizer state. ``NO_SHARD``: nothing.
        auto_wrap_policy: classes of the modules that are sharded and gathered as a whole (or their names). None: the
            repeated layers of the model.
        reduce_scatter_with_fp32_accumulation: sum gradients over ranks in float32, also if they travel in bfloat16.
        data_parallel: further options, such as ``gradient_dtype``. Its ``level`` and ``units`` follow from the above.
        **options: arguments of :class:`~megalight.strategies.MegatronStrategy`: tensor and context parallelism,
            recompute, ``micro_batch_size`` and so on.

    Raises:
        ConfigurationError: an unknown ``sharding_strategy``, or options that cannot be combined.
    """

    strategy_name = "megatron_fsdp"

    def __init__(
        self,
        sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = "FULL_SHARD",
        auto_wrap_policy: Sequence[str | type[nn.Module]] | None = None,
        reduce_scatter_with_fp32_accumulation: bool = False,
        data_parallel: DataParallel | None = None,
        **options: Any,
    ) -> None:
        if sharding_strategy not in LEVELS:
            raise ConfigurationError(
                f"sharding_strategy={sharding_strategy!r}; it must be one of {', '.join(LEVELS)}."
                + nearest(sharding_strategy, LEVELS)
            )
        if callable(auto_wrap_policy):
            raise ConfigurationError(
                f"auto_wrap_policy={auto_wrap_policy!r} is a function; pass the classes to shard, as in "
                "auto_wrap_policy=[Block], or leave it out to shard repeated layers."
            )
        given = data_parallel or DataParallel()
        if given.level != DataParallel.level or given.units or given.reduce_scatter_with_fp32_accumulation:
            raise ConfigurationError(
                "data_parallel sets level, units or reduce_scatter_with_fp32_accumulation. Set these as arguments of "
                "MegatronFSDPStrategy: sharding_strategy, auto_wrap_policy, reduce_scatter_with_fp32_accumulation."
            )
        sharded = replace(
            given,
            level=LEVELS[sharding_strategy],
            units=tuple(auto_wrap_policy or ()),
            reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation,
        )
        super().__init__(data_parallel=sharded, **options)

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        registry.register("megatron_fsdp", cls, "Fully sharded data parallelism for any LightningModule", override=True)
