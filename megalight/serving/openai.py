"""OpenAI's API: the bodies of requests, checked, and those of answers. https://platform.openai.com/docs/api-reference

A body is parsed once, strictly: unknown keys, wrong kinds, NaN and half surrogate pairs are errors with the name of the
field. A parameter of OpenAI's that is not served is an error, too, unless it has the value that changes nothing.
"""

from __future__ import annotations

import itertools
import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megalight.data.tokenizer import Tokenizer
from megalight.errors import MegalightError
from megalight.inference import SamplingParams
from megalight.inference.grammar import GrammarSource
from megalight.serving.engine_loop import EngineOutput

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
        """What the completion may be, or None.

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


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A message."""

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: str | list[TextPart] | None = None
    name: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The message as a chat template reads it: parts of text are joined."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content or ""} | ({} if self.name is None else {"name": self.name})


class ChatBody(Sampled):
    """``/v1/chat/completions``."""

    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True,),
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
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

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


class DetokenizeBody(Body):
    """``/detokenize``."""

    model: str | None = None
    tokens: list[Token]


class CompletionAnswer:
    """The answer to one request, as a whole or as a stream of chunks.

    Args:
        body: the request.
        request_id: its name in the answer.
        prompts: the token ids of each prompt. Choice ``k`` is of prompt ``k // n``.
        tokenizer: says how tokens read.
    """

    def __init__(
        self, body: CompletionBody | ChatBody, request_id: str, prompts: Sequence[list[int]], tokenizer: Tokenizer
    ) -> None:
        self._body, self._prompts, self._tokenizer = body, prompts, tokenizer
        self._chat = isinstance(body, ChatBody)
        self._each = body.n or 1
        self._count = self._each * len(prompts)
        self._texts, self._tokens = [""] * self._count, [list[int]() for _ in range(self._count)]
        self._last: dict[int, EngineOutput] = {}
        self._cached = [0] * self._count
        kind = "chat.completion" if self._chat else "text_completion"
        common = {"id": request_id, "created": int(time.time()), "model": body.model}
        self._whole = {**common, "object": kind}
        self._chunk = {**common, "object": f"{kind}.chunk" if self._chat else kind}

    def take(self, choice: int, output: EngineOutput) -> None:
        """Take what a step gave a choice.

        Raises:
            APIError: its logits hold NaN or infinity.
        """
        if output.reason == "error" and (grammar := self._body.grammar) is not None:
            raise APIError(400, f"the {grammar.kind} needs too much work, or the logits hold NaN.", "response_format")
        if output.reason == "error":
            raise APIError(500, "the model's logits hold NaN or infinity, so no token can be sampled.")
        self._texts[choice] += output.text
        self._tokens[choice] += output.tokens
        self._cached[choice] = max(self._cached[choice], output.cached_tokens)
        if output.last:
            self._last[choice] = output

    def whole(self) -> dict[str, Any]:
        """Return the answer."""
        choices = []
        for choice in range(self._count):
            last, text = self._last[choice], self._echo(choice) + self._texts[choice]
            found = self._choice(choice, FINISH[str(last.reason)], self._tokens[choice])
            if last.log_probs is not None:
                found["logprobs"] = self._log_probs(choice, last)
            if self._chat:
                found["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                found["text"] = text
            if self._body.return_token_ids:
                found["prompt_token_ids"] = self._prompts[choice // self._each]
            choices.append(found)
        return {**self._whole, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks in front of all tokens: roles, and prompts that are echoed."""
        for choice in range(self._count):
            if self._chat:
                yield self._chunk_of(self._choice(choice, None) | {"delta": {"role": "assistant", "content": ""}})
            elif echo := self._echo(choice):
                yield self._chunk_of(self._choice(choice, None) | {"text": echo})

    def chunk(self, choice: int, output: EngineOutput) -> dict[str, Any] | None:
        """Return the chunk for an output, or None if it has nothing to say."""
        ended = output.reason is not None
        wants_tokens = bool(output.tokens) and self._body.return_token_ids
        if not (output.text or ended or wants_tokens):
            return None
        found = self._choice(choice, FINISH[str(output.reason)] if ended else None, output.tokens)
        if self._chat:
            found["delta"] = {"content": output.text} if output.text or not ended else {}
        else:
            found["text"] = output.text
        return self._chunk_of(found)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with usage."""
        return {**self._chunk, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. A prompt counts once, for all of its choices."""
        prompt, new = sum(map(len, self._prompts)), sum(map(len, self._tokens))
        cached = sum(min(self._cached[first : first + self._each]) for first in range(0, self._count, self._each))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _chunk_of(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk, "choices": [choice]} | ({"usage": None} if self._body.wants_usage else {})

    def _choice(self, choice: int, finish_reason: str | None, tokens: Sequence[int] = ()) -> dict[str, Any]:
        found: dict[str, Any] = {"index": choice, "finish_reason": finish_reason, "logprobs": None}
        if self._body.return_token_ids:
            found["token_ids"] = list(tokens)
        return found

    def _log_probs(self, choice: int, last: EngineOutput) -> dict[str, Any]:
        tokens, found = self._tokens[choice], [*(last.log_probs or [])]
        tops = last.top_log_probs or [{} for _ in tokens]
        if self._chat:
            return {
                "content": [
                    {**self._scored(token, log_prob), "top_logprobs": [self._scored(*each) for each in top.items()]}
                    for token, log_prob, top in zip(tokens, found, tops, strict=True)
                ],
                "refusal": None,
            }
        values: list[float | None] = [*found]
        every: list[dict[int, float] | None] = [*tops]
        if last.prompt_log_probs is not None:
            prompt = self._prompts[choice // self._each]
            # Nothing comes before the first token.
            tokens, values = [*prompt, *tokens], [None, *last.prompt_log_probs, *values]
            every = [*[None] * len(prompt), *every]
        words = [self._tokenizer.decode([token]) for token in tokens]
        offsets = [0, *itertools.accumulate(map(len, words))][: len(words)]
        most = None
        if last.top_log_probs is not None:
            most = [
                None if top is None else {self._tokenizer.decode([token]): value for token, value in top.items()}
                for top in every
            ]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": most, "text_offset": offsets}

    def _scored(self, token: int, log_prob: float) -> dict[str, Any]:
        word = self._tokenizer.decode([token])
        return {"token": word, "logprob": log_prob, "bytes": [*word.encode()]}

    def _echo(self, choice: int) -> str:
        if isinstance(self._body, CompletionBody) and self._body.echo:
            return self._tokenizer.decode(self._prompts[choice // self._each], skip_special=True)
        return ""


def refused(error: MegalightError, body: Body) -> APIError:
    """Return the error of a request that the model's settings refuse."""
    word = str(error).split(maxsplit=1)[0]
    word = "logit_bias" if "logit_bias" in str(error) else word
    others = {"eos_id": "stop_token_ids", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    param = others.get(word, word)
    return APIError(400, str(error), param if param in type(body).model_fields else None)
