from __future__ import annotations

import errno
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.data.corpus import CorpusMeta
from megalight.data.encode import unigram_entropy
from megalight.data.indexed import IndexedDataset
from megalight.data.prepare import PrepareReport, prepare
from megalight.data.text_files import blocks, find, texts_of
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.conftest import documents


def texts(prefix: str, tokenizer: Tokenizer) -> list[str]:
    data = IndexedDataset(prefix)
    return [tokenizer.decode(data[k].tolist()) for k in range(len(data))]


def test_jsonl(corpus: PrepareReport, tokenizer: Tokenizer) -> None:
    assert texts(corpus.prefix, tokenizer) == [text + "<|endoftext|>" for text in documents()]
    data = IndexedDataset(corpus.prefix)
    meta = CorpusMeta.load(corpus.prefix)
    assert meta == corpus.meta
    assert (meta.num_documents, meta.num_tokens, meta.dtype) == (60, data.num_tokens, "uint16")
    assert meta.max_token_id == int(data.tokens.max())
    assert meta.tokenizer_identity == tokenizer.identity == Tokenizer.load(corpus.tokenizer).identity
    assert meta.unigram_entropy_nats == pytest.approx(unigram_entropy(data), rel=1e-12)
    assert (meta.eod_id, meta.pad_id, meta.vocab_size, meta.append_eod) == (0, 1, 300, True)
    names = sorted(path.name for path in Path(corpus.prefix).parent.iterdir() if path.name != "cache")
    assert names == ["c.bin", "c.idx", "c.json", "c.tokenizer.json", "c.tokenizer_config.json"]
    assert "60 documents" in str(corpus)


def test_kinds_of_input(jsonl: Path, tokenizer_file: Path, tmp_path: Path, corpus: PrepareReport) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": documents(), "id": list(range(60))})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    folder = tmp_path / "folder"
    folder.mkdir()
    for k, text in enumerate(documents()):
        (folder / f"{k:02}.txt").write_text(text)
    (folder / ".hidden").write_text("not taken")
    (folder / "binary.pyc").write_bytes(b"\0\1\2")
    expected = Path(corpus.prefix + ".bin").read_bytes()
    for name, source in [
        ("a", "t.parquet"), ("b", "z.jsonl.gz"), ("c", "folder"), ("d", "folder/*.txt"), ("e", "**/??.txt"),
    ]:  # fmt: skip
        report = prepare([str(tmp_path / source)], tmp_path / "out" / name, tokenizer=tokenizer_file, progress=False)
        assert Path(report.prefix + ".bin").read_bytes() == expected, source
        assert report.num_files == (1 if name in "ab" else 60)
    as_text = prepare([str(jsonl)], tmp_path / "f", tokenizer=tokenizer_file, format="text", progress=False)
    assert as_text.meta.num_documents == 1


