"""Batches of text and images."""

from dataclasses import fields

import torch

from megalight.data.multimodal.batch import with_images
from megalight.data.multimodal.patches import Images
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
