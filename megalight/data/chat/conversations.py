"""The shapes in which JSON lines hold conversations, all turned into lists of messages.

========================= ==============================================================================================
messages                  ``{"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}``
prompt and completion     ``{"prompt": ..., "completion": ...}``: two strings, or two lists of messages
Alpaca                    ``{"instruction": ..., "input": ..., "output": ..., "system": ...}``
ShareGPT                  ``{"conversations": [{"from": "human", "value": ...}, ...], "system": ..., "tools": ...}``
preference pairs          ``{"prompt": ..., "chosen": ..., "rejected": ...}``; ``prompt`` may be part of both answers
========================= ==============================================================================================

A message with ``"weight": 0`` or ``"train": false`` is not learned. 1 and true are the default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megalight.errors import DataError, nearest

Message = dict[str, Any]
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
"""Names of speakers in ShareGPT's files, and the roles that templates know."""
MARKS = ("weight", "train")
"""Keys of messages that say whether an assistant's message is learned."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: each has a ``role``, and ``content`` or ``tool_calls``.
        tools: JSON schemas of the tools that the assistant may call, or None.
        first: assistant messages before this position carry no loss.
        masked: positions of messages that are marked as not to be learned.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    first: int = 0
    masked: frozenset[int] = frozenset()


def conversations(record: Any, place: str, beside: Callable[[Any], bool] | None = None) -> tuple[Conversation, ...]:
    """Return the conversation of a row, or the preferred and the rejected one of a preference pair.

    Args:
        place: file and line, for messages.
        beside: whether a part of a message is known besides text. If given, contents that are lists stay lists; else
            they become one text.

    Raises:
        DataError: the row has none of the known shapes, or a value in it has a wrong type. The message names the key.
    """
    row = _Row(record, place, beside)
    for keys, read in SHAPES.items():
        if all(key in row.record for key in keys):
            return read(row)
    known = {key for keys in SHAPES for key in keys}
    hints = (nearest(key, known - row.record.keys()) for key in row.record)
    raise DataError(
        f"{place} is no conversation: it has the keys {', '.join(map(repr, row.record)) or 'none'}; expected are "
        + "; ".join(" and ".join(map(repr, keys)) for keys in SHAPES)
        + "."
        + next((hint for hint in hints if hint), "")
    )


def prompt_messages(record: Any, place: str, column: str | None = None) -> Conversation:
    """Return the messages of a row to which an answer is wanted.

    Args:
        place: file and line, for messages.
        column: where it holds them: a text, which is a user's message, or a list of messages. None: ``prompt`` if the
            row has that, else its conversation without the last answer.

    Raises:
        DataError: the row has no such column or is no conversation, has no message before an answer, or its messages
            end with one.
    """
    row = _Row(record, place)
    if column is None and "prompt" not in row.record:
        whole = conversations(record, place)[0]
        answers = [index for index, message in enumerate(whole.messages) if message["role"] == "assistant"]
        found = Conversation(whole.messages[: answers[-1]] if answers else whole.messages, whole.tools)
    elif (key := "prompt" if column is None else column) in row.record:
        found = row.conversation(row.messages(key, "user"))
    else:
        raise DataError(
            f"{place} has no key {key!r}; it has: {', '.join(map(repr, row.record))}. Name the column of prompts."
            f"{nearest(key, row.record)}"
        )
    if not found.messages or found.messages[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: the prompt {'ends with an answer' if found.messages else 'is empty'}; its last message must be "
            "one to which an answer is wanted."
        )
    return found


@dataclass(frozen=True)
class _Row:
    record: Mapping[str, Any]
    place: str
    beside: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.record, Mapping):
            raise DataError(f"{self.place} is of type {type(self.record).__name__}; each row must be a JSON object.")

    def fail(self, key: str, value: Any, rule: str) -> NoReturn:
        raise DataError(f"{self.place}: {key} is {_short(value)}; it must be {rule}.")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.record.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            self.fail(repr(key), value, "a string")
        return value

    def messages(self, key: str, role: str) -> list[Message]:
        """Return messages, also of a plain string, which is one message of ``role``."""
        value = self.record[key]
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        if not isinstance(value, list) or not value:
            self.fail(repr(key), value, "a string or a list of messages")
        return [self.message(f"{key}[{index}]", message) for index, message in enumerate(value)]

    def message(self, where: str, message: Any) -> Message:
        if not isinstance(message, Mapping):
            self.fail(where, message, 'an object such as {"role": "user", "content": "..."}')
        if not isinstance(message.get("role"), str):
            self.fail(f"{where}.role", message.get("role"), "a string such as 'system', 'user', 'assistant' or 'tool'")
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            for index, part in enumerate(content):
                if self.beside is not None and self.beside(part):
                    continue
                if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                    self.fail(f"{where}.content[{index}]", part, 'text, such as {"type": "text", "text": "..."}')
            if self.beside is None:
                # Many templates write a list as Python prints it.
                message = {**message, "content": "".join(part["text"] for part in content)}
        elif not isinstance(content, str) and not (content is None and calls):
            self.fail(f"{where}.content", content, "a string (only a message with 'tool_calls' has no content)")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            self.fail(f"{where}.tool_calls", calls, "a list of objects")
        # Parquet fills absent keys with nulls. Templates test for keys, so a null must look absent.
        kept = {k: value for k, value in message.items() if (value is not None or k == "content") and k not in MARKS}
        return kept | self.mark(where, message)

    def mark(self, where: str, message: Mapping[str, Any]) -> Message:
        """Return the mark of a message that is not to be learned; empty for others."""
        given = {key: message[key] for key in MARKS if message.get(key) is not None}
        for key, value in given.items():
            if not isinstance(value, int | float) or value not in (0, 1):
                self.fail(f"{where}.{key}", value, "0, 1, true or false")
        if (detail := message.get("train_detail")) is not None:
            self.fail(f"{where}.train_detail", detail, "absent: whole messages are marked, with 'train' or 'weight'")
        return {} if all(given.values()) else {MARKS[0]: 0}

    def conversation(self, messages: list[Message], first: int = 0) -> Conversation:
        """Return messages as a conversation. Their marks go, as templates may write all that a message has."""
        masked = frozenset(index for index, message in enumerate(messages) if MARKS[0] in message)
        plain = [{key: value for key, value in message.items() if key not in MARKS} for message in messages]
        return Conversation(plain, self.tools(), first, masked)

    def tools(self) -> list[Any] | None:
        value = self.record.get("tools")
        if isinstance(value, str) and value:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                self.fail("'tools'", value, "a list of JSON schemas, or such a list as JSON text")
        if not value:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
            self.fail("'tools'", value, "a list of JSON schemas")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_messages(row: _Row) -> tuple[Conversation, ...]:
    return (row.conversation(row.messages("messages", "user")),)


def _of_prompt(row: _Row) -> tuple[Conversation, ...]:
    prompt = row.messages("prompt", "user")
    # Only the completion is learned, whoever speaks in the prompt.
    return (row.conversation(prompt + row.messages("completion", "assistant"), len(prompt)),)


def _of_alpaca(row: _Row) -> tuple[Conversation, ...]:
    asked = "\n".join(text for text in (row.text("instruction"), row.text("input", "")) if text)
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": row.text("output")}]
    return (Conversation(_system(row) + said),)


def _of_sharegpt(row: _Row) -> tuple[Conversation, ...]:
    turns = row.record["conversations"]
    if not isinstance(turns, list) or not turns:
        row.fail("'conversations'", turns, "a list of messages")
    messages = _system(row)
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            row.fail(where, turn, 'an object such as {"from": "human", "value": "..."}')
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(value, str):
            row.fail(f"{where}.value", value, "a string")
        if speaker == "function_call":
            # The name that ShareGPT's files have for a message that calls a tool.
            message = {"role": "assistant", "tool_calls": _calls(row, f"{where}.value", value), "content": None}
        elif speaker in SPEAKERS:
            message = {"role": SPEAKERS[speaker], "content": value}
        else:
            row.fail(f"{where}.from", speaker, f"one of {', '.join([*SPEAKERS, 'function_call'])}")
        messages.append(message | row.mark(where, turn))
    return (row.conversation(messages),)


def _calls(row: _Row, where: str, value: str) -> list[Message]:
    """Read the calls of a ``function_call`` turn: JSON text of one object, or of a list of them."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        row.fail(where, value, "JSON text of a call with 'name' and 'arguments'")
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        row.fail(where, value, "JSON text of a call with 'name' and 'arguments'")
    return [{"type": "function", "function": call} for call in calls]


