"""Batches are cut for context parallelism by a method of their own, or refused with what to write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.models.eagle.module import EagleModule
from megalight.models.module import MegalightModule
from megalight.parallel.step import share_of_batch
from megalight.types import TokenBatch


class Rows:
    """A batch whose method is the documented one, without later tokens."""

    def context_share(self, rank: int, size: int, multiple: int = 1) -> tuple[int, int, int]:
        return rank, size, multiple


class Short:
    """A batch whose method lacks an argument."""

    def context_share(self, rank: int, size: int) -> None:
        return None


def test_the_batch_is_asked() -> None:
    assert share_of_batch("Mine", Rows(), 1, 2, 4) == (1, 2, 4)
    rows = torch.arange(16).view(1, 16)
    batch = TokenBatch(rows, rows, torch.ones(1, 16))
    share = share_of_batch("Mine", batch, 0, 2, 1, ahead=2)
    assert share.tokens.tolist() == batch.context_share(0, 2, 1, ahead=2).tokens.tolist()


@pytest.mark.parametrize(("batch", "ahead"), [(object(), 0), (Short(), 0), (object(), 1), (Rows(), 1)])
def test_a_batch_without_such_a_method_is_refused(batch: Any, ahead: int) -> None:
    needed = "rank, size, multiple, ahead" if ahead else "rank, size, multiple"
    message = rf"of type \w+ cannot be cut.*\(cp=2\); give it a context_share\({needed}\) method.*Mine\.context_share"
    with pytest.raises(ConfigurationError, match=message):
        share_of_batch("Mine", batch, 0, 2, 1, ahead)


@pytest.mark.parametrize("kind", [EagleModule, MegalightModule])
def test_modules_refuse_foreign_batches(kind: type[MegalightModule]) -> None:
    module = cast(Any, SimpleNamespace(steps=3, token_multiple=1))
    with pytest.raises(ConfigurationError, match="a batch of type dict cannot be cut for context parallelism"):
        kind.context_share(module, {}, 0, 2)
