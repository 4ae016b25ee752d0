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


def activation_of(name: str, known: Mapping[str, str]) -> str:
    """Return our name of an activation.

    Raises:
        ConfigurationError: it has no counterpart here.
    """
    if name not in known:
        raise ConfigurationError(f"activation {name!r} has no counterpart here; known: {', '.join(known)}.")
    return known[name]


def activation_to(activation: str, known: Mapping[str, str]) -> str:
    """Return their name of an activation, or ours where they have none, which the reader then refuses."""
    return next((theirs for theirs, ours in known.items() if ours == activation), activation)


def tied_head(config: GPTConfig, embedding: str) -> dict[str, str]:
    """Return the copies in files of a model with a tied head: that of ``embedding``, a module's name."""
    return {"lm_head.weight": f"{embedding}.weight"} if config.tie_embeddings else {}
