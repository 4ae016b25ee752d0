"""Texts to complete, from JSON lines, and completions as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, decode_utf8, integer
from megalight.inference.sampling import LARGEST_SEED, SamplingParams
from megalight.inference.scheduler import Reason, Stop


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A text to complete.

    Attributes:
        prompt: the text. Empty: a new document.
        max_new_tokens: maximum length of the completion, in tokens. None: 128, or fewer where the model's longest
            sequence ends.
        sampling_params: how tokens are chosen.
        seed: seed of its samples. None gives other results each time.
        stop: a text, or several, that end the completion, which they are no part of.
        log_probs: whether the completion has its tokens and their log-probabilities.
        id: any value of JSON, which is kept for the completion.
        place: where the request stands, for messages.

    Raises:
        ConfigurationError: a value is of the wrong kind or out of range.
    """

    prompt: str
    max_new_tokens: int | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    stop: Sequence[str] = ()
    log_probs: bool = False
    id: Any = None
    place: str = ""

    def __post_init__(self) -> None:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        several = isinstance(texts, Sequence) and all(is_text(text) and text for text in texts)
        for name, holds, what in (
            ("prompt", is_text(self.prompt), "a text of Unicode"),
            ("stop", several, "a text, or a list of texts, none empty"),
            ("log_probs", isinstance(self.log_probs, bool), "true or false"),
        ):
            if not holds:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be {what}.")
        object.__setattr__(self, "stop", texts)
        if self.max_new_tokens is not None:
            integer("max_new_tokens", self.max_new_tokens)
        if self.seed is not None:
            integer("seed", self.seed, 0, LARGEST_SEED)


def is_text(value: Any) -> bool:
    """Return whether a value is a text that UTF-8 can write, so without half a pair of surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class TextCompletion:
    """A completion.

    Attributes:
        text: the new text.
        reason: why it ended: an ``end`` token, a ``stop`` text, its ``length``, or an ``error``: NaN or infinity in the
            logits.
        tokens: its tokens, those of the stop text included.
        log_probs: of its tokens, before temperature, top-k and top-p; None: the request has none.
    """

    text: str
    reason: Reason
    tokens: list[int]
    log_probs: list[float] | None


KEYS = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "log_probs", "id")
"""What a line may have."""


def read_requests(path: Path, default: TextRequest) -> list[TextRequest]:
    """Read requests from a file with a JSON object in each line. Empty lines are left out.

    Args:
        path: the file.
        default: what holds where a line says nothing. Its seed is that of the first request, and each further one has
            the next, so that equal prompts get different completions.

    Raises:
        DataError: the file cannot be read or has no request, or a line is no request.
    """
    try:
        lines = decode_utf8(path.read_bytes(), str(path), line=1).split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    found: list[TextRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        seed = None if default.seed is None else default.seed + len(found)
        found.append(_request(_values(line, place), replace(default, seed=seed, place=place)))
    if not found:
        raise DataError(f'{path} has no request; write one in each line, such as {{"prompt": "def read("}}.')
    return found


def _values(line: str, place: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise DataError(f'{place} is no object of JSON; write {{"prompt": ...}}.')
    if strange := values.keys() - {*KEYS}:
        raise DataError(f"{place} has the key {min(strange)!r}; a request has {', '.join(KEYS)}.")
    if "prompt" not in values:
        raise DataError(f"{place} has no key 'prompt'.")
    return values


def _request(values: Mapping[str, Any], default: TextRequest) -> TextRequest:
    chosen = {key: values[key] for key in ("temperature", "top_k", "top_p") if key in values}
    own = {key: value for key, value in values.items() if key not in chosen}
    try:
        return replace(default, sampling_params=replace(default.sampling_params, **chosen), **own)
    except ConfigurationError as error:
        raise DataError(f"{default.place}: {error}") from error


def line_of(request: TextRequest, completion: TextCompletion) -> str:
    """Return a completion as a line of JSON."""
    values: dict[str, Any] = {} if request.id is None else {"id": request.id}
    values |= {"prompt": request.prompt, "completion": completion.text, "reason": completion.reason}
    if completion.log_probs is not None:
        values |= {"tokens": completion.tokens, "log_probs": completion.log_probs}
    # Half a pair of surrogates, which an id may hold, has no bytes; escaped it is JSON.
    return json.dumps(values, ensure_ascii=False).encode(errors="backslashreplace").decode()


def stop_at(texts: Sequence[str], tokenizer: Tokenizer) -> Stop | None:
    """Return a function that tells whether the newest token has completed one of the texts."""
    if not texts:
        return None
    # Every token adds a byte or more, except special ones. One more token: some tokenizers drop the space of a first
    # word.
    longest = 1 + max(len(text.encode()) for text in texts)
    specials = {*tokenizer.specials.values()}

    def stops(new: Sequence[int]) -> bool:
        end = tokenizer.decode([token for token in new if token not in specials][-longest:])
        return any(text in end for text in texts)

    return stops


def before(texts: Sequence[str], text: str) -> str:
    """Return a text up to the first of several texts."""
    return text[: min((place for each in texts if (place := text.find(each)) >= 0), default=len(text))]
