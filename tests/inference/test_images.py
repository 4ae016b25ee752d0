"""Generation with images: on one device as if all tokens were computed again, and the same in every layout."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.cli.main import main
from megalight.data.multimodal.template import NEWLINE
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.inference import ParallelGPT, TextGenerator, generate
from megalight.inference.images import prepare_images
from megalight.models.gpt import GPT, InitConfig
from megalight.models.vision import PackedImages
from megalight.models.vlm import VLM, VLMConfig
from megalight.models.vlm.module import VLMModule
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.strategies import Layout, MegatronStrategy, MegatronTowersStrategy
from megalight.types import PackedSequences
from tests.data.multimodal.conftest import TEMPLATE, png
from tests.inference.test_text import TEXT
from tests.models import vlm_samples as samples
from tests.models.vlm_samples import IMAGE, LANGUAGE, VISION, batch, small
from tests.strategies.training import SEED
from tests.support.environment import trainer
from tests.support.workers import run

CONFIG = replace(small(init=InitConfig(std=0.4)), language=replace(LANGUAGE, num_layers=4, init=InitConfig(std=0.4)))
PROMPTS = [[5, IMAGE, 6], [7, 8], [IMAGE, 9, IMAGE, 3, 4], [5, IMAGE, 6]]
"""With one image, none, two, and one other than the first."""
RED, BLUE = png(), png(9, 11, (30, 30, 200))
IMAGES = [[RED], [], [BLUE, RED], [BLUE]]


QWEN = replace(
    samples.QWEN,
    language=replace(samples.QWEN.language, num_layers=4, init=InitConfig(std=0.4)),
    vision=replace(samples.QWEN.vision, init=InitConfig(std=0.4)),
    projector=replace(samples.QWEN.projector, init=InitConfig(std=0.4)),
)
QWEN3 = replace(
    samples.QWEN3,
    language=replace(samples.QWEN3.language, num_layers=4, init=InitConfig(std=0.4)),
    vision=replace(samples.QWEN3.vision, init=InitConfig(std=0.4)),
    projector=replace(samples.QWEN3.projector, init=InitConfig(std=0.4)),
)
GEMMA = replace(
    samples.GEMMA,
    language=replace(samples.GEMMA.language, num_layers=4, init=InitConfig(std=0.4)),
    vision=replace(samples.GEMMA.vision, init=InitConfig(std=0.4)),
    projector=replace(samples.GEMMA.projector, init=InitConfig(std=0.4)),
)
INTERN = replace(
    samples.INTERN,
    language=replace(samples.INTERN.language, num_layers=4, init=InitConfig(std=0.4)),
    vision=replace(samples.INTERN.vision, init=InitConfig(std=0.4)),
    projector=replace(samples.INTERN.projector, init=InitConfig(std=0.4)),
)
TILES = replace(
    samples.TILES,
    language=replace(samples.TILES.language, num_layers=4, init=InitConfig(std=0.4)),
    vision=replace(samples.TILES.vision, init=InitConfig(std=0.4)),
)
CONFIGS = {"llava": CONFIG, "qwen": QWEN, "qwen3": QWEN3, "gemma": GEMMA, "intern": INTERN, "tiles": TILES}


@functools.cache
def one_device(name: str = "llava") -> VLM:
    model = VLM(CONFIGS[name]).double()
    initialize(model, SEED, "model.")
    return model.eval()


def ask(model: Any, **options: Any) -> list[list[int]]:
    prompts, packed_images, axes = prepare_images(model.config, PROMPTS, IMAGES)
    return generate(
        model, prompts, max_new_tokens=7, temperature=0, packed_images=packed_images, axis_positions=axes, **options
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_computing_all_again(name: str) -> None:
    pytest.importorskip("PIL")
    model, found = one_device(name), ask(one_device(name))
    for prompt, images, completion in zip(PROMPTS, IMAGES, found, strict=True):
        (ids,), packed_images, axes = prepare_images(CONFIGS[name], [prompt], [images])
        for token in completion:
            sequences = PackedSequences.of_lengths([len(ids)])
            if axes is not None:  # text follows the largest position
                last = torch.arange(len(ids) - axes[0].shape[1]) + axes[0].max() + 1
                sequences = sequences.with_axes(torch.cat([axes[0], last.expand(3, -1)], 1))
            if packed_images is not None:  # new tokens are no parts of images
                source = torch.nn.functional.pad(
                    packed_images.source, (0, len(ids) - len(packed_images.source)), value=-1
                )
                packed_images = replace(packed_images, source=source)
                sequences = replace(sequences, runs=packed_images.runs)
            with torch.no_grad():
                logits = model(torch.tensor(ids), sequences, packed_images=packed_images).logits
            assert int(logits[-1].argmax()) == token
            ids.append(token)
    assert found[0] != found[3], "the images do not matter"


def test_a_newline_ends_each_image() -> None:
    pytest.importorskip("PIL")
    prompts, packed_images, _ = prepare_images(replace(CONFIG, newline=True), PROMPTS, IMAGES)
    assert [len(ids) for ids in prompts] == [7, 2, 13, 7]
    assert packed_images is not None
    assert packed_images.source[:7].tolist() == [-1, 1, 2, 3, 4, NEWLINE, -1]
    model = VLM(replace(CONFIG, newline=True)).double()
    initialize(model, SEED, "model.")
    assert len(generate(model, prompts, max_new_tokens=2, packed_images=packed_images)) == 4


@pytest.mark.parametrize("class_token", [True, False])
def test_prompts_become_what_batches_of_training_are(class_token: bool) -> None:
    pytest.importorskip("PIL")
    config = replace(CONFIG, vision=replace(CONFIG.vision, class_token=class_token))
    prompts, packed_images, axes = prepare_images(config, PROMPTS, IMAGES)
    assert axes is None
    assert [len(ids) for ids in prompts] == [6, 2, 11, 6]
    assert packed_images is not None
    rows = config.vision.num_rows
    assert packed_images.positions.tolist() == [*range(rows)] * 4
    own = [n * rows + r for n in range(4) for r in range(class_token, rows)]
    assert packed_images.source[packed_images.source >= 0].tolist() == own
    tokens = torch.tensor([token for ids in prompts for token in ids])
    assert torch.equal(packed_images.source >= 0, tokens == IMAGE)
    blue = packed_images.pixels[2 * rows - 1].view(3, -1).mean(1)
    assert blue[2] > blue[0]
    assert prepare_images(config, [[1, 2]], [[]]) == ([[1, 2]], None, None)


class Validated(VLMModule):
    """A module that is only set up."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([batch((1, 0), config=self.config)], batch_size=None)


