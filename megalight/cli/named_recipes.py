"""Named recipes: every preset on 1, 4 and 8 GPUs of 80 GB, made from its size. Tests split each one on a fake mesh.

A recipe's name is ``PRESET-JOB-NxGPU``, such as ``llama3_8b-lora-1xGPU``; :data:`JOBS` has the jobs. A preset that does
not fit has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megalight.errors import ConfigurationError, LayoutError, nearest
from megalight.models.family import Family, family
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.flops import num_parameters
from megalight.parallel.degrees import replicas_of

CLASSES = {
    "gpt": ("models.gpt.module.GPTModule", "data.gpt.module.GPTDataModule"),
    "bert": ("models.bert.module.BertModule", "data.bert.module.BertDataModule"),
}
"""Family -> the classes of its module and of the data that its recipes read. By name: Lightning is slow to import."""

STATE_BYTES = 60e9
"""Weights, gradients and optimizer state that a GPU of 80 GB may hold; the rest is for activations."""

START_BYTES = 72e9
"""Frozen weights in bf16 that a GPU may hold before they are stored quantized."""

ACTIVATION_BYTES = 12e9
"""Activations that may be kept. Above it, whole layers are recomputed."""

REPLICATED_BYTES, SHARDED_BYTES = 6, 12
"""Bytes of a trained parameter: bf16 weight and fp32 gradient; fp32 master and Adam's moments, over the replicas."""

FROZEN_BYTES, NF4_BYTES = 2.0, 0.53
"""Bytes of a frozen parameter: in bf16; in nf4, with a scale for each block of 64."""

ADAPTER_SHARE = 0.005
"""Parameters of adapters of rank 16 on all linear layers, as a part of those of the model."""

BYTES_PER_ACTIVATION = 34
"""Bytes that a layer keeps per token and hidden feature with flash attention (Korthikanti et al. 2022, eq. 2)."""

LOGIT_BYTES = 80e9 / 32
"""Logits of a chunk of tokens, up to 1/32 of the device's memory."""

SEQUENCE = 4096


@dataclass(frozen=True)
class RecipeJob:
    """What a recipe does.

    Attributes:
        rate: peak learning rate; None: by the size of the model.
        chat: start from published weights and read conversations; else start anew and read text.
        frozen: how the frozen weights are stored, beside adapters that are trained; None: all weights are trained.
        layout: what several GPUs share: ``tensor``, layers, as few GPUs as are needed; ``full``, all parameters,
            gradients and optimizer state; ``pipeline``, stages.
    """

    rate: float | None = None
    chat: bool = False
    frozen: str | None = None
    layout: str = "tensor"

    @property
    def batch(self) -> int:
        """Rows of a batch."""
        return 16 if self.frozen else 64 if self.chat else 256


JOBS = {
    "pretrain": RecipeJob(),
    "pretrain-fsdp": RecipeJob(layout="full"),
    "pretrain-pp": RecipeJob(layout="pipeline"),
    "sft": RecipeJob(rate=1e-5, chat=True, layout="full"),
    "lora": RecipeJob(rate=2e-4, chat=True, frozen="bf16"),
    "qlora": RecipeJob(rate=2e-4, chat=True, frozen="nf4"),
}
"""The jobs, by the part of the name. On one GPU, ``full`` is no other layout; pipelines begin with several GPUs."""

PRETRAINING = tuple(JOBS)[:3]
"""Those of models that read no conversations."""

GPUS = (1, 4, 8)


@dataclass(frozen=True)
class Degrees:
    """How the GPUs of a recipe divide the model, and what lies on each.

    Attributes:
        state: bytes of weights, gradients and optimizer state.
    """

    tensor: int
    pipeline: int
    replicas: int
    state: float


@dataclass(frozen=True)
class NamedRecipe:
    """A job with a preset on a number of GPUs.

    Attributes:
        degrees: how the GPUs divide it.
        activations: bytes of activations on each GPU.
        configuration: what the YAML file holds.
    """

    name: str
    parameters: int
    degrees: Degrees
    activations: float
    configuration: dict[str, Any]

    @property
    def gib(self) -> float:
        """Memory that a GPU needs, in GiB: state, and activations with the logits of a chunk."""
        return (self.degrees.state + self.activations) / 2**30

    def describe(self) -> str:
        """Return one line for a listing."""
        degrees, options = self.degrees, _options(self.configuration)
        parts = [f"TP={degrees.tensor}", *([f"PP={degrees.pipeline}"] if degrees.pipeline > 1 else [])]
        parts.append(f"{'FSDP' if 'sharding_strategy' in options else 'DP'}={degrees.replicas}")
        recompute = ", recompute" if "recompute" in options else ""
        return f"{self.parameters / 1e9:5.1f} B parameters, {self.gib:4.0f} GiB, {' x '.join(parts)}{recompute}"


