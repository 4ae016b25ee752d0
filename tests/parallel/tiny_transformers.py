"""Tiny models of every family of ``transformers``, and the comparison of a layout with the plain model."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.models.fused import fuse
from megalight.parallel import recompute
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical, relative_error
from tests.support.environment import trainer

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "sliding_window": 4, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "moe_layer_freq": 1,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96, "mlp_bias": False, "use_cache": False,
    "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "rotary_dim": 4,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "dropout_rate": 0.0, "state_size": 8, "d_kv": 8,
    "attn_dropout": 0.0, "summary_last_dropout": 0.0, "chunk_size": 4, "mamba_chunk_size": 4, "word_embed_proj_dim": 32,
    "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STEPS = 2
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
HASHES = ("lsh_attention_probs_dropout_prob", "local_attention_probs_dropout_prob")
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "xlnet": {"n_head": 4, "d_head": 8, "d_model": 32, "d_inner": 48, "n_layer": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "head_dim": 16, "num_key_value_heads": 4},
    "zamba": {
        **{"num_hidden_layers": 4, "attn_layer_period": 1, "attn_layer_offset": 0},
        **{"head_dim": 16, "num_key_value_heads": 4, "use_mamba_kernels": False},
    },
    "bamba": {"attn_layer_indices": [1]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, **dict.fromkeys(HASHES, 0.0), "hash_seed": 0},
    **{f: {"decoder_start_token_id": 0} for f in ("t5", "longt5", "switch_transformers")},
    "squeezebert": {"embedding_size": 32},
    "mobilebert": {"true_hidden_size": 32, "embedding_size": 32, "intra_bottleneck_size": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "xmod": {"default_language": "en_XX"},
    "longcat_flash": {
        **{"num_layers": 2, "num_hidden_layers": 4, "head_dim": 4, "ffn_hidden_size": 48},
        **{"expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2},
    },
    "ctrl": {"dff": 48},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    **{f: {"rope_parameters": MROPE} for f in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")},
    **{f: {"rope_parameters": MROPE} for f in ("glm4v_text", "glm_image_text", "glm_ocr_text")},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
    },
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    # Its attention reads a rotary base that its configuration does not have by itself.
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "resid_pdrop": 0.0, "emb_pdrop": 0.0},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        # Their names are exchanged in transformers.
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "blt": {
        **{f"{part}_config": {"hidden_size_global": 32} for part in ("encoder", "decoder")},
        "encoder_hash_byte_group_vocab": 64,
    },
    "perceiver": {
        **{"num_latents": 4, "d_latents": 32, "d_model": 32, "num_self_attends_per_block": 2, "vocab_size": 96},
        **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 8},
    },
    "vibevoice_asr": {
        f"{part}_tokenizer_encoder_config": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
        for part in ("acoustic", "semantic")
    },
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        **{"decoder_start_token_id": 1, "pad_token_id": 0},
    },
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
        "moe_shared_expert_intermediate_size": 16,
    },
}
"""Settings of single families."""
TEXTS = (
    "ernie4_5_vl_moe_text", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text", "granite4_vision_text",
    "higgs_audio_v2", "mistral4", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text",
    "qwen3_vl_moe_text",
)  # fmt: skip
"""Parts of larger models that declare a plan, which no auto class builds."""


def families() -> dict[str, str]:
    """Every family of ``transformers`` with a language model -> the auto class that builds it."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found = {}
    for kind, mapping in {
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }.items():
        for family in mapping:
            found.setdefault(family, kind)
    for family in modeling_auto.MODEL_MAPPING_NAMES:
        if getattr(configuration_auto.CONFIG_MAPPING.get(family), "base_model_tp_plan", None):
            found.setdefault(family, "AutoModel")
    return {**found, **dict.fromkeys(TEXTS, "")}


