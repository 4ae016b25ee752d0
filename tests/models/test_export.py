"""Models between our checkpoints and folders of ``transformers``: equal tensors, equal logits, little memory."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint import view
from megalight.cli.main import main
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt import AttentionConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.gpt.hugging_face import config_from_transformers, config_to_transformers
from megalight.models.gpt.module import GPTModule
from megalight.models.gpt.presets import PRESETS
from megalight.models.hugging_face import export as exporting
from megalight.models.hugging_face.export import export
from megalight.models.stored import averaged, open_model, save_model
from tests.models.test_gpt_hugging_face import LLAMA3, MODELS, SIZES
from tests.support.programs import forked
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

LLAMA = {**SIZES, "rope_parameters": LLAMA3}
BERT = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM", o) for name, (kind, o) in MODELS.items()},
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": None}),
    "mistral_windowed": ("MistralForCausalLM", {**SIZES, "sliding_window": 5}),
    "llama3": ("LlamaForCausalLM", LLAMA),
    "gpt_oss": ("GptOssForCausalLM", {**SIZES, "head_dim": 8, "num_local_experts": 5, "sliding_window": 6}),
    "bert": ("BertForPreTraining", BERT),
    "bert_masked": ("BertForMaskedLM", BERT),
    "bert_untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "bert_bare": ("BertModel", BERT),
}


def model_of(name: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    kind, options = KINDS[name]
    made = getattr(transformers, kind)
    model = made(made.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        if name == "bert_untied":  # a second bias that nothing reads; published files hold the same values in both
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("folders")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            model_of(name).save_pretrained(root / name)
        return root / name

    return folder


def tensors(model: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = model.state_dict()
    return found


def auto(name: str) -> Any:
    if name == "bert_bare":
        return transformers.AutoModel
    return transformers.AutoModelForMaskedLM if name.startswith("bert_") else (
        transformers.AutoModelForPreTraining if name == "bert" else transformers.AutoModelForCausalLM
    )  # fmt: skip


def loaded(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> Any:
    """The model as ``transformers`` loads it, without a complaint."""
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("WARNING", "transformers"):
            caplog.clear()
            model, info = auto(name).from_pretrained(folder, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info.values()), info
    assert not caplog.records, caplog.text
    return model


@pytest.mark.parametrize("name", KINDS)
def test_in_and_out_again(
    name: str, folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(open_model(folders(name)), tmp_path / "ours.ckpt")
    export(open_model(tmp_path / "ours.ckpt"), tmp_path / "back")
    before, after = model_of(name), loaded(tmp_path / "back", name, caplog)
    assert type(after) is type(before)
    assert tensors(before).keys() == tensors(after).keys()
    assert all(torch.equal(tensor, tensors(after)[key]) for key, tensor in tensors(before).items())
    ids = torch.randint(0, 53, (2, 13))
    a, b = before(ids), after(ids)
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-5)


def test_the_command_goes_both_ways(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(folders("llama")), str(tmp_path / "ours.ckpt"), "--quiet"]
    assert main(words) == 0
    assert "a checkpoint of weights" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    expected = tensors(model_of("llama"))
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in tensors(half).items())
    assert main(["convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "half")]) == 2
    assert "is there already; remove it" in capsys.readouterr().err


def test_the_bar_comes_to_its_end(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows how much is to be read, and reaches that as the last tensor is."""
    bars: list[Progress] = []
    real = Progress.__init__

    def made(self: Progress, *columns: Any, **options: Any) -> None:
        real(self, *columns, **options)
        bars.append(self)

    monkeypatch.setattr(Progress, "__init__", made)
    ours = str(tmp_path / "ours.ckpt")
    for words in ([str(folders("llama")), ours], [ours, "back"], [ours, "flat.ckpt", "--to", "dp_reshardable"]):
        assert main(["convert", words[0], str(tmp_path / words[1]), *words[2:]]) == 0
        (task,) = bars.pop().tasks
        elements = sum(tensor.numel() for tensor in tensors(model_of("llama")).values())
        assert (task.completed, task.total) == (elements, elements)


