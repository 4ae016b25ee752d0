"""The example that counts right answers: a model that knows its pictures by heart answers all, and no others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.source import ROOT

EXAMPLES = ROOT / "examples"
PICTURES, DATA = "runs/vlm/pictures", "runs/vlm/data"
ASK = (f"{EXAMPLES / 'picture_answers.py'}", "runs/vlm/checkpoints", PICTURES)


def test_the_template_reads_parts_as_places_in_a_text(tmp_path: Path) -> None:
    """As processors of ``transformers`` give them to the template of an exported folder."""
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers")
    run_program(f"{EXAMPLES / 'pictures.py'}", PICTURES, "--count", "2", "--held-out", "1", folder=tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / PICTURES / "tokenizer")
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True, tokenize=False)
        for each in (parts, "<image>What is this?")
    ]
    assert texts == ["<|user|><image>What is this?<|endoftext|><|assistant|>"] * 2


@pytest.mark.full
def test_right_answers_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    run_program(f"{EXAMPLES / 'pictures.py'}", PICTURES, "--count", "8", "--held-out", "4", folder=tmp_path)
    drawn = tmp_path / PICTURES
    # Eight pictures are too few to learn from, but few enough to know by heart.
    shutil.copy(drawn / "train.json", drawn / "held_out.json")
    for part in ("train", "held_out"):
        words = ["--multimodal", f"{PICTURES}/{part}.json", "--output", f"{DATA}/{part}", "--quiet"]
        run_program("megalight", "prepare", *words, "--tokenizer", f"{PICTURES}/tokenizer", folder=tmp_path)
    short = {"trainer.max_steps": 120, "trainer.val_check_interval": 120, "data.global_batch_size": 4}
    options = [f"--{key}={value}" for key, value in {**short, "trainer.strategy.micro_batch_size": 4}.items()]
    run_program("megalight", "fit", "--config", f"{ROOT}/recipes/vlm.yaml", *options, folder=tmp_path)
    printed = run_program(*ASK, "--at-least", "1", folder=tmp_path)
    assert re.search(r"step=120|last", printed)
    assert "8 of 8 right (100.0%)" in printed
    rows = json.loads((drawn / "train.json").read_text())
    # Each question with the picture of another answer.
    answers = [row["conversations"][1]["value"] for row in rows]
    other = [next(row["image"] for row, said in zip(rows, answers, strict=True) if said != own) for own in answers]
    (drawn / "held_out.json").write_text(
        json.dumps([{**row, "image": image} for row, image in zip(rows, other, strict=True)])
    )
    with pytest.raises(AssertionError, match=r"fewer than 90\.0% are right") as failed:
        run_program(*ASK, "--at-least", "0.9", folder=tmp_path)
    assert "0 of 8 right (0.0%)" in str(failed.value)
    assert " instead of " in str(failed.value)
