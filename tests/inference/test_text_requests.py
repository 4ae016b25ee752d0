"""Texts that are completed together, from JSON lines to JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, MegalightError
from megalight.inference import DynamicEngine, SamplingParams, TextGenerator, TextRequest
from megalight.inference.text_requests import before, line_of, read_requests, stop_at
from tests.inference.test_text import TEXT, build

GREEDY = SamplingParams(temperature=0)
DEFAULT = TextRequest(prompt="", max_new_tokens=7, sampling_params=SamplingParams(temperature=0.5, top_k=9), seed=4)


@pytest.fixture(scope="module")
def writer() -> TextGenerator:
    return TextGenerator(build().double().eval(), Tokenizer.train([TEXT], 264))


def test_texts_come_in_order_and_as_they_would_alone(writer: TextGenerator) -> None:
    prompts = ["the quick brown fox", "a", "", "the lazy dog. the lazy dog."]
    # The first one is the longest, and the small cache holds few.
    limits = [30, 4, 9, 2]
    requests = [
        TextRequest(prompt=prompt, max_new_tokens=limit, sampling_params=SamplingParams(top_k=20), seed=number)
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    expected = [
        writer.complete([prompt], max_new_tokens=limit, top_k=20, seed=number)[0]
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    for sizes in ({}, {"cache_tokens": 64, "step_tokens": 5}, {"max_sequences": 1}):
        assert [found.text for found in writer.complete_each(requests, **sizes)] == expected
    (free,) = writer.complete_each([TextRequest(prompt="a", sampling_params=GREEDY)])
    assert free.text == writer.complete(["a"], temperature=0)[0]
    assert list(writer.complete_each([])) == []


def test_a_stop_text_ends_a_completion_and_is_no_part_of_it(writer: TextGenerator) -> None:
    (free,) = writer.complete_each(
        [TextRequest(prompt="the", max_new_tokens=40, sampling_params=GREEDY, log_probs=True)]
    )
    assert free.log_probs is not None
    assert len(free.log_probs) == len(free.tokens)
    assert free.reason == "length"
    place = next(place for place in range(10, len(free.text) - 4) if free.text[place : place + 4].isascii())
    stop = free.text[place : place + 4]
    ask = TextRequest(prompt="the", max_new_tokens=40, sampling_params=GREEDY, stop=["no such text", stop])
    (found,) = writer.complete_each([ask])
    assert (found.text, found.reason) == (free.text[: free.text.index(stop)], "stop")
    assert found.log_probs is None
    assert found.tokens == free.tokens[: len(found.tokens)]
    # With the token that completed the stop text, and none after it.
    assert stop in writer.tokenizer.decode(found.tokens)
    assert stop not in writer.tokenizer.decode(found.tokens[:-1])


def test_a_stop_text_is_found_across_tokens_and_special_ones() -> None:
    tokenizer = Tokenizer.train([TEXT], 264)
    ids, eod = tokenizer.encode("one é\n\ntwo"), tokenizer.eod_id
    stops = stop_at(["é\n\n"], tokenizer)
    assert stops is not None
    assert eod is not None
    found = [stops(ids[: n + 1]) for n in range(len(ids))]
    end = len(tokenizer.encode("one é\n\n"))
    assert found.index(True) == end - 1
    assert stops([*ids[: end - 1], *[eod] * 20, ids[end - 1]])
    assert stop_at([], tokenizer) is None
    assert before(["b", "cd"], "acdb") == "a"
    assert before(["x"], "acdb") == "acdb"


def test_lines_are_requests(tmp_path: Path) -> None:
    lines = [
        {"prompt": "ü"},
        {"prompt": "", "max_new_tokens": 3, "temperature": 0, "top_p": 0.5, "seed": 0, "id": {"a": [1]}},
        {"prompt": "x", "stop": "\n", "log_probs": True, "top_k": 2, "id": "k"},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    first, second, third = read_requests(file, DEFAULT)
    sampling_params = DEFAULT.sampling_params
    assert first == TextRequest(
        prompt="ü", max_new_tokens=7, sampling_params=sampling_params, seed=4, place=f"{file}:1"
    )
    changed = SamplingParams(temperature=0, top_k=9, top_p=0.5)
    assert second == TextRequest(
        prompt="", max_new_tokens=3, sampling_params=changed, seed=0, id={"a": [1]}, place=f"{file}:3"
    )
    assert (third.seed, third.stop, third.log_probs, third.sampling_params.top_k, third.id) == (6, ["\n"], True, 2, "k")
    assert read_requests(file, TextRequest(prompt=""))[0].seed is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2 is no JSON: Expecting"),
        ("[1]", '2 is no object of JSON; write {"prompt": ...}.'),
        ('{"prompts": "a"}', "2 has the key 'prompts'; a request has prompt, max_new_tokens, temperature,"),
        ('{"seed": 1}', "2 has no key 'prompt'."),
        ('{"prompt": 3}', "2: prompt is 3; it must be a text of Unicode."),
        pytest.param("[" * 100_000, "2 is no JSON: maximum recursion depth exceeded", id="deep"),
        pytest.param('{"prompt": "a", "id": ' + "1" * 5000 + "}", "2 is no JSON: Exceeds the limit", id="long"),
        (r'{"prompt": "\ud800"}', r"2: prompt is '\ud800'; it must be a text of Unicode."),
        (r'{"prompt": "a", "stop": "\ud800"}', r"2: stop is '\ud800'; it must be a text"),
        ('{"prompt": "a", "max_new_tokens": 0}', "2: max_new_tokens is 0; it must be at least 1."),
        ('{"prompt": "a", "max_new_tokens": true}', "2: max_new_tokens is True; it must be an integer, at least 1."),
        ('{"prompt": "a", "temperature": "1"}', "2: temperature is '1'; it must be a finite number, at least 0"),
        ('{"prompt": "a", "temperature": -1}', "2: temperature is -1; it must be a finite number, at least 0"),
        ('{"prompt": "a", "temperature": Infinity}', "2: temperature is inf; it must be a finite number, at least 0"),
        ('{"prompt": "a", "top_p": 2}', "2: top_p is 2; it must be a number above 0"),
        ('{"prompt": "a", "top_k": 1.5}', "2: top_k is 1.5; it must be an integer"),
        ('{"prompt": "a", "seed": -1}', "2: seed is -1; it must be from 0 to 9223372036854775807."),
        ('{"prompt": "a", "seed": 9223372036854775808}', "2: seed is 9223372036854775808; it must be"),
        ('{"prompt": "a", "stop": ["b", ""]}', "2: stop is ['b', '']; it must be a text, or a list of texts"),
        ('{"prompt": "a", "log_probs": 1}', "2: log_probs is 1; it must be true or false."),
    ],
)
def test_bad_lines_are_refused_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_requests(file, DEFAULT)
    assert str(caught.value).startswith(f"{file}:2")
    assert message in str(caught.value)


def test_files_without_requests_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    with pytest.raises(DataError, match="cannot be read"):
        read_requests(file, DEFAULT)
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(DataError, match=r"p\.jsonl line 2 is not UTF-8 text \(byte 0xff at position 28: invalid start"):
        read_requests(file, DEFAULT)
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}')  # as editors on Windows write it
    assert read_requests(file, DEFAULT)[0].prompt == "a"
    file.write_text("\n \n")
    with pytest.raises(DataError, match="has no request; write one in each line"):
        read_requests(file, DEFAULT)


def test_requests_are_checked_before_the_first_runs(writer: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicEngine, "step", lambda *_: pytest.fail("a pass ran"))
    bad = TextRequest(prompt="a", max_new_tokens=64, place="p.jsonl:3")
    with pytest.raises(DataError, match=r"^p\.jsonl:3: a prompt of 1 tokens and 64 new ones exceed"):
        writer.complete_each([TextRequest(prompt="a"), bad])
    long = TextRequest(prompt="a", max_new_tokens=40)
    with pytest.raises(DataError, match="need 3 blocks of 16 tokens, and the cache has 2: the request could never end"):
        writer.complete_each([long], cache_tokens=32)
    with pytest.raises(ConfigurationError, match=r"cache_tokens \(--cache-tokens\) is 15; it must be at least 16"):
        writer.complete_each([long], cache_tokens=15)


def test_a_text_whose_logits_are_nan_fails_alone(writer: TextGenerator) -> None:
    model = build().double().eval()
    with torch.no_grad():
        model.embed.word.weight[writer.tokenizer.encode("#")] = torch.nan  # type: ignore[union-attr]
    poisoned = TextGenerator(model, writer.tokenizer)
    texts = ["the quick", "the #", "a", "#"]
    found = [
        *poisoned.complete_each([TextRequest(prompt=text, max_new_tokens=5, sampling_params=GREEDY) for text in texts])
    ]
    assert [each.reason for each in found] == ["length", "error", "length", "error"]
    assert [each.text for each in found if each.reason == "length"] == writer.complete(
        texts[::2], max_new_tokens=5, temperature=0
    )
    with pytest.raises(MegalightError, match="the logits after prompt 1, 3 hold NaN or infinity"):
        poisoned.complete(texts, max_new_tokens=5)


def test_one_text_is_no_list_of_prompts(writer: TextGenerator) -> None:
    with pytest.raises(DataError, match=r"prompts is the text 'the quick'; give a list of texts"):
        writer.complete("the quick")
    for bad in (1.5, -1, "1"):
        with pytest.raises(ConfigurationError, match=f"seed is {bad!r}; it must be"):
            writer.complete(["a"], seed=bad)  # type: ignore[arg-type]


def test_a_completion_is_a_line(writer: TextGenerator) -> None:
    odd = TextRequest(prompt="ü", max_new_tokens=2, sampling_params=GREEDY, id="\ud800")
    (found,) = writer.complete_each([odd])
    assert json.loads(line_of(odd, found).encode())["id"] == "\ud800"
    ask = TextRequest(prompt="ü", max_new_tokens=2, sampling_params=GREEDY, log_probs=True, id=5)
    (found,) = writer.complete_each([ask])
    line = line_of(ask, found)
    assert "ü" in line
    assert list(json.loads(line)) == ["id", "prompt", "completion", "reason", "tokens", "log_probs"]
    assert json.loads(line)["log_probs"] == found.log_probs
    plain = TextRequest(prompt="ü", max_new_tokens=2, sampling_params=GREEDY)
    (found,) = writer.complete_each([plain])
    assert json.loads(line_of(plain, found)) == {"prompt": "ü", "completion": found.text, "reason": "length"}
