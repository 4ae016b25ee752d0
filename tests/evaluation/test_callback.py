"""The callback scores the model in the layout in which it trains: as the checkpoint of that step, on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.callbacks import Evaluation
from megalight.errors import ConfigurationError
from megalight.inference import TextGenerator
from megalight.models.gpt import InitConfig
from megalight.nn.moe import MoEConfig
from megalight.strategies import MegatronStrategy
from tests.parallel.tiny_transformers import Plain
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.options import data_parallel
from tests.support.workers import run

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PLAIN = replace(CONFIGS["gqa"], num_layers=4, vocab_size=280, max_sequence_length=48, init=InitConfig(std=0.4))
EXPERTS = replace(PLAIN, moe=MoEConfig(num_experts=4, ffn_hidden_size=10))
TASKS = ["all_tiny", "passages", "answers"]
SHARDED = {"level": "optim_grads_params"}


class Seen(Evaluation):
    """Keeps all scores by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[int, dict[str, float]] = {}

    def _scores(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, float]:
        state = torch.get_rng_state()
        self.seen[trainer.global_step] = found = super()._scores(trainer, pl_module)
        assert torch.equal(torch.get_rng_state(), state)
        assert pl_module.training
        return found


def _fit(folders: tuple[Path, Path], config: Any, layout: dict[str, Any], options: dict[str, Any], out: Path) -> Any:
    module = WithData(config, optimizer=ADAM, seed=SEED)
    module.steps = 4
    callback = Seen(TASKS, 2, include_path=folders[1], tokenizer=folders[0], batch_tokens=256)
    strategy = MegatronStrategy(data_parallel=data_parallel(**options), **layout)
    runner = trainer(strategy, use_distributed_sampler=False, max_steps=4, callbacks=[callback], limit_val_batches=0)
    runner.fit(module)
    logged = {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("eval/")}
    runner.save_checkpoint(out)
    return callback.seen, logged


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({"tensor_parallel": 2, "sequence_parallel": True}, {}, marks=pytest.mark.full),
        pytest.param({"pipeline_parallel": 2}, {}, marks=pytest.mark.full),
        pytest.param({"context_parallel": 2}, {}, marks=pytest.mark.full),
        pytest.param({"expert_parallel": 2}, {}, marks=pytest.mark.full),
        ({}, SHARDED),
    ],
    ids=str,
)
def test_scores_are_those_of_the_checkpoint(
    folders: tuple[Path, Path], tmp_path: Path, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    from megalight.evaluation.lm import EvaluationOptions, MegalightLM, evaluate, scores

    config = EXPERTS if "expert_parallel" in layout else PLAIN
    ranks = run(_fit, 2, folders, config, layout, options, tmp_path / "c.ckpt")
    text = TextGenerator.from_checkpoint(tmp_path / "c.ckpt", tokenizer=folders[0], dtype=torch.float64)
    asked = EvaluationOptions(tasks=TASKS, include_path=folders[1], bootstrap_iters=0)
    expected = scores(evaluate(MegalightLM(text), asked))
    for seen, logged in ranks:
        assert [*seen] == [2, 4]
        assert seen[2] != seen[4]
        assert seen[4] == pytest.approx(expected, rel=1e-6)
        assert logged == pytest.approx({f"eval/{name}": value for name, value in expected.items()}, rel=1e-6)


class Still(Plain):
    """A plain module around a model of ``transformers``, whose weights stay."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit_plain(folders: tuple[Path, Path]) -> dict[int, dict[str, float]]:
    from transformers import AutoModelForCausalLM

    callback = Seen(TASKS, 1, include_path=folders[1], tokenizer=folders[0], batch_tokens=256)
    runner = trainer(MegatronStrategy(tensor_parallel=2), max_steps=1, callbacks=[callback])
    net: Any = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float64, attn_pdrop=0.0)
    data: Any = torch.arange(3, 19).view(2, 8)
    runner.fit(Still(net), DataLoader(data, batch_size=2))
    return callback.seen


def test_a_plain_module_of_transformers_has_the_scores_of_its_folder(folders: tuple[Path, Path]) -> None:
    from megalight.evaluation.lm import EvaluationOptions, MegalightLM, evaluate, scores

    text = TextGenerator.from_checkpoint(folders[0], dtype=torch.float64)
    asked = EvaluationOptions(tasks=TASKS, include_path=folders[1], bootstrap_iters=0)
    expected = scores(evaluate(MegalightLM(text), asked))
    for seen in run(_fit_plain, 2, folders):
        assert seen == {1: pytest.approx(expected, rel=1e-6)}


def test_mistakes_come_before_the_first_step(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from megalight.evaluation import lm as runs

    monkeypatch.setattr(runs, "_indexed", lambda folder, **_: runs.Tasks(include_path=folder, include_defaults=False))
    runner = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    module = WithData(PLAIN)
    for given, message in (
        ({"tasks": ["colorss"]}, "there is no task 'colorss'"),
        ({"tasks": "colors"}, "must be a list"),
        ({"tokenizer": None}, "the data has no tokenizer"),
    ):
        made = Evaluation(
            **{"tasks": ["colors"], "every_n_steps": 1, "include_path": folders[1], "tokenizer": folders[0], **given}
        )
        with pytest.raises(ConfigurationError, match=message):
            made.setup(runner, module, "fit")
    with pytest.raises(ConfigurationError, match="every_n_steps"):
        Evaluation(["colors"], 0)
