"""OpenAI's API: the bodies of requests, checked, and those of answers. https://platform.openai.com/docs/api-reference

A body is parsed once, strictly: unknown keys, wrong kinds, NaN and half surrogate pairs are errors with the name of the
field. A parameter of OpenAI's that is not served is an error, too, unless it has the value that changes nothing.
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError, MegalightError
from megalight.inference import SamplingParams
from megalight.inference.grammar import GrammarSource
from megalight.serving.async_llm import InFlight
from megalight.serving.embeddings import EmbeddingOutput
from megalight.serving.engine_loop import EngineOutput
from megalight.serving.tool_calls import AnswerParser, Part, ToolForm, call_id

TEXT = "\0"
"""Stands for the text where an event is made in advance."""
FINISH = {"end": "stop", "stop": "stop", "length": "length"}
"""Why a completion ended -> OpenAI's word."""
COMPLETION_TOKENS = 16
"""Length of a completion for which nobody gave a limit, in tokens: OpenAI's."""

MOST_LOG_PROBS = 20
"""Of how many of the most probable tokens an answer has log-probabilities at most: OpenAI's."""
LARGEST_GRAMMAR = 2**16
"""Characters of a JSON schema, a regular expression or rules."""
LABELS = (
    "role",
    "content",
    "name",
    "type",
    "text",
    "include_usage",
    "json_schema",
    "json",
    "regex",
    "grammar",
    "schema",
)
"""Fields inside of fields."""

B = TypeVar("B", bound="Body")


class APIError(Exception):
    """An error in OpenAI's form.

    Args:
        status: of HTTP.
        message: what a user reads.
        param: the field of the body that it is about.
        code: a word for programs.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(status)
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


MOST_INPUTS = 2048
"""Texts of a request for embeddings."""


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls: type[B], data: bytes) -> B:
        """Return the body in bytes of JSON.

        Raises:
            APIError: it is none.
        """
        try:
            found = cls.model_validate_json(data)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            # Of a union, the member of the right type tells more than the others.
            first = next((each for each in errors if not each["type"].endswith("_type")), errors[0])
            field = str(first["loc"][0]) if first["loc"] else None
            places = [str(part)[:40] for part in first["loc"][1:] if isinstance(part, int) or part in LABELS]
            where = ".".join([field or "the body", *places])
            known = field in cls.model_fields
            message = f"{where}: {first['msg']}."
            if first["type"] == "extra_forbidden" and not known:
                message = f"{where[:80]} is no parameter of this route; leave it out."
            raise APIError(400, message, field if known else None) from error
        for name, neutral in cls.unserved.items():
            value = getattr(found, name)
            if value is not None and value not in neutral:
                remedy = f", or give {neutral[0]!r}" if neutral else ""
                raise APIError(400, f"{name} is not served; leave it out{remedy}.", name, "unsupported_parameter")
        return found


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class StructuredOutputs(Body):
    """What a completion may be, beyond OpenAI's API: one of a JSON schema, a regular expression, and rules of lark."""

    json_schema: dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None


