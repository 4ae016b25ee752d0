"""``transformers``' Llama with the package ``megatron-fsdp``, which shards everything; each layer compiled."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.meter import Meter
from benchmarks.peers import world_size
from benchmarks.peers.fsdp2 import process_group
from benchmarks.peers.huggingface import llama, loss_of
from benchmarks.step import Step, only_of
from megalight.imports import has


class Runner:
    """bfloat16 parameters and messages, float32 masters and sums, two buffers of units in turn."""

    def why_not(self, step: Step) -> str | None:
        for package in ("transformers", "megatron_fsdp"):
            if not has(package):
                return f"{package.replace('_', '-')} is not installed"
        if step.device != "cuda" or step.precision != "bf16":
            return "this runner is of GPUs and bf16"
        return only_of(step, ("level",))

    def check(self, step: Step) -> dict[str, Any]:
        return {}

    def run(self, step: Step, meter: Meter) -> None:
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with process_group("nccl") as rank:
            model: Any = llama(step).bfloat16()
            for layer in model.model.layers:
                layer.compile()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            model, optimizer = fully_shard(
                model,
                optimizer,
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
            meter.start()
            for index in range(meter.total):
                for micro in range(step.micro):
                    model.set_model_auto_sync(micro == step.micro - 1)
                    seed = (index * step.micro + micro) * world_size() + rank
                    (loss_of(model, step, seed) / step.micro).backward()
                # Without clipping, which its gradients do not offer to torch's function: that favours this peer.
                optimizer.step()
                optimizer.zero_grad()
                meter.tick()
            meter.close()
