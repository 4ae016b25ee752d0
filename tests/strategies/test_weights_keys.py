"""A run starts from a folder whose names are not those of the model: ``weights_keys``."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megalight import checkpoint
from megalight.callbacks import Adapters
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference.text import load_divided, load_model
from megalight.models.eagle import EagleModule
from megalight.models.gpt import GPTConfig, GPTModule
from megalight.models.gpt.hugging_face import from_transformers
from megalight.models.stored import open_model
from megalight.models.vlm import VLMModule
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.source import Target
from megalight.strategies import MegatronStrategy
from megalight.types import PackedSequences
from tests.strategies.test_weights import LLAMA, OPTIONS, SIZES, Masters
from tests.strategies.training import ADAM, Losses, WithData
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

MISSING = {
    "model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.gate.weight",  # half of a fused parameter
    "model.layers.1.self_attn.o_proj.weight": "model.layers.1.attention.proj.weight",
    "lm_head.weight": "model.head.output_layer.weight",
}
EXTRA = ("score.weight", "model.layers.2.mlp.up_proj.weight")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "sharded": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder, one with other names, and the latter with a wrong shape."""
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, **LLAMA, num_key_value_heads=2, max_position_embeddings=24)
    transformers.LlamaForCausalLM(config).save_pretrained(root / "whole")
    tensors = {k: v for k, v in load_file(root / "whole" / "model.safetensors").items() if k not in MISSING}
    tensors |= {EXTRA[0]: torch.zeros(2, 32), EXTRA[1]: torch.zeros(48, 32)}
    for name, change in (("other", {}), ("wrong", {"model.norm.weight": torch.zeros(33)})):
        shutil.copytree(root / "whole", root / name)
        save_file(tensors | change, root / name / "model.safetensors")
    return root


