"""Arguments of Lightning's own strategies that ours do not take, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from megalight.errors import ConfigurationError, nearest

_NOTHING = "leave it out"
_RECOMPUTE = "recompute=RecomputeOptions(granularity='full', num_layers=1)"
_OFFLOAD = (
    "data_parallel=DataParallelOptions(optimizer_offload_fraction=1.0), which keeps masters and optimizer state in "
    "host memory"
)
_IN_MEMORY = f"{_NOTHING}: parameters are too slow in host memory or on disk. For optimizer state, {_OFFLOAD}"
_HOST = f"{_NOTHING}: buffers in host memory are pinned and of the size that is needed"
_BUCKETS = "data_parallel=DataParallelOptions(bucket_size=...), a number of elements"
_FLAT = f"{_NOTHING}: gradients always live in flat buffers"
_SCALE = f"{_NOTHING}: the scale of Trainer(precision='16-mixed') adapts"
_HOOK = (
    "data_parallel=DataParallelOptions(reduce_dtype='bfloat16') to send gradients in bfloat16; other hooks are not "
    "called"
)
_WHOLE = (
    "data_parallel=DataParallelOptions(units=...), the classes to shard (auto_wrap_policy of MegatronFSDPStrategy); "
    "what is outside of these stays whole"
)
_PREFETCH = "data_parallel=DataParallelOptions(prefetch=...), the number of units that are gathered ahead"
_FOLDER = f"{_NOTHING}: each checkpoint is a folder that any number of ranks reads, whole or in shards"
_EQUAL = f"{_NOTHING}: all ranks begin from the same values"

DDP = {
    "bucket_cap_mb": _BUCKETS,
    "ddp_comm_hook": _HOOK,
    "ddp_comm_state": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "find_unused_parameters": (
        "data_parallel=DataParallelOptions(find_unused_parameters=True), which a plain LightningModule has by default"
    ),
    "gradient_as_bucket_view": _FLAT,
    "init_sync": _EQUAL,
    "model_averaging_period": f"{_NOTHING}: weights are equal after each step",
    "static_graph": _FLAT,
}
FSDP = {
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_policy": _RECOMPUTE,
    "auto_wrap_policy": "MegatronFSDPStrategy(auto_wrap_policy=...)",
    "backward_prefetch": _PREFETCH,
    "cpu_offload": f"{_OFFLOAD}; parameters are too slow there",
    "device_id": "Trainer(devices=...)",
    "device_mesh": "MegatronFSDPStrategy(sharding_strategy='HYBRID_SHARD', device_mesh=...)",
    "forward_prefetch": _PREFETCH,
    "ignored_modules": _WHOLE,
    "ignored_states": _WHOLE,
    "limit_all_gathers": f"{_NOTHING}: buffers are fixed, and gathers wait for them",
    "mixed_precision": "Trainer(precision='bf16-mixed'), and data_parallel=DataParallelOptions(gradient_dtype=...)",
    "param_init_fn": f"{_NOTHING}: modules on the meta device are drawn shard by shard",
    "process_group": "tensor_parallel and the like (or device_mesh): the mesh makes all groups",
    "reduce_scatter_with_fp32_accumulation": "data_parallel="
    "DataParallelOptions(reduce_scatter_with_fp32_accumulation=True)",
    "sharding_strategy": "MegatronFSDPStrategy(sharding_strategy=...), or data_parallel=DataParallelOptions(level=...)",
    "state_dict_type": _FOLDER,
    "sync_module_states": _EQUAL,
    "timeout": "timeout_seconds, a number",
    "use_orig_params": f"{_NOTHING}: parameters keep their identity, so optimizers may have any groups",
}
DEEPSPEED = {
    "allgather_bucket_size": _BUCKETS,
    "allgather_partitions": f"{_NOTHING}: parameters are gathered bucket by bucket",
    "block_size": _IN_MEMORY,
    "config": "the arguments of this strategy and of Trainer one by one",
    "contiguous_gradients": _FLAT,
    "contiguous_memory_optimization": _RECOMPUTE,
    "cpu_checkpointing": "the callback megalight.callbacks.ActivationOffload",
    "exclude_frozen_parameters": f"{_NOTHING}: megalight.callbacks.Adapters saves adapters alone",
    "hysteresis": _SCALE,
    "initial_scale_power": _SCALE,
    "load_full_weights": _FOLDER,
    "logging_batch_size_per_gpu": _NOTHING,
    "logging_level": "Python's logging.getLogger('megalight').setLevel(...)",
    "loss_scale": _SCALE,
    "loss_scale_window": _SCALE,
    "max_in_cpu": _IN_MEMORY,
    "min_loss_scale": _SCALE,
    "nvme_path": _IN_MEMORY,
    "offload_optimizer": _OFFLOAD,
    "offload_optimizer_device": _OFFLOAD,
    "offload_parameters": _IN_MEMORY,
    "offload_params_device": _IN_MEMORY,
    "optimizer_buffer_count": _HOST,
    "overlap_comm": "data_parallel=DataParallelOptions(overlap_grad_reduce=...), which is on by default",
    "overlap_events": _IN_MEMORY,
    "params_buffer_count": _IN_MEMORY,
    "params_buffer_size": _IN_MEMORY,
    "partition_activations": "sequence_parallel=True beside tensor_parallel",
    "pin_memory": _HOST,
    "queue_depth": _IN_MEMORY,
    "reduce_bucket_size": _BUCKETS,
    "reduce_scatter": f"{_NOTHING}: each level has the fastest collective",
    "remote_device": _IN_MEMORY,
    "single_submit": _IN_MEMORY,
    "stage": "data_parallel=DataParallelOptions(level=...): stage 1 is 'optim', 2 'optim_grads', 3 "
    "'optim_grads_params'",
    "sub_group_size": _IN_MEMORY,
    "synchronize_checkpoint_boundary": _NOTHING,
    "thread_count": _IN_MEMORY,
    "zero_allow_untested_optimizer": f"{_NOTHING}: any element-wise optimizer is divided",
    "zero_optimization": "data_parallel=DataParallelOptions(level=...)",
}
MODEL_PARALLEL = {
    "data_parallel_size": f"{_NOTHING}: replicas are what the other degrees leave of the ranks",
    "save_distributed_checkpoint": _FOLDER,
    "tensor_parallel_size": "tensor_parallel",
}
NEMO = {
    "context_parallel_size": "context_parallel",
    "ddp": "data_parallel=DataParallelOptions(...)",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "pipeline_dtype": f"{_NOTHING}: messages have the dtype of the activations",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "tensor_model_parallel_size": "tensor_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
}
INSTEAD = {**NEMO, **MODEL_PARALLEL, **DEEPSPEED, **FSDP, **DDP}
"""Arguments of other strategies that mean something else here, or nothing -> what to write instead."""


def check_arguments(strategy: type, given: Iterable[str]) -> None:
    """Refuse arguments that a strategy does not have.

    Raises:
        ConfigurationError: says what to write instead, or the nearest name.
    """
    classes = [cls for cls in strategy.__mro__ if "__init__" in vars(cls)]
    if not classes[0].__module__.startswith("megalight."):  # a user's own class may take anything
        return
    known: set[str] = set()
    for cls in classes:
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        known |= {parameter.name for parameter in parameters}
        # Without ``**options`` nothing is passed on to the class above.
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    for name in given:
        if name not in known:
            # Names of other strategies first: they are no misspelled ones of ours.
            use = INSTEAD.get(name, f"see its documentation.{nearest(name, known)}")
            raise ConfigurationError(f"{strategy.__name__} has no argument {name!r}. Instead: {use}")
