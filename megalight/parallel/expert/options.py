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
            ranks, which is simple, and fast for few ranks and many experts per token; ``symmetric`` copies rows between
            GPUs of one host without occupying SMs; ``deepep`` and ``hybridep`` use
            the kernels of a package (:mod:`megalight.plugins.deepep`).
        equal_tokens: a promise that all ranks always bring the same number of tokens, as with batches of one shape.
            Then the host waits for nothing if ``moe.capacity.pad`` fixes the number of rows, and CUDA graphs can hold
            the experts. It need not be given where ``ep`` and ``etp`` lie within ``tp``. Not for ``deepep``
            and ``hybridep``.
        shared_expert_overlap: shared experts compute on a CUDA stream of their own, while copies of tokens travel.
            With ``all_to_all`` and ``symmetric``.
        num_sms: how many of a GPU the messages of ``deepep`` (None: 20) or ``hybridep`` (None: 16) occupy.

    Raises:
        LayoutError: there is no such dispatcher, or an option does not go with it.
    """

    dispatcher: str = "all_to_all"
    equal_tokens: bool = False
    shared_expert_overlap: bool = False
    num_sms: int | None = None

    def __post_init__(self) -> None:
        try:
            # Looked up now: a wrong name raises before any process group is made.
            DISPATCHERS[self.dispatcher]
        except MegalightError as error:
            raise LayoutError(f"ExpertOptions: {error}") from error
        if self.shared_expert_overlap and self.dispatcher not in ("all_to_all", "symmetric"):
            raise LayoutError(
                f"ExpertOptions: shared_expert_overlap=True with dispatcher={self.dispatcher!r}; only the messages of "
                "'all_to_all' and 'symmetric' leave the device free for other work. Set dispatcher='all_to_all', or "
                "leave shared_expert_overlap out."
            )
        if self.equal_tokens and self.dispatcher in ("deepep", "hybridep"):
            raise LayoutError(
                f"ExpertOptions: equal_tokens=True with dispatcher={self.dispatcher!r}, which counts rows itself. Set "
                "dispatcher='all_to_all', or leave equal_tokens out."
            )
        count = self.num_sms
        if count is not None and self.dispatcher not in ("deepep", "hybridep"):
            raise LayoutError(
                f"ExpertOptions: num_sms={count} with dispatcher={self.dispatcher!r}; only 'deepep' and "
                "'hybridep' can limit them. Leave num_sms out."
            )
        # The kernels work in pairs, one that sends and one that receives.
        if count is not None and (count < 2 or count % 2):
            raise LayoutError(f"ExpertOptions: num_sms={count}; it must be even, and at least 2.")
