"""Rows of conversations with images, their batches, and training on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalight.data.chat.module import SFTDataModule
from megalight.data.chat.prepare import prepare_chat
from megalight.data.corpus import Corpus
from megalight.data.multimodal import dataset as of_images
from megalight.data.multimodal.batch import ImageTextBatch, with_cuts, with_images
from megalight.data.multimodal.dataset import ImageDataset, ImagePackOptions, collate
from megalight.data.multimodal.images import ImageForm, decode
from megalight.data.multimodal.module import MultimodalDataModule
from megalight.data.multimodal.resolution import DynamicForm, form_of
from megalight.data.multimodal.template import MIXED, NEWLINE
from megalight.data.prepare import prepare
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.models.vlm.module import VLMModule
from megalight.optim import AdamConfig
from megalight.strategies import MegatronStrategy
from tests.data.chat.test_module import Rows
from tests.data.gpt.test_module import every_step
from tests.data.gpt.test_module import trainer as reading
from tests.data.multimodal.conftest import png, row
from tests.models.vlm_samples import CONFIG, LANGUAGE, QWEN, TILES
from tests.support.environment import trainer
from tests.support.workers import run

FORM = ImageForm(size=8, patch=4)


@pytest.fixture
def prefix(prepared: Callable[..., Any], tmp_path: Path) -> str:
    """Rows with no, one and two images."""
    rows = []
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(png(color=(20 * number, 0, 255 - 20 * number)))
        rows.append(row(f"{number}.png", f"<image>what is this {number}"))
        if number % 3 == 0:
            rows.append(row(None, "what is this"))
            rows.append(row([f"{number}.png", "0.png"], "in <image> the <image>picture"))
    return str(prepared(rows).prefix)


def options(length: int = 96, **changes: Any) -> ImagePackOptions:
    return ImagePackOptions(
        **{"sequence_length": length, "too_long": "drop", "form": FORM, "image_token": 2, **changes}
    )


def dataset(prefix: str, **changes: Any) -> ImageDataset:
    corpus = Corpus.open(prefix)
    return ImageDataset(corpus, range(len(corpus.data)), options(**changes))


def test_only_an_image_without_others_has_tiles(prepared: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "long.png").write_bytes(png(8, 24))
    (tmp_path / "small.png").write_bytes(png())
    rows = [row("long.png", "<image>what is this"), row(["long.png", "small.png"], "<image> and <image>")]
    prefix = str(prepared([*rows, row(None, "what is this"), row("small.png", "<image>")]).prefix)
    form = form_of(replace(TILES, image_token=2))
    found = dataset(prefix, form=form, packing=False)
    batch = collate([found[i] for i in range(len(found))])
    images, source = batch.parts()
    by_counts = dict(zip(images.counts, source, strict=True))
    # The whole and three tiles, whose 6 x 2 features become 3 x 1; two squares; the whole and one tile.
    assert sorted(images.counts) == [0, 2, 2, 4]
    tiled = by_counts[4][by_counts[4] != -1]
    assert (tiled >= 0).sum() == 4
    assert (tiled <= MIXED).sum() == 3
    assert (tiled == NEWLINE).sum() == 3
    assert images.mixtures is not None
    assert sum(images.mixtures.counts) == len(images.mixtures.rows) == 3
    by_hand = with_cuts(batch, [found[i].cuts for i in range(len(found))], 2, form)
    assert torch.equal(source, by_hand.source)
    assert [part.images.mixtures is None for part in batch.split(1)] == [count != 4 for count in images.counts]


def test_rows_hold_each_conversation_once_with_its_images(prefix: str) -> None:
    found = dataset(prefix)
    corpus = found.corpus
    assert corpus.images is not None
    assert sorted(found.items[:, 0].tolist()) == list(range(len(corpus.data)))
    batch = collate([found[i] for i in range(len(found))])
    images, source = batch.parts()
    assert sum(images.counts) == len(corpus.images)
    # the same places as for a batch that is made by hand
    by_hand = with_images(batch, images, 2, class_token=True)
    assert torch.equal(source, by_hand.source)
    assert not batch.loss_mask[batch.labels == 2].any()
    assert int(batch.loss_mask.sum()) == corpus.meta.num_loss_tokens  # type: ignore[union-attr]
    assert batch.sequences.num_tokens == batch.tokens.numel()


def test_a_newline_is_one_more_token_of_each_image(prefix: str) -> None:
    form = replace(FORM, newline=True)
    found = dataset(prefix, form=form)
    batch = collate([found[i] for i in range(len(found))])
    images, source = batch.parts()
    assert torch.equal(source, with_images(batch, images, 2, class_token=True, newline=True).source)
    assert (source == NEWLINE).sum() == len(images.lengths) == len(found.corpus.images)  # type: ignore[arg-type]


def test_each_image_is_that_of_its_conversation(prefix: str) -> None:
    """Pictures have a color each, which the text does not tell."""
    found = dataset(prefix, packing=False)
    corpus = found.corpus
    for index in range(len(found)):
        sample = found[index]
        (sequence,) = {int(s) for s in found.items[found.bounds[int(found._permutation(0)[index])], :1]}
        first, last = corpus.images.documents[sequence : sequence + 2]  # type: ignore[union-attr]
        assert len(sample.cuts) == last - first
        assert (sample.tokens == 2).sum() == 4 * (last - first) == (sample.source >= 0).sum()
        expected = [FORM.patches(_image(corpus, i)) for i in range(first, last)]
        assert all(np.array_equal(cut.pixels, one) for cut, one in zip(sample.cuts, expected, strict=True))


def _image(corpus: Corpus, index: int) -> Any:
    assert corpus.images is not None
    return decode(corpus.images.get(index).tobytes(), "here")


def test_what_is_too_long_is_dropped_or_refused(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = dataset(prefix, packing=False)
    length = int(whole.items[:, 2].max()) - 1
    with pytest.raises(DataError, match=r"conversations are too long, .* 8 of them of images; sequence_length"):
        dataset(prefix, length=length, too_long="raise")
    kept = dataset(prefix, length=length)
    assert 0 < len(kept.items) < len(whole.items)
    assert "They are left out." in caplog.text
    with pytest.raises(DataError, match="no conversation can be used with sequence_length 5, where an image has 4"):
        dataset(prefix, length=5)
    with pytest.raises(ConfigurationError, match="conversations with images are not cut: choose 'drop' or 'raise'"):
        options(too_long="cut_end")


def test_conversations_with_videos_are_refused(prefix: str) -> None:
    token = int(Corpus.open(prefix).data.get(0)[0])  # which all of them have
    with pytest.raises(DataError, match=rf"conversation \d+ has the token {token} of videos, and videos are not read"):
        dataset(prefix, video_token=token)[0]


@pytest.fixture
def sized(prepared: Callable[..., Any], tmp_path: Path) -> Any:
    """Prepare images of any size, one of which is too long a strip."""
    rows = []
    for number, size in enumerate([(8, 8), (40, 24), (17, 30), (9, 31), (2000, 8)]):
        (tmp_path / f"{number}.png").write_bytes(png(*size))
        rows.append(row(f"{number}.png", f"<image>what is this {number}"))
    return prepared([*rows, row(["1.png", "0.png"], "in <image> the <image>picture"), row(None, "what is this")])


SIZED = DynamicForm(patch=4, merge=2, min_pixels=64, max_pixels=32 * 32, window=16)


def test_images_of_any_size_have_as_many_tokens_as_they_need(sized: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = dataset(sized.prefix, form=SIZED)
    assert "1 conversations are left out for their images, such as" in caplog.text
    assert "an image of 2000 x 8 pixels is more than 200 times as long as wide" in caplog.text
    assert sorted(found.items[:, 0].tolist()) == [0, 1, 2, 3, 5, 6]
    batch = collate([found[i] for i in range(len(found))])
    images, source = batch.parts()
    tokens, markers = {0: 1, 1: 5 * 3, 2: 2 * 4, 3: 1 * 4, 5: 16, 6: 0}, {5: 2, 6: 0}
    for sequence, _, size in found.items.tolist():
        text = int(found.corpus.data.lengths[sequence]) - markers.get(sequence, 1)
        assert size == text + tokens[sequence] - 1
    assert sum(images.lengths) == 4 * sum(tokens.values()) == 4 * int((source >= 0).sum())
    assert sorted(source[source >= 0].tolist()) == list(range(sum(tokens.values())))
    assert torch.equal(source >= 0, batch.tokens == 2)
    # Documents begin anew.
    axes = batch.axis_positions
    assert axes is not None
    for row_axes, lengths in zip(axes, batch.document_lengths or (), strict=True):
        at = np.cumsum([0, *lengths[:-1]]).tolist()
        assert not row_axes[:, at].any()
    assert (axes[:, 1] != axes[:, 2]).any()
    with pytest.raises(DataError, match=r"image 4: an image of 2000 x 8 .* Or leave its conversation out"):
        dataset(sized.prefix, form=SIZED, too_long="raise")
    with pytest.raises(DataError, match="with sequence_length 5, where images of one have up to 16 tokens"):
        dataset(sized.prefix, form=SIZED, length=5)


def test_rows_are_of_their_own_images(sized: Any, prepared: Callable[..., Any], tmp_path: Path) -> None:
    """Not those that the cache has of a corpus with the same texts: of images of other sizes, of fewer, or of none."""

    def lengths(prefix: Any) -> list[int]:
        found = dataset(str(prefix), form=SIZED)
        for number in range(len(found)):
            found[number]
        return sorted(found.items[:, 2].tolist())

    talks = [
        row(None, "what is this"),
        row("0.png", "<image>what is this"),
        row(["0.png", "1.png"], "<image><image>is"),
    ]
    small = lengths(prepared(talks, "small").prefix)
    (tmp_path / "0.png").write_bytes(png(32, 32))
    large = lengths(prepared(talks, "large").prefix)
    assert [each - other for each, other in zip(large, small, strict=True)] == [0, 15, 15]
    before = dataset(str(tmp_path / "out" / "small"), form=SIZED).order
    assert lengths(prepared(talks, "small").prefix) == large
    # A run that goes on with them is told.
    assert dataset(str(tmp_path / "out" / "small"), form=SIZED).order != before


def test_images_of_as_many_bytes_are_measured_anew(prepared: Callable[..., Any], tmp_path: Path) -> None:
    """A cache for several corpora, whose images have equal counts and bytes, and other sizes; also a corpus anew."""

    def corpus(name: str, side: int) -> Any:
        (tmp_path / "0.png").write_bytes(png(side, side).ljust(2000, b" "))  # what follows a picture is not read
        return prepared([row("0.png", "<image>what is this")] * 3, name)

    def rows(prefix: Any) -> ImageDataset:
        opened = Corpus.open(prefix)
        whole = range(len(opened.data))
        found = ImageDataset(opened, whole, options(form=SIZED), cache_dir=tmp_path / "cache")
        assert all(int((found[number].source >= 0).sum()) for number in range(len(found)))
        return found

    small, large = rows(corpus("small", 8).prefix), rows(corpus("large", 32).prefix)
    assert (large.items[:, 2] - small.items[:, 2]).tolist() == [15, 15, 15]
    anew = rows(corpus("small", 32).prefix)
    assert np.array_equal(anew.items, large.items)
    assert anew.order == large.order != small.order
    # Elsewhere, the same images are the same rows.
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    assert rows(tmp_path / "moved" / "small").order == anew.order


def test_conversations_that_lost_their_images_are_refused(prefix: str, tmp_path: Path, image_tokenizer: Path) -> None:
    """Also where rows of the same conversations with their images are in the cache."""
    assert dataset(prefix)[0].cuts
    lines = [{"conversations": each["conversations"]} for each in json.loads((tmp_path / "talk.json").read_text())]
    (tmp_path / "lost.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    lost = prepare_chat(
        [str(tmp_path / "lost.jsonl")], tmp_path / "out" / "lost", tokenizer=image_tokenizer, progress=False
    )
    with pytest.raises(DataError, match=r"conversation 0 has the token 2 of images, .* prepare --multimodal; --chat"):
        dataset(lost.prefix)


def test_text_that_has_the_token_of_images_is_refused(
    tmp_path: Path, image_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``prepare`` writes has none; files of others are looked at before training, and rows of large ones in it."""
    (tmp_path / "web.jsonl").write_text(json.dumps({"text": "what is <image> in the picture " * 20}) + "\n")
    web = [str(tmp_path / "web.jsonl")], tmp_path / "web"
    ours = prepare(*web, tokenizer=image_tokenizer, progress=False)
    text = dataset(ours.prefix, length=32)
    batch = collate([text[number] for number in range(len(text))])
    assert not (batch.tokens == 2).any()
    assert not (batch.labels == 2).any()
    monkeypatch.setattr(Tokenizer, "for_plain_text", lambda self, special_as_text: self)
    theirs = prepare(*web, tokenizer=image_tokenizer, progress=False)
    told = r"web: document 0 has the token 2 of images, .* again with megalight prepare, where .*--special-as-text"
    with pytest.raises(DataError, match=told):
        dataset(theirs.prefix, length=32)
    monkeypatch.setattr(of_images, "SCAN_LIMIT", 1)
    large = dataset(theirs.prefix, length=32)
    with pytest.raises(DataError, match=told):
        large[0]


