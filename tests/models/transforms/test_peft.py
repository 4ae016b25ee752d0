"""Adapters travel to ``peft`` and back, bit for bit, and compute the same there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import transformers
from safetensors.torch import load, load_file, save

from megalight import checkpoint
from megalight.checkpoint.disk.publish import delete, place
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import load_model
from megalight.models.transforms import activate
from megalight.models.transforms.peft import CONFIG, WEIGHTS, export_adapter, import_adapter
from megalight.models.transforms.saved import join_adapters
from megalight.types import PackedSequences
from tests.reference_gpt import relative_error

peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53}
TARGETS = ["q_proj", "v_proj", "down_proj", "gate_proj"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def llama(**options: int) -> Any:
    torch.manual_seed(3)
    values = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).double()


def adapted(model: Any, **options: Any) -> Any:
    """A model of ``peft`` with values in ``B`` too."""
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": TARGETS, **options})
    found = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return found.double().eval()


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_there_and_back(tmp_path: Path, kind: dict[str, bool]) -> None:
    llama().save_pretrained(tmp_path / "base")
    theirs = adapted(llama(), **kind)
    theirs.save_pretrained(tmp_path / "theirs")
    assert (
        main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours.ckpt"), "--base", str(tmp_path / "base")]) == 0
    )
    tokens = torch.randint(0, 53, (2, 11))
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = load_model(tmp_path / "ours.ckpt", base=tmp_path / "base")
        found = ours(tokens.flatten(), PackedSequences.of_uniform(2, 11)).logits.view_as(expected)
        assert relative_error(found, expected) < 2e-6  # transformers computes norms and rotations in float32
        assert relative_error(found, llama().eval()(tokens).logits) > 1e-3

    assert main(["convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "back"), "--to", "peft"]) == 0
    first, second = (load_file(tmp_path / folder / WEIGHTS) for folder in ("theirs", "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "back", autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


def test_several_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each adapter of one checkpoint computes what ``peft`` computes with it; each goes back bit for bit."""
    llama().save_pretrained(tmp_path / "base")
    base = ["--base", str(tmp_path / "base")]
    kinds = {"code": {}, "chat": {"r": 2, "use_dora": True, "target_modules": ["q_proj", "up_proj"]}}
    for name, kind in kinds.items():
        adapted(llama(), **kind).save_pretrained(tmp_path / name)
        words = ["convert", str(tmp_path / name), str(tmp_path / f"{name}.ckpt"), *base, "--adapter", name]
        assert main(words) == 0
    join_adapters([tmp_path / "code.ckpt", tmp_path / "chat.ckpt"], tmp_path / "both.ckpt")
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path / "code", "code", autocast_adapter_dtype=False)
    theirs.load_adapter(tmp_path / "chat", "chat", autocast_adapter_dtype=False)
    ours = load_model(tmp_path / "both.ckpt", base=tmp_path / "base")
    tokens, results = torch.randint(0, 53, (2, 11)), {}
    for name in kinds:
        theirs.eval().set_adapter(name)
        activate(ours, name)
        with torch.no_grad():
            expected = theirs(tokens).logits
            found = ours(tokens.flatten(), PackedSequences.of_uniform(2, 11)).logits.view_as(expected)
        assert relative_error(found, expected) < 2e-6
        results[name] = found
    assert relative_error(results["code"], results["chat"]) > 1e-3
    assert main(["convert", str(tmp_path / "both.ckpt"), str(tmp_path / "back"), "--to", "peft"]) == 2
    assert "has the adapters code, chat; name one by --adapter" in " ".join(capsys.readouterr().err.split())
    for name in kinds:
        out = tmp_path / f"{name}-back"
        assert main(["convert", str(tmp_path / "both.ckpt"), str(out), "--to", "peft", "--adapter", name]) == 0
        first, second = (load_file(tmp_path / folder / WEIGHTS) for folder in (name, out))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "no"), "--adapter", "code"]) == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_through_a_store(tmp_path: Path) -> None:
    """Adapters, their base, and what is merged of them, all in remote storage."""
    store = place(f"memory://{uuid4().hex}")
    llama().save_pretrained(tmp_path / "base")
    adapted(llama()).save_pretrained(tmp_path / "theirs")
    store.store.put(str(tmp_path / "base"), f"{store.key}/base", recursive=True)
    store.store.put(str(tmp_path / "theirs"), f"{store.key}/theirs", recursive=True)
    assert main(["convert", f"{store}/theirs", f"{store}/ours.ckpt", "--base", f"{store}/base"]) == 0
    assert main(["convert", f"{store}/ours.ckpt", f"{store}/back", "--to", "peft"]) == 0
    assert {each.name for each in (store / "back").iterdir()} == {CONFIG, WEIGHTS}
    first, second = load_file(tmp_path / "theirs" / WEIGHTS), load((store / "back" / WEIGHTS).read_bytes())
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    with pytest.raises(CheckpointError, match="back is there already"):
        export_adapter(f"{store}/ours.ckpt", f"{store}/back")
    assert main(["merge", f"{store}/ours.ckpt", "--output", f"{store}/merged.ckpt", "--base", f"{store}/base"]) == 0
    merged, alone = load_model(f"{store}/merged.ckpt"), load_model(f"{store}/ours.ckpt", base=f"{store}/base")
    tokens = torch.randint(0, 53, (7,))
    with torch.no_grad():
        found = [model(tokens, PackedSequences.of_lengths([7])).logits for model in (merged, alone)]
    assert relative_error(found[0], found[1]) < 1e-6
    delete(store)


