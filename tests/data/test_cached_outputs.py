"""Records on disk are complete, or not noted as there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.data.cached_outputs import CachedLogits, CachedLogitsMeta, RecordsWriter
from megalight.data.gpt.dataset import GPTSample


def test_a_record_that_the_system_writes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = CachedLogitsMeta(
        samples=2,
        order="o",
        sequence_length=3,
        tokenizer=None,
        top_k=2,
        vocab_size=9,
        temperature=1.0,
        dtype="float32",
    )
    draw, pwrite = np.random.default_rng(0), os.pwrite
    values = {"ids": draw.integers(9, size=(3, 2)), "log_probs": draw.normal(size=(3, 2)), "log_rest": np.ones(3)}
    sample = GPTSample(np.arange(3), np.arange(3), np.ones(3), None)

    def short(file: int, content: Any, offset: int) -> int:
        return pwrite(file, content[:7], offset)

    monkeypatch.setattr(os, "pwrite", short)
    with RecordsWriter(tmp_path / "store", meta) as writer:
        for index in range(2):
            writer.add("train", index, sample, values)
        assert writer.finish()
    found = CachedLogits(tmp_path / "store")
    for index in range(2):
        np.testing.assert_array_equal(found.read(index, sample).ids, values["ids"])
