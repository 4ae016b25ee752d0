from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megalight.data.cache import Arrays, build_once
from megalight.errors import DataError
from tests.support.workers import SERVER

FACTS = {"seed": 1}


def arrays() -> Arrays:
    return {"a": np.arange(1000), "b": np.ones((3, 2), np.float32)}


def never() -> Arrays:
    raise AssertionError("built again")


def build_slowly(folder: str, log: str) -> int:
    """Builds with a pause long enough for all others to arrive, and writes down that it did."""

    def slow() -> Arrays:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.5)
        return arrays()

    return int(build_once(folder, "x", FACTS, slow)["a"].sum())


def die_while_building(folder: str) -> None:
    def fatal() -> Arrays:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    build_once(folder, "x", FACTS, fatal)


def test_builds_once_and_maps(tmp_path: Path) -> None:
    first = build_once(tmp_path, "x", FACTS, arrays)
    again = build_once(tmp_path, "x", FACTS, never)
    for found in (first, again):
        assert found.keys() == {"a", "b"}
        assert np.array_equal(found["a"], np.arange(1000))
        assert found["b"].dtype == np.float32
        assert not found["a"].flags.writeable
        assert type(found["a"]) is np.ndarray
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert json.loads((entry / "description.txt").read_text()) == {"label": "x", **FACTS}


def test_an_address_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"cache_dir is 's3://bucket/cache'; caches are mapped.* mounts"):
        build_once("s3://bucket/cache", "x", FACTS, arrays)
    assert not [*tmp_path.iterdir()]


def test_another_description_is_another_entry(tmp_path: Path) -> None:
    build_once(tmp_path, "x", FACTS, arrays)
    other = build_once(tmp_path, "x", {"seed": 2}, lambda: {"a": np.zeros(1)})
    assert other["a"].tolist() == [0]
    assert len(build_once(tmp_path, "x", FACTS, never)["a"]) == 1000


@pytest.mark.parametrize("damage", ["truncate", "description", "missing"])
def test_a_torn_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    build_once(tmp_path, "x", FACTS, arrays)
    (file,) = tmp_path.glob("*/a.npy")
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "description":
        (file.parent / "description.txt").write_text("{}")
    else:
        (file.parent / "description.txt").unlink()
    assert len(build_once(tmp_path, "x", FACTS, arrays)["a"]) == 1000
    assert len(build_once(tmp_path, "x", FACTS, never)["a"]) == 1000


def test_many_processes_build_once_also_after_one_was_killed(tmp_path: Path) -> None:
    victim = SERVER.Process(target=die_while_building, args=(str(tmp_path),))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    with SERVER.Pool(3) as pool:
        sums = pool.starmap(build_slowly, [(str(tmp_path), str(tmp_path / "log"))] * 3, chunksize=1)
    assert sums == [499_500] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        build_once(tmp_path, "x", FACTS, never)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(build_once(tmp_path, "x", FACTS, arrays)["a"]) == 1000


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set cache_dir to a writable folder"):
        build_once(tmp_path / "file", "x", FACTS, arrays)
