"""Odd conversations train in every layout as on one device, and what is left out is told."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megalight.callbacks import EMA
from megalight.data.chat.prepare import prepare_chat
from megalight.data.multimodal.module import MultimodalDataModule
from megalight.data.tokenizer import Tokenizer
from megalight.models.vlm.module import VLMModule
from megalight.optim import AdamConfig
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.strategies import (
    Layout,
    MegatronFSDPStrategy,
    MegatronStrategy,
    MegatronTowersStrategy,
)
from tests.data.multimodal.conftest import png, row
from tests.data.multimodal.test_module import dataset
from tests.models.vlm_samples import CONFIG, QWEN
from tests.support.environment import trainer
from tests.support.workers import run

LENGTH, VOCABULARY = 96, 280


def model(name: str) -> Any:
    config = {"llava": CONFIG, "qwen": QWEN}[name]
    config = replace(
        config, image_token=2, language=replace(config.language, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    )
    if config.vision.dynamic is None:
        return config
    return replace(config, vision=replace(config.vision, dynamic=replace(config.vision.dynamic, max_pixels=1024)))


SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp": (MegatronStrategy, {"micro_batch_size": 1}),
    "tp": (MegatronStrategy, SP),
    "towers": (MegatronTowersStrategy, {"placement": "disjoint", "tower": Layout(), "micro_batch_size": 1}),
    "colocated": (MegatronTowersStrategy, {"tower": Layout(), **SP}),
    "cp": (MegatronStrategy, {"context_parallel": 2}),
    "pp": (MegatronStrategy, {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}),
}
STAGES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "context": (2, MegatronStrategy, {"context_parallel": 2}),
    "interleaved": (
        2,
        MegatronStrategy,
        {**PP, "virtual_pipeline": 2, "pipeline": PipelineOptions(schedule="zero_bubble")},
    ),
    "disjoint": (
        3,
        MegatronTowersStrategy,
        {"placement": "disjoint", "tower": Layout(ranks=2, context_parallel=2), "micro_batch_size": 1},
    ),
    "tower a stage": (2, MegatronStrategy, {**PP, "pipeline_layout": "E|ttttL"}),
    "colocated": (2, MegatronTowersStrategy, {"tower": Layout(context_parallel=2), "context_parallel": 2}),
    "sharded": (2, MegatronFSDPStrategy, {"micro_batch_size": 1}),
    "alone": (1, MegatronStrategy, {}),
}
"""Layouts of a model with four layers."""


def _train(prefix: str, name: str, layout: str | None) -> dict[str, float]:
    """Steps over all rows, and validation on them."""
    kind, options = LAYOUTS[layout] if layout is not None else (MegatronStrategy, {})
    data = MultimodalDataModule(train_data=prefix, val_data=prefix, global_batch_size=2, sequence_length=LENGTH)
    module = VLMModule(model(name), optimizer=AdamConfig(lr=1e-2), seed=3)
    runner = trainer(kind(**options), max_steps=4, gradient_clip_val=1.0)
    runner.fit(module, datamodule=data)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def _go_on(blends: list[Any], name: str, layout: str, steps: int, save: str, resume: str | None) -> dict[str, float]:
    """Train up to a step, validate averaged weights after each, and save."""
    _, kind, options = STAGES[layout]
    train, held_out = blends
    data = MultimodalDataModule(train_data=train, val_data=held_out, global_batch_size=2, sequence_length=LENGTH)
    config = model(name)
    module = VLMModule(replace(config, language=replace(config.language, num_layers=4)), optimizer=AdamConfig(), seed=3)
    runner = trainer(kind(**options), max_steps=steps, callbacks=[EMA(0.8)], val_check_interval=1, limit_val_batches=2)
    runner.fit(module, datamodule=data, ckpt_path=resume)
    runner.save_checkpoint(save)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param("qwen", ("context", "interleaved", "disjoint"), marks=pytest.mark.full),
        pytest.param("llava", ("context", "interleaved", "disjoint"), marks=pytest.mark.full),
        pytest.param("qwen", ("tower a stage", "colocated", "sharded"), marks=pytest.mark.full),
        pytest.param("llava", ("sharded", "tower a stage", "colocated"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_blend_goes_on_in_other_layouts(
    name: str,
    order: tuple[str, ...],
    rows: dict[str, list[Any]],
    prepared: Callable[..., Any],
    image_tokenizer: Path,
    tmp_path: Path,
) -> None:
    """Images and conversations without any, also of other files; validation has images of other sizes."""
    odd, none = (str(prepared(rows[kind], kind[:3]).prefix) for kind in ("odd", "no image"))
    for number, size in enumerate([(50, 9), (9, 50), (30, 30), (64, 2)]):
        (tmp_path / f"{number}.png").write_bytes(png(*size))
    held_out = str(prepared([row(f"{number}.png", "<image>what") for number in range(4)], "held_out").prefix)
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(row(None, 'what'))}\n" * 20)
    chat = prepare_chat(
        [str(tmp_path / "chat.jsonl")], tmp_path / "chat", tokenizer=image_tokenizer, progress=False
    ).prefix
    blends = [[2, odd, 1, str(chat), 1, none], [held_out, str(chat)]]
    expected = run(_go_on, 1, blends, name, "alone", 3, str(tmp_path / "alone"), None)[0]
    resume = None
    for number, layout in enumerate(order, 1):
        save = str(tmp_path / layout)
        found = run(_go_on, STAGES[layout][0], blends, name, layout, number, save, resume)
        resume = save
    for rank in found:
        assert rank == pytest.approx(expected, rel=1e-9)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, list[Any]]:
    """Data sets, by name."""
    for name, size in {"huge": (480, 320), "one": (1, 1), "flat": (60, 1), "tall": (1, 60), "some": (9, 12)}.items():
        (tmp_path / f"{name}.png").write_bytes(png(*size))
    last = row("some.png", "<image>this", "a")
    last["conversations"].append({"from": "human", "value": "and in the picture"})
    return {
        "no image": [row(None, f"what is this {number}") for number in range(4)],
        "odd": [
            *(row(f"{name}.png", "<image>what") for name in ("huge", "one", "flat", "tall", "some")),
            row(["some.png"] * 90, "<image>" * 90),  # more than a row has place for
            row("some.png", "<image>this", ""),
            last,
            row(None, "in the picture"),
            row([], "a list of none"),
        ],
    }


@pytest.mark.parametrize(
    ("name", "kind", "layouts"),
    [
        ("qwen", "odd", ("dp", "towers", "colocated", "cp", "pp")),
        pytest.param("qwen", "no image", ("tp", "towers"), marks=pytest.mark.full),
        *(
            pytest.param(*each, LAYOUTS, marks=pytest.mark.full)
            for each in product(("llava", "qwen"), ("no image", "odd"))
        ),
    ],
)
def test_losses_are_those_of_one_device(
    name: str, kind: str, layouts: Iterable[str], rows: dict[str, list[Any]], prepared: Callable[..., Any]
) -> None:
    prefix = str(prepared(rows[kind]).prefix)
    alone = run(_train, 1, prefix, name, None)[0]
    assert {"train_loss", "val_loss"} <= alone.keys()
    for layout in layouts:
        for rank in run(_train, 2, prefix, name, layout):
            assert rank == pytest.approx(alone, rel=1e-9), layout


def test_what_is_left_out_is_told(
    rows: dict[str, list[Any]],
    prepared: Callable[..., Any],
    image_tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = dataset(str(prepared(rows["odd"]).prefix), length=LENGTH, packing=False)
    assert "1 of 10 conversations are too long, such as number 5 with " in caplog.text
    assert sorted(found.items[:, 0].tolist()) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    # An empty answer is its end, and what the user says last has no loss.
    text, samples = Tokenizer.load(image_tokenizer), [found[number] for number in range(len(found))]
    said = Counter(text.decode(sample.labels[sample.loss_mask > 0].tolist()) for sample in samples)
    assert said == {"a red thing<|endoftext|>": 7, "a<|endoftext|>": 1, "<|endoftext|>": 1}