def test_the_model_says_that_images_have_any_size(sized: Any) -> None:
    config = replace(QWEN, image_token=2, language=replace(QWEN.language, vocab_size=300, max_sequence_length=96))
    data = MultimodalDataModule(data=sized.prefix, split="1,0,0", global_batch_size=2, sequence_length=96)
    attached(data, config).setup("fit")
    assert data.options is not None
    assert data.options.form == replace(SIZED, max_pixels=28 * 28 * 1280)
    batch = collate([dataset(sized.prefix, form=data.options.form)[0]])
    made = VLMModule(config)
    made.configure_model()
    assert made.loss_step(made.forward_step(made.model, batch), batch).sum.isfinite()


def test_a_damaged_store_names_the_image(prefix: str) -> None:
    path = Path(f"{prefix}.images.bin")
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(DataError, match=r"talk\.images, image \d+ is no image that Pillow can read"):
        dataset(prefix)[0]


def attached(data: MultimodalDataModule, config: Any) -> MultimodalDataModule:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 1, "rank": 0})
    module = SimpleNamespace(config=config)
    data.trainer = SimpleNamespace(lightning_module=module, strategy=strategy, max_steps=2, accumulate_grad_batches=1)
    return data


def test_the_model_decides_over_sizes_of_images(prefix: str) -> None:
    data = MultimodalDataModule(data=prefix, global_batch_size=2, sequence_length=96)
    fitting = replace(CONFIG, image_token=2, language=replace(LANGUAGE, vocab_size=300, max_sequence_length=96))
    attached(data, fitting).setup("fit")
    assert data.options is not None
    assert data.options.form == replace(FORM, border=(122, 116, 104))  # the mean color of the model's images
    with pytest.raises(DataError, match=r"has 2 as the token of images, and the model has image_token=100"):
        attached(data, replace(fitting, image_token=100)).setup("fit")
    with pytest.raises(ConfigurationError, match="this one reads no images; train a VLMModule"):
        attached(data, LANGUAGE).setup("fit")
    with pytest.raises(DataError, match="was prepared as 'images'"):
        SFTDataModule(data=prefix, global_batch_size=2, sequence_length=96)


