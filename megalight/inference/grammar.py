"""Structured output: completions that a JSON schema or a regular expression describes, by ``llguidance``.

The host follows the text of each constrained request, and finds which tokens may come next. These are bits, which the
device applies to the logits before it samples. So such a request waits for its last token; others do not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError
from megalight.imports import require


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as text.

    Attributes:
        kind: a JSON schema; a regular expression, which matches the whole completion; or rules in the language of
            ``lark``, as ``llguidance`` reads them.
        text: it.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Grammar:
    """What a completion may be; :class:`GrammarCompiler` makes it.

    Attributes:
        source: its text.
        ends: tokens that end a text which is complete.
        vocab_size: of the model.
    """

    def __init__(self, matcher: Any, source: GrammarSource, ends: frozenset[int], vocab_size: int) -> None:
        self._matcher, self.source, self.ends, self.vocab_size = matcher, source, ends, vocab_size

    def start(self) -> Any:
        """Return a matcher at the beginning of a text."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Makes grammars for a tokenizer. To make a compiler takes about a second, and one serves all requests.

    Args:
        tokenizer: that of the model.
        vocab_size: of the model, at least that of the tokenizer.
        ends: tokens that end a text, at least one.

    Raises:
        ConfigurationError: there is no end.
        MissingPackageError: ``llguidance`` is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Collection[int]) -> None:
        if not ends:
            raise ConfigurationError("ends is empty; a grammar needs a token that ends a text.")
        self._package = require("llguidance", "structured output")
        self._ends, self._vocab_size = frozenset(ends), vocab_size
        self._tokenizer = self._package.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(ends))

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of JSON texts that a schema describes.

        Raises:
            ConfigurationError: it is no schema, or too large.
        """
        try:
            values = json.loads(schema) if isinstance(schema, str) else dict(schema)
            made = self._package.LLMatcher.grammar_from_json_schema(json.dumps(values))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the JSON schema cannot be read: {error}.") from error
        return self._grammar("JSON schema", made, GrammarSource("json_schema", json.dumps(values)))

    def regex(self, pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches as a whole.

        Raises:
            ConfigurationError: it is none, or too large.
        """
        if not isinstance(pattern, str):
            raise ConfigurationError(f"the regular expression is {pattern!r}; it must be a text.")
        made = self._package.LLMatcher.grammar_from_regex(pattern)
        return self._grammar("regular expression", made, GrammarSource("regex", pattern))

    def lark(self, rules: str) -> Grammar:
        """Return the grammar of rules in the language of ``lark``, of which ``start`` is the whole.

        Raises:
            ConfigurationError: they are none, or too large.
        """
        made = self._package.LLMatcher.grammar_from_lark(rules)
        return self._grammar("grammar", made, GrammarSource("lark", rules))

    def compile(self, source: GrammarSource) -> Grammar:
        """Return the grammar of a text.

        Raises:
            ConfigurationError: it is none, or too large.
        """
        return {"json_schema": self.json_schema, "regex": self.regex, "lark": self.lark}[source.kind](source.text)

    def _grammar(self, what: str, made: str, source: GrammarSource) -> Grammar:
        # Its limits on symbols, states and work hold now, and in each step.
        matcher = self._package.LLMatcher(self._tokenizer, made, log_level=0)
        if matcher.is_error():
            raise ConfigurationError(f"the {what} is wrong or too large: {matcher.get_error()}.")
        return Grammar(matcher, source, self._ends, self._vocab_size)
