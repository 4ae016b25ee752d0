from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from megalight.data.chat.conversations import conversations
from megalight.data.chat.template import ChatTemplate, encode
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.chat.conftest import MARKED, PLAIN, chat

TURNS = chat("naïve 東京?", "the answer is 4", "and?", "what 🙂 is", "so", "")
FORGETS = (  # leaves out what the assistant said before the last message
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.role }}: {{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def learned(tokenizer: Tokenizer, source: str, row: dict, **options: str) -> list[str]:
    """The runs of tokens that count, as text."""
    (conversation,) = conversations(row, "f")
    text, spans = ChatTemplate.of(tokenizer, source).spans(conversation, **options)
    ids, loss = encode(tokenizer, text, spans)
    runs: list[list[int]] = [[]]
    for token, counts in zip(ids, loss, strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_the_mask_equals_that_of_transformers(chat_tokenizer: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(chat_tokenizer)
    expected = theirs.apply_chat_template(
        TURNS["messages"], chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    tokenizer = Tokenizer.load(chat_tokenizer)
    text, spans = ChatTemplate.of(tokenizer, MARKED).spans(conversations(TURNS, "f")[0])
    ids, loss = encode(tokenizer, text, spans)
    assert ids == expected["input_ids"]
    assert loss.tolist() == expected["assistant_masks"]
    assert 0 < loss.sum() < len(ids)


def test_prefixes_find_the_same_answers(chat_tokenizer: Path) -> None:
    tokenizer = Tokenizer.load(chat_tokenizer)
    marked = learned(tokenizer, MARKED, TURNS)
    assert marked == ["the answer is 4<|im_end|>", "what 🙂 is<|im_end|>", "<|im_end|>"]
    assert learned(tokenizer, PLAIN, TURNS) == [f"{text}\n" for text in marked]
    assert learned(tokenizer, PLAIN, TURNS, train_on="last") == ["<|im_end|>\n"]
    assert learned(tokenizer, MARKED, TURNS, train_on="last") == ["<|im_end|>"]


def test_what_ends_an_answer(chat_tokenizer: Path) -> None:
    tokenizer = Tokenizer.load(chat_tokenizer)
    assert ChatTemplate.of(tokenizer, PLAIN).ends(tokenizer) == tokenizer.encode("<|im_end|>")
    # as Gemma's: the end of a turn is not the end of a document
    turns = PLAIN.replace("<|im_end|>", "<|im_start|>")
    assert ChatTemplate.of(tokenizer, turns).ends(tokenizer) == tokenizer.encode("<|im_start|>") != [tokenizer.eod_id]
    assert ChatTemplate.of(tokenizer, PLAIN.replace("<|im_end|>", " so")).ends(tokenizer) == []


def test_only_the_completion_counts(chat_tokenizer: Path) -> None:
    tokenizer = Tokenizer.load(chat_tokenizer)
    turns = chat("a", "b", "c", "d")["messages"]
    for source in (PLAIN, MARKED):
        (only,) = learned(tokenizer, source, {"prompt": turns[:3], "completion": turns[3:]})
        assert only.startswith("d<|im_end|>")


def test_a_template_that_rewrites_earlier_messages(chat_tokenizer: Path) -> None:
    tokenizer = Tokenizer.load(chat_tokenizer)
    with pytest.raises(DataError, match=r"message 1 differently if more messages follow.*--train-on last"):
        learned(tokenizer, FORGETS, chat("a", "b", "c", "d"))
    assert learned(tokenizer, FORGETS, chat("a", "b", "c", "d"), train_on="last") == ["d<|im_end|>"]


def test_tools_system_prompts_and_calls_reach_the_template(chat_tokenizer: Path) -> None:
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    row = {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"},
        ],
    }
    tokenizer = Tokenizer.load(chat_tokenizer)
    assert learned(tokenizer, source, row) == ['{"name": "add", "arguments": {"a": 1}}<|im_end|>', "two<|im_end|>"]
    (conversation,) = conversations(row, "f")
    text = ChatTemplate.of(tokenizer, source).render(conversation.messages, conversation.tools)
    assert text.startswith('[{"type": "function", "function": {"name": "add"}}][system]s')


def test_templates_run_in_a_sandbox(chat_tokenizer: Path) -> None:
    template = ChatTemplate.of(Tokenizer.load(chat_tokenizer), "{{ messages.append(1) }}")
    with pytest.raises(DataError, match="refuses these messages: SecurityError"):
        template.render([{"role": "user", "content": "u"}])


def test_templates_that_do_not_work(chat_tokenizer: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"the tokenizer has no chat template.*--chat-template"):
        ChatTemplate.of(tokenizer)
    with pytest.raises(DataError, match="syntax error in line 2"):
        ChatTemplate.of(tokenizer, "\n{% for %}")
    strict = ChatTemplate.of(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="refuses these messages: TemplateError: roles must alternate"):
        strict.render([])
    for source, name in (
        ("{{ 1 / messages | length }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ '{} {}'.format(1) }}", "IndexError"),
        ("{{ 5 | dictsort }}", "AttributeError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ):
        with pytest.raises(DataError, match=f"refuses these messages: {name}"):
            ChatTemplate.of(tokenizer, source).render([])
    divides = ChatTemplate.of(tokenizer, "{{ 1 // messages | length }}")
    assert divides.render([{"role": "user", "content": "u"}]) == "1"
    twice = MARKED.replace("{{ m.content }}", "{{ m.content }}{% endgeneration %}{% generation %}", 1)
    with pytest.raises(DataError, match="generation blocks for 2 assistant messages"):
        learned(Tokenizer.load(chat_tokenizer), twice, chat("a", "b", "c", "d"), train_on="last")
