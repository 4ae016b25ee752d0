"""LLaVA against ``transformers``, from a folder that it saved: logits, losses and gradients, and back."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load, load_file

from megalight import checkpoint
from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.data.multimodal.batch import with_images
from megalight.data.multimodal.images import Images
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import UNREAD, Folder
from megalight.models.stored import held_model, open_model, save_model
from megalight.models.transforms.peft import import_adapter
from megalight.models.transforms.saved import merge_checkpoint
from megalight.models.vlm import VLM, VLMConfig, VLMModule
from megalight.models.vlm.hugging_face import config_from_transformers, config_to_transformers, weight_map
from megalight.models.vlm.presets import PRESETS
from megalight.parallel.source import model_targets
from megalight.types import TokenBatch
from tests.models.vlm_referee import check_outputs_and_gradients
from tests.models.vlm_samples import CONFIG
from tests.support.reference_gpt import canonical_gradients

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IMAGE, PATCH, SIDE = 52, 4, 12
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": 16,
    "initializer_factor": 5.0,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


QWEN = {**TEXT, "num_key_value_heads": 4, "hidden_size": 24, "intermediate_size": 40}
"""With another width, so that nothing fits by chance."""


def theirs(kind: str = "llava", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A LLaVA with random weights, also of norms and biases: LLaVA-1.5, one with SigLIP, or LLaVA-OneVision."""
    torch.manual_seed(1)
    if kind == "llava":
        vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**TEXT)
    else:
        # Two pixels of each side are in no patch, as 384 does not divide by 14.
        sizes = {key: value for key, value in VISION.items() if key not in ("projection_dim", "initializer_factor")}
        vision = transformers.SiglipVisionConfig(**sizes | {"image_size": SIDE + 2, "vision_use_head": False})
        text = transformers.Qwen2Config(**QWEN)
        options = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, **options}
    shared = {"vision_config": vision, "text_config": text, "image_token_index": IMAGE, **options}
    if kind == "onevision":
        grids = [[SIDE + 2, SIDE + 2]]
        config = transformers.LlavaOnevisionConfig(video_token_index=IMAGE - 1, image_grid_pinpoints=grids, **shared)
        model = transformers.LlavaOnevisionForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        config = transformers.LlavaConfig(**shared)
        model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def read(folder: Path, config: VLMConfig | None = None, dtype: torch.dtype = torch.float32) -> VLM:
    config = config or config_from_transformers(read_config(folder))
    model = VLM(config).to(dtype)
    Folder(folder, weight_map(config), "").fill(model_targets(model))
    return model


def patches(pixels: torch.Tensor, class_token: bool) -> torch.Tensor:
    """``[n, 3, side, side]`` to ``[n * rows, values]``; a class token gets a row of zeros before its image."""
    cut = torch.nn.functional.unfold(pixels, PATCH, stride=PATCH).mT
    return (torch.cat([torch.zeros_like(cut[:, :1]), cut], 1) if class_token else cut).flatten(0, 1)


def inputs(dtype: torch.dtype, config: VLMConfig) -> tuple[dict[str, Any], Any]:
    """Two rows with two images and one, as theirs and as a batch of ours."""
    generator = torch.Generator().manual_seed(2)
    vision, count = config.vision, config.image_tokens
    tokens = torch.randint(0, IMAGE - 1, (2, 30), generator=generator)
    for row, start in ((0, 2), (0, 15), (1, 7)):
        tokens[row, start : start + count] = IMAGE
    side = vision.image_size
    pixels = torch.randn(3, 3, side, side, generator=generator).to(dtype)
    rows = vision.num_rows
    found = patches(pixels, vision.class_token)
    images = Images(found, torch.arange(rows).repeat(3), (rows,) * 3, (2, 1))
    labels = tokens.roll(-1, 1)
    mask = (labels != IMAGE).float()
    mask[:, -1] = 0
    asked = {"input_ids": tokens, "pixel_values": pixels}
    if config.newline:
        # Each image is one tile, as in conversations with several.
        asked |= {"image_sizes": torch.tensor([[side, side]] * 3), "batch_num_images": torch.tensor([3])}
        asked["pixel_values"] = pixels[:, None]
    text = TokenBatch(tokens, labels, mask)
    return asked, with_images(text, images, IMAGE, class_token=vision.class_token, newline=config.newline)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llava", {}),
        ("llava", {"vision_feature_layer": -1}),
        ("llava", {"multimodal_projector_bias": False}),
        ("siglip", {}),
        ("siglip", {"vision_feature_layer": -2}),
        ("onevision", {}),
        ("onevision", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.float64], ids=str)
