"""Completions from Python: many prompts at once, and requests that come at any time, give what each gives alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalight.data.chat.template import ChatTemplate
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, LayoutError, MegalightError
from megalight.evaluation import Continuation, log_likelihoods
from megalight.inference import SamplingParams, TextGenerator, TextRequest
from megalight.models.eagle import DraftModel, EagleConfig
from megalight.models.gpt import GPT, GPTConfig, GPTModule
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.serving import LLM, AsyncLLM, EngineOutput, EngineRequest
from tests.support import interpreters

GREEDY = SamplingParams(temperature=0)
PROMPTS = ["user: hello", "naïve", "", "東京 🙂"]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype=torch.float64)


@pytest.fixture(scope="module")
def writer(folder: Path) -> TextGenerator:
    return TextGenerator.from_checkpoint(folder, dtype=torch.float64)


def test_completions_are_those_of_each_prompt_alone(llm: LLM, writer: TextGenerator) -> None:
    found = llm.generate(PROMPTS, GREEDY, max_new_tokens=12, log_probs=True)
    expected = list(
        writer.complete_each(
            [TextRequest(prompt=each, max_new_tokens=12, sampling_params=GREEDY, log_probs=True) for each in PROMPTS]
        )
    )
    for prompt, output, other in zip(PROMPTS, found, expected, strict=True):
        assert (output.text, output.tokens, output.reason) == (other.text, other.tokens, other.reason)
        assert output.log_probs == pytest.approx(other.log_probs)
        assert output.usage["prompt_tokens"] == len(llm.served.ids_of(prompt))
        assert output.usage["total_tokens"] == output.prompt_tokens + len(output.tokens)
    assert len({output.text for output in found}) > 1


def test_a_draft_changes_no_text(folder: Path, tmp_path: Path) -> None:
    config = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=272, max_sequence_length=64)
    base, draft = GPT(config), DraftModel(EagleConfig(auxiliary_layers=(1,), std=0.3).for_base(config))
    for name, kind, model in (("base", "gpt", base), ("draft", "eagle", draft)):
        initialize(model, 0)
        save_model(held_model(kind, model.config, model), tmp_path / name)
    plain, drafted = (
        LLM(tmp_path / "base", device="cpu", dtype=torch.float64, tokenizer=folder, **more)
        for more in ({}, {"draft": tmp_path / "draft", "num_speculative_tokens": 3})
    )
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    prompts = [[1, 2, 3], [4]]
    found, expected = ([each.tokens for each in llm.generate(prompts, **options)] for llm in (drafted, plain))
    assert found == expected
    assert len(drafted.served.loop.status.drafted) == 3
    with pytest.raises(ConfigurationError, match="holds a gpt model, and a draft is of the family eagle"):
        LLM(tmp_path / "base", device="cpu", tokenizer=folder, draft=tmp_path / "base").generate([1])


def test_prompts_may_be_ids_or_one_text(llm: LLM) -> None:
    ids = llm.served.ids_of(PROMPTS[0])
    (text,) = llm.generate(PROMPTS[0], GREEDY, max_new_tokens=5)
    for same in (ids, [ids], np.array([ids]), torch.tensor(ids)):
        (found,) = llm.generate(same, GREEDY, max_new_tokens=5)  # type: ignore[arg-type]
        assert (found.text, found.tokens) == (text.text, text.tokens)
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_sampling_and_seeds_repeat(llm: LLM) -> None:
    hot = SamplingParams(temperature=2)
    mixed = llm.generate(["a", "a", "a"], [GREEDY, hot, hot], max_new_tokens=8, seed=4)
    assert mixed[0].tokens == llm.generate("a", GREEDY, max_new_tokens=8)[0].tokens
    assert mixed[1].tokens == llm.generate("a", hot, max_new_tokens=8, seed=5)[0].tokens
    assert mixed[2].tokens == llm.generate("a", hot, max_new_tokens=8, seed=6)[0].tokens
    with pytest.raises(DataError, match="3 prompts and 1 sampling_params"):
        llm.generate(["a", "b", "c"], [hot])


def test_a_stop_text_ends_a_completion_in_front_of_it(llm: LLM) -> None:
    (whole,) = llm.generate("user: hello", GREEDY, max_new_tokens=20)
    stop = whole.text[5:8]
    (found,) = llm.generate("user: hello", GREEDY, max_new_tokens=20, stop=[stop, "never"], log_probs=True)
    assert found.reason == "stop"
    assert found.text == whole.text[: whole.text.index(stop)]
    assert found.tokens == whole.tokens[: len(found.tokens)]
    assert found.log_probs is not None
    assert len(found.log_probs) == len(found.tokens) < len(whole.tokens)


def test_conversations_are_written_by_the_template(llm: LLM, writer: TextGenerator) -> None:
    talks = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "naïve?"}]]
    template = ChatTemplate.of(writer.tokenizer)
    prompts = [template.render(talk, answer=True) for talk in talks]
    expected = writer.complete(prompts, max_new_tokens=9, temperature=0, ends=template.ends(writer.tokenizer))
    assert [each.text for each in llm.chat(talks, GREEDY, max_new_tokens=9)] == expected
    assert [each.text for each in llm.chat(talks[0], GREEDY, max_new_tokens=9)] == expected[:1]


def test_scores_are_log_likelihoods(llm: LLM, writer: TextGenerator) -> None:
    pair = Continuation(writer.tokenizer.encode("user: "), writer.tokenizer.encode("hello"))
    assert llm.score(["user: "], ["hello"]) == log_likelihoods(writer.whole, [pair])
    (greedy,) = llm.generate("user: ", GREEDY, max_new_tokens=3, log_probs=True)
    (score,) = llm.score(["user: "], [greedy.tokens])
    assert score.greedy
    assert score.total == pytest.approx(sum(greedy.log_probs or []))
    with pytest.raises(DataError, match="1 prompts and 2 completions"):
        llm.score(["a"], ["b", "c"])


def test_what_cannot_run_is_refused_and_leaves_nothing_behind(llm: LLM, folder: Path) -> None:
    blocks = llm.served.loop.engine.blocks
    before = blocks.free
    for prompts, options, message in (
        (["a", [999]], {}, "token 999 is outside"),
        (["a", "b" * 500], {}, "max_sequence_length"),
        (["a", [1.5]], {}, "token ids"),
        (["a"], {"stop": ""}, "stop is ''"),
        (["a"], {"stop": ["\ud800"]}, "stop is"),
        (["a\ud800"], {}, "surrogate"),
        (["a"], {"seed": -1}, "seed is -1"),
        (["a"], {"ends": [-1]}, "eos_id"),
    ):
        with pytest.raises((DataError, ConfigurationError), match=message):
            llm.generate(prompts, **options)
        assert (llm.served.loop.idle, blocks.free) == (True, before)


def test_other_processes_than_torchrun_has_started_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LayoutError, match="tensor_parallel is 2, and there are 3 processes"):
        LLM(folder, tensor_parallel=2)


DIVIDED = """
import json, sys, torch
from megalight.inference import SamplingParams
from megalight.serving import LLM

