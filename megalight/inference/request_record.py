"""The life of a request: its status, what happened to it and when, and a record that another engine can go on with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from megalight.errors import DataError, MegalightError, boolean, integer
from megalight.inference.sampling import SamplingParams, check_seed


class RequestStatus(StrEnum):
    """Where a request is. Without tokens are active ones of whose prompt a part has run."""

    WAITING_IN_QUEUE = "waiting_in_queue"
    ACTIVE_AND_GENERATING_TOKENS = "active_and_generating_tokens"
    ACTIVE_BUT_NOT_GENERATING_TOKENS = "active_but_not_generating_tokens"
    COMPLETED = "completed"
    FAILED = "failed"


class RequestEventKind(StrEnum):
    """What happens to a request. A suspend of the engine pauses it; an older one that takes its blocks evicts it."""

    ADD = "add"
    PAUSE = "pause"
    EVICT = "evict"
    FINISH = "finish"
    FAIL = "fail"
    ERROR_TRANSIENT = "error_transient"
    ERROR_NONTRANSIENT = "error_nontransient"


class RequestError(MegalightError):
    """What went wrong with a request.

    Args:
        request_id: its number.
        message: what.
        is_transient: whether it goes on.
    """

    def __init__(self, request_id: int, message: str, is_transient: bool = True) -> None:
        super().__init__(f"request {request_id}: {message}")
        self.request_id, self.message, self.is_transient = request_id, message, is_transient


@dataclass(frozen=True)
class RequestEvent:
    """An event.

    Attributes:
        kind: what happened.
        time: when, in seconds since 1970.
        message: of an error.
    """

    kind: RequestEventKind
    time: float
    message: str | None = None

    @classmethod
    def now(cls, kind: RequestEventKind) -> RequestEvent:
        """Return an event of this moment."""
        return cls(kind, time.time())

    @classmethod
    def of(cls, error: RequestError) -> RequestEvent:
        """Return the event of an error."""
        kinds = RequestEventKind.ERROR_NONTRANSIENT, RequestEventKind.ERROR_TRANSIENT
        return cls(kinds[error.is_transient], time.time(), error.message)


@dataclass(kw_only=True)
class RequestSegment:
    """A part of the life of a request, in one engine.

    Attributes:
        prompt: its tokens, with those of the completion in segments before.
        max_new_tokens: how many tokens may follow.
        tokens: those that followed.
        log_probs: of these; None: nobody asked.
        top_log_probs: for each of these the most probable tokens, if asked.
        events: what happened, in order.
    """

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


@dataclass(kw_only=True)
class RequestRecord:
    """A request as plain values: what it asks for, and its segments.

    Attributes:
        request_id: its number in its engine.
        status: where it is.
        sampling_params: how tokens are chosen, the fields of :class:`~megalight.inference.sampling.SamplingParams`.
        ends: tokens that end it.
        seed: of its samples, which follow from the seed and the number of tokens before, so it needs no other state.
        top_count: for how many of the most probable tokens log-probabilities are wanted.
        processed: whether log-probabilities are those of the distribution that is sampled from.
        constrained: whether it has a grammar, which a record does not hold.
        prompt_log_probs: of the first prompt's tokens but the first, NaN where they are not known; None: nobody asked.
        segments: at least one.
    """

    request_id: int
    status: RequestStatus
    sampling_params: dict[str, Any]
    ends: list[int]
    seed: int
    top_count: int = 0
    processed: bool = False
    constrained: bool = False
    prompt_log_probs: list[float] | None = None
    segments: list[RequestSegment]

    def checkpoint(self) -> None:
        """Begin a new segment: its prompt is the last one's with what followed, and fewer tokens are left.

        Raises:
            DataError: the request has ended.
        """
        if self.status in (RequestStatus.COMPLETED, RequestStatus.FAILED):
            raise DataError(f"request {self.request_id} has {self.status.value}, and nothing can follow.")
        last = self.segments[-1]
        self.segments.append(
            RequestSegment(
                prompt=[*last.prompt, *last.tokens],
                max_new_tokens=last.max_new_tokens - len(last.tokens),
                log_probs=None if last.log_probs is None else [],
            )
        )

    def merge(self) -> RequestSegment:
        """Return all segments as one, as if the request had never moved."""
        first, log_probs = self.segments[0], [each.log_probs for each in self.segments]
        return replace(
            first,
            tokens=[token for each in self.segments for token in each.tokens],
            log_probs=None if first.log_probs is None else [value for found in log_probs for value in found or []],
            top_log_probs=[most for each in self.segments for most in each.top_log_probs],
            events=[event for each in self.segments for event in each.events],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as values of JSON."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> RequestRecord:
        """Return what :meth:`to_json` returned.

        Raises:
            DataError: these are no such values.
        """
        try:
            segments = [_segment(each) for each in values["segments"]]
            params = dict(values["sampling_params"])
            # Keys of objects of JSON are texts.
            params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
            known = {"status": RequestStatus(values["status"]), "sampling_params": asdict(SamplingParams(**params))}
            record = cls(**{**values, **known, "segments": segments})
            integer("request_id", record.request_id, 0)
            integer("top_count", record.top_count, 0)
            check_seed(record.seed)
            boolean("processed", record.processed)
            boolean("constrained", record.constrained)
            record.ends = [integer("a token of ends", token, 0) for token in record.ends]
            scores, first = record.prompt_log_probs, segments[0]
            if scores is not None and len(_numbers(scores)) != len(first.prompt) - 1:
                raise ValueError("prompt_log_probs are not those of all tokens but the first")
            for each in segments:
                wanted = len(each.tokens) if record.top_count else 0
                if (each.log_probs is None) != (first.log_probs is None) or len(each.top_log_probs) != wanted:
                    raise ValueError("log-probabilities are not those of all tokens")
            for one, next_one in pairwise(segments):
                left = one.max_new_tokens - len(one.tokens)
                if (next_one.prompt, next_one.max_new_tokens) != ([*one.prompt, *one.tokens], left):
                    raise ValueError("a segment does not follow the one before it")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no record of a request: {error!r}.") from error
        return record


def _segment(values: Mapping[str, Any]) -> RequestSegment:
    tokens, log_probs = values["tokens"], values["log_probs"]
    if log_probs is not None and len(_numbers(log_probs)) != len(tokens):
        raise ValueError("log_probs are not those of the tokens")
    most = [{int(token): value for token, value in row.items()} for row in values["top_log_probs"]]
    for row in most:
        _numbers([*row.values()])
    events = [RequestEvent(**{**event, "kind": RequestEventKind(event["kind"])}) for event in values["events"]]
    _numbers([event.time for event in events])
    for token in [*values["prompt"], *tokens]:
        integer("a token", token, 0)
    integer("max_new_tokens", values["max_new_tokens"])
    return RequestSegment(**{**values, "top_log_probs": most, "events": events})


def _numbers(values: Sequence[Any]) -> Sequence[float]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{value!r} is no number")
    return values
