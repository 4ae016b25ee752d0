"""Prepared conversations have the ids, pixels, grids and positions that processors of ``transformers`` give them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megalight.data.corpus import Corpus
from megalight.data.multimodal.dataset import ImageDataset, ImagePackOptions, ImageSample
from megalight.data.multimodal.prepare import prepare_multimodal
from megalight.data.multimodal.resolution import form_of
from megalight.data.tokenizer import Tokenizer
from megalight.models.vision.model import normalized
from megalight.models.vlm import VLMConfig
from megalight.models.vlm.presets import PRESETS
from tests.models import test_vlm_families as families
from tests.models import test_vlm_qwen as qwen
from tests.models.test_vlm_processor_files import rows_of

transformers = pytest.importorskip("transformers")
# Their class of InternVL counts tiles by NumPy's function for arrays, of a list of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

# Templates write what the published ones write: of contents that are strings, if they read these, and of parts.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}{{ 'IMAGE' }}"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IMAGES_FIRST = (
    "{% for m in messages %}{{ BEGIN }}{% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "{{ 'IMAGE' }}{% endfor %}{% if m.role != 'assistant' %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ TEXT }}{% endfor %}{% else %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ TEXT }}{% endgeneration %}{% endfor %}{% endif %}{{ 'END' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ANSWER' }}{% endif %}"
)


def images_first(**parts: str) -> str:
    source = IMAGES_FIRST
    for name, text in parts.items():
        source = source.replace(name, text)
    return source


VICUNA = images_first(
    BEGIN="m.role.upper() + ': '", IMAGE="<image>\\n", TEXT="part.text + ' '", END="", ANSWER="ASSISTANT:"
)
ONEVISION = images_first(
    BEGIN="'<|im_start|>' + m.role + ' '",
    IMAGE="<image>",
    TEXT="'\\n' + part.text",
    END="<|im_end|>",
    ANSWER="<|im_start|>assistant\\n",
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part.text | trim }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

NAMES = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
"""Attributes of their tokenizers that their processors read."""
OTHERS = "<image> <|im_start|> <|im_end|> <|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|> <bos> <pad>"
OTHERS += " <image_soft_token> <start_of_turn> <end_of_turn>"


@dataclass(frozen=True)
class Case:
    """A family: a preset, its image token, a template, and what makes their processor with a tokenizer."""

    preset: str
    token: str
    template: str
    processor: Callable[[VLMConfig, Any], Any]
    end: str
    start: str = ""
    axes: Callable[[], Any] | None = None

    @property
    def config(self) -> VLMConfig:
        config = PRESETS[self.preset]
        if (dynamic := config.vision.dynamic) is None:
            return config
        return replace(config, vision=replace(config.vision, dynamic=replace(dynamic, max_pixels=1 << 19)))

    def learned(self, answer: str) -> str:
        """What counts of an answer, as the template writes it."""
        return self.start + (answer.strip() if self.preset.startswith("gemma") else answer) + self.end


def no_videos() -> Any:
    """What their processors want beside a tokenizer; it needs torchvision, and is not called."""
    return object.__new__(transformers.BaseVideoProcessor)


def settings(config: VLMConfig) -> dict[str, Any]:
    return {"image_mean": list(config.vision.mean), "image_std": list(config.vision.std)}


def llava(config: VLMConfig, tokenizer: Any) -> Any:
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, **settings(config)
    )
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def llava_next(config: VLMConfig, tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, **settings(config)
    )
    return transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def onevision(config: VLMConfig, tokenizer: Any) -> Any:
    images = transformers.LlavaOnevisionImageProcessorPil(**settings(config))
    return transformers.LlavaOnevisionProcessor(
        images, tokenizer, no_videos(), num_image_tokens=729, vision_feature_select_strategy="full"
    )


def gemma3(config: VLMConfig, tokenizer: Any) -> Any:
    images = transformers.Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, **settings(config))
    tokenizer.image_token = "<image_soft_token>"
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=256)


def internvl(config: VLMConfig, tokenizer: Any) -> Any:
    images = transformers.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, **settings(config))
    return transformers.InternVLProcessor(images, tokenizer, no_videos(), image_seq_length=256)


def any_size(kind: str) -> Callable[[VLMConfig, Any], Any]:
    def make(config: VLMConfig, tokenizer: Any) -> Any:
        vision, dynamic = config.vision, config.vision.dynamic
        assert dynamic is not None
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size,
            size={"shortest_edge": dynamic.min_pixels, "longest_edge": dynamic.max_pixels},
            **settings(config),
        )
        return getattr(transformers, kind)(images, tokenizer, no_videos())

    return make


FRAMED = "<|vision_start|><|image_pad|><|vision_end|>"
CASES = {
    "llava": Case("llava_1_5_7b", "<image>", VICUNA, llava, " "),
    "llava_next": Case("llava_next_7b", "<image>", VICUNA, llava_next, " "),
    "onevision": Case("llava_onevision_0_5b", "<image>", ONEVISION, onevision, "", start="\n"),
    "gemma3": Case("gemma3_4b", "<image_soft_token>", GEMMA, gemma3, "<end_of_turn>\n"),
    "internvl": Case(
        "internvl3_1b", "<IMG_CONTEXT>", CHATML.replace("IMAGE", "<IMG_CONTEXT>\\n"), internvl, "<|im_end|>\n"
    ),
    "qwen2_5": Case(
        "qwen2_5_vl_3b",
        "<|image_pad|>",
        CHATML.replace("IMAGE", FRAMED),
        any_size("Qwen2_5_VLProcessor"),
        "<|im_end|>\n",
        axes=qwen.theirs,
    ),
    "qwen3": Case(
        "qwen3_vl_2b",
        "<|image_pad|>",
        CHATML.replace("IMAGE", FRAMED),
        any_size("Qwen3VLProcessor"),
        "<|im_end|>\n",
        axes=families.qwen3_vl,
    ),
}


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    random = np.random.default_rng(width * 10007 + height)
    image = Image.fromarray(random.integers(0, 256, (height, width, 4), np.uint8))  # with transparency
    if mode == "RGBA":
        return image
    return image.convert("RGB").quantize(16) if mode == "P" else image.convert("RGB").convert(mode)


PICTURES = {
    "plain": picture(500, 300),
    "square": picture(448, 448),
    "wide": picture(700, 90),
    "tall": picture(41, 620),
    "tiny": picture(5, 4),
    "pixel": picture(1, 1),
    "flat": picture(60, 1),
    "huge": picture(1500, 1300),
    "alpha": picture(120, 200, "RGBA"),
    "gray": picture(300, 120, "L"),
    "gray_alpha": picture(60, 50, "LA"),
    "palette": picture(90, 130, "P"),
    "bits": picture(64, 64, "1"),
    "print": picture(70, 110, "CMYK"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    special = (*NAMES.values(), *OTHERS.split())
    found = Tokenizer.train(["what is this in the picture user model\n\n a red thing USER: \n" * 9], 300, None, special)
    found.save(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<bos>"})
    )
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for name, image in PICTURES.items():
        image.save(folder / (f"{name}.tif" if image.mode == "CMYK" else f"{name}.png"))
    return folder


def path_of(files: Path, name: str) -> str:
    (found,) = files.glob(f"{name}.*")
    return str(found)


def talk(files: Path, *turns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Messages by turns; words in brackets are pictures."""
    messages = []
    for number, turn in enumerate(turns):
        parts: list[dict[str, Any]] = []
        for each in turn:
            is_text = each not in PICTURES
            parts.append({"type": "text", "text": each} if is_text else {"type": "image", "path": path_of(files, each)})
        messages.append({"role": "assistant" if number % 2 else "user", "content": parts})
    return messages


