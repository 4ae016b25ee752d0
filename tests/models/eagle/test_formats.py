"""Files of drafts: ModelOpt's architecture, and the folder that serving engines read, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight import checkpoint
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.eagle import DraftModel, EagleConfig, export_draft, import_draft, read_architecture
from megalight.models.eagle.architecture import DEFAULTS, read_vocabulary
from megalight.models.gpt import GPTConfig, LatentConfig
from megalight.models.loading import saved_model
from megalight.models.stored import held_model, save_model
from megalight.nn import DraftState
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.ops.rotary import RotaryScaling
from megalight.types import PackedSequences

BASE = GPTConfig(num_layers=4, hidden_size=16, num_heads=2, ffn_hidden_size=24, vocab_size=37, max_sequence_length=32)
YARN = RotaryScaling("yarn", factor=4.0, original_length=8, mscale=1.0, mscale_all_dim=1.0)
LLAMA = EagleConfig(
    num_kv_heads=1, num_heads=2, head_dim=6, auxiliary_layers=(1, 2, 3), draft_ids=(1, 2, 5, 30), std=0.3
)
KIMI = EagleConfig(
    num_heads=2,
    auxiliary_layers=(1, 3),
    latent=LatentConfig(kv_rank=6, q_rank=5, head_dim=4, rotary_dim=6, value_dim=3),
    rotary_scaling=YARN,
    std=0.3,
)
DRAFTS = {"llama": LLAMA, "kimi": KIMI, "direct": replace(KIMI, latent=replace(KIMI.latent, q_rank=None), head="base")}


def saved(folder: Path, config: EagleConfig) -> DraftModel:
    draft = DraftModel(config.for_base(BASE))
    initialize(draft, 3)
    save_model(held_model("eagle", draft.config, draft), folder)
    return draft


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_that_is_exported_and_imported_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    draft = saved(tmp_path / "draft", DRAFTS[kind])
    assert main(["convert", str(tmp_path / "draft"), str(tmp_path / "out")]) == 0
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    again = saved_model(checkpoint.open(tmp_path / "again")).root
    assert again.config == draft.config
    wanted, found = canonical_tensors(draft), canonical_tensors(again)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_drafts_of_others_are_imported(tmp_path: Path) -> None:
    draft = saved(tmp_path / "draft", replace(LLAMA, auxiliary_layers=()))
    export_draft(tmp_path / "draft", tmp_path / "out")
    # As ModelOpt writes it: another beginning, no mask, and layers left to the engine.
    tensors = {name.replace("midlayer.", "layers.0."): each for name, each in load_file(weights(tmp_path)).items()}
    del tensors["t2d"]
    save_file(tensors, weights(tmp_path))
    change(tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    with pytest.raises(ConfigurationError, match=r"does not say which hidden states.*--base"):
        import_draft(tmp_path / "out", tmp_path / "again")
    save_model(held_model("gpt", BASE, gpt()), tmp_path / "base")
    import_draft(tmp_path / "out", tmp_path / "again", tmp_path / "base")
    assert saved_model(checkpoint.open(tmp_path / "again")).root.config == draft.config


def test_a_draft_without_a_head_has_that_of_its_base(tmp_path: Path) -> None:
    draft = saved(tmp_path / "draft", replace(LLAMA, draft_ids=()))
    export_draft(tmp_path / "draft", tmp_path / "out", None)
    tensors = load_file(weights(tmp_path))
    del tensors["lm_head.weight"]
    save_file(tensors, weights(tmp_path))
    with pytest.raises(ConfigurationError, match=r"has no lm_head, so the draft predicts with .*--base"):
        import_draft(tmp_path / "out", tmp_path / "again")
    base = gpt()
    save_model(held_model("gpt", BASE, base), tmp_path / "base")
    import_draft(tmp_path / "out", tmp_path / "again", tmp_path / "base")
    again = saved_model(checkpoint.open(tmp_path / "again")).root
    assert again.config == replace(draft.config, head="base")
    head = "head.output_layer.weight"
    wanted = {**canonical_tensors(draft), head: canonical_tensors(base)[head]}
    found = canonical_tensors(again)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_draft_of_some_ids_without_a_head_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "draft", LLAMA)
    export_draft(tmp_path / "draft", tmp_path / "out")
    tensors = load_file(weights(tmp_path))
    del tensors["lm_head.weight"]
    save_file(tensors, weights(tmp_path))
    with pytest.raises(CheckpointError, match=r"it lacks \['head.output_layer.weight'\]"):
        import_draft(tmp_path / "out", tmp_path / "again")


def gpt() -> torch.nn.Module:
    from megalight.models.gpt import GPT

    model = GPT(BASE)
    initialize(model, 1)
    return model


def weights(folder: Path) -> Path:
    return folder / "out" / "model.safetensors"


def change(folder: Path, **values: Any) -> None:
    file = folder / "out" / "config.json"
    merged = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ConfigurationError, "holds no draft"),
        ({"hidden_size": 32}, CheckpointError, r"has the shape .* needs"),
        ({"vocab_size": None}, CheckpointError, "has no vocab_size; copy the folder again"),
        ({"max_position_embeddings": None}, CheckpointError, "has no max_position_embeddings"),
        ({"num_hidden_layers": 2}, ConfigurationError, "num_hidden_layers is 2; drafts of EAGLE-3 have 1"),
        ({"model_type": "kimi_k2", "head_dim": None}, CheckpointError, "does not hold the tensors of its config.json"),
    ],
)
def test_a_folder_that_is_no_draft_of_ours_is_refused(
    values: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    saved(tmp_path / "draft", LLAMA)
    export_draft(tmp_path / "draft", tmp_path / "out")
    change(tmp_path, **values)
    with pytest.raises(kind, match=message):
        import_draft(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_draft_without_the_ids_of_its_vocabulary_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "draft", LLAMA)
    export_draft(tmp_path / "draft", tmp_path / "out")
    tensors = load_file(weights(tmp_path))
    save_file({name: each for name, each in tensors.items() if name not in ("d2t", "t2d")}, weights(tmp_path))
    with pytest.raises(CheckpointError, match=r"has draft_vocab_size=4, and model\.safetensors has no d2t"):
        import_draft(tmp_path / "out", tmp_path / "again")


def architecture(folder: Path, **values: Any) -> Path:
    file = folder / "eagle_architecture.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of ModelOpt's imports
def test_an_architecture_has_modelopts_values(tmp_path: Path) -> None:
    from modelopt.torch.speculative.eagle import default_config

    for decoder, theirs in (("llama", "default_eagle_config"), ("kimik2", "default_kimik2_eagle_config")):
        values = getattr(default_config, theirs)
        assert {key: values[key] for key in DEFAULTS[decoder] if key != "rope_scaling"} == {
            key: value for key, value in DEFAULTS[decoder].items() if key != "rope_scaling"
        }
        whole = values | {"use_aux_hidden_state": True, "use_last_layernorm": True, "max_position_embeddings": None}
        assert read_architecture(architecture(tmp_path, **whole)) == read_architecture(
            architecture(tmp_path, eagle_decoder_type=decoder)
        )


def test_an_architecture_is_read(tmp_path: Path) -> None:
    inner = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "intermediate_size": 24,
        "eagle_aux_hidden_state_layer_ids": [2, 0, 1],
        "draft_vocab_size": 4,
    }
    file = architecture(tmp_path, eagle_decoder_type="llama", eagle_architecture_config=inner)
    wanted = replace(LLAMA, auxiliary_layers=(3, 1, 2), ffn_hidden_size=24, rotary_base=10000, std=0.01)
    assert read_architecture(file, (1, 2, 5, 30)) == wanted
    # It says nothing of the vocabulary.
    within = {"eagle_aux_hidden_state_layer_ids": [0]}
    found = read_architecture(architecture(tmp_path, eagle_config=within), (1, 2))
    assert (found.draft_ids, found.auxiliary_layers) == ((1, 2), (1,))
    plain = read_architecture(architecture(tmp_path, num_attention_heads=2))
    assert (plain.head, plain.draft_ids) == ("base", ())
    assert read_architecture(architecture(tmp_path, has_lm_head=True)).head == "own"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_atention_heads": 2}, "has 'num_atention_heads', which is not known.*num_attention_heads"),
        ({"use_mtp_layernorm": True}, "use_mtp_layernorm is True; drafts of EAGLE-3 have False"),
        ({"draft_vocab_size": 9}, "draft_vocab_size=9, but not which ids these are"),
        ({"eagle_decoder_type": "gpt"}, "eagle_decoder_type is 'gpt'; known are llama, kimik2"),
        ({"eagle_ttt_steps": 3, "eagle_architecture_config": {}}, "has eagle_ttt_steps beside.*set steps and decay"),
        ({"kv_lora_rank": 4, "first_k_dense_replace": 0}, "first_k_dense_replace is 0"),
    ],
)
def test_an_architecture_without_a_counterpart_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_architecture(architecture(tmp_path, **values))


def test_a_vocabulary_is_read_from_each_kind_of_file(tmp_path: Path) -> None:
    saved(tmp_path / "draft", LLAMA)
    export_draft(tmp_path / "draft", tmp_path / "out")
    ids = torch.tensor(LLAMA.draft_ids)
    torch.save(ids - torch.arange(4), tmp_path / "d2t.pt")
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    for name in ("out", "d2t.pt", "ids.json"):
        assert read_vocabulary(tmp_path / name) == LLAMA.draft_ids
    (tmp_path / "ids.json").write_text("[0.5]")
    for name in ("ids.json", "nowhere.json"):
        with pytest.raises(ConfigurationError, match="give a JSON list of ids, or a file with offsets d2t"):
            read_vocabulary(tmp_path / name)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "kimi"])
@pytest.mark.filterwarnings("ignore")
def test_modelopts_draft_with_exported_weights_computes_the_same(kind: str, tmp_path: Path) -> None:
    from modelopt.torch.speculative.plugins.modeling_eagle import EagleModule
    from transformers import DeepseekV3Config, LlamaConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    draft = saved(tmp_path / "draft", DRAFTS[kind]).double()
    export_draft(tmp_path / "draft", tmp_path / "out", torch.float32)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    values |= values.pop("eagle_config")
    kinds = {"llama": (LlamaConfig, LlamaDecoderLayer), "kimi": (DeepseekV3Config, DeepseekV3DecoderLayer)}
    config = kinds[kind][0](**{key: each for key, each in values.items() if key not in ("model_type", "dtype")})
    # ModelOpt makes the table of rotations for Llama's decoder alone; both read the same.
    config.eagle_decoder_type, config.use_last_layernorm = "llama", True
    config.head_dim = values.get("head_dim", values.get("qk_rope_head_dim"))
    config._attn_implementation = "eager"
    theirs = EagleModule(config, kinds[kind][1]).double()
    theirs._maybe_init_rope()
    tensors = {name.replace("midlayer.", "layers.0."): each for name, each in load_file(weights(tmp_path)).items()}
    tensors.pop("t2d")
    missing, extra = theirs.load_state_dict(tensors, strict=False)
    assert (missing, set(extra) - {"d2t", "lm_head.weight"}) == ([], set())
    size = 9
    states, embedded = torch.randn(2, size, 3 * 16, dtype=torch.double)[:, :, : 16 * len(draft.config.auxiliary_layers)]
    embedded = embedded[:, :16].contiguous()
    mask = torch.full((size, size), -torch.inf, dtype=torch.double).triu(1)[None, None]
    # transformers computes angles in float32.
    post, pre, _ = theirs(theirs.fc(states)[None], embedded[None], mask)
    sequences = PackedSequences.of_uniform(1, size, states.device)
    ours: Tensor = draft.step(draft.fuse(states), embedded, sequences, DraftState())
    torch.testing.assert_close(ours, pre[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(draft.head.norm(ours), post[0], rtol=1e-3, atol=1e-4)


def test_nothing_is_left_of_an_export_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "draft", LLAMA)

    def full(*args: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("megalight.models.eagle.serving_format.values_of", full)
    with pytest.raises(OSError, match="no space"):
        export_draft(tmp_path / "draft", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
