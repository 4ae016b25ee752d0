"""What the text of an answer holds besides words for the reader: reasoning, and calls of tools.

Chat models write both as text, in the form that their chat template shows them. :class:`AnswerParser` reads it while it
comes; the parts that it returns do not depend on how the text was cut, so a stream and a whole answer say the same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megalight.errors import DataError

THINK, END_THINK = "<think>", "</think>"
HERMES, END_HERMES = "<tool_call>", "</tool_call>"
MISTRAL, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
LLAMA = "<|python_tag|>"
NAME = re.compile(r"[\w.-]{1,64}")


class ToolForm(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS]`` and a list of such objects, or for each call its name, ``[ARGS]`` and its arguments."""
    LLAMA = "llama"
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several with ``;``, as Llama 3."""

    @classmethod
    def of(cls, template: str) -> ToolForm | None:
        """Return the form that a chat template teaches; None: none of these."""
        if "tools" not in template or "<arg_key>" in template or "<function=" in template:
            return None
        if MISTRAL in template:
            return cls.MISTRAL
        if HERMES in template:
            return cls.HERMES
        return cls.LLAMA if '"parameters"' in template and '"name"' in template else None


def marks_of(form: ToolForm | None, thinks: bool) -> list[str]:
    """Return what :class:`AnswerParser` must see, also where a tokenizer has a special token for it."""
    calls = {
        ToolForm.HERMES: [HERMES, END_HERMES],
        ToolForm.MISTRAL: [MISTRAL, MISTRAL_ARGUMENTS],
        ToolForm.LLAMA: [LLAMA],
        None: [],
    }[form]
    return [*calls, *([THINK, END_THINK] if thinks else [])]


@dataclass(frozen=True)
class ToolCall:
    """A call: the tool's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Part:
    """A part of an answer: one of these."""

    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None


