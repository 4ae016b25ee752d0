"""``megalight acceptance BASE --draft DRAFT --questions FILE``: how many tokens a round of drafting yields."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from megalight.cli.verbs import add_device_arguments, dtype_of

DESCRIPTION = (
    "measure how many tokens a draft model yields per round\n\n"
    "The questions are those of MT-Bench, or others in its format: lines of JSON with turns, the user's\n"
    "messages, and perhaps a category. The model answers them greedily, one after another, turn by turn."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("base", help="a checkpoint, a run's folder (its newest one), or a folder of transformers")
    parser.add_argument("--draft", required=True, help="the checkpoint of its draft model")
    parser.add_argument("--questions", type=Path, required=True, help="a JSONL file in MT-Bench's format")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256, help="limit of an answer (default: 256)")
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=4, help="tokens that the draft proposes in a round (default: 4)"
    )
    parser.add_argument(
        "--plain", action="store_true", help="turns are texts to continue; for a tokenizer without a chat template"
    )
    parser.add_argument("--tokenizer", help="tokenizer, or its name, to use instead of the base's own")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's template)")
    add_device_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the acceptance length of each category and of all."""
    from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
    from megalight.data.chat.template import ChatTemplate, read_template
    from megalight.errors import ConfigurationError
    from megalight.inference.acceptance import read_questions

    if arguments.plain and arguments.chat_template:
        raise ConfigurationError("--plain takes no template; leave out --plain or --chat-template.")
    # Before the weights: a wrong file then raises at once.
    questions = read_questions(arguments.questions)
    source = None if arguments.chat_template is None else read_template(arguments.chat_template)

    import torch  # after the checks: importing it takes seconds

    from megalight.inference import TextGenerator
    from megalight.inference.acceptance import Acceptance, Interview, check_rounds
    from megalight.inference.speculator import load_draft

    writer = TextGenerator.from_checkpoint(
        latest_checkpoint(arguments.base),
        tokenizer=arguments.tokenizer,
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=dtype_of(arguments),
    )
    template = None if arguments.plain else ChatTemplate.of(writer.tokenizer, source)
    draft = load_draft(arguments.draft, writer.whole, writer.tokenizer)
    interview = Interview(
        writer.whole,
        draft,
        writer.tokenizer,
        template,
        arguments.max_new_tokens,
        arguments.num_speculative_tokens,
        writer.start,
    )
    counts: dict[str, Acceptance] = defaultdict(Acceptance)
    for question in questions:
        counts[question.category or "-"] += interview.ask(question)
    total = sum(counts.values(), Acceptance())
    check_rounds(total, len(questions), arguments.max_new_tokens, arguments.num_speculative_tokens)
    rows = [*sorted(counts.items()), ("all", total)] if len(counts) > 1 else [("all", total)]
    for name, each in rows:
        length = f"{each.length:.3f}" if each.rounds else "-"
        print(f"{name}: acceptance length {length} ({each.tokens} tokens in {each.rounds} rounds)")
    return 0
