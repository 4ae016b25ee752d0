"""Calls of tools, and reasoning: as chat templates write them, in streams and whole answers."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from megalight.serving.engine_loop import EngineOutput, EngineRequest
from megalight.serving.tool_calls import AnswerParser, Part, ToolForm, rules
from tests.serving.test_server import HELLO, TOOL, Served, run

pytest.importorskip("openai")

HERMES = "{{ tools }}<tool_call></tool_call>"
LLAMA = '{{ tools }}{"name": function name, "parameters": dictionary}'
MISTRAL = "{{ tools }}[TOOL_CALLS]"
QWEN = "{{ tools }}<tool_call>\n<function=name>"
GLM = "{{ tools }}<tool_call>name\n<arg_key>"
CALL = '{"name": "age", "arguments": {"age": 22}}'
QWEN_CALL = (
    "<tool_call>\n<function=f>\n<parameter=x>\n3\n</b>\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n<arg_key>n</arg_key>\n<arg_value>[3]</arg_value>\n"
    "<arg_key>z</arg_key>\n<arg_value>4</arg_value>\n</tool_call>"
)
TOOLS: list[dict[str, Any]] = [
    {"name": "f", "parameters": {"properties": {"x": {"type": "string"}, "n": {"type": ["integer", "array"]}}}}
]
Found = tuple[str, str, list[tuple[str, str]]]
ANSWERS: list[tuple[ToolForm | None, bool, bool, str, Found]] = [
    (ToolForm.HERMES, False, False, f"Sure. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n",
     ("", "Sure.", [("age", '{"age": 22}')] * 2)),
    (ToolForm.HERMES, True, False, f"<think>\nhm <tool\n</think>\n\n<tool_call>{CALL}",
     ("hm <tool", "", [("age", '{"age": 22}')])),
    (ToolForm.HERMES, False, False, 'a <tool_call>{"name": "f", "ar', ("", 'a <tool_call>{"name": "f", "ar', [])),
    (ToolForm.HERMES, False, False, "a <tool_call>{x}</tool_call> b \n", ("", "a <tool_call>{x}</tool_call> b \n", [])),
    (ToolForm.HERMES, False, False, "a < b <tool", ("", "a < b <tool", [])),
    (ToolForm.HERMES, False, False, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
     ("", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', [])),
    (ToolForm.HERMES, False, False, "<tool_call>" + "[" * 5000 + "</tool_call>",
     ("", "<tool_call>" + "[" * 5000 + "</tool_call>", [])),
    (None, True, True, "\nwhy\n</think>\n\nyes \n", ("why", "yes \n", [])),
    (None, True, True, "it is cut", ("it is cut", "", [])),
    (None, True, False, "\n plain </think>", ("", "\n plain </think>", [])),
    (ToolForm.LLAMA, False, False, '{"name": "f", "parameters": {"x": "y"}}; {"name": "g", "parameters": {}}',
     ("", "", [("f", '{"x": "y"}'), ("g", "{}")])),
    (ToolForm.LLAMA, False, False, '{"a": 1} is no call', ("", '{"a": 1} is no call', [])),
    (ToolForm.LLAMA, False, False, ' Hi <|python_tag|>{"name": "f", "parameters": {}}', ("", " Hi", [("f", "{}")])),
    (ToolForm.MISTRAL, False, False, f"[TOOL_CALLS] [{CALL}, {CALL}]", ("", "", [("age", '{"age": 22}')] * 2)),
    (ToolForm.MISTRAL, False, False, '[TOOL_CALLS]f[ARGS]{"a": 2}[TOOL_CALLS]g[ARGS]{}',
     ("", "", [("f", '{"a": 2}'), ("g", "{}")])),
    (ToolForm.MISTRAL, False, False, "[TOOL_CALLS] [{", ("", "[TOOL_CALLS] [{", [])),
    (ToolForm.QWEN, True, False, f"<think></think>\nHm\n{QWEN_CALL}<tool_call>\n<function=g></function></tool_call>",
     ("", "Hm", [("f", '{"x": "3\\n</b>", "n": 3}'), ("g", "{}")])),
    (ToolForm.QWEN, False, False, QWEN_CALL[:-2], ("", QWEN_CALL[:-2], [])),
    (ToolForm.QWEN, False, False, "<tool_call><function=f><parameter=x></tool_call></parameter></function></tool_call>",
     ("", "", [("f", '{"x": "</tool_call>"}')])),
    (ToolForm.QWEN, False, False, "<tool_call><function=f>x</function></tool_call>.",
     ("", "<tool_call><function=f>x</function></tool_call>.", [])),
    (ToolForm.GLM, False, False, f"So {GLM_CALL}{GLM_CALL}", ("", "So", [("f", '{"x": "3", "n": [3], "z": "4"}')] * 2)),
    (ToolForm.GLM, False, False, "<tool_call>g</tool_call>", ("", "", [("g", "{}")])),
    (ToolForm.GLM, False, False, GLM_CALL[:-3], ("", GLM_CALL[:-3], [])),
    (ToolForm.GLM, False, False, "<tool_call>f\n<arg_key>x</arg_key></tool_call>",
     ("", "<tool_call>f\n<arg_key>x</arg_key></tool_call>", [])),
]  # fmt: skip


def joined(parts: list[Part]) -> Found:
    calls = [(part.call.name, part.call.arguments) for part in parts if part.call is not None]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


@pytest.mark.parametrize(("form", "thinks", "thinking", "text", "expected"), ANSWERS)
def test_an_answer_reads_the_same_however_it_is_cut(
    form: ToolForm | None, thinks: bool, thinking: bool, text: str, expected: Found
) -> None:
    cuts = random.Random(0)
    for size in (1, 2, 3, 7, len(text), 0):
        parser, parts, place = AnswerParser(form, thinks=thinks, thinking=thinking, tools=TOOLS), list[Part](), 0
        while place < len(text):
            count = size or cuts.randint(1, 9)
            parts += parser.add(text[place : place + count])
            place += count
        assert joined(parts + parser.finish()) == expected


def test_forms_follow_from_templates() -> None:
    found = [ToolForm.of(template) for template in (HERMES, LLAMA, MISTRAL, QWEN, GLM, "{{ messages }}")]
    assert found == [*map(ToolForm, ("hermes", "llama", "mistral", "qwen", "glm")), None]


def say(served: Served, text: str, reason: Any = "end") -> None:
    """Let the model say something, three characters a step."""

    async def subscribe(requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        [request] = requests
        for place in range(0, len(text), 3):
            yield [EngineOutput(id=request.id, text=text[place : place + 3], tokens=[1])]
        yield [EngineOutput(id=request.id, tokens=[2], reason=reason)]

    served.llm.subscribe = subscribe  # type: ignore[assignment,method-assign]


def template(served: Served, more: str) -> None:
    words = served.llm.served.words
    words.chat_template = f"{words.chat_template}{{# tools {more} #}}"
    served.llm.served.__dict__.pop("template", None)


async def both(served: Served, **options: Any) -> tuple[Any, Any]:
    """The message and the reason of a whole answer; those of a stream must be the same."""
    create = served.client.chat.completions.create
    whole = (await create(model="small", **options)).choices[0]
    message: dict[str, Any] = {"reasoning_content": "", "content": ""}
    calls: list[Any] = []
    reasons = []
    async for chunk in await create(model="small", stream=True, **options):
        delta = chunk.choices[0].delta.model_dump()
        message = {name: message[name] + (delta.get(name) or "") for name in message}
        for call in delta["tool_calls"] or []:
            assert call["index"] == len(calls)
            calls.append((call["type"], call["function"]))
        reasons.append(chunk.choices[0].finish_reason)
    found = whole.message.model_dump()
    assert message == {name: found.get(name) or "" for name in message}
    assert calls == [(call["type"], call["function"]) for call in found["tool_calls"] or []]
    assert {*reasons[:-1]} == {None}
    assert reasons[-1] == whole.finish_reason
    return whole.message, whole.finish_reason


def test_calls_and_reasoning_are_told_apart_and_calls_that_are_cut_are_none(folder: Path) -> None:
    async def test(served: Served) -> None:
        template(served, "<tool_call> </think>")
        say(served, f"<think>\nwell\n</think>\n\nSo:\n<tool_call>\n{CALL}\n</tool_call>")
        message, reason = await both(served, messages=HELLO, tools=[TOOL])
        assert (message.reasoning_content, message.content, reason) == ("well", "So:", "tool_calls")
        assert json.loads(message.tool_calls[0].function.arguments) == {"age": 22}
        # What was answered can be sent again.
        again = [
            *HELLO,
            message.model_dump(),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x"},
        ]
        assert (await both(served, messages=again, tools=[TOOL]))[1] == "tool_calls"
        say(served, f"<tool_call>\n{CALL}\n</tool_call>")
        message, _ = await both(served, messages=HELLO, tools=[TOOL])
        assert message.content is None
        say(served, "<tool_call>\n{", "length")
        message, reason = await both(served, messages=HELLO, tools=[TOOL])
        assert (message.tool_calls, reason) == (None, "length")
        say(served, f"<tool_call>{CALL}</tool_call><tool_call>", "length")
        message, reason = await both(served, messages=HELLO, tools=[TOOL])
        assert (len(message.tool_calls), reason) == (1, "length")
        message, reason = await both(served, messages=HELLO, tools=[TOOL], tool_choice="none")
        assert message.tool_calls is None

    run(folder, test)


@pytest.mark.parametrize(("form", "call"), [(ToolForm.QWEN, QWEN_CALL), (ToolForm.GLM, GLM_CALL)])
def test_rules_of_tags_keep_to_the_schemas(form: ToolForm, call: str, folder: Path) -> None:
    package, tokenizer = pytest.importorskip("llguidance"), Tokenizer.load(folder)
    words = package.LLTokenizer(tokenizer.to_json(), n_vocab=272, eos_token=[tokenizer.eod_id])
    properties = {**TOOLS[0]["parameters"]["properties"], "z": {"type": "string", "enum": ["4", "5"]}}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["x"]}}]
    grammar = package.LLMatcher.grammar_from_lark(rules(form, tools, {}, several=False))

    def fits(text: str) -> bool:
        matcher, ids = package.LLMatcher(words, grammar, log_level=0), tokenizer.encode(text)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())

    assert fits(call)
    assert not fits(call + call)
    assert not fits(call.replace(">z<", ">y<").replace("<parameter=n>", "<parameter=y>")), "there is no y"
    assert not fits(call.replace("n>\n3", "n>\nx").replace("[3]", "[x]")), "n is no text"
    properties["x"] = {"type": "string", "pattern": "a"}
    with pytest.raises(DataError, match=r"f\.x is a text with 'pattern'"):
        rules(form, tools, {}, several=False)


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, GLM])
def test_an_answer_that_must_call_a_tool_does(folder: Path, form: str) -> None:
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "age"}}
    other = {"type": "function", "function": {"name": "other"}}

    async def test(served: Served) -> None:
        template(served, form.replace("{{ tools }}", ""))
        options = {"messages": HELLO, "seed": 3, "max_tokens": 80, "temperature": 1.4, "parallel_tool_calls": False}
        for choice, tools in ((named, [TOOL, other]), ("required", [TOOL])):
            message, reason = await both(served, tools=tools, tool_choice=choice, **options)
            assert reason == "tool_calls", message
            (call,) = message.tool_calls
            assert call.function.name == "age"
            assert json.loads(call.function.arguments)["age"] in (1, 22)

    run(folder, test)