def _model_class(config: type[Any]) -> Any:
    """The first class of a file of ``transformers`` that is made from a configuration class."""
    import transformers

    file = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    for kind in vars(file).values():
        base = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if base and kind.config_class is config and not kind.__name__.endswith("PreTrainedModel"):
            return kind
    raise LookupError(config)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own loss; of a model without a head, the mean square of its hidden states."""
    with float64():
        forwards = [kind.forward for kind in type(model).__mro__ if "forward" in vars(kind)]
        if any("labels" in inspect.signature(each).parameters for each in forwards):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss
        hidden: Tensor = model(input_ids=ids).last_hidden_state
        return hidden.square().mean()


class Plain(pl.LightningModule):
    """What a user writes: nothing in it is about parallelism."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses = torch.zeros(STEPS, 2, dtype=torch.float64)
        """Of each step, the sum over this rank's micro-batches, and their number."""

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = loss_of(self.net, ids)
        self.losses[index] += torch.stack([loss.detach().cpu().double(), torch.ones(()).double()])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(family: str, options: dict[str, Any], checkpointing: bool = False, **settings: Any) -> dict[str, float]:
    """Train two steps in a layout, as a user would.

    Args:
        family: name of the family.
        options: of the strategy.
        checkpointing: let the layers recompute themselves, as ``transformers`` does.
        settings: of the model.

    Returns:
        how far the changes of the weights, thus gradients, and "loss" are from those of the plain model. Of ranks that
        see different samples, the mean of the losses is compared; stages before the last have none.
    """
    data = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    before = tiny(family, **settings)
    whole, module = copy.deepcopy(before), Plain(copy.deepcopy(before))
    if checkpointing:
        module.net.gradient_checkpointing_enable(AGAIN)  # type: ignore[operator]
    # The default one ignores soft caps; the eager one of some families (Moshi) is not causal without a mask.
    configs = [whole.config, *(getattr(whole.config, each, None) for each in ("encoder", "decoder"))]
    if any(getattr(each, "attn_logit_softcapping", None) for each in configs):
        whole.set_attn_implementation("eager")
    strategy = MegatronStrategy(**options)
    runner = trainer(strategy, max_steps=STEPS)
    world = dist.get_world_size() if dist.is_initialized() else 1
    degrees = (options.get(f"{each}_parallel", 1) for each in ("tensor", "pipeline", "context"))
    replicas = world // math.prod(degrees)
    with mock.patch.object(recompute, "checkpoint", partial(recompute.checkpoint, context_fn=AGAIN["context_fn"])):
        runner.fit(module, DataLoader(data, batch_size=2 // replicas))
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        named = {name: p.detach().clone() for name, p in module.named_parameters()}
        found = gather_canonical(named, strategy.parallel_model.specs, strategy.mesh, sum_partial=False)
    optimizer, losses = torch.optim.SGD(whole.parameters(), lr=0.1), []
    for batch in data.split(2):
        optimizer.zero_grad()
        # The mean over replicas, as under DDP: that of Moshi, which shifts its labels twice, is none over samples.
        loss = torch.stack([loss_of(whole, part) for part in batch.split(2 // replicas)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    start = dict(before.named_parameters())
    errors = {
        name: relative_error(found[f"model.net.{name}"] - start[name], parameter.detach() - start[name])
        for name, parameter in whole.named_parameters()
    }
    if dist.is_initialized():
        dist.all_reduce(module.losses)
    total, count = module.losses.unbind(1)
    return {**errors, "loss": relative_error(total / count, torch.tensor(losses, dtype=torch.float64))}


def tiny(family: str, **settings: Any) -> nn.Module:
    """A language model of a family, with weights that are not symmetric."""
    import transformers

    config = _sized(transformers.CONFIG_MAPPING[family], family, settings)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Grouped products of experts are not made for float64.
        if auto := families()[family]:
            model = getattr(transformers, auto).from_config(config, experts_implementation="eager")
        else:
            model = _model_class(type(config))._from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if vars(module).get("dtype") is torch.float32:  # routers of Switch Transformers compute in it
            module.dtype = torch.float64
    found: nn.Module = model.double().train()
    return found


def _sized(kind: Any, family: str, settings: dict[str, Any]) -> Any:
    """A configuration of a family; those in it are small, too: towers, which are never called here, would be large."""
    from transformers import CONFIG_MAPPING, AutoConfig

    own = {**OWN.get(family, {}), **({} if "text_config" in (kind.sub_configs or {}) else settings)}
    plain = None if kind.has_no_defaults_at_init else kind()
    inner = {}
    for name, part in (kind.sub_configs or {}).items():
        theirs = {**own.pop(name, {}), **(settings if name == "text_config" else {})}
        if part is AutoConfig:
            part = CONFIG_MAPPING[theirs.pop("model_type")] if plain is None else type(getattr(plain, name))
        inner[name] = _sized(part, "", theirs)
    if plain is None:
        return kind(**{name: part.to_dict() for name, part in inner.items()}, **own)
    if "text_config" in inner:
        return kind(**inner, **own)
    sizes = {name: value for name, value in SIZES.items() if name in vars(plain) or name in kind.attribute_map}
    if "kv_lora_rank" in sizes:  # latent attention has a key head for each query head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)  # that of the rotated part
    if "layer_types" in vars(plain) and plain.layer_types is None:
        sizes["layer_types"] = ["full_attention"] * 2
    return kind(**{**sizes, **inner, **own})


@contextmanager
def float64() -> Iterator[None]:
    """Let models compute in float64 where their code asks for float32, so that nothing rounds."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


AGAIN: dict[str, Any] = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), float64())}
"""Lets layers that run again in the backward pass compute in float64 there, too."""


def errors_of(family: str, sequence_parallel: bool = False, fused: bool = False, **settings: Any) -> dict[str, float]:
    """How far loss and gradients of a tensor-parallel model are from those of the plain one, on every rank."""
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    whole = tiny(family, **settings)
    model = copy.deepcopy(whole)
    if fused:
        assert fuse(model) == 2
        if getattr(whole.config, "attn_logit_softcapping", None):  # the default one ignores it
            whole.set_attn_implementation("eager")
    plan = plan_for(model)
    assert plan is not None, "it declares no plan"
    specs = parallelize(model, plan, mesh, sequence_parallel=sequence_parallel)
    split = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in whole.parameters())
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    with float64():
        for one in (model, whole):
            out = one(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            losses.append(out.loss)
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, specs, mesh)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    errors = {name: relative_error(grads[name], wanted[name]) if name in grads else 1.0 for name in wanted}
    return {**errors, "loss": relative_error(*losses), "share of parameters": split}
