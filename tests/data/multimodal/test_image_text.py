"""What replaces ``<image>`` in texts."""

from __future__ import annotations

import pytest

from megalight.data.multimodal.image_text import FRAMES, image_text_of


@pytest.mark.parametrize(
    ("token", "others", "frame"),
    [
        ("<|image_pad|>", ["<|vision_start|>", "<|vision_end|>"], FRAMES[0]),
        ("<image_soft_token>", ["<start_of_image>", "<end_of_image>"], FRAMES[1]),
        ("<IMG_CONTEXT>", ["<img>", "</img>"], FRAMES[2]),
        ("<image>", ["<img>", "</img>"], "<image>"),
    ],
)
def test_the_text_is_that_of_the_published_model(token: str, others: list[str], frame: str) -> None:
    vocabulary = {each: number for number, each in enumerate([token, *others])}
    assert image_text_of(token, vocabulary) == frame
    assert image_text_of(token, vocabulary, f"({token})") == f"({token})"
    # A tokenizer without the others was made for another text.
    assert image_text_of(token, {token: 0}) == token
