from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from megalight.errors import ConfigurationError
from megalight.models.batches import Loaded, count_samples, loaded, split_batch

TOKENS = torch.arange(96).reshape(8, 12)
BOXES = tuple({"boxes": torch.full((k + 1, 4), k)} for k in range(8))
PICTURES = tuple(torch.full((3, 4 + k, 5), k) for k in range(8))
MASK, WEIGHTS, SCALE = torch.ones(1, 12), torch.arange(10.0), torch.tensor(0.5)


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    if isinstance(found, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, tuple | list):
        assert type(found) is type(expected)
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


@pytest.mark.parametrize(
    ("batch", "first", "told"),
    [
        (TOKENS, TOKENS[:4], Loaded()),
        ([TOKENS, TOKENS], [TOKENS[:4], TOKENS[:4]], Loaded()),
        # a list of samples: told, or known by the batch size
        (list(TOKENS), list(TOKENS[:4]), Loaded(form="list")),
        (list(TOKENS), list(TOKENS[:4]), Loaded(frozenset([8]))),
        (list(TOKENS[:, :8]), list(TOKENS[:4, :8]), Loaded(form="list")),
        ([{"x": t} for t in TOKENS], [{"x": t} for t in TOKENS[:4]], Loaded(frozenset([8]))),
        # two tensors are two lists of samples, too: the default collation decides
        ([TOKENS[:, :2]] * 8, [TOKENS[:4, :2]] * 8, Loaded(frozenset([8]), form="columns")),
        # as collate_fn=lambda samples: tuple(zip(*samples)) of detectors
        ((PICTURES, BOXES), (PICTURES[:4], BOXES[:4]), Loaded(frozenset([8]))),
        # what has no samples is part of every micro-batch
        (
            {"x": TOKENS, "mask": MASK, "scale": SCALE, "weights": WEIGHTS, "names": list("abcdefgh"), "none": None},
            {"x": TOKENS[:4], "mask": MASK, "scale": SCALE, "weights": WEIGHTS, "names": list("abcd"), "none": None},
            Loaded(frozenset([8])),
        ),
        ({"weights": WEIGHTS, "x": TOKENS}, {"weights": WEIGHTS, "x": TOKENS[:4]}, Loaded(frozenset([8]))),
        ((TOKENS, MASK, SCALE), (TOKENS[:4], MASK, SCALE), Loaded()),
    ],
)
def test_a_batch_is_cut_between_samples(batch: Any, first: Any, told: Loaded) -> None:
    parts = split_batch(batch, 4, told)
    assert len(parts) == 2
    assert same(parts[0], first)
    assert count_samples(batch, told) == 8
    assert [count_samples(part, told._replace(full=frozenset([4]))) for part in parts] == [4, 4]


def test_the_last_batch_may_be_smaller() -> None:
    told = Loaded(frozenset([8]), frozenset([5]))
    for batch in (list(TOKENS[:5]), (TOKENS[:5], WEIGHTS)):
        assert count_samples(batch, told) == 5
        assert len(split_batch(batch, 2, told)) == 3
    # the length of a stream is not known, but no batch is larger than the others
    assert same(split_batch(list(TOKENS[:3]), 2, Loaded(frozenset([8])))[1], [TOKENS[2]])


@pytest.mark.parametrize(
    ("batch", "told", "message"),
    [
        ({"x": TOKENS, "w": WEIGHTS}, Loaded(), r"batch\['x'\] has the shape \[8, 12\], and batch\['w'\] has the .*10"),
        (
            [TOKENS[:2], TOKENS[:2]],
            Loaded(frozenset([2])),
            r"batch is a list of 2, and batch\[0\] has the shape \[2, 1",
        ),
        ({"a": TOKENS, "b": TOKENS[:4]}, Loaded(frozenset([8, 4])), r"batch\['a'\] .*, and batch\['b'\] has .*\[4, 12"),
        (SCALE, Loaded(), "a Tensor has no dim of samples"),
        ({"x": TOKENS, "y": object()}, Loaded(), r"batch\['y'\], of type object, cannot be cut"),
    ],
)
def test_an_uncertain_batch_is_refused(batch: Any, told: Loaded, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_batch(batch, 1, told)


def test_loaders_tell_the_number_of_samples() -> None:
    data = TensorDataset(TOKENS)
    loaders = {"a": DataLoader(data, batch_size=3), "b": [DataLoader(data, batch_size=8, collate_fn=default_collate)]}
    stage = SimpleNamespace(training=True, testing=False, train_dataloader=loaders, val_dataloaders=None)
    assert loaded(stage) == Loaded(frozenset([3, 8]), frozenset([2, 0]), "columns")
    stage.train_dataloader = DataLoader(data, batch_sampler=[[0, 1], [2]], collate_fn=list)
    assert loaded(stage) == Loaded(form="list")
    assert loaded(None) == Loaded()