def test_workers_do_not_change_the_result(jsonl: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.txt"
    big.write_text("\n".join(documents()) * 60)  # several blocks of one document
    assert big.stat().st_size > 1 << 20
    (tmp_path / "small.txt").write_text("after it")
    inputs = [str(jsonl), str(big), str(tmp_path / "small.txt")]
    reports = [prepare(inputs, tmp_path / f"w{n}", tokenizer=tokenizer_file, workers=n, progress=False) for n in (1, 2)]
    assert reports[0].meta == reports[1].meta
    for suffix in (".bin", ".idx", ".json", ".tokenizer.json"):
        assert Path(reports[0].prefix + suffix).read_bytes() == Path(reports[1].prefix + suffix).read_bytes()
    data = IndexedDataset(reports[0].prefix)
    assert len(data) == 62
    assert Tokenizer.load(tokenizer_file).decode(data[60].tolist()) == big.read_text() + "<|endoftext|>"


def test_train_tokenizer(jsonl: Path, tmp_path: Path) -> None:
    reports = [
        prepare([str(jsonl)], tmp_path / name, train_tokenizer=True, vocab_size=320, append_eod=False, progress=False)
        for name in "ab"
    ]
    assert reports[0].meta == reports[1].meta
    assert reports[0].meta.vocab_size == 320
    assert texts(reports[0].prefix, Tokenizer.load(reports[0].tokenizer)) == documents()


def test_empty_documents_are_left_out(tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": ""}\n\n{"text": "fox"}\n{"text": ""}')
    report = prepare([str(path)], tmp_path / "t", tokenizer=tokenizer_file, progress=False)
    assert (report.meta.num_documents, report.empty) == (1, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"text": "a"}\n{"text": "b', r"t\.jsonl line 2 is not JSON .*incomplete"),
        ("t.jsonl", b'{"text": "a"}\n\n{"body": "b", "id": 1}\n', r"line 3 has no key 'text'; it has: 'body', 'id'"),
        ("t.jsonl", b'{"text": 7}', r"line 1: 'text' is of type int; it must be a string"),
        (
            "t.jsonl",
            b'{"text": "a"}\n{"text": "caf\xe9"}',
            r"line 2 is not UTF-8 text \(byte 0xe9 at position 27: ",
        ),
        ("t.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"line 1 is not UTF-8 text \(byte 0xff at position 0: "),
        ("t.csv", b"text,n\na,1,2\n", r"t\.csv line 2 has 3 values, but the first line names 2 columns \(text, n\)"),
        ("t.csv", b'text\n"open', r"t\.csv line 2 is not CSV \(unexpected end of data\)"),
        ("t.csv", b"text\ncaf\xe9\n", r"t\.csv line 2 is not UTF-8 text \(byte 0xe9 at position 8: "),
        ("t.csv", b"title;text\na;b\n", r"t\.csv row 1 has no key 'text'; it has: 'title;text'"),
        ("t.json", b'[{"text": "a"}]', r"may be one document or an array of rows"),
        ("t.jsonl", rb'{"text": "half \ud800 a pair"}', r"line 1: 'text' is not Unicode text"),
        ("t.jsonl", b"[" * 200_000, r"line 1 is not JSON"),
        ("t.jsonl", b"[1]", r"line 1 is of type list; each row must be a JSON object\. .*--format json"),
        ("t.jsonl", b"7", r"line 1 is of type int; each row must be a JSON object\.$"),
        ("t.csv", b"text,n,text\na,1,b\n", r"t\.csv has 2 columns called 'text'; give them different names"),
        ("t.jsonl.zst", b"\x28\xb5\x2f\xfd\0", r"t\.jsonl\.zst is compressed, .* decompress it first \(zstd -d\)"),
        ("t.TXT.XZ", b"\xfd7zXZ\0", r"t\.TXT\.XZ is compressed, .*\(xz -d\)"),
        ("t.tar", b"\0" * 1024, r"t\.tar is an archive: unpack it, and give the files, or shards with --multimodal"),
        ("t.tar.gz", b"", r"t\.tar\.gz is an archive: unpack it"),
        ("t.zip", b"PK", r"t\.zip is an archive: unpack it, and give the files\."),
        ("t.txt", b"one\ntwo \xff\n", r"t\.txt line 2 is not UTF-8 text \(byte 0xff at position 8: "),
        ("t.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-4], r"t\.jsonl\.gz cannot be read"),
        ("t.jsonl.gz", b"no gzip", r"t\.jsonl\.gz cannot be read"),
        ("t.parquet", b"PAR1 torn", r"t\.parquet is not a readable Parquet file"),
        ("t.txt", b"", r"the inputs are empty \(.*t\.txt\)"),
        ("t.jsonl", b"\n\n", r"the inputs hold no text"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, tokenizer_file: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    for workers in (1, 2) if name == "t.txt" and content else (1,):
        with pytest.raises(DataError, match=message):
            prepare([str(tmp_path / name)], tmp_path / "out", tokenizer=tokenizer_file, workers=workers, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [name]  # and nothing is left behind


def test_the_position_of_a_byte_counts_from_the_beginning_of_its_file(tmp_path: Path) -> None:
    """Files are read in pieces of a megabyte; a mark of byte order is part of the file."""
    lines = b"\xef\xbb\xbf" + b"one\n" * 300_000
    (tmp_path / "t.txt").write_bytes(lines + b"\xff")
    *_, last = blocks(find([str(tmp_path / "t.txt")]))
    with pytest.raises(DataError, match=r"t\.txt line 300001 is not UTF-8 text \(byte 0xff at position 1200003: inv"):
        texts_of(last, "text")
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "a"}\n' * 80_000 + b'"\xff"')
    bad = [each for block in blocks(find([str(tmp_path / "t.jsonl")])) for each in texts_of(block, "text", "skip")[1]]
    assert len(bad) == 1
    assert "line 80001 is not UTF-8 text (byte 0xff at position 1120001: " in bad[0]


def test_a_closed_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", closed)
    with pytest.raises(DataError, match=r"input 'a/b\.txt' cannot be read \(Permission denied\)"):
        find(["a/b.txt"])


def test_linked_folders_are_read_once(tmp_path: Path, tokenizer_file: Path) -> None:
    for name in ("corpus/own/a.txt", "elsewhere/b.txt", "elsewhere/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "corpus/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/newest").symlink_to("own")
    (tmp_path / "elsewhere/deep/cycle").symlink_to(tmp_path / "corpus")
    names = ["linked/b.txt", "linked/deep/c.txt", "newest/a.txt"]
    found = [file.path for file in find([str(tmp_path / "corpus")])]
    assert found == [tmp_path / "corpus" / name for name in names]
    # the same by a pattern, as of prepare --glob, where each file has many names
    assert [file.path for file in find([f"{tmp_path}/corpus/**/*.txt"])] == found
    report = prepare([str(tmp_path / "corpus")], tmp_path / "out", tokenizer=tokenizer_file, workers=1, progress=False)
    assert report.meta.num_documents == 3


def test_compressed_files_of_a_folder_are_not_left_out_without_a_word(tmp_path: Path, tokenizer_file: Path) -> None:
    """Archives are, as all binary files."""
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.tar").write_bytes(bytes(1024))
    options: dict[str, Any] = {"tokenizer": tokenizer_file, "progress": False}
    assert prepare([str(tmp_path)], tmp_path / "out" / "o", **options).meta.num_documents == 1
    (tmp_path / "c.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\0")
    with pytest.raises(DataError, match=r"c\.jsonl\.zst is compressed"):
        prepare([str(tmp_path)], tmp_path / "out" / "o", **options)


@pytest.mark.parametrize("name", ["t.JSONL", "t.Jsonl.GZ"])
def test_suffixes_are_of_any_case(tmp_path: Path, tokenizer_file: Path, name: str) -> None:
    rows = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("GZ") else rows)
    report = prepare([str(tmp_path / name)], tmp_path / "o", tokenizer=tokenizer_file, progress=False)
    assert (report.meta.num_documents, report.meta.num_tokens) == (2, 4)


def test_bad_input_can_be_left_out(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"bad \xff" + b"x" * (1 << 20) + b"\n" + b"more")
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\n{"text": \n{"text": "good"}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(b"torn")
    report = prepare([str(tmp_path)], tmp_path / "o", tokenizer=tokenizer_file, on_bad="skip", progress=False)
    assert report.meta.num_documents == 3
    assert [next(name for name in ("b.txt", "c.jsonl", "d.jsonl") if name in text) for text in report.skipped] == [
        "b.txt", "d.jsonl", "c.jsonl",
    ]  # fmt: skip
    assert "3 skipped" in str(report)


def test_bad_rows_of_tables_can_be_left_out(tmp_path: Path, tokenizer_file: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"body": ["a", "b"]}), tmp_path / "b.parquet", row_group_size=1)
    report = prepare([str(tmp_path)], tmp_path / "o", tokenizer=tokenizer_file, on_bad="skip", progress=False)
    assert report.meta.num_documents == 2
    assert [next(each for each in ("row 1", "no column") if each in text) for text in report.skipped] == [
        "row 1", "no column",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ","), ("t.tsv", "\t"), ("t.csv.gz", ",")])
def test_rows_of_csv_are_documents(tmp_path: Path, tokenizer_file: Path, name: str, separator: str) -> None:
    # A mark of byte order, line breaks of Windows and in quotes, an empty line, and a value above Python's limit.
    kept = ["the fox", f'a "quoted"{separator} dog\r\nin two lines', "x" * 200_000]
    quoted = [value.replace('"', '""') for value in kept]
    rows = [separator.join(("id", "text")), "", *(f'{k}{separator}"{value}"' for k, value in enumerate(quoted))]
    content = ("\ufeff" + "\r\n".join(rows)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    report = prepare([str(tmp_path / name)], tmp_path / "o", tokenizer=tokenizer_file, progress=False)
    assert texts(report.prefix, Tokenizer.load(report.tokenizer)) == [text + "<|endoftext|>" for text in kept]


def test_empty_files_are_the_cause_not_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "t.txt").touch()
    with pytest.raises(DataError, match="the inputs are empty"):
        prepare([str(tmp_path / "t.txt")], tmp_path / "o", train_tokenizer=True, progress=False)


def test_plain_text_has_no_keys(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "t.txt").write_text("a")
    with pytest.raises(DataError, match=r"text_key \(--text-key\) is 'body', but the inputs are plain text"):
        prepare([str(tmp_path / "t.txt")], tmp_path / "o", tokenizer=tokenizer_file, text_key="body", progress=False)


def test_a_missing_column_is_named(tmp_path: Path, tokenizer_file: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a"], "text": [None]}), tmp_path / "t.parquet")
    given = {"tokenizer": tokenizer_file, "progress": False}
    with pytest.raises(DataError, match="no column 'content'; it has: body, text"):
        prepare([str(tmp_path / "t.parquet")], tmp_path / "o", text_key="content", **given)
    with pytest.raises(DataError, match="row group 0, row 0: 'text' is null; it must"):
        prepare([str(tmp_path / "t.parquet")], tmp_path / "o", **given)
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has 2 columns called 'text'; give them different names"):
        prepare([str(tmp_path / "t.parquet")], tmp_path / "o", **given)


def test_bad_arguments(jsonl: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    with pytest.raises(DataError, match="exactly one of the two"):
        prepare([str(jsonl)], out)
    with pytest.raises(DataError, match="exactly one of the two"):
        prepare([str(jsonl)], out, tokenizer=tokenizer_file, train_tokenizer=True)
    with pytest.raises(DataError, match=r"\(--workers\) is 0"):
        prepare([str(jsonl)], out, tokenizer=tokenizer_file, workers=0)
    with pytest.raises(DataError, match=r"none\*' names no file"):
        prepare([str(tmp_path / "none*")], out, tokenizer=tokenizer_file)
    with pytest.raises(DataError, match=r"output '.*/' is a folder; .* such as '.*/book'"):
        prepare([str(jsonl)], f"{tmp_path}/", tokenizer=tokenizer_file)
    with pytest.raises(DataError, match="no input was given"):
        prepare([], out, tokenizer=tokenizer_file)
    content = json.loads(tokenizer_file.read_text().replace("<|endoftext|>", "<|nameless|>"))
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="no known end-of-document token"):
        prepare([str(jsonl)], out, tokenizer=tmp_path / "x.json", progress=False)
    report = prepare([str(jsonl)], out, tokenizer=tmp_path / "x.json", eod_token="<|nameless|>", progress=False)
    assert report.meta.eod_id == 0
    with pytest.raises(DataError, match="would overwrite"):
        prepare([str(out) + ".json"], out, tokenizer=tokenizer_file)


def test_a_second_run_over_the_same_folder_repeats_the_first(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("the fox")
    first = prepare([str(tmp_path)], tmp_path / "o", tokenizer=tokenizer_file, progress=False)
    again = prepare([str(tmp_path)], tmp_path / "o", tokenizer=tokenizer_file, progress=False)
    assert first.meta == again.meta  # what it wrote itself is not read


def test_entropy(tmp_path: Path) -> None:
    from tests.data.corpora import write

    uniform = write(tmp_path / "a", [64])
    assert unigram_entropy(uniform) == pytest.approx(np.log(64), rel=1e-12)
    assert unigram_entropy(write(tmp_path / "b", [])) == 0
    assert unigram_entropy(write(tmp_path / "c", [1])) == 0


def test_torn_meta(corpus: PrepareReport, tmp_path: Path) -> None:
    for content in ("{", "{}", "[]"):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(DataError, match="incomplete or has another format"):
            CorpusMeta.load(tmp_path / "c")
    assert CorpusMeta.load(tmp_path / "none") is None


def test_preparing_does_not_import_torch() -> None:
    code = "import sys, megalight.data.prepare; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
