"""Writing the tensors of a source lists its names a few times, however many there are, and holds bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight import checkpoint
from megalight.checkpoint import view
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.sources import AveragedSource, TensorSource, rewrite
from megalight.checkpoint.view import views_of_source
from megalight.parallel.source import FillReport, Source, Target, TensorMetadata


@dataclass
class Counting:
    """A source that counts how often its names are listed, and the bytes that each fill asks for."""

    source: Source
    listings: int = 0
    fills: list[int] = field(default_factory=list)

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        self.listings += 1
        return self.source.tensors

    def fill(self, targets: Iterable[Target], **options: Any) -> FillReport:
        boxes = list(targets)
        self.fills.append(sum(box.data.nbytes for box in boxes))
        return self.source.fill(boxes, **options)


def held(count: int) -> TensorSource:
    # Optimizer state lies between weights; one tensor has no dims.
    values = {
        f"{kind}.{n}.weight": torch.full((3, 5), n + 0.5) for n in range(count) for kind in ("model", "optimizer")
    }
    return TensorSource({**values, "model.scale": torch.tensor(7.0)})


def write(path: Path, source: Source) -> None:
    with alone() as group:
        checkpoint.save(path, views_of_source(source, list(source.tensors), None, group), process_group=group)


def assert_same(path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    opened = checkpoint.open(path)
    assert opened.tensors.keys() == expected.keys()
    found = {name: torch.empty_like(value) for name, value in expected.items()}
    opened.fill([Target(name, tuple(value.shape), (0,) * value.ndim, value) for name, value in found.items()])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_names_are_listed_as_often_for_few_tensors_as_for_many(tmp_path: Path) -> None:
    passes = []
    for count in (10, 80):
        source = Counting(held(count))
        write(tmp_path / f"{count}", source)
        assert_same(tmp_path / f"{count}", held(count).values)
        rewritten: list[Counting] = []

        def watched(original: Source, seen: list[Counting] = rewritten) -> Source:
            seen.append(Counting(original))
            return seen[0]

        rewrite(tmp_path / f"{count}", tmp_path / f"flat-{count}", "dp_reshardable", watched)
        rewrite(tmp_path / f"flat-{count}", tmp_path / f"again-{count}", "fully_reshardable", lambda same: same)
        assert_same(tmp_path / f"again-{count}", held(count).values)
        mean = Counting(held(count))
        write(tmp_path / f"mean-{count}", AveragedSource(mean, [held(count)]))
        assert_same(tmp_path / f"mean-{count}", held(count).values)
        passes.append([(each.listings, len(each.fills)) for each in (source, rewritten[0], mean)])
    assert passes[0] == passes[1]


def test_tensors_that_are_read_together_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "BUDGET", 1000)
    source = Counting(held(40))
    write(tmp_path / "a", source)
    assert_same(tmp_path / "a", held(40).values)
    # 16 of 80 tensors of 60 bytes go together; the tensor without dims has room beside the last 16.
    assert max(source.fills) <= 1000
    assert len(source.fills) == 5
