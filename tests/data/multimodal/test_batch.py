"""Batches of text and images."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from megalight.data.multimodal.batch import with_images
from megalight.data.multimodal.images import Images
from megalight.data.multimodal.template import FRAMES, PLAIN, ImageText, image_text_of
from megalight.types import TokenBatch


def test_copies_and_parts_keep_every_field_of_text() -> None:
    tokens = torch.tensor([[1, 9, 9, 2], [3, 4, 5, 6]])
    text = TokenBatch(
        tokens,
        tokens + 1,
        torch.ones(2, 4),
        document_lengths=((4,), (1, 3)),
        axis_positions=torch.arange(24).view(2, 3, 4),
    )
    images = Images(torch.zeros(2, 3), torch.arange(2), lengths=(2,), counts=(1, 0))
    batch = with_images(text, images, 9, class_token=False)
    whole, parts = batch.to("cpu"), batch.split(1)
    expected = [text, *text.split(1)]
    for one, wanted in zip([whole, *parts], expected, strict=True):
        for field in fields(TokenBatch):
            torch.testing.assert_close(getattr(one, field.name), getattr(wanted, field.name))


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
