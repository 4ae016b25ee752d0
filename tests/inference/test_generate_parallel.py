"""Generation by a model that is divided over ranks: every rank gets the tokens that one device gives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine, ParallelGPT, SamplingParams, generate
from megalight.inference.speculator import EagleSpeculator
from megalight.models.eagle import DraftModel, EagleConfig
from megalight.models.gpt import GPT, AttentionConfig, InitConfig, LatentConfig
from megalight.nn.init import initialize
from megalight.strategies import MegatronStrategy
from megalight.types import PackedSequences
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

MODELS = {name: replace(CONFIGS[name], num_layers=4, init=InitConfig(std=0.4)) for name in ("gqa", "gpt2", "tied")}
MODELS["hybrid"] = replace(MODELS["gqa"], mixer_pattern=("conv", "attention", "conv"))
MODELS["early"] = replace(MODELS["gqa"], mixer_pattern=("conv", *["attention"] * 3))
# only the first of two stages has windows
MODELS["windows"] = replace(
    MODELS["gqa"], attention=AttentionConfig(window=3, window_pattern=(True, True, False, False))
)
MODELS["latent"] = replace(
    MODELS["gqa"],
    num_kv_heads=0,
    head_dim=0,
    mixer_pattern=("latent_attention",),
    latent=LatentConfig(kv_rank=10, q_rank=14, head_dim=6, rotary_dim=4, value_dim=7),
)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [5, 6, 7]]
REQUESTS: list[dict[str, Any]] = [
    {"max_new_tokens": 9, "temperature": 0},
    {"max_new_tokens": 6, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 11},
]

GREEDY = SamplingParams(temperature=0)
PP = {"pipeline_parallel": 2}
SP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS = [
    pytest.param("gqa", 2, PP, marks=pytest.mark.full),
    ("tied", 2, {**PP, "virtual_pipeline": 2}),
    pytest.param("gpt2", 2, {**PP, "pipeline_layout": "E|t|ttt|L"}, marks=pytest.mark.full),
    ("gqa", 2, SP),
    ("gqa", 2, {"context_parallel": 2}),
    pytest.param("latent", 2, SP, marks=pytest.mark.full),
    pytest.param("hybrid", 4, PP | SP, marks=pytest.mark.full),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            ("tied", 4, PP | SP),
            ("gpt2", 4, {**PP, "context_parallel": 2}),
            ("gqa", 4, {"pipeline_parallel": 4, "pipeline_layout": "Et||ttt|L"}),
            ("gqa", 4, PP),
        ]
    ],
]


def ask(model: Any, request: dict[str, Any]) -> list[list[int]]:
    return generate(model, PROMPTS, **request)


@functools.cache
def one_device(name: str) -> GPT:
    model = GPT(MODELS[name]).double()
    initialize(model, SEED, "model.")
    return model


def divided(name: str, options: dict[str, Any], train: bool = False) -> tuple[MegatronStrategy, Any, ParallelGPT]:
    """The strategy, the trainer's module and the model of this rank."""
    strategy = MegatronStrategy(**options)
    module = WithData(MODELS[name], optimizer=ADAM, seed=SEED)
    runner = trainer(strategy, use_distributed_sampler=False, max_steps=2, limit_val_batches=1)
    runner.fit(module) if train else runner.validate(module, verbose=False)
    assert strategy.parallel_model is not None
    return strategy, module, ParallelGPT(strategy.parallel_model)


