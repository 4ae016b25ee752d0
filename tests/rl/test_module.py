"""GRPO learns in any layout what a loop of plain torch learns on one device."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError, DataError, MegalightError
from megalight.inference import generate
from megalight.models.config import DropoutConfig
from megalight.models.gpt import GPT
from megalight.models.gpt.config import MultiTokenConfig
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.nn.moe.config import MoEConfig
from megalight.parallel.layout import Layout
from megalight.rl import rollouts
from megalight.rl.environment import PromptBatch, RLTask
from megalight.rl.loss import PolicyLoss
from megalight.rl.rollouts import _sample_seed
from megalight.strategies import DataParallelOptions, MegatronStrategy
from megalight.types import PackedSequences
from tests.rl.helpers import CONFIG, END, LR, ROLLOUTS, Policy, environment, prompts_of
from tests.strategies.training import SEED, gathered, global_batch, whole
from tests.support.environment import trainer
from tests.support.workers import run


def log_probs_of(model: GPT, prompt: tuple[int, ...], answer: list[int]) -> Tensor:
    tokens = torch.tensor([*prompt, *answer])
    logits = model(tokens[:-1], PackedSequences.of_lengths([len(tokens) - 1])).logits
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[-len(answer) :, 0]


def answers_of(model: GPT, task: RLTask, seed: str, size: int) -> list[list[int]]:
    """Each drawn alone, without an engine."""
    found = []
    for sample in range(size):
        own = _sample_seed(seed, task.number, sample)
        found += generate(model, [task.prompt], max_new_tokens=ROLLOUTS.max_new_tokens, eos_id=END, seed=own)
    return found


@functools.cache
def by_hand(
    normalize: str = "token", kl: float = 0.0, steps: int = 2
) -> tuple[list[dict[str, float]], Mapping[str, Any], list[Any]]:
    """Figures of each step, and the weights afterwards."""
    model, reference = GPT(CONFIG).double(), GPT(CONFIG).double()
    initialize(model, SEED, "model.")
    initialize(reference, SEED, "model.")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    figures, seen = [], []
    for step in range(steps):
        losses: list[Tensor] = []
        counts, rewards, spreads, lengths = 0.0, [], [], []
        seen.append([])
        for task in prompts_of(step):
            answers = answers_of(model, task, f"{SEED}/{step}", ROLLOUTS.group_size)
            seen[-1].append(answers)
            totals = [environment().score(task, answer, "end").total for answer in answers]
            spread = statistics.stdev(totals)
            for answer, total in zip(answers, totals, strict=True):
                advantage = (total - statistics.fmean(totals)) / (spread + 1e-4)
                now = log_probs_of(model, task.prompt, answer)
                each = -(now - now.detach()).exp() * advantage
                if kl:
                    apart = log_probs_of(reference, task.prompt, answer).detach() - now
                    each = each + kl * (apart.exp() - apart - 1)
                size = {"token": 1, "sequence": len(answer), "constant": ROLLOUTS.max_new_tokens}[normalize]
                losses.append(each.sum() / size)
                counts += len(answer) if normalize == "token" else 1
            rewards += totals
            spreads += [spread] * len(totals)
            lengths += [len(answer) for answer in answers]
        loss = torch.stack(losses).sum() / counts
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures.append(
            {
                "train_loss": float(loss.detach()),
                "train_reward": statistics.fmean(rewards),
                "train_group_std": statistics.fmean(spreads),
                "train_answer_tokens": statistics.fmean(lengths),
            }
        )
    return figures, whole(model), seen


def trained(strategy: dict[str, Any], options: dict[str, Any]) -> tuple[list[dict[str, float]], Any, Any]:
    figures: list[dict[str, float]] = []

    class Kept(Policy):
        def on_train_batch_end(self, *args: Any) -> None:
            figures.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    module = Kept(**options)
    own = MegatronStrategy(micro_batch_size=1, **strategy)
    trainer(own, max_steps=2, limit_val_batches=0, use_distributed_sampler=False).fit(module)
    return figures, gathered(own, module), module.seen


LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "tp2 pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dp2 cp2": (4, {"context_parallel": 2}),
}


def check(runs: Sequence[Any], figures: Sequence[Mapping[str, float]], weights: Mapping[str, Any]) -> None:
    for found, after, _ in runs:
        for one, expected in zip(found, figures, strict=True):
            assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
            # It is trained on what it has drawn itself, so that only rounding lies between.
            assert abs(one["train_drift"]) < 1e-12
            assert one["train_clipped"] == 0
        assert after.keys() == weights.keys()
        for name, value in weights.items():
            assert np.linalg.norm(after[name] - value) <= 1e-9 * np.linalg.norm(value), name


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in ("one", "dp2"))) for name in LAYOUTS],
)
def test_layouts_learn_what_one_device_learns(layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    figures, weights, seen = by_hand()
    runs = run(trained, ranks, strategy, {})
    check(runs, figures, weights)
    if ranks == 1:
        assert runs[0][2] == seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = GPT(CONFIG).double()
    initialize(model, SEED, "model.")
    path = tmp_path_factory.mktemp("reference") / "first"
    save_model(held_model("gpt", CONFIG, model), path)
    return path


@pytest.mark.parametrize(
    ("layout", "normalize", "theirs"),
    [
        ("one", "sequence", {}),
        ("tp2", "constant", {"pipeline_parallel": 2}),
        pytest.param("cp2", "sequence", {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("tp2 pp2", "token", {"tensor_parallel": 2, "sequence_parallel": True}, marks=pytest.mark.full),
    ],
)
def test_a_reference_in_a_layout_of_its_own_holds_the_policy(
    layout: str, normalize: Any, theirs: dict[str, Any], folder: Path
) -> None:
    ranks, strategy = LAYOUTS[layout]
    figures, weights, _ = by_hand(normalize, 0.5)
    options = {
        "loss": PolicyLoss(normalize=normalize, kl=0.5),
        "reference": folder,
        "reference_layout": Layout(**theirs),
    }
    runs = run(trained, ranks, strategy, options)
    check(runs, figures, weights)
    for found, _, _ in runs:
        assert abs(found[0]["train_kl"]) < 1e-12  # the first step begins from the reference
        assert found[1]["train_kl"] > 1e-4


def test_training_raises_the_reward() -> None:
    first, *_, last = run(climbed, 1)[0]
    assert last > first + 0.25


def climbed() -> list[float]:
    rewards = []

    class Kept(Policy):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=4 * LR)

        def on_train_batch_end(self, *args: Any) -> None:
            rewards.append(float(self.trainer.callback_metrics["train_reward_large"]))

    trainer(MegatronStrategy(), max_steps=12, limit_val_batches=0).fit(Kept(12))
    return [statistics.fmean(rewards[at : at + 3]) for at in range(0, 12, 3)]


@pytest.mark.parametrize("whole_weights", [False, True])
def test_full_sharding_learns_the_same(whole_weights: bool) -> None:
    figures, weights, _ = by_hand()
    strategy = {"data_parallel": DataParallelOptions(level="optim_grads_params")}
    options = {"rollouts": replace(ROLLOUTS, whole_weights=whole_weights)}
    check(run(trained, 2, strategy, options), figures, weights)


EXPERTS = replace(CONFIG, moe=MoEConfig(num_experts=4, ffn_hidden_size=16))


@pytest.mark.full
def test_replicas_that_share_experts_draw_together() -> None:
    """Their answers have other lengths, and a replica that is done takes part in the passes of the other."""
    ((figures, weights, _),) = run(trained, 1, {}, {"config": EXPERTS})
    check(run(trained, 2, {"expert_parallel": 2}, {"config": EXPERTS}), figures, weights)


def plain(strategy: str) -> tuple[list[dict[str, float]], Any, Any]:
    figures: list[dict[str, float]] = []

    class Kept(Policy):
        def train_dataloader(self) -> Any:
            rank, size = self.trainer.global_rank, 4 // self.trainer.world_size
            own = slice(size * rank, size * (rank + 1))
            return DataLoader(  # type: ignore[arg-type]
                [PromptBatch(prompts_of(step)[own], environment()) for step in range(2)], batch_size=None
            )

        def on_train_batch_end(self, *args: Any) -> None:
            figures.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    module = Kept()
    how: Any = {"strategy": strategy, "max_steps": 2, "limit_val_batches": 0, "use_distributed_sampler": False}
    trainer(**how).fit(module)
    return figures, {name: p.detach().numpy() for name, p in module.named_parameters()}, module.seen


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_lightnings_own_strategies_draw_the_same(strategy: str) -> None:
    """Their gradients are means over ranks, whatever the ranks' numbers of tokens, so that weights agree at first."""
    _, _, seen = by_hand()
    ranks = 1 if strategy == "auto" else 2
    answers = [found[2] for found in run(plain, ranks, strategy)]
    assert [group for each in answers for group in each[0]] == seen[0]
    if ranks == 1:
        assert answers[0] == seen


