"""A client of :mod:`benchmarks.serving`: sends the requests that it reads from its standard input, and says what came.

It imports little, as several of them start at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

Row = dict[str, Any]


class _Stream(asyncio.Protocol):
    """Sends one request, and notes when parts of its answer come."""

    def __init__(self, path: str, body: Row) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self._request = head.encode() + b"Connection: close\r\n\r\n" + data
        self._times, self._parts = list[float](), list[bytes]()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, port: int, at: float) -> Row:
        """Send it at a time of this clock; return what came."""
        await asyncio.sleep(at - time.monotonic())
        start = time.monotonic()
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", port)
        await self._ended
        whole = b"".join(self._parts)
        if b" 200 " not in whole[:20]:
            raise SystemExit(f"the server answers {whole[:300]!r}")
        usage = [json.loads(line[6:]) for line in whole.split(b"\n") if b'"completion_tokens"' in line]
        tokens = usage[-1]["usage"]["completion_tokens"] if usage else len(self._times) - 1
        return {"start": start, "times": self._times, "tokens": tokens}

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._times += [time.monotonic()] * data.count(b"data: {")
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set_result(None)


async def _load(settings: Row) -> list[Row]:
    """Send the requests of one process; return what they got, and then how long pauses took."""
    port = settings["port"]
    tasks = [
        asyncio.create_task(_Stream(settings["path"], body).run(port, at))
        for body, at in zip(settings["bodies"], settings["at"], strict=True)
    ]
    telling = asyncio.create_task(_tell(tasks)) if settings["tells"] else None
    pauses = [await _paused(port, at, settings["key"]) for at in settings["pauses"]]
    found = await asyncio.gather(*tasks)
    if telling is not None:
        telling.cancel()
    return [*found, {"pauses": pauses}]


async def _tell(tasks: list[asyncio.Task[Row]]) -> None:
    """Say every few seconds how many streams of this process have ended."""
    while True:
        await asyncio.sleep(5)
        print(f"  {sum(task.done() for task in tasks)} of {len(tasks)} streams of a client have ended", file=sys.stderr)


async def _paused(port: int, at: float, key: str) -> float:
    """Pause and resume the server; return the seconds until the pause was acknowledged."""
    await asyncio.sleep(at - time.monotonic())
    start = time.monotonic()
    await _control(port, "/pause", key)
    found = time.monotonic() - start
    await _control(port, "/resume", key)
    return found


async def _control(port: int, path: str, key: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 0\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n")
    answer = await reader.read()
    if b" 200 " not in answer[:20]:
        raise SystemExit(f"{path} answers {answer[:300]!r}")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_load(json.load(sys.stdin)))))
