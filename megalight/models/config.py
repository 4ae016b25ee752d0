"""Configurations of models: checks, groups of settings that families share, conversion to plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Self, get_args, get_type_hints

from megalight.errors import ConfigurationError, nearest

UNBINDING = {
    "dropout",
    "backends",
    "init",
    "moe.balance",
    "moe.router.jitter",
    "moe.router.expert_bias_rate",
    "moe.router.force_balance",
    "mtp.loss_scale",
}
PARTS = ("language.", "vision.", "projector.")
"""What names of settings begin with in models of several parts."""
UNBINDING |= {part + name for part in PARTS for name in UNBINDING}
UNBINDING |= {"vision.dynamic.min_pixels", "vision.dynamic.max_pixels", "video_token"}
"""Settings that may differ between the runs of one model, because its weights do not depend on them."""


MAX_LAYERS = 10_000
"""Most layers of a model. A file may claim any number, and all are built before shapes are compared."""

MAX_BLOCKS = 1 << 18
"""Most experts of all layers together, ten times those of the largest published models, for the same reason."""


def require(good: bool, message: str) -> None:
    """Raise a :class:`ConfigurationError` with ``message`` unless ``good``."""
    if not good:
        raise ConfigurationError(message)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``. The message names the nearest one."""
    # Only now: the search for a near name takes a millisecond, and a configuration has many names.
    if value not in choices:
        raise ConfigurationError(
            f"{name} is {value!r}; it must be one of {', '.join(choices)}." + nearest(value, choices)
        )


@dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """Dropout probabilities in training.

    Attributes:
        hidden: for the outputs of attention and MLP, before they are added to the residual stream.
        attention: for attention weights.
        embedding: for the output of the embedding.
    """

    hidden: float = 0.0
    attention: float = 0.0
    embedding: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "attention", "embedding"):
            value = getattr(self, name)
            require(0 <= value < 1, f"dropout.{name} is {value}; it must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Initial weights, drawn from a normal distribution with mean 0.

    Attributes:
        std: standard deviation.
        scale_residual: whether to divide ``std`` of the projections that write to the residual stream by the square
            root of the number of sublayers (two per transformer layer). Then its variance does not grow with depth
            (GPT-2).
    """

    std: float = 0.02
    scale_residual: bool = True

    def __post_init__(self) -> None:
        require(self.std > 0, f"init.std is {self.std}; it must be above 0.")

    def residual_std(self, num_sublayers: int) -> float:
        """Return the standard deviation of the projections that write to the residual stream."""
        # The sum of independent terms grows with the square root of their number.
        return float(self.std / (num_sublayers if self.scale_residual else 1) ** 0.5)


class PlainConfig:
    """A configuration, a dataclass, that is also plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values for JSON and YAML."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from the values of :meth:`to_dict`.

        Raises:
            ConfigurationError: a key is unknown (the message names the nearest one) or missing, or a value is bad.
        """
        config: Self = from_plain(cls, values)
        return config


@dataclass(frozen=True, kw_only=True)
class ModelConfig(PlainConfig):
    """Settings of all transformers. The configuration of each family adds its own.

    Attributes:
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream, ``h``.
        num_heads: number of attention heads (query heads, if there are fewer key heads).
        vocab_size: number of token ids, ``V``.
        max_sequence_length: length of the longest sequence, in tokens.
        ffn_hidden_size: inner width of the MLP. 0 means ``4 hidden_size``.

    Raises:
        ConfigurationError: a value is out of range.
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
        # 0 stands for the default, so that a configuration of plain values needs no null.
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        # First: other checks go through all layers.
        require(self.num_layers <= MAX_LAYERS, f"num_layers is {self.num_layers}; it must be at most {MAX_LAYERS}.")
        self._require_positive(
            "num_layers", "hidden_size", "num_heads", "vocab_size", "max_sequence_length", "ffn_hidden_size"
        )

    def _require_positive(self, *names: str) -> None:
        for name in names:
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return self.init.residual_std(self.num_sublayers)

    @property
    def num_sublayers(self) -> int:
        """Number of additions to the residual stream."""
        return 2 * self.num_layers


def to_plain(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain nested values for JSON and YAML."""
    plain: dict[str, Any] = _plain(asdict(config))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def from_plain(cls: type[Any], values: Mapping[str, Any], path: str = "") -> Any:
    """Make a configuration of class ``cls`` from the values of :func:`to_plain`.

    Raises:
        ConfigurationError: a key is unknown (the message names the nearest one) or missing, or a value is bad.
    """
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    for name in values:
        # Before the class is called: its own error would not name the nearest key.
        if name not in known:
            raise ConfigurationError(f"unknown key {path + name!r}; known: {', '.join(known)}." + nearest(name, known))
    built = dict(values)
    for name, value in values.items():
        # The hint may be `X | None`, whose members are looked at as well.
        # Hints, not field types: those are text under postponed evaluation.
        types = (hints[name], *get_args(hints[name]))
        nested = [hint for hint in types if isinstance(hint, type) and is_dataclass(hint)]
        if nested and isinstance(value, Mapping):
            built[name] = from_plain(nested[0], value, f"{path}{name}.")
    try:
        return cls(**built)
    except TypeError as error:
        raise ConfigurationError(f"{cls.__name__} cannot be made from keys {sorted(values)}: {error}.") from error


def with_floats(config: Any) -> Any:
    """Return a configuration of which every setting that is a float by its type is one. ``transformers`` wants that."""
    hints, changed = get_type_hints(type(config)), dict[str, Any]()
    for name in (f.name for f in fields(config) if f.init):
        value = getattr(config, name)
        if is_dataclass(value):
            changed[name] = with_floats(value)
        elif type(value) is int and float in (hints[name], *get_args(hints[name])):
            changed[name] = float(value)
    return replace(config, **changed)


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str, path: str = "") -> list[str]:
    """List the settings that weights depend on and that differ, as ``name is ours here and theirs in <where>``."""
    found = []
    for name in sorted(set(ours) | set(theirs)):
        if path + name in UNBINDING:
            continue
        # A key that one side lacks counts as null: older files know fewer settings.
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            found += compare(mine, other, where, f"{path}{name}.")
        elif mine != other:
            found.append(f"{path}{name} is {mine} here and {other} in {where}")
    return found


# Checks that several families share


OR_HEAD_DIM = ", or give head_dim"
"""What else helps where heads may have any size."""


def check_heads(hidden_size: int, num_heads: int, remedy: str = "") -> None:
    """Check that heads share the hidden features evenly.

    Args:
        hidden_size: features of a token.
        num_heads: heads of attention, at least 1.
        remedy: what else a user can do.

    Raises:
        ConfigurationError: they do not.
    """
    if hidden_size % num_heads:
        raise ConfigurationError(
            f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; change one of them{remedy}."
        )
