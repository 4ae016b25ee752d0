"""``megalight chat``: what it answers is what generation writes, and its commands change the conversation."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalight.cli.main import main
from megalight.cli.verbs import chat
from megalight.data.chat.template import ChatTemplate
from megalight.data.tokenizer import Tokenizer
from megalight.inference import TextGenerator
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.hugging_face.export import export
from megalight.models.stored import held_model
from megalight.nn.init import initialize
from megalight.serving import EngineLoop

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = Tokenizer.train(["user: hello\nassistant: naïve 東京 🙂"] * 9, 270)
    tokenizer.chat_template = TEMPLATE
    config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=270, max_sequence_length=96)
    model = GPT(config)
    initialize(model, 1, "model.")
    export(held_model("gpt", config, model), path)
    tokenizer.save(path)
    return path


def talk(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", str(folder), "--device", "cpu", "-n", "6", "-t", "0", *words])


def test_answers_follow_the_conversation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "said.jsonl"
    lines = ["hello", "and now?", f"/save {file}", "/system short", "hello", f"/save {file}", "/rest", "/quit", "never"]
    assert talk(folder, "\n".join(lines), monkeypatch) == 0
    printed, told = capsys.readouterr()
    writer = TextGenerator.from_checkpoint(folder)
    template = ChatTemplate.of(writer.tokenizer)
    expected = []

    def answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        prompt, ends = template.render(messages, answer=True), template.ends(writer.tokenizer)
        (text,) = writer.complete([prompt], max_new_tokens=6, temperature=0, ends=ends)
        expected.append(text)
        return [*messages, {"role": "assistant", "content": text}]

    first = answer([{"role": "user", "content": "hello"}])
    first = answer([*first, {"role": "user", "content": "and now?"}])
    second = answer([{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}])
    assert printed == "".join(text + "\n" for text in expected)
    assert [json.loads(line)["messages"] for line in file.read_text().splitlines()] == [first, second]
    assert "/rest is no command. Did you mean '/reset'?" in told


def test_ctrl_c_stops_the_answer_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, "a\n/reset\na", monkeypatch) == 0
    whole, again = capsys.readouterr().out.split("\n")[:2]
    assert whole == again
    parts, aborted = chat._Conversation._parts, []

    def stopped(self: Any, prompt: list[int]) -> Iterator[str]:
        found = parts(self, prompt)
        try:
            if len(aborted) < 2:
                yield next(found)
                raise KeyboardInterrupt
            yield from found
        finally:
            found.close()
            aborted.append(self)

    monkeypatch.setattr(chat._Conversation, "_parts", stopped)
    assert talk(folder, "a\n/reset\na\n/reset\na", monkeypatch) == 0
    printed, told = capsys.readouterr()
    first, second, third = printed.split("\n")[:3]
    assert whole.startswith(first)
    assert (first, third) == (second, whole)
    assert told.count("[stopped]") == 2
    engine = aborted[0].served.loop.engine
    assert engine.blocks.free == engine.blocks.count


def test_an_engine_that_fails_ends_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: EngineLoop) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(EngineLoop, "step", step)
    assert talk(folder, "a\nb", monkeypatch) != 0
    assert capsys.readouterr().err.count("the engine has stopped: out of memory") == 1


def test_a_message_that_is_too_long_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, f"{'long ' * 60}\nhello", monkeypatch) == 0
    printed, told = capsys.readouterr()
    assert "the model reads at most 96" in told
    assert printed.count("\n") == 1


def test_a_tokenizer_without_a_template_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Tokenizer.train(["hello"] * 9, 260).save(tmp_path / "bare")
    assert talk(folder, "hello", monkeypatch, "--tokenizer", str(tmp_path / "bare")) == 2
    assert "has no chat template" in capsys.readouterr().err