class JSONSchema(Body):
    """A JSON schema with its name."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's words for what an answer may be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


Count = Annotated[int, Field(ge=1, le=2**31)]
Token = Annotated[int, Field(ge=0, le=2**31)]


class Sampled(Body):
    """What both routes have."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> GrammarSource | None:
        """What the body says that the completion may be, or None.

        Raises:
            APIError: a request says it twice, or not at all, or at length; or it does not go with another parameter.
        """
        field, found = "response_format", list[GrammarSource]()
        if (asked := self.response_format) is not None:
            if (asked.type == "json_schema") != (asked.json_schema is not None):
                raise APIError(400, "response_format: type json_schema and json_schema go together.", field)
            if asked.type != "text":
                schema = None if asked.json_schema is None else asked.json_schema.json_schema
                found.append(GrammarSource("json_schema", json.dumps({"type": "object"} if schema is None else schema)))
        if (extra := self.structured_outputs) is not None:
            field = "structured_outputs"
            if extra.json_schema is not None:
                found.append(GrammarSource("json_schema", json.dumps(extra.json_schema)))
            if extra.regex is not None:
                found.append(GrammarSource("regex", extra.regex))
            if extra.grammar is not None:
                found.append(GrammarSource("lark", extra.grammar))
            if len(found) != 1:
                raise APIError(
                    400, f"{field} needs one of json, regex and grammar, and no response_format with a schema.", field
                )
        if not found:
            return None
        if len(found[0].text) > LARGEST_GRAMMAR:
            raise APIError(400, f"{field} has more than {LARGEST_GRAMMAR} characters; send fewer.", field)
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise APIError(400, f"{name} does not go with {field}, which says when a text may end.", name)
        return found[0]

    @property
    def sampling_params(self) -> SamplingParams:
        """How tokens are chosen.

        Raises:
            APIError: a key of ``logit_bias`` is no token id.
            ConfigurationError: a number is out of range.
        """
        bias = self.logit_bias or {}
        if strange := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
            raise APIError(400, f"logit_bias: {strange[0][:40]!r} is no token id.", "logit_bias")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            # As in vLLM: all tokens.
            top_k=None if self.top_k in (0, -1) else self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(key): value for key, value in bias.items()},
            min_new_tokens=self.min_tokens,
        )

    @property
    def stops(self) -> list[str]:
        """Stop texts."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    @abstractmethod
    def top_log_probs(self) -> int | None:
        """For how many of the most probable tokens answers have log-probabilities, too; None: they have none."""

    @property
    def prompt_log_probs(self) -> bool:
        """Whether answers have those of the prompt, too."""
        return False

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Sampled):
    """``/v1/completions``."""

    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ("",)}
    prompt: str | list[str] | list[Token] | list[list[Token]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts.

        Raises:
            APIError: there is none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise APIError(400, "prompt is empty; give a text, token ids, or a list of them.", "prompt")
        several: list[Any] = self.prompt if not isinstance(self.prompt[0], int) else [self.prompt]
        return several

    @property
    def top_log_probs(self) -> int | None:
        """For how many of the most probable tokens answers have log-probabilities, too; None: they have none."""
        return self.logprobs

    @property
    def prompt_log_probs(self) -> bool:
        """Whether answers have those of the prompt, too."""
        return self.echo and self.logprobs is not None


class EmbeddingBody(Body):
    """``/v1/embeddings``."""

    model: str
    input: str | list[str] | list[Token] | list[list[Token]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts, as such or as token ids.

        Raises:
            APIError: there is none.
        """
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise APIError(400, "input is empty; give a text, token ids, or a list of them.", "input")
        several: list[Any] = self.input if not isinstance(self.input[0], int) else [self.input]
        if len(several) > MOST_INPUTS:
            raise APIError(400, f"input has {len(several)} texts; give at most {MOST_INPUTS}.", "input")
        return several

    def answer(self, outputs: Sequence[EmbeddingOutput]) -> dict[str, Any]:
        """Return the answer. In base64 numbers are float32, the least byte first."""
        data: list[dict[str, Any]] = []
        for place, output in enumerate(outputs):
            found: Any = output.embedding.tolist()
            if self.encoding_format == "base64":
                found = base64.b64encode(output.embedding.numpy().astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": place, "embedding": found})
        tokens = sum(output.prompt_tokens for output in outputs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Function(Body):
    """What a tool does."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionCall(Body):
    """What a message has called."""

    name: str
    arguments: str


class MessageToolCall(Body):
    """A call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The call as chat templates read it: with its arguments as an object.

        Raises:
            APIError: they are none.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise APIError(400, "messages: the arguments of a tool call are no JSON.", "messages") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatMessage(Body):
    """A message. Those of answers may be sent again as they are."""

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @property
    def values(self) -> dict[str, Any]:
        """The message as a chat template reads it: parts of text are joined."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        found: dict[str, Any] = {"role": self.role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [call.values for call in self.tool_calls]
        return found


class ChatBody(Sampled):
    """``/v1/chat/completions``."""

    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none",),
        "reasoning_effort": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them; none, if the answer must not call any.

        Raises:
            APIError: ``tool_choice`` or a name does not fit them, or the answer cannot be held to them.
        """
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or []]
        names = [tool["function"]["name"] for tool in tools]
        if len({*names}) < len(names):
            raise APIError(400, "tools: two have the same name; give each its own.", "tools")
        choice = self.tool_choice
        if choice not in (None, "none") and not tools:
            raise APIError(400, "tool_choice needs tools; give some, or leave it out.", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise APIError(400, "tool_choice names no tool of tools.", "tool_choice")
        if choice == "none" or not tools:
            return []
        forced = self.forced_tools
        if not forced and any(tool["function"].get("strict") for tool in tools):
            raise APIError(
                400, "tools: strict is served with tool_choice required or a name alone; leave it out.", "tools"
            )
        if not forced and self.parallel_tool_calls is False:
            raise APIError(
                400,
                "parallel_tool_calls: false is served with tool_choice required or a name alone; leave it out.",
                "parallel_tool_calls",
            )
        if forced and self.grammar is not None:
            raise APIError(400, "tool_choice does not go with a grammar; leave one out.", "tool_choice")
        return tools

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The functions of which the answer must call one; none, if it need not."""
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        functions = [tool.function.model_dump(exclude_unset=True) for tool in self.tools or []]
        return [each for each in functions if each["name"] == name or choice == "required"]

    @property
    def top_log_probs(self) -> int | None:
        """For how many of the most probable tokens answers have log-probabilities, too; None: they have none.

        Raises:
            APIError: they are wanted without ``logprobs``.
        """
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs; set it to true.", "top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None


class TokenizeBody(Body):
    """``/tokenize``: of a text, or of a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=128)] | None = None