def test_adapters_of_another_base(tmp_path: Path) -> None:
    adapted(llama()).save_pretrained(tmp_path / "theirs")
    for name, options in (("wider", {"intermediate_size": 48}), ("flatter", {"num_hidden_layers": 1})):
        llama(**options).save_pretrained(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"do not fit the base .*wider: .* is \(3, 40\) there and \(3, 48\)"):
        import_adapter(tmp_path / "theirs", tmp_path / "wider", tmp_path / "out.ckpt")
    with pytest.raises(CheckpointError, match=r"adapts 'model\.layers\.1\.\S+', which the base .*flatter does not"):
        import_adapter(tmp_path / "theirs", tmp_path / "flatter", tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bias": "all"}, ConfigurationError, "has bias='all'; only 'none' can be read"),
        ({"peft_type": "IA3"}, ConfigurationError, "peft_type='IA3'; only 'LORA'"),
        ({"rank_pattern": {"q": 2}}, ConfigurationError, "rank_pattern=.*merge_and_unload"),
        ({"init_lora_weights": "pissa"}, ConfigurationError, "init_lora_weights='pissa'; only True .*merge_and_unload"),
        ({"alora_invocation_tokens": [5]}, ConfigurationError, r"alora_invocation_tokens=\[5\]; only None"),
        ({"r": None}, CheckpointError, "r=None; it must be a whole number"),
        ({"r": True}, CheckpointError, "r=True; it must be a whole number"),
        ({"lora_alpha": "16"}, CheckpointError, "lora_alpha='16'; it must be a number"),
        ({"lora_dropout": "0.1"}, CheckpointError, r"lora_dropout='0.1'; it must be a number"),
        ({"use_dora": "false"}, CheckpointError, "use_dora='false'; it must be true or false"),
    ],
)
def test_kinds_that_we_do_not_have(tmp_path: Path, change: dict, error: type[Exception], message: str) -> None:
    adapted(llama()).save_pretrained(tmp_path / "theirs")
    llama().save_pretrained(tmp_path / "base")
    file = tmp_path / "theirs" / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(error, match=message):
        import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "out.ckpt")


def test_damaged_folders(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    adapted(llama()).save_pretrained(tmp_path / "theirs")
    for name, content, message in (
        (WEIGHTS, save({}), "theirs holds no adapters"),
        (WEIGHTS, (tmp_path / "theirs" / WEIGHTS).read_bytes()[:-1], "cannot be read as safetensors"),
        (CONFIG, b"[" * 100_000, r"adapter_config\.json is not JSON"),
        (CONFIG, b"[]", r"adapter_config\.json holds a list"),
    ):
        (tmp_path / "theirs" / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "out.ckpt")
    os.truncate(tmp_path / "theirs" / CONFIG, 1 << 40)  # more than the memory
    with pytest.raises(CheckpointError, match=r"adapter_config\.json has 1099511627776 bytes; at most 104857600"):
        import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


def test_what_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "base")
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "plain.ckpt")]) == 0
    with pytest.raises(CheckpointError, match="has no adapters; a folder of peft holds one LoRA"):
        export_adapter(tmp_path / "plain.ckpt", tmp_path / "out")
    adapted(llama()).save_pretrained(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "out.ckpt")]) == 2
    assert "name the model that they adapt with --base" in capsys.readouterr().err
    import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "ours.ckpt")
    assert all(".lora_" in name for name in checkpoint.open(tmp_path / "ours.ckpt").tensors)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    with pytest.raises(CheckpointError, match="is there already"):
        export_adapter(tmp_path / "ours.ckpt", tmp_path / "out")
