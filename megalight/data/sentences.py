"""Splitting texts into sentences by a simple rule, for data sets of sentence pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalight.data.text_files import Text

END = re.compile(
    r"""
    (?<=[.!?…])["'”’)\]]*\s+(?=["'“‘(\[]*[^\W_a-z])  # end mark, closing quotes, space, then no lower-case letter
    | (?<=[。！？])\s*                                # end marks of scripts without spaces
    | \n\s*\n\s*                                     # an empty line
    """,
    re.VERBOSE,
)


def sentences_of(text: Text) -> Iterator[Text]:
    """Yield the sentences of a text, stripped. The last one ends the document if the text does.

    A sentence ends at a full stop, question mark or exclamation mark that is followed by a space and no lower-case
    letter, or at an empty line. Abbreviations before a name ("Dr. Who") end a sentence too, which is harmless for pairs
    of segments. To use another rule, put an empty line after each sentence before you call ``prepare``.
    """
    found, start = [], 0
    for match in END.finditer(text.text):
        closing = len(match.group()) - len(match.group().lstrip("\"'”’)]"))
        found.append(text.text[start : match.start() + closing])
        start = match.end()
    found.append(text.text[start:])
    kept = [sentence for sentence in map(str.strip, found) if sentence]
    for index, sentence in enumerate(kept):
        yield Text(sentence, text.ends and index == len(kept) - 1)
    if text.ends and not kept:
        yield Text("", True)
