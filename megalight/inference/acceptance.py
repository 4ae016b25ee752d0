"""Acceptance length: how many tokens a round of speculative decoding yields with a draft model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalight.data.chat.template import ChatTemplate
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, decode_utf8
from megalight.inference.generate import drafted_engine
from megalight.inference.prompts import check_prompts
from megalight.inference.sampling import FAILED, SamplingParams, check_sampled
from megalight.inference.text import begun
from megalight.models.eagle import DraftModel
from megalight.models.gpt import GPT


@dataclass(frozen=True)
class Acceptance:
    """Tokens and rounds.

    Attributes:
        tokens: new tokens of all rounds.
        rounds: rounds in which the draft made all of its guesses. One that the end of a sequence cuts short is not
            counted: it would have yielded more tokens.
    """

    tokens: int = 0
    rounds: int = 0

    @property
    def length(self) -> float:
        """Mean number of tokens per round: 1 without any right guess."""
        return self.tokens / self.rounds

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.tokens + other.tokens, self.rounds + other.rounds)


def measure(
    base: GPT,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_speculative_tokens: int = 4,
    eos_id: Collection[int] = (),
) -> tuple[list[list[int]], Acceptance]:
    """Complete prompts greedily, and count what the rounds yield.

    Args:
        base: the whole model.
        draft: a draft that was trained for it, on the same device and in the same dtype.
        prompts: token ids.
        max_new_tokens: length of each completion, at most.
        num_speculative_tokens: how many tokens the draft guesses in a round.
        eos_id: tokens that end a completion.

    Returns:
        the completions, and what was counted.
    """
    prompts, max_new_tokens = check_prompts(base, prompts, max_new_tokens)
    engine = drafted_engine(base, draft, prompts, max_new_tokens, num_speculative_tokens)
    greedy = SamplingParams(temperature=0.0)
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=max_new_tokens, sampling_params=greedy, eos_id=eos_id)
    completions = engine.run()
    check_sampled({prompt: [FAILED] for prompt, each in completions.items() if each.reason == "error"})
    whole = {
        each: n for each, n in engine.draft_rounds.items() if each.proposed == num_speculative_tokens and each.complete
    }
    tokens = sum((each.accepted + 1) * n for each, n in whole.items())
    return [each.tokens for each in completions.values()], Acceptance(tokens, sum(whole.values()))


def acceptance_length(
    base: GPT,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_speculative_tokens: int = 4,
    eos_id: Collection[int] = (),
) -> float:
    """Return the mean number of tokens per round over greedy completions of the prompts.

    It is from 1 to ``num_speculative_tokens + 1``.

    The arguments are those of :func:`measure`.

    Raises:
        ConfigurationError: there is no whole round: no prompt, or completions too short for one.
    """
    total = Acceptance()
    if prompts:
        _, total = measure(
            base,
            draft,
            prompts,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            eos_id=eos_id,
        )
    check_rounds(total, len(prompts), max_new_tokens, num_speculative_tokens)
    return total.length


def check_rounds(total: Acceptance, prompts: int, max_new_tokens: int, num_speculative_tokens: int) -> None:
    """Refuse counts without a round.

    Raises:
        ConfigurationError: there is none.
    """
    if not total.rounds:
        raise ConfigurationError(
            f"{prompts} prompts with max_new_tokens={max_new_tokens} hold no whole round: the first token is of the "
            f"prompt's own pass, and a round yields up to {num_speculative_tokens + 1} more. Give prompts, and at "
            f"least max_new_tokens={num_speculative_tokens + 2}."
        )


# Questions in MT-Bench's format


@dataclass(frozen=True)
class Question:
    """A conversation of which the user's part is known.

    Attributes:
        category: its kind; empty if the file does not say.
        turns: the user's messages.
    """

    category: str
    turns: tuple[str, ...]


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Read a JSONL file in MT-Bench's format (https://arxiv.org/abs/2306.05685), without its empty lines.

    Raises:
        DataError: there is no such file, it has no question, or a line is not of the format. The message names it.
    """
    try:
        # At line feeds alone: `splitlines` divides at characters that may stand in a message, too.
        lines = decode_utf8(Path(path).read_bytes(), str(path), line=1).split("\n")
    except OSError as error:
        raise DataError(f"the questions in {path} cannot be read: {error}") from error
    found = [_question(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{path} has no question; a line is " + '{"category": "writing", "turns": ["Compose ..."]}.')
    return found


def _question(line: str, where: str) -> Question:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    turns = values.get("turns") if isinstance(values, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise DataError(f'{where} needs "turns", a list of messages of the user, each a text that is not empty.')
    return Question(str(values.get("category", "")), tuple(turns))


@dataclass(frozen=True)
class Interview:
    """Asks questions, and counts the rounds of speculative decoding in the answers.

    Attributes:
        base: the whole model.
        draft: its draft.
        tokenizer: of both.
        template: how a conversation is written; None: turns are texts that the model continues.
        max_new_tokens: limit of an answer. An answer is shorter where the model's longest sequence ends.
        num_speculative_tokens: how many tokens the draft guesses in a round.
        start: tokens that are put before questions that do not begin with them.
    """

    base: GPT
    draft: DraftModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_new_tokens: int
    num_speculative_tokens: int = 4
    start: tuple[int, ...] = ()

    def ask(self, question: Question) -> Acceptance:
        """Return the counts of all turns. Turns for which the model has no room are left out.

        Raises:
            DataError: the first turn alone leaves no room for an answer.
        """
        eod = self.tokenizer.eod_id
        ends = {*([] if eod is None else [eod]), *(self.template.ends(self.tokenizer) if self.template else [])}
        total, messages, text = Acceptance(), [], ""
        for number, turn in enumerate(question.turns):
            if self.template is None:
                text += turn
            else:
                messages.append({"role": "user", "content": turn})
                text = self.template.render(messages, answer=True)
            prompt = begun(self.tokenizer.encode(text), self.start)
            room = min(self.max_new_tokens, self.base.config.max_sequence_length - len(prompt))
            if room < 1:
                if number == 0:
                    raise DataError(
                        f"a question of {len(prompt)} tokens leaves no room for an answer in max_sequence_length="
                        f"{self.base.config.max_sequence_length}: {turn[:60]!r}. Remove it, or take a larger model."
                    )
                break
            (answer,), count = measure(
                self.base,
                self.draft,
                [prompt],
                max_new_tokens=room,
                num_speculative_tokens=self.num_speculative_tokens,
                eos_id=ends,
            )
            total += count
            said = self.tokenizer.decode_after(prompt, answer)
            text += said
            messages.append({"role": "assistant", "content": said})
        return total
