from __future__ import annotations

import pytest

from megalight.data.chat.conversations import conversations
from megalight.errors import DataError

USER, BOT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, BOT]}, [USER, BOT]),
        ({"prompt": "u", "completion": "a"}, [USER, BOT]),
        ({"prompt": [USER], "completion": [BOT]}, [USER, BOT]),
        ({"instruction": "u", "output": "a"}, [USER, BOT]),
        ({"instruction": "u", "input": None, "output": "a"}, [USER, BOT]),
        ({"instruction": "u", "input": "v", "output": "a"}, [{"role": "user", "content": "u\nv"}, BOT]),
        (
            {"instruction": "u", "system": "s", "output": "a"},
            [{"role": "system", "content": "s"}, USER, BOT],
        ),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}, [USER, BOT]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "u"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            [
                {"role": "system", "content": "s"},
                USER,
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "content": "2"},
                BOT,
            ],
        ),
    ],
)
def test_shapes(row: dict, messages: list) -> None:
    (found,) = conversations(row, "f line 1")
    assert found.messages == messages
    assert found.first == (1 if "prompt" in row else 0)


def test_tools_are_json_or_its_text() -> None:
    for tools in ([TOOL], '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'):
        assert conversations({"messages": [USER, BOT], "tools": tools}, "f")[0].tools == [TOOL]
    assert conversations({"messages": [USER, BOT], "tools": ""}, "f")[0].tools is None


def test_preference_pairs() -> None:
    worse = {"role": "assistant", "content": "b"}
    for row in (
        {"prompt": "u", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [BOT], "rejected": [worse]},
        {"chosen": [USER, BOT], "rejected": [USER, worse]},
    ):
        chosen, rejected = conversations(row, "f")
        assert chosen.messages == [USER, BOT]
        assert rejected.messages == [USER, worse]
        assert chosen.first == rejected.first == 1
    pair = conversations({"chosen": [USER, BOT | {"train": False}], "rejected": [USER, worse]}, "f")
    assert [(each.first, each.masked) for each in pair] == [(1, {1}), (1, set())]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([USER], "f.jsonl line 3 is of type list; each row must be a JSON object"),
        ({"mesages": []}, "has the keys 'mesages'; expected are 'messages'.*Did you mean 'messages'"),
        ({"messages": []}, r"line 3: 'messages' is \[\]; it must be a string or a list of messages"),
        ({"messages": [{"content": "u"}]}, r"messages\[0\]\.role is None; it must be a string such as"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content is 3; it must be a string"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content is None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            r"messages\[0\]\.content\[0\] is .*; it must be text",
        ),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": 1}]}, r"tool_calls is 1; it must be a list"),
        ({"messages": [BOT | {"weight": 0.5}]}, r"messages\[0\]\.weight is 0\.5; it must be 0, 1, true or false"),
        ({"messages": [BOT | {"train": "no"}]}, r"messages\[0\]\.train is 'no'; it must be 0, 1, true or false"),
        ({"messages": [BOT | {"train_detail": []}]}, r"train_detail is \[\]; .* whole messages are marked"),
        ({"conversations": [{"from": "gpt", "value": "x", "weight": 2}]}, r"conversations\[0\]\.weight is 2"),
        ({"prompt": 1, "completion": "a"}, "'prompt' is 1; it must be a string or a list of messages"),
        ({"instruction": "u", "output": 1}, "'output' is 1; it must be a string"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, r"conversations\[0\]\.from is 'robot'.*one of human"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "must be JSON text of a call"),
        ({"messages": [USER], "tools": "x"}, "'tools' is 'x'; it must be a list of JSON schemas"),
        ({"prompt": "u", "chosen": "a", "rejected": "a"}, "'rejected' is 'a'; it must be another answer"),
    ],
)
def test_bad_rows_name_place_and_key(row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        conversations(row, "f.jsonl line 3")
