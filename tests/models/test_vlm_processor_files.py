"""Exported folders say how images are prepared: ``transformers`` makes the pixels of them that we do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megalight.data.multimodal.resolution import form_of
from megalight.data.multimodal.template import FRAMES, ImageText
from megalight.data.tokenizer import Tokenizer
from megalight.models.family import family
from megalight.models.hugging_face.export import SPECIAL, export, files_beside
from megalight.models.stored import held_model
from megalight.models.vision.model import normalized
from megalight.models.vlm import VLM, VLMConfig
from megalight.models.vlm.hugging_face import config_to_transformers
from megalight.models.vlm.hugging_face.image_processor import TOKENS, processor_files
from megalight.models.vlm.presets import PRESETS
from tests.models.vlm_samples import CONFIG, small

pytest.importorskip("transformers")

LLAVA = PRESETS["llava_1_5_7b"]


def way(resize: Any, resample: Any = "bicubic") -> VLMConfig:
    return replace(LLAVA, vision=replace(LLAVA.vision, resize=resize, resample=resample))


CASES = {
    "llava": LLAVA,
    "llava_stretched": way("stretch", "bilinear"),
    "llava_padded": way("pad"),
    "llava_next": PRESETS["llava_next_7b"],
    "onevision": PRESETS["llava_onevision_0_5b"],
    "gemma3": PRESETS["gemma3_4b"],
    "internvl": PRESETS["internvl3_1b"],
    "qwen2_5": PRESETS["qwen2_5_vl_3b"],
    "qwen3": PRESETS["qwen3_vl_2b"],
}


def written(config: VLMConfig, folder: Path) -> dict[str, Any]:
    values = config_to_transformers(config)
    (folder / "config.json").write_text(json.dumps(values))
    for name, content in processor_files(config, values, ()).items():
        (folder / name).write_text(json.dumps(content))
    return values


def rows_of(pixels: torch.Tensor, config: VLMConfig) -> torch.Tensor:
    """``[tiles, rows, values]`` of theirs ``[tiles, 3, size, size]``."""
    covered, patch = config.vision.image_size - config.vision.margin, config.vision.patch_size
    rows = torch.nn.functional.unfold(pixels[..., :covered, :covered], patch, stride=patch).mT
    merge, side = config.projector.merge, covered // patch
    if merge == 1:
        return rows
    squares = rows.view(len(rows), side // merge, merge, side // merge, merge, -1).transpose(2, 3)
    return squares.reshape(rows.shape)


@pytest.mark.parametrize("name", CASES)
def test_their_processor_gives_our_pixels(name: str, tmp_path: Path) -> None:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    config = CASES[name]
    written(config, tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    random, form, vision = np.random.default_rng(0), form_of(config), config.vision
    # InternVL's is told to make tiles by the class that joins images and text.
    options = {"crop_to_patches": True} if name == "internvl" else {}
    for size in ((300, 500), (448, 448), (900, 333)):
        image = Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8))
        cut = form.cut(image)
        ours = normalized(torch.from_numpy(cut.pixels), vision)
        expected = theirs(image, return_tensors="pt", **options)["pixel_values"].float()
        if vision.dynamic is not None:
            pixels = expected.view(len(ours), 3, 2, -1)
            assert torch.equal(pixels[:, :, 0], pixels[:, :, 1])
            wanted = pixels[:, :, 0].flatten(1)
            if vision.dynamic.window:  # whose rows are in the order of windows
                order = torch.from_numpy(np.argsort(cut.source)).repeat_interleave(4) * 4 + torch.arange(4).repeat(
                    len(cut.source)
                )
                wanted = wanted[order]
        else:
            found = expected.flatten(0, -4)
            wanted = rows_of(found, config)
            ours = ours.view(len(wanted), -1, ours.shape[1])[:, -wanted.shape[1] :]
        assert (ours - wanted).abs().max() < (0.02 if name == "llava_padded" else 1e-5), size


@pytest.mark.parametrize("name", CASES)
def test_written_settings_are_read_again(name: str, tmp_path: Path) -> None:
    weights = family("vlm").weights
    assert weights is not None
    written(CASES[name], tmp_path)
    assert weights.config_of(tmp_path).vision == CASES[name].vision


def test_an_exported_model_has_a_processor(tmp_path: Path) -> None:
    """Without a folder that training began with: images and text become tokens and pixels in one call."""
    from transformers.models.auto.processing_auto import AutoProcessor

    config = replace(CONFIG, vision=small(image_size=12).vision)
    tokenizer = Tokenizer.train(["what is this in the picture"], 270, special_tokens=["<image>"])
    tokenizer.save(tmp_path / "tokenizer")
    files = {each.name: each.read_bytes() for each in (tmp_path / "tokenizer").iterdir()}
    model = VLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    export(replace(held_model("vlm", model.config, model), files=files), tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out", backend="pil")
    assert type(processor).__name__ == "LlavaProcessor"
    image = Image.new("RGB", (30, 12), (200, 30, 30))
    found = processor(images=image, text="<image> what", return_tensors="pt")
    assert found["pixel_values"].shape == (1, 3, 12, 12)
    (image_id,) = {tokenizer.encode("<image>")[0]}
    assert (found["input_ids"] == image_id).sum() == config.vision.num_patches


@pytest.mark.parametrize(("preset", "frame"), [("gemma3_4b", FRAMES[1]), ("internvl3_1b", FRAMES[2])], ids=str)
def test_the_tokenizer_names_what_their_class_asks_for(preset: str, frame: ImageText, tmp_path: Path) -> None:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    config = PRESETS[preset]
    values = config_to_transformers(config)
    tokens = TOKENS[values["model_type"]]
    for special in (list(tokens.values()), [frame.mark]):
        tokenizer = Tokenizer.train(["what is this in the picture"], 275, special_tokens=special)
        files = {each.name: each.read_bytes() for each in tokenizer.save(tmp_path / "tokenizer").iterdir()}
        model = SimpleNamespace(config=config, family=family("vlm"), files=files)
        for name, content in files_beside(model, {**values, **dict.fromkeys(SPECIAL)}).items():  # type: ignore[arg-type]
            (tmp_path / name).write_bytes(content)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert (theirs.eos_token, len(theirs)) == (tokenizer.eod_token, 275)
        named = {name: getattr(theirs, f"{name}_id", None) for name in tokens}
        whole = special == list(tokens.values())
        assert named == {name: tokenizer.vocabulary[token] if whole else None for name, token in tokens.items()}
        if whole and preset == "gemma3_4b":  # that of InternVL needs torchvision for its videos
            from transformers.models.auto.processing_auto import AutoProcessor

            processor = AutoProcessor.from_pretrained(tmp_path, backend="pil")
            image = Image.new("RGB", (30, 12), (200, 30, 30))
            found = processor(images=image, text="<start_of_image> what", return_tensors="pt")
            assert (found["input_ids"] == tokenizer.vocabulary["<image_soft_token>"]).sum() == config.image_tokens


def test_settings_of_a_folder_stay(tmp_path: Path) -> None:
    model = VLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    own = {"preprocessor_config.json": b'{"size": 8}'}
    export(replace(held_model("vlm", CONFIG, model), files=own), tmp_path / "out")
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == own["preprocessor_config.json"]
    assert not (tmp_path / "out" / "processor_config.json").exists()
