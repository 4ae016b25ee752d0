"""Adapters travel to ``peft`` and back, bit for bit, and compute the same there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import transformers
from safetensors.torch import load, load_file, save

from megalight import checkpoint
from megalight.checkpoint.disk.publish import delete, place
from megalight.checkpoint.sources import FullPrecision, TensorSource
from megalight.checkpoint.view import views_of_source
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt.module import GPTModule
from megalight.models.transforms import DoRA, LoRA, activate, describe
from megalight.models.transforms.peft import (
    CONFIG,
    WEIGHTS,
    _base,
    _modules,
    check_export,
    export_adapter,
    import_adapter,
)
from megalight.models.transforms.saved import join_adapters
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.parallel.source import Target
from megalight.types import PackedSequences
from tests.support.reference_gpt import relative_error

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


def gpt2() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates)).double()


def tied() -> Any:
    return llama(tie_word_embeddings=True)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:fan_in_fan_out", "ignore:Setting")
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (llama, {"target_modules": ["lm_head", "q_proj"]}),
        (tied, {"target_modules": ["lm_head"]}),
        (gpt2, {"target_modules": ["lm_head", "c_attn"]}),
        (gpt2, {"target_modules": ["c_attn", "c_fc"], "use_rslora": True}),
        (gpt2, {"target_modules": ["c_attn"], "use_dora": True}),
    ],
)
def test_heads_and_fused_weights(tmp_path: Path, base: Callable[[], Any], options: dict[str, Any]) -> None:
    """``q``, ``k`` and ``v`` get the same ``A`` as the fused layer, and their rows of ``B``."""
    base().save_pretrained(tmp_path / "base")
    theirs = adapted(base(), **options)
    theirs.save_pretrained(tmp_path / "theirs")
    import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "ours.ckpt")
    tokens = torch.randint(0, 53, (2, 11))
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert relative_error(logits_of(tmp_path / "ours.ckpt", tmp_path / "base", tokens), expected) < 2e-6
    assert relative_error(base().eval()(tokens).logits, expected) > 1e-3
    if "c_attn" in options["target_modules"]:
        with pytest.raises(ConfigurationError, match="is part of a fused or stacked weight"):
            export_adapter(tmp_path / "ours.ckpt", tmp_path / "back")
        return
    export_adapter(tmp_path / "ours.ckpt", tmp_path / "back")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "back", autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


@pytest.mark.filterwarnings("ignore:Setting")
def test_adapters_of_embeddings_and_heads_of_another_base(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    adapted(llama(), target_modules=["embed_tokens", "q_proj"]).save_pretrained(tmp_path / "embedding")
    with pytest.raises(ConfigurationError, match=r"adapts model\.embed_tokens, an embedding; .*merge_and_unload"):
        import_adapter(tmp_path / "embedding", tmp_path / "base", tmp_path / "out.ckpt")
    other = llama()
    other.lm_head.weight.data[3, 5] += 1
    adapted(other, target_modules=["lm_head"]).save_pretrained(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"is another weight than lm_head\.weight of the base .*Name the base"):
        import_adapter(tmp_path / "head", tmp_path / "base", tmp_path / "out.ckpt")


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


def of_experts(kind: str, implementation: str | None = "eager") -> Any:
    """A small model with experts in every layer. Products of stacks in float64 are only in the eager form."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    if kind == "mixtral":
        config = transformers.MixtralConfig(**{**sizes, "intermediate_size": 12}, num_local_experts=4)
    else:
        few = {"moe_intermediate_size": 12, "head_dim": 8, "num_experts": 4, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**sizes, **few, decoder_sparse_step=1, mlp_only_layers=[])
    config._experts_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config).double()


