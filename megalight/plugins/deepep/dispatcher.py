"""What both dispatchers of the package share: their conditions, and the form of tokens and routes that they send."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError, LayoutError
from megalight.nn.moe import Dispatcher
from megalight.ops.router import Routes
from megalight.parallel.expert.all_to_all import spread
from megalight.parallel.turns import pause, taking_turns
from megalight.plugins.package import Package

if TYPE_CHECKING:
    from megalight.parallel.tensor.shared import Shared

PACKAGE = Package("deep_ep", "deep_ep", "build https://github.com/deepseek-ai/DeepEP for your torch and CUDA")


class PackageDispatcher(Dispatcher):
    """A dispatcher that calls the package.

    Args:
        shared: the state that all parallel layers share.

    Attributes:
        name: the name of the dispatcher.
        multiprocessors: how many its messages occupy by default.
        calls: function of the package -> arguments that it must have. Releases have no reliable version numbers.

    Raises:
        LayoutError: the package cannot serve here.
    """

    name: ClassVar[str]
    multiprocessors: ClassVar[int]
    calls: ClassVar[Mapping[str, Sequence[str]]]
    pads = False

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        if (reason := self.why_not(len(shared.mesh.ranks("ep", "etp")))) is not None:
            raise LayoutError(
                f"ExpertOptions: dispatcher={self.name!r} cannot serve: {reason}. Or set "
                "dispatcher='all_to_all', which needs no package."
            )

    @classmethod
    def why_not(cls, num_ranks: int) -> str | None:
        """Return why the package cannot serve a group of so many ranks on this machine, or None."""
        names = dict.fromkeys(path.partition(".")[0] for path in cls.calls)
        paths = [f"{PACKAGE.name}:{name}" for name in names]
        if (reason := PACKAGE.why_not("cuda", f"dispatcher {cls.name}", *paths)) is not None:
            return reason
        # By signatures: releases come from sources, and their versions say little.
        for path, wanted in cls.calls.items():
            owner, _, method = path.partition(".")
            found = inspect.signature(getattr(PACKAGE.load(f"{PACKAGE.name}:{owner}"), method or "__init__"))
            if lacking := [name for name in wanted if name not in found.parameters]:
                return f"{path} takes no {', '.join(lacking)} in this release. Next: {PACKAGE.how}"
        return cls.why_not_size(num_ranks)

    @classmethod
    def why_not_size(cls, num_ranks: int) -> str | None:
        """Return why the package cannot serve a group of so many ranks, or None. The package is there."""
        return None

    @property
    def group(self) -> ProcessGroup:
        """The ranks along ``ep`` and ``etp``."""
        return self.shared.expert_group

    @property
    def occupied(self) -> int:
        """Number of multiprocessors for messages."""
        chosen = self.shared.expert.multiprocessors
        return self.multiprocessors if chosen is None else chosen

    def prepared(self, hidden: Tensor, routes: Routes, num_experts: int) -> tuple[Tensor, Routes]:
        """Return tokens and routes in the form that the package sends: bfloat16, and weights in float32.

        Raises:
            ConfigurationError: that would lose digits.
        """
        # The expert's product casts its input anyway; cast before the exchange, half as many bytes travel.
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # Refused, and not cast without a word: the exchange would lose digits of the activations.
        if hidden.dtype != torch.bfloat16 or routes.probs.dtype == torch.float64:
            raise ConfigurationError(
                f"dispatcher={self.name!r} sends bfloat16 rows with float32 weights; here they are {hidden.dtype} and "
                f"{routes.probs.dtype}. Train in bfloat16 with moe.router.dtype=float32, or set "
                "dispatcher='all_to_all'."
            )
        # The package knows ranks and experts only: along `etp`, each expert is one of several.
        routes = spread(routes, num_experts, self.shared.mesh.etp)
        return hidden, Routes(routes.probs.float(), routes.experts)

    @abstractmethod
    def combine(self, outputs: Tensor, memo: Any) -> Tensor:
        """``[R, h] -> [T, h]``."""


def settle(event: Any) -> None:
    """Let the current stream wait for a message that has started; another pass may compute meanwhile."""
    # Without turns the package has waited itself, and there is no event.
    if taking_turns():
        pause()
        event.current_stream_wait()
