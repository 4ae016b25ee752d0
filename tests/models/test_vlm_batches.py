"""Batches that a vision-language model cannot read are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalight.errors import DataError
from megalight.models.vlm import VLMConfig
from megalight.types import TokenBatch
from tests.models.test_vlm import module
from tests.models.vlm_samples import CONFIG, INTERN, QWEN, QWEN3, batch, small


def text() -> TokenBatch:
    found = batch()
    return TokenBatch(found.tokens, found.labels, found.loss_mask)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (text(), "TokenBatch"),
        ({"input_ids": text().tokens}, "dict"),
        ([text().tokens, text().labels], "list"),
        (replace(batch(), images=None), "ImageTextBatch"),
    ],
    ids=["text", "dict", "list", "without images"],
)
def test_other_batches_are_refused(found: Any, name: str) -> None:
    with pytest.raises(DataError, match=rf"the batch is a {name}; .*MultimodalDataModule yields it; .*with_images"):
        module().loss_tokens(found)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (CONFIG, QWEN, r"positions of patches are \[2, 'P'\]; this tower reads \['P'\]"),
        (QWEN, CONFIG, r"positions of patches are \['P'\]; this tower reads \[2, 'P'\]"),
        (QWEN, QWEN3, r"positions of patches are \[4, 'P'\]; this tower reads \[2, 'P'\]"),
        (CONFIG, small(class_token=False), r"an image has 4 rows of patches; this tower reads 5 .* of 8 x 8 pixels"),
        (INTERN, CONFIG, r"an image has 5 rows of patches; this tower reads 16 .* of 16 x 16 pixels"),
    ],
    ids=["any size", "one size", "table", "class token", "size"],
)
def test_images_of_other_models_are_refused(model: VLMConfig, data: VLMConfig, message: str) -> None:
    made = module(model)
    with pytest.raises(DataError, match=message + r".*[Cc]ut .*by form_of\(config\)"):
        made.forward_step(made.model, batch(config=data))
