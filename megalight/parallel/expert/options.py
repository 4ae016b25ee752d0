"""Options of expert parallelism: how copies of tokens get to their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalight.errors import LayoutError, MegalightError
from megalight.nn.moe import Dispatcher
from megalight.registry import Registry

DISPATCHERS: Registry[Callable[[Any], Dispatcher]] = Registry("dispatcher")
"""Name -> function of the state that parallel layers share, which makes a dispatcher. Plugins can add more."""


@dataclass(frozen=True)
class ExpertOptions:
    """How copies of tokens get to their experts, if these are divided over ranks.

    Attributes:
        dispatcher: ``all_to_all`` sends each copy to the ranks of its expert; ``all_gather`` sends all tokens to all
            ranks, which is simple, and fast for few ranks and many experts per token.
        shared_beside: networks for all tokens compute on a CUDA stream of their own, while copies of tokens travel.
            Only with ``all_to_all``.

    Raises:
        LayoutError: there is no such dispatcher, or ``shared_beside`` does not go with it.
    """

    dispatcher: str = "all_to_all"
    shared_beside: bool = False

    def __post_init__(self) -> None:
        try:
            DISPATCHERS[self.dispatcher]
        except MegalightError as error:
            raise LayoutError(f"ExpertOptions: {error}") from error
        if self.shared_beside and self.dispatcher != "all_to_all":
            raise LayoutError(
                f"ExpertOptions: shared_beside=True with dispatcher={self.dispatcher!r}; only the messages of "
                "'all_to_all' leave the device free for other work. Set dispatcher='all_to_all', or leave "
                "shared_beside out."
            )
