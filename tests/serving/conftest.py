"""A small chat model that tests of this folder serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megalight.data.tokenizer import Tokenizer
from megalight.models.gpt import GPT, GPTConfig, InitConfig
from megalight.models.hugging_face.export import export
from megalight.models.stored import held_model
from megalight.nn.init import initialize
from tests.support import interpreters

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    tokenizer = Tokenizer.train(["user: hello\nassistant: naïve 東京 🙂"] * 9, 270)
    tokenizer.chat_template = TEMPLATE
    config = GPTConfig(
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        vocab_size=272,
        max_sequence_length=96,
        init=InitConfig(std=0.4),
    )
    model = GPT(config)
    initialize(model, 1, "model.")
    export(held_model("gpt", config, model.to(torch.float32)), path)
    tokenizer.save(path)
    return path


@pytest.fixture
def fast_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that a test starts have interpreters that are ready."""
    for name, value in interpreters.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(interpreters.commands() / "python"))