def _generate(options: dict[str, Any], name: str = "llava") -> list[list[int]]:
    options = dict(options)
    strategy = options.pop("kind", MegatronStrategy)(**options)
    trainer(strategy, use_distributed_sampler=False).validate(Validated(CONFIGS[name], seed=SEED), verbose=False)
    assert strategy.parallel_model is not None
    return ask(ParallelGPT(strategy.parallel_model))


def _refused(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as error:
        _generate(options)
    return str(error.value)


SP = {"tensor_parallel": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, SP),
        (2, {"pipeline_parallel": 2}),
        (2, {"context_parallel": 2}),
        pytest.param(4, {**SP, "pipeline_parallel": 2, "virtual_pipeline": 2}, marks=pytest.mark.full),
        pytest.param(4, {**SP, "context_parallel": 2}, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2, "context_parallel": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_rank_gets_the_tokens_of_one_device(ranks: int, options: dict[str, Any]) -> None:
    pytest.importorskip("PIL")
    expected = ask(one_device())
    assert all(found == expected for found in run(_generate, ranks, options))


COLOCATED = {"kind": MegatronTowersStrategy}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"kind": MegatronTowersStrategy, "placement": "disjoint", "tower": Layout()},
            ["has the vision tower alone", "tower is on other ranks"],
        ),
        ({**COLOCATED, **SP, "tower": Layout(context_parallel=2)}, ["the vision tower share the rows of images"] * 2),
        # The second stage does not run the tower.
        ({**COLOCATED, "pipeline_parallel": 2, "tower": Layout(**SP)}, ["has ranks outside of the first stage"] * 2),
        # Replicas may have other prompts.
        ({**COLOCATED, "tower": Layout(**SP)}, ["has ranks outside of the first stage"] * 2),
    ],
    ids=["disjoint", "cp", "stages", "replicas"],
)
def test_images_that_a_replica_cannot_read_alone_are_refused(options: dict[str, Any], told: list[str]) -> None:
    pytest.importorskip("PIL")
    for found, message in zip(run(_refused, 2, options), told, strict=True):
        assert message in found
        assert "save a checkpoint and generate from it in one layout" in found


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("llava", 2, {**COLOCATED, **SP, "tower": Layout()}),
        ("qwen3", 2, {**COLOCATED, "pipeline_parallel": 2, "tower": Layout()}),
        pytest.param("qwen", 4, {**SP, "pipeline_parallel": 2}, marks=pytest.mark.full),
        ("qwen3", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("gemma", 2, {"pipeline_parallel": 2}),
    ],
    ids=str,
)
def test_every_rank_gets_the_tokens_of_one_device_in_other_families(
    name: str, ranks: int, options: dict[str, Any]
) -> None:
    pytest.importorskip("PIL")
    expected = ask(one_device(name))
    assert all(found == expected for found in run(_generate, ranks, options, name))


