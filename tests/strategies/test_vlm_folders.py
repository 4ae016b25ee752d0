"""Vision-language folders of ``transformers`` x layouts: in with equal logits, and out again unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")
from megalight.data.multimodal.batch import ImageTextBatch
from megalight.inference import ParallelGPT
from megalight.models.batches import pack
from megalight.models.hugging_face.export import export
from megalight.models.stored import open_model
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.module import VLMModule
from megalight.models.vlm.task import pack_images
from megalight.strategies import MegatronStrategy
from tests.models import test_vlm_families as families
from tests.models import test_vlm_hugging_face as llava
from tests.models import test_vlm_qwen as qwen
from tests.strategies.test_transformers_matrix import LAYOUTS
from tests.strategies.training import ADAM
from tests.support.environment import trainer
from tests.support.reference_gpt import relative_error
from tests.support.workers import run

MODELS: dict[str, Callable[[], Any]] = {
    # Its last layer's features: a folder keeps no layers behind those that are read.
    "llava": lambda: llava.theirs("llava", torch.float64, vision_feature_layer=-1),
    "siglip": lambda: llava.theirs("siglip", torch.float64),
    "onevision": lambda: llava.theirs("onevision", torch.float64),
    "qwen": lambda: qwen.theirs(torch.float64, hidden_size=32, num_heads=4),
    # Features of the tower are added to layers of both stages.
    "qwen3_vl_tied": lambda: families.theirs("qwen3_vl_tied", torch.float64),
    "internvl": lambda: families.theirs("internvl", torch.float64),
}


class Fixed(VLMModule):
    """Sees one batch."""

    batch: ImageTextBatch

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self.batch], batch_size=None)  # type: ignore[arg-type]


def _inputs(kind: str, config: VLMConfig) -> tuple[dict[str, Any], ImageTextBatch]:
    if kind in families.CASES:
        return families.inputs(kind, config, torch.float64)
    if kind != "qwen":
        return llava.inputs(torch.float64, config)
    dynamic = config.vision.dynamic
    assert dynamic is not None
    # Such small pictures stay as they are.
    small = replace(config, vision=replace(config.vision, dynamic=replace(dynamic, min_pixels=64)))
    return qwen.inputs(small, torch.float64)


def _in_and_out(kind: str, layout: str, source: Path, target: Path) -> Tensor:
    """Read a folder under a layout, write it again from all ranks, and return the logits in between."""
    strategy = MegatronStrategy(**LAYOUTS[layout][1])
    runner = trainer(strategy, precision="64-true", limit_val_batches=1, use_distributed_sampler=False)
    module = Fixed(None, optimizer=ADAM, weights=source)
    _, batch = _inputs(kind, module.config)
    module.batch = batch
    runner.validate(module, verbose=False)
    runner.save_checkpoint(target.with_suffix(".ckpt"))
    export(open_model(target.with_suffix(".ckpt")), target)
    assert strategy.parallel_model is not None
    sequences = batch.sequences
    source = pack(batch.parts()[1], sequences, -1)
    packed_images = pack_images(module.config, batch.parts()[0], source, 1)
    return ParallelGPT(strategy.parallel_model)(batch.tokens.flatten(), sequences, packed_images=packed_images).logits


DEFAULT = (("llava", "tp2"), ("qwen3_vl_tied", "pp2"))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in DEFAULT else pytest.mark.full)
        for kind in MODELS
        for layout in LAYOUTS
    ],
)
def test_in_and_out_with_equal_logits(kind: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 kinds x 4 layouts: 24 configurations."""
    monkeypatch.setitem(llava.VISION, "num_attention_heads", 4)  # which two ranks can divide
    model = MODELS[kind]()
    folders = tmp_path / "in", tmp_path / "out"
    model.save_pretrained(folders[0])
    asked, _ = _inputs(kind, VLMModule(weights=folders[0]).config)
    with torch.no_grad():
        expected = model(**asked).logits
    for logits in run(_in_and_out, LAYOUTS[layout][0], kind, layout, *folders, timeout=240):
        assert relative_error(logits.view_as(expected), expected) < 1e-5
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert all("post_layernorm" in name for name in changed), changed  # which nobody reads
    again = type(model).from_pretrained(folders[1], attn_implementation="eager", dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(again.eval()(**asked).logits, expected) < 1e-5
