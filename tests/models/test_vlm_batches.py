"""Batches that a vision-language model cannot read are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.data.multimodal.template import NEWLINE
from megalight.errors import DataError
from megalight.models.vlm import VLMConfig
from megalight.types import TokenBatch
from tests.models.test_vlm import module
from tests.models.vlm_samples import CONFIG, INTERN, QWEN, QWEN3, TILES, batch, small


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


def changed(config: VLMConfig, part: str, at: tuple[int, ...], value: int) -> ImageTextBatch:
    """A batch with one other number: of ``source``, of positions, or of rows that mixtures are made of."""
    found = batch(config=config, seed=3)
    images, source = found.parts()
    if part == "source":
        source = source.clone()
        source[at] = value
        return replace(found, source=source)
    if part == "positions":
        positions = images.positions.clone()
        positions[at] = value
        return replace(found, images=replace(images, positions=positions))
    assert images.mixtures is not None
    rows = images.mixtures.rows.clone()
    rows[at] = value
    return replace(found, images=replace(images, mixtures=replace(images.mixtures, rows=rows)))


@pytest.mark.parametrize(
    ("config", "part", "at", "value", "message"),
    [
        (CONFIG, "source", (0, 1), 30, r"token 1 of sample 0 stands for row of features 30; its own are 0 to 4"),
        (CONFIG, "source", (0, 1), 7, r"token 1 of sample 0 stands for row of features 7; its own are 0 to 4"),
        (CONFIG, "source", (1, 2), 0, r"token 2 of sample 1 stands for row of features 0; its own are none"),
        (CONFIG, "source", (3, 0), -3, r"token 0 of sample 3 stands for mixture 0; its own are none"),
        (QWEN, "source", (3, 5), 10**6, r"token 5 of sample 3 stands for row of features 1000000; its own are \d+ to"),
        (TILES, "mixtures", (0, 0), -1, r"mixtures are of rows of features from -1 to \d+; the images have \d+"),
        (TILES, "mixtures", (0, 0), 10**6, r"mixtures are of rows of features from \d+ to 1000000; the images have"),
        (CONFIG, "positions", (4,), -1, r"a position of a patch is -1; they begin at 0"),
        (QWEN, "positions", (1, 2), -2, r"a position of a patch is -2; they begin at 0"),
        (QWEN3, "positions", (0, 0), 99, r"a patch is in row 99 and column \d+ of an image of \d+ x \d+ patches"),
    ],
)
def test_numbers_out_of_range_are_refused_before_they_travel(
    config: VLMConfig, part: str, at: tuple[int, ...], value: int, message: str
) -> None:
    found = changed(config, part, at, value)
    with pytest.raises(DataError, match=message + r".*with_images and with_cuts of megalight\.data\.multimodal\.batch"):
        found.to("cpu")


def test_a_table_of_positions_is_known_to_the_model_alone() -> None:
    made = module(CONFIG)
    found = changed(CONFIG, "positions", (4,), 5).to("cpu")
    with pytest.raises(DataError, match=r"a patch has position 5; this tower has a table of 5 places.*form_of"):
        made.forward_step(made.model, found)
    made.forward_step(made.model, changed(CONFIG, "positions", (4,), 4).to("cpu"))


def test_sources_and_images_are_of_the_same_samples() -> None:
    found = batch((1, 0))
    images, source = found.parts()
    for other in (replace(found, source=source[:, 1:]), replace(found, images=replace(images, counts=(1,)))):
        with pytest.raises(DataError, match=r"there are \[2, 24\] tokens, sources for .* and images of \d samples"):
            other.to("cpu")


def test_shares_and_copies_of_a_device_are_not_looked_at() -> None:
    found = batch((1, 0, 2, 3))
    share = found.context_share(1, 2).to("cpu")  # whose tokens are fewer than the rows of their images
    assert torch.equal(share.tokens, found.context_share(1, 2).tokens)
    meta = found.to("meta")
    assert meta.to("meta").images.highest == 4


@pytest.mark.parametrize("part", ["whole", "copy", "micro-batch", "share"])
def test_learned_rows_that_a_model_lacks_are_refused(part: str) -> None:
    made, found = module(CONFIG), changed(CONFIG, "source", (3, 2), NEWLINE)
    assert batch().to("cpu").newlines is False
    found = {
        "whole": lambda: found,
        "copy": lambda: found.to("cpu"),
        "micro-batch": lambda: found.to("cpu").split(2)[1],
        "share": lambda: found.to("cpu").context_share(1, 2),
    }[part]()
    with pytest.raises(
        DataError, match=r"the learned row after an image \(NEWLINE\), and this model has none .*form_of"
    ):
        made.forward_step(made.model, found)
    assert found.to("meta").newlines


def test_learned_rows_that_only_a_device_knows_are_not_looked_at() -> None:
    _, source = batch().parts()
    assert replace(batch(), source=source.to("meta")).has_newlines is None
    made = module(TILES)
    found = batch(config=TILES).to("cpu")
    assert found.newlines
    made.forward_step(made.model, found)
