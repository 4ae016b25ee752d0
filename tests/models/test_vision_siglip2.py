"""Towers of SigLIP2 (NaFlex) and RADIO against ``transformers``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megalight.data.multimodal.images import Images
from megalight.data.multimodal.resolution import DynamicForm, form_of
from megalight.errors import ConfigurationError
from megalight.models.vision import VisionConfig, VisionTower
from megalight.models.vision.config import DynamicConfig
from megalight.models.vision.model import PositionTable, normalized
from megalight.models.vlm import ProjectorConfig, VLMConfig
from megalight.models.vlm.task import pack_images
from tests.models.vlm_samples import CONFIG, NAFLEX
from tests.support.reference_gpt import relative_error

transformers = pytest.importorskip("transformers")

TOWER = VisionConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=3,
    ffn_hidden_size=40,
    image_size=0,
    patch_size=4,
    activation="gelu_tanh",
    class_token=False,
    patch_bias=True,
    input_norm=False,
    output_norm=True,
    norm_eps=1e-6,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    resample="bilinear",
    dynamic=DynamicConfig(patches=16, frames=1, rotary=False, table=4, table_cells=True),
)
LAYER = {
    "attention_norm": "layer_norm1",
    "attention.proj": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
SIZES = [(16, 16), (9, 50), (100, 37), (3, 200), (400, 300)]
"""Heights and widths of images."""


def places(rows: int, columns: int) -> torch.Tensor:
    """``[rows * columns, 4]``, row by row."""
    at = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).view(-1, 2)
    return torch.cat([at, torch.tensor([[rows, columns]]).expand(len(at), 2)], 1)


@pytest.mark.parametrize("shape", [(4, 4), (2, 8), (1, 16), (3, 5), (7, 2), (9, 9)], ids=str)
def test_tables_are_resized_as_pictures(shape: tuple[int, int]) -> None:
    table = PositionTable(4, 6, 1.0, cells=True).double()
    torch.nn.init.normal_(table.weight)
    grid = table.weight.view(4, 4, 6).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(grid, shape, mode="bilinear", antialias=True)
    assert relative_error(table(places(*shape)), expected[0].flatten(1).T) < 1e-12


def test_sizes_and_pixels_are_those_of_their_processor() -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    random = np.random.default_rng(0)
    form = DynamicForm(patch=16, merge=1, min_pixels=1, max_pixels=1, patches=256)
    for width, height in random.integers(16, 3000, (300, 2)).tolist():
        expected = get_image_size_for_max_num_patches(height, width, 16, 256)[::-1]
        assert form.size(width, height) == expected, (width, height)
    whole = VLMConfig(language=CONFIG.language, vision=TOWER, image_token=100)
    theirs = transformers.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16)
    for size in SIZES:
        image = Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8))
        cut, expected = form_of(whole).cut(image), theirs(image, return_tensors="pt")
        found = normalized(torch.from_numpy(cut.pixels), TOWER)
        rows = expected["pixel_values"][0, : len(found)].float().view(-1, 4, 4, 3).permute(0, 3, 1, 2).flatten(1)
        assert expected["pixel_attention_mask"].sum() == len(found) == form_of(whole).num_tokens(*image.size)
        assert expected["spatial_shapes"].tolist() == [cut.positions[2:, 0].tolist()]
        assert (found - rows).abs().max() < 1e-5


def siglip2(dtype: torch.dtype) -> Any:
    config = transformers.Siglip2VisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, patch_size=4, num_patches=16
    )
    config.vision_use_head = False
    torch.manual_seed(1)
    model = transformers.Siglip2VisionModel._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def test_features_and_gradients_are_those_of_siglip2() -> None:
    reference, tower = siglip2(torch.float64), VisionTower(TOWER).double()
    state = {name.removeprefix("vision_model."): p for name, p in reference.named_parameters()}

    def theirs(name: str, of: Any) -> torch.Tensor:
        """The tensor of our name, of their values or of their gradients."""
        if name == "patch.weight":  # theirs has the colors of a pixel beside each other
            return of("embeddings.patch_embedding.weight").view(24, 4, 4, 3).permute(0, 3, 1, 2)[:, :, None]
        for ours, place in (("patch.bias", "embeddings.patch_embedding.bias"), ("output_norm", "post_layernorm")):
            name = name.replace(ours, place)
        name = name.replace("position.weight", "embeddings.position_embedding.weight")
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            if rest.startswith("attention.qkv."):
                leaf = rest.rpartition(".")[2]
                return torch.cat([of(f"encoder.layers.{index}.self_attn.{x}_proj.{leaf}") for x in "qkv"])
            module, _, leaf = rest.rpartition(".")
            name = f"encoder.layers.{index}.{LAYER[module]}.{leaf}"
        return of(name)

    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.copy_(theirs(name, state.__getitem__))
    whole = VLMConfig(language=CONFIG.language, vision=TOWER, image_token=100)
    random, form = np.random.default_rng(3), form_of(whole)
    cuts = [form.cut(Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8))) for size in SIZES]
    images = Images.of_cuts([cuts], form)
    packed_images = pack_images(whole, images, torch.zeros(0, dtype=torch.int64), 1)
    ours = tower(replace(packed_images, pixels=packed_images.pixels.double()))[0]
    inputs = torch.zeros(len(cuts), 16, 48, dtype=torch.float64)
    for row, pixels in zip(inputs, packed_images.pixels.split([len(cut.pixels) for cut in cuts]), strict=True):
        row[: len(pixels)] = pixels.view(-1, 3, 4, 4).permute(0, 2, 3, 1).flatten(1)
    mask = torch.stack([(torch.arange(16) < len(cut.pixels)).int() for cut in cuts])
    shapes = torch.tensor([cut.positions[2:, 0].tolist() for cut in cuts])
    expected = reference(pixel_values=inputs, pixel_attention_mask=mask, spatial_shapes=shapes).last_hidden_state
    expected = expected[mask.bool()]
    # Theirs resizes the table in float32.
    assert relative_error(ours, expected) < 1e-6
    factor = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (ours * factor).sum().backward()
    (expected * factor).sum().backward()
    gradients = {name: p.grad for name, p in state.items()}
    for name, parameter in tower.named_parameters():
        found, wanted = parameter.grad, theirs(name, gradients.__getitem__)
        assert found is not None
        if name.endswith("qkv.bias"):  # whose keys softmax does not feel: rounding noise around 0
            found, wanted = (torch.cat([each[:24], each[48:]]) for each in (found, wanted))
        assert relative_error(found.view_as(wanted), wanted) < 1e-5, name


def test_features_are_those_of_radio() -> None:
    """Whose class tokens and registers are rows without a position. Its table is cropped to the shape of images."""
    config = transformers.RadioConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=2.0, patch_size=4, image_size=12
    )
    config.max_img_size, config.num_cls_tokens, config.num_registers = 32, 2, 3
    torch.manual_seed(1)
    reference = transformers.RadioModel._from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    fixed = {"image_size": 12, "dynamic": None, "register_tokens": 5, "layer_scale": 1.0, "activation": "gelu"}
    vision = replace(TOWER, **fixed, patch_bias=False, output_norm=False, ffn_hidden_size=48, resample="bicubic")
    whole = VLMConfig(language=CONFIG.language, vision=vision, image_token=100, projector=ProjectorConfig(merge=3))
    tower, state = VisionTower(vision).double(), dict(reference.named_parameters())
    grid = state["embeddings.position_embedding"].view(8, 8, 24).permute(2, 0, 1)[None]
    table = torch.nn.functional.interpolate(grid, (3, 3), mode="bilinear")[0].flatten(1).T
    blocks = {
        "attention_norm": "norm1",
        "attention.proj": "attention.output.dense",
        "attention_post_norm.weight": "layer_scale1.lambda1",
        "mlp_norm": "norm2",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "mlp_post_norm.weight": "layer_scale2.lambda1",
    }

    def theirs(name: str) -> torch.Tensor:
        if name == "position.weight":
            return table
        if not name.startswith("layers."):
            return state[
                {"patch.weight": "embeddings.patch_projection.weight"}.get(name, "embeddings.cls_register_token")
            ]
        _, index, rest = name.split(".", 2)
        block = f"encoder.layer.{index}."
        if rest.startswith("attention.qkv."):
            leaf = rest.rpartition(".")[2]
            return torch.cat([state[f"{block}attention.attention.{x}.{leaf}"] for x in ("query", "key", "value")])
        if rest in blocks:
            return state[block + blocks[rest]]
        module, _, leaf = rest.rpartition(".")
        return state[f"{block}{blocks[module]}.{leaf}"]

    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.copy_(theirs(name).reshape(parameter.shape))
    random, form = np.random.default_rng(0), form_of(whole)
    pixels = random.integers(0, 256, (2, 12, 12, 3), np.uint8)
    images = Images.of_cuts([[form.divided(each) for each in pixels]], form)
    packed_images = pack_images(whole, images, torch.zeros(0, dtype=torch.int64), 1)
    ours = tower(replace(packed_images, pixels=packed_images.pixels.double()))[0][packed_images.patches]
    reference.make_preprocessor_external()  # pixels are normalized already
    colors = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        expected = reference(colors.double()).features
    # Rows of ours are in squares of patches, here one of 3 x 3. Theirs resizes the table in float32.
    assert relative_error(ours.view_as(expected), expected) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary": False}, r"vision\.dynamic\.table is 0 without vision\.dynamic\.rotary"),
        ({"table_cells": True}, r"vision\.dynamic\.table is 0 .* table_cells"),
        ({"patches": -1}, r"vision\.dynamic\.patches is -1"),
    ],
    ids=str,
)
def test_settings_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DynamicConfig(**options)
    with pytest.raises(ConfigurationError, match=r"patches is 3; a token is a square of projector\.merge 2 x 2"):
        replace(NAFLEX, vision=replace(NAFLEX.vision, dynamic=replace(NAFLEX.vision.dynamic, patches=3)))