class Kept(logging.Handler):
    """The messages of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _strategy(layout: str) -> MegatronStrategy:
    return MegatronStrategy(micro_batch_size=1, **LAYOUTS[layout][1])


def _initial(
    layout: str, config: GPTConfig, weights: Path | None, keys: Any, precision: str = "64-true"
) -> tuple[dict[str, np.ndarray[Any, Any]], list[str], list[torch.Tensor]]:
    """What a run begins with, and what this rank has logged about names."""
    heard, seen, masters = Kept(), Losses(), Masters()
    names = logging.getLogger("megalight.checkpoint.sources")
    names.addHandler(heard)
    # Under bfloat16, which numpy lacks, only the masters are kept.
    callbacks = [masters] if precision == "bf16-true" else [seen, masters]
    try:
        module = WithData(config, optimizer=ADAM, weights=weights, weights_keys=keys)
        trainer(_strategy(layout), callbacks=callbacks, precision=precision, max_steps=1, **OPTIONS).fit(module)
    finally:
        names.removeHandler(heard)
    return seen.initial, heard.messages, masters.found


@pytest.mark.parametrize(
    ("layout", "keys"),
    [("one", "log"), ("one", "ignore"), ("tp2", "log"), ("tp2", "ignore"), ("pp2", "log"), ("sharded", "log")],
)
def test_what_a_folder_lacks_is_drawn_and_what_is_too_much_is_skipped(layout: str, keys: str, folders: Path) -> None:
    config, ranks = GPTModule(weights=folders / "whole").config, LAYOUTS[layout][0]
    ((drawn, _, _),) = run(_initial, 1, "one", config, None, "strict")
    whole = from_transformers(load_file(folders / "whole" / "model.safetensors"), config)
    results = run(_initial, ranks, layout, config, folders / "other", keys)
    for found, _, _ in results:
        assert found.keys() == drawn.keys()
        for name, value in found.items():
            stored = whole[name.removeprefix("model.")].numpy()
            assert np.array_equal(value, drawn[name] if name in MISSING.values() else stored), name
            assert not np.array_equal(drawn[name], stored) or "norm" in name
    said = [messages for _, messages, _ in results]
    assert not any(said[1:])
    if keys == "ignore":
        assert not said[0]
        return
    missing, extra = said[0]
    assert "3 tensors are not in" in missing
    assert "2 tensors of" in extra
    for text, names in ((missing, MISSING), (extra, EXTRA)):
        assert all(text.count(name) == 1 for name in names), text
        assert str(folders / "other") in text


def test_masters_of_what_is_missing_keep_all_bits_of_the_draw(folders: Path) -> None:
    config = GPTModule(weights=folders / "whole").config
    ((_, _, drawn),) = run(_initial, 1, "one", config, None, "strict", "bf16-true")
    ((_, _, found),) = run(_initial, 1, "one", config, folders / "other", "ignore", "bf16-true")
    ((_, _, whole),) = run(_initial, 1, "one", config, folders / "whole", "strict", "bf16-true")
    lacking = sum(load_file(folders / "whole" / "model.safetensors")[name].numel() for name in MISSING)
    ours, fresh, stored = (torch.cat([m.flatten() for m in each]) for each in (found, drawn, whole))
    assert all(master.dtype == torch.float32 for master in found)
    assert torch.equal(torch.where(ours == fresh, fresh, stored), ours)
    assert int((ours != stored).sum()) == lacking


def _refused(layout: str, config: GPTConfig, weights: Path, keys: str) -> str:
    try:
        _initial(layout, config, weights, keys)
    except CheckpointError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_strict_refuses_names_and_every_mode_refuses_shapes(layout: str, folders: Path) -> None:
    config, ranks = GPTModule(weights=folders / "whole").config, LAYOUTS[layout][0]
    for message in run(_refused, ranks, layout, config, folders / "other", "strict"):
        assert "score.weight has no counterpart" in message
        assert "weights_keys='log' of a module (--weights-keys log of commands) skips such tensors" in message
    for keys in ("log", "ignore"):
        for message in run(_refused, ranks, layout, config, folders / "wrong", keys):
            assert "'model.head.norm.weight' (model.norm.weight): [33] and [32]" in message


def test_one_device_without_a_strategy(folders: Path) -> None:
    drawn, module = GPTModule(GPTModule(weights=folders / "whole").config, seed=3), None
    drawn.configure_model()
    module = GPTModule(weights=folders / "other", weights_keys="ignore", seed=3)
    module.configure_model()
    assert drawn.model is not None
    assert module.model is not None
    fresh, found = canonical_tensors(drawn.model), canonical_tensors(module.model)
    equal = {f"model.{name}" for name in found if "norm" not in name and torch.equal(found[name], fresh[name])}
    assert equal == set(MISSING.values())


def _resave(folder: Path, path: Path) -> None:
    runner = trainer(MegatronStrategy(), max_steps=1, **OPTIONS)
    runner.fit(WithData(optimizer=ADAM, weights=folder))
    runner.save_checkpoint(path)


def test_a_checkpoint_of_ours_with_other_names(folders: Path, tmp_path: Path) -> None:
    run(_resave, 1, folders / "whole", tmp_path / "a.ckpt")
    config = GPTModule(weights=tmp_path / "a.ckpt").config
    deeper = GPTConfig.from_dict({**config.to_dict(), "num_layers": 3, "tie_embeddings": True})
    ((_, messages, _),) = run(_initial, 1, "one", deeper, tmp_path / "a.ckpt", "log")
    assert "tensors are not in" in messages[0]
    assert "'model.layers.2.mlp.gate.weight'" in messages[0]
    assert "are skipped: 'model.head.output_layer.weight'" in messages[1]


def test_values_that_cannot_be(folders: Path) -> None:
    config = GPTModule(weights=folders / "whole").config
    with pytest.raises(ConfigurationError, match=r"weights_keys='log' says how names .*Give weights"):
        GPTModule(config, weights_keys="log")
    with pytest.raises(ConfigurationError, match=r"weights_keys='warn' is not known; give one of strict, log, ignore"):
        GPTModule(weights=folders / "whole", weights_keys="warn")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"weights_keys='log' the folder weights may not hold all of them"):
        Adapters(rank=2, save_base=False).attach(GPTModule(weights=folders / "other", weights_keys="log"))
    with pytest.raises(ConfigurationError, match=r"weights_keys='log' says how names"):
        EagleModule(folders / "whole", weights_keys="log")
    with pytest.raises(ConfigurationError, match=r"weights_keys='log' says how names"):
        VLMModule("llava_1_5_7b", weights_keys="log")


def test_validation_begins_from_a_folder_with_other_names(folders: Path) -> None:
    """It runs the same model as training begins with."""
    config = GPTModule(weights=folders / "whole").config
    ((fitted, _, _),) = run(_initial, 1, "one", config, folders / "other", "ignore")
    ((found,),) = run(_validated, 1, folders / "other", "ignore")
    assert found.keys() == fitted.keys()
    for name, value in found.items():
        assert np.array_equal(value, fitted[name]), name
    ((message,),) = run(_validated, 1, folders / "other", "strict")
    assert "score.weight has no counterpart" in message


def _validated(weights: Path, keys: Any) -> list[Any]:
    module, held = WithData(optimizer=ADAM, weights=weights, weights_keys=keys), Weights()
    try:
        trainer(
            MegatronStrategy(), callbacks=[held], precision="64-true", **{**OPTIONS, "limit_val_batches": 1}
        ).validate(module)
    except CheckpointError as error:
        return [str(error)]
    return [held.found]


class Weights(pl.Callback):
    """The weights that validation begins with."""

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.found = {f"model.{name}": each.numpy().copy() for name, each in canonical_tensors(module.model).items()}


@pytest.mark.parametrize("keys", ["log", "ignore"])
def test_convert_gives_what_training_begins_with(
    keys: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The same values as a run with the default seed, and the same words."""
    config = GPTModule(weights=folders / "whole").config
    module = GPTModule(weights=folders / "other", weights_keys="ignore")
    module.configure_model()
    assert module.model is not None
    wanted = {f"model.{name}": tensor for name, tensor in canonical_tensors(module.model).items()}
    words = ["convert", str(folders / "other"), str(tmp_path / "a.ckpt"), "--quiet"]
    assert main(words) == 2
    assert "(--weights-keys log of commands) skips such tensors" in capsys.readouterr().err
    assert not (tmp_path / "a.ckpt").exists()
    assert main([*words, "--weights-keys", keys]) == 0
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert opened.tensors.keys() == wanted.keys()
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    opened.fill([Target(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in found.items()])
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert GPTConfig.from_dict(opened.common["model"]["config"]) == config
    assert ("3 tensors are not in" in caplog.text, "2 tensors of" in caplog.text) == ((keys == "log",) * 2)
    assert main(["convert", str(folders / "other"), str(tmp_path / "back"), "--to", "transformers", *words[3:]]) == 2
    back = ["--to", "transformers", "--weights-keys", "ignore", "--quiet"]
    assert main(["convert", str(folders / "other"), str(tmp_path / "back"), *back]) == 0
    assert (
        load_file(tmp_path / "back" / "model.safetensors").keys()
        == load_file(folders / "whole" / "model.safetensors").keys()
    )
    with pytest.raises(CheckpointError, match=r"\(model.norm.weight\): \[33\] and \[32\]"):
        open_model(folders / "wrong", keys="ignore")
    shutil.copytree(folders / "whole", tmp_path / "less")
    tensors = load_file(folders / "whole" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, tmp_path / "less" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.head.output_layer.weight' \(lm_head.weight\) not in .*less"):
        open_model(tmp_path / "less")
    with pytest.raises(ConfigurationError, match=r"weights_keys='log' says .*a\.ckpt is no such folder"):
        open_model(tmp_path / "a.ckpt", keys="log")


def _logits(weights: Path, keys: Any) -> torch.Tensor:
    if dist.is_initialized():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        model = load_divided(weights, ParallelMesh(world_size=ranks, global_rank=rank, tp=ranks), keys=keys)
    else:
        model = load_model(weights, keys=keys)
    tokens = torch.arange(8)
    return model(tokens, PackedSequences.of_lengths([8])).logits.detach()


def test_generation_from_a_folder_with_other_names(folders: Path) -> None:
    module = GPTModule(weights=folders / "other", weights_keys="ignore")
    module.configure_model()
    assert module.model is not None
    wanted = module.model(torch.arange(8), PackedSequences.of_lengths([8])).logits
    torch.testing.assert_close(_logits(folders / "other", "ignore"), wanted)
    for found in run(_logits, 2, folders / "other", "log"):  # half of a matrix is drawn as half of the whole
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="has no counterpart"):
        load_model(folders / "other")
