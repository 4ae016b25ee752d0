"""WebDataset shards become the same data as rows and files beside them."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.data.corpus import Corpus
from megalight.data.multimodal.prepare import prepare_multimodal
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.multimodal.conftest import png, row

PICTURES = [png(color=(number, 0, 0)) for number in range(3)]


def shard(path: Path, files: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def talk(question: str, **more: Any) -> bytes:
    return json.dumps(row(None, question) | more).encode()


FILES = [
    ("a/0001.jpg", PICTURES[0]),
    ("a/0001.json", talk("<image>what is this")),
    ("a/0002.json", talk("what is this")),
    ("a/0003.0.png", PICTURES[1]),
    ("a/0003.1.png", PICTURES[2]),
    ("a/0003.json", talk("<image> and <image>", images=["1.png", "a/0003.0.png"])),
    ("__index__.json", b"{}"),
]
ROWS = [row("0.png", "<image>what is this"), row(None, "what is this"), row(["2.png", "1.png"], "<image> and <image>")]


@pytest.fixture
def made(tmp_path: Path, image_tokenizer: Path) -> Callable[..., Any]:
    def make(*paths: Path, **options: Any) -> Any:
        options = {"workers": 1, "progress": False, **options}
        return prepare_multimodal([*map(str, paths)], tmp_path / "out" / "s", tokenizer=image_tokenizer, **options)

    return make


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_shards_and_rows_give_the_same(
    workers: int, made: Callable[..., Any], prepared: Callable[..., Any], tmp_path: Path
) -> None:
    for number, data in enumerate(PICTURES):
        (tmp_path / f"{number}.png").write_bytes(data)
    expected = Corpus.open(prepared(ROWS).prefix)
    folder = tmp_path / "shards"
    folder.mkdir()
    shard(folder / "0.tar", FILES[:3])
    shard(folder / "1.tar", FILES[3:])
    report = made(folder, workers=workers)
    found = Corpus.open(report.prefix)
    assert (report.num_files, report.meta.num_images) == (2, 3)
    assert np.array_equal(found.data.tokens, expected.data.tokens)
    assert found.images is not None
    assert expected.images is not None
    assert np.array_equal(found.images.tokens, expected.images.tokens)
    assert found.images.documents.tolist() == expected.images.documents.tolist()


def test_the_package_writes_what_is_read(made: Callable[..., Any], tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar"), encoder=False) as writer:
        writer.write({"__key__": "x/1", "png": PICTURES[1], "json": talk("<image>what")})
        writer.write({"__key__": "x/2", "png": PICTURES[2], "txt": b" a red thing \n"})
    corpus = Corpus.open(made(tmp_path / "w.tar").prefix)
    assert corpus.images is not None
    assert [corpus.images.get(i).tobytes() for i in range(2)] == PICTURES[1:]


def test_captions(made: Callable[..., Any], tmp_path: Path) -> None:
    report = made(shard(tmp_path / "c.tar", [("1.png", PICTURES[0]), ("1.txt", b" a red thing\n")]))
    corpus, tokenizer = Corpus.open(report.prefix), Tokenizer.load(report.tokenizer)
    said = tokenizer.decode(corpus.data.get(0).tolist())
    assert said == "<|user|><image><|endoftext|><|assistant|>a red thing<|endoftext|>"


GOOD = FILES[:2]
BAD = {
    "no row": ([("b.png", PICTURES[0])], r"b has the parts png; it needs json, a row, or txt"),
    "not JSON": ([("b.json", b"{")], r"sample b: its json is not JSON"),
    "an array": ([("b.json", b"[]")], r"sample b: its json is a list"),
    "no image": ([("b.png", PICTURES[0]), ("b.json", talk("<image>", image="c.png"))], r"the row names the image 'c"),
    "too few": ([("b.json", talk("<image>"))], r"holds '<image>' 1 times, and there are 0 images"),
    "a video": ([("b.mp4", b""), ("b.json", talk("what", video="b.mp4"))], r"has a video \(key 'video'\)"),
    "no text": ([("b.png", PICTURES[0]), ("b.txt", b"\xff")], r"its txt is not UTF-8 text \(byte 0xff at position 0: "),
    "no picture": (
        [("b.txt", b"a red thing")],
        r"sample b has a caption, and no image; the files .* next to each other",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_samples_are_refused_or_skipped(kind: str, made: Callable[..., Any], tmp_path: Path) -> None:
    files, message = BAD[kind]
    path = shard(tmp_path / "b.tar", [*GOOD, *files])
    with pytest.raises(DataError, match=message):
        made(path)
    report = made(path, on_bad="skip")
    assert report.meta.num_documents == 1
    (said,) = report.skipped
    assert re.search(message, said)


def test_bad_files_are_refused_or_skipped(made: Callable[..., Any], tmp_path: Path) -> None:
    good, whole = shard(tmp_path / "g.tar", GOOD), shard(tmp_path / "w.tar", FILES[3:]).read_bytes()
    cut, packed, twice = tmp_path / "cut.tar", tmp_path / "p.tar.gz", shard(tmp_path / "t.tar", [*GOOD, *GOOD[:1]])
    cut.write_bytes(whole[:700])
    packed.write_bytes(gzip.compress(whole))
    between, joined = tmp_path / "between.tar", tmp_path / "joined.tar"
    between.write_bytes(whole[:2048])  # a picture and its row, and no word of what followed
    joined.write_bytes(whole + whole)
    for path, message in (
        (cut, "cut.tar"),
        (packed, "Unpack .tar.gz files first"),
        (twice, "has the part 'jpg' twice"),
        (between, "cut off between two of its files"),
        (joined, "goes on after its end"),
    ):
        with pytest.raises(DataError, match=message):
            made(good, path)
        report = made(good, path, on_bad="skip")
        assert report.meta.num_documents == 1
        assert message in report.skipped[0]
