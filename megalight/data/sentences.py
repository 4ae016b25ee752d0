"""Texts cut into sentences by a simple rule, for data sets that pair them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalight.data.sources import Text

END = re.compile(
    r"""
    (?<=[.!?…])["'”’)\]]*\s+(?=["'“‘(\[]*[^\W_a-z])  # an end mark, perhaps closed, then space and no lower-case letter
    | (?<=[。！？])\s*                                # end marks of scripts without spaces
    | \n\s*\n\s*                                     # an empty line
    """,
    re.VERBOSE,
)


def sentences_of(text: Text) -> Iterator[Text]:
    """The sentences of a text, stripped; the last one ends the document where the text did.

    A sentence ends with a full stop, question or exclamation mark before a space and anything but a lower-case letter,
    or at an empty line. Abbreviations before a name ("Dr. Who") end one too: for pairs of segments that is harmless. A
    rule of your own goes before ``prepare``: put empty lines where sentences end.
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
