"""Which tokens make a word, and which words are hidden."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers

from megalight.data.bert.dataset import Words, mask_words
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.bert.conftest import SPECIALS

TEXT = "Hello, naïve world: re-do it 12x!\nfoxes 東京"


def wordpiece() -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", *SPECIALS, "fox", "##es", "un", "##want", "##ed", ",", "the", "12", "##x"]
    model = Model(models.WordPiece({piece: k for k, piece in enumerate(pieces)}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(model)


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text's words as the vocabulary sees them."""
    ids = np.array(tokenizer.encode(text))
    starts = np.flatnonzero(Words.of(tokenizer).starts(ids))
    return [tokenizer.decode(part.tolist()) for part in np.split(ids, starts[1:])]


def test_wordpiece() -> None:
    ids = np.array(wordpiece().encode("foxes, unwanted 12x the fox"))
    starts = Words.of(wordpiece()).starts(ids)
    assert starts.tolist() == [True, False, True, True, False, False, True, False, True, True]


def test_byte_level() -> None:
    tokenizer = Tokenizer.train([TEXT], 265, special_tokens=SPECIALS)
    assert words_of(tokenizer, TEXT) == [
        "Hello", ",", " ", "naïve", " ", "world", ":", " ", "re", "-", "do", " ", "it", " ", "12x", "!", "\n",
        "foxes", " ", "東京",
    ]  # fmt: skip
    merged = Tokenizer.train([TEXT * 9], 290, special_tokens=SPECIALS)
    assert "".join(words_of(merged, TEXT)) == TEXT
    assert " world" in words_of(merged, TEXT)


def test_marked_spaces() -> None:
    pieces = ["<unk>", "<s>", "</s>", "<mask>", "▁fox", "es", "▁un", "want", "ed", ".", "▁"]
    model = Model(models.WordLevel({piece: k for k, piece in enumerate(pieces)}, unk_token="<unk>"))
    words = Words.of(Tokenizer(model))
    assert (words.classify, words.separate, words.mask) == (1, 2, 3)
    assert words.ordinary.tolist() == list(range(4, 11))
    assert words.starts(np.array([1, 4, 5, 6, 7, 8, 9, 2])).tolist() == [
        True,
        True,
        False,
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(DataError, match=r"no token to begin a sample \(\[CLS\].*--special-tokens"):
        Words.of(Tokenizer.train([TEXT], 258))


def sample(words: Words, count: int, generator: np.random.Generator) -> np.ndarray:
    text = generator.choice(words.ordinary, count)
    return np.concatenate([[words.classify], text, [words.separate], text[: count // 2], [words.separate]])


def test_whole_words_are_hidden_and_nothing_else(words: Words) -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        tokens = sample(words, 60, generator)
        hidden, labels = mask_words(tokens, words, 0.15, generator)
        chosen = labels >= 0
        assert np.array_equal(labels[chosen], tokens[chosen])
        assert np.array_equal(hidden[~chosen], tokens[~chosen])
        assert not words.special[tokens[chosen]].any()
        word = np.cumsum(words.starts(tokens))
        for number in set(word[chosen]):
            assert chosen[(word == number) & ~words.special[tokens]].all(), "a word is hidden in part"


def test_how_many_and_what_becomes_of_them(words: Words) -> None:
    generator = np.random.default_rng(1)
    text, chosen, masked, kept = 0, 0, 0, 0
    for _ in range(400):
        tokens = sample(words, 200, generator)
        hidden, labels = mask_words(tokens, words, 0.15, generator)
        places = labels >= 0
        text += int((~words.special[tokens]).sum())
        chosen += int(places.sum())
        masked += int((hidden[places] == words.mask).sum())
        kept += int((hidden[places] == tokens[places]).sum())
        assert not words.special[hidden[places & (hidden != words.mask)]].any()
    assert chosen / text == pytest.approx(0.15, abs=0.002)
    assert masked / chosen == pytest.approx(0.8, abs=0.02)
    assert kept / chosen == pytest.approx(0.1, abs=0.015)


def test_one_word_is_always_hidden(words: Words, pair_tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(2)
    long = np.array([words.classify, *pair_tokenizer.encode("incomprehensibilities"), words.separate])
    assert len(long) > 5
    _, labels = mask_words(long, words, 0.15, generator)
    assert (labels >= 0).tolist() == [False, *[True] * (len(long) - 2), False]
    empty = np.array([words.classify, words.separate, words.separate])
    assert (mask_words(empty, words, 0.15, generator)[1] == -100).all()
