"""Questions of several turns, answered with a draft model."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.data.chat.template import ChatTemplate
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from megalight.inference.acceptance import Acceptance, measure
from megalight.inference.questions import Question
from megalight.inference.text import begun
from megalight.models.eagle import DraftModel
from megalight.models.gpt import GPT


@dataclass(frozen=True)
class Interview:
    """Asks questions, and counts the rounds of speculative decoding in the answers.

    Attributes:
        base: the whole model.
        draft: its draft.
        tokenizer: of both.
        template: how a conversation is written; None: turns are texts that the model continues.
        max_new_tokens: limit of an answer. An answer is shorter where the model's longest sequence ends.
        guesses: how many tokens the draft guesses in a round.
        start: tokens that are put before questions that do not begin with them.
    """

    base: GPT
    draft: DraftModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_new_tokens: int
    guesses: int = 4
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
            (answer,), (count,) = measure(
                self.base, self.draft, [prompt], max_new_tokens=room, guesses=self.guesses, eos_id=ends
            )
            total += count
            said = self.tokenizer.decode_after(prompt, answer)
            text += said
            messages.append({"role": "assistant", "content": said})
        return total
