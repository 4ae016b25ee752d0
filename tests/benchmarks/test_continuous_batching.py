"""The script that times the engine beside static batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import continuous_batching
from megalight.inference import DynamicEngine, generate
from megalight.models.gpt import GPT, GPTConfig


def test_both_complete_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=64, max_sequence_length=512))
    requests = continuous_batching.asks(5, 64, shrink=8)
    found: list[tuple[list[int], int]] = []
    monkeypatch.setattr(
        DynamicEngine, "add", lambda self, prompt, max_new_tokens: found.append((prompt, max_new_tokens))
    )
    continuous_batching.engine(model, requests, 2)
    assert found == requests
    batches: list[tuple[list[list[int]], int]] = []
    monkeypatch.setattr(
        continuous_batching,
        generate.__name__,
        lambda _, prompts, max_new_tokens: batches.append((prompts, max_new_tokens)),
    )
    continuous_batching.static(model, requests, 2)
    assert [prompt for prompts, _ in batches for prompt in prompts] == [ask.prompt for ask in requests]
    news = [ask.new for ask in requests]
    assert [new for _, new in batches] == [max(news[:2]), max(news[2:4]), news[4]]


def test_groups_have_one_prompt() -> None:
    requests = continuous_batching.asks(5, 4096)
    equal, other = continuous_batching.in_groups(requests, 2, 4096)
    assert [ask.prompt for ask in equal] == [requests[place].prompt for place in (0, 0, 2, 2, 4)]
    assert len({*map(tuple, (ask.prompt for ask in other))}) == 5
    assert [(len(ask.prompt), ask.new) for ask in other] == [(len(ask.prompt), ask.new) for ask in equal]
    assert [ask.new for ask in equal] == [ask.new for ask in requests]


def test_the_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert continuous_batching.main([str(tmp_path / "r.json"), "--tiny", "--repeats", "1", "--group", "4"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert [*result["tokens_per_second"]] == [
        "static, 4 at once",
        "engine, 4 at once",
        "engine, a fifth of the cache",
        "engine, 4 texts of each prompt",
        "engine, as long prompts that differ",
    ]
    assert min(result["tokens_per_second"].values()) > 0
    assert "tokens/s" in capsys.readouterr().out