llm = LLM(sys.argv[1], tensor_parallel=2, device="cpu", dtype=torch.float64)
greedy = SamplingParams(temperature=0)
outputs = llm.generate(json.loads(sys.argv[2]), greedy, max_new_tokens=12, log_probs=True)
scores = llm.score(["user: "], ["hello"])
(again,) = llm.generate("user: hello", greedy, max_new_tokens=12, stop=outputs[0].text[5:8])
llm.suspend()
print(json.dumps([[[each.text, each.log_probs] for each in outputs], scores, again.text]))
"""


def test_a_model_over_two_processes_is_that_of_one(llm: LLM, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "divided.py").write_text(DIVIDED)
    done = subprocess.run(
        ["python", "divided.py", str(folder), json.dumps(PROMPTS)],
        cwd=tmp_path,
        env=interpreters.environment(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    outputs, scores, again = json.loads(done.stdout)
    expected = llm.generate(PROMPTS, GREEDY, max_new_tokens=12, log_probs=True)
    assert [text for text, _ in outputs] == [each.text for each in expected]
    for (_, log_probs), each in zip(outputs, expected, strict=True):
        assert log_probs == pytest.approx(each.log_probs, abs=1e-9)
    assert scores[0] == pytest.approx(llm.score(["user: "], ["hello"])[0])
    assert expected[0].text.startswith(again)
    assert len(again) <= 5


def test_a_module_generates_between_steps_with_the_weights_it_has_then(folder: Path) -> None:
    module = GPTModule(weights=folder)
    module.configure_model()
    tokenizer = Tokenizer.load(folder)
    llm = LLM.from_module(module, tokenizer)
    module.train()
    (first,) = llm.generate("user: hello", GREEDY, max_new_tokens=6)
    assert (module.training, module.model.training) == (True, True)
    assert llm.served.loop.engine.suspended
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.mul_(-0.5)
    (second,) = llm.generate("user: hello", GREEDY, max_new_tokens=6)
    assert first.tokens != second.tokens
    (again,) = LLM.from_module(module).generate([tokenizer.encode("user: hello")], GREEDY, max_new_tokens=6)
    assert (again.tokens, again.text) == (second.tokens, "")
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        LLM.from_module(module).generate("text")


def test_requests_come_and_go_at_any_time(llm: LLM, folder: Path) -> None:
    expected = llm.generate(PROMPTS, GREEDY, max_new_tokens=12, log_probs=True)

    async def one(server: AsyncLLM, prompt: str, wait: int) -> list[EngineOutput]:
        for _ in range(wait):
            await asyncio.sleep(0)
        return [part async for part in server.generate(prompt, GREEDY, max_new_tokens=12, log_probs=True)]

    async def leave(server: AsyncLLM) -> None:
        async for _ in server.generate("a", GREEDY, max_new_tokens=80):
            break

    async def main() -> None:
        server = AsyncLLM(folder, device="cpu", dtype=torch.float64)
        found = await asyncio.gather(*(one(server, each, 7 * k) for k, each in enumerate(PROMPTS)), leave(server))
        for parts, output in zip(found[:-1], expected, strict=True):
            assert parts is not None
            assert "".join(part.text for part in parts) == output.text
            assert [token for part in parts for token in part.tokens] == output.tokens
            assert parts[-1].reason == output.reason
            log_probs = [each for part in parts for each in part.log_probs or []]
            assert log_probs == pytest.approx(output.log_probs or [])
            assert len(parts) > 3
            assert not any(part.last for part in parts[:-1])
        with pytest.raises(DataError, match="max_sequence_length"):
            await one(server, "b" * 500, 0)
        await server.suspend()
        task = asyncio.create_task(one(server, PROMPTS[0], 0))
        await asyncio.sleep(0.05)
        assert not task.done()
        await server.resume()
        assert "".join(part.text for part in await task) == expected[0].text
        loop = server.served.loop
        assert loop.idle
        assert loop.engine.blocks.free == loop.engine.blocks.count
        await server.shutdown()
        with pytest.raises(MegalightError, match="has stopped"):
            await one(server, "a", 0)

    asyncio.run(main())


def test_an_error_of_a_step_ends_all_streams_with_its_cause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        server = AsyncLLM(folder, device="cpu")
        engine, broken = server.served.loop.engine, RuntimeError("out of memory")
        step = engine.step

        def fails() -> Any:
            if len(engine.unfinished) > 1:
                raise broken
            return step()

        monkeypatch.setattr(engine, "step", fails)
        endless = EngineRequest(id="x", prompt=[5], max_new_tokens=90, sampling_params=GREEDY)
        parts = server.submit(endless)
        await anext(parts)
        with pytest.raises(ConfigurationError, match="'x' runs already"):
            await anext(server.submit(endless))
        with pytest.raises(MegalightError, match="request is lost") as caught:
            [_ async for _ in server.generate("second")]
        assert caught.value.__cause__ is broken
        with pytest.raises(MegalightError):
            [_ async for _ in parts]
        await asyncio.wait_for(server.failed.wait(), 1)
        assert server.failure is broken
        await server.shutdown()

    asyncio.run(main())
