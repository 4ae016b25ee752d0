"""Incremental detokenization: the text of a completion while its tokens come, in parts that never change later.

A part ends between characters: the bytes of one may be in several tokens. It ends in front of what may become a stop
text. All parts together are the text that decoding all tokens at once gives, up to the stop text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megalight.data.tokenizer import Tokenizer

CONTEXT = 8
"""Tokens of a prompt behind which the first ones of its completion are decoded."""
REPLACEMENT = "\ufffd"
"""What stands for bytes that are no character, or not yet."""
LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""


class Detokenizer:
    """The text of one completion.

    Args:
        tokenizer: decodes tokens.
        prompt: the tokens in front of the completion.
        stop: texts that end the completion, which they are no part of.
        special_text: special tokens that are text; others are none.

    Attributes:
        stopped: whether a stop text has come.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        special_text: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._stop, self._special_text = tokenizer, tuple(stop), frozenset(special_text)
        self._longest_stop = max(map(len, self._stop), default=0)
        # Tokens that are decoded for good, and show how the next ones read; and those after them.
        self._context = self._end_of(prompt)
        self._fresh: list[int] = []
        # Text that may turn out to be the beginning of a stop text.
        self._held = ""
        self.stopped = False

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        text = [token for token in prompt[-4 * CONTEXT :] if token in self._tokenizer.text_tokens]
        if len(text) < CONTEXT:
            text = [token for token in prompt if token in self._tokenizer.text_tokens]
        first = max(0, len(text) - CONTEXT)
        while first > 0 and text[first] in self._tokenizer.byte_tokens:
            first -= 1
        return text[first:]

    def add(self, token: int) -> str:
        """Add the next token; return the text that is certain now, which may be empty."""
        if token in self._special_text and not self.stopped:
            rest = self._tokenizer.decode_after(self._context, self._fresh) if self._fresh else ""
            self._context, self._fresh = self._context + self._fresh, []
            return self._send(rest + self._tokenizer.decode([token]))
        # Special tokens, and rows of the embedding that pad it, are no text.
        if self.stopped or token not in self._tokenizer.text_tokens:
            return ""
        if not self._fresh and (text := self._tokenizer.whole_text(token)):
            self._context = [token]
            return self._send(text) if self._stop else text
        self._fresh.append(token)
        if token in self._tokenizer.byte_tokens:
            return ""
        text = self._tokenizer.decode_after(self._context, self._fresh)
        if text.endswith(REPLACEMENT):
            return self._send(self._settled(text))
        if not text:
            return ""
        self._context, self._fresh = self._fresh, []
        return self._send(text)

    def finish(self) -> str:
        """Return the rest of the text: the completion has ended."""
        rest = self._tokenizer.decode_after(self._context, self._fresh) if self._fresh and not self.stopped else ""
        self._context, self._fresh = self._fresh, []
        sent, held = self._send(rest), self._held
        self._held = ""
        return sent + held

    def _settled(self, text: str) -> str:
        """Return the beginning of a long text that ends with replacement characters, and begin anew behind it.

        Its last tokens may still be part of a character. Otherwise each token would decode all of these again.
        """
        if len(self._fresh) < 4 * LONGEST_CHARACTER:
            return ""
        last = len(self._fresh) - LONGEST_CHARACTER
        for cut in range(last, last - LONGEST_CHARACTER, -1):
            head, tail = self._fresh[:cut], self._fresh[cut:]
            found = self._tokenizer.decode_after(self._context, head)
            # Equal only if no character reaches over the cut.
            if found + self._tokenizer.decode_after(head, tail) == text:
                self._context, self._fresh = head, tail
                return found
        return ""

    def _send(self, text: str) -> str:
        """Return the part of the text that is no stop text, nor its beginning."""
        text = self._held + text
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            text = text[: min(found)]
        elif self._stop:
            held = next((n for n in range(min(self._longest_stop, len(text)), 0, -1) if self._begins(text[-n:])), 0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)
