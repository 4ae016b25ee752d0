"""Images of any shape in tiles, as LLaVA-NeXT and LLaVA-OneVision read them, against ``transformers``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.data.multimodal.batch import ImageTextBatch, with_cuts
from megalight.data.multimodal.resolution import form_of
from megalight.errors import ConfigurationError
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import Folder
from megalight.models.stored import held_model
from megalight.models.vision.config import AnyResConfig
from megalight.models.vision.model import normalized
from megalight.models.vlm import VLM, VLMConfig
from megalight.models.vlm.hugging_face import config_from_transformers, config_to_transformers, weight_map
from megalight.models.vlm.presets import PRESETS
from megalight.models.vlm.task import pack_images
from megalight.parallel.source import model_targets
from megalight.types import TokenBatch
from tests.models.test_vlm_hugging_face import QWEN, TEXT, VISION
from tests.models.vlm_referee import check_outputs_and_gradients
from tests.models.vlm_samples import TILES
from tests.support.reference_gpt import relative_error

transformers = pytest.importorskip("transformers")

IMAGE, SIZE = 52, 14
GRIDS = [[14, 14], [14, 28], [28, 14], [28, 28], [42, 14]]
ROWS = [[(40, 23)], [(9, 30), (14, 14)], [], [(14, 14)]]
"""Heights and widths of the images of rows. Grids of the first are shrunk."""


def theirs(kind: str, dtype: torch.dtype) -> Any:
    """A model with random weights, also of norms and biases."""
    torch.manual_seed(1)
    shared = {"image_token_index": IMAGE, "image_grid_pinpoints": GRIDS}
    if kind == "llava_next":
        vision = transformers.CLIPVisionConfig(**VISION | {"image_size": SIZE - 2})
        shared["image_grid_pinpoints"] = [[side * 6 // 7 for side in grid] for grid in GRIDS]
        text = transformers.LlamaConfig(**TEXT | {"max_position_embeddings": 128})
        config = transformers.LlavaNextConfig(vision_config=vision, text_config=text, **shared)
        model = transformers.LlavaNextForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        sizes = {key: value for key, value in VISION.items() if key not in ("projection_dim", "initializer_factor")}
        vision = transformers.SiglipVisionConfig(**sizes | {"image_size": SIZE, "vision_use_head": False})
        text = transformers.Qwen2Config(**QWEN | {"max_position_embeddings": 128})
        shared |= {"vision_aspect_ratio": "anyres_max_1", "video_token_index": IMAGE - 1}
        config = transformers.LlavaOnevisionConfig(vision_config=vision, text_config=text, **shared)
        model = transformers.LlavaOnevisionForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def processor(config: VLMConfig, reference: Any) -> Any:
    """Their image processor, whose resizing is Pillow's, for small squares."""
    vision, size = config.vision, config.vision.image_size
    options = {"image_mean": list(vision.mean), "image_std": list(vision.std)}
    options["image_grid_pinpoints"] = reference.config.image_grid_pinpoints
    if reference.config.model_type == "llava_next":
        sizes = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
        return transformers.LlavaNextImageProcessorPil(**sizes, **options)
    return transformers.LlavaOnevisionImageProcessorPil(size={"height": size, "width": size}, **options)


def read(folder: Path, dtype: torch.dtype) -> VLM:
    config = config_from_transformers(read_config(folder))
    model = VLM(config).to(dtype)
    Folder(folder, weight_map(config), "").fill(model_targets(model))
    return model


def inputs(config: VLMConfig, reference: Any, dtype: torch.dtype) -> tuple[dict[str, Any], ImageTextBatch]:
    """Rows with one image, two, none and one, as theirs and as a batch of ours."""
    random, form = np.random.default_rng(3), form_of(config)
    raw_images = [[Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in row] for row in ROWS]
    cuts = [[form.among(len(row)).cut(each) for each in row] for row in raw_images]
    tokens = torch.randint(1, IMAGE - 3, (len(ROWS), 90), generator=torch.Generator().manual_seed(2))
    for row, own in enumerate(cuts):
        at = 2
        for cut in own:
            tokens[row, at : at + len(cut.source)] = IMAGE
            at += len(cut.source) + 3
        assert at < 90
    labels = tokens.roll(-1, 1)
    mask = (labels != IMAGE).float()
    mask[:, -1] = 0
    batch = with_cuts(TokenBatch(tokens, labels, mask), cuts, IMAGE, form)
    asked = processor(config, reference)([row for row in raw_images if row], return_tensors="pt")
    asked["pixel_values"] = asked["pixel_values"].to(dtype)
    return {"input_ids": tokens, **asked}, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
