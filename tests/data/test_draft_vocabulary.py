"""The vocabulary of a draft: the most frequent ids of corpora."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megalight.cli.main import main
from megalight.data import corpus
from megalight.data.corpus import frequent_ids
from megalight.data.indexed import IndexedWriter
from megalight.errors import DataError
from megalight.models.eagle import read_vocabulary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, ids in (("a", [9] * 5 + [2] * 4 + [7] * 3 + [30]), ("b", [7, 7, 1, 4])):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            writer.add_documents(np.array(ids), [len(ids)])
    return tmp_path


def test_the_most_frequent_ids_of_several_corpora(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK", 3)
    both = [str(folder / name) for name in "ab"]
    assert frequent_ids(both, 2) == ([7, 9], 10 / 17)
    # Of equally frequent ones, the lower.
    assert frequent_ids(both, 4) == ([1, 2, 7, 9], 15 / 17)
    with pytest.raises(DataError, match="the data has 6 different ids, and 7 are asked for"):
        frequent_ids(both, 7)
    with pytest.raises(DataError, match="a vocabulary of 0 ids is none"):
        frequent_ids(both, 0)


def test_the_command_writes_a_file_that_drafts_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["draft-vocabulary", str(folder / "a"), "--size", "2", "--output", str(folder / "ids.json")]
    assert main(words) == 0
    assert "2 ids, 69.23% of the tokens" in capsys.readouterr().out
    assert read_vocabulary(folder / "ids.json") == (2, 9)
    assert json.loads((folder / "ids.json").read_text()) == [2, 9]
    assert main(words) != 0
    assert "is there already" in capsys.readouterr().err
