"""Folders that we write serve ``transformers`` alone: its Auto classes prepare, read and answer as we do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megalight.cli.main import main
from megalight.models.hugging_face.export import export
from megalight.models.stored import open_model
from tests.inference.test_images_transformers import FAMILIES, saved
from tests.models.test_vlm_processors import PICTURES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

WITH_VIDEOS = ("onevision", "internvl", "qwen2_5", "qwen3")
"""Families whose processors have one for videos, which is torchvision's work."""


def why_not() -> str:
    """Why torchvision cannot be imported: it is missing, or was built for another torch than this one."""
    try:
        import torchvision  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except Exception as error:  # its operators raise any kind
        return f"torchvision cannot be imported: {error}"
    return ""


def exported(name: str, folder: Path) -> Path:
    """A folder that we wrote, with files of our own that say how images are prepared."""
    saved(name, folder / "began")
    (folder / "began" / "preprocessor_config.json").unlink()
    model = open_model(folder / "began")
    vision = model.config.vision
    if vision.dynamic is not None:
        vision = replace(vision, dynamic=replace(vision.dynamic, min_pixels=256, max_pixels=1600))
    export(replace(model, config=replace(model.config, vision=vision)), folder / "out")
    return folder / "out"


def asked(processor: Any, images: list[Any]) -> Any:
    parts = [{"type": "image", "image": each} for each in images]
    return processor.apply_chat_template(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this?"}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in ("llava_next", "gemma3"))) for name in FAMILIES]
)
def test_the_same_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Their package hides both where there is no torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import AutoProcessor

    reason = why_not()
    if reason and name in WITH_VIDEOS:
        pytest.skip(reason)
    folder = exported(name, tmp_path)
    processor = AutoProcessor.from_pretrained(folder, **({"backend": "pil"} if reason else {}))
    fast = processor.image_processor
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    answers = []
    for number, raw_images in enumerate((["tall"], ["alpha"], ["plain", "palette"])):
        files = []
        for each in raw_images:
            files.append(tmp_path / f"{number}{each}.png")
            small = PICTURES[each].convert("RGB")
            small.thumbnail((60, 60))
            small.save(files[-1])
        words = [word for file in files for word in ("--image", str(file))]
        capsys.readouterr()
        assert main(["generate", str(folder), *words, "--chat", "-p", "what is this?", "-n", "12", "-t", "0"]) == 0
        found = capsys.readouterr().out
        values = asked(processor, [Image.open(file) for file in files])
        with torch.no_grad():
            ids = model.generate(**values, max_new_tokens=12, do_sample=False)
        expected = processor.tokenizer.decode(ids[0, values["input_ids"].shape[1] :], skip_special_tokens=True)
        assert found == f"{expected}\n", raw_images
        answers.append(expected)
        if not reason:  # Auto classes take its filters by default, which round otherwise than Pillow's
            slow, processor.image_processor = processor.image_processor, fast
            other = asked(processor, [Image.open(file) for file in files])
            processor.image_processor = slow
            assert torch.equal(other["input_ids"], values["input_ids"])
            away = (other["pixel_values"] - values["pixel_values"]).abs()
            assert away.max() < 1.01 / 255 / min(processor.image_processor.image_std), "more than one of 256 levels"
    assert len(set(answers)) > 1, "the images do not matter"
