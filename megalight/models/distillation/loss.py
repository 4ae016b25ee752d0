"""The loss of a student: which parts it has, and how they are added up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.nn.aux_losses import COMPARISONS
from megalight.ops.divergence import KINDS


@dataclass(frozen=True, kw_only=True)
class LayerPair:
    """A loss between hidden states of the student and of the teacher.

    Attributes:
        student: module whose output is compared: a layer (``layers.3``), a part of it (``layers.3.attention``,
            ``layers.3.mlp``, ``layers.3.attention_norm``) or the final norm (``head.norm``). Megatron's names of these
            (``decoder.layers.3.self_attention``, ``decoder.final_layernorm``) are understood, too.
        teacher: module of the teacher.
        loss: ``cosine``: ``1 - cos`` of the angle between the two; ``mse``: mean square of the differences of features.
        weight: multiplies it.

    Raises:
        ConfigurationError: the loss is unknown, or the weight out of range.
    """

    student: str
    teacher: str
    loss: str = "cosine"
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.loss not in COMPARISONS:
            raise ConfigurationError(f"loss={self.loss!r} is not one of {', '.join(COMPARISONS)}; use one.")
        _check_positive("weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The loss of a student.

    Attributes:
        divergence: ``forward_kl``, ``reverse_kl``, ``jensen_shannon`` or ``cross_entropy``; see
            :mod:`megalight.ops.divergence.spec`.
        temperature: divides the logits of both models. The loss is not multiplied by its square.
        scale: multiplies the divergence; with ``balance``, also the losses of pairs.
        own: whether the student's own loss is part of the objective.
        pairs: losses on hidden states.
        balance: scale the parts to one magnitude; see :meth:`objective`.

    Raises:
        ConfigurationError: a value is unknown or out of range, or has no effect.
    """

    divergence: str = "forward_kl"
    temperature: float = 1.0
    scale: float = 1.0
    own: bool = False
    pairs: tuple[LayerPair, ...] = ()
    balance: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        object.__setattr__(self, "pairs", tuple(self.pairs))
        if self.divergence not in KINDS:
            raise ConfigurationError(f"divergence={self.divergence!r} is not one of {', '.join(KINDS)}; use one.")
        for name in ("temperature", "scale"):
            _check_positive(name, getattr(self, name))
        if self.balance and not self.own and not self.pairs:
            raise ConfigurationError(
                "balance=True, but the objective has one part, the divergence; give pairs, or own_loss=True."
            )
        if self.balance and not self.own and self.scale != 1:
            raise ConfigurationError(
                f"scale={self.scale} has no effect with balance=True and without own_loss: it weighs the teacher's "
                "losses against the student's own. Leave it out, or set own_loss=True."
            )

    def states(self, pairs: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the weighted sum of the losses of pairs; 0 in the form of ``like`` if there are none."""
        rows = [lost * pair.weight for pair, lost in zip(self.pairs, pairs, strict=True)]
        return torch.stack(rows).sum(0) if rows else torch.zeros_like(like)

    def objective(self, divergence: Tensor, states: Tensor, own: Tensor | None, means: Tensor | None) -> Tensor:
        """Return the objective of a micro-batch: ``own + scale * divergence + states``.

        With ``balance`` the losses of the teacher get the magnitude of the student's own: with ``s`` the losses of
        pairs, ``d`` the divergence, ``o`` the own loss, and ratios as constants::

            k = d + s * (d / s)
            objective = o + scale * (o / k) * k        (with own)
            objective = k                              (without)

        A ratio to a part that is 0 is 1. The ratios are those of ``means``, and have no gradient.

        Args:
            divergence: sum over the tokens of this rank, with its gradient.
            states: likewise, of :meth:`states`.
            own: likewise; None without it.
            means: ``[3]``, with ``balance``: the three over the whole micro-batch, to a common factor.
        """
        if means is None:
            return divergence * self.scale + states + (0 if own is None else own)
        logits, hidden, alone = means.unbind()
        balance = _ratio(logits, hidden)
        distillation = divergence + states * balance
        if own is None:
            return distillation
        return own + distillation * (_ratio(alone, logits + hidden * balance) * self.scale)


def _ratio(wanted: Tensor, given: Tensor) -> Tensor:
    # Without a branch, for which the host would wait.
    return torch.where(given > 0, wanted / given, 1)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name}={value} must be positive and finite; 1 is usual.")


# ModelOpt's settings of distillation, in YAML


KNOWN = ("logit_layers", "intermediate_layer_pairs", "skip_lm_loss", "kd_loss_scale", "logit_kl_temperature")


def read_modelopt(path: str | os.PathLike[str]) -> DistillationLoss:
    """Read a file with ModelOpt's ``DistillationConfig``. Losses are balanced, as there.

    Raises:
        ConfigurationError: there is no such file, a key is unknown, or a value is not of the form that it needs.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"modelopt_config={path} is no YAML file that can be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold keys and values, such as kd_loss_scale: 1.0.")
    # Files that ModelOpt itself has written name all of its fields.
    given = {key: value for key, value in found.items() if key in KNOWN or value is not None}
    if unknown := sorted(set(given) - set(KNOWN)):
        raise ConfigurationError(
            f"{path} has {', '.join(map(repr, unknown))}, which is not supported here; remove it. Known are "
            f"{', '.join(KNOWN)}."
        )
    layers = given.get("logit_layers", ["output_layer"] * 2)
    if not isinstance(layers, list) or [str(name).rpartition(".")[2] for name in layers] != ["output_layer"] * 2:
        raise ConfigurationError(
            f"{path}: logit_layers={layers}; logits are those of the output layers of both models, so "
            "write [output_layer, output_layer], or leave it out."
        )
    own = not _of(bool, given, "skip_lm_loss", True, path)
    pairs = tuple(_pair(entry, path) for entry in given.get("intermediate_layer_pairs") or ())
    scale = _of(float, given, "kd_loss_scale", 1.0, path)
    return DistillationLoss(
        temperature=_of(float, given, "logit_kl_temperature", 1.0, path),
        # ModelOpt does not use it without the student's own loss.
        scale=scale if own else 1.0,
        own=own,
        pairs=pairs,
        balance=own or bool(pairs),
    )


def _pair(entry: Any, path: object) -> LayerPair:
    if not isinstance(entry, list) or len(entry) not in (2, 3) or not all(isinstance(part, str) for part in entry):
        raise ConfigurationError(
            f"{path}: intermediate_layer_pairs has {entry!r}; write [student's layer, teacher's layer] or "
            "[student's layer, teacher's layer, cosine or mse]."
        )
    return LayerPair(student=entry[0], teacher=entry[1], loss=entry[2] if len(entry) == 3 else "cosine")


def _of(kind: type, given: dict[str, Any], key: str, default: Any, path: object) -> Any:
    value = given.get(key, default)
    # A whole number is a float, but True is not.
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (kind, int)):
        raise ConfigurationError(f"{path}: {key}={value!r} is no {kind.__name__}; the usual one is {default}.")
    return value
