"""Megatron-core's GPT with its own optimizer and data parallelism, with TransformerEngine's layers or its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.meter import Meter, random_rows
from benchmarks.peers import world_size
from benchmarks.peers.sharded_llama import process_group
from benchmarks.step import Step, only_of
from megalight.imports import has

CONTEXT = {"auto": "p2p", "ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
"""Kind of context parallelism -> the name that TransformerEngine's attention has for it."""


class Runner:
    """Tensor parallelism with sequence parallelism, context and pipeline parallelism, and a sharded optimizer.

    Pipelines are 1F1B, or interleaved where the layout has several chunks for each rank. Where a step recomputes
    anything, MLPs are recomputed; norms are computed inside TransformerEngine's products. Steps are eager, and NCCL
    gathers parameters, also where Megalight has CUDA graphs or copy engines (``gathers``).

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
        if step.schedule not in ("auto", "1f1b", "interleaved"):
            return f"this runner has no schedule {step.schedule!r}"
        if step.cp > 1 and (not self.te or step.kind not in CONTEXT):
            return f"context parallelism needs TransformerEngine's attention, and one of the kinds {', '.join(CONTEXT)}"
        if step.pp > 1 and step.layout is None and step.vpp > 1:
            return "chunks of a pipeline need a layout"
        ours = [word for word in step.sharding if not word.startswith("gathers:")]
        step = replace(step, graph=False, sharding=tuple(ours))
        return only_of(step, ("tp", "experts", "ep", "pp", "vpp", "cp", "kind", "layout", "schedule", "recompute"))

    def check(self, step: Step) -> dict[str, Any]:
        return {}

    def run(self, step: Step, meter: Meter) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with process_group(step):
            chunks = chunks_of(step)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=step.tp,
                pipeline_model_parallel_size=step.pp,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                context_parallel_size=step.cp,
                expert_model_parallel_size=step.ep,
            )
            model_parallel_cuda_manual_seed(1)
            train = self.build(step)
            replica, place = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
            batches = [micro_batches(step, replica, place) for _ in range(chunks)]
            meter.start()
            for _ in range(meter.total):
                train(batches)
                meter.tick()
            meter.close()
            parallel_state.destroy_model_parallel()

    def build(self, step: Step) -> Callable[[list[Iterator[Any]]], None]:
        """Build everything on this GPU, and return a function that does one optimizer step.

        It takes micro-batches for each chunk of this rank.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed import finalize_model_grads as finalize
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt import gpt_layer_specs as specs
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        replicated, chunks = world_size() > step.tp * step.pp, chunks_of(step)
        config = self.config(step)
        layers = (
            specs.get_gpt_layer_with_transformer_engine_spec(
                num_experts=step.experts or None, moe_grouped_gemm=bool(step.experts)
            )
            if self.te
            else specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        )
        wrapped = []
        for chunk in range(chunks):
            stage = {"ignore_virtual": False, "vp_stage": chunk if chunks > 1 else None}
            model = GPTModel(
                config,
                layers,
                step.vocab,
                step.seq,
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=stage["vp_stage"],
            )
            options = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=replicated,
                overlap_param_gather=replicated,
            )
            wrapped.append(DistributedDataParallel(config, options, model.cuda().bfloat16(), chunk > 0))
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
            wrapped,
        )
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize
        if replicated:
            syncs = [(part.no_sync, part.start_grad_sync, part.start_param_sync) for part in wrapped]
            each = [found[0] if chunks == 1 else list(found) for found in zip(*syncs, strict=True)]
            config.no_sync_func, config.grad_sync_func, config.param_sync_func = each
        schedule = get_forward_backward_func()
        positions = torch.arange(step.seq // step.cp, device="cuda")[None]  # rotary embeddings count by themselves

        def forward(batches: Iterator[Any], part: Any) -> Any:
            tokens, labels = next(batches)
            return part(tokens, positions, None, labels=labels), lambda losses: (losses.float().mean(), {})

        def train(batches: list[Iterator[Any]]) -> None:
            for part in wrapped:
                part.zero_grad_buffer()
            optimizer.zero_grad()
            schedule(
                forward_step_func=forward,
                data_iterator=batches if chunks > 1 else batches[0],
                model=wrapped,
                num_microbatches=step.micro,
                seq_length=step.seq // step.cp,
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
            **self.pipeline(step),
            **self.context(step),
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

    def pipeline(self, step: Step) -> dict[str, Any]:
        """Return the settings of a pipeline. Messages of chunks run beside computation."""
        if step.pp == 1:
            return {}
        chunks = chunks_of(step)
        return {
            "pipeline_model_parallel_size": step.pp,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "pipeline_model_parallel_layout": step.layout,
            "overlap_p2p_comm": chunks > 1,
            "batch_p2p_comm": chunks == 1,
            "deallocate_pipeline_outputs": True,
        }

    def context(self, step: Step) -> dict[str, Any]:
        """Return the settings of context parallelism and recomputation."""
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]} if step.recompute else {}
        if step.cp == 1:
            return recompute
        return {"context_parallel_size": step.cp, "cp_comm_type": CONTEXT[step.kind], **recompute}

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


def chunks_of(step: Step) -> int:
    """Return the number of chunks of the model on each rank of a pipeline."""
    return stages_in(step.layout) // step.pp if step.pp > 1 and step.layout else 1


def stages_in(layout: str) -> int:
    """Return the number of stages in a pipeline layout, such as ``Et|(tt|)*11(ttt|)*3L``."""
    unrolled = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return unrolled.count("|") + 1


def micro_batches(step: Step, replica: int, place: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random tokens and labels ``[mbs, seq / cp]`` endlessly, different for each replica.

    Args:
        place: rank in the context-parallel group.
    """
    seed = 10**6 * replica
    while True:
        ids = random_rows(step, step.mbs, seed)
        tokens, labels = (share(part, step.cp, place) for part in (ids[:, :-1], ids[:, 1:]))
        yield tokens.pin_memory().cuda(non_blocking=True), labels.pin_memory().cuda(non_blocking=True)
        seed += 1


def share(rows: torch.Tensor, ranks: int, place: int) -> torch.Tensor:
    """Return a rank's tokens of ``rows [n, seq]``: one part of 2 x ranks, and the one as far from the end."""
    if ranks == 1:
        return rows.contiguous()
    parts = rows.unflatten(1, (2 * ranks, -1))
    return torch.cat([parts[:, place], parts[:, 2 * ranks - 1 - place]], 1)
