"""Named recipes: every preset on 1, 4 and 8 GPUs of 80 GB, made from its size. Tests split each one on a fake mesh.

A recipe's name is ``PRESET-pretrain-NxGPU`` or ``PRESET-lora-NxGPU``. A preset that does not fit has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megalight.cli.verbs.recipes import GPUS, PRESETS, no_recipe
from megalight.errors import LayoutError
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

ACTIVATION_BYTES = 12e9
"""Activations that may be kept. Above it, whole layers are recomputed."""

TRAINED_BYTES, SHARDED_BYTES, FROZEN_BYTES = 6, 12, 2
"""Bytes of a parameter: bf16 weight and fp32 gradient; fp32 master and Adam's moments, over the replicas; frozen."""

BYTES_PER_ACTIVATION = 34
"""Bytes that a layer keeps per token and hidden feature with flash attention (Korthikanti et al. 2022, eq. 2)."""

SEQUENCE = 4096


@dataclass(frozen=True)
class NamedRecipe:
    """A preset on a number of GPUs.

    Attributes:
        name: name of the recipe.
        parameters: parameters of the model.
        tensor_parallel: GPUs that share every layer.
        configuration: what the YAML file holds.
    """

    name: str
    parameters: int
    tensor_parallel: int
    configuration: dict[str, Any]

    def describe(self) -> str:
        """Return one line for a listing."""
        gpus = self.configuration["trainer"]["devices"]
        replicas = gpus // self.tensor_parallel
        recompute = ", recompute" if "recompute" in _options(self.configuration) else ""
        return f"{self.parameters / 1e9:5.1f} B parameters, TP={self.tensor_parallel} x DP={replicas}{recompute}"


def recipes() -> dict[str, NamedRecipe]:
    """Return all named recipes by name, in the order of families, presets, purposes and GPUs."""
    found: dict[str, NamedRecipe] = {}
    # Other families begin with the weights of several models, which no name contains.
    for known in map(family, sorted(CLASSES)):
        for preset in sorted(known.presets):
            parameters = count_parameters(known, known.presets[preset])
            for purpose in PRESETS[f"megalight.models.{known.name}.presets"]:
                for gpus in GPUS:
                    if (recipe := make(known, preset, parameters, purpose, gpus)) is not None:
                        found[recipe.name] = recipe
    return found


def named(name: str) -> NamedRecipe:
    """Return the recipe of this name.

    Raises:
        ConfigurationError: there is none.
    """
    known = recipes()
    if name not in known:
        raise no_recipe(name, known)
    return known[name]


def count_parameters(known: Family, config: Any) -> int:
    """Return the number of parameters of a model: by arithmetic, or from the model, built without memory."""
    if isinstance(config, GPTConfig):
        return num_parameters(config)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in known.model(config).parameters())


def make(known: Family, preset: str, parameters: int, purpose: str, gpus: int) -> NamedRecipe | None:
    """Make one recipe: the least tensor parallelism with which the model fits; None if none does."""
    config = known.presets[preset]
    lora = purpose == "lora"
    # Powers of two up to a host of 8 GPUs: tensor parallelism should stay inside one.
    degrees = [degree for degree in (1, 2, 4, 8) if gpus % degree == 0 and _divides(config, degree)]
    for degree in degrees:
        # Optimizer state is shared by the replicas. Weights and gradients are on each of them.
        each = FROZEN_BYTES if lora else TRAINED_BYTES + SHARDED_BYTES / (gpus // degree)
        if each * parameters / degree <= STATE_BYTES:
            break
    else:
        return None
    batch = 16 if lora else 256
    # Some models know fewer positions than the length of other recipes.
    sequence = min(SEQUENCE, config.max_sequence_length)
    kept = BYTES_PER_ACTIVATION * sequence * config.hidden_size * config.num_layers / degree
    # A micro-batch of one row always fits; more come only if nothing is recomputed.
    options: dict[str, Any] = {"tensor_parallel": degree, "micro_batch_size": 1}
    if degree > 1:
        options["sequence_parallel"] = True
    if kept > ACTIVATION_BYTES:
        options["recompute"] = {"granularity": "full"}
    else:
        # The largest power of two that fits, up to 16: larger micro-batches gain nothing.
        fits = 2 ** max(0, min(4, int(ACTIVATION_BYTES // kept).bit_length() - 1))
        options["micro_batch_size"] = min(fits, batch * degree // gpus)
    name = f"{preset}-{purpose}-{gpus}xGPU"
    trainer = {
        "default_root_dir": f"runs/{name}",
        "accelerator": "gpu",
        "devices": gpus,
        "precision": "bf16-mixed",
        "max_steps": 1000 if lora else 100_000,
        "val_check_interval": 200 if lora else 1000,
        "limit_val_batches": 20,
        "log_every_n_steps": 10,
        "gradient_clip_val": 1.0,
        "strategy": {"class_path": "megalight.strategies.MegatronStrategy", "init_args": options},
        "callbacks": _callbacks(lora, config),
    }
    model = {"config": preset, "optimizer": _optimizer(parameters, lora)}
    if lora:
        # LoRA starts from published weights, whose folder holds the configuration.
        model = {"weights": f"weights/{preset}", "optimizer": model["optimizer"]}
    module, data = CLASSES[known.name]
    return NamedRecipe(
        name,
        parameters,
        degree,
        {
            "seed_everything": 1234,
            "trainer": trainer,
            "model": {"class_path": f"megalight.{module}", "init_args": model},
            "data": {
                "class_path": f"megalight.{data}",
                "init_args": {"data": "data/text", "global_batch_size": batch, "sequence_length": sequence},
            },
        },
    )


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


def _optimizer(parameters: int, lora: bool) -> dict[str, Any]:
    """Adam as in published runs of this size (Llama 3, GPT-3): the larger the model, the lower the rate."""
    rate = 2e-4 if lora else 6e-4 if parameters < 1e9 else 3e-4 if parameters < 20e9 else 1.5e-4
    schedule = {"class_path": "megalight.optim.Cosine", "init_args": {"warmup": 50 if lora else 2000}}
    return {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0 if lora else 0.1, "schedule": schedule}


def _callbacks(lora: bool, config: Any) -> list[dict[str, Any]]:
    # By steps: the last checkpoints are kept, whatever their loss.
    every = {"every_n_train_steps": 200 if lora else 1000, "save_top_k": 2, "monitor": "step", "mode": "max"}
    saving = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {**every, "save_last": True},
    }
    mixers = {config.mixer_of(layer) for layer in range(config.num_layers)} if lora else set()
    recurrent = {"mamba": "mamba.*proj", "gated_delta_net": "delta.*proj"}
    parts = {"attention.*": mixers - {None, *recurrent}, **{name: mixer in mixers for mixer, name in recurrent.items()}}
    parts["mlp.*"] = lora and any(map(config.has_mlp, range(config.num_layers)))
    adapters = {
        "class_path": "megalight.callbacks.Adapters",
        "init_args": {
            "rank": 16,
            "targets": [name for name, there in parts.items() if there],
            "alpha": 32,
            "save_base": False,
        },
    }
    return [adapters, saving] if lora else [saving]


def _options(configuration: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = configuration["trainer"]["strategy"]["init_args"]
    return options
