"""The vision-language model, its configuration and its batches on one device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.data.multimodal.batch import ImageTextBatch, with_images
from megalight.data.multimodal.images import Images
from megalight.data.multimodal.template import NEWLINE
from megalight.errors import CheckpointError, ConfigurationError, DataError
from megalight.models.family import family
from megalight.models.gpt import MultiTokenConfig, PositionConfig
from megalight.models.vision.model import normalized
from megalight.models.vlm import VLM, VLMConfig, VLMModule
from megalight.models.vlm.model import RemoteFeatures
from megalight.models.vlm.module import flops_of_images
from megalight.models.vlm.task import pack_images
from megalight.nn.init import initialize
from megalight.types import TokenBatch
from tests.models.vlm_samples import CONFIG, IMAGE, QWEN, QWEN3, VISION, batch, small
from tests.support.reference_gpt import relative_error


def build(config: VLMConfig = CONFIG) -> VLM:
    model = VLM(config).double()
    initialize(model, 3, "model.")
    return model


def module(config: VLMConfig = CONFIG) -> VLMModule:
    made = VLMModule(config)
    made.model = build(config)
    return made


def losses(made: VLMModule, found: ImageTextBatch) -> torch.Tensor:
    return made.output_step(made.forward_step(made.model, found), found)


def test_the_family_builds_the_model_from_plain_values() -> None:
    assert VLMConfig.from_dict(CONFIG.to_dict()) == CONFIG
    with torch.device("meta"):
        model = family("vlm").build(CONFIG.to_dict())
    assert isinstance(model, VLM)
    assert model.config == CONFIG


SIZES = {"llava_1_5_7b": 7.1, "llava_1_5_13b": 13.3, "llava_onevision_0_5b": 0.9, "llava_onevision_7b": 8.0}
SIZES |= {"llava_next_7b": 7.1, "llava_next_13b": 13.3}
SIZES |= {"gemma3_4b": 4.3, "gemma3_12b": 12.2, "gemma3_27b": 27.4}
SIZES |= {"internvl3_1b": 0.9, "internvl3_2b": 2.1, "internvl3_8b": 7.9}
SIZES |= {"qwen2_5_vl_3b": 3.8, "qwen2_5_vl_7b": 8.3}
SIZES |= {"qwen3_vl_2b": 2.1, "qwen3_vl_4b": 4.4, "qwen3_vl_8b": 8.8, "qwen3_vl_32b": 33.4}
"""Name of a preset -> billions of parameters, as the pages of the models give them."""


def test_every_preset_has_a_published_size() -> None:
    assert set(SIZES) == set(family("vlm").presets)


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_published_size(name: str) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in family("vlm").build(family("vlm").presets[name].to_dict()).parameters())
    assert round(count / 1e9, 1) == SIZES[name]


def test_rows_do_not_see_other_rows_and_images_do_not_see_other_images() -> None:
    made, found = module(), batch()
    together = losses(made, found)
    for row, part in enumerate(found.split(1)):
        assert relative_error(losses(made, part)[0], together[row]) < 1e-12
    images, _ = found.parts()
    pixels = images.pixels.clone()
    pixels[-VISION.num_rows :] = 0  # of the last image, which is the last row's third
    changed = losses(made, replace(found, images=replace(images, pixels=pixels)))
    assert torch.equal(changed[:3], together[:3])
    # its tokens begin in the second document of the row
    first = (found.tokens[3] == IMAGE).nonzero().flatten()[-4]
    assert torch.equal(changed[3, :first], together[3, :first])
    assert not torch.allclose(changed[3, first:], together[3, first:])


def test_text_alone_is_the_language_model() -> None:
    made, found = module(), batch((0, 0))
    model = made.model
    alone = model(found.tokens.flatten(), found.sequences, labels=found.labels.flatten()).losses
    here = found.loss_mask.flatten() > 0
    assert torch.equal(losses(made, found).flatten()[here], alone[here])
    made.loss_step(made.forward_step(model, found), found).sum.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(p.grad.any() for p in model.embed.tower.parameters())


@pytest.mark.parametrize("class_token", [True, False])
def test_padding_to_a_multiple_changes_nothing(class_token: bool) -> None:
    config = small(class_token=class_token)
    made, found = module(config), batch(config=config)
    expected = losses(made, found)
    made.token_multiple = 7
    assert relative_error(losses(made, found), expected) < 1e-12


def test_class_rows_have_any_pixels() -> None:
    made, found = module(), batch()
    images, _ = found.parts()
    pixels = images.pixels.clone()
    pixels[images.positions == 0] = 9
    assert torch.equal(losses(made, replace(found, images=replace(images, pixels=pixels))), losses(made, found))


def test_bytes_are_normalized() -> None:
    pixels = torch.randint(0, 256, (5, VISION.patch_values), dtype=torch.uint8)
    found = normalized(pixels, VISION).view(5, 3, 4, 4)
    for color in range(3):
        expected = (pixels.view(5, 3, 4, 4)[:, color] / 255 - VISION.mean[color]) / VISION.std[color]
        torch.testing.assert_close(found[:, color], expected)
    with pytest.raises(DataError, match=r"patches have 12 values; the tower takes 3 x 4 x 4 = 48"):
        normalized(pixels[:, :12], VISION)


def test_flops_count_both_models() -> None:
    made = module()
    alone = made.flops_per_token(24)
    found = batch()
    losses(made, found)
    images = flops_of_images(CONFIG, (VISION.num_rows,) * 6)
    assert made.flops_per_token(24) == pytest.approx(alone + images / found.tokens.numel())
    layer = 4 * 16 * 16 + 2 * 16 * 24
    projector = 16 * 32 + 32 * 32
    assert images == 6 * 5 * (6 * (2 * layer + 48 * 16 + projector) + 12 * 2 * 16 * 5)


FROZEN = [
    # what is frozen, operations of weights: tower, up, down, language; attention of the tower
    ((), (6, 6, 6, 6), 12),
    (("*.tower.*",), (2, 4, 6, 6), 4),
    (("*.tower.*", "*.projector.*"), (2, 2, 2, 6), 4),
    (("*.projector.*",), (6, 4, 4, 6), 12),
    (("model.embed.word.*",), (6, 6, 6, 6), 12),
    (("*.tower.*", "model.layers.*", "model.head.*", "model.embed.word.*"), (2, 4, 6, 4), 4),
]


@pytest.mark.parametrize(("frozen", "times", "attention"), FROZEN, ids=[str(each[1]) for each in FROZEN])
def test_flops_count_what_is_done_of_frozen_parts(
    frozen: tuple[str, ...], times: tuple[int, ...], attention: int
) -> None:
    made = VLMModule(CONFIG, freeze=frozen)
    made.model = made.build_model().double()
    initialize(made.model, 3, "model.")
    made.check_model(made.model)
    alone, found = made.flops_per_token(24), batch()
    full = VLMModule(CONFIG).flops_per_token(24)
    weights = full - 6 * 2 * 4 * 16 * 24 / 2
    assert alone == pytest.approx(full - (6 - times[3]) * weights / 6)
    losses(made, found)
    layer = 4 * 16 * 16 + 2 * 16 * 24
    rows = times[0] * (2 * layer + 48 * 16) + times[1] * 16 * 32 + times[2] * 32 * 32
    images = 6 * 5 * rows + 6 * attention * 2 * 16 * 25
    assert made.flops_per_token(24) - alone == pytest.approx(images / found.tokens.numel())


def test_flops_of_windows_and_joined_patches() -> None:
    layer = 4 * 16 * 16 + 3 * 16 * 24
    tower = 24 * 6 * (2 * layer + 2 * 48 * 16) + 12 * 16 * (24**2 + 16**2 + 8**2)  # both frames of each patch
    projector = 6 * 6 * (4 * 16 * 40 + 40 * 32)
    assert flops_of_images(QWEN, (24,), (16, 8)) == tower + projector


def test_a_batch_divides_with_its_images() -> None:
    found = batch((1, 0, 2, 3))
    parts = found.split(3)
    assert [part.parts()[0].counts for part in parts] == [(1, 0, 2), (3,)]
    images, source = parts[1].parts()
    assert len(images.pixels) == 3 * VISION.num_rows
    assert source[source >= 0].tolist() == [r for r in range(15) if r % 5]
    assert torch.equal(found.to("cpu").source, found.source)
    shares = [found.context_share(rank, 2) for rank in range(2)]
    cut = torch.cat([share.source.flatten() for share in shares])
    assert sorted(cut.tolist()) == sorted(found.source.flatten().tolist())
    for share in shares:
        assert torch.equal(share.source >= 0, share.tokens == IMAGE)
        assert share.images is found.images


def test_tokens_that_do_not_match_the_images_are_refused() -> None:
    images, rows = batch((1, 1)).images, torch.zeros(2, 24, dtype=torch.int64)
    rows[0, :4] = IMAGE
    rows[1, :3] = IMAGE
    text = TokenBatch(rows, rows, torch.ones(2, 24))
    with pytest.raises(DataError, match=r"row 1 has 3 image tokens \(id 100\), and its 1 images have 4 patches"):
        with_images(text, images, IMAGE, class_token=True)
    with pytest.raises(DataError, match="there are 1 rows of tokens, and images of 2 rows"):
        with_images(text.split(1)[0], images, IMAGE, class_token=True)
    with pytest.raises(DataError, match=r"lengths that sum to 5"):
        Images(images.pixels, images.positions, (5,), (1, 0))


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        ("vision", {"image_size": 10}, "image_size 10 does not divide into patches of vision.patch_size 4"),
        ("vision", {"margin": 4}, "and a vision.margin of 4; choose a multiple, such as 8, or a margin of 0"),
        ("vision", {"image_size": 2, "margin": 2}, "vision.image_size is 2; it must be at least vision.patch_size 4"),
        ("vision", {"num_heads": 3}, "hidden_size 16 is not a multiple of vision.num_heads 3"),
        ("vision", {"channels": 2}, "vision.channels is 2; it must be 1 (gray) or 3"),
        ("vision", {"channels": 1}, "vision.mean has 3 values for 1 channels"),
        ("vision", {"std": (1.0, 0.0, 1.0)}, "all values must be above 0"),
        ("vision", {"num_layers": 0}, "vision.num_layers is 0"),
        ("vision", {"norm_eps": 0.0}, "vision.norm_eps is 0.0"),
        ("vision", {"image_size": 24}, "an image has 36 tokens, and language.max_sequence_length is 24"),
        ("projector", {"activation": "geglu"}, "'geglu', which is gated"),
        ("projector", {"hidden_size": -1}, "projector.hidden_size is -1"),
        ("language", {"mtp": MultiTokenConfig()}, "language.mtp is set"),
        ("language", {"position": PositionConfig(kind="learned")}, "language.position.kind is 'learned'"),
        ("language", {"vocab_size": 100}, "image_token is 100; it must be an id of the vocabulary, below 100"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(part: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        replace(CONFIG, **{part: replace(getattr(CONFIG, part), **options)})


@pytest.mark.parametrize("token", [IMAGE, 101, -1])
def test_the_token_of_videos_is_another_id_of_the_vocabulary(token: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"video_token is {token}; it must be an id of the vocabulary"):
        replace(CONFIG, video_token=token)


def test_a_pattern_that_freezes_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"freeze has '\*\.towr\.\*', which matches no parameter. Did you mean '\*\.tower\.\*'"
    ):
        VLMModule(CONFIG, freeze=["*.towr.*"]).build_model()
    frozen = VLMModule(CONFIG, freeze=["*.tower.*"]).build_model()
    assert {name.split(".")[1] for name, p in frozen.named_parameters() if not p.requires_grad} == {"tower"}


def test_backends_and_dropout_may_differ_between_runs() -> None:
    made = VLMModule(CONFIG)
    other = small(dropout=replace(VISION.dropout, hidden=0.1))
    made.check_checkpoint({"model": {"family": "vlm", "config": other.to_dict()}})


def test_a_checkpoint_of_an_older_release_lacks_later_settings() -> None:
    older = CONFIG.to_dict()
    del older["newline"], older["vision"]["margin"]
    VLMModule(CONFIG).check_checkpoint({"model": {"family": "vlm", "config": older}})
    with pytest.raises(CheckpointError, match=r"newline is True here and False in the checkpoint"):
        VLMModule(replace(CONFIG, newline=True)).check_checkpoint({"model": {"family": "vlm", "config": older}})


def test_a_newline_follows_each_image() -> None:
    config = replace(CONFIG, newline=True)
    made, found = module(config), batch(config=config)
    images, source = found.parts()
    assert sum(images.counts) == 6
    assert (source == NEWLINE).sum() == 6
    before = losses(made, found)
    with torch.no_grad():
        made.model.embed.newline.weight.mul_(2)
    after = losses(made, found)
    for row, count in enumerate(images.counts):
        assert torch.equal(before[row], after[row]) == (count == 0)
    parts = [part.parts() for part in found.split(1)]
    assert [int((part[1] == NEWLINE).sum()) for part in parts] == list(images.counts)
    shares = [found.context_share(rank, 2).source for rank in range(2)]
    assert sorted(torch.cat([s.flatten() for s in shares]).tolist()) == sorted(source.flatten().tolist())
    with pytest.raises(DataError, match=r"row 0 has 5 image tokens .* have 4 patches; each patch needs one token\."):
        with_images(found, images, IMAGE, class_token=True)
    with pytest.raises(DataError, match=r"have 4 patches; each patch needs one token, and each image one more\."):
        with_images(batch(), images, IMAGE, class_token=True, newline=True)


def test_a_part_with_the_tower_gives_features_of_earlier_layers_beside() -> None:
    model, found = VLM(QWEN3).double(), batch((1, 0, 2), config=QWEN3)
    initialize(model, 3, "model.")
    images, source = found.parts()
    packed_images = pack_images(QWEN3, images, source.flatten(), 1)
    text = found.tokens.flatten(), found.sequences.positions
    whole = model.embed(*text, packed_images=packed_images)
    part = model.without_tower()
    features = part(packed_images)
    assert features.shape == (sum(images.lengths) // 4, 3 * QWEN3.language.hidden_size)
    assert sorted({name.split(".")[1] for name, _ in part.named_parameters()}) == ["deep", "projector", "tower"]
    arrived = model.embed(*text, packed_images=RemoteFeatures(features, source.flatten()))
    for ours, theirs in zip(arrived, whole, strict=True):
        assert torch.equal(ours, theirs)
