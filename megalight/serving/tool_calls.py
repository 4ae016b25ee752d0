"""What the text of an answer holds besides words for the reader: reasoning, and calls of tools.

Chat models write both as text, in the form that their chat template shows them. :class:`AnswerParser` reads it while it
comes; the parts that it returns do not depend on how the text was cut, so a stream and a whole answer say the same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megalight.errors import DataError

THINK, END_THINK = "<think>", "</think>"
HERMES, END_HERMES = "<tool_call>", "</tool_call>"
MISTRAL, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
LLAMA = "<|python_tag|>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[\w.-]{1,64}")


class ToolForm(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS]`` and a list of such objects, or for each call its name, ``[ARGS]`` and its arguments."""
    LLAMA = "llama"
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several with ``;``, as Llama 3."""
    QWEN = "qwen"
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, as Qwen3-Coder."""
    GLM = "glm"
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``, as GLM-4.5."""

    @classmethod
    def of(cls, template: str) -> ToolForm | None:
        """Return the form that a chat template teaches; None: none of these."""
        if "tools" not in template:
            return None
        if KEY in template:
            return cls.GLM
        if FUNCTION in template:
            return cls.QWEN
        if MISTRAL in template:
            return cls.MISTRAL
        if HERMES in template:
            return cls.HERMES
        return cls.LLAMA if '"parameters"' in template and '"name"' in template else None


def marks_of(form: ToolForm | None, thinks: bool) -> list[str]:
    """Return what :class:`AnswerParser` must see, also where a tokenizer has a special token for it."""
    calls = {
        ToolForm.HERMES: [HERMES, END_HERMES],
        ToolForm.QWEN: [HERMES, END_HERMES],
        ToolForm.GLM: [HERMES, END_HERMES, KEY, END_KEY, VALUE, END_VALUE],
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
        tools: the functions that may be called: ``name`` and ``parameters``, a JSON schema. Values between tags are
            texts where it says so, and otherwise JSON.
    """

    def __init__(
        self,
        form: ToolForm | None,
        *,
        thinks: bool = False,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._form = form
        self._schemas = {tool["name"]: _properties(tool) for tool in tools}
        self._state = "reasoning" if thinking else "start" if thinks or form is ToolForm.LLAMA else "content"
        self._thinks = thinks
        # The space at the beginning of reasoning, and of what follows it or a call, is dropped.
        self._text, self._trims = "", thinking
        self._mark = {ToolForm.MISTRAL: MISTRAL, ToolForm.LLAMA: LLAMA, None: ""}.get(form, HERMES)
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
        if self._mark == HERMES:
            # In a value of Qwen's form the end of a call is text.
            end = CLOSED.search(self._text) if self._form is ToolForm.QWEN else None
            place = end.start(1) if end is not None else -1 if self._form is ToolForm.QWEN else None
            if place is None:
                inner, found, tail = self._text.partition(END_HERMES)
            elif place < 0:
                inner, found, tail = self._text, "", ""
            else:
                inner, found, tail = self._text[:place], END_HERMES, self._text[place + len(END_HERMES) :]
            if not found and not last:
                return
            if self._form is ToolForm.HERMES:
                calls = _objects(inner)
            else:
                calls = _tagged(inner, self._form is ToolForm.QWEN, self._schemas) if found else []
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


CLOSED = re.compile(rf"{END_FUNCTION}\s*({END_HERMES})")
QWEN_CALL = re.compile(rf"\s*{FUNCTION}([^>\n]*)>(.*){END_FUNCTION}\s*", re.DOTALL)
QWEN_PAIR = re.compile(rf"\s*{PARAMETER}([^>\n]*)>\n?(.*?)\n?{END_PARAMETER}\s*(?={PARAMETER}|\Z)", re.DOTALL)
GLM_CALL = re.compile(rf"\s*([^\s<]*)\s*((?:{KEY}.*)?)", re.DOTALL)
GLM_PAIR = re.compile(rf"\s*{KEY}(.*?){END_KEY}\s*{VALUE}(.*?){END_VALUE}\s*(?={KEY}|\Z)", re.DOTALL)


def _tagged(text: str, qwen: bool, schemas: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
    """Return the call that tags describe; none if the text is another."""
    found = (QWEN_CALL if qwen else GLM_CALL).fullmatch(text)
    if found is None or not NAME.fullmatch(found[1]):
        return []
    arguments, place, pair, pairs = dict[str, Any](), 0, QWEN_PAIR if qwen else GLM_PAIR, found[2]
    while place < len(pairs.rstrip()):
        if (each := pair.match(pairs, place)) is None:
            return []
        arguments[each[1].strip()] = _typed(each[2], schemas.get(found[1], {}).get(each[1].strip()))
        place = each.end()
    return [ToolCall(found[1], json.dumps(arguments))]


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (tool.get("parameters") or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: Any) -> bool:
    """Return whether a value between tags is a text, and no JSON."""
    return not isinstance(schema, Mapping) or schema.get("type") == "string"


def _typed(text: str, schema: Any) -> Any:
    if _is_text(schema):
        return text
    value, end = _value(text.strip())
    return value if end == len(text.strip()) and end else text


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

    if form in (ToolForm.QWEN, ToolForm.GLM):
        return _tagged_rules(form, tools, mark, several)
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


TEXT_RULES = {"type", "enum", "const", "description", "title", "default", "examples"}
"""Keys of schemas of texts that rules can keep to."""


def _tagged_rules(form: ToolForm, tools: Sequence[Mapping[str, Any]], mark: Callable[[str], str], several: bool) -> str:
    """Return :func:`rules` of calls whose values are between tags. Arguments come in the order of the schema."""
    lines, calls = list[str](), list[str]()
    for place, tool in enumerate(tools):
        schema = tool.get("parameters") or {}
        shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        pairs = list[str]()
        for number, (name, value) in enumerate(_properties(tool).items()):
            if form is ToolForm.QWEN:
                begin, end = json.dumps(f"{PARAMETER}{name}>\n"), json.dumps(f"\n{END_PARAMETER}\n")
            else:
                begin = f'{mark(KEY)} {json.dumps(name)} {mark(END_KEY)} "\\n" {mark(VALUE)}'
                end = mark(END_VALUE)
            rule, found = f"value_{place}_{number}", _value_rule(f"{tool['name']}.{name}", value, shared)
            if found is not None:
                lines.append(f"{rule}: {found}")
            elif end.startswith("<"):
                lines.append(f"{rule}: /(?s:.*)/")  # no text is a special token
            else:
                lines.append(f"{rule}[suffix={end}]: /(?s:.*)/")
                end = ""
            end += "" if form is ToolForm.QWEN else ' "\\n"'
            pairs.append(f"({begin} {rule} {end})" + ("" if name in schema.get("required", ()) else "?"))
        inner = " ".join(pairs)
        if form is ToolForm.QWEN:
            first, last = json.dumps(f"\n{FUNCTION}{tool['name']}>\n"), json.dumps(f"{END_FUNCTION}\n")
        else:
            first, last = json.dumps(f"{tool['name']}\n"), '""'
        calls.append(f"{mark(HERMES)} {first} {inner} {last} {mark(END_HERMES)}")
    more = ' ("\\n" one)*' if several else ""
    return "\n".join([f"start: one{more}", f"one: {' | '.join(calls)}", *lines]) + "\n"


def _value_rule(where: str, schema: Any, shared: Mapping[str, Any]) -> str | None:
    """Return the rule of a value; None: any text."""
    if not _is_text(schema):
        return f"%json {json.dumps({**schema, **shared, 'x-guidance': {'whitespace_flexible': False}})}"
    schema = schema if isinstance(schema, Mapping) else {}
    if unkept := sorted(schema.keys() - TEXT_RULES):
        raise DataError(f"tools: {where} is a text with {unkept[0]!r}, which calls between tags cannot keep to.")
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if texts is None else " | ".join(json.dumps(str(text), ensure_ascii=False) for text in texts)