def _train(prefixes: Any, strategy_options: dict[str, Any]) -> dict[str, float]:
    """Two steps of training, then validation, from files."""
    data = MultimodalDataModule(data=prefixes, split="3,1,0", global_batch_size=2, sequence_length=96)
    config = replace(CONFIG, image_token=2, language=replace(LANGUAGE, vocab_size=280, max_sequence_length=96))
    module = VLMModule(config, optimizer=AdamConfig(lr=1e-2), seed=3)
    runner = trainer(MegatronStrategy(**strategy_options), max_steps=2, gradient_clip_val=1.0)
    runner.fit(module, datamodule=data)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def test_training_and_validation_from_files(prefix: str, tmp_path: Path, image_tokenizer: Path) -> None:
    """Also with conversations without images mixed in."""
    lines = '{"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "a thing"}]}\n' * 20
    (tmp_path / "text.jsonl").write_text(lines)
    text = prepare_chat([str(tmp_path / "text.jsonl")], tmp_path / "text", tokenizer=image_tokenizer, progress=False)
    mixed = [3, prefix, 1, text.prefix]
    alone = run(_train, 1, mixed, {})[0]
    assert {"train_loss", "val_loss"} <= alone.keys()
    for rank in run(_train, 2, mixed, {"micro_batch_size": 1}):
        assert rank == pytest.approx(alone, rel=1e-9)
    assert isinstance(collate([dataset(text.prefix)[0]]), ImageTextBatch)