def _generate(name: str, options: dict[str, Any], requests: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
    _, _, model = divided(name, options)
    state = torch.get_rng_state()
    found = [ask(model, request) for request in requests]
    unseeded = ask(model, {"max_new_tokens": 6})
    tokens = torch.tensor([3, 1, 4, 1, 5])
    logits = model(tokens, PackedSequences.of_lengths([2, 3])).logits
    assert torch.equal(state, torch.get_rng_state())
    return found, unseeded, logits.numpy()


@pytest.mark.parametrize(("name", "ranks", "options"), LAYOUTS, ids=str)
def test_every_rank_gets_the_tokens_of_one_device(name: str, ranks: int, options: dict[str, Any]) -> None:
    model = one_device(name)
    free = ask(model, REQUESTS[0])
    requests = [*REQUESTS, {**REQUESTS[0], "eos_id": free[2][4]}]
    expected = [ask(model, request) for request in requests]
    assert len(expected[2][2]) == 5, "no completion ends early"
    with torch.no_grad():
        logits = model(torch.tensor([3, 1, 4, 1, 5]), PackedSequences.of_lengths([2, 3])).logits
    results = run(_generate, ranks, name, options, requests)
    replicas = ranks if options == PP and ranks == 4 else 0
    for found, unseeded, whole in results:
        assert found == expected
        assert replicas or unseeded == results[0][1], "ranks draw differently"
        error = (torch.from_numpy(whole) - logits).norm() / logits.norm()
        assert error <= 1e-9, f"logits differ by {error:.2e}"


DRAFT = EagleConfig(auxiliary_layers=(3, 1), std=0.4, num_heads=2)


def draft_of(name: str) -> DraftModel:
    draft = DraftModel(DRAFT.for_base(MODELS[name])).double()
    initialize(draft, 2)
    return draft


def speculate(model: Any, draft: DraftModel) -> Any:
    """Texts of an engine that preempts and runs prompts in parts, what the draft guessed, and what became of it."""
    guesses, guess = [], EagleSpeculator.propose

    def watched(self: EagleSpeculator, requests: Any, counts: Any) -> Any:
        found = guess(self, requests, counts)
        guesses.append([row[:count] for row, count in zip(found.tolist(), counts, strict=True)])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleSpeculator, "propose", watched)
        speculator = EagleSpeculator(draft, model, 3)
        engine = DynamicEngine(model, num_blocks=14, block_size=3, step_tokens=9, speculator=speculator)
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=9, sampling_params=GREEDY, prompt_log_probs=number == 2)
        found = engine.run()
    scores = found[2].prompt_log_probs or []
    return [each.tokens for each in found.values()], guesses, engine.draft_rounds, [round(each, 9) for each in scores]


def _drafted(name: str, options: dict[str, Any]) -> Any:
    _, _, model = divided(name, options)
    requests = [*REQUESTS, {**REQUESTS[0], "frequency_penalty": 1.0, "repetition_penalty": 1.2}]
    plain = [ask(model, request) for request in requests]
    try:
        found = speculate(model, draft_of(name))
        assert found[0] == plain[0]
        return found, [ask(model, {**request, "draft": draft_of(name)}) for request in requests] == plain
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [LAYOUTS[0], *(pytest.param(*LAYOUTS[i], marks=pytest.mark.full) for i in (1, 3)), *LAYOUTS[4:6]],
    ids=str,
)
def test_guesses_of_a_draft_are_those_of_one_device(name: str, ranks: int, options: dict[str, Any]) -> None:
    expected = speculate(one_device(name), draft_of(name))
    assert sum(expected[2].values()) > 9
    for found, same in run(_drafted, ranks, name, options):
        assert found == expected
        assert same


def test_all_ranks_refuse_layers_that_cannot_forget() -> None:
    """The second stage has attention alone."""
    assert all("cannot forget a wrong guess" in told for told in run(_drafted, 2, "early", PP))


def _after_training(options: dict[str, Any]) -> tuple[list[list[int]], list[float], bool]:
    strategy, module, model = divided("gqa", options, train=True)
    module.train()
    found = ask(model, REQUESTS[0])
    untouched = all(chunk.training for chunk in strategy.chunks)
    again = trainer(MegatronStrategy(**options), use_distributed_sampler=False, max_steps=1, limit_val_batches=0)
    again.fit(module)
    return found, [float(again.callback_metrics["train_loss"])], untouched


def test_between_two_trainings() -> None:
    ((expected, losses, _),) = run(_after_training, 1, {})
    for found, again, untouched in run(_after_training, 2, PP):
        assert found == expected
        assert again == pytest.approx(losses, rel=1e-9)
        assert untouched
