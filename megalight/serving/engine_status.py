"""What an engine has, and has done. A coordinator imports this, and neither torch nor models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """What an engine has, and has done.

    Attributes:
        running: requests that hold blocks.
        waiting: those that hold none yet, or none any more.
        blocks: of its cache.
        blocks_free: those that no running sequence holds.
        cache_tokens: tokens for which the cache has room.
        steps: forward passes.
        step_seconds: time that they took together.
        graphed: those of them that were a CUDA graph.
        preempted: how often a sequence gave its blocks back, to start again later.
        weights_epoch: how often its weights were replaced.
        drafted: tokens that a draft guessed, as the first, the second and so on after a token.
        accepted: those of them that were right.
        prompt_tokens: of requests that came.
        cached_tokens: those of them that the prefix cache had.
        completion_tokens: of all requests.
        first: requests that have a first token, and the seconds that all of them waited for it.
        between: tokens after a first one, of requests that ended, and the seconds between them.
        ended: requests that ended, and the seconds that all of them took.
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_free: int = 0
    cache_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    graphed: int = 0
    preempted: int = 0
    weights_epoch: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first: tuple[int, float] = (0, 0.0)
    between: tuple[int, float] = (0, 0.0)
    ended: tuple[int, float] = (0, 0.0)
