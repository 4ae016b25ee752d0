"""What happened to a request, and how another engine goes on with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megalight.errors import ConfigurationError, DataError, MegalightError
from megalight.inference import DynamicEngine
from megalight.inference.request_record import (
    RequestError,
    RequestEvent,
    RequestEventKind,
    RequestRecord,
    RequestStatus,
)
from tests.inference.test_engine import GREEDY, SAMPLED, poisoned
from tests.inference.test_generate import PROMPTS, build


def kinds(record: RequestRecord) -> list[str]:
    return [event.kind.value for event in record.merge().events]


def test_a_request_tells_where_it_is_and_what_happened() -> None:
    began = time.time()
    engine = DynamicEngine(build(), num_blocks=20, block_size=3, step_tokens=4, max_sequences=1)
    number = engine.add(list(range(10)), max_new_tokens=3, sampling_params=GREEDY)
    later = engine.add([1], max_new_tokens=1, sampling_params=GREEDY)
    assert engine.record(number).status is RequestStatus.WAITING_IN_QUEUE
    engine.step()
    assert engine.record(number).status is RequestStatus.ACTIVE_BUT_NOT_GENERATING_TOKENS
    engine.step()
    engine.step()
    record = engine.record(number)
    assert record.status is RequestStatus.ACTIVE_AND_GENERATING_TOKENS
    assert record.segments[0].prompt == list(range(10))
    assert len(record.segments[0].tokens) == 1
    engine.suspend(keep_cache=True)
    engine.suspend(keep_cache=True)
    assert engine.record(number).status is RequestStatus.ACTIVE_BUT_NOT_GENERATING_TOKENS
    engine.resume()
    while number in engine.unfinished:
        engine.step()
    record = engine.record(number)
    assert record.status is RequestStatus.COMPLETED
    assert kinds(record) == ["add", "pause", "finish"]
    times = [event.time for event in record.segments[0].events]
    assert began <= times[0] <= times[1] <= times[2] <= time.time()
    engine.step()
    with pytest.raises(DataError, match=f"there is no request {number}, or it has ended"):
        engine.record(number)
    assert kinds(engine.record(later)) == ["add", "finish"]


def test_errors_say_whether_the_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    engine = DynamicEngine(poisoned(model, 60), num_blocks=20, block_size=3)
    good = engine.add([5, 6, 7], max_new_tokens=9, sampling_params=GREEDY)
    bad = engine.add([5, 60], max_new_tokens=9, sampling_params=GREEDY)
    engine.step()
    engine.step()
    failed = engine.record(bad)
    assert failed.status is RequestStatus.FAILED
    assert kinds(failed) == ["add", "error_transient", "error_nontransient", "fail"]
    assert failed.segments[0].events[2].message == "the logits of its next token hold NaN or infinity"
    with pytest.raises(DataError, match=f"request {bad} has failed"):
        engine.restore(failed)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.layers["1"], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    event = engine.record(good).segments[0].events[-1]
    assert event.kind is RequestEventKind.ERROR_TRANSIENT
    assert event.message == "a pass failed: ZeroDivisionError('division by zero')"
    error = RequestError(7, "no room", is_transient=False)
    assert (error.request_id, error.is_transient, str(error)) == (7, False, "request 7: no room")
    assert RequestEvent.of(error).kind is RequestEventKind.ERROR_NONTRANSIENT


def test_who_loses_its_blocks_is_evicted() -> None:
    engine = DynamicEngine(build(), num_blocks=6, block_size=3)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=9, sampling_params=GREEDY)
    for step in engine:
        for number in step.preempted:
            if number in engine.unfinished:
                assert "evict" in kinds(engine.record(number))
                return
    raise AssertionError("nobody lost blocks")


def test_another_engine_goes_on_with_a_record() -> None:
    model = build()
    params = replace(SAMPLED, logit_bias={7: 3.0}, frequency_penalty=0.3)
    wanted: dict[str, Any] = {"log_probs": True, "top_log_probs": 2, "prompt_log_probs": True, "max_new_tokens": 9}
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    whole = [
        engine.add(prompt, sampling_params=params, seed=11 + number, **wanted) for number, prompt in enumerate(PROMPTS)
    ]
    found = engine.run()
    records: list[RequestRecord] = []
    for number, prompt in enumerate(PROMPTS):
        engine.add(prompt, sampling_params=params, seed=11 + number, **wanted)
    for count in (3, 2, 0):
        for _ in range(count):
            engine.step()
        texts = [json.dumps(engine.record(number).to_json()) for number in engine.unfinished]
        records = [RequestRecord.of_json(json.loads(text)) for text in texts]
        engine = DynamicEngine(model, num_blocks=40, block_size=2)
        for record in records:
            assert engine.restore(record) == record.request_id % 4
    for step in engine:
        for number in step.finished:
            records[number] = engine.record(number)
    for number, record in enumerate(records):
        merged = record.merge()
        assert len(record.segments) == 4
        assert merged.prompt == PROMPTS[number]
        assert merged.tokens == found[whole[number]].tokens
        assert merged.log_probs == pytest.approx(found[whole[number]].log_probs, abs=1e-12)
        assert record.prompt_log_probs == pytest.approx(found[whole[number]].prompt_log_probs, abs=1e-12)
        assert [*map(list, merged.top_log_probs)] == [*map(list, found[whole[number]].top_log_probs or [])]
        assert kinds(record) == ["add"] * 4 + ["finish"]
    with pytest.raises(DataError, match="no record of a request"):
        RequestRecord.of_json({"segments": [{}]})


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where values of JSON are, one inside of the other."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, key)
        yield from places(value[key], (*before, key))


def test_what_is_no_record_is_refused_and_no_other_request_notices() -> None:
    engine = DynamicEngine(build(), num_blocks=400, step_tokens=4000)
    options: dict[str, Any] = {"log_probs": True, "top_log_probs": 2, "prompt_log_probs": True}
    number = engine.add([1, 2, 3], max_new_tokens=6, seed=1, eos_id=0, sampling_params=SAMPLED, **options)
    engine.step()
    engine.step()
    text = json.dumps(engine.record(number).to_json())
    refused = restored = 0
    for place in places(json.loads(text)):
        for bad in (None, "x", 1.5, True, -1, 2**64, [], {}, ["a"], [2**64]):
            values: Any = json.loads(text)
            there = values
            for key in place[:-1]:
                there = there[key]
            there[place[-1]] = bad
            try:
                engine.restore(RequestRecord.of_json(values))
                restored += 1
            except MegalightError:
                refused += 1
    assert refused > 4 * restored > 40
    found = engine.run()
    assert len(found) == 1 + restored
    for values in (
        {"segments": [{}]},
        json.loads(text) | {"segments": []},
        json.loads(text) | {"color": 1},
        json.loads(text) | {"sampling_params": {"color": 1, "logit_bias": {}}},
    ):
        with pytest.raises(DataError, match="this is no record of a request"):
            RequestRecord.of_json(values)
    record = RequestRecord.of_json(json.loads(text) | {"top_count": 62})
    with pytest.raises(ConfigurationError, match="top_log_probs is 62; it must be from 0 to 61"):
        engine.restore(record)
