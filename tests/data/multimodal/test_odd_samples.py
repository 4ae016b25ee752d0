"""Odd conversations train in every layout as on one device, and what is left out is told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalight.data.multimodal.module import MultimodalDataModule
from megalight.data.tokenizer import Tokenizer
from megalight.models.vlm.module import VLMModule
from megalight.optim import AdamConfig
from megalight.strategies import MegatronStrategy, MegatronTowersBesideStrategy, MegatronTowersStrategy, Side
from tests.data.multimodal.conftest import png, row
from tests.data.multimodal.test_module import dataset
from tests.environment import trainer
from tests.models.vlm_samples import CONFIG, QWEN
from tests.workers import run

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
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp": (MegatronStrategy, {"micro_batch_size": 1}),
    "tp": (MegatronStrategy, SP),
    "towers": (MegatronTowersStrategy, {"tower": Side(), "micro_batch_size": 1}),
    "beside": (MegatronTowersBesideStrategy, {"tower": Side(), **SP}),
}


def _train(prefix: str, name: str, layout: str | None) -> dict[str, float]:
    """Steps over all rows, and validation on them."""
    kind, options = LAYOUTS[layout] if layout is not None else (MegatronStrategy, {})
    data = MultimodalDataModule(train_data=prefix, val_data=prefix, global_batch_size=2, sequence_length=LENGTH)
    module = VLMModule(model(name), optimizer=AdamConfig(lr=1e-2), seed=3)
    runner = trainer(kind(**options), max_steps=4, gradient_clip_val=1.0)
    runner.fit(module, datamodule=data)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, list[Any]]:
    """Data sets, by name."""
    for name, size in {"huge": (1200, 800), "one": (1, 1), "flat": (60, 1), "tall": (1, 60), "some": (9, 12)}.items():
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


@pytest.mark.parametrize("kind", ["no image", "odd"])
@pytest.mark.parametrize("name", ["llava", "qwen"])
def test_losses_are_those_of_one_device(
    name: str, kind: str, rows: dict[str, list[Any]], prepared: Callable[..., Any]
) -> None:
    prefix = str(prepared(rows[kind]).prefix)
    alone = run(_train, 1, prefix, name, None)[0]
    assert {"train_loss", "val_loss"} <= alone.keys()
    for layout in LAYOUTS:
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