class Pictures(Rows):
    """Writes down tokens and pixels of whole rows; it has the sizes of images of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.config = replace(CONFIG, image_token=2, language=replace(LANGUAGE, vocab_size=300, max_sequence_length=96))

    def note(self, stage: str, batch: Any) -> Any:
        images, source = batch.parts()
        parts = (batch.tokens, source, images.pixels, torch.tensor(images.counts))
        self.rows[stage].append([hash(each.numpy().tobytes()) for each in parts])
        return self.layer(self.layer.weight).sum()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*`ckpt_path`, callbacks used:UserWarning")
def test_a_blend_resumes_after_any_step_with_the_same_images(
    prefix: str, tmp_path: Path, image_tokenizer: Path
) -> None:
    lines = '{"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "a thing"}]}\n' * 20
    (tmp_path / "text.jsonl").write_text(lines)
    text = prepare_chat([str(tmp_path / "text.jsonl")], tmp_path / "text", tokenizer=image_tokenizer, progress=False)

    def read(checkpoint: Path | None = None, **more: Any) -> list[list[int]]:
        reader = Pictures()
        mixed = {prefix: 3.0, text.prefix: 1.0}
        data = MultimodalDataModule(data=mixed, split="1", global_batch_size=2, sequence_length=96)
        reading(max_steps=5, **more).fit(reader, data, ckpt_path=checkpoint)
        return reader.rows["train"]

    full = read(callbacks=[every_step(tmp_path / "saved")])
    assert len(full) == 5
    assert len({tuple(row) for row in full}) > 3
    saved = sorted((tmp_path / "saved").iterdir(), key=lambda path: int(path.stem.partition("=")[2]))
    for step, path in enumerate(saved, 1):
        assert read(path) == full[step:], step
