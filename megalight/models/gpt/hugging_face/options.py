"""What several kinds of models of ``transformers`` say alike in their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.gpt.config import GPTConfig


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
