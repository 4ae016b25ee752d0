from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalight.data.chat.module import SFTDataModule
from tests.data.chat.conftest import chat
from tests.data.gpt.test_module import Reader, every_step, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*when using `ckpt_path`, callbacks used:UserWarning"
)


class Rows(Reader):
    """Writes down whole rows: the first tokens of conversations are all equal."""

    def note(self, stage: str, batch: Any) -> Any:
        self.rows[stage].append([hash(tuple(row)) for row in batch.tokens.tolist()])
        return self.layer(self.layer.weight).sum()


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"max_steps": 5}, 5), ({"max_steps": 2, "accumulate_grad_batches": 2}, 4), ({"max_epochs": 2}, 4)],
)
def test_resume_after_any_step(prepared, tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    prefix = prepared([chat("q" * (1 + k % 9), "a" * (1 + k % 4)) for k in range(20)]).prefix

    def read(checkpoint: Path | None = None, **more: Any) -> list[list[int]]:
        reader = Rows()
        data = SFTDataModule(data=prefix, split="1", global_batch_size=2, sequence_length=96)
        if "max_epochs" in options:
            data.samples["train"] = 4
        trainer(**options, **more).fit(reader, data, ckpt_path=checkpoint)
        return reader.rows["train"]

    full = read(callbacks=[every_step(tmp_path / "saved")])
    assert len(full) == steps
    assert len({tuple(row) for row in full}) > 1
    saved = sorted((tmp_path / "saved").iterdir(), key=lambda path: int(path.stem.partition("=")[2]))
    for step, path in enumerate(saved, 1):
        assert read(path) == full[step * options.get("accumulate_grad_batches", 1) :], step