class AnswerParser:
    """Reads an answer.

    A call that is cut off, or is no JSON, stays text.

    Args:
        form: how calls are written; None: there are none.
        thinks: whether the answer may begin with ``<think>``.
        thinking: whether the prompt has ended with it.
    """

    def __init__(self, form: ToolForm | None, *, thinks: bool = False, thinking: bool = False) -> None:
        self._form = form
        self._state = "reasoning" if thinking else "start" if thinks or form is ToolForm.LLAMA else "content"
        self._thinks = thinks
        # The space at the beginning of reasoning, and of what follows it or a call, is dropped.
        self._text, self._trims = "", thinking
        self._mark = {ToolForm.HERMES: HERMES, ToolForm.MISTRAL: MISTRAL, ToolForm.LLAMA: LLAMA, None: ""}[form]
        self._held_mark = ""

    def add(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""
        self._text += text
        return [*self._parts(last=False)]

    def finish(self) -> list[Part]:
        """Return the other parts: nothing follows."""
        return [*self._parts(last=True)]

    def _parts(self, last: bool) -> Iterator[Part]:
        state = None
        while state != self._state and (self._text or last):
            state = self._state
            if self._trims:
                self._text = self._text.lstrip()
                self._trims = not self._text
            yield from getattr(self, f"_{state}")(last)

    def _start(self, last: bool) -> Iterator[Part]:
        text = self._text.lstrip()
        if self._thinks and text.startswith(THINK):
            self._state, self._text, self._trims = "reasoning", text.removeprefix(THINK), True
        elif self._thinks and THINK.startswith(text) and not last:
            return
        elif self._form is ToolForm.LLAMA and text.startswith("{"):
            self._state, self._held_mark = "calls", ""
        elif text or last:
            self._state = "content"
        yield from ()

    def _reasoning(self, last: bool) -> Iterator[Part]:
        head, found, tail = self._text.partition(END_THINK)
        if found:
            self._text, self._trims = tail, True
            self._state = "start" if self._form is ToolForm.LLAMA else "content"
            self._thinks = False
            if reasoning := head.rstrip():
                yield Part(reasoning=reasoning)
        elif text := self._sent(END_THINK, last):
            yield Part(reasoning=text)

    def _content(self, last: bool) -> Iterator[Part]:
        if not self._mark:
            text, self._text = self._text, ""
            if text:
                yield Part(content=text)
            return
        head, found, tail = self._text.partition(self._mark)
        if found:
            content = head.rstrip()
            self._state, self._text, self._held_mark = "calls", tail, head[len(content) :] + self._mark
            if content:
                yield Part(content=content)
        elif text := self._sent(self._mark, last):
            yield Part(content=text)

    def _calls(self, last: bool) -> Iterator[Part]:
        if self._form is ToolForm.HERMES:
            inner, found, tail = self._text.partition(END_HERMES)
            if not found and not last:
                return
            calls = _objects(inner)
            self._state, self._text, self._trims = "content", tail, bool(calls)
            closing = found
        else:
            if not last:
                return
            calls = (_mistral if self._form is ToolForm.MISTRAL else _objects)(self._text)
            inner, self._text, closing = self._text, "", ""
            self._state = "content"
        if not calls:
            yield Part(content=self._held_mark + inner + closing)
        for call in calls:
            yield Part(call=call)

    def _sent(self, mark: str, last: bool) -> str:
        """Take the text that is neither the beginning of a mark nor the space in front of one."""
        text = self._text
        if not last:
            held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
            text = text[: len(text) - held].rstrip()
        self._text = self._text[len(text) :]
        return text


def _objects(text: str) -> list[ToolCall]:
    """Return the calls of a text that is JSON objects, with ``;`` or a comma between them; none if it is more."""
    found, place = list[ToolCall](), 0
    while place < len(text) and (left := text[place:].lstrip(" \n\t\r;,")):
        place = len(text) - len(left)
        value, end = _value(left)
        if (call := _call(value)) is None:
            return []
        found.append(call)
        place += end
    return found


def _mistral(text: str) -> list[ToolCall]:
    value, _ = _value(text.strip())
    if isinstance(value, list):
        calls = [_call(each) for each in value]
    else:
        calls = []
        for part in text.split(MISTRAL):
            name, brace, rest = part.partition("{")
            name = name.strip().removesuffix(MISTRAL_ARGUMENTS).partition("[CALL_ID]")[0].strip()
            arguments, _ = _value(brace + rest)
            calls.append(_call({"name": name, "arguments": arguments}))
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else []


def _value(text: str) -> tuple[Any, int]:
    """Return the JSON value at the beginning of a text, and its length; None if there is none."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_constant)


def _call(value: Any) -> ToolCall | None:
    """Return the call that an object describes, or None."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = _value(arguments)
    # In ASCII: half of a surrogate pair may stand in what a model writes.
    return ToolCall(name, json.dumps(arguments)) if isinstance(arguments, dict) else None


def call_id(form: ToolForm) -> str:
    """Return a new id of a call. Templates of Mistral refuse others than these."""
    return secrets.token_hex(5)[:9] if form is ToolForm.MISTRAL else f"call_{secrets.token_hex(12)}"


def rules(form: ToolForm, tools: Sequence[Mapping[str, Any]], marks: Mapping[str, int], *, several: bool) -> str:
    """Return the rules, in the language of ``lark``, of an answer that is calls and nothing else.

    Args:
        form: how calls are written.
        tools: the functions that may be called: ``name`` and ``parameters``, a JSON schema.
        marks: the ids of marks that are special tokens.
        several: whether there may be more than one call.

    Raises:
        DataError: two of the schemas have other definitions of the same name.
    """
    definitions: dict[str, Any] = {}
    choices = []
    key = "parameters" if form is ToolForm.LLAMA else "arguments"
    for tool in tools:
        schema = dict(tool.get("parameters") or {"type": "object", "properties": {}})
        for name, definition in schema.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise DataError(f"tools: two of them define {name!r} in $defs; give it two names.")
        properties = {"name": {"const": tool["name"]}, key: schema}
        choices.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    shared = {"$defs": definitions, "x-guidance": {"whitespace_flexible": False}}
    call: dict[str, Any] = {"anyOf": choices, **shared}

    def mark(text: str) -> str:
        return f"<[{marks[text]}]>" if text in marks else json.dumps(text)

    if form is ToolForm.HERMES:
        one = f'{mark(HERMES)} "\\n" call "\\n" {mark(END_HERMES)}'
        more = ' ("\\n" one)*' if several else ""
        return f"start: one{more}\none: {one}\ncall: %json {json.dumps(call)}\n"
    if form is ToolForm.LLAMA:
        more = ' ("; " call)*' if several else ""
        return f"start: call{more}\ncall: %json {json.dumps(call)}\n"
    items: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": choices}, **shared}
    if not several:
        items["maxItems"] = 1
    return f'start: {mark(MISTRAL)} " "? calls\ncalls: %json {json.dumps(items)}\n'
