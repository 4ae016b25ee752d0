"""A server that speaks OpenAI's API: routes, streams, API keys and limits."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import ipaddress
import logging
import signal
import socket
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TextIO, TypeVar

import fastapi
import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megalight import __version__
from megalight.errors import ConfigurationError, DataError, MegalightError, integer
from megalight.inference.grammar import GrammarSource
from megalight.serving.async_llm import AsyncClient
from megalight.serving.encoder_client import AsyncEncoder
from megalight.serving.engine_loop import EngineOutput, EngineRequest
from megalight.serving.grammar_worker import GrammarWorker
from megalight.serving.metrics import Metrics
from megalight.serving.openai import (
    COMPLETION_TOKENS,
    APIError,
    Body,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    WeightsBody,
    choice_id,
    event,
    refused,
)
from megalight.serving.served_model import NO_EMBEDDINGS
from megalight.serving.tool_calls import END_THINK, THINK, AnswerParser, ToolForm, marks_of, rules

log = logging.getLogger(__name__)
T = TypeVar("T")
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Paths of the page for a browser -> the file, and its kind."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""A browser runs the page's own script alone, and asks this server alone."""
CONTROLS = ("/pause", "/suspend", "/resume", "/weights")
"""Routes for whoever runs the server, with a key of their own."""
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field, and the rule that it breaks"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "There is no such model"},
    408: {"description": "The body has not come in time"},
    413: {"description": "The body is too large"},
    429: {"description": "There are too many requests; Retry-After says when to come again"},
    503: {"description": "The engine has stopped, or gives no token in time"},
}
"""Statuses of errors that routes declare."""
TEMPLATE_SECONDS = 10.0
"""Time in which a chat template must write a conversation."""
CLOSED_REQUEST = 499
"""The status of a request whose client has gone."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts. Seconds and numbers are at least 1.

    Attributes:
        body_bytes: bytes of a body; more are refused with 413.
        body_seconds: time in which a body must have come; then 408.
        choices: completions of a request: its prompts times ``n``.
        queue: completions in the engine, running and waiting; more are refused with 429.
        concurrency: requests of a key at a time; None: any.
        per_minute: requests of a key in a minute; None: any.
        first_token_seconds: time in which a first token must come; then 503. None: any.
        idle_seconds: time in which a client must read a part of a stream; then it ends.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30
    choices: int = 64
    queue: int = 1024
    concurrency: int | None = None
    per_minute: int | None = None
    first_token_seconds: float | None = None
    idle_seconds: float = 60


class Keys:
    """The API keys, and what each of them may do at a time.

    Args:
        keys: the keys; none: everyone may use the server, as one client.
    """

    def __init__(self, keys: Sequence[str], limits: Limits) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._limits = limits
        self._running: defaultdict[bytes, int] = defaultdict(int)
        self._times: defaultdict[bytes, deque[float]] = defaultdict(deque)

    def client(self, authorization: str) -> bytes:
        """Return the client of a header.

        Raises:
            APIError: it has no key, or a wrong one.
        """
        if not self._digests:
            return b""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All of them, so that the time says nothing of the keys.
        same = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != "bearer" or not any(same):
            raise APIError(
                401, "the API key is missing or wrong; send it as Authorization: Bearer KEY.", None, "invalid_api_key"
            )
        return digest

    @contextmanager
    def admitted(self, client: bytes) -> Iterator[None]:
        """Surround a request of a client.

        Raises:
            APIError: it has too many.
        """
        limits, now, times = self._limits, time.monotonic(), self._times[client]
        if limits.per_minute is not None:
            while times and times[0] <= now - 60:
                times.popleft()
            if len(times) >= limits.per_minute:
                wait = int(times[0] + 60 - now) + 1
                raise APIError(
                    429, f"this key has {limits.per_minute} requests a minute; wait.", None, "rate_limit_exceeded", wait
                )
            times.append(now)
        if limits.concurrency is not None and self._running[client] >= limits.concurrency:
            raise APIError(
                429,
                f"this key has {limits.concurrency} requests at a time; wait for one.",
                None,
                "concurrency_limit",
                1,
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1


@dataclass
class Gate:
    """The ASGI layer in front of all routes: keys, sizes and times of bodies, clients that read too slowly."""

    app: ASGIApp
    endpoints: Endpoints
    keys: Keys
    control_keys: Keys | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            client, authorization = b"", headers.get(b"authorization", b"").decode("latin-1")
            if scope["path"] in CONTROLS and self.control_keys is not None:
                self.control_keys.client(authorization)
            elif not _open(scope):
                client = self.keys.client(authorization)
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > self.endpoints.limits.body_bytes:
                raise self._too_large()
            with self.keys.admitted(client) if scope["path"].startswith("/v1/") else contextlib.nullcontext():
                await self.app(scope, self._bounded(receive), self._patient(send))
        except APIError as error:
            await _response(error)(scope, receive, send)

    def _too_large(self) -> APIError:
        return APIError(413, f"the body has more than {self.endpoints.limits.body_bytes} bytes; send less.")

    def _bounded(self, receive: Receive) -> Receive:
        limits = self.endpoints.limits
        read, deadline, whole = 0, time.monotonic() + limits.body_seconds, False

        async def bounded() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise APIError(
                    408, f"the body has not come within {self.endpoints.limits.body_seconds:g} seconds."
                ) from error
            read += len(message.get("body", b""))
            if read > limits.body_bytes:
                raise self._too_large()
            whole = not message.get("more_body", False)
            return message

        return bounded

    def _patient(self, send: Send) -> Send:
        async def patient(message: Message) -> None:
            sending = _Begun(send(message))  # type: ignore[arg-type]
            if sending.done:
                return  # as most do: a timer for each event would take as long as the event
            try:
                async with asyncio.timeout(self.endpoints.limits.idle_seconds):
                    await sending
            except TimeoutError as error:
                # As if it had gone: the request is aborted, and its blocks are free.
                raise OSError("the client has stopped reading") from error

        return patient


class _Begun:
    """A coroutine that has run up to where it first waits. Await the rest of it.

    Attributes:
        done: whether there is no rest.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self.done, self._work = False, work
        self._resume(work.send, None)

    def _resume(self, act: Callable[[Any], Any], value: Any) -> None:
        try:
            self._waits_for = act(value)
        except StopIteration:
            self.done = True

    def __await__(self) -> Generator[Any, Any, None]:
        while not self.done:
            try:
                found = yield self._waits_for
            except BaseException as error:
                self._resume(self._work.throw, error)
            else:
                self._resume(self._work.send, found)