def read(case: Case, tokenizer: Path, folder: Path, rows: list[Any]) -> list[ImageSample]:
    """Rows of the data set, one for each conversation, without the padding."""
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "template.jinja").write_text(case.template)
    report = prepare_multimodal(
        [str(folder / "rows.json")],
        folder / "out",
        tokenizer=tokenizer,
        image_token=case.token,
        chat_template=folder / "template.jinja",
        workers=1,
        progress=False,
    )
    corpus = Corpus.open(str(report.prefix))
    token = Tokenizer.load(tokenizer).vocabulary[case.token]
    found = []
    for number in range(len(corpus.data)):
        options = ImagePackOptions(
            sequence_length=60000, too_long="raise", packing=False, form=form_of(case.config), image_token=token
        )
        found.append(ImageDataset(corpus, range(number, number + 1), options)[0])
    return found


def ids_of(sample: ImageSample) -> list[int]:
    assert sample.document_lengths is not None
    length = sample.document_lengths[0]
    return [*sample.tokens[:length].tolist(), int(sample.labels[length - 1])]


def asked(case: Case, tokenizer: Path, messages: list[Any], **options: Any) -> Any:
    names = transformers.AutoTokenizer.from_pretrained(tokenizer)
    for name, token in NAMES.items():
        setattr(names, name, token)
        setattr(names, f"{name}_id", names.convert_tokens_to_ids(token))
    processor = case.processor(case.config, names)
    return processor.apply_chat_template(
        messages, chat_template=case.template, tokenize=True, return_dict=True, return_tensors="pt", **options
    )


def check_pixels(case: Case, sample: ImageSample, expected: Any) -> None:
    """Rows of patches, image by image, and their grids."""
    vision = case.config.vision
    ours = [normalized(torch.from_numpy(cut.pixels), vision) for cut in sample.cuts]
    if vision.dynamic is not None:
        grids = [[1, *(side * case.config.projector.merge for side in cut.grid)] for cut in sample.cuts]
        assert expected["image_grid_thw"].tolist() == grids
        theirs = expected["pixel_values"].float().split([len(each) for each in ours])
        for cut, own, each in zip(sample.cuts, ours, theirs, strict=True):
            pixels = each.view(len(own), 3, 2, -1)
            wanted = pixels[:, :, 0].flatten(1)
            # Rows of ours are in the order of windows.
            squares = torch.from_numpy(np.argsort(cut.source))
            merge = case.config.projector.merge**2
            order = squares.repeat_interleave(merge) * merge + torch.arange(merge).repeat(len(squares))
            assert (own - wanted[order]).abs().max() < 1e-5
        return
    every = expected["pixel_values"].float()
    tiles = every.flatten(0, -4)
    if every.ndim == 5:  # filled up to the largest number of tiles
        tiles = torch.cat([own[: cut.tiles] for own, cut in zip(every, sample.cuts, strict=True)])
    wanted = rows_of(tiles, case.config)
    own = torch.cat(ours).view(len(wanted), -1, ours[0].shape[1])[:, -wanted.shape[1] :]
    assert (own - wanted).abs().max() < 1e-5


