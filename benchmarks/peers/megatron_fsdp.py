"""``transformers``' Llama with the package ``megatron-fsdp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from benchmarks.meter import Meter, leaving_nothing
from benchmarks.peers import world_size
from benchmarks.peers.sharded_llama import Sharded, ShardedLlama
from benchmarks.step import Step


class Runner(ShardedLlama):
    """bfloat16 parameters and messages, float32 masters and sums, two buffers of units in turn."""

    package = "megatron_fsdp"

    def check(self, step: Step) -> dict[str, Any]:
        with leaving_nothing(step):
            return super().check(step)

    def run(self, step: Step, meter: Meter) -> None:
        # It keeps parameters and optimizer state after the last reference of ours is gone.
        with leaving_nothing(step):
            super().run(step, meter)

    def why_not(self, step: Step) -> str | None:
        if step.device != "cuda" or step.precision != "bf16":
            return "this runner is of GPUs and bf16"
        return super().why_not(step)

    def shard(self, model: Any, step: Step, optimizer: Callable[..., Optimizer]) -> Sharded:
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        sharded, stepping = fully_shard(
            model.bfloat16(),
            optimizer(model.parameters()),
            # It asks for a dim of tensor parallelism, also where there is none.
            device_mesh=init_device_mesh("cuda", (world_size(), 1), mesh_dim_names=("dp", "tp")),
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=[LlamaDecoderLayer],
            zero_dp_strategy=3,
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32,
                main_grads_dtype=torch.float32,
                grad_comm_dtype=torch.bfloat16,
            ),
            fsdp_double_buffer=True,
        )
        # Its gradients do not offer what torch's clipping needs. Without clipping, this peer has less to do.
        return Sharded(sharded, stepping, sharded.set_model_auto_sync, None)
