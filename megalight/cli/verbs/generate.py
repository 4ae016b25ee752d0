"""``megalight generate CKPT --prompt TEXT``: complete text with a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megalight.cli.processes import add_layout_arguments, check_ranks, text_generator
from megalight.cli.verbs import add_model_arguments, add_sampling_arguments
from megalight.errors import ConfigurationError, DataError, MegalightError, integer

if TYPE_CHECKING:
    from megalight.data.multimodal.template import ImageText
    from megalight.inference import TextGenerator, TextRequest


DESCRIPTION = "complete text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        help="a checkpoint, a run's folder (its newest one), or a folder of transformers; also s3://...",
    )
    parser.add_argument(
        "-p", "--prompt", action="append", help="text to complete; repeat for several (default: standard input)"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help='a file with a request in each line, such as {"prompt": "def read("}, which may also have max_new_tokens, '
        "temperature, top_k, top_p, seed, stop, log_probs and id. Prints a line of JSON for each, in the same order",
    )
    parser.add_argument(
        "--cache-tokens",
        type=int,
        help="of --prompts: tokens for which the cache has room (default: as many as the requests can use at once)",
    )
    parser.add_argument("--max-sequences", type=int, help="of --prompts: texts that run at once (default: 64)")
    parser.add_argument(
        "--step-tokens", type=int, help="of --prompts: tokens of a step; longer prompts run in parts (default: 512)"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        help="an image file, for a model that reads images; repeat for several. They take the places of <image> in the "
        "prompts, in order. Prompts without any get all of them at their beginning",
    )
    parser.add_argument(
        "--image-text",
        help="what replaces <image>, with the model's image token once, as in preparing the data (default: as the "
        "published model with this image token has it, or the token alone)",
    )
    parser.add_argument(
        "--resize",
        choices=("crop", "pad", "stretch"),
        help="how an image becomes a square: as in training (default: as the model's configuration says)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message; print the assistant's answer"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's template)")
    parser.add_argument(
        "-n", "--max-new-tokens", type=int, help="limit of new tokens (default: 128, or what the model has room for)"
    )
    add_sampling_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--draft", help="a draft model's checkpoint, which proposes tokens: faster, with the same completions"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, help="tokens that the draft proposes at a time (default: 4)"
    )
    add_layout_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt with its completion, or each answer."""
    from megalight.cli.checkpoints import model_paths

    path, tokenizer, base = model_paths(arguments)
    _check_options(arguments)
    source = _template(arguments)
    check_ranks(arguments)

    from megalight.data.multimodal.images import decode  # after the checks: importing torch takes seconds
    from megalight.inference.images import read

    # Before the weights: a wrong path and a damaged file then raise at once, with their names.
    files = [read(image, f"--image {number}") for number, image in enumerate(arguments.image, 1)]
    for number, (image, file) in enumerate(zip(arguments.image, files, strict=True), 1):
        decode(file, f"--image {number} ({image})")

    requests = [] if arguments.prompts is None else _read_prompts(arguments)
    prompts = [] if requests else arguments.prompt or [_standard_input()]
    writer, prints = text_generator(arguments, path, tokenizer, base)
    if requests:
        _write_answers(writer, requests, arguments, source, prints)
        return 0
    completions = _complete(writer, prompts, files, arguments, source)
    # All ranks have the same.
    if prints:
        for prompt, completion in zip(prompts, completions, strict=True):
            print(completion if arguments.chat else prompt + completion)
    return 0


