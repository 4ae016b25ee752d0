"""Text in parts, as its tokens come, equals the text of all tokens at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers  # type: ignore[import-untyped]
from tokenizers import Tokenizer as Model

from megalight.data.tokenizer import Tokenizer
from megalight.inference.detokenizer import Detokenizer
from megalight.inference.text_requests import before

TEXT = "the quick brown fox jumps over the lazy dog, naïve 東京 🙂👨\u200d👩\u200d👧 \u2028 end. "
WORDS = ["the", "dog", "s", "é", "東", "\u2581the", "\u2581dog", "\u2581", "\u2581\u2581", "\ufffd", "."]


def with_bytes(*steps: object, mark: bool) -> Tokenizer:
    """Words with marks, and bytes for all else. ``mark``: whether each text begins with a mark."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = Model(
        models.BPE(dict(zip(names, range(len(names)), strict=True)), [], byte_fallback=True, unk_token="<unk>")
    )
    first = [normalizers.Prepend("\u2581")] if mark else []
    model.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    model.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), *steps])
    model.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(model)


def byte_level() -> Tokenizer:
    return Tokenizer.train([TEXT * 5], 300)


def chat() -> Tokenizer:
    """Special tokens, and an added one that is text."""
    tokenizer = Tokenizer.train([TEXT * 5], 290, special_tokens=["<|im_start|>", "<|im_end|>"])
    model = Model.from_str(tokenizer.to_json())
    model.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(model)


def word_pieces() -> Tokenizer:
    names = ["[UNK]", "[SEP]", "the", "dog", "##s", "##'", ".", ",", "don", "'", "t", "é"]
    model = Model(models.WordPiece(dict(zip(names, range(len(names)), strict=True)), unk_token="[UNK]"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    model.add_special_tokens(["[SEP]"])
    return Tokenizer(model)


def unigram() -> Tokenizer:
    table = [("<unk>", 0.0), *((word, -float(place)) for place, word in enumerate(WORDS, 1))]
    model = Model(models.Unigram(table, 0))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return Tokenizer(model)


def words_with_ends() -> Tokenizer:
    names = ["<unk>", "the</w>", "dog</w>", "s</w>", "do", "g", "é"]
    model = Model(models.BPE(dict(zip(names, range(len(names)), strict=True)), [], unk_token="<unk>"))
    model.decoder = decoders.BPEDecoder("</w>")
    return Tokenizer(model)


KINDS = {
    "byte level": byte_level,
    "chat": chat,
    "byte fallback": lambda: with_bytes(decoders.Fuse(), decoders.Strip(" ", 1, 0), mark=True),
    "gemma": lambda: with_bytes(decoders.Fuse(), mark=False),
    "word pieces": word_pieces,
    "unigram": unigram,
    "words with ends": words_with_ends,
}
made = cache(lambda kind: KINDS[kind]())


def joined(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text in parts, each of which is certain when it is sent."""
    detokenizer, whole = Detokenizer(tokenizer, prompt), tokenizer.decode_after(prompt, tokens)
    parts = list[str]()
    for token in tokens:
        parts.append(detokenizer.add(token))
        assert whole.startswith("".join(parts))
    parts.append(detokenizer.finish())
    return "".join(parts)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_parts_of_any_tokens_join_to_the_text_of_all(kind: str, data: st.DataObject) -> None:
    tokenizer = made(kind)
    # Beyond the vocabulary, as the rows that pad an embedding.
    token = st.integers(0, tokenizer.vocab_size + 2)
    prompt, tokens = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, max_size=40))
    assert joined(tokenizer, prompt, tokens) == tokenizer.decode_after(prompt, tokens)


@pytest.mark.parametrize("kind", ["byte level", "chat", "byte fallback", "gemma"])
@settings(deadline=None, max_examples=120)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_parts_of_any_text_join_to_it(kind: str, text: str, cut: int) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(TEXT + text)
    prompt, tokens = ids[: len(ids) - cut], ids[max(0, len(ids) - cut) :]
    assert tokenizer.decode(ids) == TEXT + text
    assert joined(tokenizer, prompt, tokens) == tokenizer.decode_after(prompt, tokens)


@pytest.mark.parametrize("text", ["東京", "🙂👨\u200d👩\u200d👧", "a\u2028b", "\ufffd", "x\ufffdy"])
@pytest.mark.parametrize("kind", ["byte level", "gemma"])
def test_no_part_holds_half_a_character(kind: str, text: str) -> None:
    tokenizer = made(kind)
    detokenizer = Detokenizer(tokenizer, [])
    tokens = byte_by_byte(tokenizer, text)
    sent = [detokenizer.add(token) for token in tokens]
    assert all("\ufffd" not in part or "\ufffd" in text for part in sent)
    assert "".join(sent) + detokenizer.finish() == text
    if kind == "byte level" and "\ufffd" not in text:
        assert "".join(sent) == text, "each character is sent with its last byte"


def byte_by_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte."""
    if tokenizer.byte_tokens:
        return [tokenizer.vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tokenizer.vocabulary[each] for piece, _ in pieces for each in piece]


@settings(deadline=None, max_examples=200)
@given(
    tokens=st.lists(st.sampled_from("abcé"), max_size=30),
    stop=st.lists(st.text("abcé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_text_ends_the_text(tokens: list[str], stop: list[str]) -> None:
    tokenizer = made("byte level")
    ids = [token for each in tokens for token in tokenizer.encode(each)]
    detokenizer = Detokenizer(tokenizer, [], stop)
    sent = ""
    for count, token in enumerate(ids, 1):
        sent += detokenizer.add(token)
        assert not any(text in sent for text in stop)
        whole = tokenizer.decode(ids[:count])
        if detokenizer.stopped:
            assert sent == before(stop, whole)
            break
        settled = whole.rstrip("\ufffd")
        assert not any(text in settled for text in stop)
        # Nothing that begins a stop text was sent, and all else was.
        held = next((k for k in range(4, 0, -1) if any(text.startswith(settled[-k:]) for text in stop)), 0)
        assert sent == settled[: len(settled) - min(held, len(settled))]
    assert sent + detokenizer.finish() == before(stop, "".join(tokens))


def test_a_stop_text_may_reach_over_tokens_and_end_in_mid_token() -> None:
    tokenizer = made("byte level")
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"), ["\u2028\u2028", "Human:"])
    parts = [detokenizer.add(token) for token in tokenizer.encode("Hum. \u2028a\u2028\u2028b")]
    assert "".join(parts) == "Hum. \u2028a"
    assert detokenizer.stopped
    assert detokenizer.finish() == detokenizer.add(70) == ""


@pytest.mark.parametrize("kind", ["byte level", "gemma"])
def test_an_endless_run_without_a_character_costs_the_same_each_token(kind: str) -> None:
    """Of single bytes, and of the replacement character itself."""
    tokenizer = made(kind)
    tokens = byte_by_byte(tokenizer, "東")[:1] * 20_000 + tokenizer.encode("\ufffd") * 2_000
    detokenizer, start = Detokenizer(tokenizer, []), time.perf_counter()
    text = "".join([*map(detokenizer.add, tokens), detokenizer.finish()])
    # A second where it grows with the square of the length takes minutes.
    assert time.perf_counter() - start < 20
    assert text == tokenizer.decode(tokens)
