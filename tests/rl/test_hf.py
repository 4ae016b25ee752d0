"""GRPO of models of ``transformers``: what one device learns in every layout, and what our own GPT learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.models.hf_causal_lm import HFConfig
from megalight.rl import HFGRPOModule
from megalight.rl.loss import PolicyLoss
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from tests.rl.helpers import HFPolicy, Policy
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 3,
}  # fmt: skip
NAMES = ("train_loss", "train_reward", "train_kl", "train_entropy", "train_drift")


def folder(path: Path, kind: str = "starcoder2", **settings: Any) -> Path:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def learned(kind: str, options: dict[str, Any], weights: Path, **more: Any) -> tuple[Any, list[list[float]]]:
    """Draw and train two steps; return the answers and the figures of each step."""
    figures: list[list[float]] = []

    class Kept(HFPolicy if kind == "hf" else Policy):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            found = self.trainer.callback_metrics
            figures.append([float(found[name]) for name in NAMES])

    full = options.pop("full", False)
    strategy = (MegatronFSDPStrategy if full else MegatronStrategy)(micro_batch_size=1, **options)
    module = Kept(config=None, weights=weights, loss=PolicyLoss(kl=0.1), **more)
    trainer(strategy, max_steps=2, limit_val_batches=0, use_distributed_sampler=False).fit(module)
    return module.seen, figures


def test_layouts_learn_what_one_device_learns(tmp_path: Path) -> None:
    weights = folder(tmp_path, residual_dropout=0.0, embedding_dropout=0.0)
    seen, figures = run(learned, 1, "hf", {}, weights)[0]
    assert figures[1][2] > 1e-8  # away from the reference
    assert all(abs(step[4]) < 1e-12 for step in figures)  # the policy that drew is the one that trains
    for answers, found in run(learned, 2, "hf", {"tensor_parallel": 2}, weights):
        assert answers == seen
        for step, wanted in zip(found, figures, strict=True):
            assert step == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    # Of two replicas, each sees half of the prompts.
    for _, found in run(learned, 2, "hf", {"full": True}, weights):
        for step, wanted in zip(found, figures, strict=True):
            assert step == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_our_own_gpt_learns_the_same(tmp_path: Path) -> None:
    weights = folder(tmp_path, "llama")
    seen, figures = run(learned, 1, "hf", {}, weights)[0]
    answers, found = run(learned, 1, "gpt", {}, weights)[0]
    assert answers == seen
    for step, wanted in zip(found, figures, strict=True):  # norms of transformers compute in float32
        assert step == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_what_cannot_be_a_policy_is_refused() -> None:
    values = {"model_type": "gpt2", "vocab_size": 20, "n_embd": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigurationError, match=r"has dropout \(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1"):
        HFGRPOModule(HFConfig(values))
