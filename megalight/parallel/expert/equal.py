"""Whether all ranks of a group bring equally many tokens, so that nobody needs to ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megalight.errors import LayoutError
from megalight.parallel.collectives import start_all_gather

if TYPE_CHECKING:
    from megalight.parallel.tensor.shared import Shared


class EqualTokens:
    """Knows whether all ranks along ``ep`` and ``etp`` bring the same number of tokens.

    They do if they are neighbours along ``tp``, whose shares of a sequence are equal, or if the user promises it
    (``ExpertOptions.equal_tokens``). Each number is checked once. So nothing waits for the device in later passes, and
    a CUDA graph can hold them after its warm-up.

    Args:
        shared: the state that all parallel layers share.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        mesh = shared.mesh
        self.holds = shared.expert.equal_tokens or set(mesh.ranks("ep", "etp")) <= set(mesh.ranks("tp"))
        self._checked: set[int] = set()

    def __call__(self, num_tokens: int, device: torch.device) -> bool:
        """Return whether other ranks bring ``num_tokens``, too. All ranks of the group call it together.

        Raises:
            LayoutError: the promise does not hold, and the number is new on every rank. A rank that has seen its number
                before does not ask again: it goes on, and the ranks wait for each other until the group's timeout.
        """
        if self.holds and num_tokens not in self._checked:
            own = torch.tensor([num_tokens], device=device)
            numbers = start_all_gather(own, self.shared.expert_group).wait().tolist()
            if len(set(numbers)) > 1:
                raise LayoutError(
                    f"ExpertOptions: equal_tokens=True, but the ranks along ep and etp bring {numbers} tokens. Make "
                    "batches of one shape, such as packed rows of a fixed length, or leave equal_tokens out."
                )
            self._checked.add(num_tokens)
        return self.holds
