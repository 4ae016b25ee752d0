"""An engine without a model: the tokens of a request follow from its seed and their positions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

from megalight.inference import EngineStep
from megalight.inference.scheduler import Completion
from megalight.inference.speculator import DraftRounds

VOCABULARY = 270


def token_at(seed: int, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest()) % VOCABULARY


class FakeEngine:
    """Has what a loop needs of an engine. Each step takes ``seconds``."""

    shares_experts = False

    def __init__(self, seconds: float = 0.0) -> None:
        self.suspended = False
        self.prompts: list[list[int]] = []
        self.steps = 0
        self.blocks, self.draft_rounds = SimpleNamespace(count=0, free=0), DraftRounds()
        self._seconds = seconds
        self._running: dict[int, dict[str, Any]] = {}
        self.step_log = SimpleNamespace(graphed=0)
        self.resets = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def unfinished(self) -> list[int]:
        return list(self._running)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        seed: int,
        eos_id: Collection[int] | None,
        stop: Callable[[Sequence[int]], bool] | None,
        log_probs: bool,
        **_: Any,
    ) -> int:
        number = len(self.prompts)
        self.prompts.append(list(prompt))
        self._running[number] = {
            "tokens": list(prompt), "start": len(prompt), "most": max_new_tokens, "seed": seed, "ends": eos_id or (),
            "stop": stop, "log_probs": log_probs,
        }  # fmt: skip
        return number

    def log_probs(self, number: int) -> tuple[list[float], None, None]:
        request = self._running[number]
        return [-each / 1000 for each in request["tokens"][request["start"] :]], None, None

    def cancel(self, number: int) -> None:
        del self._running[number]

    def step(self) -> EngineStep | None:
        assert not self.suspended
        if not self._running:
            return None
        self.steps += 1
        time.sleep(self._seconds)
        tokens, finished = dict[int, int](), dict[int, Completion]()
        for number, request in [*self._running.items()]:
            token = token_at(request["seed"], len(request["tokens"]))
            request["tokens"].append(token)
            tokens[number] = token
            new = request["tokens"][request["start"] :]
            log_probs = [-each / 1000 for each in new] if request["log_probs"] else None
            if token in request["ends"]:
                finished[number] = Completion(new, log_probs, "end")
            elif request["stop"] is not None and request["stop"](new):
                finished[number] = Completion(new, log_probs, "stop")
            elif len(new) == request["most"]:
                finished[number] = Completion(new, log_probs, "length")
        for number in finished:
            del self._running[number]
        return EngineStep(tokens, finished, [], {})

    def reset_cache(self) -> None:
        self.resets += 1

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False
