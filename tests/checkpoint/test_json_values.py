"""Trees come back exactly, types and all; what cannot be kept is named with its place."""

from __future__ import annotations

import enum
import math
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalight.checkpoint import json_values
from megalight.checkpoint.disk.files import CODES
from megalight.errors import CheckpointError


def back(value: Any) -> Any:
    text, data = json_values.dumps(value, "common")
    return json_values.loads(text, data, "common")


def test_tensors_lie_on_the_host_also_where_models_are_built_on_meta() -> None:
    with torch.device("meta"):
        found = back({"score": torch.tensor([1.5, 2.0], device="cpu")})
    assert found["score"].tolist() == [1.5, 2.0]


VALUES = [
    None, True, 0, -(2**200), 1.5, -0.0, 1e-320, math.inf, -math.inf, "", "ü\0\n", "$dict", b"", b"\0\xff",
    [], {}, (), ((),), [1, [2, (3, None)]], {"a": {"b": (1,)}}, {1: 2, (3, "x"): [4], None: 5, 1.5: 7, b"k": 8},
    {"$tuple": [1]}, {"$": 1, "a": 2}, {1, 2}, frozenset({"a"}), OrderedDict([("b", 1), ("a", 2)]), Counter({3: 2}),
    torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1),
    random.Random(0).getstate(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_plain_values_come_back_exactly(value: Any) -> None:
    again = back(value)
    assert type(again) is type(value)
    assert repr(again) == repr(value)


def test_nan_comes_back() -> None:
    assert math.isnan(back([math.nan])[0])


def test_the_order_of_keys_is_kept() -> None:
    assert list(back({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]
    assert list(back({2: 1, 1: 2, "c": 3})) == [2, 1, "c"]


@pytest.mark.parametrize("name", CODES)
def test_tensors_of_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(2, -1) if name != "bool" else raw.bool().reshape(2, -1)
    for value in (tensor, tensor[0, 0], tensor[:0], tensor.t()):
        again = back({"x": [value]})["x"][0]
        assert again.dtype == dtype
        assert again.shape == value.shape
        assert torch.equal(
            again.contiguous().reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8)
        )


def test_tensors_stand_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    first, second = back((parameter, parameter))
    first += 1
    assert type(first) is torch.Tensor
    assert second.tolist() == [1, 1, 1]


def test_numpy_random_state() -> None:
    state = np.random.RandomState(3).get_state()
    again = back(state)
    assert type(again) is tuple
    np.testing.assert_array_equal(again[1], state[1])
    assert again[1].dtype == state[1].dtype
    assert again[2:] == state[2:]
    number = back(np.float64(1.5))
    assert (type(number), number) == (np.float64, 1.5)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, Color.RED, Path("x"), defaultdict(list), torch.nn.Linear(1, 1), np.array(["a"]), type],
)
def test_unknown_types_are_named_with_their_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"at common\['a'\]\[1\]\[0\]\['b'\] is of type .* Give plain values"):
        json_values.dumps({"a": [0, ({"b": value},)]}, "common")


def test_what_json_cannot_hold() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="inside itself"):
        json_values.dumps({"a": endless}, "common")
    with pytest.raises(CheckpointError, match="complex128"):
        json_values.dumps({"a": torch.ones(1, dtype=torch.complex128)}, "common")
