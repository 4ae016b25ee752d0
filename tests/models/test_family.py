from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalight.errors import CheckpointError, ConfigurationError, HubError, MegalightError
from megalight.models.config import ModelConfig
from megalight.models.family import FAMILIES, Family, families, family, family_of_transformers, register
from megalight.models.family.module import FamilyModule
from megalight.models.gpt import GPT, GPTConfig, GPTModule
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.model_plans import PLANS, plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Vocab
from megalight.registry import Registry


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_only_the_family_that_is_asked_for_is_imported_and_never_lightning() -> None:
    loaded = "[name for name in sys.modules if name in ('megalight.models.bert', 'lightning', 'transformers')]"
    plan = "from megalight.parallel.model_plans import plan_for; from torch import nn; plan_for(nn.Linear(1, 1))"
    code = [
        f"import sys; {plan}; print([name for name in sys.modules if name.startswith('megalight.models')])",
        f"from megalight.models.family import family; family('gpt'); print({loaded})",
    ]
    assert python("\n".join(code)).splitlines() == ["[]", "[]"]


def test_families_of_the_tree() -> None:
    assert [found.name for found in families()] == ["bert", "eagle", "gpt", "hf", "vlm"]
    gpt = family("gpt")
    assert gpt.module() is GPTModule
    assert gpt.presets["llama3_8b"].num_layers == 32
    config = GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, max_sequence_length=16)
    with torch.device("meta"):
        model = gpt.build(config.to_dict())
    assert isinstance(model, GPT)
    assert model.config == config
    assert plan_for(model) == gpt_plan(model) == gpt.plan(model)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        MegalightError, match=r"unknown model family 'gtp'; known: bert, eagle, gpt, hf, vlm\. Did you mean 'gpt'"
    ):
        family("gtp")
    with pytest.raises(MegalightError, match="unknown model family 'family'"):
        family("family")


def test_the_family_that_reads_weights_of_transformers() -> None:
    assert family_of_transformers({"model_type": "qwen3"}).name == "gpt"
    assert family_of_transformers({"model_type": "bert"}).name == "bert"
    with pytest.raises(ConfigurationError, match=r"'t5'; weights of bert, deepseek_v2, .*gpt2, .* can be read"):
        family_of_transformers({"model_type": "t5"})


@dataclass(frozen=True, kw_only=True)
class PairsConfig(ModelConfig):
    num_layers: int = 1
    hidden_size: int = 1
    num_heads: int = 1
    max_sequence_length: int = 8


class Pairs(nn.Module):
    """Next tokens from the last token alone."""

    def __init__(self, config: PairsConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)


class PairsModule(FamilyModule[PairsConfig]):
    family = "pairs"


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Family:
    """What another package's plugin registers."""
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    monkeypatch.setattr(PLANS, "_entries", dict(PLANS._entries))
    presets: Registry[Any] = Registry("pairs preset")
    presets.register("small")(PairsConfig(vocab_size=5))
    return register(
        Family(
            "pairs", PairsConfig, Pairs, lambda model: ParallelizePlan({"table": Vocab()}), presets, lambda: PairsModule
        )
    )


def test_another_package_registers_a_family(pairs: Family) -> None:
    assert family("pairs") is pairs
    assert [found.name for found in families()] == ["bert", "eagle", "gpt", "hf", "pairs", "vlm"]
    module = PairsModule("small")
    module.configure_model()
    assert module.config == PairsConfig(vocab_size=5)
    assert module.plan(module.model) == ParallelizePlan({"table": Vocab()})
    saved: dict[str, Any] = {}
    module.on_save_checkpoint(saved)
    assert saved["model"]["family"] == "pairs"
    assert isinstance(family(saved["model"]["family"]).build(saved["model"]["config"]), Pairs)
    with pytest.raises(CheckpointError, match="is of the family gpt, but this model is of pairs"):
        module.check_checkpoint({"model": {**saved["model"], "family": "gpt"}})
    with pytest.raises(MegalightError, match=r"unknown pairs preset 'tiny'; known: small"):
        PairsModule("tiny")


def test_a_name_is_taken_once(pairs: Family) -> None:
    with pytest.raises(MegalightError, match="model family 'pairs' is already registered"):
        register(pairs)


def test_a_path_as_configuration_is_sent_to_weights() -> None:
    with pytest.raises(ConfigurationError, match=r"give it as weights, and leave config out"):
        GPTModule("some/model")
    with pytest.raises(HubError, match=r"some/model: HF_HUB_OFFLINE is set"):
        GPTModule(weights="some/model")


def test_weights_of_another_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, which names some settings, and an error that says to take the folder's."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = transformers.Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=11, tie_word_embeddings=True)
    transformers.Qwen2ForCausalLM(folder).save_pretrained(tmp_path)
    config = GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, max_sequence_length=16)
    module = GPTModule(config, weights=tmp_path)
    module.initial_weights()
    with pytest.raises(CheckpointError) as caught:
        module.configure_model()
    assert re.search(
        r"lm_head.weight.* not in .*configuration is not the folder's .*Leave config out", str(caught.value)
    )
    assert "weights_keys" not in str(caught.value), "it would train a random head"
    (told,) = [record.getMessage() for record in caplog.records if "configuration" in record.getMessage()]
    assert re.search(
        r"another configuration: attention.qkv_bias is False here and True in the folder; .* and \d more", told
    )
    GPTModule(weights=tmp_path).configure_model()
