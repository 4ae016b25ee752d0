"""Structured output: completions keep to a schema or a regular expression, and others do not notice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import megalight
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError
from megalight.imports import has
from megalight.inference import Completion, DynamicEngine, ParallelGPT, SamplingParams, generate
from megalight.inference.grammar import GrammarCompiler
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.scheduler import Request
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.ops.sample_tokens import VocabularyRanks
from tests.inference.test_generate import PROMPTS, build
from tests.inference.test_speculator import Told
from tests.support.workers import run

pytestmark = pytest.mark.skipif(not has("llguidance"), reason="needs llguidance")

VOCABULARY = 290
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "count": {"type": "integer", "minimum": 3, "maximum": 57}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
WORDS = "(hello|wor+ld) [0-9]{2,4}"


def words() -> Tokenizer:
    return Tokenizer.train(['{"name": "ab", "count": 12} hello world 0123456789 xyz'] * 20, VOCABULARY - 10)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return words()


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(replace(build().config, vocab_size=VOCABULARY, max_sequence_length=128)).double()
    initialize(model, 5)
    return model.eval()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    assert tokenizer.eod_id is not None
    return GrammarCompiler(tokenizer, VOCABULARY, [tokenizer.eod_id])


def _constrained(engine: DynamicEngine, compiler: GrammarCompiler) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": 40, "sampling_params": SamplingParams(temperature=0.8, top_k=200)}
    engine.add(PROMPTS[0], grammar=compiler.json_schema(SCHEMA), seed=3, **options)
    engine.add(PROMPTS[1], grammar=compiler.regex(WORDS), seed=9, n=2, **options)
    engine.add(PROMPTS[2], seed=4, **options)
    return [completion.tokens for completion in engine.run().values()]


def _on_one_rank(options: dict[str, int]) -> list[list[int]] | None:
    root = GPT(replace(build().config, vocab_size=VOCABULARY, max_sequence_length=128)).double().to("meta")
    split = megalight.parallelize(root, megalight.Layout(**options), seed=5, fill=True)  # type: ignore[arg-type]
    engine, tokenizer = DynamicEngine(ParallelGPT(split), num_blocks=17, first_rank_only=True), words()
    if split.mesh.global_rank:
        engine.follow(lambda source, ends: GrammarCompiler(tokenizer, VOCABULARY, ends).compile(source))
        return None
    assert tokenizer.eod_id is not None
    found = _constrained(engine, GrammarCompiler(tokenizer, VOCABULARY, [tokenizer.eod_id]))
    engine.close()
    return found


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_the_first_rank_of_a_divided_model_is_asked_alone(options: dict[str, int], compiler: GrammarCompiler) -> None:
    model = GPT(replace(build().config, vocab_size=VOCABULARY, max_sequence_length=128)).double()
    initialize(model, 5, "model.")
    expected = _constrained(DynamicEngine(model.eval(), num_blocks=17), compiler)
    assert run(_on_one_rank, 2, options) == [expected, None]


@pytest.mark.parametrize("ahead", [False, True])
def test_constrained_completions_keep_to_their_grammar_beside_others(
    ahead: bool, model: GPT, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema, words = compiler.json_schema(json.dumps(SCHEMA)), compiler.regex(WORDS)
    engine = DynamicEngine(model, num_blocks=17, block_size=4, max_sequences=6, step_tokens=9)
    engine._passes.runs_ahead = ahead
    # Longer spaces are JSON, too, and a model that knows nothing may write many.
    params = SamplingParams(temperature=0.8, logit_bias={tokenizer.encode(" ")[0]: -20.0})
    options: dict[str, Any] = {"max_new_tokens": 60, "sampling_params": params}
    first = engine.add(PROMPTS[0], grammar=schema, seed=3, n=3, **options)
    second = engine.add(PROMPTS[1], grammar=words, seed=9, n=2, **options)
    greedy = engine.add(PROMPTS[2], max_new_tokens=12, sampling_params=SamplingParams(temperature=0))
    done: dict[int, Completion] = {}
    preempted = 0
    for count, step in enumerate(engine):
        preempted += len(step.preempted)
        done |= step.finished
        if count == 5:
            engine.suspend()
            engine.resume()
    assert preempted
    assert {done[number].reason for number in range(first, greedy)} == {"end"}
    found = [tokenizer.decode(done[number].tokens, skip_special=True) for number in range(greedy)]
    for text in found[first:second]:
        value = json.loads(text)
        assert [*value] == ["name", "count"]
        assert value["name"] in ("ab", "cd")
        assert 3 <= value["count"] <= 57
    assert all(re.fullmatch(WORDS, text) for text in found[second:greedy])
    assert done[greedy].tokens == generate(model, [PROMPTS[2]], max_new_tokens=12, temperature=0)[0]
    # The same texts, whoever else is there.
    alone = DynamicEngine(model, num_blocks=40)
    alone.add(PROMPTS[1], grammar=words, seed=10, **options)
    assert alone.run()[0].tokens == done[second + 1].tokens


@pytest.mark.parametrize("processed", [False, True])
def test_guesses_keep_to_grammars_and_change_no_text(
    processed: bool, model: GPT, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.json_schema(SCHEMA)
    params = SamplingParams(temperature=0.8, logit_bias={tokenizer.encode(" ")[0]: -20.0})
    found: list[list[Completion]] = []
    for wrong in (0, 99, 3, 1):
        speculator = Told([each.tokens for each in found[0]], wrong, VOCABULARY) if wrong else None
        engine = DynamicEngine(model, num_blocks=40, speculator=speculator)
        engine._passes.runs_ahead = wrong == 3
        engine.add(
            [5],
            max_new_tokens=60,
            grammar=grammar,
            sampling_params=params,
            seed=3,
            n=4,
            log_probs=True,
            processed_log_probs=processed,
        )
        found.append([*engine.run().values()])
        assert (engine.draft_rounds.accepted == engine.draft_rounds.drafted) == (wrong in (0, 99))
        assert (sum(engine.draft_rounds.accepted) > 9) == (wrong in (99, 3))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)


def test_other_requests_run_ahead_of_constrained_ones(model: GPT, compiler: GrammarCompiler) -> None:
    engine = DynamicEngine(model, num_blocks=40)
    engine._passes.runs_ahead = True
    slow = engine.add([5], max_new_tokens=6, grammar=compiler.regex("[a-z]{30}"), seed=1)
    engine.add([6], max_new_tokens=6, seed=1)
    steps = list(engine)
    assert sum(slow not in step.tokens for step in steps) >= 2
    assert steps[0].tokens.keys() == {0, 1}


def test_ranks_apply_their_columns_of_a_mask(model: GPT, compiler: GrammarCompiler) -> None:
    grammar, logits = compiler.regex("[0-9]{3}"), torch.zeros(1, VOCABULARY + 6)
    logits[:, VOCABULARY:] = -torch.inf  # padding
    request = Request(0, [5], 1, 4, SamplingParams(temperature=0), matcher=grammar.start())
    whole: list[torch.Tensor] = []
    for first in (0, 148):
        ranks = VocabularyRanks(
            first, VOCABULARY, lambda own: own, lambda own, place: whole.append(own) or place, lambda *x: x
        )  # type: ignore[func-returns-value, arg-type, return-value]
        token = int(PassSampling(TokenCounts(1), [request])(logits[:, first : first + 148], ranks)[0, 0])
        if token >= 0:
            assert grammar.start().validate_tokens([token]) == 1
    assert max(float(best) for best in whole) == 0.0


def test_schemas_that_explode_and_texts_that_are_none_are_refused(model: GPT, compiler: GrammarCompiler) -> None:
    many = {f"p{i}": {"enum": [f"v{j}" for j in range(400)]} for i in range(400)}
    with pytest.raises(ConfigurationError, match=r"wrong or too large: .*too big"):
        compiler.json_schema({"type": "object", "properties": many})
    for wrong in ({"type": "nonsense"}, "{", "3"):
        with pytest.raises(ConfigurationError, match="JSON schema"):
            compiler.json_schema(wrong)  # type: ignore[arg-type]
    for pattern in ("[a", 3):
        with pytest.raises(ConfigurationError, match="regular expression"):
            compiler.regex(pattern)  # type: ignore[arg-type]
    engine, grammar = DynamicEngine(model, num_blocks=4), compiler.regex("a")
    with pytest.raises(ConfigurationError, match="min_new_tokens is 2, but a grammar"):
        engine.add([1], max_new_tokens=3, grammar=grammar, sampling_params=SamplingParams(min_new_tokens=2))
    with pytest.raises(ConfigurationError, match="it must be a Grammar"):
        engine.add([1], max_new_tokens=3, grammar="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="for a vocabulary of 290, and the model has 61"):
        DynamicEngine(build(), num_blocks=4).add([1], max_new_tokens=3, grammar=grammar)