def logits_of(path: Path, base: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        ours = load_model(path, base=base)
        found: torch.Tensor = ours(tokens.flatten(), PackedSequences.of_uniform(*tokens.shape)).logits
    return found.view(*tokens.shape, -1)


PATTERNS = pytest.mark.filterwarnings(r"ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
"""peft warns of the patterns that it makes for stacks, and follows them."""


@PATTERNS
@pytest.mark.parametrize(
    ("kind", "stabilized"),
    [
        ("qwen3_moe", True),
        ("mixtral", False),
        pytest.param("qwen3_moe", False, marks=pytest.mark.full),
        pytest.param("mixtral", True, marks=pytest.mark.full),
    ],
)
def test_experts_there_and_back(tmp_path: Path, kind: str, stabilized: bool) -> None:
    """Ours to peft, which stacks them, and what peft saves to ours: the bits are the same."""
    base = of_experts(kind)
    base.save_pretrained(tmp_path / "base")
    module = GPTModule(weights=str(tmp_path / "base"))
    lora = LoRA(3, ["attention.*", "experts.*"], 5.0, rank_stabilized=stabilized)
    model = module.build_model().double()
    lora.change(model)
    initialize(model, 1)
    tensors = {f"model.{name}": tensor for name, tensor in canonical_tensors(model).items() if ".lora_" in name}
    for tensor in tensors.values():
        torch.nn.init.normal_(tensor.detach(), std=0.3)
    described = {"family": "gpt", "config": module.config.to_dict(), "transforms": describe([lora]), "base": False}
    held = TensorSource(tensors)
    checkpoint.save(
        tmp_path / "ours.ckpt", views_of_source(held, held.tensors, None, None), common={"model": described}
    )
    assert export_adapter(tmp_path / "ours.ckpt", tmp_path / "there") == 2 * (4 + 4 * 3)
    theirs = peft.PeftModel.from_pretrained(of_experts(kind), tmp_path / "there", autocast_adapter_dtype=False).eval()
    tokens = torch.randint(0, 53, (2, 11))
    with torch.no_grad():
        expected = theirs(tokens).logits
        plain = base.eval()(tokens).logits
    found = logits_of(tmp_path / "ours.ckpt", tmp_path / "base", tokens)
    assert relative_error(found, expected) < 2e-6
    assert relative_error(found, plain) > 1e-3

    theirs.save_pretrained(tmp_path / "stacked")
    stacked = json.loads((tmp_path / "stacked" / CONFIG).read_text())
    assert stacked["target_parameters"]
    for folder in ("there", "stacked"):
        again = tmp_path / f"{folder}.ckpt"
        import_adapter(tmp_path / folder, tmp_path / "base", again)
        back = FullPrecision(checkpoint.open(again))
        assert back.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            data = torch.empty_like(tensor)
            back.fill([Target(name, data.shape, (0,) * data.ndim, data)], strict=False)
            assert torch.equal(data, tensor), name
        # rsLoRA's scale becomes a quotient, with a rounding more
        assert relative_error(logits_of(again, tmp_path / "base", tokens), found) < 1e-12


@PATTERNS
def test_a_stack_that_peft_trained_as_a_whole(tmp_path: Path) -> None:
    """One pair for gate and up together: both get its A, and a half of its B each."""
    of_experts("qwen3_moe").save_pretrained(tmp_path / "base")
    options = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    theirs = adapted(of_experts("qwen3_moe"), **options)
    theirs.save_pretrained(tmp_path / "theirs")
    assert import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "ours.ckpt") == 2 * (1 + 4 * 3)
    tokens = torch.randint(0, 53, (2, 11))
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = logits_of(tmp_path / "ours.ckpt", tmp_path / "base", tokens)
    assert relative_error(found, expected) < 2e-6
    with torch.no_grad():
        assert relative_error(found, of_experts("qwen3_moe").eval()(tokens).logits) > 1e-3
    # and back, as pairs for each expert
    export_adapter(tmp_path / "ours.ckpt", tmp_path / "back")
    again = peft.PeftModel.from_pretrained(of_experts("qwen3_moe"), tmp_path / "back", autocast_adapter_dtype=False)
    with torch.no_grad():
        assert relative_error(again.eval()(tokens).logits, expected) < 1e-12

    config = json.loads((tmp_path / "theirs" / CONFIG).read_text())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"target_parameters": ["mlp.gate.weight"]}, "adapts the parameter 'mlp.gate.weight'; only gate_up_proj"),
        ({"rank_pattern": {".*.gate_up_proj": 5}}, "has rank 5 and alpha 7 for '.*.gate_up_proj'; only twice r=3"),
        ({"rank_pattern": {".*.gate_up_proj": 6}}, "has rank 6 and alpha 7 .* with the same scale"),
        ({"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 14}}, "for gate_up_proj alone"),
    ]
    for change, message in wrong:
        (tmp_path / "theirs" / CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigurationError, match=message):
            import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "no.ckpt")
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(config))
    weights = load_file(tmp_path / "theirs" / WEIGHTS)
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    for tensor in (weights[name][:-1], weights[name][:, :-1]):
        (tmp_path / "theirs" / WEIGHTS).write_bytes(save({**weights, name: tensor.contiguous()}))
        with pytest.raises(CheckpointError, match=r"stack .*the base"):
            import_adapter(tmp_path / "theirs", tmp_path / "base", tmp_path / "no.ckpt")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (DoRA(2), "peft has no DoRA for experts"),
        (LoRA(2, exclude=["experts.up"]), r"experts.0.up has no adapter; peft adapts gate, up and down of all"),
        (LoRA(2, ["layers.0.*"]), r"layers.1.mlp.experts.0.gate has no adapter"),
    ],
)
def test_experts_that_peft_cannot_put_together(tmp_path: Path, lora: LoRA, message: str) -> None:
    of_experts("qwen3_moe").save_pretrained(tmp_path / "base")
    model = GPTModule(weights=str(tmp_path / "base")).build_model()
    lora.change(model)
    modules, _, experts, _ = _modules(*_base(tmp_path / "base"))
    adapted = {name.rpartition(".lora_")[0] for name in canonical_tensors(model) if ".lora_" in name}
    with pytest.raises(ConfigurationError, match=message):
        check_export(lora, adapted, modules, experts)
    lora = LoRA(2)
    named = {**modules, "layers.0.attention.q": "model.layers.0.mlp.shared.gate_proj"}
    with pytest.raises(ConfigurationError, match="peft takes adapters of that name for those of experts"):
        check_export(lora, set(named), named, experts)
