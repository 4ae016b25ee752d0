"""What the configurations of all model families share: checks, common groups of settings, plain values and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Self, get_args, get_type_hints

from megalight.errors import ConfigurationError, nearest

UNBINDING = {"dropout", "backends", "init"}
"""Settings that may change between the runs of one model."""


def require(good: bool, message: str) -> None:
    """Raise a :class:`ConfigurationError` with this message unless ``good``."""
    if not good:
        raise ConfigurationError(message)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``; the nearest one is named."""
    require(value in choices, f"{name} is {value!r}; it must be one of {', '.join(choices)}." + nearest(value, choices))


@dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """Probabilities of dropping a value while training.

    Attributes:
        hidden: what attention and MLP add to the residual stream.
        attention: attention weights.
        embedding: the embedding's output.
    """

    hidden: float = 0.0
    attention: float = 0.0
    embedding: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(0 <= value < 1, f"dropout.{name} is {value}; it must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Initial weights: normal with mean 0.

    Attributes:
        std: standard deviation.
        scale_residual: divide it by ``sqrt(2 num_layers)`` in the projections that write to the residual stream, so
            that the stream's variance does not grow with depth (GPT-2).
    """

    std: float = 0.02
    scale_residual: bool = True

    def __post_init__(self) -> None:
        require(self.std > 0, f"init.std is {self.std}; it must be above 0.")

    def residual_std(self, num_layers: int) -> float:
        """Standard deviation of the projections that write to the residual stream."""
        return float(self.std / (2 * num_layers if self.scale_residual else 1) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What all transformers have; a family's configuration adds its own.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream, ``h``.
        num_heads: attention heads, of queries where they differ from keys'.
        vocab_size: token ids, ``V``.
        max_sequence_length: the longest sequence it takes, in tokens.
        ffn_hidden_size: width inside the MLP; 0: ``4 hidden_size``.

    Raises:
        ConfigurationError: values out of range.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_sequence_length: int
    ffn_hidden_size: int = 0
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        self._require_positive(
            "num_layers", "hidden_size", "num_heads", "vocab_size", "max_sequence_length", "ffn_hidden_size"
        )

    def _require_positive(self, *names: str) -> None:
        for name in names:
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return self.init.residual_std(self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, fit for JSON and YAML."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration that :meth:`to_dict` described.

        Raises:
            ConfigurationError: an unknown key (the nearest known one is named), a missing one, or a bad value.
        """
        config: Self = from_plain(cls, values)
        return config


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as plain nested values, fit for JSON and YAML."""
    plain: dict[str, Any] = _plain(asdict(config))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def from_plain(cls: type[Any], values: Mapping[str, Any], path: str = "") -> Any:
    """The configuration of class ``cls`` that :func:`to_plain` described.

    Raises:
        ConfigurationError: an unknown key (the nearest known one is named), a missing one, or a bad value.
    """
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    for name in values:
        require(name in known, f"unknown key {path + name!r}; known: {', '.join(known)}." + nearest(name, known))
    built = dict(values)
    for name, value in values.items():
        types = (hints[name], *get_args(hints[name]))
        nested = [hint for hint in types if isinstance(hint, type) and is_dataclass(hint)]
        if nested and isinstance(value, Mapping):
            built[name] = from_plain(nested[0], value, f"{path}{name}.")
    try:
        return cls(**built)
    except TypeError as error:
        raise ConfigurationError(f"{cls.__name__} cannot be made of keys {sorted(values)}: {error}.") from error


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str, path: str = "") -> list[str]:
    """Settings that bind the weights and differ, as ``name is ours here and theirs in <where>``."""
    found = []
    for name in sorted(set(ours) | set(theirs)):
        if not path and name in UNBINDING:
            continue
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            found += compare(mine, other, where, f"{path}{name}.")
        elif mine != other:
            found.append(f"{path}{name} is {mine} here and {other} in {where}")
    return found
