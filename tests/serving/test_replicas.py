"""Replicas in processes of their own: they answer as one model does, also when one of them is killed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
import torch

from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError, LayoutError, MegalightError
from megalight.inference import SamplingParams
from megalight.serving import LLM
from megalight.serving.engine_loop import EngineOptions
from tests.support import interpreters

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from megalight.cli.verbs.serve import uses_coordinator
from megalight.serving.replicas import ReplicatedLLM, _environments

pytestmark = pytest.mark.usefixtures("fast_interpreters")
GREEDY = SamplingParams(temperature=0)


def test_replicas_that_are_killed_lose_nothing(folder: Path) -> None:
    prompts = [[7 + number, 30, 41] for number in range(8)]
    expected = LLM(folder, device="cpu").generate(prompts, GREEDY, max_new_tokens=80, ends=())

    async def test() -> None:
        llm = ReplicatedLLM(folder, replicas=2, device="cpu", options=EngineOptions(max_sequences=4))
        try:

            async def one(prompt: list[int]) -> tuple[str, list[int]]:
                parts = [part async for part in llm.generate(prompt, GREEDY, max_new_tokens=80)]
                return "".join(part.text for part in parts), [token for part in parts for token in part.tokens]

            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
            await asyncio.sleep(0.1)
            coordinator, first, _ = llm._replicas._processes
            first.process.kill()
            found = await asyncio.gather(*tasks)
            assert found == [(each.text, each.tokens) for each in expected]
            # The coordinator and the engine are there again.
            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
            coordinator.process.kill()
            assert await asyncio.gather(*tasks) == found
            async with asyncio.timeout(30):
                while sorted(llm.engines) != ["0", "1"]:
                    await asyncio.sleep(0.05)
            await llm.suspend()
            waits = asyncio.create_task(one(prompts[0]))
            await asyncio.sleep(0.1)
            assert not waits.done()
            await llm.resume()
            assert await waits == found[0]
        finally:
            await llm.shutdown()
        assert all(each.process.poll() is not None for each in llm._replicas._processes)
        with pytest.raises(MegalightError, match="have stopped"):
            llm.subscribe([])

    asyncio.run(asyncio.wait_for(test(), 100))


@pytest.mark.full
def test_states_of_split_replicas_in_any_order_under_load_never_hang(folder: Path) -> None:
    prompts = [[7 + number, 30, 41] for number in range(12)]
    expected = LLM(folder, device="cpu").generate(prompts, GREEDY, max_new_tokens=80, ends=())

    async def test() -> None:
        llm = ReplicatedLLM(folder, replicas=2, tensor_parallel=2, device="cpu")
        try:

            async def one(prompt: list[int]) -> list[int]:
                parts = [part async for part in llm.generate(prompt, GREEDY, max_new_tokens=80)]
                return [token for part in parts for token in part.tokens]

            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
            client, chosen = llm._started(), random.Random(5)
            after = {"pause": {"PAUSED", "SUSPENDED"}, "suspend": {"SUSPENDED"}, "resume": {"RUNNING"}}
            for _ in range(20):
                name = chosen.choice(["pause", "unpause", "suspend", "resume"])
                assert await getattr(client, name)() in after.get(name, {"RUNNING", "SUSPENDED"})
                await asyncio.sleep(0.02)
            assert await client.resume() == "RUNNING"
            assert await asyncio.gather(*tasks) == [each.tokens for each in expected]
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 150))


def test_what_no_replica_can_load_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError):
        ReplicatedLLM(tmp_path / "none", replicas=2)
    with pytest.raises(ConfigurationError, match="replicas is 0"):
        ReplicatedLLM(folder, replicas=0)
    with pytest.raises(ConfigurationError, match="no adapter 'x'"):
        ReplicatedLLM(folder, replicas=2, device="cpu", adapter="x")


def test_the_server_starts_its_ranks_and_ends_them(folder: Path, tmp_path: Path) -> None:
    options = ["--replicas", "2", "--tensor-parallel", "2", "--device", "cpu", "--port", "0", "--name", "m"]
    with subprocess.Popen(
        ["megalight", "serve", str(folder), *options],
        env=interpreters.environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            ready = next(line for line in server.stderr if "http://" in line)
            body = {"model": "m", "prompt": "user: hello", "max_tokens": 12, "temperature": 0, "n": 4}
            request = urllib.request.Request(f"{ready.split()[-1]}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
            (expected,) = LLM(folder, device="cpu").generate("user: hello", GREEDY, max_new_tokens=12)
            assert [choice["text"] for choice in answer["choices"]] == [expected.text] * 4
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            # Nobody holds it any more: all of them have ended.
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()


def test_a_coordinator_is_used_on_gpus_for_several_replicas_and_by_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("USE_COORDINATOR", raising=False)
    assert [uses_coordinator(*each) for each in ((1, False), (2, False), (1, True))] == [False, True, True]
    monkeypatch.setenv("USE_COORDINATOR", "1")
    assert uses_coordinator(1, False)
    monkeypatch.setenv("USE_COORDINATOR", "0")
    assert not uses_coordinator(1, True)
    assert main(["serve", str(folder), "--replicas", "2"]) == 2
    assert "USE_COORDINATOR is '0' and --replicas 2" in capsys.readouterr().err


def test_replicas_have_the_gpus_from_the_named_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = _environments(1, 2, torch.device("cuda:1"))
    assert found == [{"CUDA_VISIBLE_DEVICES": "5,6"}]
    with pytest.raises(LayoutError, match="need 4, and there are 3"):
        _environments(2, 2, torch.device("cuda:1"))
