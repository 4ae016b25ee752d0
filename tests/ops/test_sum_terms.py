from __future__ import annotations

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops.sum_terms import sum_terms


@pytest.mark.parametrize("place", [0, 1, 2])
def test_terms_are_summed_in_the_order_of_ranks(place: int) -> None:
    """In float32, 2**24 + 1 - 2**24 depends on the order."""
    terms = [torch.tensor([1.0]), torch.tensor([2.0**24]), torch.tensor([-(2.0**24)])]
    own = terms.pop(place)
    out = torch.full((1,), 5.0)
    sum_terms(out, own, terms, place)
    assert out.item() == 0.0
    sum_terms(out, own, terms, place, add=True)
    assert out.item() == 0.0


def test_half_terms_are_rounded_once() -> None:
    terms = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = torch.zeros(1, dtype=torch.bfloat16)
    sum_terms(out, terms[0], list(terms[1:]), 0)
    assert out.item() == 258.0  # 256 + 1 rounds to 256
    sum_terms(terms[0], terms[0], list(terms[1:]), 0)  # in place
    assert terms[0].item() == 258.0


def test_a_backend_that_cannot_serve_says_why() -> None:
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(BackendError, match=r"triton.*float64"):
        sum_terms(one, one, [one], 0, backend="triton")