def test_validation_reports_rewards_of_the_same_draws() -> None:
    for first, second, size in run(validated, 2):
        assert first == second
        assert size == [1, 1]


def validated() -> tuple[dict[str, float], dict[str, float], list[int]]:
    module = Policy()
    how = trainer(MegatronStrategy(tensor_parallel=2), use_distributed_sampler=False)
    one, two = how.validate(module, verbose=False)[0], how.validate(module, verbose=False)[0]
    assert {"val_reward", "val_reward_large", "val_answer_tokens", "val_truncated"} <= one.keys()
    return dict(one), dict(two), [len(group) for group in module.seen[0][:2]]


def test_a_replica_without_prompts_waits_for_the_other() -> None:
    figures = run(uneven, 2)
    assert figures[0] == figures[1]
    assert figures[0]["train_answer_tokens"] > 0


def uneven() -> dict[str, float]:
    class Uneven(Policy):
        def train_dataloader(self) -> Any:
            tasks = prompts_of(0) if self.trainer.global_rank == 0 else []
            return DataLoader([PromptBatch(tasks, environment())], batch_size=None)  # type: ignore[arg-type]

    how = trainer(
        MegatronStrategy(data_parallel=DataParallelOptions(level="optim_grads_params")),
        max_steps=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    how.fit(Uneven())
    return {name: float(value) for name, value in how.callback_metrics.items()}


def test_an_error_of_a_reward_ends_all_ranks() -> None:
    assert run(failing, 2) == ["KeyError", "MegalightError: the first rank of this replica failed: KeyError: 'least'"]


def failing() -> str:
    class Failing(Policy):
        def train_dataloader(self) -> Any:
            return DataLoader([PromptBatch([RLTask((1, 2))], environment())], batch_size=None)  # type: ignore[arg-type]

    how = trainer(MegatronStrategy(tensor_parallel=2), max_steps=1, use_distributed_sampler=False)
    try:
        how.fit(Failing())
    except KeyError:
        return "KeyError"
    except MegalightError as error:
        return f"MegalightError: {error}"
    return "nothing"


def test_logits_that_are_not_finite_end_a_run() -> None:
    module = Policy()
    module.configure_model()
    with torch.no_grad():
        module.model.embed.word.weight[4] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(MegalightError, match=r"logits hold NaN or infinity in \d+ of 12 answers, first to prompt"):
        module.answers(PromptBatch(prompts_of(0), environment()))


def test_answers_are_cut_by_the_models_room_with_a_warning() -> None:
    module = Policy(rollouts=replace(ROLLOUTS, max_new_tokens=18))
    module.configure_model()
    # The model reads 32 tokens.
    module.answers(PromptBatch([RLTask((4,) * 14, {"least": 8})], environment()))
    with pytest.warns(UserWarning, match=r"Prompts of more than 14 tokens leave less room than max_new_tokens=18 in"):
        module.answers(PromptBatch([RLTask((4,) * 15, {"least": 8})], environment()))
    with pytest.raises(ConfigurationError, match=r"rollouts\.max_new_tokens is 32, and the model has room for 31"):
        Policy(rollouts=replace(ROLLOUTS, max_new_tokens=32))


def test_what_cannot_be_a_policy_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="dropout"):
        Policy(config=replace(CONFIG, dropout=DropoutConfig(hidden=0.1)))
    with pytest.raises(ConfigurationError, match="one token at a time"):
        Policy(config=replace(CONFIG, mtp=MultiTokenConfig()))
    with pytest.raises(ConfigurationError, match=r"loss\.kl compares with a reference policy"):
        Policy(loss=PolicyLoss(kl=0.1))
    with pytest.raises(ConfigurationError, match="reference has no effect"):
        Policy(reference=folder)
    with pytest.raises(ConfigurationError, match="vocab_size"):
        Policy(reference=folder, loss=PolicyLoss(kl=0.1), config=replace(CONFIG, vocab_size=21))
    module = Policy()
    module.configure_model()
    with pytest.raises(ConfigurationError, match="FSDPStrategy"):
        rollouts.Policy(module.model, FSDPStrategy())
    rows = global_batch(0)
    with pytest.raises(DataError, match="has no answers"):
        module.loss_step({"losses": torch.zeros(48)}, rows)
    with pytest.raises(ConfigurationError, match="advantages is 'half'"):
        Policy(advantages="half")
