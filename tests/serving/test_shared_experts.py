"""Replicas that share experts, behind a coordinator: they step together, and change together."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalight.cli.main import main
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, LayoutError
from megalight.inference import SamplingParams
from megalight.models.gpt import GPT
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.serving import LLM
from tests.parallel.expert.model import CONFIG
from tests.support import interpreters

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from megalight.serving.replicas import ReplicatedLLM

pytestmark = pytest.mark.usefixtures("fast_interpreters")
INTERPRETER = sys.executable
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[7 + number, 30, 41] for number in range(10)]
FULL = [
    pytest.param(replicas, {"tensor_parallel": tensor, "expert_parallel": experts}, marks=pytest.mark.full)
    for replicas, tensor, experts in ((2, 2, 4), (2, 2, 2), (4, 1, 2), (3, 1, 3))
]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with experts, and their tokenizer."""
    path = tmp_path_factory.mktemp("experts")
    Tokenizer.train(["user: hello\nassistant: naïve 東京"] * 9, 270).save(path)
    files = {"tokenizer.json": (path / "tokenizer.json").read_bytes()}
    config = replace(CONFIG, vocab_size=272, max_sequence_length=96, moe=replace(CONFIG.moe, num_experts=12))  # type: ignore[type-var]
    for number in (1, 2):
        model = GPT(config)
        initialize(model, number, "model.")
        save_model(replace(held_model("gpt", config, model.to(torch.float64)), files=files), path / str(number))
    return path


def expected(folder: Path, count: int = 60) -> list[list[int]]:
    outputs = LLM(folder, device="cpu").generate(PROMPTS, GREEDY, max_new_tokens=count, ends=())
    return [each.tokens for each in outputs]


async def one(llm: ReplicatedLLM, prompt: list[int], count: int = 60) -> list[int]:
    parts = [part async for part in llm.generate(prompt, GREEDY, max_new_tokens=count)]
    return [token for part in parts for token in part.tokens]


def test_one_that_is_idle_takes_part_in_steps_of_the_other(experts: Path) -> None:
    texts = expected(experts / "1")

    async def test() -> None:
        llm = ReplicatedLLM(experts / "1", replicas=2, expert_parallel=2, device="cpu")
        try:
            assert await one(llm, PROMPTS[0]) == texts[0]  # the other one has nothing
            assert sorted(llm.engines) == ["0", "1"]
            assert await asyncio.gather(*(one(llm, prompt) for prompt in PROMPTS)) == texts
            tasks = [asyncio.create_task(one(llm, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.1)
            # All read, or none.
            with pytest.raises(CheckpointError):
                await llm.update_weights(experts / "none")
            assert await asyncio.gather(*tasks) == texts
            await llm.suspend()
            waits = asyncio.create_task(one(llm, PROMPTS[0], 20))
            assert await llm.update_weights(experts / "2") == 1
            assert not waits.done()
            await llm.resume()
            assert await waits == expected(experts / "2", 20)[0]
            # One is killed: both are started again, with the new weights, and texts go on.
            tasks = [asyncio.create_task(one(llm, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.1)
            llm._replicas._processes[2].process.kill()
            assert await asyncio.gather(*tasks) == expected(experts / "2")
            assert await llm._started().stop() == "STOPPED"
        finally:
            await llm.shutdown()
        assert all(each.process.poll() is not None for each in llm._replicas._processes)

    asyncio.run(asyncio.wait_for(test(), 100))


@pytest.mark.parametrize(("replicas", "degrees"), [(2, {"expert_parallel": 2}), *FULL])
def test_states_in_any_order_under_load_never_hang(experts: Path, replicas: int, degrees: dict[str, int]) -> None:
    texts = expected(experts / "1")

    async def test() -> None:
        llm = ReplicatedLLM(experts / "1", replicas=replicas, device="cpu", **degrees)
        try:
            tasks = [asyncio.create_task(one(llm, prompt)) for prompt in PROMPTS]
            client, chosen = llm._started(), random.Random(5)
            after = {"pause": {"PAUSED", "SUSPENDED"}, "suspend": {"SUSPENDED"}, "resume": {"RUNNING"}}
            for _ in range(30 if replicas > 2 or len(degrees) > 1 else 12):
                name = chosen.choice(["pause", "unpause", "suspend", "resume", "update"])
                if name == "update":
                    await llm.update_weights(experts / "1")
                else:
                    assert await getattr(client, name)() in after.get(name, {"RUNNING", "SUSPENDED"})
                await asyncio.sleep(chosen.random() / 30)
                tasks.append(asyncio.create_task(one(llm, prompt := chosen.choice(PROMPTS))))
                texts.append(texts[PROMPTS.index(prompt)])
            assert await client.resume() == "RUNNING"
            assert await asyncio.gather(*tasks) == texts
            tasks = [asyncio.create_task(one(llm, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.05)
            assert await client.stop() == "STOPPED"
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all("have stopped" in str(each) for each in ends)
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 150))


@pytest.mark.full
def test_one_that_is_silent_for_a_while_comes_again(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", INTERPRETER)  # signals must reach it
    texts = expected(experts / "1")

    async def test() -> None:
        llm = ReplicatedLLM(experts / "1", replicas=2, expert_parallel=2, device="cpu")
        try:
            tasks = [asyncio.create_task(one(llm, prompt)) for prompt in PROMPTS]
            client, chosen = llm._started(), random.Random(7)
            for turn in range(6):
                process = chosen.choice(llm._replicas._processes[1:]).process
                process.send_signal(signal.SIGSTOP)
                changes = [("update", "suspend"), ("pause", "update"), ("suspend", "resume")][turn % 3]
                told = [
                    llm.update_weights(experts / "1") if name == "update" else getattr(client, name)()
                    for name in changes
                ]
                waits = [asyncio.create_task(each) for each in told]
                await asyncio.sleep(chosen.choice([0.5, 2.5, 3.5]))
                process.send_signal(signal.SIGCONT)
                await asyncio.gather(*waits)
                tasks.append(asyncio.create_task(one(llm, PROMPTS[turn])))
            assert await client.resume() == "RUNNING"
            assert await asyncio.gather(*tasks) == [*texts, *texts[:6]]
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_degrees_must_fit(experts: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LayoutError, match="needs 2 replicas"):
        ReplicatedLLM(experts / "1", replicas=3, expert_parallel=2, device="cpu")
    with pytest.raises(LayoutError, match="do not divide each other"):
        ReplicatedLLM(experts / "1", replicas=3, tensor_parallel=2, expert_parallel=3, device="cpu")
    with pytest.raises(LayoutError, match="there are none"):
        ReplicatedLLM(folder, replicas=2, expert_parallel=2, device="cpu")
    assert main(["serve", str(experts / "1"), "--expert-parallel", "2"]) == 2
    assert "--replicas 2" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--replicas=2"], pytest.param(["--tensor-parallel=2"], marks=pytest.mark.full)])
def test_the_server_shares_experts(experts: Path, options: list[str]) -> None:
    words = ["megalight", "serve", str(experts / "1"), "--expert-parallel=2", "--device=cpu", "--port=0", *options]
    with subprocess.Popen(words, env=interpreters.environment(), stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            ready = next(line for line in server.stderr if "http://" in line)
            body = {"model": "1", "prompt": PROMPTS, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
            request = urllib.request.Request(f"{ready.split()[-1]}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
            assert [choice["token_ids"] for choice in answer["choices"]] == expected(experts / "1", 20)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()
