"""Megatron-core's GPT with its own optimizer and data parallelism, with TransformerEngine's layers or its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.meter import Meter, random_rows
from benchmarks.peers import world_size
from benchmarks.peers.sharded_llama import process_group
from benchmarks.step import Step, only_of
from megalight.imports import has


class Runner:
    """Tensor parallelism with sequence parallelism, and data parallelism with a sharded optimizer.

    Args:
        te: whether to use TransformerEngine's layers and fused operations.
    """

    def __init__(self, te: bool) -> None:
        self.te = te

    def why_not(self, step: Step) -> str | None:
        if not (has("megatron") and has("megatron.core")):
            return "megatron-core is not installed"
        if self.te and not has("transformer_engine"):
            return "transformer_engine is not installed"
        if step.device != "cuda":
            return "it needs a GPU"
        if step.precision == "fp32":
            return "this runner has bf16 and fp8"
        if step.precision == "fp8" and not self.te:
            return "FP8 needs TransformerEngine's layers"
        if step.precision == "fp8" and step.recipe not in ("tensorwise", "delayed"):
            return "this runner has the FP8 recipes tensorwise and delayed"
        if step.experts and not self.te:
            return "experts need TransformerEngine's grouped products"
        return only_of(step, ("tp", "experts", "ep"))

    def check(self, step: Step) -> dict[str, Any]:
        return {}

    def run(self, step: Step, meter: Meter) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with process_group(step):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=step.tp, expert_model_parallel_size=step.ep
            )
            model_parallel_cuda_manual_seed(1)
            train = self.build(step)
            batches = micro_batches(step, parallel_state.get_data_parallel_rank())
            meter.start()
            for _ in range(meter.total):
                train(batches)
                meter.tick()
            meter.close()
            parallel_state.destroy_model_parallel()

    def build(self, step: Step) -> Callable[[Iterator[Any]], None]:
        """Build everything on this GPU, and return a function that does one optimizer step."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed import finalize_model_grads as finalize
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt import gpt_layer_specs as specs
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        replicated = world_size() > step.tp
        config = self.config(step)
        layers = (
            specs.get_gpt_layer_with_transformer_engine_spec(
                num_experts=step.experts or None, moe_grouped_gemm=bool(step.experts)
            )
            if self.te
            else specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        )
        model = GPTModel(
            config,
            layers,
            step.vocab,
            step.seq,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        wrapped = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=replicated,
                overlap_param_gather=replicated,
            ),
            model.cuda().bfloat16(),
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                bf16=True,
                params_dtype=torch.bfloat16,
                clip_grad=1.0,
                use_distributed_optimizer=True,
                overlap_param_gather=replicated,
            ),
            [wrapped],
        )
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize
        if replicated:
            config.no_sync_func = wrapped.no_sync
            config.grad_sync_func = wrapped.start_grad_sync
            config.param_sync_func = wrapped.start_param_sync
        schedule = get_forward_backward_func()
        positions = torch.arange(step.seq, device="cuda")[None]

        def forward(batches: Iterator[Any], part: Any) -> Any:
            tokens, labels = next(batches)
            return part(tokens, positions, None, labels=labels), lambda losses: (losses.float().mean(), {})

        def train(batches: Iterator[Any]) -> None:
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            schedule(
                forward_step_func=forward,
                data_iterator=batches,
                model=[wrapped],
                num_microbatches=step.micro,
                seq_length=step.seq,
                micro_batch_size=step.mbs,
                forward_only=False,
            )
            optimizer.step()

        return train

    def config(self, step: Step) -> Any:
        """Return the fastest settings that this Megatron-core and the installed packages allow."""
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=step.layers,
            hidden_size=step.hidden,
            ffn_hidden_size=step.ffn,
            num_attention_heads=step.heads,
            num_query_groups=step.kv,
            kv_channels=step.head_dim,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            tensor_model_parallel_size=step.tp,
            sequence_parallel=step.tp > 1,
            bias_activation_fusion=True,
            masked_softmax_fusion=True,
            apply_rope_fusion=self.te,
            gradient_accumulation_fusion=self.te and has("fused_weight_gradient_mlp_cuda"),
            cross_entropy_loss_fusion=self.te,
            cross_entropy_fusion_impl="te" if self.te else "native",
            fp8="hybrid" if step.precision == "fp8" else None,
            fp8_recipe=step.recipe,
            **self.experts(step),
        )

    def experts(self, step: Step) -> dict[str, Any]:
        """Return the settings of layers with experts."""
        if not step.experts:
            return {}
        return {
            "num_moe_experts": step.experts,
            "moe_ffn_hidden_size": step.ffn,
            "moe_router_topk": step.topk,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_permute_fusion": True,
            "moe_router_fusion": True,
            "moe_router_dtype": "fp32",
            "moe_router_force_load_balancing": not step.natural,
            "expert_model_parallel_size": step.ep,
        }


def micro_batches(step: Step, replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random tokens and labels endlessly, different for each replica."""
    seed = 10**6 * replica
    while True:
        ids = random_rows(step, step.mbs, seed).pin_memory().cuda(non_blocking=True)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        seed += 1
