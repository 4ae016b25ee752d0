"""Migration table: names of Megatron-LM, NeMo, Lightning's strategies and transformers, and what they are called here.

Strategies and the command line answer an argument that they do not have from these tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable

from megalight.errors import ConfigurationError, nearest

MEGATRON = {
    "tensor_model_parallel_size": "trainer.strategy.tensor_parallel",
    "sequence_parallel": "trainer.strategy.sequence_parallel",
    "pipeline_model_parallel_size": "trainer.strategy.pipeline_parallel",
    "num_virtual_stages_per_pipeline_rank": "trainer.strategy.virtual_pipeline",
    "num_layers_per_virtual_pipeline_stage": "trainer.strategy.virtual_pipeline (stages per rank: layers of a rank "
    "divided by this number)",
    "pipeline_model_parallel_layout": "trainer.strategy.pipeline_layout",
    "decoder_first_pipeline_num_layers": "trainer.strategy.pipeline.first_layers",
    "decoder_last_pipeline_num_layers": "trainer.strategy.pipeline.last_layers",
    "account_for_embedding_in_pipeline_split": "trainer.strategy.pipeline.count_embedding",
    "account_for_loss_in_pipeline_split": "trainer.strategy.pipeline.count_loss",
    "microbatch_group_size_per_virtual_pipeline_stage": "trainer.strategy.pipeline.group_size",
    "context_parallel_size": "trainer.strategy.context_parallel",
    "cp_comm_type": "trainer.strategy.context.kind (p2p is ring; a2a is all_to_all)",
    "expert_model_parallel_size": "trainer.strategy.expert_parallel",
    "expert_tensor_parallel_size": "trainer.strategy.expert_tensor_parallel",
    "moe_token_dispatcher_type": "trainer.strategy.expert.dispatcher (all_to_all is the default; all_gather)",
    "moe_deepep_num_sms": "trainer.strategy.expert.num_sms",
    "moe_hybridep_num_sms": "trainer.strategy.expert.num_sms",
    "moe_shared_expert_overlap": "trainer.strategy.expert.shared_expert_overlap",
    "tp_comm_overlap": "trainer.strategy.tensor.overlap",
    "use_distributed_optimizer": "trainer.strategy.data_parallel.level (optim is the default)",
    "use_megatron_fsdp": "trainer.strategy.data_parallel.level (optim_grads_params)",
    "use_torch_fsdp2": "trainer.strategy.data_parallel.level (optim_grads_params)",
    "num_distributed_optimizer_instances": "trainer.strategy.data_parallel.replicate",
    "overlap_grad_reduce": "trainer.strategy.data_parallel.overlap_grad_reduce",
    "overlap_param_gather": "trainer.strategy.data_parallel.overlap_param_gather",
    "ddp_bucket_size": "trainer.strategy.data_parallel.bucket_size",
    "main_params_dtype": "trainer.strategy.data_parallel.master_dtype (float32 or bfloat16)",
    "grad_reduce_in_bf16": "trainer.strategy.data_parallel.gradient_dtype",
    "accumulate_allreduce_grads_in_fp32": "trainer.strategy.data_parallel.gradient_dtype (float32 is the default)",
    "optimizer_cpu_offload": "trainer.strategy.data_parallel.optimizer_offload_fraction",
    "optimizer_offload_fraction": "trainer.strategy.data_parallel.optimizer_offload_fraction",
    "no_check_for_nan_in_loss_and_grad": "trainer.strategy.data_parallel.check_for_nan (off by default)",
    "nccl_ub": "trainer.strategy.data_parallel.advanced.nccl_ub",
    "distributed_timeout_minutes": "trainer.strategy.timeout_seconds",
    "distributed_backend": "trainer.strategy.process_group_backend",
    "recompute_granularity": "trainer.strategy.recompute.granularity (full; selective, with modules)",
    "recompute_activations": "trainer.strategy.recompute.granularity (selective, with modules: [core_attn])",
    "recompute_method": "trainer.strategy.recompute.method",
    "recompute_num_layers": "trainer.strategy.recompute.num_layers",
    "recompute_modules": "trainer.strategy.recompute.modules",
    "micro_batch_size": "trainer.strategy.micro_batch_size",
    "global_batch_size": "data.global_batch_size",
    "train_iters": "trainer.max_steps",
    "eval_interval": "trainer.val_check_interval",
    "eval_iters": "trainer.limit_val_batches",
    "log_interval": "trainer.log_every_n_steps",
    "bf16": "trainer.precision (bf16-mixed)",
    "fp16": "trainer.precision (16-mixed)",
    "fp8_format": "trainer.plugins (MegatronLowPrecision)",
    "fp8_recipe": "trainer.plugins (MegatronLowPrecision)",
    "fp8_amax_history_len": "trainer.plugins (MegatronLowPrecision)",
    "fp8_param_gather": "trainer.plugins (MegatronLowPrecision)",
    "clip_grad": "trainer.gradient_clip_val",
    "seed": "data.seed (order of data), model.seed (initial weights), seed_everything (dropout); each is 1234 by "
    "default",
    "load": "ckpt_path (last, auto, a checkpoint or a folder)",
    "finetune": "model.weights",
    "pretrained_checkpoint": "model.weights",
    "save": "trainer.default_root_dir",
    "save_interval": "trainer.callbacks (lightning.pytorch.callbacks.ModelCheckpoint, its every_n_train_steps)",
    "exit_signal_handler": "trainer.callbacks (megalight.callbacks.Preemption)",
    "exit_duration_in_mins": "trainer.callbacks (megalight.callbacks.Preemption, its after_minutes)",
    "manual_gc": "trainer.callbacks (megalight.callbacks.GarbageCollection)",
    "profile": "trainer.callbacks (megalight.callbacks.ProfilerWindow)",
    "timing_log_level": "trainer.callbacks (megalight.callbacks.Throughput, its timers)",
    "enable_cuda_graph": "trainer.callbacks (megalight.callbacks.CUDAGraph)",
    "ckpt_format": "trainer.strategy.checkpoints.format",
    "async_save": "trainer.strategy.checkpoints.async_save",
    "tensorboard_dir": "trainer.logger (csv,tensorboard is the default)",
    "wandb_project": "trainer.logger (lightning.pytorch.loggers.WandbLogger, with its arguments)",
    "wandb_exp_name": "trainer.logger (lightning.pytorch.loggers.WandbLogger, with its arguments)",
    "lr": "model.optimizer.lr",
    "adam_beta1": "model.optimizer.betas",
    "adam_beta2": "model.optimizer.betas",
    "adam_eps": "model.optimizer.eps",
    "weight_decay": "model.optimizer.weight_decay",
    "no_decoupled_weight_decay": "model.optimizer.decoupled_weight_decay",
    "exp_avg_dtype": "model.optimizer.exp_avg_dtype, model.optimizer.exp_avg_sq_dtype",
    "exp_avg_sq_dtype": "model.optimizer.exp_avg_dtype, model.optimizer.exp_avg_sq_dtype",
    "muon_momentum": "model.optimizer.muon.momentum",
    "muon_use_nesterov": "model.optimizer.muon.nesterov",
    "muon_scale_mode": "model.optimizer.muon.scale (shape_scaling is original; spectral times 0.2 is match_rms_adamw)",
    "muon_num_ns_steps": "model.optimizer.muon.ns_steps",
    "qk_clip": "model.optimizer.muon.qk_clip (the threshold)",
    "qk_clip_threshold": "model.optimizer.muon.qk_clip (the threshold)",
    "lr_decay_style": "model.optimizer.schedule (CosineDecay, LinearDecay, WSD, InverseSqrtDecay, Constant)",
    "lr_warmup_iters": "model.optimizer.schedule (warmup of its class)",
    "lr_warmup_fraction": "model.optimizer.schedule (warmup of its class: the fraction times --lr-decay-iters)",
    "lr_decay_iters": "model.optimizer.schedule (steps of its class)",
    "min_lr": "model.optimizer.schedule (min_ratio of its class: --min-lr divided by --lr)",
    "lr_wsd_decay_style": "model.optimizer.schedule (shape of WSD)",
    "lr_wsd_decay_iters": "model.optimizer.schedule (decay of WSD: these divided by --lr-decay-iters)",
    "decoupled_lr": "model.optimizer.rules (lr_scale of a rule)",
    "num_layers": "model.config.num_layers",
    "hidden_size": "model.config.hidden_size",
    "ffn_hidden_size": "model.config.ffn_hidden_size",
    "num_attention_heads": "model.config.num_heads",
    "group_query_attention": "model.config.num_kv_heads",
    "num_query_groups": "model.config.num_kv_heads",
    "kv_channels": "model.config.head_dim",
    "max_position_embeddings": "model.config.max_sequence_length",
    "vocab_size": "model.config.vocab_size",
    "position_embedding_type": "model.config.position.kind (rope is the default; learned, none)",
    "no_position_embedding": "model.config.position.kind (rope is the default; none)",
    "rotary_base": "model.config.position.base",
    "rotary_percent": "model.config.position.fraction",
    "rotary_interleaved": "model.config.position.interleaved",
    "use_rope_scaling": "model.config.position.scaling",
    "normalization": "model.config.norm.kind (rms is the default; layer)",
    "norm_epsilon": "model.config.norm.eps",
    "swiglu": "model.config.activation (swiglu is the default; gelu, squared_relu)",
    "squared_relu": "model.config.activation (swiglu is the default; gelu, squared_relu)",
    "qk_layernorm": "model.config.attention.qk_norm",
    "add_qkv_bias": "model.config.attention.qkv_bias",
    "disable_bias_linear": "model.config.mlp_bias, model.config.attention.proj_bias (both are off by default)",
    "untie_embeddings_and_output_weights": "model.config.tie_embeddings (false is the default)",
    "hidden_dropout": "model.config.dropout.hidden",
    "attention_dropout": "model.config.dropout.attention",
    "init_method_std": "model.config.init.std",
    "attention_backend": "model.config.backends.attention (auto is the default, here and below)",
    "use_flash_attn": "model.config.backends.attention (auto is the default, here and below)",
    "cross_entropy_loss_fusion": "model.config.backends.cross_entropy",
    "cross_entropy_fusion_impl": "model.config.backends.cross_entropy",
    "no_rope_fusion": "model.config.backends.rotary",
    "no_bias_gelu_fusion": "model.config.backends.activation",
    "no_bias_swiglu_fusion": "model.config.backends.activation",
    "no_persist_layer_norm": "model.config.backends.norm",
    "multi_latent_attention": "model.config.latent, with q_rank and kv_rank",
    "q_lora_rank": "model.config.latent, with q_rank and kv_rank",
    "kv_lora_rank": "model.config.latent, with q_rank and kv_rank",
    "mtp_num_layers": "model.config.mtp.num_layers, model.config.mtp.loss_scale",
    "mtp_loss_scaling_factor": "model.config.mtp.num_layers, model.config.mtp.loss_scale",
    "num_experts": "model.config.moe.num_experts",
    "moe_router_topk": "model.config.moe.router.top_k",
    "moe_router_score_function": "model.config.moe.router.score",
    "moe_router_num_groups": "model.config.moe.router.num_groups",
    "moe_router_group_topk": "model.config.moe.router.group_top_k",
    "moe_router_topk_scaling_factor": "model.config.moe.router.scale",
    "moe_router_enable_expert_bias": "model.config.moe.router.expert_bias",
    "moe_router_bias_update_rate": "model.config.moe.router.expert_bias_rate",
    "moe_router_load_balancing_type": "model.config.moe.balance (a coefficient for each kind of loss)",
    "moe_grouped_gemm": "model.config.backends.experts",
    "moe_permute_fusion": "model.config.backends.experts",
    "moe_aux_loss_coeff": "model.config.moe.balance.aux_loss",
    "moe_z_loss_coeff": "model.config.moe.balance.z_loss",
    "moe_expert_capacity_factor": "model.config.moe.capacity.factor",
    "moe_pad_expert_input_to_capacity": "model.config.moe.capacity.pad",
    "moe_router_padding_for_quantization": "trainer.plugins (MegatronLowPrecision, its "
    "router_padding_for_quantization)",
    "moe_ffn_hidden_size": "model.config.moe.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.config.moe.shared.ffn_hidden_size",
    "data_path": "data.data (a prefix, or weights and prefixes in turn)",
    "train_data_path": "data.train_data, data.val_data, data.test_data",
    "valid_data_path": "data.train_data, data.val_data, data.test_data",
    "test_data_path": "data.train_data, data.val_data, data.test_data",
    "split": "data.split",
    "seq_length": "data.sequence_length",
    "tokenizer_type": "data.tokenizer (a tokenizer.json or its folder, which holds all of them)",
    "tokenizer_model": "data.tokenizer (a tokenizer.json or its folder, which holds all of them)",
    "vocab_file": "data.tokenizer (a tokenizer.json or its folder, which holds all of them)",
    "merge_file": "data.tokenizer (a tokenizer.json or its folder, which holds all of them)",
    "reset_attention_mask": "data.document_mask",
    "reset_position_ids": "data.document_mask",
    "eod_mask_loss": "data.eod_mask_loss",
    "num_workers": "data.num_workers",
    "data_cache_path": "data.cache_dir",
    "moe_flex_dispatcher_backend": "trainer.strategy.expert.dispatcher (deepep, hybridep)",
    "moe_enable_deepep": "trainer.strategy.expert.dispatcher (deepep, hybridep)",
    "moe_expert_parallel_a2a_overlap": "trainer.strategy.pipeline.schedule (combined)",
    "use_nccl_ub": "trainer.strategy.data_parallel.advanced.nccl_ub",
    "disable_symmetric_registration": "trainer.strategy.data_parallel.advanced.nccl_ub",
    "use_custom_fsdp": "trainer.strategy.data_parallel.level (optim_grads_params)",
    "data_parallel_sharding_strategy": "trainer.strategy.data_parallel.level (optim_grads_params)",
    "external_cuda_graph": "trainer.callbacks (megalight.callbacks.CUDAGraph, its scope)",
    "cuda_graph_scope": "trainer.callbacks (megalight.callbacks.CUDAGraph, its scope)",
    "use_precision_aware_optimizer": "model.optimizer.exp_avg_dtype, model.optimizer.exp_avg_sq_dtype",
    "fim_rate": "data.fim.rate",
    "fim_spm_rate": "data.fim.spm_rate",
    "fim_split_sample": "data.fim.split",
    "fim_fragment_rate": "data.fim.fragment_rate",
    "yarn_rotary_scaling_factor": "model.config.position.scaling.factor (with kind: yarn)",
    "yarn_original_max_position_embeddings": "model.config.position.scaling.original_length (with kind: yarn)",
    "yarn_beta_fast": "model.config.position.scaling.beta_fast",
    "yarn_beta_slow": "model.config.position.scaling.beta_slow",
    "yarn_mscale": "model.config.position.scaling.mscale",
    "yarn_mscale_all_dim": "model.config.position.scaling.mscale_all_dim",
    "yarn_correction_range_round_to_int": "model.config.position.scaling.round_range",
    "correction_range_round_to_int": "model.config.position.scaling.round_range",
    "window_size": "model.config.attention.window (earlier tokens that a token sees)",
    "window_attn_skip_freq": "model.config.attention.window_pattern",
    "softmax_type": "model.config.attention.softmax",
    "use_flashinfer_fused_rope": "model.config.backends.rotary",
    "moe_router_padding_for_fp8": "trainer.plugins (MegatronLowPrecision, its router_padding_for_quantization)",
    "teacher_model_config": "trainer.callbacks (megalight.callbacks.Distillation, its teacher)",
    "overlap_cpu_optimizer_d2h_h2d": "trainer.strategy.data_parallel.optimizer_offload_fraction",
    "dist_ckpt_optim_fully_reshardable": "trainer.strategy.checkpoints.format (each checkpoint is read by any layout)",
    "moe_router_fusion": "model.config.moe.router.top_k (there is no flag for kernels of the router)",
}
"""Flags -> the keys that mean the same, as docs/from-megatron.md lists them, which a test compares."""

NEMO = {
    "virtual_pipeline_model_parallel_size": "trainer.strategy.virtual_pipeline",
    "grad_reduce_in_fp32": "trainer.strategy.data_parallel.gradient_dtype (float32 is the default)",
    "save_ckpt_format": "trainer.strategy.checkpoints.format",
    "paths": "data.data",
    "log_dir": "trainer.default_root_dir",
}
"""Arguments of NeMo's classes, where they are no flags of Megatron-LM."""

