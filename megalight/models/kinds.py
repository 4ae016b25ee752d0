"""Kinds of models of ``transformers``: how their configurations and tensors become ours and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from megalight.errors import ConfigurationError, MegalightError
from megalight.models.config import MAX_LAYERS, compare
from megalight.models.weights import WeightMap


class Config(Protocol):
    """What the configurations of all families have."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values."""


C = TypeVar("C", bound=Config)

COUNTS = re.compile(r"(n|num)_.*(layer|expert)s?")
"""Names of settings that say how many layers or experts there are."""


@dataclass(frozen=True)
class Kind(Generic[C]):
    """One ``model_type`` of ``transformers``.

    Attributes:
        model_type: the word in ``config.json``.
        architecture: the class that ``transformers`` makes of it.
        suits: configuration -> whether a model with it may be of this kind. It may say yes too often: a written
            configuration is read back, and differences are found.
        places: configuration -> where the files keep its tensors.
        read: content of ``config.json`` -> configuration.
        write: configuration -> content of ``config.json``, without ``model_type`` and ``architectures``.
        also_read: further values of ``model_type`` that ``read`` converts.
    """

    model_type: str
    architecture: str
    suits: Callable[[C], bool]
    places: Callable[[C], WeightMap]
    read: Callable[[Mapping[str, Any]], C]
    write: Callable[[C], dict[str, Any]]
    also_read: tuple[str, ...] = ()


class Kinds(Generic[C]):
    """All kinds of a family.

    Args:
        kinds: the kinds. Those with parts that few have come first: a model is of the first kind that suits it.
        settings: configuration -> plain values, equal for configurations that mean the same model.
        no_kind: configuration -> what to say of a model that no kind suits.

    Attributes:
        readers: ``model_type`` in ``config.json`` -> the kind that reads it.
    """

    def __init__(
        self,
        kinds: Sequence[Kind[C]],
        settings: Callable[[C], dict[str, Any]] = lambda config: config.to_dict(),
        no_kind: Callable[[C], str] = lambda config: "this configuration",
    ) -> None:
        self.kinds = tuple(kinds)
        self.settings = settings
        self.no_kind = no_kind
        self.readers = {name: kind for kind in self.kinds for name in (kind.model_type, *kind.also_read)}

    def weight_map(self, config: C) -> WeightMap:
        """Return where ``transformers`` keeps the tensors of a model.

        Raises:
            ConfigurationError: no kind suits the model.
        """
        return self._suiting(config)[0].places(config)

    def read(self, values: Mapping[str, Any]) -> C:
        """Convert the ``config.json`` of a ``transformers`` model to our configuration.

        Raises:
            ConfigurationError: the model type or an option is not supported here.
        """
        kind = values.get("model_type")
        if kind not in self.readers:
            raise ConfigurationError(f"model_type is {kind!r}; weights of {', '.join(self.readers)} can be read.")
        _check_counts(values)
        try:
            return self.readers[kind].read(values)
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

    def write(self, config: C, model_type: str | None = None) -> dict[str, Any]:
        """Return the content of ``config.json`` for a model.

        Each kind of model is written and read back. The first kind that gives ``config`` again is taken.

        Args:
            config: the model.
            model_type: the kind to try first: that of the model that training began with.

        Raises:
            ConfigurationError: no kind can express the configuration. The message names what the nearest one cannot.
        """
        failed: list[tuple[str, list[str]]] = []
        # The kind that training began with comes first: several can say the same configuration.
        for kind in sorted(self._suiting(config), key=lambda kind: kind.model_type != model_type):
            name = kind.model_type
            try:
                values = {"model_type": name, "architectures": [kind.architecture], **kind.write(config)}
                # Written values are read back: whatever `transformers` cannot say shows as a difference.
                back = self.settings(self.read(values))
            except ConfigurationError as error:
                failed.append((name, [str(error)]))
                continue
            differences = compare(self.settings(config), back, f"transformers' {name}")
            if not differences:
                return values
            failed.append((name, differences))
        # The kind with the fewest differences is the one that the user most likely means.
        name, differences = min(failed, key=lambda each: len(each[1]))
        raise ConfigurationError(f"no model of transformers has this configuration. Nearest: {'; '.join(differences)}.")

    def _suiting(self, config: C) -> list[Kind[C]]:
        """Return the kinds that the model may be of, at least one."""
        kinds = [kind for kind in self.kinds if kind.suits(config)]
        if not kinds:
            raise ConfigurationError(
                f"no model of transformers has {self.no_kind(config)}; known kinds of models: "
                f"{', '.join(kind.model_type for kind in self.kinds)}."
            )
        # Kinds that keep tensors elsewhere than the first one lack the parts that it has.
        return [kind for kind in kinds if kind.places is kinds[0].places]


def _check_counts(values: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts that no model has, before lists of so many are made."""
    # Models of several parts have a configuration of each inside theirs.
    for part in (values, *(each for each in values.values() if isinstance(each, Mapping))):
        for name, value in part.items():
            # Tables of labels have numbers as names.
            if COUNTS.fullmatch(str(name)) and isinstance(value, int) and value > MAX_LAYERS:
                raise ConfigurationError(
                    f"{name} is {value}; at most {MAX_LAYERS} are read. Copy the configuration again."
                )
