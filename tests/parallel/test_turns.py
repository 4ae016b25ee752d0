"""Two passes take turns: one runs at a time, they change in pauses, and an error of one ends both."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from megalight.parallel.interleaved_passes import PassInterleaver, interleaving, pause, uninterrupted


def steps(name: str, count: int, log: list[str], fail: int | None = None) -> Callable[[], None]:
    def run() -> None:
        for number in range(count):
            if number == fail:
                raise ValueError(f"{name}{number} failed")
            log.append(f"{name}{number}")
            pause()
        log.append(f"{name} ends")

    return run


@pytest.fixture
def turns() -> PassInterleaver:
    return PassInterleaver(torch.device("cpu"))


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (2, 2, "b0 fill a0 b1 fill a1 b ends a ends"),
        (3, 1, "b0 fill a0 b ends a1 a2 a ends"),
        (0, 2, "b0 fill a ends b1 fill b ends"),
        (1, 0, "b ends a0 a ends"),
    ],
)
def test_turns_change_in_pauses(turns: PassInterleaver, first: int, second: int, wanted: str) -> None:
    log: list[str] = []
    for _ in range(2):
        log.clear()
        turns.play(steps("a", first, log), steps("b", second, log), lambda: log.append("fill"))
        assert " ".join(log) == wanted
    assert not interleaving()


def test_without_passes_a_pause_is_nothing() -> None:
    assert not interleaving()
    pause()
    with uninterrupted():
        pause()


def test_the_turn_can_be_kept(turns: PassInterleaver) -> None:
    log: list[str] = []

    def second() -> None:
        with uninterrupted():
            steps("b", 2, log)()
        pause()

    turns.play(steps("a", 1, log), second, lambda: log.append("fill"))
    assert log == ["b0", "b1", "b ends", "fill", "a0", "a ends"]


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("place", [0, 1])
def test_an_error_ends_both(turns: PassInterleaver, failing: str, place: int) -> None:
    log: list[str] = []
    first, second = (steps(name, 3, log, place if name == failing else None) for name in "ab")
    with pytest.raises(ValueError, match=rf"^{failing}{place} failed$"):
        turns.play(first, second, lambda: None)
    assert not any("ends" in entry for entry in log)
    log.clear()
    turns.play(steps("a", 1, log), steps("b", 1, log), lambda: None)  # the next pair is not affected
    assert log == ["b0", "a0", "b ends", "a ends"]


def test_the_first_pass_stays_in_the_thread_of_the_caller(turns: PassInterleaver) -> None:
    threads: list[threading.Thread] = []

    def note() -> None:
        threads.append(threading.current_thread())

    turns.play(note, note, lambda: None)
    turns.play(note, note, lambda: None)
    assert threads[1] is threads[3] is threading.current_thread()
    assert threads[0] is threads[2] is not threading.current_thread()
