"""New weights for engines that run: texts go on with them or end before, nothing of the old ones is left."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import SamplingParams
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.hugging_face.export import export
from megalight.models.stored import held_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.serving import LLM, AsyncLLM, EngineOutput
from tests.support import interpreters

GREEDY = SamplingParams(temperature=0)
PROMPT = [5, 30, 41, *range(60, 90)]


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with other weights, and beside it a checkpoint of them, and folders that fit to no model here."""
    path = tmp_path_factory.mktemp("other")
    config = LLM(folder, device="cpu").served.model.config
    assert isinstance(config, GPTConfig)
    model = GPT(config)
    initialize(model, 2, "model.")
    export(held_model("gpt", config, model), path / "folder")
    Tokenizer.load(folder).save(path / "folder")
    save_model(held_model("gpt", config, model), path / "checkpoint")
    wide = GPT(GPTConfig.from_dict({**config.to_dict(), "hidden_size": 32}))
    initialize(wide, 3, "model.")
    save_model(held_model("gpt", wide.config, wide), path / "wide")
    return path


def tokens_of(folder: Path, prompt: list[int], count: int) -> list[int]:
    return LLM(folder, device="cpu").generate(prompt, GREEDY, max_new_tokens=count, ends=())[0].tokens


async def some(stream: AsyncIterator[EngineOutput], count: int | None = None) -> list[EngineOutput]:
    found: list[EngineOutput] = []
    async for part in stream:
        found.append(part)
        if count is not None and len(found) == count:
            break
    return found


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_texts_go_on_with_new_weights_from_the_tokens_that_they_have(folder: Path, other: Path, kind: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, device="cpu")
        old = tokens_of(folder, PROMPT, 40)
        stream = llm.generate(PROMPT, GREEDY, max_new_tokens=40)
        parts = await some(stream, 5)
        assert await llm.update_weights(other / kind) == 1
        parts += await some(stream)
        tokens = [token for part in parts for token in part.tokens]
        epochs = [part.weights_epoch for part in parts for _ in part.tokens]
        before = epochs.index(1)
        assert before >= 5
        assert tokens[:before] == old[:before]
        assert tokens[before:] == tokens_of(other / "folder", PROMPT + tokens[:before], 40 - before)
        assert tokens[before:] != old[before:]
        # No prefix of the old weights is found, and those of the new ones are.
        again = [await some(llm.generate(PROMPT, GREEDY, max_new_tokens=20)) for _ in range(2)]
        assert [sum(part.cached_tokens for part in each) for each in again][1] > 0
        for each in again:
            assert [token for part in each for token in part.tokens] == tokens_of(other / "folder", PROMPT, 20)
        assert llm.engines["0"].weights_epoch == 1
        await llm.shutdown()

    asyncio.run(main())


def test_texts_may_end_with_the_old_weights_while_others_wait(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, device="cpu")
        engine = llm.served.loop.engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
        first = asyncio.create_task(some(llm.generate(PROMPT, GREEDY, max_new_tokens=50)))
        await asyncio.sleep(0.01)
        update = asyncio.create_task(llm.update_weights(other / "folder", in_flight="wait"))
        async with asyncio.timeout(20):
            while llm._admits.is_set():
                await asyncio.sleep(0.001)
        assert not first.done()
        second = asyncio.create_task(some(llm.generate(PROMPT, GREEDY, max_new_tokens=50)))
        assert await update == 1
        for task, weights, epoch in ((first, folder, 0), (second, other / "folder", 1)):
            parts = await task
            assert [token for part in parts for token in part.tokens] == tokens_of(weights, PROMPT, 50)
            assert {part.weights_epoch for part in parts} == {epoch}
        await llm.pause()
        waits = asyncio.create_task(some(llm.generate(PROMPT, GREEDY, max_new_tokens=5)))
        await asyncio.sleep(0.01)
        with pytest.raises(ConfigurationError, match="wait for a resume"):
            await llm.update_weights(folder, in_flight="wait")
        with pytest.raises(ConfigurationError, match="in_flight is 'now'"):
            await llm.update_weights(folder, in_flight="now")  # type: ignore[arg-type]
        await llm.suspend()
        assert await llm.update_weights(folder) == 2
        await llm.resume()
        assert [token for part in await waits for token in part.tokens] == tokens_of(folder, PROMPT, 5)
        await llm.shutdown()

    asyncio.run(main())


def test_weights_of_another_model_change_nothing(folder: Path, other: Path, tmp_path: Path) -> None:
    llm = LLM(folder, device="cpu")
    before = {name: each.clone() for name, each in canonical_tensors(llm.served.model).items()}
    tensors = canonical_tensors(LLM(other / "folder", device="cpu").served.model)
    name = next(name for name, each in tensors.items() if each.ndim == 2)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in (other / "checkpoint").rglob("*"):
        if file.is_file():
            place = damaged / file.relative_to(other / "checkpoint")
            place.parent.mkdir(exist_ok=True, parents=True)
            place.write_bytes(file.read_bytes())
    largest = max((file for file in damaged.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    for weights, message in (
        (other / "wide", "another model.*hidden_size"),
        (tmp_path / "none", "none"),
        (damaged, "damaged"),
        ({**tensors, name: tensors[name][1:]}, "shapes in memory"),
        ({each: tensors[each] for each in tensors if each != name}, "not in memory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(weights)  # type: ignore[arg-type]
        assert all(torch.equal(each, before[key]) for key, each in canonical_tensors(llm.served.model).items())
    assert llm.update_weights(tensors) == 1, "the tensors of a trainer in this process"
    (found,) = llm.generate(PROMPT, GREEDY, max_new_tokens=20)
    assert found.tokens == tokens_of(other / "folder", PROMPT, 20)


def test_ranks_that_follow_read_them_too(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for key, value in interpreters.environment().items():
        monkeypatch.setenv(key, value)
    script = tmp_path / "split.py"
    script.write_text(SPLIT)
    done = subprocess.run(
        ["python", str(script), str(folder), str(other / "wide"), str(other / "checkpoint"), json.dumps(PROMPT)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=100,
        env=interpreters.environment(),
    )
    before, after, text = json.loads(done.stdout)
    assert len(text) == 3
    assert {*text} <= {*"hel"}, "each rank follows the grammar"
    assert before == tokens_of(folder, PROMPT, 20)
    assert after == tokens_of(other / "folder", PROMPT, 20)


SPLIT = """
import json, sys
from megalight.errors import CheckpointError
from megalight.inference import SamplingParams
from megalight.inference.grammar import GrammarSource
from megalight.serving import LLM, EngineRequest

llm = LLM(sys.argv[1], tensor_parallel=2, device="cpu")
found = []
for weights in (None, sys.argv[3]):
    if weights is not None:
        try:
            llm.update_weights(sys.argv[2])
        except CheckpointError:
            assert llm.update_weights(weights) == 1
    (output,) = llm.generate(json.loads(sys.argv[4]), SamplingParams(temperature=0), max_new_tokens=20)
    found.append(output.tokens)
loop = llm.served.loop
letters = GrammarSource("regex", "[hel]{3}")
loop.add(EngineRequest(id="letters", prompt=[5, 30], max_new_tokens=9, grammar=letters, seed=1))
found.append("")
while not loop.idle:
    found[-1] += "".join(output.text for output in loop.step())
print(json.dumps(found))
"""
