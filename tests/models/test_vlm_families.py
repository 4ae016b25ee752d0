"""Gemma-3, InternVL and Qwen3-VL against ``transformers``: logits, losses, gradients, weights, configurations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.data.multimodal.batch import ImageTextBatch, with_cuts
from megalight.data.multimodal.resolution import form_of
from megalight.errors import ConfigurationError
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import Folder
from megalight.models.stored import held_model
from megalight.models.vlm import VLM, VLMConfig
from megalight.models.vlm.hugging_face import config_from_transformers, config_to_transformers, weight_map
from megalight.models.vlm.presets import PRESETS
from megalight.parallel.source import model_targets
from megalight.types import TokenBatch
from tests.models.test_vlm_hugging_face import TEXT
from tests.models.vlm_referee import check_outputs_and_gradients

transformers = pytest.importorskip("transformers")

IMAGE = 52
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3, "patch_size": 4}


def gemma3() -> Any:
    text = TEXT | {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3, "query_pre_attn_scalar": 20}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    vision = VISION | {"image_size": 16, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE
    )
    return transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")


def internvl(**vision: Any) -> Any:
    text = transformers.Qwen2Config(**TEXT | {"hidden_size": 40})
    tower = VISION | {"image_size": 16, "num_attention_heads": 4, "layer_scale_init_value": 0.5} | vision
    config = transformers.InternVLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE)
    return transformers.InternVLForConditionalGeneration._from_config(config, attn_implementation="eager")


def qwen3_vl(num_layers: int = 3, **options: Any) -> Any:
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = TEXT | {"head_dim": 8, "num_hidden_layers": num_layers, "rope_parameters": rotation}
    text["max_position_embeddings"] = 2048
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": IMAGE - 1}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens, **options)
    return transformers.Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")


def images_of(config: VLMConfig, raw_images: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """``[tiles, 3, size, size]``, normalized."""
    size, vision = config.vision.image_size, config.vision
    colors = torch.from_numpy(np.concatenate(raw_images)).view(-1, size, size, 3).permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(values).double()[:, None, None] for values in (vision.mean, vision.std))
    return ((colors - mean) / std).to(dtype)


@dataclass(frozen=True)
class Case:
    """A family: its model in ``transformers``, sizes of pictures, and what it wants besides tokens and pixels."""

    model: Callable[[], Any]
    sizes: list[list[tuple[int, int]]]
    asked: Callable[[VLMConfig, torch.Tensor, list[np.ndarray], torch.dtype], dict[str, Any]]


def squares(
    config: VLMConfig, tokens: torch.Tensor, raw_images: list[np.ndarray], dtype: torch.dtype
) -> dict[str, Any]:
    """Rows of patches in squares of 2 x 2, each pixel of both frames, and the rows and columns of each image."""
    rows, grids, p = [], [], config.vision.patch_size
    for each in raw_images:
        height, width = (side // p for side in each.shape[:2])
        cut = torch.from_numpy(each).view(height // 2, 2, p, width // 2, 2, p, 3).permute(0, 3, 1, 4, 6, 2, 5)
        rows.append(cut.reshape(height * width, 3, 1, p * p).expand(-1, -1, 2, -1).flatten(1))
        grids.append([1, height, width])
    pixels = torch.cat(rows).double() / 255
    return {
        "pixel_values": ((pixels - 0.5) / 0.5).to(dtype),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }


def only_pixels(
    config: VLMConfig, tokens: torch.Tensor, raw_images: list[np.ndarray], dtype: torch.dtype
) -> dict[str, Any]:
    return {"pixel_values": images_of(config, raw_images, dtype)}


TILES = [[(16, 16), (48, 16)], [], [(32, 16)]]
"""Of one, three and two squares, one below the other."""
ANY = [[(24, 40), (8, 16)], [], [(32, 8)]]
CASES = {
    "qwen3_vl": Case(qwen3_vl, ANY, squares),
    "qwen3_vl_tied": Case(lambda: qwen3_vl(2, tie_word_embeddings=True), ANY, squares),
    "internvl": Case(internvl, TILES, only_pixels),
    "internvl_6b": Case(
        lambda: internvl(use_qk_norm=True, norm_type="rms_norm", attention_bias=True), TILES, only_pixels
    ),
    "internvl_norm": Case(lambda: internvl(use_mean_pooling=False), TILES, only_pixels),
    "gemma3": Case(
        gemma3,
        [[(16, 16), (16, 16)], [], [(16, 16)]],
        lambda config, tokens, raw_images, dtype: {
            "pixel_values": images_of(config, raw_images, dtype),
            "token_type_ids": (tokens == IMAGE).int(),
        },
    ),
}


def theirs(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, also of norms and biases."""
    torch.manual_seed(1)
    model = CASES[name].model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def read(folder: Path, dtype: torch.dtype = torch.float32) -> VLM:
    config = config_from_transformers(read_config(folder))
    if config.vision.dynamic is not None:  # such small pictures stay as they are
        config = replace(config, vision=replace(config.vision, dynamic=replace(config.vision.dynamic, min_pixels=64)))
    model = VLM(config).to(dtype)
    Folder(folder, weight_map(config), "").fill(model_targets(model))
    return model