class DetokenizeBody(Body):
    """``/detokenize``."""

    model: str | None = None
    tokens: list[Token]


class WeightsBody(Body):
    """``/weights``."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    in_flight: InFlight = "keep"


@dataclass
class _Choice:
    """What a choice has so far."""

    parser: AnswerParser | None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    prompt_log_probs: list[float] | None = None
    cached: int = 0
    reason: str | None = None
    characters: int = 0
    """Those of tokens that have been told with their log-probabilities."""

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why it ended."""
        if self.reason is None:
            return None
        return "tool_calls" if self.calls and self.reason != "length" else FINISH[self.reason]


def choice_id(request_id: str, place: int) -> str:
    """Return the engine's name of a choice of a request."""
    return f"{request_id}-{place}"


def event(value: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    # In ASCII: some clients take U+2028 for the end of a line.
    return f"data: {json.dumps(value)}\n\n".encode()


class CompletionAnswer:
    """The answer to one request, as a whole or as a stream of chunks.

    Args:
        request_id: its name in the answer.
        prompts: the token ids of each prompt. Choice ``k`` is of prompt ``k // n``.
        tokenizer: says how tokens read.
        parser: returns what reads a choice; None: its text is all there is.
        form: how the model writes calls of tools.
    """

    def __init__(
        self,
        body: CompletionBody | ChatBody,
        request_id: str,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,
        parser: Callable[[], AnswerParser | None] = lambda: None,
        form: ToolForm | None = None,
    ) -> None:
        self._body, self._prompts, self._tokenizer, self._form = body, prompts, tokenizer, form
        self._chat = isinstance(body, ChatBody)
        self._each = body.n or 1
        self._choices = [_Choice(parser()) for _ in range(self._each * len(prompts))]
        self._places = {choice_id(request_id, place): place for place in range(len(self._choices))}
        self._tells_tokens = body.return_token_ids or body.top_log_probs is not None
        self._around: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        kind = "chat.completion" if self._chat else "text_completion"
        common = {"id": request_id, "created": int(time.time()), "model": body.model}
        self._whole = {**common, "object": kind}
        self._chunk = {**common, "object": f"{kind}.chunk" if self._chat else kind}

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        """Take what steps gave choices.

        Raises:
            APIError: its logits hold NaN or infinity.
        """
        for output in outputs:
            self._take(self._choices[self._places[output.id]], output)

    def _take(self, choice: _Choice, output: EngineOutput) -> list[dict[str, Any]]:
        """Take what a step gave a choice, and return what is new in its message, as deltas."""
        if output.reason == "error" and (grammar := self._body.grammar) is not None:
            field = "structured_outputs" if self._body.structured_outputs else "response_format"
            raise APIError(400, f"the {grammar.kind} needs too much work, or the logits hold NaN.", field)
        if output.reason == "error":
            raise APIError(500, "the model's logits hold NaN or infinity, so no token can be sampled.")
        choice.tokens += output.tokens
        choice.log_probs += output.log_probs or []
        choice.top_log_probs += output.top_log_probs or []
        if output.prompt_log_probs is not None:
            choice.prompt_log_probs = output.prompt_log_probs
        choice.cached = max(choice.cached, output.cached_tokens)
        choice.reason = output.reason
        if choice.parser is None:
            choice.text.append(output.text)
            return [{"content": output.text}] if output.text else []
        parts = choice.parser.add(output.text)
        if output.last:
            parts += choice.parser.finish()
        return [self._delta(choice, part) for part in parts]

    def _delta(self, choice: _Choice, part: Part) -> dict[str, Any]:
        if part.call is None:
            choice.text.append(part.content)
            choice.reasoning.append(part.reasoning)
            return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.content}
        assert self._form is not None
        function = {"name": part.call.name, "arguments": part.call.arguments}
        call = {"id": call_id(self._form), "type": "function", "function": function}
        choice.calls.append(call)
        return {"tool_calls": [{"index": len(choice.calls) - 1, **call}]}

    def whole(self) -> dict[str, Any]:
        """Return the answer."""
        choices = []
        for place, choice in enumerate(self._choices):
            text, reasoning = "".join(choice.text), "".join(choice.reasoning)
            found = self._choice(place, choice.finish_reason, choice.tokens)
            if self._body.top_log_probs is not None:
                found["logprobs"] = self._log_probs(place, 0, whole=True)
            if self._chat:
                # As OpenAI: an answer that is calls alone has no content.
                content = text if text or not (choice.calls or reasoning) else None
                found["message"] = {"role": "assistant", "content": content, "refusal": None}
                if reasoning:
                    found["message"]["reasoning_content"] = reasoning
                if choice.calls:
                    found["message"]["tool_calls"] = choice.calls
            else:
                found["text"] = self._echo(place) + text
            if self._body.return_token_ids:
                found["prompt_token_ids"] = self._prompts[place // self._each]
            choices.append(found)
        return {**self._whole, "choices": choices, "usage": self.usage()}

    def first_events(self) -> bytes:
        """Return the events in front of all tokens: roles, and prompts that are echoed."""
        return b"".join(map(event, self._first_chunks()))

    def _first_chunks(self) -> Iterator[dict[str, Any]]:
        for place in range(len(self._choices)):
            found = self._choice(place, None)
            if self._body.return_token_ids:
                found["prompt_token_ids"] = self._prompts[place // self._each]
            if self._chat:
                yield self._chunk_of(found | {"delta": {"role": "assistant", "content": ""}})
            elif (echo := self._echo(place)) or self._body.return_token_ids:
                yield self._chunk_of(found | {"text": echo})

    def events(self, outputs: Sequence[EngineOutput]) -> bytes:
        """Take what steps gave choices, and return the events that tell of it; there may be none.

        Raises:
            APIError: see :meth:`take`.
        """
        found = list[bytes]()
        for output in outputs:
            place = self._places[output.id]
            deltas = self._take(self._choices[place], output)
            if output.reason is None and not self._tells_tokens:
                found += [self._text_event(place, delta) for delta in deltas]
            else:
                found += map(event, self._chunks(place, output, deltas))
        return b"".join(found)

    def _text_event(self, place: int, delta: dict[str, Any]) -> bytes:
        """Return the event of a delta; but for its text, those of a choice are equal."""
        ((key, text),) = delta.items()
        if not isinstance(text, str):
            return event(self._chunk_of(self._choice(place, None) | {"delta": delta}))
        if (around := self._around.get((place, key))) is None:
            told = {"delta": {key: TEXT}} if self._chat else {"text": TEXT}
            head, _, tail = event(self._chunk_of(self._choice(place, None) | told)).rpartition(
                json.dumps(TEXT).encode()
            )
            around = self._around[place, key] = head, tail
        return around[0] + encode_basestring_ascii(text).encode() + around[1]

    def _chunks(self, place: int, output: EngineOutput, deltas: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the chunks for an output with these deltas; there may be none."""
        choice, new = self._choices[place], len(output.tokens)
        # Tokens and the reason come once, with the last chunk.
        for delta in deltas[:-1]:
            yield self._chunk_of(self._choice(place, None) | {"delta": delta})
        if not (deltas or (new and self._tells_tokens) or output.last):
            return
        found = self._choice(place, choice.finish_reason, output.tokens)
        if new and self._body.top_log_probs is not None:
            found["logprobs"] = self._log_probs(place, len(choice.tokens) - new)
        delta = deltas[-1] if deltas else {}
        yield self._chunk_of(found | ({"delta": delta} if self._chat else {"text": delta.get("content", "")}))

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with usage."""
        return {**self._chunk, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. A prompt counts once, for all of its choices."""
        prompt, new = sum(map(len, self._prompts)), sum(len(choice.tokens) for choice in self._choices)
        cached = [choice.cached for choice in self._choices]
        each = range(0, len(cached), self._each)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(min(cached[k : k + self._each]) for k in each)},
        }

    def _chunk_of(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk, "choices": [choice]} | ({"usage": None} if self._body.wants_usage else {})

    def _choice(self, place: int, finish_reason: str | None, tokens: Sequence[int] = ()) -> dict[str, Any]:
        found: dict[str, Any] = {"index": place, "finish_reason": finish_reason, "logprobs": None}
        if self._body.return_token_ids:
            found["token_ids"] = list(tokens)
        return found

    def _log_probs(self, place: int, first: int, *, whole: bool = False) -> dict[str, Any]:
        """Return those of the tokens from ``first`` on. In front of the first one stand those of an echoed prompt."""
        choice = self._choices[place]
        tokens, log_probs, top = choice.tokens[first:], choice.log_probs[first:], choice.top_log_probs[first:]
        if self._chat:
            tops = top or [{} for _ in tokens]
            return {
                "content": [
                    {**self._scored(token, log_prob), "top_logprobs": [self._scored(*each) for each in top.items()]}
                    for token, log_prob, top in zip(tokens, log_probs, tops, strict=True)
                ],
                "refusal": None,
            }
        values: list[float | None] = [*log_probs]
        every: list[dict[int, float] | None] = [*top]
        if choice.prompt_log_probs is not None and first == 0:
            prompt = self._prompts[place // self._each]
            # Nothing comes before the first token.
            tokens, values = [*prompt, *tokens], [None, *choice.prompt_log_probs, *values]
            every = [*[None] * len(prompt), *every]
        words = [self._tokenizer.decode([token]) for token in tokens]
        begin = 0 if whole else choice.characters
        offsets = [begin, *(begin + each for each in itertools.accumulate(map(len, words)))]
        choice.characters = offsets[-1]
        most = None
        if self._body.top_log_probs:
            most = [
                None if top is None else {self._tokenizer.decode([token]): value for token, value in top.items()}
                for top in every
            ]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": most, "text_offset": offsets[:-1]}

    def _scored(self, token: int, log_prob: float) -> dict[str, Any]:
        word = self._tokenizer.decode([token])
        return {"token": word, "logprob": log_prob, "bytes": [*word.encode()]}

    def _echo(self, place: int) -> str:
        if isinstance(self._body, CompletionBody) and self._body.echo:
            return self._tokenizer.decode(self._prompts[place // self._each], skip_special=True)
        return ""


def refused(error: MegalightError, body: Body) -> APIError:
    """Return the error of a request that the model's settings refuse."""
    text, fields = str(error), type(body).model_fields
    word = text.split(maxsplit=1)[0]
    others = {"eos_id": "stop_token_ids", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    param = "logit_bias" if "logit_bias" in text else others.get(word, word)
    if word in others:
        text = text.replace(word, param, 1)
    if param not in fields and isinstance(error, DataError):
        # What is wrong with ids or with a length is of the text itself.
        param = "messages" if getattr(body, "messages", None) is not None else "prompt"
    return APIError(400, text, param if param in fields else None)
