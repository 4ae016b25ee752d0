"""What several model types of ``transformers`` share in their ``config.json``: layers, experts, rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.mixer_config import PositionConfig
from megalight.ops.rotary import RotaryAxes, RotaryScaling

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
}
"""Our field -> the key of most kinds, which must be there."""


def sizes_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ``GPTConfig`` that most kinds state alike: sizes, and whether the head is tied."""
    sizes = {ours: values[theirs] for ours, theirs in SIZES.items()}
    return {**sizes, "tie_embeddings": bool(values.get("tie_word_embeddings", False))}


def sizes_to(config: GPTConfig) -> dict[str, Any]:
    """Return the keys of a ``config.json`` that most kinds state alike: sizes, norm, rotation, dropout, tied head."""
    return {
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm.eps,
        **rotary_to(config.position),
        "attention_dropout": config.dropout.attention,
        "initializer_range": config.init.std,
    }


def refuse_others(values: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Refuse options of a ``config.json`` that have other values than those that have a counterpart here.

    Args:
        values: the content of ``config.json``. A missing option has the supported value.
        supported: option -> its only value.

    Raises:
        ConfigurationError: an option has another value.
    """
    for option, good in supported.items():
        if (value := values.get(option, good)) != good:
            raise ConfigurationError(f"{option} is {value!r}; only {good!r} has a counterpart here.")


def stated(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key that must be there, and not null.

    Raises:
        KeyError: it is missing or null.
    """
    if values.get(key) is None:
        raise KeyError(key)
    return values[key]


def layer_types(values: Mapping[str, Any], *known: str) -> list[str] | None:
    """Return their ``layer_types``, one for each layer. None: the ``config.json`` has none.

    Args:
        values: the content of ``config.json``.
        known: the types that models of this kind may have.

    Raises:
        ConfigurationError: there is another type, or not one for each layer.
    """
    types, layers = values.get("layer_types"), values["num_hidden_layers"]
    if types is None:
        return None
    if unknown := sorted({str(each) for each in types} - set(known)):
        raise ConfigurationError(
            f"layer_types has {', '.join(unknown)}; models of {values['model_type']} have {', '.join(known)}."
        )
    if len(types) != layers:
        raise ConfigurationError(f"layer_types has {len(types)} entries and num_hidden_layers is {layers}; one each.")
    return list(types)


def router_groups(values: Mapping[str, Any], group_experts: int) -> dict[str, Any]:
    """Return the arguments of a ``RouterConfig`` for the groups of experts in a ``config.json``.

    Args:
        values: the content of ``config.json``.
        group_experts: so many best scores of a group make up its score, in models of this kind.
    """
    groups, group_top_k = (values.get(key) or 1 for key in ("n_group", "topk_group"))
    # One group is the same as none.
    if groups == 1:
        return {}
    usual = values["num_experts_per_tok"] // group_top_k == group_experts
    return {"num_groups": groups, "group_top_k": group_top_k, "group_experts": None if usual else group_experts}


def refuse_other_sums(values: Mapping[str, Any]) -> None:
    """Refuse sigmoid scores that a ``config.json`` normalizes otherwise than here: only if there are several.

    Raises:
        ConfigurationError: it normalizes the score of a single expert, or does not normalize those of several.
    """
    refuse_others({"norm_topk_prob": True, **values}, {"norm_topk_prob": values["num_experts_per_tok"] > 1})


def activation_of(values: Mapping[str, Any], key: str, known: Mapping[str, str]) -> str:
    """Return our name of an activation.

    Raises:
        ConfigurationError: it has no counterpart here.
    """
    name = values[key]
    if name not in known:
        raise ConfigurationError(f"{key} {name!r} has no counterpart here; known: {', '.join(known)}.")
    return known[name]


def activation_to(activation: str, known: Mapping[str, str]) -> str:
    """Return their name of an activation, or ours where they have none, which the reader then refuses."""
    return next((theirs for theirs, ours in known.items() if ours == activation), activation)


def tied_head(config: GPTConfig, embedding: str) -> dict[str, str]:
    """Return the copies in files of a model with a tied head: that of ``embedding``, a module's name."""
    return {"lm_head.weight": f"{embedding}.weight"} if config.tie_embeddings else {}


# Rotary embedding: base and scaling


LENGTH = "original_max_position_embeddings"
FIELDS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_length": LENGTH,
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "round_range": "truncate",
        "original_length": LENGTH,
    },
}
"""Kind of scaling -> our field -> their key."""
OPTIONAL = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
"""Their keys that may be missing or empty. Defaults are the same on both sides."""