def test_equal_outputs_and_gradients(dtype: torch.dtype, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = theirs(kind, dtype, **options)
    reference.save_pretrained(tmp_path)
    model = read(tmp_path, dtype=dtype)
    asked, batch = inputs(dtype, model.config)
    check_outputs_and_gradients(reference, model, asked, batch, IMAGE)
    assert ("embed.newline.weight" in canonical_gradients(model)) == (kind == "onevision")


@pytest.mark.parametrize("kind", ["llava", "siglip", "onevision"])
def test_weights_return_bit_by_bit(kind: str, tmp_path: Path) -> None:
    reference = theirs(kind, vision_feature_layer=-1)
    reference.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs")
    export(held_model("vlm", model.config, model), tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if "post_layernorm" not in name:  # which nobody reads
            assert torch.equal(tensor, after[name]), name
    asked, _ = inputs(torch.float32, model.config)
    back, info = type(reference).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        answers = [each(**asked).logits for each in (reference, back.eval())]
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llava", {}), ("siglip", {"vision_feature_layer": -3}), ("siglip_head", {}), ("onevision", {})],
    ids=str,
)
def test_a_folder_keeps_what_no_run_reads(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Layers behind the features, the last norm and the head of a tower go through checkpoints, also of adapters."""
    reference = theirs(kind.removesuffix("_head"), **options)
    if kind == "siglip_head":
        config = copy.deepcopy(reference.config)
        config.vision_config.vision_use_head = True
        reference = type(reference)._from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path / "theirs")
    save_model(open_model(tmp_path / "theirs"), tmp_path / "ours.ckpt")
    export(open_model(tmp_path / "ours.ckpt"), tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    back, info = type(reference).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    asked, _ = inputs(torch.float32, open_model(tmp_path / "ours").config)
    with torch.no_grad():
        answers = [each(**asked).logits for each in (reference, back.eval())]
    assert torch.equal(*answers)

    # Adapters of the language model alone, whose names end like those of the tower.
    options = {"r": 2, "target_modules": r"model\.language_model\..*\.q_proj"}
    adapted = peft.get_peft_model(copy.deepcopy(reference), peft.LoraConfig(**options))
    adapted.save_pretrained(tmp_path / "peft")
    import_adapter(tmp_path / "peft", tmp_path / "theirs", tmp_path / "adapter.ckpt")
    assert {name.split(".")[1] for name in checkpoint.open(tmp_path / "adapter.ckpt").tensors} == {"layers"}
    merge_checkpoint(tmp_path / "adapter.ckpt", tmp_path / "merged.ckpt", tmp_path / "theirs")
    export(open_model(tmp_path / "merged.ckpt"), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in before.items())


def test_a_module_saves_what_no_run_reads(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    module = VLMModule(weights=tmp_path)
    module.trainer = Trainer(accelerator="cpu", logger=False)
    kept = load(module.checkpoint_files()[UNREAD])
    assert {name.rpartition("layers.2.")[0] or name for name in kept} == {
        "vision_tower.encoder.",
        "vision_tower.post_layernorm.weight",
        "vision_tower.post_layernorm.bias",
    }


def test_layers_behind_the_features_are_left_out(tmp_path: Path) -> None:
    """The exported model has one layer less, and computes the same, if the folder is not known."""
    reference = theirs()
    reference.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs")
    assert model.config.vision.num_layers == 2
    export(held_model("vlm", model.config, model), tmp_path / "ours")
    back = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert back.config.vision_config.num_hidden_layers == 2
    asked, _ = inputs(torch.float32, model.config)
    with torch.no_grad():
        answers = [each(**asked).logits for each in (reference, back.eval())]
    assert torch.equal(*answers)


def test_names_of_other_releases() -> None:
    names = {
        "model.vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight": "embed.tower.layers.1.mlp.up.weight",
        "vision_tower.vision_model.embeddings.class_embedding": "embed.tower.class_token.weight",
        "model.multi_modal_projector.linear_2.bias": "embed.projector.down.bias",
        "model.language_model.layers.0.mlp.up_proj.weight": "layers.0.mlp.up.weight",
        "language_model.model.norm.weight": "head.norm.weight",
        "lm_head.weight": "head.output_layer.weight",
        "vision_tower.vision_model.embeddings.position_ids": None,
        "vision_tower.vision_model.encoder.layers.10.mlp.fc1.weight": None,
        "model.vision_tower.vision_model.head.probe": None,
    }
    found = weight_map(CONFIG).ours(names)
    assert {place.name: ours for ours, place in found.items()} == {n: ours for n, ours in names.items() if ours}
    with pytest.raises(CheckpointError, match=r"vision_tower\.unknown has no counterpart"):
        weight_map(CONFIG).ours(["vision_tower.unknown"])


def test_a_projector_of_another_tower_is_refused(tmp_path: Path) -> None:
    model = theirs()
    model.model.multi_modal_projector.linear_1 = torch.nn.Linear(VISION["hidden_size"] - 4, TEXT["hidden_size"])
    model.save_pretrained(tmp_path)
    shapes = r"'embed\.projector\.up\.weight' \(multi_modal_projector\.linear_1\.weight\): \[32, 20\] and \[32, 24\]"
    with pytest.raises(CheckpointError, match=shapes):
        read(tmp_path)


def test_the_published_configuration() -> None:
    """What ``llava-hf/llava-1.5-7b-hf`` says: most sizes are the defaults of its parts."""
    published = {
        "model_type": "llava",
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05}
        | {"vocab_size": 32064},
        "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "patch_size": 14}
        | {"num_attention_heads": 16, "num_hidden_layers": 24, "model_type": "clip_vision_model"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    config = config_from_transformers(published)
    assert config == PRESETS["llava_1_5_7b"]
    assert config.vision.num_patches == 576
    assert config_from_transformers(config_to_transformers(config)) == config


def test_the_published_configuration_of_onevision() -> None:
    """What ``llava-hf/llava-onevision-qwen2-7b-ov-hf`` says of its parts."""
    published = {
        "model_type": "llava_onevision",
        "image_token_index": 151646,
        "projector_hidden_act": "gelu",
        "text_config": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944}
        | {"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4}
        | {"rope_theta": 1000000.0, "vocab_size": 152128},
        "vision_config": {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "patch_size": 14}
        | {"num_attention_heads": 16, "num_hidden_layers": 26, "model_type": "siglip_vision_model"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    config = config_from_transformers(published)
    assert config == PRESETS["llava_onevision_7b"]
    assert (config.vision.num_patches, config.vision.margin, config.image_tokens) == (729, 6, 730)
    assert config_from_transformers(config_to_transformers(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "blip"}, "model_type is 'blip'; weights of gemma3, internvl"),
        ({"vision_feature_layer": [-2, -1]}, "features of a single layer are read"),
        ({"vision_feature_layer": 9}, "vision_feature_layer is 9; the tower has 3 layers"),
        ({"vision_feature_select_strategy": "full"}, "'full'; from clip_vision_model only 'default' is read"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "from siglip_vision_model only 'full' is read"),
        (
            {"vision_config": {"model_type": "pixtral"}},
            "'pixtral'; towers of clip_vision_model, siglip",
        ),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'; it has no counterpart"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    values = theirs().config.to_dict() | change
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        config_from_transformers(values)


def test_what_transformers_cannot_say_is_refused() -> None:
    wide = replace(CONFIG, projector=replace(CONFIG.projector, hidden_size=8))
    with pytest.raises(ConfigurationError, match=r"projector\.hidden_size is 8 here and 0"):
        config_to_transformers(wide)
    with pytest.raises(ConfigurationError, match=r"vision\.output_norm is True here and False"):
        config_to_transformers(replace(CONFIG, vision=replace(CONFIG.vision, output_norm=True)))