FEW = ("plain", "wide", "tiny", "palette")
TALKS: dict[str, list[tuple[str, ...]]] = {
    **{name: [(name, "what is this?"), ("a red thing",)] for name in PICTURES},
    "several": [("plain", "tall", "what is in these?"), ("a thing",), ("and this? ", "alpha", " now"), ("red",)],
    "last": [("what is this", "tiny"), ("a red thing",)],
    "texts": [
        ("what is ", "gray", " this\n", "\nin the picture "),
        ("a red thing",),
    ],
    "none": [("what is this?",), ("a red thing",)],
}


@pytest.mark.parametrize("most", ["few", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "internvl")) for name in CASES]
)
def test_conversations_are_those_of_their_processor(
    name: str, most: str, tokenizer: Path, files: Path, tmp_path: Path
) -> None:
    """Token by token, pixel by pixel, in positions and in the mask of what the assistant wrote."""
    case = CASES[name]
    chosen = [key for key in TALKS if most == "all" or key not in PICTURES or key in FEW]
    rows = [talk(files, *TALKS[key]) for key in chosen]
    samples = read(case, tokenizer, tmp_path, [{"messages": each} for each in rows])
    for key, messages, sample in zip(chosen, rows, samples, strict=True):
        expected = asked(case, tokenizer, messages)
        ids = expected["input_ids"]
        assert ids_of(sample) == ids[0].tolist(), key
        assert len(sample.cuts) == sum(part["type"] == "image" for each in messages for part in each["content"])
        if sample.cuts:
            check_pixels(case, sample, expected)
        if case.axes is not None:
            model, kinds = case.axes().model, expected["mm_token_type_ids"]
            positions, _ = model.get_rope_index(ids, kinds, expected.get("image_grid_thw"))
            assert sample.axis_positions is not None
            length = ids.shape[1] - 1
            assert (sample.axis_positions[:, :length] == positions[:, 0, :length].numpy()).all(), key
        answers = [each for each in messages if each["role"] == "assistant"]
        counted = Tokenizer.load(tokenizer).decode(sample.labels[sample.loss_mask > 0].tolist())
        wanted = "".join(case.learned(*(part["text"] for part in each["content"])) for each in answers)
        # A token may begin with the space before an answer.
        assert counted.strip() == wanted.strip(), key


def test_the_mask_is_that_of_their_tokenizer(tokenizer: Path, files: Path, tmp_path: Path) -> None:
    """Without the images, for which their own is shifted: it counts characters of the text before these are put in."""
    messages = talk(files, *TALKS["several"])
    for name in ("llava", "onevision"):
        case = CASES[name]
        (tmp_path / name).mkdir()
        (sample,) = read(case, tokenizer, tmp_path / name, [{"messages": messages}])
        theirs = transformers.AutoTokenizer.from_pretrained(tokenizer).apply_chat_template(
            messages, chat_template=case.template, return_dict=True, return_assistant_tokens_mask=True
        )
        token = Tokenizer.load(tokenizer).vocabulary[case.token]
        wanted = [
            mask for each, mask in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if each != token
        ]
        assert sample.loss_mask[sample.labels != token][: len(wanted) - 1].tolist() == wanted[1:]


@pytest.mark.parametrize("name", ["llava", "onevision", "gemma3", "internvl", "qwen2_5"])
def test_places_in_strings_are_as_parts(name: str, tokenizer: Path, files: Path, tmp_path: Path) -> None:
    """LLaVA's rows have ``<image>`` in strings, which some templates write as they are, and others not at all."""
    case = CASES[name]
    said = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a red thing"}]
    row = {"conversations": said, "image": path_of(files, "tiny")}
    (sample,) = read(case, tokenizer, tmp_path, [row])
    text = "what is this?"
    if "is string" in case.template and name != "internvl":  # whose parts have the line break of the row
        text = "\n" + text
    if name == "gemma3":  # whose template trims a text behind an image, but no line break inside of a string
        expected = ids_of(sample)
        decoded = Tokenizer.load(tokenizer).decode(expected)
        assert "user\n\n\n<start_of_image>" in decoded
        assert "<end_of_image>\n\n\nwhat is this?<end_of_turn>" in decoded
        return
    messages = talk(files, ("tiny", text), ("a red thing",))
    assert ids_of(sample) == asked(case, tokenizer, messages)["input_ids"][0].tolist()
