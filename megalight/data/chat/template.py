"""Chat templates: conversations as text, and which of its characters the assistant wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import jinja2  # torch requires it
import numpy as np
from numpy.typing import NDArray

from megalight.data.chat.conversations import Conversation
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError, decode_utf8
from megalight.imports import require

TrainOn = Literal["all", "last"]
Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
PROBE = "What is this?"
"""A content that is rendered to see what a template does with it."""
REFUSALS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What running a template raises: it computes with the messages, and calls their methods and its own macros."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template in the sandbox of ``transformers``.

    Attributes:
        variables: what the template may use besides the messages, such as ``eos_token``.
    """

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> Self:
        """Return a template with the special tokens of a tokenizer. Default: the tokenizer's own template.

        Raises:
            DataError: the tokenizer has no template, or the template has a syntax error.
        """
        source = tokenizer.chat_template if source is None else source
        if source is None:
            raise DataError(
                "the tokenizer has no chat template; take the folder of a chat model, or give a Jinja file with "
                "chat_template (--chat-template)."
            )
        # Special tokens under their own names win over what we know of them.
        named = {"eos_token": tokenizer.eod_token, "pad_token": tokenizer.pad_token, **tokenizer.named}
        template = cls(source, {name: token for name, token in named.items() if token is not None})
        try:
            template._render([], None)
        except DataError as refused:  # many templates refuse to write no message; only the syntax matters here
            error = refused.__cause__
            if isinstance(error, jinja2.TemplateSyntaxError):
                raise DataError(
                    f"the chat template has a syntax error in line {error.lineno}: {error.message}."
                ) from error
        return template

    @cached_property
    def parts_only(self) -> bool:
        """Whether it writes contents that are lists of parts, but none that are strings, as those of LLaVA."""
        return PROBE not in self.probe(PROBE) and PROBE in self.probe([{"type": "text", "text": PROBE}])

    def probe(self, content: Any) -> str:
        """Return the text of a user's message with this content; empty if the template refuses it."""
        try:
            return self._run([{"role": "user", "content": content}], None)[0]
        except DataError:
            return ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        *,
        answer: bool = False,
        unfinished: bool = False,
    ) -> str:
        """Return the text of messages. With ``answer``, it ends where the assistant's next message begins.

        With ``unfinished``, it ends with the content of the last message, which goes on.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._render(messages, tools, add_generation_prompt=answer, continue_final_message=unfinished)[0]

    def ends(self, tokenizer: Tokenizer) -> list[int]:
        """Return the special token that the template writes after an answer; it may also end turns within a document.

        Empty if other text follows an answer.
        """
        said = "An answer."
        text = self.render([{"role": "user", "content": "A question?"}, {"role": ASSISTANT, "content": said}])
        after = tokenizer.encode(text.rpartition(said)[2].lstrip())[:1]
        # Plain text after an answer may occur in answers, too.
        return after if not tokenizer.decode(after, skip_special=True) else []

    def spans(self, conversation: Conversation, train_on: TrainOn = "all") -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the characters that the assistant wrote.

        They are what stands in ``{% generation %}`` blocks of the template. If the template has none, they are found by
        rendering: what message ``i`` adds after the text of the messages before it and the start of an answer.

        Args:
            train_on: ``all``: every assistant message. ``last``: only the last. A message that is marked as not to be
                learned does not count.

        Raises:
            DataError: the template refuses the conversation, or its text before an answer changes with later messages.
        """
        messages, tools = conversation.messages, conversation.tools
        answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        wanted = [index for index in answers if index >= conversation.first]
        wanted = wanted[-1:] if train_on == "last" else wanted
        wanted = [index for index in wanted if index not in conversation.masked]
        if GENERATION.search(self.source):
            text, found = self._render(messages, tools, return_assistant_tokens_mask=True)
            if len(found) != len(answers):
                if len(wanted) == len(answers):  # all count, so it does not matter which block is of which message
                    return text, found
                raise DataError(
                    f"the template has {len(found)} generation blocks for {len(answers)} assistant messages, so it is "
                    "not known which of them count. Train on all messages (--train-on all), or give each message one "
                    "block."
                )
            return text, [span for index, span in zip(answers, found, strict=True) if index in wanted]
        text = self.render(messages, tools)
        return text, [self._added(text, messages, tools, index) for index in wanted]

    def _added(self, text: str, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, index: int) -> Span:
        """Return the characters that the answer ``messages[index]`` adds to the text of the messages before it."""
        before = self.render(messages[:index], tools, answer=True)
        until = text if index + 1 == len(messages) else self.render(messages[: index + 1], tools)
        if not (text.startswith(before) and text.startswith(until) and len(until) >= len(before)):
            wrong = before if not text.startswith(before) else until
            at = next((k for k, pair in enumerate(zip(text, wrong, strict=False)) if pair[0] != pair[1]), len(text))
            around = slice(max(0, at - 20), at + 20)
            raise DataError(
                f"the chat template writes the text of message {index} differently if more messages follow: "
                f"{wrong[around]!r} becomes {text[around]!r}. "
                "So the assistant's part cannot be found. Put it between {% generation %} and {% endgeneration %} in "
                "the template, or train on the last message only (--train-on last)."
            )
        return len(before), len(until)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, **options: Any
    ) -> tuple[str, list[Span]]:
        if self.parts_only:
            messages = [
                {**each, "content": [{"type": "text", "text": each["content"]}]}
                if isinstance(each.get("content"), str)
                else each
                for each in messages
            ]
        return self._run(messages, tools, **options)

    def _run(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, **options: Any
    ) -> tuple[str, list[Span]]:
        # Outside of the block: an error here is not one of the template.
        render = _utilities().render_jinja_template
        try:
            texts, spans = render(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.source,
                **options,
                **self.variables,
            )
        except REFUSALS as error:
            raise DataError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
        return texts[0], spans[0] if spans else []


def encode(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the ids of a text, and 1 for each that stands for a character of ``spans``, else 0.

    The text is encoded as a whole. A token that begins before a span and reaches into it counts.

    Raises:
        DataError: the text holds half of a surrogate pair.
    """
    # As a whole, because tokens may reach over the ends of messages: pieces would be encoded differently.
    ids, offsets = tokenizer.encode_with_offsets(text)
    loss = np.zeros(len(ids), np.uint8)
    if spans and ids:
        starts, ends = np.asarray(offsets, np.int64).T
        for start, end in spans:
            # An id may stand for no character of its own (a space that the tokenizer trims): its start decides.
            loss[(starts < end) & ((ends > start) | (starts >= start))] = 1
    return ids, loss


def _utilities() -> Any:
    return require("transformers.utils.chat_template_utils", "chat templates")


def read_template(path: str | os.PathLike[str]) -> str:
    """Return the text of a chat template.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"chat_template (--chat-template) {os.fspath(path)!r} cannot be read: {error}.") from error
    return decode_utf8(data, f"chat_template (--chat-template) {os.fspath(path)!r}")