def test_equal_outputs_and_gradients(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With their image processor and ours: as many tokens, equal pixels, logits, losses and gradients."""
    reference = theirs(kind, dtype)
    reference.save_pretrained(tmp_path)
    model = read(tmp_path, dtype)
    asked, batch = inputs(model.config, reference, dtype)
    assert (batch.images.mixtures is not None) == (kind == "llava_onevision")
    check_outputs_and_gradients(reference, model, asked, batch, IMAGE, token_multiple=4)


def test_micro_batches_have_their_own_mixtures() -> None:
    form, random = form_of(TILES), np.random.default_rng(0)
    cuts = [[form.divided(random.integers(0, 256, (24, 9, 3), np.uint8))] for _ in range(3)]
    tokens = torch.zeros(3, 24, dtype=torch.int64)
    for row, (cut,) in enumerate(cuts):
        assert len(cut.mixed_rows)
        tokens[row, row : row + len(cut.source)] = TILES.image_token
    batch = with_cuts(TokenBatch(tokens, tokens, (tokens != TILES.image_token).float()), cuts, TILES.image_token, form)
    model = VLM(TILES).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))

    def losses(part: Any) -> torch.Tensor:
        packed_images = pack_images(TILES, part.images, part.source.flatten(), 1)
        labels = part.labels.flatten()
        return model(part.tokens.flatten(), part.sequences, labels=labels, packed_images=packed_images).losses

    parts = torch.cat([losses(part) for part in batch.split(1)])
    assert relative_error(parts, losses(batch)) < 1e-12


@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
def test_weights_and_settings_return(kind: str, tmp_path: Path) -> None:
    reference = theirs(kind, torch.float32)
    reference.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs", torch.float32)
    export(held_model("vlm", model.config, model), tmp_path / "ours")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items():
        if "post_layernorm" not in name and name in after:  # a norm and a last layer that nobody reads
            assert torch.equal(tensor, after[name]), name
    back = type(reference).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert back.config.image_grid_pinpoints == reference.config.image_grid_pinpoints
    asked, _ = inputs(model.config, reference, torch.float32)
    with torch.no_grad():
        assert torch.equal(reference(**asked).logits, back.eval()(**asked).logits)


def test_pixels_and_numbers_of_tokens_of_the_presets() -> None:
    """Sizes at which grids change, and borders of less than a patch."""
    random = np.random.default_rng(1)
    squares = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    gray = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for name, their in (
        ("llava_onevision_0_5b", transformers.LlavaOnevisionImageProcessorPil(**gray)),
        ("llava_next_7b", transformers.LlavaNextImageProcessorPil(**squares)),
    ):
        config, form = PRESETS[name], form_of(PRESETS[name])
        for width, height in ((384, 384), (700, 300), (301, 577), (50, 20), (1200, 500)):
            image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
            cut, (expected,) = form.cut(image), their(image, return_tensors="pt")["pixel_values"]
            assert len(cut.source) == form.num_tokens(width, height)
            covered = config.vision.image_size - config.vision.margin
            patches = torch.nn.functional.unfold(
                expected[..., :covered, :covered], config.vision.patch_size, stride=config.vision.patch_size
            ).mT
            found = normalized(torch.from_numpy(cut.pixels), config.vision).view(len(expected), -1, patches.shape[2])
            assert torch.equal(found[:, -patches.shape[1] :], patches), (name, width, height)


def test_several_images_are_squares() -> None:
    """As theirs, whose processor makes them square with the mean color."""
    config = PRESETS["llava_onevision_0_5b"]
    random = np.random.default_rng(2)
    images = [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in ((100, 61), (384, 384))]
    their = transformers.LlavaOnevisionImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    for image, expected in zip(images, their([images], return_tensors="pt")["pixel_values"], strict=True):
        cut = form_of(config).among(2).cut(image)
        assert (len(cut.source), cut.tiles) == (730, 1)
        patches = torch.nn.functional.unfold(expected[:, :, :378, :378], 14, stride=14).mT[0]
        # Theirs scales after it has made floats of it, and rounds once less.
        assert (normalized(torch.from_numpy(cut.pixels), config.vision) - patches).abs().max() < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_pinpoints": [[14, 20]]}, r"image_grid_pinpoints has \[\[14, 20\]\]; sides are multiples .* 14"),
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio is 'square'; anyres_max_N is read"),
    ],
    ids=str,
)
def test_other_tiles_are_refused(change: dict[str, Any], message: str) -> None:
    values = config_to_transformers(config_from_transformers(theirs("llava_onevision", torch.float32).config.to_dict()))
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers(values | change)


def test_settings_that_clash_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"vision\.anyres is set with vision\.tiles 4"):
        replace(TILES.vision, tiles=4)
    with pytest.raises(ConfigurationError, match=r"vision\.anyres\.grids is \[\]; give at least one pair"):
        AnyResConfig(grids=())
    with pytest.raises(ConfigurationError, match=r"mutual is true with .* vision\.anyres"):
        replace(TILES, newline=False, mutual=True)