def test_tokens_and_images_that_do_not_match_are_refused() -> None:
    pytest.importorskip("PIL")
    model = one_device()
    prompts, packed_images, _ = prepare_images(CONFIG, PROMPTS, IMAGES)
    with pytest.raises(DataError, match=re.escape("prompt 2 has 2 image tokens (id 100) and 1 images")):
        prepare_images(CONFIG, PROMPTS, [[RED], [], [RED], [RED]])
    with pytest.raises(DataError, match="there are 4 prompts and images of 1"):
        prepare_images(CONFIG, PROMPTS, [[RED]])
    with pytest.raises(DataError, match="prompt 0, image 0 is no image that Pillow can read"):
        prepare_images(CONFIG, [[IMAGE]], [[b"no image"]])
    with pytest.raises(
        DataError, match=re.escape("have 16 image tokens (id 100) among 25 tokens, and packed_images stand")
    ):
        generate(model, prompts, max_new_tokens=2)
    with pytest.raises(DataError, match="packed_images stand for 16 of 25"):
        generate(model, prompts[::-1], max_new_tokens=2, packed_images=packed_images)
    model.config = replace(CONFIG, video_token=7)  # type: ignore[assignment]
    with pytest.raises(DataError, match="a prompt has the token 7, which stands for a video in this model"):
        generate(model, [[1, 7]], max_new_tokens=2)
    model.config = CONFIG  # type: ignore[assignment]  # it is shared
    text = GPT(LANGUAGE).double()
    initialize(text, 1)
    with pytest.raises(DataError, match="packed_images are given, but the model reads no images"):
        generate(
            text, [[1, 2]], max_new_tokens=2, packed_images=PackedImages(*[torch.zeros(1)] * 2, None, torch.zeros(2))
        )


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint with a tokenizer, whose first special token stands for images."""
    special = ("<image>", "<|user|>", "<|assistant|>")
    tokenizer = Tokenizer.train([TEXT], 270, special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    language = replace(CONFIG.language, vocab_size=270, max_sequence_length=64)
    config = VLMConfig(language=language, vision=VISION, image_token=tokenizer.vocabulary["<image>"])
    model = VLM(config)
    initialize(model, 5)
    views = {
        f"model.{name}": checkpoint.View(f"model.{name}", t.shape, [checkpoint.Box((0,) * t.ndim, t)])
        for name, t in canonical_tensors(model).items()
    }
    common = {"model": {"family": "vlm", "config": config.to_dict()}}
    files = {file.name: file.read_bytes() for file in tokenizer.save(tmp_path / "tokenizer").iterdir()}
    checkpoint.save(tmp_path / "c", views, common=common, files=files)
    for name, data in (("red", RED), ("blue", BLUE)):
        (tmp_path / f"{name}.png").write_bytes(data)
    return str(tmp_path / "c")


def test_the_command_shows_images_to_the_model(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    writer = TextGenerator.from_checkpoint(saved)
    assert writer.image_marker == "<image>"
    red, blue = (tmp_path / f"{name}.png" for name in ("red", "blue"))
    words = ["generate", saved, "-n", "6", "-t", "0"]
    asked, options = ["<image>the quick", "a <image> dog"], {"max_new_tokens": 6, "temperature": 0}
    expected = writer.complete(asked, images=[[red], [BLUE]], **options)
    assert expected != writer.complete(asked, images=[[blue], [RED]], **options)
    assert main([*words, "-p", asked[0], "-p", asked[1], "--image", str(red), "--image", str(blue)]) == 0
    assert capsys.readouterr().out == "".join(f"{a}{b}\n" for a, b in zip(asked, expected, strict=True))
    # Prompts without a place get all images, each.
    expected = writer.complete(["<image><image>the", "<image><image>fox"], images=[[red, blue]] * 2, **options)
    assert main([*words, "-p", "the", "-p", "fox", "--image", str(red), "--image", str(blue)]) == 0
    assert capsys.readouterr().out == f"the{expected[0]}\nfox{expected[1]}\n"
    (expected,) = writer.complete(["<|user|><image>fox<|endoftext|><|assistant|>"], images=[[red]], **options)
    assert main([*words, "--chat", "-p", "fox", "--image", str(red)]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_images_stand_in_the_frame_of_their_model(saved: str, tmp_path: Path) -> None:
    """As in training data, whose texts have ``<image>``, too."""
    pytest.importorskip("PIL")
    special = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = Tokenizer.train([TEXT], 270, special_tokens=special)
    model = one_device()
    config = replace(CONFIG, image_token=tokenizer.vocabulary["<|image_pad|>"])
    writer = TextGenerator(SimpleNamespace(config=config, parameters=model.parameters), tokenizer)  # type: ignore
    for options, expected in (
        ({}, "<|vision_start|><|image_pad|><|vision_end|>the fox"),
        ({"image_text": "a<|image_pad|>b"}, "a<|image_pad|>bthe fox"),
    ):
        with mock.patch("megalight.inference.text.generate", return_value=[[]]) as generated:
            writer.complete(["<image>the fox"], images=[[RED]], **options)
        ids, places = generated.call_args.args[1][0], config.image_tokens
        whole = tokenizer.encode(expected.replace("<|image_pad|>", "<|image_pad|>" * places))
        assert ids == whole
    words = ["generate", saved, "-p", "fox", "--image-text", "<image>"]
    assert main(words) == 2
    with pytest.raises(DataError, match="image_text is 'fox'; it must hold the image token"):
        writer.complete(["<image>the fox"], images=[[RED]], image_text="fox")


def test_the_command_takes_a_chat_template(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }} jumps")
    (expected,) = TextGenerator.from_checkpoint(saved).complete(["fox jumps"], max_new_tokens=6, temperature=0)
    words = ["generate", saved, "-n", "6", "-t", "0", "-p", "fox"]
    assert main([*words, "--chat", "--chat-template", str(file)]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main([*words, "--chat-template", str(file)]) != 0
    assert "add --chat" in capsys.readouterr().err
    assert main([*words, "--chat", "--chat-template", str(tmp_path / "none.jinja")]) != 0
    assert "none.jinja" in capsys.readouterr().err


def _command(words: list[str]) -> tuple[int, str]:
    """What the command prints on this rank."""
    out = io.StringIO()
    world = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, world):
        return main(words), out.getvalue()


@pytest.mark.parametrize("layout", [["--tensor-parallel", "2"], ["--pipeline-parallel", "2"]], ids=str)
def test_the_command_divides_the_model_over_processes(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: list[str]
) -> None:
    pytest.importorskip("PIL")
    words = ["generate", saved, "-n", "6", "-t", "0", "-p", "<image>the quick", "--image", str(tmp_path / "red.png")]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert run(_command, 2, [*words, *layout]) == [(0, expected), (0, "")]
    assert main([*words, *layout]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "need 2 processes, and there are 1; start them by torchrun --nproc-per-node 2 -m megalight" in told


def test_images_that_do_not_match_the_prompts_are_told(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    red = str(tmp_path / "red.png")
    words = ["generate", saved, "-n", "2", "-p", "<image>the <image>", "-p", "a"]
    assert main([*words, "--image", red]) == 2
    assert "the prompts hold '<image>' 2 times, and --image is given 1 times" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main([*words, "--image", str(tmp_path / "none.png")]) == 2
    told = " ".join(capsys.readouterr().err.split())  # lines are as wide as the terminal
    assert re.search(r"--image 1 \(.*none\.png\) cannot be read: No such file", told)
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:16])
    assert main([*words, "--image", red, "--image", str(tmp_path / "cut.png")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(r"--image 2 \(.*cut\.png\) (cannot be read as an image|begins as PNG)", told)
    assert main(words) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "prompt 0 has 2 places for images ('<image>'), and no images are given; give one for each" in told
