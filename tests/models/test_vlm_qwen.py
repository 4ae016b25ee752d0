"""Qwen2.5-VL against ``transformers``: images, positions, logits, losses and gradients, and weights both ways."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.data.multimodal.batch import with_cuts
from megalight.data.multimodal.resolution import DynamicForm, form_of
from megalight.data.multimodal.template import ImagePatches
from megalight.errors import ConfigurationError, DataError
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import Folder
from megalight.models.stored import held_model
from megalight.models.vision.config import DynamicConfig
from megalight.models.vlm import VLM, VLMConfig
from megalight.models.vlm.hugging_face import config_from_transformers, config_to_transformers, weight_map
from megalight.models.vlm.presets import PRESETS
from megalight.ops.rotary import RotaryAxes
from megalight.parallel.source import model_targets
from megalight.types import TokenBatch
from tests.models.test_vlm_hugging_face import TEXT
from tests.models.vlm_referee import check_outputs_and_gradients

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

IMAGE, START = 52, 51
SIZES = [[(40, 24), (16, 8)], [], [(9, 30)]]
"""Width and height of the images of each row: of several windows that are cut at the edges, and of a single square."""


def theirs(dtype: torch.dtype = torch.float32, **vision: Any) -> Any:
    """A Qwen2.5-VL with random weights, also of norms and biases."""
    torch.manual_seed(1)
    sizes = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 3, "patch_size": 4}
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config=sizes | {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32} | vision,
        image_token_id=IMAGE,
        vision_start_token_id=START,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def read(folder: Path, dtype: torch.dtype = torch.float32) -> VLM:
    config = config_from_transformers(read_config(folder))
    # Such small pictures stay as they are.
    config = replace(config, vision=replace(config.vision, dynamic=replace(config.vision.dynamic, min_pixels=64)))
    model = VLM(config).to(dtype)
    Folder(folder, weight_map(config), "").fill(model_targets(model))
    return model


def picture(width: int, height: int, seed: int = 0) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def as_theirs(cut: ImagePatches, form: DynamicForm) -> torch.Tensor:
    """Rows of a cut in the order of ``transformers``: squares row by row; each pixel of both frames."""
    squares = cut.pixels.reshape(cut.features, -1, form.channels, 1, form.patch**2)
    rows = np.broadcast_to(squares, (*squares.shape[:3], 2, form.patch**2))[cut.source]
    return torch.from_numpy(rows.reshape(len(cut.pixels), -1).copy())


def inputs(config: VLMConfig, dtype: torch.dtype) -> tuple[dict[str, Any], Any]:
    """Rows with two images, none and one, as theirs and as a batch of ours."""
    form = form_of(config)
    assert isinstance(form, DynamicForm)
    cuts = [[form.cut(picture(*size, seed=7 * i + j)) for j, size in enumerate(row)] for i, row in enumerate(SIZES)]
    tokens = torch.randint(0, IMAGE - 3, (3, 50), generator=torch.Generator().manual_seed(2))
    for row, own in enumerate(cuts):
        at = 2
        for cut in own:
            tokens[row, at : at + len(cut.source)] = IMAGE
            at += len(cut.source) + 3
    labels = tokens.roll(-1, 1)
    mask = (labels != IMAGE).float()
    mask[:, -1] = 0
    batch = with_cuts(TokenBatch(tokens, labels, mask), cuts, IMAGE, form)
    every = [cut for own in cuts for cut in own]
    colors = torch.cat([as_theirs(cut, form) for cut in every]).view(-1, 3, 2 * form.patch**2).double() / 255
    mean, std = (torch.tensor(values).double()[None, :, None] for values in (config.vision.mean, config.vision.std))
    asked = {
        "input_ids": tokens,
        "pixel_values": ((colors - mean) / std).flatten(1).to(dtype),
        "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in (cut.grid for cut in every)]),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
    return asked, batch


@pytest.mark.parametrize("size", [(40, 24), (100, 33), (7, 5), (300, 20), (130, 130), (9, 200)], ids=str)
def test_images_become_the_patches_of_transformers(size: tuple[int, int]) -> None:
    form = DynamicForm(patch=4, merge=2, min_pixels=16 * 16, max_pixels=64 * 64, window=16)
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64, do_normalize=False, do_rescale=False
    )
    cut = form.cut(picture(*size))
    expected = processor(picture(*size), return_tensors="pt")
    assert (1, 2 * cut.grid[0], 2 * cut.grid[1]) == tuple(expected["image_grid_thw"][0].tolist())
    assert form.num_tokens(*size) == len(cut.source) == len(cut.pixels) // 4
    assert torch.equal(as_theirs(cut, form), expected["pixel_values"].to(torch.uint8))
    assert sum(cut.windows) == len(cut.pixels)


def test_shapes_that_are_not_read_are_refused() -> None:
    form = DynamicForm(patch=4, merge=2, min_pixels=64, max_pixels=4096)
    with pytest.raises(DataError, match="an image of 2010 x 10 pixels is more than 200 times as long as wide"):
        form.cut(picture(2010, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_outputs_and_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = theirs(dtype)
    reference.save_pretrained(tmp_path)
    model = read(tmp_path, dtype)
    asked, batch = inputs(model.config, dtype)
    places, _ = reference.model.get_rope_index(
        asked["input_ids"], asked["mm_token_type_ids"], image_grid_thw=asked["image_grid_thw"]
    )
    assert torch.equal(batch.axis_positions, places.transpose(0, 1))
    check_outputs_and_gradients(reference, model, asked, batch, IMAGE)


def test_weights_return_bit_by_bit(tmp_path: Path) -> None:
    reference = theirs()
    reference.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs")
    export(held_model("vlm", model.config, model), tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    back, info = type(reference).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    asked, _ = inputs(model.config, torch.float32)
    with torch.no_grad():
        answers = [each(**asked).logits for each in (reference, back.eval())]
    assert torch.equal(*answers)


def test_the_published_configuration() -> None:
    """What ``Qwen/Qwen2.5-VL-7B-Instruct`` says, in the form of older releases."""
    published = {
        "model_type": "qwen2_5_vl",
        "image_token_id": 151655,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420}
        | {"num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2}
        | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    }
    config = config_from_transformers(published)
    assert config == PRESETS["qwen2_5_vl_7b"]
    assert config_from_transformers(config_to_transformers(config)) == config
    form = form_of(config)
    assert form.num_tokens(644, 476) == 23 * 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "vision_config.hidden_act is 'gelu'; only silu is read"),
        ({"out_hidden_size": 16}, "out_hidden_size is 16 and the language model has hidden_size 32"),
        ({"window_size": 12}, "window is 12 pixels, not a multiple of projector.merge 2 x vision.patch_size 4 = 8"),
        ({"num_heads": 4}, "vision.hidden_size / vision.num_heads is 6 with vision.dynamic"),
        ({"fullatt_block_indexes": [5]}, "vision.dynamic.full_layers has [5]; layers are 0 to 2"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    values = theirs().config.to_dict()
    values["vision_config"] |= change
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        config_from_transformers(values)


def test_what_transformers_cannot_say_is_refused() -> None:
    config = PRESETS["qwen2_5_vl_7b"]
    with pytest.raises(ConfigurationError, match=r"vision\.norm is layer here and rms"):
        config_to_transformers(replace(config, vision=replace(config.vision, norm="layer")))
    position = replace(config.language.position, axes=RotaryAxes((8, 12, 12)))
    narrow = replace(config, language=replace(config.language, head_dim=64, position=position))
    with pytest.raises(ConfigurationError, match="head_dim is 64 with 28 heads and hidden_size 3584"):
        config_to_transformers(narrow)
    with pytest.raises(ConfigurationError, match=r"vision\.dynamic\.max_pixels"):
        replace(config, vision=replace(config.vision, dynamic=DynamicConfig(min_pixels=100, max_pixels=200)))
