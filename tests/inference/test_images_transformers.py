"""``megalight generate --image`` writes what ``transformers`` writes, from folders that it saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.cli.main import main
from megalight.data.tokenizer import Tokenizer
from tests.models import test_vlm_processors as processors
from tests.models.test_vlm_processors import NAMES, OTHERS, PICTURES, no_videos

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

SPECIAL = (*NAMES.values(), *OTHERS.split())
VOCABULARY = 300
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.4,
}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3}
TOWER |= {"patch_size": 4, "initializer_range": 0.4}
GRIDS = [[16, 32], [32, 16], [32, 32], [48, 16]]


@dataclass(frozen=True)
class Small:
    """A small model of a family, and its image processor."""

    case: str
    config: Callable[[dict[str, int]], Any]
    images: Callable[[], Any]
    processor: Callable[[Any, Any], Any]


def clip(**options: Any) -> Any:
    return transformers.CLIPVisionConfig(**TOWER, image_size=16, projection_dim=16, initializer_factor=5.0, **options)


def siglip() -> Any:
    return transformers.SiglipVisionConfig(**TOWER, image_size=16, vision_use_head=False)


def squares(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(**options)


def qwen2_5(ids: dict[str, int]) -> Any:
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    sizes = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 3, "patch_size": 4}
    sizes |= {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32, "initializer_range": 0.4}
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rotation},
        vision_config=sizes,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def qwen3(ids: dict[str, int]) -> Any:
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    sizes = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
    sizes |= {"out_hidden_size": 32, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 8, "rope_parameters": rotation},
        vision_config=sizes | {"initializer_range": 0.4},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def any_size(name: str) -> Small:
    kind = {"qwen2_5": "Qwen2_5_VLProcessor", "qwen3": "Qwen3VLProcessor"}[name]
    size = {"shortest_edge": 256, "longest_edge": 1600}
    return Small(
        name,
        {"qwen2_5": qwen2_5, "qwen3": qwen3}[name],
        squares("Qwen2VLImageProcessorPil", patch_size=4, merge_size=2, size=size, **(GRAY if name == "qwen3" else {})),
        lambda images, tokenizer: getattr(transformers, kind)(images, tokenizer, no_videos()),
    )


def gemma3(images: Any, tokenizer: Any) -> Any:
    tokenizer.image_token = "<image_soft_token>"
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)


ENDS = {"llava": [], "llava_next": [], "gemma3": ["<end_of_turn>"]}
"""What ends an answer by the template, besides the end of a document."""
SHORT = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
SQUARE = {"height": 16, "width": 16}
GRAY = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
FAMILIES = {
    "llava": Small(
        "llava",
        lambda ids: transformers.LlavaConfig(
            vision_config=clip(), text_config=transformers.LlamaConfig(**TEXT), image_token_index=ids["<image>"]
        ),
        squares("CLIPImageProcessorPil", **SHORT),
        lambda images, tokenizer: transformers.LlavaProcessor(images, tokenizer, **LLAVA),
    ),
    "llava_next": Small(
        "llava_next",
        lambda ids: transformers.LlavaNextConfig(
            vision_config=clip(),
            text_config=transformers.LlamaConfig(**TEXT),
            image_token_index=ids["<image>"],
            image_grid_pinpoints=GRIDS,
        ),
        squares("LlavaNextImageProcessorPil", image_grid_pinpoints=GRIDS, **SHORT),
        lambda images, tokenizer: transformers.LlavaNextProcessor(images, tokenizer, **LLAVA),
    ),
    "onevision": Small(
        "onevision",
        lambda ids: transformers.LlavaOnevisionConfig(
            vision_config=siglip(),
            text_config=transformers.Qwen2Config(**TEXT),
            image_token_index=ids["<image>"],
            video_token_index=ids["<video>"],
            image_grid_pinpoints=GRIDS,
        ),
        squares("LlavaOnevisionImageProcessorPil", image_grid_pinpoints=GRIDS, size=SQUARE, **GRAY),
        lambda images, tokenizer: transformers.LlavaOnevisionProcessor(
            images, tokenizer, no_videos(), num_image_tokens=16, vision_feature_select_strategy="full"
        ),
    ),
    "gemma3": Small(
        "gemma3",
        lambda ids: transformers.Gemma3Config(
            text_config=TEXT
            | {"head_dim": 8, "sliding_window": 12, "num_hidden_layers": 2, "query_pre_attn_scalar": 20}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            vision_config=TOWER | {"image_size": 16, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_index=ids["<image_soft_token>"],
            boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
        ),
        squares("Gemma3ImageProcessorPil", size=SQUARE, **GRAY),
        gemma3,
    ),
    "internvl": Small(
        "internvl",
        lambda ids: transformers.InternVLConfig(
            text_config=transformers.Qwen2Config(**TEXT),
            vision_config=TOWER | {"image_size": 16, "num_attention_heads": 4, "layer_scale_init_value": 0.5},
            image_token_id=ids["<IMG_CONTEXT>"],
            image_seq_length=4,
        ),
        squares(
            "GotOcr2ImageProcessorPil", size=SQUARE, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
        ),
        lambda images, tokenizer: transformers.InternVLProcessor(images, tokenizer, no_videos(), image_seq_length=4),
    ),
    "qwen2_5": any_size("qwen2_5"),
    "qwen3": any_size("qwen3"),
}


def saved(name: str, folder: Path) -> tuple[Any, Any]:
    """Save a model with random weights, its tokenizer and its image processor; return the model and the processor."""
    small = FAMILIES[name]
    tokenizer = Tokenizer.train(
        ["what is this in the picture user model\n\n a red thing USER: \n" * 9], 300, None, SPECIAL
    )
    tokenizer.chat_template = processors.CASES[small.case].template
    tokenizer.save(folder)
    settings = folder / "tokenizer_config.json"
    named = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "bos_token": "<bos>"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    torch.manual_seed(5)
    kind = transformers.AutoModelForImageTextToText
    config = small.config(tokenizer.vocabulary)
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            if name == "gemma3" and "embed_tokens" in key:
                # Its head is its embedding, which says the last token again if layers add little to it.
                parameter.mul_(0.05)
    model.generation_config.eos_token_id = [
        tokenizer.eod_id,
        *(tokenizer.vocabulary[each] for each in ENDS.get(name, ["<|im_end|>"])),
    ]
    model.generation_config.pad_token_id = tokenizer.pad_id
    model.save_pretrained(folder)
    images = small.images()
    images.save_pretrained(folder)
    names = transformers.AutoTokenizer.from_pretrained(folder)
    for key, token in NAMES.items():
        setattr(names, key, token)
        setattr(names, f"{key}_id", names.convert_tokens_to_ids(token))
    return model, small.processor(images, names)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("llava", "qwen3"))) for name in FAMILIES]
)
def test_the_same_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, processor = saved(name, tmp_path / "model")
    template = processors.CASES[name].template
    answers = []
    for number, packed_images in enumerate((["tall"], ["alpha"], ["plain", "palette"])):
        files = []
        for each in packed_images:
            files.append(tmp_path / f"{number}{each}.png")
            small = PICTURES[each].copy()
            small.thumbnail((60, 60))
            small.save(files[-1])
        words = [word for file in files for word in ("--image", str(file))]
        assert (
            main(["generate", str(tmp_path / "model"), *words, "--chat", "-p", "what is this?", "-n", "12", "-t", "0"])
            == 0
        )
        found = capsys.readouterr().out
        parts = [{"type": "image", "path": str(file)} for file in files]
        asked = processor.apply_chat_template(
            [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this?"}]}],
            chat_template=template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            ids = model.generate(**asked, max_new_tokens=12, do_sample=False)
        expected = processor.tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        assert found == f"{expected}\n", packed_images
        answers.append(expected)
    assert len(set(answers)) > 1, "the images do not matter"
