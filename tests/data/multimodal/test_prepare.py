"""``megalight prepare --multimodal``: what is stored, and what is refused or skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.cli.main import main
from megalight.data.corpus import Corpus, CorpusMeta
from megalight.data.multimodal.images import decode, measure
from megalight.data.multimodal.prepare import prepare_multimodal
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.multimodal.conftest import TEMPLATE, png, row


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(color=(number, 0, 0)))


GOOD = [row("0.png", "<image>what is this"), row(None, "what is this"), row(["1.png", "2.png"], "<image> and <image>")]


def test_tokens_loss_and_images_of_conversations(prepared: Callable[..., Any], tmp_path: Path) -> None:
    report = prepared(GOOD)
    corpus = Corpus.open(report.prefix)
    meta = corpus.meta
    assert meta is not None
    assert (corpus.kind, meta.num_images, meta.num_documents) == ("images", 3, 3)
    assert corpus.images is not None
    assert corpus.loss is not None
    assert corpus.images.documents.tolist() == [0, 1, 1, 3]
    tokenizer = Tokenizer.load(report.tokenizer)
    assert meta.image_token == tokenizer.vocabulary["<image>"]
    for index, count in enumerate((1, 0, 2)):
        assert (corpus.data.get(index) == meta.image_token).sum() == count
        said = corpus.data.get(index)[corpus.loss.get(index) == 1]
        assert tokenizer.decode(said.tolist()) == "a red thing<|endoftext|>"
    # the bytes of the files, unchanged
    assert [corpus.images.get(i).tobytes() for i in range(3)] == [png(color=(i, 0, 0)) for i in range(3)]
    assert "3 images" in str(report)


def test_images_may_be_spelled_as_the_model_has_them(prepared: Callable[..., Any]) -> None:
    corpus = Corpus.open(prepared(GOOD, image_text="(<image>)").prefix)
    tokenizer = Tokenizer.load(prepared(GOOD, name="plain").tokenizer)
    assert corpus.meta is not None
    assert "(<image>)what is this" in tokenizer.decode(corpus.data.get(0).tolist())
    with pytest.raises(
        DataError, match=re.escape("image_text is '<img>'; it must hold the image token '<image>' once")
    ):
        prepared(GOOD, image_text="<img>")


def test_messages_may_have_parts(prepared: Callable[..., Any]) -> None:
    """As in data sets of Hugging Face, where Parquet fills absent keys with nulls."""
    text, there = {"type": "text", "text": "what is this"}, {"type": "image", "text": None}
    own = [{"type": "image", "image": "0.png"}, {"type": "image_url", "image_url": {"url": "1.png"}}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red thing"}]}
    rows = [
        {"messages": [{"role": "user", "content": [there, text]}, answer], "images": ["0.png"], "image": None},
        {"messages": [{"role": "user", "content": [*own, text]}, answer], "images": None},
        row("0.png", "<image>what is this") | {"images": None},
    ]
    corpus = Corpus.open(prepared(rows, image_text="(<image>)").prefix)
    tokenizer = Tokenizer.load(prepared(GOOD, name="plain").tokenizer)
    first, second, third = (tokenizer.decode(corpus.data.get(number).tolist()) for number in range(3))
    assert first == third == "<|user|>(<image>)what is this<|endoftext|><|assistant|>a red thing<|endoftext|>"
    assert second == first.replace("(<image>)", "(<image>)(<image>)")
    assert corpus.images is not None
    assert corpus.images.documents.tolist() == [0, 1, 3, 4]


def test_messages_that_are_marked_are_not_learned(prepared: Callable[..., Any]) -> None:
    ask, (_, answer) = {"role": "user", "content": "<image>"}, row("0.png", "<image>")["conversations"]
    said = answer.get("value") or answer["content"]
    messages = [ask, {"role": "assistant", "content": "bad", "weight": 0}, {"role": "user", "content": "again"}]
    report = prepared([{"messages": [*messages, {"role": "assistant", "content": said}], "image": "0.png"}])
    corpus = Corpus.open(report.prefix)
    assert corpus.loss is not None
    learned = corpus.data.get(0)[corpus.loss.get(0) == 1]
    assert Tokenizer.load(report.tokenizer).decode(learned.tolist()) == f"{said}<|endoftext|>"


def test_nothing_but_bad_rows_names_one(prepared: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"all that was read is bad \(2 rows or files\), such as: .* entry 0, image 0"):
        prepared([row("none.png", "<image>"), row(None, "<image>")], on_bad="skip")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_json_lines_and_workers_give_the_same(
    workers: int, prepared: Callable[..., Any], tmp_path: Path, image_tokenizer: Path
) -> None:
    array = Corpus.open(prepared(GOOD).prefix)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in GOOD))
    report = prepare_multimodal(
        [str(tmp_path / "lines.jsonl")], tmp_path / "lines", tokenizer=image_tokenizer, workers=workers, progress=False
    )
    lines = Corpus.open(report.prefix)
    assert np.array_equal(array.data.tokens, lines.data.tokens)
    assert array.images is not None
    assert lines.images is not None
    assert np.array_equal(array.images.tokens, lines.images.tokens)


def test_parquet_holds_the_bytes_of_images(tmp_path: Path, image_tokenizer: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{**row(None, "<image>what"), "images": [{"bytes": png(), "path": "gone.png"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    report = prepare_multimodal(
        [str(tmp_path / "rows.parquet")], tmp_path / "p", tokenizer=image_tokenizer, progress=False
    )
    images = Corpus.open(report.prefix).images
    assert images is not None
    assert images.get(0).tobytes() == png()


BAD = {
    "missing": (row("none.png", "<image>"), r"image 0 \(.*none\.png\) cannot be read: No such file.*--images"),
    "damaged": (row("cut.png", "<image>"), r"cut\.png\) cannot be read as an image"),
    "the beginning": (row("begin.png", "<image>"), r"begin\.png\) begins as PNG, and is damaged.*Write the file again"),
    "no image": (row("text.png", "<image>"), r"text\.png\) is no image that Pillow can read: it begins with b"),
    "an empty file": (row("empty.png", "<image>"), r"empty\.png\) is empty; write the file again"),
    "an address": (row("https://a.b/c.png", "<image>"), r"c\.png.; images are read from files, so download it"),
    "too few": (row(["0.png", "1.png"], "<image>"), r"holds '<image>' 1 times, and there are 2 images"),
    "too many": (row("0.png", "<image><image>"), r"holds '<image>' 2 times, and there are 1 images"),
    "none": (row(None, "<image>"), r"holds '<image>' 1 times, and there are 0 images"),
    "no characters": (row("", "<image>"), "image 0 is ''; it must be the path of a file"),
    "no path": (row("a\0.png", "<image>"), r"image 0 .* cannot be read: embedded null"),
    "an image in the text": (row("data:image/png;base64,AA", "<image>"), "image 0 is 'data:image/png.*read from files"),
    "two places": (
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "0.png"}]}], "images": ["0.png"]},
        "has images beside its messages and in them",
    ),
    "a number": (row(7, "<image>"), r"image 0 is '7'; it must be the path of a file"),
    "a video": (row(None, "what") | {"video": "a.mp4"}, r"has a video \(key 'video'\), and videos are not read"),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        r"has a video \(a message with a part of type 'video'\)",
    ),
    "a film": (row("film.png", "<image>"), r"film\.png\) is a video, and videos are not read"),
    "a pair": (
        {"image": "0.png", "prompt": "<image>what", "chosen": "a", "rejected": "b"},
        r"entry 1 is a preference pair, and pairs with images are not read",
    ),
    "no row": (["a"], r"entry 1 is of type list; each row must be a JSON object"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_are_refused_or_skipped(kind: str, prepared: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png(64, 64)[:-30])
    (tmp_path / "begin.png").write_bytes(png()[:8] + b"and no chunk")
    (tmp_path / "text.png").write_text("this is text")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "film.png").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(40))
    bad, message = BAD[kind]
    rows = [GOOD[0], bad, GOOD[2]]
    with pytest.raises(DataError, match=message):
        prepared(rows)
    assert not (tmp_path / "out" / "talk.bin").exists()
    report = prepared(rows, on_bad="skip")
    (said,) = report.skipped
    assert re.search(message, said)
    # what was skipped leaves no image behind
    corpus = Corpus.open(report.prefix)
    assert corpus.images is not None
    assert corpus.images.documents.tolist() == [0, 1, 3]


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 1000)
    assert decode(png(20, 50), "here").size == (20, 50)
    for side in (40, 80):  # Pillow only warns of the first
        with pytest.raises(DataError, match=r"here is refused: Image size .* exceeds limit"):
            decode(png(side, side), "here")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_workers_have_the_limit_of_the_process(
    workers: int, prepared: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("PIL.Image"), "MAX_IMAGE_PIXELS", 1000)
    (tmp_path / "large.png").write_bytes(png(40, 40))
    with pytest.raises(DataError, match=r"large\.png\) is refused: .* make it smaller, or raise PIL"):
        prepared([row("large.png", "<image>")], workers=workers)


def test_a_tokenizer_without_the_image_token_is_refused(
    prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"the tokenizer has no token '<img>' of its own.*--image-token"):
        prepared(GOOD, image_token="<img>")


def test_tokens_of_videos_are_refused(tmp_path: Path) -> None:
    special = ("<image>", "<video>", "<|user|>", "<|assistant|>")
    tokenizer = Tokenizer.train(["what is this in the picture a red thing " * 9], 275, special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "rows.json").write_text(json.dumps([row(None, "<video> what is this")]))
    with pytest.raises(DataError, match=r"entry 0 has '<video>', which stands for a video, and videos are not read"):
        prepare_multimodal(
            [str(tmp_path / "rows.json")], tmp_path / "p", tokenizer=tmp_path / "tokenizer", progress=False
        )


@pytest.mark.parametrize("start", [b"\0\0\0\x18ftypisom", b"RIFF\0\0\0\0AVI LIST", b"\x1aE\xdf\xa3", b"\0\0\1\xba"])
def test_videos_are_told_from_damaged_images(start: bytes) -> None:
    for read in (decode, measure):
        with pytest.raises(DataError, match="here is a video, and videos are not read"):
            read(start + bytes(30), "here")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.json", "{}", r"holds a dict; .* an array of rows\. If each of its lines is a row, .*--format jsonl"),
        ("rows.json", "[1,", r"is not JSON: Expecting value: [^.]*\.$"),
        ("rows.json", "{}\n{}", r"is not JSON: Extra data.* If each of its lines is a row, say so .*--format jsonl"),
        ("rows.jsonl", "{}{}\n", r"line 1 is not JSON .* something follows it here\. Is a line break missing\?"),
        ("rows.jsonl", "[\n {}\n]\n", r"line 1 is not JSON .* An array of rows is read with format='json'"),
        ("rows.jsonl", '{"a": "b', r"line 1 is not JSON .* Is the file incomplete\?"),
    ],
)
def test_other_forms_of_rows_are_told(
    name: str, text: str, message: str, tmp_path: Path, image_tokenizer: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        prepare_multimodal([str(tmp_path / name)], tmp_path / "p", tokenizer=image_tokenizer, progress=False)


@pytest.mark.parametrize(("end", "last"), [("\n", ""), ("\r\n", "\r\n"), ("\n\n", "\n")])
def test_the_last_line_needs_no_end(
    end: str, last: str, prepared: Callable[..., Any], tmp_path: Path, image_tokenizer: Path
) -> None:
    array = Corpus.open(prepared(GOOD).prefix)
    (tmp_path / "rows.jsonl").write_bytes((end.join(map(json.dumps, GOOD)) + last).encode())
    report = prepare_multimodal(
        [str(tmp_path / "rows.jsonl")], tmp_path / "p", tokenizer=image_tokenizer, workers=1, progress=False
    )
    assert np.array_equal(array.data.tokens, Corpus.open(report.prefix).data.tokens)


def test_the_files_belong_together(prepared: Callable[..., Any], tmp_path: Path) -> None:
    one, other = prepared(GOOD, "one"), prepared(GOOD[:1], "other")
    for suffix in (".bin", ".idx"):
        (tmp_path / "out" / f"one.images{suffix}").write_bytes(
            (tmp_path / "out" / f"other.images{suffix}").read_bytes()
        )
    with pytest.raises(DataError, match=r"holds 1 images of 1 conversations, not 3 of 3"):
        Corpus.open(one.prefix)
    assert CorpusMeta.load(other.prefix).num_images == 1  # type: ignore[union-attr]


def test_the_command(tmp_path: Path, image_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.json").write_text(json.dumps(GOOD))
    words = ["prepare", str(tmp_path / "elsewhere" / "rows.json"), "-o", str(tmp_path / "p"), "-q"]
    words += ["--tokenizer", str(image_tokenizer)]
    assert main([*words, "--multimodal", "--images", str(tmp_path)]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert main([*words, "--chat", "--images", "x"]) != 0
    assert "--images is for images; add --multimodal" in capsys.readouterr().err


def test_the_command_lists_what_it_skips(
    tmp_path: Path, image_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*GOOD, row("nowhere.png", "<image>what"), row(None, "what", "a"), row(["nowhere.png"], "no place")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    words = ["prepare", str(tmp_path / "rows.json"), "-o", str(tmp_path / "p"), "-q", "--skip-bad"]
    assert main([*words, "--tokenizer", str(image_tokenizer), "--multimodal"]) == 0
    said = capsys.readouterr()
    assert "2 skipped" in said.out
    first, second = said.err.splitlines()
    assert first.startswith("skipped: ")
    assert "entry 3, image 0" in first
    assert "nowhere.png) cannot be read" in first
    assert "entry 5: the text holds '<image>' 0 times" in second