def recipes() -> dict[str, NamedRecipe]:
    """Return all named recipes by name, in the order of families, presets, jobs and GPUs."""
    found: dict[str, NamedRecipe] = {}
    # Other families begin with the weights of several models, which no name contains.
    for known in map(family, sorted(CLASSES)):
        for preset in sorted(known.presets):
            parameters = count_parameters(known, known.presets[preset])
            for job in JOBS if known.name == "gpt" else PRETRAINING:
                for gpus in GPUS:
                    if (recipe := make(known, preset, parameters, job, gpus)) is not None:
                        found[recipe.name] = recipe
    return found


def named(name: str) -> NamedRecipe:
    """Return the recipe of this name.

    Raises:
        ConfigurationError: there is none.
    """
    known = recipes()
    if name not in known:
        raise ConfigurationError(
            f"{name!r} names no recipe.{nearest(name, known)} `megalight recipes` lists them; a preset that does not "
            "fit on a number of GPUs has none, nor has one that reads images."
        )
    return known[name]


def count_parameters(known: Family, config: Any) -> int:
    """Return the number of parameters of a model: by arithmetic, or from the model, built without memory."""
    if isinstance(config, GPTConfig):
        return num_parameters(config)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in known.model(config).parameters())


def make(known: Family, preset: str, parameters: int, purpose: str, gpus: int) -> NamedRecipe | None:
    """Make one recipe: the least degree with which the model fits; None if none does."""
    config, job = known.presets[preset], JOBS[purpose]
    degrees = _degrees(config, parameters, job, gpus)
    if degrees is None:
        return None
    # Some models know fewer positions than the length of other recipes.
    sequence = min(SEQUENCE, config.max_sequence_length)
    layer = BYTES_PER_ACTIVATION * sequence * config.hidden_size / degrees.tensor
    # A first stage keeps the activations of as many micro-batches as there are stages.
    kept = layer * config.num_layers
    options: dict[str, Any] = {"micro_batch_size": 1}
    if degrees.tensor > 1 or job.layout == "tensor":
        options["tensor_parallel"] = degrees.tensor
    if degrees.tensor > 1:
        options["sequence_parallel"] = True
    if degrees.pipeline > 1:
        options["pipeline_parallel"] = degrees.pipeline
    # A micro-batch of one row always fits; more come only if nothing is recomputed.
    if kept > ACTIVATION_BYTES:
        options["recompute"] = {"granularity": "full"}
        # Inputs of layers in bf16, and one layer that is computed again.
        kept = layer + 2 * sequence * config.hidden_size * config.num_layers / degrees.tensor
    else:
        # The largest power of two that fits, up to 16: larger micro-batches gain nothing. A pipeline needs several
        # micro-batches for each stage.
        rows = max(1, job.batch // degrees.replicas // (1 if degrees.pipeline == 1 else 4 * degrees.pipeline))
        options["micro_batch_size"] = _power_of_two(min(16, ACTIVATION_BYTES / kept, rows))
        kept *= options["micro_batch_size"]
    kind = "MegatronStrategy"
    if job.layout == "full" and degrees.replicas > 1:
        kind, options = "MegatronFSDPStrategy", {"sharding_strategy": "FULL_SHARD", **options}
    name = f"{preset}-{purpose}-{gpus}xGPU"
    trainer = {
        "default_root_dir": f"runs/{name}",
        "accelerator": "gpu",
        "devices": gpus,
        "precision": "bf16-mixed",
        "max_steps": 1000 if job.chat else 100_000,
        "val_check_interval": 200 if job.chat else 1000,
        "limit_val_batches": 20,
        "log_every_n_steps": 10,
        "gradient_clip_val": 1.0,
        "strategy": {"class_path": f"megalight.strategies.{kind}", "init_args": options},
        "callbacks": _callbacks(job, config),
    }
    module, data = CLASSES[known.name]
    # Published weights come in a folder that holds the configuration.
    model: dict[str, Any] = {"weights": f"weights/{preset}"} if job.chat else {"config": preset}
    reading = {"data": "data/chat" if job.chat else "data/text"}
    return NamedRecipe(
        name,
        parameters,
        degrees,
        kept + LOGIT_BYTES,
        {
            "seed_everything": 1234,
            "trainer": trainer,
            "model": {
                "class_path": f"megalight.{module}",
                "init_args": {**model, "optimizer": _optimizer(parameters, job)},
            },
            "data": {
                "class_path": "megalight.data.chat.module.SFTDataModule" if job.chat else f"megalight.{data}",
                "init_args": {**reading, "global_batch_size": job.batch, "sequence_length": sequence},
            },
        },
    )


def _power_of_two(limit: float) -> int:
    """Return the largest power of two up to a limit of at least 1."""
    return 1 << int(limit).bit_length() - 1


def _degrees(config: Any, parameters: int, job: RecipeJob, gpus: int) -> Degrees | None:
    """Return the least degree whose state fits on each GPU; None if none does."""
    if gpus == 1 and job.layout != "tensor" and not job.chat:
        return None
    # The embedding, or the head, is on one stage whole.
    ends = config.vocab_size * config.hidden_size
    # Powers of two up to a host of 8 GPUs: tensor parallelism should stay inside one.
    for degree in (1, 2, 4, 8):
        stages = degree if job.layout == "pipeline" else 1
        tensor = 1 if job.layout == "pipeline" else degree
        replicas = gpus // degree
        if gpus % degree or not _divides(config, tensor) or config.num_layers % stages:
            continue
        if job.layout == "pipeline" and stages == 1:
            continue
        held = (parameters - ends) / stages + ends if stages > 1 else parameters / tensor
        trained = REPLICATED_BYTES + SHARDED_BYTES / replicas
        if job.frozen:
            inside = NF4_BYTES if job.frozen == "nf4" else FROZEN_BYTES
            linear = max(0.0, held - 2 * ends / tensor)
            state = inside * linear + FROZEN_BYTES * (held - linear) + trained * ADAPTER_SHARE * held
            # All frozen weights are there in bf16 once, when training starts.
            if FROZEN_BYTES * held > START_BYTES:
                continue
        elif job.layout == "full" and replicas > 1:
            # Two units are whole at a time: weights in bf16 and gradients in fp32.
            outer = [ends] if getattr(config, "tie_embeddings", False) else [ends, ends]
            layer = (parameters - sum(outer)) / config.num_layers
            largest = sum(sorted([*outer, layer, layer])[-2:]) / tensor
            state = (REPLICATED_BYTES + SHARDED_BYTES) * held / replicas + REPLICATED_BYTES * largest
        else:
            state = trained * held
        if state <= STATE_BYTES:
            return Degrees(tensor, stages, replicas, state)
    return None


def _divides(config: Any, degree: int) -> bool:
    """Return whether tensor parallelism of this degree can divide the heads, by the rule of the split itself."""
    mamba, delta = getattr(config, "mamba", None), getattr(config, "delta", None)
    try:
        if delta is not None:
            replicas_of(delta.num_heads, degree, "value heads of Gated DeltaNet", may_share=False)
            replicas_of(delta.num_key_heads, degree, "key heads of Gated DeltaNet")
        if mamba is not None:
            replicas_of(mamba.num_heads, degree, "heads of Mamba", may_share=False)
            replicas_of(mamba.num_groups, degree, "groups of Mamba")
            replicas_of(mamba.norm_groups, degree, "groups of the norm of Mamba")
        replicas_of(config.num_heads, degree, "query heads", may_share=False)
        # Key heads may be replicated, if each rank holds one.
        replicas_of(getattr(config, "num_kv_heads", config.num_heads), degree, "key-value heads")
    except LayoutError:
        return False
    return True


def _optimizer(parameters: int, job: RecipeJob) -> dict[str, Any]:
    """Adam as in published runs of this size (Llama 3, GPT-3): the larger the model, the lower the rate."""
    rate = job.rate or (6e-4 if parameters < 1e9 else 3e-4 if parameters < 20e9 else 1.5e-4)
    schedule = {"class_path": "megalight.optim.CosineDecay", "init_args": {"warmup": 50 if job.chat else 2000}}
    return {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0 if job.chat else 0.1, "schedule": schedule}


def _callbacks(job: RecipeJob, config: Any) -> list[dict[str, Any]]:
    # By steps: the last checkpoints are kept, whatever their loss.
    every = {"every_n_train_steps": 200 if job.chat else 1000, "save_top_k": 2, "monitor": "step", "mode": "max"}
    saving = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {**every, "save_last": True},
    }
    if job.frozen is None:
        return [saving]
    mixers = {config.mixer_of(layer) for layer in range(config.num_layers)}
    recurrent = {"mamba": "mamba.*proj", "gated_delta_net": "delta.*proj"}
    parts = {"attention.*": mixers - {None, *recurrent}, **{name: mixer in mixers for mixer, name in recurrent.items()}}
    parts["mlp.*"] = any(map(config.has_mlp, range(config.num_layers)))
    adapters = {
        "rank": 16,
        "targets": [name for name, there in parts.items() if there],
        "alpha": 32,
        "save_base": False,
    }
    stored = {"base": job.frozen} if job.frozen == "nf4" else {}
    return [{"class_path": "megalight.callbacks.Adapters", "init_args": {**adapters, **stored}}, saving]


def _options(configuration: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = configuration["trainer"]["strategy"]["init_args"]
    return options