LIGHTNING = {
    "bucket_cap_mb": "trainer.strategy.data_parallel.bucket_size (in elements)",
    "cpu_offload": "trainer.strategy.data_parallel.optimizer_offload_fraction",
    "offload_optimizer": "trainer.strategy.data_parallel.optimizer_offload_fraction",
    "sharding_strategy": "trainer.strategy.data_parallel.level (optim_grads_params)",
    "stage": "trainer.strategy.data_parallel.level (optim, optim_grads, optim_grads_params)",
    "activation_checkpointing_policy": "trainer.strategy.recompute.granularity",
    "tensor_parallel_size": "trainer.strategy.tensor_parallel",
    "timeout": "trainer.strategy.timeout_seconds",
}
"""Arguments of Lightning's own strategies that have a key here."""

HUGGING_FACE = {
    "num_hidden_layers": "model.config.num_layers",
    "intermediate_size": "model.config.ffn_hidden_size",
    "num_key_value_heads": "model.config.num_kv_heads",
    "hidden_act": "model.config.activation",
    "rope_theta": "model.config.position.base",
    "rms_norm_eps": "model.config.norm.eps",
    "layer_norm_eps": "model.config.norm.eps",
    "tie_word_embeddings": "model.config.tie_embeddings",
    "initializer_range": "model.config.init.std",
    "num_local_experts": "model.config.moe.num_experts",
    "num_experts_per_tok": "model.config.moe.router.top_k",
    "model_name_or_path": "model.weights",
    "output_dir": "trainer.default_root_dir",
    "resume_from_checkpoint": "ckpt_path",
    "per_device_train_batch_size": "trainer.strategy.micro_batch_size (samples of a rank at once) and "
    "data.global_batch_size (samples of all ranks)",
    "gradient_accumulation_steps": "trainer.strategy.micro_batch_size, which cuts data.global_batch_size",
    "num_train_epochs": "trainer.max_epochs",
    "max_grad_norm": "trainer.gradient_clip_val",
    "learning_rate": "model.optimizer.lr",
    "adam_epsilon": "model.optimizer.eps",
    "lr_scheduler_type": "model.optimizer.schedule (CosineDecay, LinearDecay, WSD, InverseSqrtDecay, Constant)",
    "warmup_steps": "model.optimizer.schedule (warmup of its class)",
    "warmup_ratio": "model.optimizer.schedule (warmup of its class, in steps)",
    "logging_steps": "trainer.log_every_n_steps",
    "eval_steps": "trainer.val_check_interval",
    "save_steps": "trainer.callbacks (lightning.pytorch.callbacks.ModelCheckpoint, its every_n_train_steps)",
    "report_to": "trainer.logger",
    "dataloader_num_workers": "data.num_workers",
    "gradient_checkpointing": "trainer.strategy.recompute.granularity",
    "fsdp": "trainer.strategy.data_parallel.level (optim_grads_params)",
    "max_seq_length": "data.sequence_length",
}
"""Arguments of TrainingArguments, and fields of config.json, of transformers."""

