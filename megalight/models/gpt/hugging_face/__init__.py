"""Conversion of weights and configurations from ``transformers`` (Llama, Qwen, GPT-2 and others) to ours and back.

Our names are canonical: ``layers.0.attention.q.weight``, not the fused ``qkv``. Each file has a kind of model, or
several with the same names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megalight.errors import ConfigurationError, MegalightError
from megalight.models.config import compare
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face import deepseek, experts, gemma, gpt2, gpt_oss, llama, llama4, mamba, qwen3_next
from megalight.models.gpt.hugging_face.deepseek import without_missing_depths as without_missing_depths
from megalight.models.gpt.hugging_face.kind import Kind
from megalight.models.weights import WeightMap

KINDS: tuple[Kind, ...] = (
    *mamba.KINDS,
    *qwen3_next.KINDS,
    *deepseek.KINDS,
    *gemma.KINDS,
    *llama4.KINDS,
    *gpt_oss.KINDS,
    *experts.KINDS,
    *gpt2.KINDS,
    *llama.KINDS,
)
"""All kinds. Those with parts that few have come first: a model is of the first kind that suits it."""

READERS = {name: kind for kind in KINDS for name in (kind.model_type, *kind.also_read)}
"""``model_type`` in ``config.json`` -> the kind that reads it."""


def weight_map(config: GPTConfig) -> WeightMap:
    """Return where ``transformers`` keeps the tensors of a model.

    Raises:
        ConfigurationError: no kind suits the model.
    """
    return _suiting(config)[0].places(config)


def to_transformers(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert canonical tensors to names and shapes of ``transformers``, which does not store a tied head.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).write(tensors)


def from_transformers(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert a ``transformers`` state dict to canonical tensors.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).read(tensors)


def config_from_transformers(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of a ``transformers`` model to our configuration.

    Raises:
        ConfigurationError: the model type or an option is not supported here.
    """
    kind = values.get("model_type")
    if kind not in READERS:
        raise ConfigurationError(f"model_type is {kind!r}; weights of {', '.join(READERS)} can be read.")
    try:
        return READERS[kind].read(values)
    # Any key may lack, so it is caught here instead of being asked for everywhere.
    except KeyError as missing:
        raise ConfigurationError(f"the configuration of the {kind} model lacks {missing}; copy it again.") from None
    except MegalightError:
        raise
    # A word or null where a number belongs: each conversion fails in its own way.
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise ConfigurationError(
            f"the configuration of the {kind} model has a value of a wrong kind ({error}); copy it again."
        ) from error


def config_to_transformers(config: GPTConfig, model_type: str | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for this model.

    Each kind of model is written and read back. The first kind that gives ``config`` again is taken.

    Args:
        config: the model.
        model_type: the kind to try first: that of the model that training began with.

    Raises:
        ConfigurationError: no kind can express the configuration. The message names what the nearest one cannot.
    """
    failed: list[tuple[str, list[str]]] = []
    # The kind that training began with comes first: several can say the same configuration.
    for kind in sorted(_suiting(config), key=lambda kind: kind.model_type != model_type):
        name = kind.model_type
        try:
            values = {"model_type": name, "architectures": [kind.architecture], **kind.write(config)}
            # Written values are read back: whatever `transformers` cannot say shows as a difference.
            back = _settings(config_from_transformers(values))
        except ConfigurationError as error:
            failed.append((name, [str(error)]))
            continue
        differences = compare(_settings(config), back, f"transformers' {name}")
        if not differences:
            return values
        failed.append((name, differences))
    # The kind with the fewest differences is the one that the user most likely means.
    name, differences = min(failed, key=lambda each: len(each[1]))
    raise ConfigurationError(f"no model of transformers has this configuration. Nearest: {'; '.join(differences)}.")


def _suiting(config: GPTConfig) -> list[Kind]:
    """Return the kinds that the model may be of, at least one."""
    kinds = [kind for kind in KINDS if kind.suits(config)]
    if not kinds:
        raise ConfigurationError(
            f"no model of transformers has position.kind={config.position.kind!r} with these parts; known kinds of "
            f"models: {', '.join(kind.model_type for kind in KINDS)}."
        )
    # Kinds that keep tensors elsewhere than the first one lack the parts that it has.
    return [kind for kind in kinds if kind.places is kinds[0].places]


def _settings(config: GPTConfig) -> dict[str, Any]:
    """Return plain values with the entries of all layers, because different patterns can mean the same layers."""
    values = config.to_dict()
    if config.moe is not None:
        values["moe"]["pattern"] = [config.has_experts(layer) for layer in range(config.num_layers)]
        # 0 and the width itself mean the same.
        values["moe"]["ffn_hidden_size"] = config.expert_ffn_hidden_size
        del values["moe"]["balance"]  # losses are the user's choice
        if config.moe.router.num_groups is not None:
            values["moe"]["router"]["group_experts"] = config.moe.router.rule.best_of_group
    if config.mtp is not None:
        del values["mtp"]["loss_scale"]
    if config.delta is not None:
        del values["delta"]["step_range"], values["delta"]["step_floor"]  # initial values
    values["mixer_pattern"] = [config.mixer_of(layer) for layer in range(config.num_layers)]
    values["attention"]["scale"] = config.attention.scale or config.head_dim**-0.5
    values["attention"]["chunk"] = [config.attention.chunk_of(layer) for layer in range(config.num_layers)]
    values["attention"]["window"] = [config.attention.window_of(layer) for layer in range(config.num_layers)]
    values["position"]["pattern"] = [config.position.rotates(layer) for layer in range(config.num_layers)]
    del values["attention"]["window_pattern"]
    del values["attention_ratio"], values["mlp_ratio"]  # they only made the pattern
    return values