SIZES = ("cache_tokens", "max_sequences", "step_tokens")
"""Options that are for ``--prompts`` alone."""
OTHERS = ("prompt", "image", "image_text", "resize", "draft")
"""Options that ``--prompts`` does not go with."""
NEEDED = {
    **dict.fromkeys(SIZES, ("prompts", "is for a file of prompts")),
    **dict.fromkeys(("resize", "image_text"), ("image", "is for images")),
    "num_speculative_tokens": ("draft", "is the number of tokens that a draft proposes"),
}
"""Option -> the one without which it does nothing, and why."""


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together. Before the weights are read."""
    for name in OTHERS if arguments.prompts is not None else ():
        if getattr(arguments, name):
            raise ConfigurationError(f"{_option(name)} does not go with --prompts; leave one of them out.")
    for name, (other, reason) in NEEDED.items():
        if getattr(arguments, name) is not None and not getattr(arguments, other):
            raise ConfigurationError(f"{_option(name)} {reason}; give {_option(other)}, too.")
    for name in (*SIZES, "num_speculative_tokens"):
        if (value := getattr(arguments, name)) is not None:
            integer(_option(name), value)
    if arguments.draft is not None and arguments.image:
        raise ConfigurationError("--draft serves models of text; leave out --draft or --image.")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"the standard input is not UTF-8 text ({error}); convert it.") from error


def _template(arguments: argparse.Namespace) -> str | None:
    """Return the text of the named chat template. Before the weights are read."""
    if arguments.chat_template is None:
        return None
    if not arguments.chat:
        raise ConfigurationError("--chat-template is the form of a conversation; add --chat.")
    from megalight.data.chat.template import read_template

    return read_template(arguments.chat_template)


def _complete(
    writer: TextGenerator,
    prompts: Sequence[str],
    files: Sequence[bytes],
    arguments: argparse.Namespace,
    source: str | None,
) -> list[str]:
    """Return the completion of each prompt, or the answer. ``source``: a chat template; None: the tokenizer's."""
    draft, guessing = None, dict[str, int]()
    if arguments.draft is not None:
        from megalight.inference.speculator import load_draft

        draft = load_draft(arguments.draft, writer.model, writer.tokenizer)
        if arguments.num_speculative_tokens is not None:
            guessing["num_speculative_tokens"] = arguments.num_speculative_tokens
    contents: Sequence[str | list[dict[str, str]]] = prompts
    images, image = None, None
    if files:
        image = writer.image_text(arguments.image_text)
        contents, images = _with_images(prompts, files, writer.image_marker, image, parts=arguments.chat)
    ends: list[int] = []
    if arguments.chat:
        from megalight.data.chat.template import ChatTemplate
        from megalight.data.multimodal.template import ImageTemplate

        template = ChatTemplate.of(writer.tokenizer, source)
        if image is not None:
            template = replace(ImageTemplate.of(writer.tokenizer, source), image=image)
        contents = [template.render([{"role": "user", "content": each}], answer=True) for each in contents]
        ends = template.ends(writer.tokenizer)
    return writer.complete(
        cast(Sequence[str], contents),
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        ends=ends,
        images=images,
        image_text=arguments.image_text,
        resize=arguments.resize,
        draft=draft,
        **guessing,
    )


def _with_images(
    prompts: Sequence[str], files: Sequence[bytes], marker: str, image: ImageText, *, parts: bool
) -> tuple[Sequence[str | list[dict[str, str]]], list[list[bytes]]]:
    """Return the prompts with a place for each of their images, and the images of each prompt.

    Args:
        image: how a place is written.
        parts: whether prompts without a place become the parts of a message.
    """
    from megalight.data.multimodal.template import IMAGE_TOKEN

    counts = [image.framed(image.marked(prompt))[0].count(marker) for prompt in prompts]
    if not any(counts):
        every = [list(files) for _ in prompts]
        if parts:
            places = [{"type": "image"} for _ in files]
            return [[*places, {"type": "text", "text": prompt}] for prompt in prompts], every
        return [IMAGE_TOKEN * len(files) + prompt for prompt in prompts], every
    if sum(counts) != len(files):
        raise DataError(
            f"the prompts hold {IMAGE_TOKEN!r} {sum(counts)} times, and --image is given {len(files)} times; each "
            "image needs one place. Leave all places out to put every image before each prompt."
        )
    bounds = [0, *accumulate(counts)]
    return list(prompts), [list(files[first:last]) for first, last in pairwise(bounds)]


def _read_prompts(arguments: argparse.Namespace) -> list[TextRequest]:
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


def _write_answers(
    writer: TextGenerator,
    requests: Sequence[TextRequest],
    arguments: argparse.Namespace,
    source: str | None,
    prints: bool,
) -> None:
    """Print a line for each request, as soon as it and those before it have ended.

    Args:
        source: a chat template; None: the tokenizer's.
        prints: whether this process prints. All of them have the same.

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
        if prints:
            # At once, also into a pipe.
            print(line_of(request, completion), flush=True)
    if failed:
        raise MegalightError(
            f"{failed} of {len(requests)} requests ended with an error: their logits hold NaN or infinity. Check the "
            "weights (megalight inspect), or compute in a wider --dtype."
        )