def _open(scope: Scope) -> bool:
    """Return whether a route needs no key: the files of the page, as browsers send none; life, on this machine."""
    if scope["path"] == "/health":
        host, _ = scope.get("client") or ("", 0)
        return is_loopback(host)
    return scope["path"] in PAGE


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _response(error: APIError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


@dataclass(frozen=True)
class _Answered:
    """What a route has made of a body.

    Attributes:
        limits: maximum numbers of new tokens, for each prompt.
        ends: tokens that end a completion.
        parser: returns what reads an answer; None: its text is all there is.
        form: how calls of tools are written.
        grammar: what an answer may be.
        special_text: special tokens that are text.
    """

    prefix: str
    prompts: Sequence[list[int]]
    limits: Sequence[int]
    ends: frozenset[int]
    parser: Callable[[], AnswerParser | None] = lambda: None
    form: ToolForm | None = None
    grammar: GrammarSource | None = None
    special_text: frozenset[int] = frozenset()


@dataclass
class Endpoints:
    """The routes of a server.

    Attributes:
        events: see :class:`~megalight.serving.metrics.Metrics`.
    """

    llm: AsyncClient
    name: str
    limits: Limits
    events: TextIO | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.llm, self.name, self.events)
        self._grammars: GrammarWorker | None = None
        self._state, self._controlling = "running", asyncio.Lock()
        self.llm.served.prepare_template()

    async def health(self) -> Response:
        """Say that the process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Say whether requests are accepted: 200, or 503."""
        self._check_engine()
        if self._state != "running":
            raise APIError(503, f"the engine is {self._state}.", None, self._state)
        return JSONResponse({"status": "ready"})

    async def pause(self) -> Response:
        """Stop the engine after the step that runs. Requests are accepted, and wait."""
        return await self._control(self.llm.pause, "paused")

    async def suspend(self) -> Response:
        """Give the memory of the engine's cache back, too."""
        return await self._control(self.llm.suspend, "suspended")

    async def resume(self) -> Response:
        """Go on with all requests."""
        return await self._control(self.llm.resume, "running")

    async def weights(self, request: Request) -> Response:
        """Replace the weights of all engines. They stop meanwhile."""
        body = WeightsBody.read(await request.body())
        self._check_engine()
        async with self._controlling:
            try:
                epoch = await self.llm.update_weights(body.path, in_flight=body.in_flight)
            except MegalightError as error:
                self._check_engine()
                raise APIError(400, str(error), "path") from error
            except (OSError, ValueError) as error:  # too long, or with a NUL
                raise APIError(400, "path is no name of a folder; give that of a checkpoint.", "path") from error
        return JSONResponse({"state": self._state, "weights_epoch": epoch})

    async def _control(self, act: Callable[[], Awaitable[None]], state: str) -> Response:
        self._check_engine()
        async with self._controlling:
            await act()
            self._state = state
        return JSONResponse({"state": state})

    def _check_engine(self) -> None:
        if self.llm.failure is not None:
            raise APIError(503, "the engine has stopped.")

    async def embeddings(self, request: Request) -> Response:
        """Return embeddings of texts."""
        if not isinstance(self.llm, AsyncEncoder):
            raise APIError(404, f"{self.name!r} {NO_EMBEDDINGS}", "model", "unsupported_model")
        body = EmbeddingBody.read(await request.body())
        self._check_name(body.model)
        self._check_queue(len(body.inputs))
        with _refusing(body):
            outputs = await self.llm.embed(body.inputs, body.dimensions)
        return JSONResponse(body.answer(outputs))

    def _check_generates(self) -> None:
        if isinstance(self.llm, AsyncEncoder):
            what = f"{self.name!r} is an encoder, which generates no text; ask /v1/embeddings."
            raise APIError(404, what, "model", "unsupported_model")

    async def metrics_page(self) -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, Any]:
        longest = self.llm.served.max_sequence_length
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "megalight",
            "max_model_len": longest,
        }

    async def models(self) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """Describe the model."""
        self._check_name(name)
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body = TokenizeBody.read(await request.body())
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "give prompt or messages, and not both.", "prompt")
        self._check_name(body.model)
        served = self.llm.served
        with _refusing(body):
            if body.messages is None:
                ids = await asyncio.to_thread(served.ids_of, body.prompt or "")
            else:
                tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
                messages = [each.values for each in body.messages]
                ids = await asyncio.to_thread(interrupted, lambda: served.chat_ids(messages, tools or None))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.max_sequence_length})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = DetokenizeBody.read(await request.body())
        self._check_name(body.model)
        if max(body.tokens, default=0) >= (size := self.llm.served.vocab_size):
            raise APIError(400, f"tokens has ids outside of the vocabulary, 0 to {size - 1}.", "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self.llm.served.words.decode, body.tokens)})

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        self._check_generates()
        body = CompletionBody.read(await request.body())
        self._check_name(body.model)
        prompts = body.prompts
        self._check_count(len(prompts) * (body.n or 1))
        with _refusing(body):
            ids = [await asyncio.to_thread(self.llm.served.ids_of, each) for each in prompts]
            limits = [body.max_tokens or min(COMPLETION_TOKENS, self.llm.served.room(each)) for each in ids]
        answered = _Answered("cmpl", ids, limits, self.llm.served.ends, grammar=body.grammar)
        return await self._answer(request, body, answered)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        self._check_generates()
        body = ChatBody.read(await request.body())
        self._check_name(body.model)
        self._check_count(body.n or 1)
        served = self.llm.served
        with _refusing(body):
            tools, form, source = body.callable_tools, None, served.template.source
            if tools and (form := ToolForm.of(source)) is None:
                raise APIError(400, "tools: the model's chat template has none of the forms of tools served.", "tools")
            messages = [each.values for each in body.messages]
            text = await asyncio.to_thread(
                interrupted, lambda: served.template.render(messages, tools or None, answer=True)
            )
            ids = await asyncio.to_thread(served.ids_of, text)
            ends = served.ends | served.template_ends
            grammar = body.grammar
            # Answers that a grammar describes hold no reasoning.
            thinks = END_THINK in source and grammar is None and not (tools and body.forced_tools)
            specials = served.words.specials
            marks = {mark: specials[mark] for mark in marks_of(form, thinks) if mark in specials}
            if forced := body.forced_tools if tools else []:
                assert form is not None
                several = body.parallel_tool_calls is not False
                grammar = GrammarSource("lark", rules(form, forced, marks, several=several))
        thinking = thinks and text.rstrip().endswith(THINK)

        def parser() -> AnswerParser | None:
            if not thinks and form is None:
                return None
            functions = [tool["function"] for tool in tools]
            return AnswerParser(form, thinks=thinks, thinking=thinking, tools=functions)

        limit = body.max_completion_tokens or body.max_tokens or served.room(ids)
        answered = _Answered("chatcmpl", [ids], [limit], ends, parser, form, grammar, frozenset(marks.values()))
        return await self._answer(request, body, answered)

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise APIError(404, f"the model is called {self.name!r}; there is no other.", "model", "model_not_found")

    def _check_count(self, count: int) -> None:
        if count > self.limits.choices:
            raise APIError(400, f"n: the request has {count} completions, and {self.limits.choices} are allowed.", "n")
        self._check_queue(count)

    def _check_queue(self, count: int) -> None:
        if (waiting := self.llm.unfinished) + count > self.limits.queue:
            raise APIError(
                429, f"{waiting} completions run or wait already; send the request again.", None, "queue_full", 1
            )

    async def _answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        answered: _Answered,
    ) -> Response:
        """Run the completions of a request, and answer when all have ended, or in chunks."""
        if body.stream_options is not None and not body.stream:
            raise APIError(400, "stream_options is for streams; set stream.", "stream_options")
        top, prompts = body.top_log_probs, answered.prompts
        name = f"{answered.prefix}-{uuid.uuid4().hex}"
        if answered.grammar is not None:
            await self._compile(body, answered.grammar)
        with _refusing(body):
            each = body.n or 1
            requests = [
                EngineRequest(
                    id=choice_id(name, place),
                    prompt=prompts[place // each],
                    max_new_tokens=answered.limits[place // each],
                    sampling_params=body.sampling_params,
                    ends={*(() if body.ignore_eos else answered.ends), *(body.stop_token_ids or ())},
                    stop=body.stops,
                    seed=None if body.seed is None else body.seed + place,
                    log_probs=top is not None,
                    top_log_probs=top or 0,
                    prompt_log_probs=body.prompt_log_probs,
                    grammar=answered.grammar,
                    special_text=answered.special_text,
                )
                for place in range(each * len(prompts))
            ]
        answer = CompletionAnswer(body, name, prompts, self.llm.served.words, answered.parser, answered.form)
        outputs = self.metrics.measured(requests)
        # The first output decides: what the engine refuses is an error of the request, also of a stream.
        try:
            first = await while_connected(request.receive, self._first(outputs, body))
        except BaseException:
            await outputs.aclose()  # type: ignore[attr-defined]
            raise
        if body.stream:
            return EventStream(self._events(answer, first, outputs, body))
        async with aclosing(outputs):  # type: ignore[type-var]

            async def rest() -> None:
                answer.take(first)
                async for several in outputs:
                    answer.take(several)

            await while_connected(request.receive, rest())
        return JSONResponse(answer.whole())

    async def _compile(self, body: CompletionBody | ChatBody, grammar: GrammarSource) -> None:
        """Compile what the completions may be.

        Raises:
            APIError: it is wrong, or too large.
        """
        with _refusing(body):
            served, field = self.llm.served, "structured_outputs" if body.structured_outputs else "response_format"
            field = field if body.grammar is not None else "tools"
            if not served.grammar_ends():
                raise APIError(400, f"{field} needs a token that ends a text, and this model has none.", field)
            if self._grammars is None:
                words, size = served.words.to_json(), served.vocab_size
                self._grammars = GrammarWorker(words, size, sorted(served.grammar_ends()))
            if (fault := await self._grammars.fault(grammar.kind, grammar.text)) is not None:
                raise APIError(400, f"{field}: the {grammar.kind} is wrong or too large: {fault}.", field)
            await self.llm.prepare(grammar)

    async def close(self) -> None:
        """End what answers have started."""
        if self._grammars is not None:
            await self._grammars.close()

    async def _first(self, outputs: AsyncIterator[list[EngineOutput]], body: Body) -> list[EngineOutput]:
        with _refusing(body, lost=lambda: self.llm.failure is not None):
            try:
                async with asyncio.timeout(self.limits.first_token_seconds):
                    return await anext(outputs)
            except TimeoutError as error:
                seconds = self.limits.first_token_seconds
                raise APIError(
                    503, f"no token has come within {seconds:g} seconds; try again.", None, "overloaded", 1
                ) from error

    async def _events(
        self,
        answer: CompletionAnswer,
        first: list[EngineOutput],
        outputs: AsyncIterator[list[EngineOutput]],
        body: CompletionBody | ChatBody,
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream, together those that are there. An error in the midst of it is the last one."""
        try:
            async with aclosing(outputs):  # type: ignore[type-var]
                if begin := answer.first_events():
                    yield begin
                several: list[EngineOutput] | None = first
                while several is not None:
                    if events := answer.events(several):
                        yield events
                    several = await anext(outputs, None)
            if body.wants_usage:
                yield event(answer.usage_chunk())
        except APIError as error:
            yield event(error.body)
        except MegalightError:
            yield event(APIError(503, "the engine has stopped; send the request again.").body)
        yield b"data: [DONE]\n\n"


@contextmanager
def _refusing(body: Body, lost: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn errors of this package into those of the API."""
    try:
        yield
    except (ConfigurationError, DataError) as error:
        raise refused(error, body) from error
    except MegalightError as error:
        raise APIError(503, "the engine has stopped; send the request again.", None, "unavailable", 1) from error


class _Interrupted(BaseException):
    """Ends a template that runs for too long."""


def interrupted(work: Callable[[], T]) -> T:
    """Return what running a template gives.

    Raises:
        DataError: it takes more than :data:`TEMPLATE_SECONDS`.
    """
    thread, lock, ended, late = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False, False

    def interrupt() -> None:
        nonlocal late
        with lock:
            if not ended:
                late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupted))

    timer = threading.Timer(TEMPLATE_SECONDS, interrupt)
    timer.daemon = True
    timer.start()
    try:
        found = work()
        with lock:
            ended = True
        while late:
            time.sleep(0)  # the exception comes here, and not later
        return found
    except _Interrupted:
        raise DataError(f"the chat template takes more than {TEMPLATE_SECONDS:g} seconds for these messages.") from None
    finally:
        timer.cancel()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return what work gives, and stop it when the client goes.

    Raises:
        APIError: the client has gone. Nobody reads it.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(CLOSED_REQUEST, "the client has gone.")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(StreamingResponse):
    """Events that end when the client goes: at once, and not with the next event."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._events):  # type: ignore[type-var]
            with contextlib.suppress(APIError, OSError):
                await while_connected(receive, self.stream_response(send))


def app_of(
    llm: AsyncClient,
    name: str,
    *,
    keys: Sequence[str] = (),
    control_keys: Sequence[str] = (),
    limits: Limits | None = None,
    events: TextIO | None = None,
) -> ASGIApp:
    """Return the server as an ASGI app.

    Args:
        llm: completes prompts.
        name: the model's name in the API.
        keys: the API keys; none: everyone may use it.
        control_keys: the keys of :data:`CONTROLS`; none: there are no such routes.
        limits: what is accepted.
        events: see :class:`~megalight.serving.metrics.Metrics`.
    """
    limits = limits or Limits()
    routes = Endpoints(llm, name, limits, events)

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await routes.close()

    app = fastapi.FastAPI(title="Megalight", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    for path, route, body in (
        ("/v1/completions", routes.completions, CompletionBody),
        ("/v1/chat/completions", routes.chat, ChatBody),
        ("/v1/embeddings", routes.embeddings, EmbeddingBody),
        ("/tokenize", routes.tokenize, TokenizeBody),
        ("/detokenize", routes.detokenize, DetokenizeBody),
    ):
        app.post(path, response_model=None, responses=ERRORS, openapi_extra=_described(body, name))(route)
    for path, get in (
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
    ):
        app.get(path, response_model=None, responses=ERRORS)(get)

    app.get("/metrics", response_model=None, response_class=PlainTextResponse, responses=ERRORS)(routes.metrics_page)
    if control_keys:
        for path, control in zip(CONTROLS, (routes.pause, routes.suspend, routes.resume), strict=False):
            app.post(path, response_model=None, responses=ERRORS)(control)
        described = _described(WeightsBody, name)
        app.post("/weights", response_model=None, responses=ERRORS, openapi_extra=described)(routes.weights)
    for path, (file, kind) in PAGE.items():
        app.get(path, response_model=None, include_in_schema=False)(_page_route(file, kind))

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return _response(error)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "there is no such route" if error.status_code == 404 else str(error.detail)
        return _response(APIError(error.status_code, f"{request.method} {request.url.path[:80]}: {what}."))

    async def broken(_: Request, error: Exception) -> Response:
        # uvicorn logs the traceback; the client gets none of it.
        return _response(APIError(500, "the server has failed; its log says why."))

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Exception, broken)
    return Gate(app, routes, Keys(keys, limits), Keys(control_keys, limits) if control_keys else None)


def _page_route(file: str, kind: str) -> Callable[[], Awaitable[Response]]:
    data = (files("megalight.serving") / "page" / file).read_bytes()

    async def page() -> Response:
        return Response(data, media_type=f"{kind}; charset=utf-8", headers=PAGE_HEADERS)

    return page


def _described(body: type[Body], name: str) -> dict[str, Any]:
    """Return what OpenAPI says of a body, with the model's name. Routes read it: FastAPI's reader recurses in deeply
    nested ones.
    """
    schema = _flat(body.model_json_schema())
    if (model := schema["properties"].get("model")) is not None:
        model["enum"] = [name] if "model" in schema.get("required", ()) else [name, None]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema with its definitions in place, as OpenAPI has no ``$defs`` inside of a schema."""
    definitions = schema.pop("$defs", {})

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return placed(definitions[value["$ref"].rpartition("/")[2]])
            return {key: placed(each) for key, each in value.items()}
        return [placed(each) for each in value] if isinstance(value, list) else value

    found: dict[str, Any] = placed(schema)
    return found


def check_host(host: str, keys: Sequence[str]) -> None:
    """Refuse to listen to other machines without a key.

    Raises:
        ConfigurationError: there is none.
    """
    if not is_loopback(host) and not keys:
        raise ConfigurationError(
            f"host (--host) is {host}, which other machines reach, and there is no API key; give one (--api-key, or "
            "MEGALIGHT_API_KEY), or listen on 127.0.0.1."
        )


class _Server(uvicorn.Server):
    """Ends with the code 0 after SIGTERM and Ctrl-C, when all streams have ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def serve(
    llm: AsyncClient,
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: Sequence[str] = (),
    control_keys: Sequence[str] = (),
    limits: Limits | None = None,
    events: TextIO | None = None,
    drain_seconds: int = 60,
    ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Then no request is accepted, and those that run end first.

    Args:
        llm, name, keys, control_keys, limits, events: see :func:`app_of`.
        host: where it listens.
        port: 0: any that is free.
        drain_seconds: time after which requests that still run are aborted.
        ready: called with the port when it listens.

    Raises:
        ConfigurationError: other machines reach the host, and there is no key; or the port is none, or taken.
        MegalightError: a step of the engine has failed.
    """
    check_host(host, keys)
    integer("port (--port)", port, 0, 65_535)
    config = uvicorn.Config(
        app_of(llm, name, keys=keys, control_keys=control_keys, limits=limits, events=events),
        lifespan="on",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
    )
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port."
        ) from error

    async def main() -> None:
        server = _Server(config)

        async def end_with_engine() -> None:
            await llm.failed.wait()
            server.should_exit = True

        watch = asyncio.create_task(end_with_engine())
        try:
            ready(listener.getsockname()[1])
            await server.serve([listener])
        finally:
            watch.cancel()
            await llm.shutdown()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main())
    if llm.failure is not None:
        raise MegalightError(f"the engine has stopped: {llm.failure}") from llm.failure