COMMON = {
    "batch_size": "data.global_batch_size (samples of all ranks) and trainer.strategy.micro_batch_size (samples of a "
    "rank at once)",
    "epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "nodes": "trainer.num_nodes",
}
"""Names that many programs have."""

OURS = {**COMMON, **HUGGING_FACE, **LIGHTNING, **NEMO, **MEGATRON}

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
NEMO_STRATEGY = {
    "context_parallel_size": "context_parallel",
    "ddp": "data_parallel=DataParallelOptions(...)",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "pipeline_dtype": f"{_NOTHING}: messages have the dtype of the activations",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "tensor_model_parallel_size": "tensor_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
}
INSTEAD = {**NEMO_STRATEGY, **MODEL_PARALLEL, **DEEPSPEED, **FSDP, **DDP}
"""Arguments of other strategies that mean something else here, or nothing -> what to write instead."""


def ours(name: str, known: Collection[str]) -> str | None:
    """Return what means the same here as a name of another program, if it has another name here.

    Args:
        name: the name, with ``-`` or ``_`` between its words.
        known: keys of this configuration. None is returned for a key that it does not have.
    """
    name = name.replace("-", "_")
    text = OURS.get(name, name)
    key = text.split()[0].strip(",")
    if text.rpartition(".")[2] == name:
        return None
    # Of a model that is not named yet, no keys are known.
    known_part = any(each.startswith(key.partition(".")[0] + ".") for each in known)
    return text if key in known or not known_part else None


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
            use = INSTEAD.get(name) or _argument(name) or f"see its documentation.{nearest(name, known)}"
            raise ConfigurationError(f"{strategy.__name__} has no argument {name!r}. Instead: {use}")


def _argument(name: str) -> str | None:
    """Return the argument of a strategy that means the same as a name of Megatron-LM or NeMo; None if there is none."""
    key = OURS.get(name, "").split(" ")[0]
    return key.removeprefix("trainer.strategy.") if key.startswith("trainer.strategy.") else None