def _of_pair(row: _Row) -> tuple[Conversation, ...]:
    prompt = row.messages("prompt", "user") if "prompt" in row.record else []
    pair = [row.conversation(prompt + row.messages(key, "assistant")) for key in ("chosen", "rejected")]
    chosen, rejected = (each.messages for each in pair)
    if chosen == rejected:
        row.fail("'rejected'", row.record["rejected"], "another answer than 'chosen'")
    # Without a prompt, it is what both begin with. If one answer begins with the other, what they share is the prompt.
    same = (number for number, both in enumerate(zip(chosen, rejected, strict=False)) if both[0] != both[1])
    first = len(prompt) or next(same, min(len(chosen), len(rejected)))
    return tuple(replace(each, first=first) for each in pair)


def _system(row: _Row) -> list[Message]:
    text = row.text("system", "")
    return [{"role": "system", "content": text}] if text else []


SHAPES: dict[tuple[str, ...], Callable[[_Row], tuple[Conversation, ...]]] = {
    ("messages",): _of_messages,
    ("conversations",): _of_sharegpt,
    ("chosen", "rejected"): _of_pair,
    ("prompt", "completion"): _of_prompt,
    ("instruction", "output"): _of_alpaca,
}
"""Keys by which a row is known -> what reads it. The first that matches reads it."""