def rotated_layers(values: Mapping[str, Any]) -> list[int]:
    """Return for each layer of a model with layers that do not rotate (SmolLM3, Llama 4) whether it rotates, 1 or 0."""
    every = values.get("no_rope_layer_interval", 4)
    layers = range(values["num_hidden_layers"])
    return values.get("no_rope_layers") or [int((layer + 1) % every > 0) for layer in layers]


def rotary_from(values: Mapping[str, Any]) -> PositionConfig:
    """Read base and scaling from a ``config.json``.

    Raises:
        ConfigurationError: the kind of scaling, or an option of it, has no counterpart here.
        KeyError: the scaling lacks a value.
    """
    rotated = tuple(bool(layer) for layer in values.get("no_rope_layers") or (True,))  # 1: it rotates
    if not any(rotated):
        return PositionConfig(kind="none")
    # Newer files have one dict, older ones a base beside the scaling.
    options = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = options.get("rope_theta") or values.get("rope_theta") or 10000.0
    kind = options.get("rope_type") or options.get("type") or "default"
    sections = options.get("mrope_section")
    axes = RotaryAxes(tuple(sections), bool(options.get("mrope_interleaved"))) if sections else None
    if kind in ("default", "mrope"):  # older files name the axes in place of the scaling
        return PositionConfig(base=base, pattern=rotated, axes=axes)
    if kind not in FIELDS:
        raise ConfigurationError(f"rope_type {kind!r} has no counterpart here; known: default, {', '.join(FIELDS)}.")
    if kind == "dynamic" and options.get("alpha") is not None:  # of Hunyuan: it changes short sequences, too
        raise ConfigurationError(f"rope_type 'dynamic' with alpha={options['alpha']} has no counterpart here.")
    if LENGTH in FIELDS[kind].values():
        options = _with_length(options, values)
    given = {
        ours: stated(options, theirs)
        for ours, theirs in FIELDS[kind].items()
        if theirs not in OPTIONAL or options.get(theirs) is not None
    }
    # weights of 0 mean the same as none
    given = {name: value for name, value in given.items() if value or not name.startswith("mscale")}
    scaling = RotaryScaling(**{"kind": kind, **given})
    own = options.get("attention_factor")
    # A factor of its own would change all scores, so it is not passed over.
    if own is not None and abs(own - scaling.concentration) > 1e-6 * own:
        raise ConfigurationError(
            f"attention_factor is {own}, and the other values of {kind} give {scaling.concentration:.6f}; a factor "
            "of its own has no counterpart here."
        )
    return PositionConfig(base=base, scaling=scaling, pattern=rotated, axes=axes)


def _with_length(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the length of the original training, which need not be among them."""
    length = values.get(LENGTH) or options.get(LENGTH) or stated(values, "max_position_embeddings")
    factor = options["factor"]
    if factor is None:  # as some files of YaRN have it
        factor = stated(values, "max_position_embeddings") / length
    return {**options, LENGTH: length, "factor": factor}


def rotary_to(position: PositionConfig) -> dict[str, Any]:
    """Return the keys of a ``config.json`` that state base and scaling."""
    values: dict[str, Any] = {"rope_theta": position.base}
    scaling = position.scaling
    # kinds that they lack keep their name, and are refused when the values are read back
    if scaling is not None:
        fields = FIELDS.get(scaling.kind, FIELDS["linear"])
        given = {theirs: getattr(scaling, ours) for ours, theirs in fields.items()}
        values["rope_scaling"] = {"rope_type": scaling.kind, **{k: v for k, v in given.items() if v is not None}}
    if (axes := position.axes) is not None:
        options = values.setdefault("rope_scaling", {"rope_type": "default"})
        options.update(mrope_section=list(axes.sections), mrope_interleaved=axes.interleaved)
    return values
