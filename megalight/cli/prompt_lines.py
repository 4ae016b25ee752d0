"""``megalight generate --prompts FILE``: many prompts as JSON lines, which share the steps of one engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megalight.errors import ConfigurationError, MegalightError

if TYPE_CHECKING:
    from megalight.inference import TextGenerator, TextRequest

SIZES = ("cache_tokens", "max_sequences", "step_tokens")
"""Options that are for ``--prompts`` alone."""
OTHERS = ("prompt", "image", "image_text", "resize", "draft")
"""Options that ``--prompts`` does not go with."""


def check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together. Before the weights are read."""
    if arguments.prompts is None:
        for name in SIZES:
            if getattr(arguments, name) is not None:
                raise ConfigurationError(f"{_option(name)} is for a file of prompts; give --prompts, too.")
        return
    for name in OTHERS:
        if getattr(arguments, name):
            raise ConfigurationError(f"{_option(name)} does not go with --prompts; leave one of them out.")
    for name in SIZES:
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigurationError(f"{_option(name)} is {value}; it must be at least 1.")


def read(arguments: argparse.Namespace) -> list[TextRequest]:
    """Return the requests of the file. Before the weights are read."""
    from megalight.inference import SamplingParams, TextRequest
    from megalight.inference.text_requests import read_requests

    default = TextRequest(
        prompt="",
        max_new_tokens=arguments.max_new_tokens,
        sampling_params=SamplingParams(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p),
        seed=arguments.seed,
    )
    return read_requests(arguments.prompts, default)


def write(
    writer: TextGenerator,
    requests: Sequence[TextRequest],
    arguments: argparse.Namespace,
    source: str | None,
    *,
    first: bool,
) -> None:
    """Print a line for each request, as soon as it and those before it have ended.

    Args:
        writer: model and tokenizer.
        requests: those of the file.
        arguments: those of the command.
        source: a chat template; None: the tokenizer's.
        first: whether this process prints. All of them have the same.

    Raises:
        MegalightError: after all lines, if requests have failed.
    """
    from megalight.inference.text_requests import line_of

    asked, ends = requests, list[int]()
    if arguments.chat:
        from megalight.data.chat.template import ChatTemplate

        template = ChatTemplate.of(writer.tokenizer, source)
        messages = [[{"role": "user", "content": request.prompt}] for request in requests]
        texts = [template.render(each, answer=True) for each in messages]
        asked = [replace(request, prompt=text) for request, text in zip(requests, texts, strict=True)]
        ends = template.ends(writer.tokenizer)
    failed = 0
    sizes = {name: value for name in SIZES if (value := getattr(arguments, name)) is not None}
    for request, completion in zip(requests, writer.complete_each(asked, ends=ends, **sizes), strict=True):
        failed += completion.reason == "error"
        if first:
            # At once, also into a pipe.
            print(line_of(request, completion), flush=True)
    if failed:
        raise MegalightError(
            f"{failed} of {len(requests)} requests ended with an error: their logits hold NaN or infinity. Check the "
            "weights (megalight inspect), or compute in a wider --dtype."
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
