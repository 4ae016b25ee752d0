"""Grammars of strangers, tried in a process of its own: some take minutes or gigabytes to compile.

:class:`GrammarWorker` starts this file as a program, which imports ``llguidance`` alone. It compiles each grammar, and
finds the tokens that it may begin with. Whoever passes compiles as fast in the server.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


class GrammarWorker:
    """A process that tries grammars, one at a time. It starts with the first, and again after one that was too large.

    Args:
        tokenizer: the ``tokenizer.json``, as text.
        ends: tokens that end a text.
        seconds: time for one grammar.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, ends: list[int], *, seconds: float = 2.0, memory_bytes: int = 2 * 2**30
    ) -> None:
        self._settings = [tokenizer, vocab_size, ends, memory_bytes]
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def fault(self, kind: str, text: str) -> str | None:
        """Return what is wrong with a grammar, or None. See :class:`~megalight.inference.grammar.GrammarSource`."""
        async with self._lock:
            try:
                process = await self._started()
                async with asyncio.timeout(self._seconds):
                    answer = await _asked(process, [kind, text])
            except TimeoutError:
                answer = None
            except BaseException:
                # Who waits has gone: an answer that comes later is not of the next grammar.
                await self._end()
                raise
            if answer is None:
                await self._end()
                return f"it takes more than {self._seconds:g} seconds or too much memory"
            found: str | None = json.loads(answer)
            return found

    async def close(self) -> None:
        """End the process."""
        async with self._lock:
            await self._end()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # this folder has modules whose names others use
                __file__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            # To read a large vocabulary takes seconds, which are no grammar's.
            await _asked(self._process, self._settings)
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _asked(process: asyncio.subprocess.Process, question: list[Any]) -> bytes | None:
    """Return the line that the process answers, or None if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline() or None
    except (ConnectionError, BrokenPipeError):
        return None


def main() -> None:
    """Answer each line with what is wrong with its grammar, or null."""
    llguidance = import_module("llguidance")
    text, vocab_size, ends, memory_bytes = json.loads(sys.stdin.readline())
    tokenizer, matcher = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=ends), llguidance.LLMatcher
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    print("null", flush=True)
    make: dict[str, Callable[[str], str]] = {
        "json_schema": matcher.grammar_from_json_schema,
        "regex": matcher.grammar_from_regex,
        "lark": matcher.grammar_from_lark,
    }
    for line in sys.stdin:
        kind, source = json.loads(line)
        try:
            found = matcher(tokenizer, make[kind](source), log_level=0)
            if not found.is_error():
                found.compute_bitmask()
            fault = found.get_error() if found.is_error() else None
        except (ValueError, MemoryError) as error:
            fault = str(error)
        # The first line tells what; others show the grammar.
        print(json.dumps(fault if fault is None else fault.splitlines()[0][:200]), flush=True)


if __name__ == "__main__":
    main()
