"""From rows of conversations to a model that answers: first all weights, then adapters of the frozen result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import pytest

from megalight.callbacks import Adapters
from megalight.cli.main import main
from megalight.data.chat.module import SFTDataModule
from megalight.data.chat.template import ChatTemplate
from megalight.inference import generate
from megalight.models.gpt import GPTConfig, GPTModule
from megalight.optim import AdamConfig, Constant
from megalight.strategies import MegatronStrategy
from tests.data.chat.conftest import MARKED, chat

CAPITALS = {"Peru": "Lima", "Cuba": "Havana", "Oman": "Muscat", "Iran": "Tehran"}
TURNED = dict(zip(CAPITALS, reversed(CAPITALS.values()), strict=True))
SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "max_sequence_length": 96}


def answers(module: GPTModule, data: SFTDataModule) -> dict[str, str]:
    """What the model says to each question, token by token without chance."""
    template, found = ChatTemplate.of(data.tokenizer), {}
    assert module.model is not None
    for country in CAPITALS:
        question = template.render(chat(f"capital of {country}?")["messages"], answer=True)
        prompt, end = data.tokenizer.encode(question), data.tokenizer.eod_id
        (said,) = generate(module.model, [prompt], max_new_tokens=12, temperature=0.0, eos_id=end)
        found[country] = data.tokenizer.decode(said, skip_special=True)
    return found


@pytest.mark.full
def test_a_fine_tuned_model_answers(prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fit(facts: Mapping[str, str], lr: float, *callbacks: pl.Callback, weights: Path | None = None) -> pl.Trainer:
        rows = [chat(f"capital of {country}?", city) for country, city in facts.items()] * 10
        prefix = prepared(rows, facts["Peru"], template=MARKED).prefix
        data = SFTDataModule(data=prefix, split="1", global_batch_size=4, sequence_length=96)
        config = None if weights else GPTConfig(**SIZES, vocab_size=data.tokenizer.vocab_size)
        optimizer = AdamConfig(lr=lr, weight_decay=0.0, schedule=Constant(warmup=5))
        module = GPTModule(config, weights=weights and str(weights), optimizer=optimizer, seed=1)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=MegatronStrategy(), callbacks=list(callbacks), max_steps=60,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(module, data)
        assert answers(module, data) == facts
        return trainer

    fit(CAPITALS, 3e-3).save_checkpoint(tmp_path / "base.ckpt")
    capsys.readouterr()
    questions = [word for country in ("Cuba", "Oman") for word in ("--prompt", f"capital of {country}?")]
    assert main(["generate", str(tmp_path / "base.ckpt"), "--chat", "-t", "0", "-n", "12", *questions]) == 0
    assert capsys.readouterr().out.split() == ["Havana", "Muscat"]
    fit(TURNED, 1e-2, Adapters(rank=8, alpha=16.0), weights=tmp_path / "base.ckpt")
