from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megalight.data.gpt.dataset import FIM, FillInMiddle
from megalight.data.gpt.module import GPTDataModule
from megalight.data.prepare import prepare
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError

TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file>")


@pytest.fixture(scope="module")
def fim_tokenizer() -> Tokenizer:
    return Tokenizer.train(["abcdef"], 262, special_tokens=TOKENS)


class Script:
    """A stream that gives these values in turn."""

    def __init__(self, values: list) -> None:
        self.values = values

    def random(self) -> float:
        return self.values.pop(0)

    def integers(self, low: int, high: int, size: int) -> np.ndarray:
        cuts = self.values.pop(0)
        assert low <= min(cuts) <= max(cuts) < high
        return np.asarray(cuts)


def rearranged(tokenizer: Tokenizer, texts: list[str], values: list, size: int = 99, **options) -> list[str]:
    stream = Script(values)
    pieces = [np.asarray(tokenizer.encode(text), np.uint16) for text in texts]
    found = FillInMiddle(FIM(**{"rate": 1.0, **options}), tokenizer)(pieces, size, stream)  # type: ignore[arg-type]
    assert not stream.values, "values are left"
    return [tokenizer.decode(piece.tolist()) for piece in found]


def test_the_two_orders(fim_tokenizer: Tokenizer) -> None:
    psm = rearranged(fim_tokenizer, ["abcdef"], [0.0, (4, 1), 0.9])
    assert psm == ["<fim_prefix>a<fim_suffix>ef<fim_middle>bcd"]
    spm = rearranged(fim_tokenizer, ["abcdef"], [0.0, (1, 4), 0.1])
    assert spm == ["<fim_prefix><fim_suffix>ef<fim_middle>abcd"]
    whole = rearranged(fim_tokenizer, ["abcdef"], [0.0, (6, 0), 0.9])  # both ends can be cut
    assert whole == ["<fim_prefix><fim_suffix><fim_middle>abcdef"]


def test_ends_of_documents_stay(fim_tokenizer: Tokenizer) -> None:
    end = "<|endoftext|>"
    found = rearranged(
        fim_tokenizer, [f"{end}ab{end}{end}cd", f"ef{end}"], [0.0, (1, 1), 0.9, 0.99, 0.0, (0, 2), 0.9], rate=0.5
    )
    assert found == [
        f"{end}<fim_prefix>a<fim_suffix>b<fim_middle>{end}{end}cd",
        f"<fim_prefix><fim_suffix><fim_middle>ef{end}",
    ]


def test_fragments(fim_tokenizer: Tokenizer) -> None:
    text = "ab<file>cd<file><file>ef"
    options = {"split": "<file>", "fragment_rate": 0.5, "rate": 0.5}
    assert rearranged(fim_tokenizer, [text], [0.9], **options) == [text]
    found = rearranged(fim_tokenizer, [text], [0.1, 0.9, 0.1, (1, 2), 0.9, 0.1, (0, 1), 0.9], **options)
    assert found == ["ab<file><fim_prefix>c<fim_suffix><fim_middle>d<file><file><fim_prefix><fim_suffix>f<fim_middle>e"]


def test_what_is_left_alone(fim_tokenizer: Tokenizer) -> None:
    assert rearranged(fim_tokenizer, ["abc", "bcd"], [0.0, 0.0, (0, 3), 0.9], no_prefix="ab") == [
        "abc",
        "<fim_prefix><fim_suffix><fim_middle>bcd",
    ]
    half = np.asarray(fim_tokenizer.encode("é")[:1])
    found = FillInMiddle(FIM(rate=1.0), fim_tokenizer)([half], 9, np.random.default_rng(0))
    assert found[0].tolist() == half.tolist()


def test_the_result_fits(fim_tokenizer: Tokenizer) -> None:
    found = rearranged(fim_tokenizer, ["abcdef", "ab"], [0.0, (1, 4), 0.9, 0.9], size=5, rate=0.5)
    assert [len(fim_tokenizer.encode(text)) for text in found] == [5, 0]


def test_options_out_of_range(fim_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match=r"fim\.spm_rate is 1.5; it must be between 0 and 1"):
        FIM(rate=0.5, spm_rate=1.5)
    with pytest.raises(DataError, match=r"fim\.middle_token is '<fim_mid>'.*Did you mean '<fim_middle>'"):
        FillInMiddle(FIM(rate=0.5, middle_token="<fim_mid>"), fim_tokenizer)


@pytest.fixture(scope="module")
def prefix(fim_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fim")
    (folder / "texts").mkdir()
    for k in range(12):
        (folder / "texts" / f"{k:02}.txt").write_text("abcdef" * (k + 2))
    path = fim_tokenizer.save(folder / "t.json")
    return prepare([str(folder / "texts")], folder / "d", tokenizer=path, progress=False).prefix


def rows(prefix: str, fim: FIM | None, workers: int = 0) -> list[list[int]]:
    module = GPTDataModule(
        data=prefix, split="1", global_batch_size=4, sequence_length=24, fim=fim, num_workers=workers
    )
    module.samples["train"] = 24
    module.setup("fit")
    return [row for batch in module.train_dataloader() for row in batch.tokens.tolist()]


def test_samples_do_not_depend_on_workers_or_on_what_was_read_before(prefix: str) -> None:
    fim = FIM(rate=0.7)
    found = rows(prefix, fim)
    assert rows(prefix, fim, workers=2) == found
    assert rows(prefix, FIM(rate=0.0)) == rows(prefix, None) != found
    module = GPTDataModule(data=prefix, split="1", global_batch_size=4, sequence_length=24, fim=fim)
    module.samples["train"] = 24
    module.setup("fit")
    data = module._datasets["train"]
    assert data is not None
    assert [data[k].tokens.tolist() for k in (13, 5)] == [found[13], found[5]]


def test_padding_carries_no_loss_and_documents_keep_their_lengths(prefix: str, fim_tokenizer: Tokenizer) -> None:
    module = GPTDataModule(
        data=prefix, split="1", global_batch_size=4, sequence_length=24, fim=FIM(rate=1.0), document_mask=True
    )
    module.setup("fit")
    for batch in module.train_dataloader():
        for tokens, lengths in zip(batch.tokens, batch.document_lengths, strict=True):
            assert sum(lengths) == 24
            text = fim_tokenizer.decode(tokens[: lengths[0]].tolist())
            assert text.startswith("<fim_prefix>") or "<|endoftext|>" in text[:14]


def test_a_padding_token_with_another_meaning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.train(["abcdef"], 262, special_tokens=TOKENS)
    both = Tokenizer.from_json(tokenizer.to_json())
    both.pad_token, both.pad_id = both.eod_token, both.eod_id
    (tmp_path / "a.txt").write_text("abcdef" * 20)
    (tmp_path / "b.txt").write_text("abcdef" * 20)
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    data = prepare(files, tmp_path / "d", tokenizer=both.save(tmp_path / "t.json"), progress=False).prefix
    options = {"data": data, "split": "1", "global_batch_size": 1, "sequence_length": 240}

    def counted(**more: bool) -> int:
        module = GPTDataModule(**options, **more)
        module.setup("fit")
        return int(next(iter(module.train_dataloader())).loss_mask.sum())

    assert counted() == 240
    with caplog.at_level(logging.WARNING):
        assert counted(allow_ambiguous_pad_tokens=True) == 239  # the end of the first document
    assert "is also another special token, so no label with its id 0 counts" in caplog.text