def inputs(name: str, config: VLMConfig, dtype: torch.dtype) -> tuple[dict[str, Any], ImageTextBatch]:
    """Rows with two images, none and one, as theirs and as a batch of ours."""
    form, random = form_of(config), np.random.default_rng(3)
    sizes = CASES[name].sizes
    raw_images = [[random.integers(0, 256, (*size, 3), np.uint8) for size in row] for row in sizes]
    cuts = [[form.divided(each) for each in row] for row in raw_images]
    tokens = torch.randint(1, IMAGE - 3, (3, 50), generator=torch.Generator().manual_seed(2))
    for row, own in enumerate(cuts):
        at = 2
        for cut in own:
            tokens[row, at : at + len(cut.source)] = IMAGE
            at += len(cut.source) + 3
    labels = tokens.roll(-1, 1)
    mask = (labels != IMAGE).float()
    mask[:, -1] = 0
    batch = with_cuts(TokenBatch(tokens, labels, mask), cuts, IMAGE, form)
    every = [each for row in raw_images for each in row]
    return {"input_ids": tokens, **CASES[name].asked(config, tokens, every, dtype)}, batch


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_outputs_and_gradients(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = theirs(name, dtype)
    reference.save_pretrained(tmp_path)
    model = read(tmp_path, dtype)
    asked, batch = inputs(name, model.config, dtype)
    check_outputs_and_gradients(reference, model, asked, batch, IMAGE, token_multiple=4)


@pytest.mark.parametrize("name", CASES)
def test_weights_return_bit_by_bit(name: str, tmp_path: Path) -> None:
    reference = theirs(name)
    reference.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs")
    export(held_model("vlm", model.config, model), tmp_path / "ours")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    back, info = type(reference).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    asked, _ = inputs(name, model.config, torch.float32)
    with torch.no_grad():
        answers = [each(**asked).logits for each in (reference, back.eval())]
    assert torch.equal(*answers)


PUBLISHED: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-VL-8B-Instruct
    "qwen3_vl_8b": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096}
        | {"intermediate_size": 12288, "max_position_embeddings": 262144, "num_attention_heads": 32}
        | {"num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5000000}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
        | {"attention_bias": False, "vocab_size": 151936},
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_vl", "deepstack_visual_indexes": [8, 16, 24], "depth": 27}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304}
        | {"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    # Qwen/Qwen3-VL-4B-Instruct
    "qwen3_vl_4b": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560}
        | {"intermediate_size": 9728, "max_position_embeddings": 262144, "num_attention_heads": 32}
        | {"num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5000000}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
        | {"attention_bias": False, "vocab_size": 151936, "tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen3_vl", "deepstack_visual_indexes": [5, 11, 17], "depth": 24}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096}
        | {"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    # OpenGVLab/InternVL3-8B-hf
    "internvl3_8b": {
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_index": 151667,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "text_config": {"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944}
        | {"max_position_embeddings": 32768, "num_attention_heads": 28, "num_hidden_layers": 28}
        | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151674}
        | {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "tie_word_embeddings": False},
        "vision_config": {"model_type": "internvl_vision", "hidden_size": 1024, "image_size": [448, 448]}
        | {"intermediate_size": 4096, "layer_norm_eps": 1e-6, "layer_scale_init_value": 0.1, "norm_type": "layer_norm"}
        | {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": [14, 14], "use_mean_pooling": True}
        | {"attention_bias": True, "use_qk_norm": False},
    },
    # google/gemma-3-27b-it
    "gemma3_27b": {
        "model_type": "gemma3",
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text"}
        | {"num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16}
        | {
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
        | {"model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}
        | {"vision_use_head": False},
    },
    # google/gemma-3-4b-it
    "gemma3_4b": {
        "model_type": "gemma3",
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
        | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
        | {"model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}
        | {"vision_use_head": False},
    },
}
"""Preset -> what its ``config.json`` says."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    config = config_from_transformers(PUBLISHED[name])
    assert config_from_transformers(config_to_transformers(PRESETS[name])) == config
    assert config_from_transformers(config_to_transformers(config)) == config


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("gemma3", "vision_config", {"model_type": "clip_vision_model"}, "towers of gemma3 are 'siglip_vision_model'"),
        ("gemma3", None, {"mm_tokens_per_image": 3}, "mm_tokens_per_image is 3, and an image has 4 x 4 patches"),
        ("internvl", None, {"vision_feature_layer": -2}, "vision_feature_layer is -2; only -1 has a counterpart"),
        ("internvl", None, {"downsample_ratio": 0.4}, "downsample_ratio is 0.4; squares of patches have whole sides"),
        (
            "internvl",
            "vision_config",
            {"image_size": [16, 8]},
            "image_size is [16, 8]; it must be the side of a",
        ),
        (
            "internvl",
            "vision_config",
            {"patch_size": 16},
            "projector.merge is 2, and images of",
        ),
        ("qwen3_vl", "vision_config", {"out_hidden_size": 16}, "out_hidden_size is 16 and the language model has"),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 24}, "num_position_embeddings is 24; it must be"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [3]}, "deepstack is [3]; it must have layers of"),
        ("qwen3_vl", "text_config", {"num_hidden_layers": 1}, "deepstack has 2 layers, and the language model 1"),
        ("gemma3", "text_config", {"sliding_window": 3}, "an image has 4 tokens, and language.attention.window is 2"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(name: str, part: str | None, change: dict[str, Any], message: str) -> None:
    values = theirs(name).config.to_dict()
    (values if part is None else values[part]).update(change)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        config_from_transformers(values)


@pytest.mark.parametrize("key", ["image_token_id", "image_token_index"])
def test_internvl_names_its_image_token_in_two_ways(key: str) -> None:
    values = {k: v for k, v in PUBLISHED["internvl3_8b"].items() if not k.startswith("image_token")}
    assert config_from_transformers({**values, key: 92546}).image_token == 92546


def test_what_gemma3_cannot_say_is_refused() -> None:
    config = PRESETS["gemma3_4b"]
    with pytest.raises(ConfigurationError, match=r"projector\.bias is True here and False"):
        config_to_transformers(replace(config, projector=replace(config.projector, bias=True)))
