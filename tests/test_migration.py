"""Arguments of Lightning's own strategies are taken, or refused with what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from megalight.errors import ConfigurationError
from megalight.migration import INSTEAD
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy, MegatronTowersStrategy

THEIRS = (DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, FullyShardedDataParallel)


class Own(MegatronStrategy):
    """A strategy of a user's own, which takes an argument out of the others."""

    def __init__(self, **options: Any) -> None:
        self.own = options.pop("own")
        super().__init__(**options)


def arguments(*classes: type) -> set[str]:
    return {name for cls in classes for name in inspect.signature(cls).parameters} - {"kwargs", "options", "module"}


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda cls: cls.__name__)
def test_every_argument_of_lightning_is_taken_or_says_what_to_write(theirs: type) -> None:
    taken = arguments(MegatronStrategy)
    for name in sorted(arguments(theirs) - taken):
        with pytest.raises(
            ConfigurationError, match=rf"^MegatronStrategy has no argument '{name}'\. Instead: "
        ) as caught:
            MegatronStrategy(**{name: True})  # type: ignore[arg-type]
        assert caught.value.args[0].endswith(INSTEAD[name])


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_to_write_names_arguments_that_exist(name: str) -> None:
    first = INSTEAD[name].partition("=")[0].partition(",")[0]
    written = "=" in INSTEAD[name].partition(" ")[0] or INSTEAD[name].isidentifier()
    if written and "(" not in first:
        assert first in arguments(MegatronStrategy, MegatronFSDPStrategy)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            MegatronStrategy,
            {"find_unused_parameters": True},
            "'find_unused_parameters'.*DataParallelOptions\\(find_unused_parameters=True",
        ),
        (MegatronStrategy, {"stage": 3}, "'stage'.*3 'optim_grads_params'"),
        (MegatronStrategy, {"tensor_paralel": 2}, "'tensor_paralel'.*Did you mean 'tensor_parallel'"),
        (MegatronFSDPStrategy, {"timeout": 5}, "'timeout'. Instead: timeout_seconds"),
        (MegatronTowersStrategy, {"static_graph": True}, "MegatronTowersStrategy has no argument 'static_graph'"),
    ],
)
def test_an_unknown_argument_is_refused_by_each_strategy(strategy: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategy(**options)


def test_a_strategy_of_a_users_own_takes_its_own_arguments() -> None:
    strategy = Own(own=3, tensor_parallel=2)
    assert (strategy.own, strategy.layout.tensor_parallel) == (3, 2)


def test_constructors_show_their_own_arguments() -> None:
    assert "tensor_parallel" in inspect.signature(MegatronStrategy).parameters
    assert "sharding_strategy" in inspect.signature(MegatronFSDPStrategy).parameters
