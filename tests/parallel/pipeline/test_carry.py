"""What travels between stages: forms, headers, and what two ends of an edge remember."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megalight.parallel.pipeline.executor import check_carry
from megalight.parallel.pipeline.p2p_communication import Forms, decode, encode, form_of, signature
from megalight.types import TokenBatch

CARRY = {
    "hidden": torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True),
    "count": torch.zeros((), dtype=torch.int64),
}


def test_a_header_says_all_that_a_receiver_needs() -> None:
    form = form_of(CARRY)
    assert decode(encode(form)) == form
    assert [entry.buffer(torch.device("cpu")).shape for entry in form] == [(3, 4), ()]
    assert [entry.requires_grad for entry in form] == [True, False]
    assert decode(encode(())) == ()


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"forward_step returned Tensor on stage 1; it must return a dict"):
        check_carry(torch.zeros(2), "stage 1")
    with pytest.raises(TypeError, match=r"forward_step returned 'hidden': list on stage 0"):
        check_carry({"hidden": [1]}, "stage 0")


def test_signatures_follow_shapes_and_plain_values_but_not_numbers_in_tensors() -> None:
    def batch(rows: int, fill: int, documents: tuple[tuple[int, ...], ...] | None = None) -> TokenBatch:
        ids = torch.full((rows, 6), fill)
        return TokenBatch(ids, ids, ids.float(), documents)

    assert signature(batch(2, 0)) == signature(batch(2, 7))
    different = [batch(2, 0), batch(3, 0), batch(1, 0, ((2, 4),)), batch(1, 0, ((3, 3),))]
    assert len({signature(each) for each in different}) == 4
    assert signature({"x": torch.zeros(2), "y": (1, "a")}) == signature({"x": torch.ones(2), "y": (1, "a")})


@dataclass
class Opaque:
    inside: object


@pytest.mark.parametrize("batch", [object(), Opaque(object()), {"x": {1, 2}}])
def test_batches_that_cannot_be_seen_through_have_none(batch: object) -> None:
    assert signature(batch) is None


def test_the_oldest_form_is_forgotten_first() -> None:
    forms, form = Forms(most=2), form_of(CARRY)
    for key in ("a", "b", "c", None):
        forms.put(key, form)
    assert [forms.get(key) for key in ("a", "b", "c", None)] == [None, form, form, None]


def test_a_form_names_its_entries() -> None:
    x: Tensor = CARRY["hidden"]
    assert str(form_of({"x": x})[0]) == "x [3, 4] bfloat16 with a gradient"
    assert str(form_of({"x": x.detach()})[0]) == "x [3, 4] bfloat16"
