"""The server in OpenAI's form: ``openai``'s own client, what is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError
from megalight.inference import SamplingParams
from megalight.serving import LLM, AsyncLLM
from megalight.serving import server as serving
from megalight.serving.engine_loop import EngineOutput, EngineRequest, OutputQueue
from megalight.serving.engine_status import EngineStatus
from megalight.serving.metrics import Metrics
from megalight.serving.openai import ChatBody, CompletionAnswer, CompletionBody
from megalight.serving.server import CONTROLS, PAGE, PAGE_HEADERS, Endpoints, Limits, app_of, check_host
from tests.support.source import ROOT

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu")


class Served:
    """A server in this process."""

    def __init__(
        self, folder: Path, keys: tuple[str, ...], limits: Limits | None, events: io.StringIO | None = None
    ) -> None:
        self.llm = AsyncLLM(folder, device="cpu")
        self.app = app_of(self.llm, "small", keys=keys, control_keys=["control"], limits=limits, events=events)
        self.endpoints: Endpoints = self.app.endpoints  # type: ignore[attr-defined]
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server")
        self.client = openai.AsyncOpenAI(
            api_key="secret", base_url="http://server/v1", http_client=self.http, max_retries=0
        )

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, headers=headers)

    def free(self) -> bool:
        """Whether nothing is left in the engine."""
        loop = self.llm.served.loop
        return loop.idle and loop.engine.blocks.free == loop.engine.blocks.count and not self.llm.unfinished


def run(
    folder: Path,
    test: Callable[[Served], Coroutine[Any, Any, None]],
    keys: tuple[str, ...] = (),
    seconds: float = 60,
    events: io.StringIO | None = None,
    **limits: Any,
) -> None:
    async def main() -> None:
        served = Served(folder, keys, Limits(**limits) if limits else None, events)
        try:
            inner = served.app.app  # type: ignore[attr-defined]
            async with inner.router.lifespan_context(inner):
                await asyncio.wait_for(test(served), seconds)
            for _ in range(100):
                if served.free():
                    break
                await asyncio.sleep(0.02)
            assert served.free(), "blocks are left"
        finally:
            await served.llm.shutdown()
            await served.http.aclose()

    asyncio.run(main())


def test_the_client_of_openai_gets_what_python_gets(folder: Path, llm: LLM) -> None:
    greedy = SamplingParams(temperature=0)
    (chat,) = llm.chat(HELLO, greedy, max_new_tokens=12, log_probs=True)
    plain = llm.generate(["naïve", "user"], greedy, max_new_tokens=12)

    async def test(served: Served) -> None:
        completions = served.client.chat.completions
        answer = await completions.create(messages=HELLO, logprobs=True, **GREEDY)
        choice = answer.choices[0]
        assert (choice.message.content, choice.message.role, choice.index) == (chat.text, "assistant", 0)
        assert choice.finish_reason == {"end": "stop", "length": "length"}[chat.reason]
        assert [each.logprob for each in choice.logprobs.content] == pytest.approx(chat.log_probs)
        assert answer.usage.to_dict(exclude_unset=False)["total_tokens"] == chat.usage["total_tokens"]
        assert answer.usage.prompt_tokens_details.cached_tokens >= 0
        stream = await completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == chat.text
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == choice.finish_reason
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert chunks[0].object == "chat.completion.chunk"

        both = await served.client.completions.create(prompt=["naïve", "user"], logprobs=0, **GREEDY)
        assert [each.text for each in both.choices] == [each.text for each in plain]
        assert len(both.choices[0].logprobs.token_logprobs) == len(plain[0].tokens)
        assert both.usage.completion_tokens == sum(len(each.tokens) for each in plain)
        texts = ["", ""]
        async for chunk in await served.client.completions.create(prompt=["naïve", "user"], stream=True, **GREEDY):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [each.text for each in plain]

        listed = [model async for model in await served.client.models.list()]
        assert [model.id for model in listed] == ["small"]
        assert (await served.client.models.retrieve("small")).object == "model"

    run(folder, test)


def test_choices_seeds_stops_echo_and_ids(folder: Path, llm: LLM) -> None:
    (whole,) = llm.generate("user: ", SamplingParams(temperature=0), max_new_tokens=20)
    hot = SamplingParams(temperature=1.5, top_k=40, top_p=0.9)
    seeded = [llm.generate("user: ", hot, max_new_tokens=6, seed=seed)[0] for seed in (7, 8, 9)]

    async def test(served: Served) -> None:
        create = served.client.completions.create
        several = await create(
            model="small",
            prompt="user: ",
            n=3,
            seed=7,
            temperature=1.5,
            top_p=0.9,
            max_tokens=6,
            extra_body={"top_k": 40, "return_token_ids": True},
        )
        assert [choice.text for choice in several.choices] == [each.text for each in seeded]
        assert [choice.token_ids for choice in several.choices] == [each.tokens for each in seeded]
        assert several.usage.prompt_tokens == seeded[0].prompt_tokens, "a prompt counts once"
        stop = whole.text[4:7]
        stopped = await create(prompt="user: ", stop=[stop], echo=True, **{**GREEDY, "max_tokens": 20})
        assert stopped.choices[0].text == "user: " + whole.text[: whole.text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
        ended = await create(prompt="user: ", extra_body={"stop_token_ids": [whole.tokens[2]]}, **GREEDY)
        assert ended.choices[0].finish_reason == "stop"
        assert ended.usage.completion_tokens == whole.tokens.index(whole.tokens[2]) + 1
        ids = (await served.post("/tokenize", {"prompt": "naïve 東京"})).json()["tokens"]
        assert (await served.post("/detokenize", {"tokens": ids})).json() == {"prompt": "naïve 東京"}
        chat = (await served.post("/tokenize", {"messages": HELLO})).json()
        assert chat["count"] == len(llm.served.chat_ids(HELLO))
        assert (await create(prompt=ids, **GREEDY)).choices == (await create(prompt="naïve 東京", **GREEDY)).choices

    run(folder, test)


def test_penalties_biases_and_log_probabilities_of_others(folder: Path, llm: LLM) -> None:
    (greedy,) = llm.generate("user: ", SamplingParams(temperature=0), max_new_tokens=6)
    (penal,) = llm.generate(
        "user: ", SamplingParams(temperature=0, presence_penalty=3.0, logit_bias={90: 4.0}), max_new_tokens=6
    )
    ids = llm.served.ids_of("user: ")
    (scored,) = llm.score([ids[:1]], [ids[1:]])
    (greedy_chat,) = llm.chat(HELLO, SamplingParams(temperature=0), max_new_tokens=6)

    async def test(served: Served) -> None:
        create, six = served.client.completions.create, {**GREEDY, "max_tokens": 6}
        found = await create(prompt="user: ", presence_penalty=3, logit_bias={"90": 4}, **six)
        assert found.choices[0].text == penal.text != greedy.text
        banned = await create(
            prompt="user: ", logit_bias={str(greedy.tokens[0]): -1e9}, extra_body={"return_token_ids": True}, **six
        )
        assert greedy.tokens[0] not in banned.choices[0].token_ids
        echoed = await create(prompt="user: ", echo=True, logprobs=3, **six)
        log_probs = echoed.choices[0].logprobs
        count = len(ids)
        assert log_probs.token_logprobs[0] is None
        assert sum(log_probs.token_logprobs[1:count]) == pytest.approx(scored.total, abs=1e-4)
        assert len(log_probs.tokens) == len(log_probs.text_offset) == count + len(greedy.tokens)
        assert log_probs.top_logprobs[:count] == [None] * count
        for value, top in zip(log_probs.token_logprobs[count:], log_probs.top_logprobs[count:], strict=True):
            assert value == pytest.approx(max(top.values())), "greedy"
        stream = await create(prompt="user: ", echo=True, logprobs=3, stream=True, **six)
        parts = [chunk.choices[0] async for chunk in stream]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
            assert joined == getattr(log_probs, name)
        assert "".join(part.text for part in parts) == echoed.choices[0].text
        chat = await served.client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=4, **six)
        options = {"logprobs": True, "top_logprobs": 4, "stream": True, "extra_body": {"return_token_ids": True}}
        stream = await served.client.chat.completions.create(messages=HELLO, **options, **six)
        parts = [chunk.choices[0] async for chunk in stream]
        assert [e for part in parts if part.logprobs for e in part.logprobs.content] == chat.choices[0].logprobs.content
        assert [token for part in parts for token in part.token_ids] == greedy_chat.tokens
        assert parts[0].prompt_token_ids == llm.served.chat_ids(HELLO)
        for token in chat.choices[0].logprobs.content:
            assert len(token.top_logprobs) == 4
            assert token.logprob == token.top_logprobs[0].logprob
            assert token.token == token.top_logprobs[0].token

    run(folder, test)


SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [1, 22]}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_answers_keep_to_a_schema_a_regular_expression_and_rules(folder: Path) -> None:
    pytest.importorskip("llguidance")

    async def test(served: Served) -> None:
        chat, plain = served.client.chat.completions.create, served.client.completions.create
        hot: dict[str, Any] = {"model": "small", "temperature": 1.3, "seed": 4, "n": 4, "max_tokens": 40}
        format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        whole = await chat(messages=HELLO, response_format=format, **hot)
        for choice in whole.choices:
            assert choice.finish_reason == "stop"
            assert json.loads(choice.message.content)["age"] in (1, 22)
        texts = [""] * 4
        async for chunk in await chat(messages=HELLO, response_format=format, stream=True, **hot):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        spoken = await chat(messages=HELLO, response_format={"type": "json_object"}, **{**hot, "max_tokens": 60})
        assert all(choice.message.content.lstrip().startswith("{") for choice in spoken.choices)
        for extra, pattern in (
            ({"regex": "[0-9]{3}-(ab|cd)"}, r"[0-9]{3}-(ab|cd)"),
            ({"grammar": 'start: "yes" | "no" X\nX: /!{1,3}/'}, r"yes|no!{1,3}"),
            ({"json": {"enum": ["a", "b"]}}, r'"(a|b)"'),
        ):
            found = await plain(prompt="user: ", extra_body={"structured_outputs": extra}, **hot)
            assert all(re.fullmatch(pattern, choice.text) for choice in found.choices), (extra, found)

    run(folder, test)


def test_grammars_that_explode_are_refused_and_others_go_on(folder: Path) -> None:
    pytest.importorskip("llguidance")

    async def test(served: Served) -> None:
        async def refused(extra: dict[str, Any], word: str) -> None:
            body = {**GREEDY, "prompt": "a", "structured_outputs": extra}
            answer = await served.post("/v1/completions", body)
            assert answer.status_code == 400, answer.text
            assert word in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "structured_outputs"
            assert len(answer.text) < 600

        await refused({"regex": "((a{1000}){1000}){1000}"}, "too")
        choices = [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(12)]
        await refused({"json": {"allOf": choices}}, "too large")
        await refused({"regex": "(a"}, "wrong")
        await refused({"regex": "a" * 70_000}, "fewer")
        await refused({"json": {"type": "word"}}, "wrong")
        await refused({"json": {"type": "string"}, "regex": "a"}, "one of")
        await refused({}, "one of")
        body = {**GREEDY, "prompt": "a", "structured_outputs": {"regex": "yes"}}
        assert (await served.post("/v1/completions", body)).json()["choices"][0]["text"] == "yes"
        # A grammar that takes too long ends the worker alone, and the next one has another.
        worker = served.endpoints._grammars
        assert worker is not None
        worker._seconds = 0.0
        await refused({"regex": "no+"}, "seconds")
        worker._seconds = 5.0
        assert (await served.post("/v1/completions", body)).json()["choices"][0]["text"] == "yes"

    run(folder, test)


TOOL = {"type": "function", "function": {"name": "age", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "age", "parameters": SCHEMA, "strict": True}}
BROKEN = {"id": "1", "type": "function", "function": {"name": "age", "arguments": "{"}}
BAD: list[tuple[dict[str, Any] | bytes, str, str | None]] = [
    (b"", "JSON", None),
    (b"[" * 100_000, "recursion", None),
    (b'{"model":"small","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion", None),
    (b'{"model":"small","prompt":"\\ud800"}', "JSON", None),
    (b'{"model":"small","prompt":"a","stop":"\\udc00"}', "JSON", None),
    (b'{"model":"small","prompt":"a","temperature":NaN}', "finite", "temperature"),
    (b'{"model":"small","prompt":"a","temperature":1e999}', "finite", "temperature"),
    (b"\xff\xfe", "JSON", None),
    ({"prompt": "a"}, "model", "model"),
    ({"model": "small"}, "prompt", "prompt"),
    ({"model": "small", "prompt": []}, "empty", "prompt"),
    ({"model": "small", "prompt": [[]]}, "empty", "prompt"),
    ({"model": "small", "prompt": [99999]}, "vocabulary", "prompt"),
    ({"model": "small", "prompt": [-1]}, "greater", "prompt"),
    ({"model": "small", "prompt": [True]}, "valid", "prompt"),
    ({"model": "small", "prompt": "a" * 3000}, "max_sequence_length", "prompt"),
    ({"model": "small", "prompt": "a", "max_tokens": 10**9}, "max_sequence_length", "prompt"),
    ({"model": "small", "prompt": "a", "max_tokens": 0}, "greater", "max_tokens"),
    ({"model": "small", "prompt": "a", "n": 10**9}, "64 are allowed", "n"),
    ({"model": "small", "prompt": ["a"] * 99}, "64 are allowed", "n"),
    ({"model": "small", "prompt": "a", "n": 0}, "greater", "n"),
    ({"model": "small", "prompt": "a", "temperature": -1}, "finite number, at least 0", "temperature"),
    ({"model": "small", "prompt": "a", "temperature": "1"}, "number", "temperature"),
    ({"model": "small", "prompt": "a", "top_p": 0}, "above 0", "top_p"),
    ({"model": "small", "prompt": "a", "seed": -5}, "seed is -5", "seed"),
    ({"model": "small", "prompt": "a", "stop": ""}, "none empty", "stop"),
    ({"model": "small", "prompt": "a", "stop": ["x"] * 99}, "at most", "stop"),
    ({"model": "small", "prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids is 99999", "stop_token_ids"),
    ({"model": "small", "prompt": "a", "stream_options": {"include_usage": True}}, "set stream", "stream_options"),
    ({"model": "small", "prompt": "a", "logprobs": 99}, "less than or equal to 20", "logprobs"),
    ({"model": "small", "prompt": "a", "min_p": 2}, "from 0 to 1", "min_p"),
    ({"model": "small", "prompt": "a", "repetition_penalty": 0}, "from 1e-30", "repetition_penalty"),
    ({"model": "small", "prompt": "a", "logit_bias": {"x": 1}}, "no token id", "logit_bias"),
    ({"model": "small", "prompt": "a", "logit_bias": {"99999": 1}}, "99999", "logit_bias"),
    ({"model": "small", "prompt": "a", "min_tokens": 99}, "min_tokens is 99", "min_tokens"),
    ({"model": "small", "prompt": "a", "best_of": 4}, "not served", "best_of"),
    ({"model": "small", "prompt": "a", "suffix": "b"}, "not served", "suffix"),
    ({"model": "small", "prompt": "a", "templerature": 1}, "no parameter", None),
    ({"model": "small", "messages": []}, "at least 1", "messages"),
    ({"model": "small", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "", "messages"),
    ({"model": "small", "messages": HELLO, "tools": [{"type": "function"}]}, "required", "tools"),
    ({"model": "small", "messages": HELLO, "tools": [TOOL]}, "none of the forms", "tools"),
    ({"model": "small", "messages": HELLO, "tools": [TOOL, TOOL]}, "same name", "tools"),
    ({"model": "small", "messages": HELLO, "tools": [STRICT]}, "strict", "tools"),
    ({"model": "small", "messages": HELLO, "tool_choice": "required"}, "needs tools", "tool_choice"),
    ({"model": "small", "messages": [{"role": "assistant", "tool_calls": [BROKEN]}]}, "no JSON", "messages"),
    ({"model": "small", "messages": HELLO, "response_format": {"type": "xml"}}, "Input should", "response_format"),
    ({"model": "small", "messages": HELLO, "response_format": {"type": "json_schema"}}, "together", "response_format"),
    ({"model": "small", "prompt": "a", "structured_outputs": {"regex": "a"}, "min_tokens": 2}, "not go", "min_tokens"),
    ({"model": "small", "messages": HELLO, "top_logprobs": 5}, "needs logprobs", "top_logprobs"),
]


def test_what_is_wrong_is_an_error_with_the_field_and_the_rule(folder: Path) -> None:
    async def test(served: Served) -> None:
        for body, message, param in BAD:
            chat = isinstance(body, dict) and "messages" in body
            answer = await served.post("/v1/chat/completions" if chat else "/v1/completions", body)
            assert answer.status_code == 400, (body if len(str(body)) < 200 else "long", answer.text)
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (body, error)
            assert message in error["message"]
            assert len(error["message"]) < 400
            assert str(folder) not in answer.text
        for path, body, status in (
            ("/v1/completions", {"model": "gpt-4", "prompt": "a"}, 404),
            ("/v1/nothing", {}, 404),
            ("/v1/models", {}, 405),
            ("/v1/completions", {"model": "small", "prompt": "a" * 5_000_000}, 413),
            ("/tokenize", {}, 400),
            ("/detokenize", {"tokens": [-1]}, 400),
            ("/detokenize", {"tokens": [272]}, 400),
            ("/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": "a" * 3000}]}, 400),
        ):
            answer = await served.post(path, body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")

    run(folder, test)


def test_a_stream_of_a_bad_request_is_no_stream(folder: Path) -> None:
    async def test(served: Served) -> None:
        with pytest.raises(openai.BadRequestError, match="max_sequence_length"):
            await served.client.completions.create(prompt="a" * 500, stream=True, **GREEDY)

    run(folder, test)


def test_a_template_that_refuses_or_loops_is_the_requests_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        async def refused(template: str | None, messages: list[dict[str, str]], message: str) -> None:
            monkeypatch.setattr(served.llm.served.words, "chat_template", template)
            served.llm.served.__dict__.pop("template", None)
            for path in ("/v1/chat/completions", "/tokenize"):
                answer = await served.post(path, {"model": "small", "messages": messages})
                assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text

        system = [{"role": "system", "content": "a"}, *HELLO]
        fails = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x{{ 1/0 if 0 }}"
        await refused(fails, system, "no system")
        await refused(None, HELLO, "no chat template")
        monkeypatch.setattr(serving, "TEMPLATE_SECONDS", 0.2)
        loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        await refused("{% if messages|length > 1 %}" + loop + "{% endif %}", system, "more than 0.2 seconds")
        monkeypatch.setattr(serving, "TEMPLATE_SECONDS", 10)
        await refused("{% for a in range(10**9) %}{% endfor %}", system, "the chat template refuses")

    run(folder, test)


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/small"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
]


def test_keys_are_needed_on_every_route(folder: Path) -> None:
    async def test(served: Served) -> None:
        app = served.app.app  # type: ignore[attr-defined]
        known = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}
        told = {(method, path.replace("/small", "/{name:path}")) for method, path in ROUTES[:-1]}
        others = {("GET", path) for path in ("/health", *PAGE)} | {("POST", path) for path in CONTROLS}
        assert told | others == known, "a new route needs a line in ROUTES"
        for method, path in ROUTES:
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": ""}):
                answer = await served.http.request(method, path, headers=header)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            answer = await served.http.request(method, path, headers={"Authorization": "Bearer secret"})
            assert answer.status_code != 401
        assert (await served.http.get("/health")).json() == {"status": "ok"}
        # Pages of other sites may not read answers.
        asks = {"Origin": "http://example.org", "Access-Control-Request-Method": "POST"}
        for answer in (
            await served.http.options("/v1/completions", headers={**asks, "Authorization": "Bearer secret"}),
            await served.http.get("/health", headers=asks),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]
        for host, status in (("::1", 200), ("192.168.1.2", 401), ("", 401)):
            transport = httpx.ASGITransport(served.app, client=(host, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as away:
                assert (await away.get("/health")).status_code == status
                assert (await away.get("/")).status_code == 200
        for path in CONTROLS:
            for key in ("secret", "", "Control"):
                assert (await served.http.post(path, headers={"Authorization": f"Bearer {key}"})).status_code == 401
        assert (await served.client.completions.create(prompt="a", **GREEDY)).choices

    run(folder, test, keys=("other", "secret"))
    check_host("127.0.0.1", [])
    check_host("::1", [])
    check_host("localhost", [])
    check_host("0.0.0.0", ["key"])
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(ConfigurationError, match="no API key"):
            check_host(host, [])


def test_the_page_is_three_files_that_ask_nobody_else(folder: Path) -> None:
    folder_of_page = ROOT / "megalight" / "serving" / "page"
    html, script = (folder_of_page / "index.html").read_text(), (folder_of_page / "page.js").read_text()
    assert {path.name for path in folder_of_page.iterdir()} == {file for file, _ in PAGE.values()}
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|srcdoc", script)

    async def test(served: Served) -> None:
        for path, (file, kind) in PAGE.items():
            answer = await served.http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
            assert {name: answer.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS
            assert answer.content == (folder_of_page / file).read_bytes()

    run(folder, test, keys=("secret",))


def test_too_many_requests_are_told_when_to_come_again(folder: Path) -> None:
    async def test(served: Served) -> None:
        body = {**GREEDY, "prompt": "user: ", "ignore_eos": True, "max_tokens": 60}
        first = asyncio.create_task(served.post("/v1/completions", body, Authorization="Bearer a"))
        await asyncio.sleep(0.03)
        second = await served.post("/v1/completions", body, Authorization="Bearer a")
        assert (second.status_code, second.json()["error"]["code"]) == (429, "concurrency_limit")
        assert int(second.headers["Retry-After"]) >= 1
        many = await served.post("/v1/completions", {**body, "n": 4}, Authorization="Bearer b")
        assert (many.status_code, many.json()["error"]["code"]) == (429, "queue_full")
        other = await served.post("/v1/completions", body, Authorization="Bearer b")
        assert (await first).status_code == other.status_code == 200
        third = await served.post("/v1/completions", body, Authorization="Bearer a")
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")

    run(folder, test, keys=("a", "b"), concurrency=1, per_minute=2, queue=4)


def test_a_first_token_that_does_not_come_is_told(folder: Path) -> None:
    async def test(served: Served) -> None:
        await served.llm.suspend()
        answer = await served.post("/v1/completions", {**GREEDY, "prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        await served.llm.resume()

    run(folder, test, first_token_seconds=0.05)


def test_a_server_is_paused_suspended_and_resumed(folder: Path) -> None:
    async def test(served: Served) -> None:
        async def control(path: str, state: str, ready: int) -> None:
            answer = await served.post(path, {}, Authorization="Bearer control")
            assert answer.json() == {"state": state}
            assert (await served.http.get("/ready")).status_code == ready

        body = {**GREEDY, "prompt": "user: ", "ignore_eos": True, "max_tokens": 60}
        expected = (await served.post("/v1/completions", body)).json()["choices"]
        for path, state in (("/pause", "paused"), ("/suspend", "suspended")):
            task = asyncio.create_task(served.post("/v1/completions", body))
            await asyncio.sleep(0.02)
            await control(path, state, 503)
            waiting = asyncio.create_task(served.post("/v1/completions", body))
            await asyncio.wait({waiting}, timeout=0.1)
            assert not waiting.done(), "accepted, and waits"
            await control("/resume", "running", 200)
            assert (await task).json()["choices"] == (await waiting).json()["choices"] == expected
        for values, text in (({"path": "/none"}, "/none"), ({"path": str(folder), "in_flight": "now"}, "in_flight")):
            answer = await served.post("/weights", values, Authorization="Bearer control")
            assert (answer.status_code, text in answer.json()["error"]["message"]) == (400, True)
        for path in ("0" * 3000, "a\0b"):
            answer = await served.post("/weights", {"path": path}, Authorization="Bearer control")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
        for path, methods in (await served.http.get("/openapi.json")).json()["paths"].items():
            for described in methods.values():
                assert {"200", "401", "503"} <= described["responses"].keys(), path
        answer = await served.post("/weights", {"path": str(folder)}, Authorization="Bearer control")
        assert answer.json() == {"state": "running", "weights_epoch": 1}
        assert (await served.post("/v1/completions", body)).json()["choices"] == expected
        assert 'megalight_weights_epoch{engine="0",model="small"} 1.0' in (await served.http.get("/metrics")).text
        answer = await served.post("/v1/embeddings", {"model": "small", "input": "a"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")

    run(folder, test)


SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.4"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "root_path": "",
    "scheme": "http",
    "headers": [],
    "server": ("server", 80),
    "client": ("me", 1),
}


@asynccontextmanager
async def asked(
    served: Served, body: dict[str, Any], sent: list[Any], send: Any = None
) -> AsyncIterator[asyncio.Event]:
    """A request whose client goes when the event is set."""
    gone, parts = asyncio.Event(), [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def keep(message: Any) -> None:
        sent.append(message)

    task = asyncio.create_task(served.app(dict(SCOPE), receive, send or keep))
    yield gone
    await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_blocks(folder: Path, stream: bool) -> None:
    async def test(served: Served) -> None:
        body = {**GREEDY, "prompt": ["a", "b"], "n": 2, "stream": stream, "ignore_eos": True, "max_tokens": 90}
        sent: list[Any] = []
        async with asked(served, body, sent) as gone:
            while served.llm.served.loop.idle or (stream and len(sent) < 3):
                await asyncio.sleep(0)
            gone.set()
        for _ in range(50):
            if served.free():
                break
            await asyncio.sleep(0.01)
        assert served.free()
        assert b"DONE" not in b"".join(message.get("body", b"") for message in sent)
        metrics = (await served.http.get("/metrics")).text
        assert 'megalight_completions_total{model="small",reason="aborted"} 4.0' in metrics

    run(folder, test)


def test_a_client_that_reads_too_slowly_is_left(folder: Path) -> None:
    async def test(served: Served) -> None:
        async def stuck(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        start = time.monotonic()
        body = {**GREEDY, "prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 90}
        async with asked(served, body, [], stuck):
            pass
        assert time.monotonic() - start < 5

    run(folder, test, idle_seconds=0.1)


def test_a_body_that_does_not_come_ends(folder: Path) -> None:
    async def test(served: Served) -> None:
        async def slow() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b'{"model":'
                await asyncio.sleep(0.02)

        answer = await served.http.post("/v1/completions", content=slow())
        assert answer.status_code == 408

        async def large() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 1000

        answer = await served.http.post("/v1/completions", content=large())
        assert answer.status_code == 413

    run(folder, test, body_seconds=0.2, body_bytes=10_000)


def test_an_error_of_the_engine_is_told_in_the_stream_and_by_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Served) -> None:
        engine = served.llm.served.loop.engine
        step, steps = engine.step, iter(range(5))

        def fails() -> Any:
            next(steps)
            return step()

        monkeypatch.setattr(engine, "step", fails)
        assert (await served.http.get("/ready")).status_code == 200
        answer = await served.post("/v1/completions", {**GREEDY, "prompt": "a", "stream": True, "ignore_eos": True})
        assert answer.status_code == 200
        assert "the engine has stopped" in answer.text
        assert "Traceback" not in answer.text
        assert (await served.http.get("/ready")).status_code == 503
        assert (await served.post("/v1/completions", {**GREEDY, "prompt": "a"})).status_code == 503
        served.llm.served.loop.abort_all()

    run(folder, test)


def test_metrics_count_what_was_done(folder: Path) -> None:
    async def test(served: Served) -> None:
        done = await served.client.completions.create(prompt="user: ", **GREEDY)
        page = (await served.http.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(values['megalight_completion_tokens_total{model="small"}']) == done.usage.completion_tokens
        assert float(values['megalight_prompt_tokens_total{model="small"}']) == done.usage.prompt_tokens
        assert float(values['megalight_time_to_first_token_seconds_count{model="small"}']) == 1
        assert (
            float(values['megalight_time_between_tokens_seconds_count{model="small"}'])
            == done.usage.completion_tokens - 1
        )
        own = '{engine="0",model="small"}'
        assert values[f"megalight_requests_running{own}"] == values[f"megalight_requests_waiting{own}"] == "0.0"
        assert values[f"megalight_cache_blocks_free{own}"] == values[f"megalight_cache_blocks{own}"]
        assert float(values[f"megalight_steps_total{own}"]) >= done.usage.completion_tokens
        for name, count in {
            "prompt_tokens_total": done.usage.prompt_tokens,
            "cached_prompt_tokens_total": 0,
            "completion_tokens_total": done.usage.completion_tokens,
            "time_to_first_token_seconds_count": 1,
            "time_between_tokens_seconds_count": done.usage.completion_tokens - 1,
            "completion_seconds_count": 1,
        }.items():
            assert float(values[f"megalight_engine_{name}{own}"]) == count
        first, whole, between = (
            float(values[f"megalight_engine_{name}_seconds_sum{own}"])
            for name in ("time_to_first_token", "completion", "time_between_tokens")
        )
        assert 0 < first < whole == pytest.approx(first + between)
        assert 0 < float(values[f"megalight_step_seconds_total{own}"]) <= whole
        await served.post("/v1/completions", {**GREEDY, "prompt": [9999]})
        told = [json.loads(line) for line in events.getvalue().splitlines()]
        assert [each["event"] for each in told] == ["add", "first_token", "finish", "add", "fail"]
        assert told[0]["id"] == told[2]["id"] == f"{done.id}-0"
        assert told[2]["completion_tokens"] == done.usage.completion_tokens
        assert told[0]["time"] <= told[1]["time"] <= told[2]["time"]

    events = io.StringIO()
    run(folder, test, events=events)


def test_metrics_count_guesses_of_all_engines() -> None:
    engines = {
        "a": EngineStatus(drafted=(4, 2), accepted=(3, 0)),
        "b": EngineStatus(drafted=(4, 2, 1), accepted=(2, 1, 0)),
    }
    page = Metrics(SimpleNamespace(engines=engines), "small").page().decode()  # type: ignore[arg-type]
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    for name, counts in {"draft_tokens": (8, 4, 1), "draft_tokens_accepted": (5, 1, 0)}.items():
        for position, count in enumerate(counts, 1):
            assert float(values[f'megalight_{name}_total{{model="small",position="{position}"}}']) == count
    assert float(values['megalight_draft_acceptance{model="small"}']) == pytest.approx(6 / 13)
    assert "draft" not in Metrics(SimpleNamespace(engines={"a": EngineStatus()}), "small").page().decode()  # type: ignore[arg-type]


def test_outputs_in_front_of_an_error_come_first() -> None:
    async def main() -> None:
        queue = OutputQueue([EngineRequest(id=name, prompt=[1], max_new_tokens=9) for name in "ab"])
        queue.put(EngineOutput(id="a", tokens=[1]))
        assert [output.tokens for output in await queue.get()] == [[1]]
        queue.put(EngineOutput(id="b", tokens=[2], reason="length"))
        assert queue.unfinished == {"a", "b"}
        queue.put(EngineOutput(id="a", error=ConfigurationError("wrong")))
        assert [output.id for output in await queue.get()] == ["b"]
        assert queue.unfinished == {"a"}
        with pytest.raises(ConfigurationError, match="wrong"):
            await queue.get()

    asyncio.run(main())


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_events_that_are_made_in_advance_are_those_of_json(chat: bool, usage: bool) -> None:
    body: Any = {"model": 'a "b" \0', "stream": True, "n": 2, "stream_options": {"include_usage": usage}}
    read = ChatBody.read if chat else CompletionBody.read
    body = read(json.dumps(body | ({"messages": HELLO} if chat else {"prompt": "x"})).encode())
    answer = CompletionAnswer(body, "id", [[1]], Tokenizer.train(["hello"], 260))
    texts = ["one", 'two "quoted"\n', "naïve 東京 🙂 \u2028", "\0"]
    outputs = [EngineOutput(id=f"id-{place % 2}", text=text, tokens=[1]) for place, text in enumerate(texts)]
    found = answer.events([*outputs, EngineOutput(id="id-1", tokens=[1], reason="length")]).decode("ascii")
    chunks = [json.loads(line.removeprefix("data: ")) for line in found.split("\n\n")[:-1]]
    told = [chunk["choices"][0] for chunk in chunks]
    assert [each["delta"].get("content", "") if chat else each["text"] for each in told] == [*texts, ""]
    assert [each["index"] for each in told] == [0, 1, 0, 1, 1]
    assert [each["finish_reason"] for each in told] == [None] * 4 + ["length"]
    assert all(chunk.keys() == chunks[-1].keys() and ("usage" in chunk) == usage for chunk in chunks)
    assert all(chunk["model"] == body.model and chunk["id"] == "id" for chunk in chunks)
