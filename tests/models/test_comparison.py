"""``megalight inspect`` of folders of ``transformers``, and how they differ from each other and from checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalight.cli.main import main
from megalight.models.stored import diff
from tests.models.test_gpt_hugging_face import theirs

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of transformers, and the same model as our checkpoint. GPT-2 fuses and transposes its weights."""
    root = tmp_path_factory.mktemp(request.param)
    theirs(request.param).float().save_pretrained(root / "theirs")
    assert main(["convert", str(root / "theirs"), str(root / "ours.ckpt"), "--quiet"]) == 0
    return root / "theirs", root / "ours.ckpt"


def changed(folder: Path, target: Path, **options: Any) -> tuple[Path, str]:
    """A copy of a folder: a fused or plain weight times 1.5, one in bfloat16, one without a canonical name."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "layers.1.mlp.down" in key or "h.1.mlp.c_proj.weight" in key)
    tensors[name] = tensors[name] * 1.5
    norm = next(key for key in tensors if key.endswith(("model.norm.weight", "ln_f.weight")))
    tensors[norm] = tensors[norm].bfloat16()
    save_file({**tensors, "score.weight": torch.ones(2)}, target / "model.safetensors")
    return target, name


def test_a_folder_is_shown(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(saved[0])
    assert main(["inspect", folder, "--norms"]) == 0
    text = capsys.readouterr().out
    tensors = load_file(saved[0] / "model.safetensors")
    assert f"{len(tensors)} tensors" in text
    assert text.count("norm ") == len(tensors)
    assert main(["inspect", folder, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: each["shape"] for name, each in shown["tensors"].items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert main(["inspect", folder, "--depth", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < len(text.splitlines())
    assert main(["inspect", folder, "--verify"]) == 2
    assert "have no checksums" in " ".join(capsys.readouterr().err.split())


def test_a_folder_and_its_checkpoint_are_equal(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, ours = map(str, saved)
    for one, other in ((folder, ours), (ours, folder), (folder, folder)):
        assert main(["inspect", one, "--diff", other]) == 0
        assert capsys.readouterr().out == "the tensors are equal\n"


def test_what_differs_is_named(saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, ours = saved
    other, _ = changed(folder, tmp_path / "other")
    assert main(["inspect", str(ours), "--diff", str(other), "--json"]) == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found.keys() == {"model.layers.1.mlp.down.weight", "model.head.norm.weight", "model.score.weight"}
    assert found["model.layers.1.mlp.down.weight"]["relative"] == pytest.approx(0.5)
    assert found["model.head.norm.weight"]["theirs"] == "[24] bfloat16"
    assert (found["model.score.weight"]["ours"], found["model.score.weight"]["theirs"]) == (None, "[2] float32")
    # Tensors without a canonical name are compared, too.
    again, _ = changed(folder, tmp_path / "again")
    assert diff(other, again) == []
    tensors = load_file(again / "model.safetensors")
    save_file({**tensors, "score.weight": torch.full((2,), 3.0)}, again / "model.safetensors")
    (difference,) = diff(other, again)
    assert (difference.name, difference.relative) == ("model.score.weight", pytest.approx(2.0))


def test_a_model_of_no_family_is_shown_but_not_compared(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved[0], tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "odd"}))
    assert main(["inspect", str(tmp_path / "odd")]) == 0
    assert "model_type odd" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "odd"), "--diff", str(saved[1])]) == 2
    assert "model_type is 'odd'" in " ".join(capsys.readouterr().err.split())
