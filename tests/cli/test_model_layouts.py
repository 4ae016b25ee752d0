"""``megalight doctor --model``: which layouts a model takes, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalight.cli.main import main
from megalight.cli.verbs.doctor import rows_of

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


def folder(path: Path, **values: Any) -> str:
    """A folder that holds nothing but a configuration."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


def test_a_model_and_its_layouts(tmp_path: Path) -> None:
    (name, _, what), *rows = rows_of(folder(tmp_path / "llama", **LLAMA))
    assert name == "LlamaForCausalLM"
    assert what.startswith("llama, ")
    found = {layout: (verdict, reason) for layout, verdict, reason in rows}
    assert found["tensor_parallel=4"] == ("yes", "rank 0 of 4 holds 28% of the parameters")
    assert found["context_parallel=2"][0] == "yes"
    assert found["pipeline_parallel=2"] == ("yes", "stages Et|tL")
    verdict, reason = found["tensor_parallel=8"]
    assert verdict == "no"
    assert "tp" in reason
    # Two layers with two norms, attention and MLP; rotary embedding, last norm, decoder, model.
    assert found["FusedOps"] == ("yes", "14 modules, 2 of them whole layers")
    assert found["own module"] == ("yes", "GPTModule has code of ours for it, and every layout")


def test_a_model_off_the_attention_interface(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    found = {row[0]: row[1:] for row in rows_of(folder(tmp_path / "bloom", model_type="bloom", **sizes))}
    assert found["attention"][0] == "no"
    assert found["context_parallel=2"][0] == "yes"  # layer by layer
    assert found["own module"] == ("no", "HFCausalLM trains it, with the layouts above")


def test_one_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "llama", **LLAMA)
    assert main(["doctor", "--model", path, "--layout", "tp=2,cp=2"]) == 0
    assert "tensor_parallel=2, context_parallel=2" in capsys.readouterr().out
    assert main(["doctor", "--model", path, "--layout", "tp=3"]) == 2
    assert "tp=3" in capsys.readouterr().out


def test_what_transformers_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", folder(tmp_path / "own", model_type="own")]) == 2
    assert "no causal language model of that type" in capsys.readouterr().err


def test_encoders_and_encoder_decoders(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    (name, *_), *rows = rows_of(folder(tmp_path / "t5", model_type="t5", **sizes))
    assert name == "T5ForConditionalGeneration"
    found = {row[0]: row[1:] for row in rows}
    assert found["tensor_parallel=2"][0] == "yes"
    assert "in a LightningModule around it" in found["own module"][1]
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    masked = folder(tmp_path / "bert", model_type="bert", architectures=["BertForMaskedLM"], **sizes)
    assert next(iter(rows_of(masked)))[0] == "BertForMaskedLM"
