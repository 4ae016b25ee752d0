from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.rl.prompts import PromptDataset, PromptWriter, TaskDataset
from tests.data.chat.conftest import chat_tokenizer as chat_tokenizer

QUESTION = "<s><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer(chat_tokenizer: Path) -> Tokenizer:
    return Tokenizer.load(chat_tokenizer)


def written(tokenizer: Tokenizer, row: dict[str, Any], **options: Any) -> str:
    prompts = PromptDataset(PromptWriter(tokenizer=tokenizer, **options), [("place", row)])
    ids, found = prompts[0]
    assert found is row
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        ({"prompt": "What?"}, {}, "What?"),
        ({"prompt": "What?"}, {"begin": " <think>"}, "What? <think>"),
        ({"question": "What?", "prompt": "No"}, {"column": "question"}, "What?"),
        ({"prompt": "What?"}, {"chat": True}, QUESTION),
        ({"prompt": "What?"}, {"chat": True, "begin": "<think>\n"}, f"{QUESTION}<think>\n"),
        ({"prompt": [{"role": "user", "content": "What?"}]}, {}, QUESTION),
        ({"prompt": [{"role": "user", "content": "What?"}], "completion": "That."}, {}, QUESTION),
        (
            {"prompt": [{"role": "user", "content": "What?"}]},
            {"system": "Think."},
            QUESTION.replace("<s>", "<s><|im_start|>system\nThink.<|im_end|>\n"),
        ),
        (
            {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]},
            {},
            QUESTION,
        ),
        ({"messages": [{"role": "user", "content": "What?"}]}, {}, QUESTION),
        ({"instruction": "What?", "output": "That."}, {}, QUESTION),
        ({"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]}, {}, QUESTION),
        (
            {
                "asked": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Ho"},
                    {"role": "user", "content": "What?"},
                ]
            },
            {"column": "asked"},
            "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n" + QUESTION[3:],
        ),
    ],
)
def test_rows_are_written_as_fine_tuning_writes_them(
    tokenizer: Tokenizer, row: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    assert written(tokenizer, row, **options) == text


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"question": "What?"}, {}, "place is no conversation"),
        ({"question": "What?"}, {"column": "questions"}, "Did you mean 'question'"),
        ({"prompt": ""}, {}, "the prompt is empty"),
        ({"prompt": "a\ud800"}, {}, "place: a text is not Unicode: character 1 is"),
        ({"prompt": "a\ud800"}, {"chat": True}, "place: a text is not Unicode: character"),
        ({"prompt": 5}, {}, "must be a string or a list of messages"),
        ({"prompt": []}, {}, "must be a string or a list of messages"),
        ({"prompt": [{"role": "assistant", "content": "That."}]}, {}, "ends with an answer"),
        ({"messages": [{"role": "assistant", "content": "That."}]}, {}, "the prompt is empty"),
    ],
)
def test_rows_without_a_prompt_are_refused(
    tokenizer: Tokenizer, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        written(tokenizer, row, **options)


def test_a_system_message_needs_a_conversation(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match="Set chat to true"):
        written(tokenizer, {"prompt": "What?"}, system="Think.")


def test_a_tokenizer_without_a_template_writes_no_conversation() -> None:
    plain = Tokenizer.train(["what " * 9], 258)
    with pytest.raises(DataError, match="has no chat template"):
        written(plain, {"prompt": "What?"}, chat=True)


def test_texts_begin_as_those_of_transformers(chat_tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = Tokenizer.load(chat_tokenizer)
    from tokenizers import processors

    raw: Any = model._model
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    ids, _ = PromptDataset(PromptWriter(tokenizer=model), [("", {"prompt": "What?"})])[0]
    assert list(ids) == fast("What?")["input_ids"]
    # A template writes it itself, once.
    assert written(model, {"prompt": "What?"}, chat=True) == QUESTION


def test_ends_are_those_of_documents_and_of_messages(chat_tokenizer: Path) -> None:
    tokenizer = Tokenizer.load(chat_tokenizer, "<|endoftext|>")
    ids = tokenizer.vocabulary
    assert PromptWriter(tokenizer=tokenizer).ends(chats=False) == (ids["<|endoftext|>"],)
    assert PromptWriter(tokenizer=tokenizer).ends(chats=True) == (ids["<|endoftext|>"], ids["<|im_end|>"])


def test_each_pass_has_all_prompts_in_an_order_of_its_own(tokenizer: Tokenizer) -> None:
    prompts = PromptDataset(PromptWriter(tokenizer=tokenizer), [("", {"prompt": "q" * k}) for k in range(1, 12)])
    data = TaskDataset(prompts, np.arange(2, 10), num_samples=20, seed=1)
    tasks = [data[index] for index in range(len(data))]
    assert len(tasks) == 24
    assert [task.number for task in tasks if task is not None] == list(range(24))
    passes = [[task.row["prompt"] for task in tasks[k : k + 8] if task is not None] for k in (0, 8, 16)]
    assert len({tuple(each) for each in passes}) == 3
    for each in passes:
        assert sorted(map(len, each)) == list(range(3, 11))
    assert data[None] is None
    for index in (-1, 24):
        with pytest.raises(IndexError):
            data[index]


def test_the_order_is_known(tokenizer: Tokenizer) -> None:
    def order(texts: str, seed: int | None = 1, places: int = 3) -> str:
        prompts = PromptDataset(PromptWriter(tokenizer=tokenizer), [("", {"prompt": text}) for text in texts])
        return TaskDataset(prompts, np.arange(places), seed=seed).order

    assert order("abc") == order("abc")
    assert len({order("abc"), order("acb"), order("abc", 2), order("abc", None), order("abc", places=2)}) == 5