def _export_from(path: Path, folder: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:  # the worker runs other tests afterwards
        patch.setattr(exporting, "MAX_FILE", 20_000)
        export(open_model(path), folder, overwrite=True)
    return sorted(file.name for file in folder.iterdir())


def test_all_ranks_write_files_of_their_own(
    folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").mkdir()
    for name in ("config.json", "stale"):  # only a folder of transformers is replaced
        (tmp_path / "out" / name).write_text("{}")
    for names in run(_export_from, 2, folders("qwen3"), tmp_path / "out"):
        assert "model.safetensors.index.json" in names
        assert "stale" not in names
        assert len([name for name in names if name.endswith(".safetensors")]) > 3
    found, expected = tensors(loaded(tmp_path / "out", "qwen3", caplog)), tensors(model_of("qwen3"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


FIRST_WORDS = {"llama2": "llama", "llama3": "llama", "kimi": "deepseek", "nemotron3": "nemotron_h"}


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_have_a_configuration_of_theirs(name: str) -> None:
    values = config_to_transformers(PRESETS[name])  # reads back what it wrote, and compares
    kind = name.partition("_")[0]
    assert values["model_type"].startswith(FIRST_WORDS.get(kind, kind))
    assert config_to_transformers(config_from_transformers(json.loads(json.dumps(values)))).keys() == values.keys()


GPT_OSS: Any = PRESETS["gpt_oss_20b"]
SMALL = GPTConfig(num_layers=2, hidden_size=24, num_heads=3, vocab_size=53, max_sequence_length=32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SMALL, logit_softcap=3.0), "logit_softcap is 3.0 here and None in transformers' "),
        (replace(SMALL, activation="squared_relu"), "hidden_act 'squared_relu' has no counterpart"),
        (replace(SMALL, position=PositionConfig(fraction=0.5)), "position.fraction is 0.5 here and 1.0"),
        (replace(SMALL, norm=NormConfig(kind="layer")), "norm.kind is layer here and rms"),
        (
            replace(GPT_OSS, moe=replace(GPT_OSS.moe, clamp=5.0)),
            "moe.clamp is 5.0 here and 7.0 in transformers' gpt_oss",
        ),
        (replace(GPT_OSS, moe=None), "a model of gpt_oss has experts"),
    ],
)
def test_what_they_cannot_express_is_refused(config: GPTConfig, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no model of transformers has this configuration.*{message}"):
        config_to_transformers(config)


def test_equal_windows_in_another_pattern_are_the_same_model() -> None:
    windowed = AttentionConfig(qkv_bias=True, window=4, window_pattern=(False, True))
    values = config_to_transformers(replace(SMALL, num_layers=4, attention=windowed))
    assert values["model_type"] == "qwen2"
    assert values["layer_types"] == ["full_attention", "sliding_attention"] * 2


def test_a_tensor_that_is_missing_or_too_many_is_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = open_model(folders("llama"))
    (tmp_path / "out").mkdir()
    wider, deeper = replace(model.config, ffn_hidden_size=48), replace(model.config, num_layers=3)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate\.weight is \[40, 24\] instead of \[48, 24\]"):
        export(replace(model, config=wider), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"layers\.2\.attention\.k\.weight is missing"):
        export(replace(model, config=deeper), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_damage_is_found_and_leaves_nothing(folders: Callable[[str], Path], tmp_path: Path) -> None:
    save_model(open_model(folders("llama")), tmp_path / "ours.ckpt")
    file = next((tmp_path / "ours.ckpt" / "data").iterdir())
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"data/0-0\.safetensors .* is torn.*to 'model\.head\.norm\.weight'"):
        export(open_model(tmp_path / "ours.ckpt"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ours.ckpt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("to", ["transformers", "checkpoint"])
def test_what_cannot_be_written_is_named(
    to: str, number: int, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A full disk, a read-only one and a broken one: file and tensor are named, and nothing is left."""
    size, really = min(each.nbytes for each in tensors(model_of("llama3")).values()), os.write

    def write(descriptor: int, data: Any) -> int:
        # The norms are the smallest tensors; all of them have this size.
        if len(data) == size and descriptor > 2:
            raise OSError(number, os.strerror(number))
        return really(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        assert main(["convert", str(folders("llama3")), str(tmp_path / "out"), "--to", to, "--quiet"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert os.strerror(number) in told
    assert ".safetensors cannot be written: [Errno" in told
    assert "norm" in told.partition("(tensor ")[2], told
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("in use")
    assert main(["convert", str(folders("llama3")), str(tmp_path / "out"), "--to", to, "--quiet"]) == 2
    assert f"{tmp_path}/out is there already; remove it, or name another folder" in " ".join(
        capsys.readouterr().err.split()
    )


def test_tokenizer_and_settings_go_along(
    folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The special tokens are those of the settings for generation, or else of the tokenizer."""
    model = open_model(folders("llama3"))
    wide = model_of("llama3")
    wide.resize_token_embeddings(300)
    wide.save_pretrained(tmp_path / "theirs")
    tokenizer = Tokenizer.train(["to be or not to be " * 20], 264)
    tokenizer.save(tmp_path / "theirs")
    settings = {"eos_token_id": [0, 7], "pad_token_id": 1, "do_sample": True, "temperature": 0.6}
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((tmp_path / "theirs" / "tokenizer_config.json").read_text())
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ 1 }}"}))
    also = {name: name.encode() for name in ("preprocessor_config.json", "processor_config.json", "tiktoken.model")}
    for name, content in {**also, "modeling.py": b"raise SystemExit"}.items():
        (tmp_path / "theirs" / name).write_bytes(content)

    save_model(open_model(tmp_path / "theirs"), tmp_path / "ours.ckpt")
    export(open_model(tmp_path / "ours.ckpt"), tmp_path / "back")
    again = loaded(tmp_path / "back", "llama3", caplog)
    assert again.generation_config.eos_token_id == [0, 7]
    assert again.generation_config.temperature == 0.6
    auto_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert auto_tokenizer.chat_template == "{{ 1 }}"
    assert {name: (tmp_path / "back" / name).read_bytes() for name in also} == also
    assert not (tmp_path / "back" / "modeling.py").exists(), "code is not carried along"
    assert auto_tokenizer("to be").input_ids == tokenizer.encode("to be")

    files = {**model.files, **tokenizer.files()}
    del files["generation_config.json"]
    plain = replace(open_model(tmp_path / "theirs"), files={k: v for k, v in files.items() if k != "config.json"})
    export(plain, tmp_path / "plain")
    again = loaded(tmp_path / "plain", "llama3", caplog)
    assert again.generation_config.eos_token_id == again.config.eos_token_id == tokenizer.eod_id


def test_the_mean_of_checkpoints(folders: Callable[[str], Path], tmp_path: Path) -> None:
    paths = []
    for seed in (1, 2, 3):
        model_of("llama", seed).bfloat16().save_pretrained(tmp_path / str(seed))
        paths.append(tmp_path / str(seed))
    words = ["convert", str(paths[0]), str(tmp_path / "mean"), "--to", "transformers", "--quiet", "--average"]
    assert main([*words, *map(str, paths[1:])]) == 0
    found = tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mean"))
    each = [tensors(model_of("llama", seed).bfloat16()) for seed in (1, 2, 3)]
    for name, tensor in found.items():
        mean = (each[0][name].float() + each[1][name].float() + each[2][name].float()) / 3
        assert torch.equal(tensor, mean.bfloat16()), name
    # A folder of runs stands for its newest checkpoint.
    save_model(open_model(paths[1]), tmp_path / "runs" / "a.ckpt")
    words[2] = str(tmp_path / "again")
    assert main([*words, str(tmp_path / "runs"), str(paths[2])]) == 0
    again = tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.items())
    with pytest.raises(ConfigurationError, match=r"cannot be averaged: attention\.qk_norm is False here and True"):
        averaged([open_model(paths[0]), open_model(folders("qwen3"))])


def test_a_source_without_averages_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder of transformers, which has no moving averages"):
        open_model(folders("llama"), ema=True)
    save_model(open_model(folders("llama")), tmp_path / "ours.ckpt")
    with pytest.raises(CheckpointError, match="no moving averages; train with the callback EMA"):
        open_model(tmp_path / "ours.ckpt", ema=True)


def test_whole_numbers_are_written_as_the_floats_they_stand_for(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """``transformers`` refuses to read an int where its configuration has a float."""
    model = open_model(folders("llama3"))
    config = replace(model.config, position=replace(model.config.position, base=500000))
    export(replace(model, config=config), tmp_path / "out")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_theta"]
    assert isinstance(found, float)
    assert found == 500000.0


def _peak() -> int:
    """The most bytes that this process has had since it last asked for a new count."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


def _memory(source: Path, small: Path, folder: Path) -> None:
    """Write how many more bytes a model took when it was imported, and when it was exported."""
    view.BUDGET = 4 << 20
    save_model(open_model(small), folder / "small.ckpt")  # imports, thread stacks, buffers
    export(open_model(folder / "small.ckpt"), folder / "small")
    more = []
    for convert in (
        lambda: save_model(open_model(source), folder / "ours.ckpt"),
        lambda: export(open_model(folder / "ours.ckpt"), folder / "back"),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak()
        convert()
        more.append(_peak() - before)
    (folder / "more.json").write_text(json.dumps(more))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux")
def test_memory_is_bounded_by_the_largest_tensor(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """144 MiB of weights whose largest tensor has 6 MiB: it takes at most 12 of these, either way.

    Two tensors, one being read while the other is written, a block of 4 MiB for each of four threads, and what the
    allocator keeps.
    """
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=768, intermediate_size=2048, num_hidden_layers=5, num_attention_heads=12
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "theirs")
    size = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert size > 22 * largest
    # In a process whose allocator has kept nothing of other tests.
    assert forked(_memory, tmp_path / "theirs", folders("llama"), tmp_path, output=tmp_path / "more.json") == 0
    assert max(json.loads((tmp_path / "more.json").read_text())) < 12 * largest
    assert checkpoint.is_complete(tmp_path / "ours.ckpt")


def test_a_checkpoint_has_the_chat_template_of_its_data(tmp_path: Path) -> None:
    """The model learned conversations as that one writes them; the settings of the weights' tokenizer stay."""
    tokenizer = Tokenizer.train(["to be or not to be " * 20], 264)
    model_of("llama3").save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 7}))
    for template, wanted in ((None, None), ("{{ 2 }}", "{{ 2 }}")):
        tokenizer.chat_template = template
        module: Any = GPTModule(weights=tmp_path)
        module._trainer = SimpleNamespace(datamodule=SimpleNamespace(checkpoint_files=tokenizer.files))
        files = module.checkpoint_files()
        assert Tokenizer.of_files(files).chat_template == wanted
        assert json.loads(files["tokenizer_config.json"])["model_max_length"] == 7
