"""What replaces ``<image>`` in texts."""

from __future__ import annotations

import pytest

from megalight.data.multimodal.template import FRAMES, PLAIN, ImageText, image_text_of

QWEN, GEMMA, INTERN = FRAMES


@pytest.mark.parametrize(
    ("token", "others", "frame"),
    [
        ("<|image_pad|>", ["<|vision_start|>", "<|vision_end|>"], QWEN),
        ("<image_soft_token>", ["<start_of_image>", "<end_of_image>"], GEMMA),
        ("<IMG_CONTEXT>", ["<img>", "</img>"], INTERN),
        ("<image>", ["<img>", "</img>"], PLAIN),
    ],
)
def test_the_text_is_that_of_the_published_model(token: str, others: list[str], frame: ImageText) -> None:
    vocabulary = {each: number for number, each in enumerate([token, *others])}
    assert image_text_of(token, vocabulary) == frame
    assert image_text_of(token, vocabulary, f"({token})") == ImageText(f"({token})", f"({token})")
    # A tokenizer without the others was made for another text.
    assert image_text_of(token, {token: 0}) == ImageText(token, token)


@pytest.mark.parametrize("image", [*FRAMES, PLAIN, ImageText("(<image>)", "(<image>)")], ids=str)
def test_marks_become_wholes_and_spans_keep_their_characters(image: ImageText) -> None:
    text = f"a {image.mark}BB{image.mark} CC {image.whole} DD"
    words = [(text.index(word), text.index(word) + len(word)) for word in ("BB", "CC", "DD")]
    whole = (text.index(image.mark), text.index(image.mark) + len(image.mark))
    found, spans = image.framed(text, [*words, whole])
    assert found == f"a {image.whole}BB{image.whole} CC {image.whole} DD"
    assert [found[start:end] for start, end in spans] == ["BB", "CC", "DD", image.whole]
    # A frame that was trimmed is one already.
    assert image.framed(image.whole.strip())[0] == image.whole.strip()
