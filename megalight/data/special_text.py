"""Which special tokens plain text may hold, and a tokenizer that reads the others as ordinary text.

As in ``transformers``, and with its tokenizers in Megatron-LM, ``<|im_start|>`` in a text is the token of that name:
files with rendered conversations, or with tokens for code, need it. In the place of an image token a model reads
features, so that one without an image would train an embedding that nothing else reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

MEDIA = ("<image>", "<|image_pad|>", "<image_soft_token>", "<IMG_CONTEXT>", "<video>", "<|video_pad|>")
"""Tokens of published models in whose places the features of images and videos come."""

MEDIA_KEYS = ("image_token", "video_token", "audio_token")
"""Keys of ``tokenizer_config.json`` that name such a token."""

HIDDEN = "\U0010ffff{}\U0010ffff"
"""What a token is called that no text shall be: between characters that Unicode keeps out of texts."""


def without(model: str, tokens: Collection[str]) -> str:
    """Return a ``tokenizer.json`` for encoding alone, that reads these tokens as ordinary text. Ids stay as they are.

    Args:
        model: the content of a ``tokenizer.json``.
        tokens: special tokens of it.
    """
    content = json.loads(model)
    hidden = {token: HIDDEN.format(token) for token in tokens}
    for added in content["added_tokens"]:
        added["content"] = hidden.get(added["content"], added["content"])
    core = content["model"]
    core["vocab"] = _renamed(core["vocab"], hidden)
    if core.get("unk_token") in hidden:
        core["unk_token"] = hidden[core["unk_token"]]
    if "merges" in core:
        core["merges"] = [merge for merge in core["merges"] if not hidden.keys() & _words(merge)]
    return json.dumps(content)


def _renamed(vocabulary: Any, names: Mapping[str, str]) -> Any:
    if isinstance(vocabulary, Mapping):
        return {names.get(token, token): number for token, number in vocabulary.items()}
    return [[names.get(token, token), score] for token, score in vocabulary]


def _words(merge: str | list[str]) -> set[str]:
    """Return the two parts of a merge, and what they make."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}
