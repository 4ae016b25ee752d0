"""Bodies that nobody means, clients that go, senders that are slow: the server answers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.serving.test_server import HELLO, SCHEMA, SCOPE, TOOL, Served, asked, run

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "small", "prompt": "user: ", "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1, "n": 2},
        {"model": "small", "prompt": [[1, 2], [3]], "max_tokens": 2, "logit_bias": {"5": 1}, "stop": "a"},
        {"model": "small", "prompt": ["a", "b"], "max_tokens": 1, "echo": True, "stream": True, "stop_token_ids": [3]},
        {"model": "small", "prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "a|b"}, "min_p": 0.1},
    ],
    "/v1/chat/completions": [
        {"model": "small", "messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "user": "me"},
        {"model": "small", "messages": HELLO, "max_tokens": 2, "stream": True, "tool_choice": "none", "tools": [TOOL]},
        {"model": "small", "messages": HELLO, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto"},
        {"model": "small", "messages": HELLO, "max_tokens": 2,
         "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ],
    "/tokenize": [{"prompt": "naïve 東京"}, {"messages": HELLO}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 10**9, 2**63, 2**64, -(2**70), 0.5, 1e308, -0.0, "", "a", "\x00", "🙂" * 50, [],
    {}, [[]], [[[]]], {"a": {"b": []}}, ["a", 1], "x" * 5000, list(range(300)), {"type": "object"}, {"$ref": "#"},
]  # fmt: skip


def mutated(value: Any, random: random.Random, chance: float = 0.15) -> Any:
    if random.random() < chance:
        return random.choice(VALUES)
    if isinstance(value, dict):
        found = {key: mutated(each, random, chance) for key, each in value.items() if random.random() > chance / 4}
        if random.random() < chance / 4:
            names = ["n", "stop", "tools", "logprobs", "prompt", "x", "\ud800", "suffix"]
            found[random.choice(names)] = random.choice(VALUES)
        return found
    return [mutated(each, random, chance) for each in value] if isinstance(value, list) else value


def body_of(random: random.Random) -> tuple[str, bytes]:
    path = random.choice([*BODIES])
    data = json.dumps(mutated(random.choice(BODIES[path]), random, random.choice([0.02, 0.15, 0.4]))).encode()
    for _ in range(random.choice([0, 0, 0, 1, 3])):
        place = random.randrange(len(data) + 1)
        part = random.choice([b"", b"\xff", b"{", b"[" * 500, b"NaN", b"1e999", b'"', b"\\ud800", data[:place]])
        data = data[:place] + part + data[place + random.choice([0, 1, 5]) :]
    return path, data


async def answered(served: Served, path: str, data: bytes) -> tuple[int, bytes]:
    """The status and the body, without a client in between."""
    parts, sent = [{"type": "http.request", "body": data}], list[Any]()

    async def receive() -> Any:
        while not parts:
            await asyncio.sleep(60)
        return parts.pop()

    async def keep(message: Any) -> None:
        sent.append(message)

    await served.app({**SCOPE, "path": path, "raw_path": path.encode()}, receive, keep)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def memory() -> int:
    """Bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def fuzz(served: Served, count: int, seed: int) -> Counter[int]:
    numbers, statuses = random.Random(seed), Counter[int]()
    limit = asyncio.Semaphore(16)

    async def one(path: str, data: bytes) -> None:
        async with limit:
            status, text = await asyncio.wait_for(answered(served, path, data), 60)
        statuses[status] += 1
        assert status in (200, 400, 404), (path, data[:2000], status, text)
        assert b"Traceback" not in text
        assert b".py" not in text
        if status != 200:
            error = json.loads(text)["error"]
            assert error["message"], data
            assert len(error["message"]) < 2000, data
        elif text.startswith(b"data:"):
            assert text.endswith(b"data: [DONE]\n\n")

    for _ in range(0, count, 1000):
        await asyncio.gather(*(one(*body_of(numbers)) for _ in range(min(count, 1000))))
    return statuses


def test_mutated_bodies_are_answered(folder: Path) -> None:
    async def test(served: Served) -> None:
        statuses = await fuzz(served, 200, 1)
        assert statuses[200] > 10
        assert statuses[400] > 50

    run(folder, test)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_mutated_bodies_and_disconnects_leave_nothing_behind(folder: Path) -> None:
    count = int(os.environ.get("MEGALIGHT_FUZZ", "100000"))

    async def test(served: Served) -> None:
        statuses = await fuzz(served, count // 5, 2)
        before = memory()
        statuses += await fuzz(served, count - count // 5, 3)
        for number in range(1000):
            body = {"model": "small", "prompt": "a", "ignore_eos": True, "max_tokens": 90, "stream": True, "n": 2}
            sent: list[Any] = []
            async with asked(served, body, sent) as gone:
                while len(sent) < 1 + number % 5:
                    await asyncio.sleep(0)
                gone.set()
        growth = memory() / before - 1
        print(f"{dict(statuses)}, memory {growth:+.2%}")
        assert growth < 0.02

    run(folder, test, seconds=3600)


@pytest.mark.full
def test_slow_senders_keep_nobody_from_answers(folder: Path) -> None:
    import uvicorn

    async def test(served: Served) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(served.app, lifespan="off", log_level="error"))
        task = asyncio.create_task(server.serve([listener]))
        port = listener.getsockname()[1]
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for number, (_, writer) in enumerate(slow):
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
            writer.write((head + ("\r\n{" if number % 2 else "X: ")).encode())
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"small" in await asyncio.wait_for(reader.read(), 5)
        ended = await asyncio.wait_for(slow[1][0].read(), 10)
        assert ended.startswith(b"HTTP/1.1 408")
        for _, each in [*slow, (reader, writer)]:
            each.close()
        server.should_exit = True
        await task

    run(folder, test, body_seconds=1)
