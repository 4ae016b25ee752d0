"""The token of videos in ``config.json``: videos are not read, so it is known only to be refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.models.vlm.config import VLMConfig


def token_from(values: Mapping[str, Any], key: str, usual: int, vocab_size: int) -> int | None:
    """Return the id of video tokens.

    Args:
        values: their configuration.
        key: the name of the setting.
        usual: what it need not say. Small models have a smaller vocabulary, and no videos.
        vocab_size: that of the language model.
    """
    token = values.get(key, usual)
    return token if token in range(vocab_size) else None


def token_to(config: VLMConfig, key: str) -> dict[str, Any]:
    """Return their setting, if the model has such a token."""
    return {} if config.video_token is None else {key: config.video_token}
