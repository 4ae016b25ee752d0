"""BERT of ``transformers`` x layouts: read with equal losses of words and of the order, and written unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from megalight.data.bert.batch import BertBatch
from megalight.models.bert import BertModule
from megalight.models.hugging_face.export import export
from megalight.models.stored import diff, open_model
from megalight.strategies import MegatronStrategy
from tests.models.test_bert_hugging_face import theirs
from tests.strategies.training import ADAM
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}),
}
OPTIONS = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53, "max_position_embeddings": 32}
ROWS, LENGTH = 4, 16


def batch() -> BertBatch:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(0, 53, (ROWS * LENGTH,), generator=generator) for _ in range(2))
    masked = torch.rand(ROWS * LENGTH, generator=generator) < 0.4
    types = (torch.arange(LENGTH) >= LENGTH // 2).long().repeat(ROWS)
    order = torch.randint(0, 2, (ROWS,), generator=generator)
    return BertBatch(tokens, types, labels.masked_fill(~masked, -100), order, (LENGTH,) * ROWS).with_rows()


class Fixed(BertModule):
    """Sees one batch."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([batch()], batch_size=None)  # type: ignore[arg-type]


def _in_and_out(layout: str, source: Path, target: Path) -> tuple[float, float]:
    """Read a folder under a layout, write it again from all ranks, and return both losses."""
    runner = trainer(
        MegatronStrategy(**LAYOUTS[layout][1]),
        precision="64-true",
        limit_val_batches=1,
        use_distributed_sampler=False,
    )
    (found,) = runner.validate(Fixed(None, optimizer=ADAM, weights=source), verbose=False)
    runner.save_checkpoint(target.with_suffix(".ckpt"))
    export(open_model(target.with_suffix(".ckpt")), target)
    return found["val_loss"], found["val_order_loss"]


@pytest.mark.parametrize(
    "layout", ["tp2pp2", *(pytest.param(name, marks=pytest.mark.full) for name in ("one", "tp2", "pp2"))]
)
def test_in_and_out_with_equal_losses(layout: str, tmp_path: Path) -> None:
    model, rows = theirs(**OPTIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), batch()
    model.save_pretrained(tmp_path / "in")
    results = run(_in_and_out, LAYOUTS[layout][0], layout, tmp_path / "in", tmp_path / "out", timeout=240)
    again = transformers.BertForPreTraining.from_pretrained(
        tmp_path / "out", dtype=torch.float64, attn_implementation="eager"
    )
    assert diff(tmp_path / "in", tmp_path / "out") == []
    for reference in (model.eval(), again.eval()):
        with torch.no_grad():
            answer = reference(rows.tokens.view(ROWS, LENGTH), token_type_ids=rows.token_types.view(ROWS, LENGTH))
        words = cross_entropy(answer.prediction_logits.flatten(0, 1), _labels()).item()
        order = cross_entropy(answer.seq_relationship_logits, rows.order).item()
        for found in results:
            assert found == pytest.approx((words, order), rel=1e-5)


def _labels() -> torch.Tensor:
    """Of all tokens; a batch has those of the masked ones alone."""
    found = batch()
    if found.rows is None or len(found.labels) == ROWS * LENGTH:
        return found.labels
    return torch.full((ROWS * LENGTH,), -100).index_copy(0, found.rows, found.labels)
