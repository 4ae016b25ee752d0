"""Speculative decoding: its text is the base's own, its guesses are those of drafting without a cache."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalight.cli.main import main
from megalight.data.tokenizer import FILE, Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.inference import Completion, DynamicEngine, SamplingParams, acceptance, generate, stream
from megalight.inference.acceptance import Acceptance, Interview, Question, acceptance_length, measure, read_questions
from megalight.inference.scheduler import Request
from megalight.inference.speculator import EagleSpeculator
from megalight.models.eagle import DraftModel, EagleConfig
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, LatentConfig
from megalight.models.hidden import KEPT, keeping
from megalight.models.stored import held_model, save_model
from megalight.nn import DraftState
from megalight.nn.init import initialize
from megalight.types import PackedSequences

SMALL = GPTConfig(num_layers=3, hidden_size=16, num_heads=2, vocab_size=31, max_sequence_length=48)
IDS = tuple(range(0, 31, 2))
LATENT = LatentConfig(kv_rank=6, q_rank=5, head_dim=4, rotary_dim=6, value_dim=3)
BASES = {
    "llama": SMALL,
    "windowed": replace(SMALL, attention=AttentionConfig(window=5, window_pattern=2)),
    "latent": replace(SMALL, mixer_pattern=("latent_attention",), latent=LATENT, head_dim=0),
}
DRAFTS = {
    "llama": EagleConfig(auxiliary_layers=(2, 1), draft_ids=IDS, std=0.4, num_heads=2, num_kv_heads=1),
    "latent": EagleConfig(auxiliary_layers=(2, 1), latent=LATENT, std=0.4, num_heads=2),
}
PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 30, 8, 1, 0]]


def models(base: str = "llama", kind: str = "llama") -> tuple[GPT, DraftModel]:
    model = GPT(BASES[base]).double()
    draft = DraftModel(DRAFTS[kind].for_base(BASES[base])).double()
    for seed, each in enumerate((model, draft)):
        initialize(each, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model, draft


def states_of(base: GPT, tokens: list[int]) -> Tensor:
    with keeping(base, ["layers.1", "layers.0"]) as found:
        base(torch.tensor(tokens), PackedSequences.of_uniform(1, len(tokens), torch.device("cpu")))
    return torch.cat([found[KEPT + "layers.1"], found[KEPT + "layers.0"]], -1)


@torch.no_grad()
def token_by_token(base: GPT, draft: DraftModel, text: list[int], num_speculative_tokens: int) -> list[int]:
    """One round after a text, with an ordinary causal pass over real and guessed tokens for each guess."""
    hidden, tokens = draft.fuse(states_of(base, text[:-1])), text[1:]
    for _ in range(num_speculative_tokens):
        sequences = PackedSequences.of_uniform(1, len(tokens), torch.device("cpu"))
        out = draft.step(hidden, base.embed.word(torch.tensor(tokens)), sequences, DraftState())
        top = int(draft.head.top(out[-1:]))
        tokens.append(draft.config.draft_ids[top] if draft.config.draft_ids else top)
        hidden = torch.cat([hidden, out[-1:]])
    return tokens[-num_speculative_tokens:]


@torch.no_grad()
@pytest.mark.parametrize("kind", DRAFTS)
def test_training_guesses_at_all_places_what_drafting_guesses(kind: str) -> None:
    base, draft = models(kind=kind)
    text = torch.randint(31, (9,), generator=torch.Generator().manual_seed(3))
    sequences, state = PackedSequences.of_uniform(1, 9, text.device), DraftState()
    hidden, given, found = draft.fuse(states_of(base, text.tolist())), text.roll(-1), []
    for _ in range(4):
        hidden = draft.step(hidden, base.embed.word(given), sequences, state)
        top = draft.head.top(hidden)
        given = torch.tensor(draft.config.draft_ids)[top] if draft.config.draft_ids else top
        found.append(given)
    for place in range(8):
        assert torch.stack(found)[:, place].tolist() == token_by_token(base, draft, text[: place + 2].tolist(), 4)


@pytest.mark.parametrize(
    ("base_kind", "kind", "ahead"),
    [
        ("windowed", "latent", True),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("windowed", "latent", False), ("llama", "llama", True), ("latent", "llama", False))
        ),
    ],
)
def test_a_draft_goes_on_where_requests_do(
    base_kind: str, kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch, poison: None
) -> None:
    """They come at random, in parts, share prefixes, wait, are suspended, cancelled, and end by themselves."""
    base, draft = models(base_kind, kind)
    expected: dict[int, list[int]] = {}
    seen, draw, guess = watched_guesses(monkeypatch), random.Random(4 if ahead else 3), EagleSpeculator.propose

    def often_right(self: EagleSpeculator, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        found = guess(self, requests, counts)
        for request, count, each in zip(requests, counts, found, strict=True):
            length = int(engine._passes.newest.lengths[request.slot]) + 1
            if length % 2:
                begin = length - request.prompt_length
                right = expected[request.number][begin : begin + count]
                each[: len(right)] = torch.tensor(right)
        return found

    monkeypatch.setattr(EagleSpeculator, "propose", often_right)
    engine = DynamicEngine(
        base, num_blocks=12, block_size=4, max_sequences=5, step_tokens=11, speculator=EagleSpeculator(draft, base, 3)
    )
    engine._passes.runs_ahead = ahead
    start = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    found: dict[int, Completion] = {}
    preempted = shared = turn = 0
    while turn < 30 or engine.unfinished:
        if turn < 30 and draw.random() < 0.6:
            prompt = [*start[: draw.choice([0, 0, 8, 9])], *(draw.randrange(31) for _ in range(draw.randint(1, 9)))]
            sampling, seed = {"temperature": draw.choice([0.0, 0.8]), "top_k": 9}, draw.randrange(99)
            new, n = draw.randint(1, 19), draw.choice([1, 1, 2])
            params = SamplingParams(**sampling)
            first = engine.add(
                prompt, max_new_tokens=new, sampling_params=params, eos_id=3, seed=seed, n=n, log_probs=True
            )
            for place in range(n):
                options: dict[str, Any] = {"max_new_tokens": new, "eos_id": 3, "seed": seed + place, **sampling}
                (expected[first + place],) = generate(base, [prompt], **options)
        if turn % 9 == 8:
            engine.suspend(keep_cache=turn % 2 == 0)
            engine.resume()
        if turn % 13 == 12 and engine.unfinished:
            del expected[engine.unfinished[-1]]
            engine.cancel(engine.unfinished[-1])
        step = engine.step()
        turn += 1
        if step is not None:
            found |= step.finished
            preempted, shared = preempted + len(step.preempted), shared + sum(step.shared.values())
    assert {number: each.tokens for number, each in found.items()} == expected
    assert all(len(each.log_probs or []) == len(each.tokens) for each in found.values())
    assert engine.draft_rounds.accepted[2] > 9
    assert preempted
    assert shared > 50
    assert engine.blocks.free == 12
    if ahead:  # nobody knew the texts
        return
    # Where a shared block ends, the draft may know the next token of another text.
    right = [each == token_by_token(base, draft, text, len(each)) for text, each in seen if each]
    assert len(right) > 40
    assert sum(right) > 0.95 * len(right)


@pytest.mark.parametrize(("base_kind", "kind"), [("llama", "latent"), ("windowed", "llama"), ("latent", "llama")])
def test_greedy_text_is_the_bases_own(base_kind: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, draft = models(base_kind, kind)
    plain = generate(base, PROMPTS, max_new_tokens=20, temperature=0.0, eos_id=5)
    seen = watched_guesses(monkeypatch)
    assert (
        generate(base, PROMPTS, max_new_tokens=20, temperature=0.0, eos_id=5, draft=draft, num_speculative_tokens=3)
        == plain
    )
    # Also where earlier guesses were wrong: what was read of them is forgotten.
    assert checked(base, draft, seen) > 20


def watched_guesses(patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Return a list that fills with texts and what a draft guesses after them."""
    seen: list[tuple[list[int], list[int]]] = []
    guess = EagleSpeculator.propose

    def watched(self: EagleSpeculator, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        found = guess(self, requests, counts)
        each = zip(requests, counts, found.tolist(), strict=True)
        seen.extend(([*request.tokens], row[:count]) for request, count, row in each)
        return found

    patch.setattr(EagleSpeculator, "propose", watched)
    return seen


def checked(base: GPT, draft: DraftModel, seen: list[tuple[list[int], list[int]]]) -> int:
    """Return how many guesses are those of drafting without a cache; all must be."""
    for text, each in seen:
        assert not each or each == token_by_token(base, draft, text, len(each))
    return sum(len(each) for _, each in seen)


def told(texts: list[list[int]], wrong: int) -> Any:
    """Return a method that guesses what the base will say, but for each token at a multiple of ``wrong``."""

    def propose(self: EagleSpeculator, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        found = torch.zeros(len(requests), self.num_speculative_tokens, dtype=torch.int64)
        for row, request, count in zip(found, requests, counts, strict=True):
            start = len(request.tokens)
            text = next(text for text in texts if text[:start] == request.tokens)
            for place, token in enumerate(text[start : start + count], start):
                row[place - start] = token if place % wrong else (token + 1) % 31
        return found

    return propose


@pytest.mark.parametrize(("wrong", "expected"), [(10**6, 5.0), (1, 1.0), (3, 3.0)])
def test_a_round_yields_its_right_guesses_and_one_token(
    wrong: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, draft = models()
    plain = generate(base, PROMPTS, max_new_tokens=24, temperature=0.0)
    texts = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    monkeypatch.setattr(EagleSpeculator, "propose", told(texts, wrong))
    total = Acceptance()
    for prompt, text in zip(PROMPTS, plain, strict=True):
        (found,), count = measure(base, draft, [prompt], max_new_tokens=24)
        assert found == text
        # From the first wrong guess on, rounds are alike.
        assert count.rounds
        assert abs(count.tokens - expected * count.rounds) <= len(prompt) % 3
        total += count
    assert acceptance_length(base, draft, PROMPTS, max_new_tokens=24) == total.length


def test_a_draft_does_not_change_samples() -> None:
    """They follow from the seed and the place, so they are those of the base alone."""
    base, draft = models()
    prompts, options = [[3, 1, 4]] * 200, {"max_new_tokens": 5, "temperature": 1.7, "top_k": 4, "seed": 5}
    found = generate(base, prompts, draft=draft, num_speculative_tokens=2, **options)
    assert found == generate(base, prompts, **options)
    assert len({*map(tuple, found)}) > 50


@pytest.mark.parametrize(("prompts", "new"), [([], 8), ([[1, 2, 3]], 1)])
def test_an_acceptance_length_of_no_rounds_is_refused(prompts: list[list[int]], new: int) -> None:
    message = f"{len(prompts)} prompts with max_new_tokens={new} hold no whole round.*at least max_new_tokens=6"
    with pytest.raises(ConfigurationError, match=message):
        acceptance_length(*models(), prompts, max_new_tokens=new)


def test_what_a_draft_cannot_serve_is_refused() -> None:
    base, draft = models()
    with pytest.raises(ConfigurationError, match="num_speculative_tokens is 0; it must be at least 1"):
        generate(base, PROMPTS, max_new_tokens=4, draft=draft, num_speculative_tokens=0)
    with pytest.raises(ConfigurationError, match="num_speculative_tokens is 0; it must be at least 1"):
        stream(
            base, PROMPTS, max_new_tokens=4, draft=draft, num_speculative_tokens=0
        )  # at the call, not at its first item
    with pytest.raises(ConfigurationError, match=r"num_speculative_tokens is 2\.5; it must be an integer, at least 1"):
        generate(base, PROMPTS, max_new_tokens=4, draft=draft, num_speculative_tokens=2.5)  # type: ignore[arg-type]
    other = GPT(replace(SMALL, vocab_size=32))
    with pytest.raises(ConfigurationError, match="vocab_size of the draft is 31 and that of the base 32"):
        generate(other, PROMPTS, max_new_tokens=4, draft=draft)
    shallow = GPT(replace(SMALL, num_layers=2))
    with pytest.raises(ConfigurationError, match="auxiliary_layers has 2, and the base has 2 layers"):
        generate(shallow, PROMPTS, max_new_tokens=4, draft=draft)
    hybrid = GPT(replace(SMALL, mixer_pattern=("conv", "attention")))
    with pytest.raises(ConfigurationError, match="cannot forget a wrong guess"):
        generate(hybrid, PROMPTS, max_new_tokens=4, draft=draft)


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "question.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return file


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no question"),
        (["{"], "line 1 is no JSON"),
        ([{"turns": ["a"]}, {"turns": []}], 'line 2 needs "turns"'),
        ([{"turns": "a"}], 'line 1 needs "turns"'),
    ],
)
def test_a_file_without_questions_is_refused(lines: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write(tmp_path, *lines))


def test_a_message_may_hold_any_character(tmp_path: Path) -> None:
    turns = ("a\u2028b\x85c",)
    assert read_questions(write(tmp_path, json.dumps({"turns": turns}, ensure_ascii=False))) == [Question("", turns)]


def test_the_command_tells_the_length_of_each_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, other = (Tokenizer.train([text * 9], 262) for text in ("some words of a text ", "other letters "))
    config = replace(SMALL, vocab_size=262, max_sequence_length=64)
    base, draft = GPT(config), DraftModel(EagleConfig(std=0.3).for_base(config))
    for seed, each in enumerate((base, draft)):
        initialize(each, seed)
    save_model(replace(held_model("gpt", config, base), files={FILE: ours.to_json().encode()}), tmp_path / "base")
    held = held_model("eagle", draft.config, draft)
    save_model(replace(held, files={FILE: ours.to_json().encode()}), tmp_path / "draft")
    save_model(replace(held, files={FILE: other.to_json().encode()}), tmp_path / "other")
    turns = ["some words", " of a text"]
    file = write(tmp_path, {"category": "writing", "turns": turns}, "", {"category": "math", "turns": turns[:1]})
    words = ["--questions", str(file), "-n", "12", "--plain"]
    assert main(["acceptance", str(tmp_path / "base"), "--draft", str(tmp_path / "draft"), *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["math", "writing", "all"]
    interview = Interview(base, draft, ours, None, 12)
    total = interview.ask(Question("", tuple(turns))) + interview.ask(Question("", ("some words",)))
    assert told[-1] == f"all: acceptance length {total.length:.3f} ({total.tokens} tokens in {total.rounds} rounds)"
    assert main(["acceptance", str(tmp_path / "base"), "--draft", str(tmp_path / "other"), *words]) != 0
    assert "trained with another tokenizer" in " ".join(capsys.readouterr().err.split())
    command = ["generate", str(tmp_path / "base"), "-p", "some words", "-t", "0", "-n", "9"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--draft", str(tmp_path / "draft"), "--num-speculative-tokens", "2"]) == 0
    assert capsys.readouterr().out == plain
    for more, message in {
        ("--num-speculative-tokens", "2"): "give --draft, too",
        ("--draft", str(tmp_path / "draft"), "--num-speculative-tokens", "0"): "must be at least 1",
        ("--draft", str(tmp_path / "draft"), "--image", "x.png"): "serves models of text",
    }.items():
        assert main([*command, *more]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
    template = SimpleNamespace(
        ends=lambda _: [], render=lambda messages, answer: "".join(each["content"] for each in messages)
    )
    chatting = replace(interview, template=template)  # type: ignore[arg-type]
    assert chatting.ask(Question("", tuple(turns))).rounds
    # A folder of transformers may begin its texts with a token: the question is one longer.
    marked = replace(interview, start=tuple(ours.encode("\n")), max_new_tokens=64)
    assert len(marked.start) == 1
    prompts = list[list[int]]()
    with patch.object(acceptance, "measure", lambda base, draft, asked, **more: _noted(prompts, asked)):
        marked.ask(Question("", ("some words",)))
        marked.ask(Question("", ("\nsome words",)))
    assert prompts == [[*marked.start, *ours.encode("some words")]] * 2


def _noted(prompts: list[list[int]], asked: list[list[int]]) -> tuple[list[list[int]], Acceptance]:
    prompts += asked
    return [[]], Acceptance()
