import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from megalight.cli.main import main
from megalight.data.tokenizer import Tokenizer
from megalight.inference import TextGenerator
from megalight.models.gpt.module import GPTModule
from tests.cli.samples import PROBE
from tests.inference.test_text import TEXT, build, save


@pytest.fixture
def saved(tmp_path):
    folder = Tokenizer.train([TEXT], 264).save(tmp_path / "tokenizer")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    save(tmp_path / "c", build(), files=files)
    return str(tmp_path / "c")


def test_generate_writes_what_the_library_writes(saved, capsys, monkeypatch):
    sampling = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 5}
    (expected,) = TextGenerator.from_checkpoint(saved).complete(["ab"], **sampling)
    words = ["generate", saved, "-n", "6", "-t", "0.8", "--top-k", "9", "--top-p", "0.9", "--seed", "5"]
    assert main([*words, "--prompt", "ab"]) == 0
    assert capsys.readouterr().out == f"ab{expected}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab"))
    assert main(words) == 0
    assert capsys.readouterr().out == f"ab{expected}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert main(words) == 2
    assert "the standard input is not UTF-8 text" in capsys.readouterr().err
    # an argument of the shell that is not UTF-8, as Python reads it
    assert main([*words, "--prompt", "ab\udcff"]) == 2
    assert "a text is not Unicode: character 2 is" in capsys.readouterr().err


def test_generate_completes_a_file_of_prompts(saved, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n{"prompt": "ab", "max_new_tokens": 2, "id": 7, "log_probs": true}\n')
    writer = TextGenerator.from_checkpoint(saved)
    words = ["generate", saved, "--prompts", str(file), "-n", "6", "--top-k", "9", "--seed", "5"]
    assert main([*words, "--cache-tokens", "48", "--max-sequences", "2", "--step-tokens", "1"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    (expected,) = writer.complete(["ab"], max_new_tokens=6, top_k=9, seed=5)
    assert first == {"prompt": "ab", "completion": expected, "reason": "length"}
    (expected,) = writer.complete(["ab"], max_new_tokens=2, top_k=9, seed=6)
    assert (second["id"], second["completion"], len(second["log_probs"])) == (7, expected, 2)


def test_generate_prints_all_lines_and_fails_if_a_request_failed(saved, tmp_path, capsys):
    model, tokenizer = build(), Tokenizer.load(tmp_path / "tokenizer")
    with torch.no_grad():
        model.embed.word.weight[tokenizer.encode("#")] = torch.nan
    save(tmp_path / "nan", model, files={path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()})
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "#"}\n{"prompt": "ab"}\n')
    words = ["--prompts", str(file), "-n", "6", "-t", "0"]
    assert main(["generate", str(tmp_path / "nan"), *words]) == 2
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert first == {"prompt": "#", "completion": "", "reason": "error"}
    (expected,) = TextGenerator.from_checkpoint(saved).complete(["ab"], max_new_tokens=6, temperature=0)
    assert second == {"prompt": "ab", "completion": expected, "reason": "length"}
    assert "1 of 2 requests ended with an error: their logits hold NaN or infinity" in " ".join(err.split())


def test_generate_answers_a_file_of_prompts(saved, tmp_path, capsys):
    file, template = tmp_path / "prompts.jsonl", tmp_path / "template"
    file.write_text('{"prompt": "ab"}\n')
    template.write_text("{% for m in messages %}the {{ m.content }}.{% endfor %}")
    words = ["generate", saved, "--prompts", str(file), "-n", "6", "-t", "0", "--chat", "--chat-template"]
    assert main([*words, str(template)]) == 0
    (expected,) = TextGenerator.from_checkpoint(saved).complete(["the ab."], max_new_tokens=6, temperature=0)
    assert json.loads(capsys.readouterr().out) == {"prompt": "ab", "completion": expected, "reason": "length"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step-tokens", "4", "-p", "a"], "--step-tokens is for a file of prompts; give --prompts, too."),
        (["--prompts", "FILE", "-p", "a"], "--prompt does not go with --prompts; leave one of them out."),
        (["--prompts", "FILE", "--draft", "d"], "--draft does not go with --prompts"),
        (["--prompts", "FILE", "--cache-tokens", "0"], "--cache-tokens is 0; it must be at least 1."),
        (["--prompts", "FILE"], "FILE:1 has no key 'prompt'."),
        (["--prompts", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_files_of_prompts_are_checked_before_the_weights(saved, tmp_path, capsys, monkeypatch, words, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"seed": 1}\n')
    monkeypatch.setattr(TextGenerator, "from_checkpoint", lambda *_, **__: pytest.fail("the weights are read"))
    assert main(["generate", saved, *[word.replace("FILE", str(file)) for word in words]]) == 2
    assert message.replace("FILE", str(file)) in " ".join(capsys.readouterr().err.split())


def test_inspect_shows_tree_totals_and_norms(saved, capsys):
    assert main(["inspect", saved]) == 0
    plain = capsys.readouterr().out
    assert "embed" in plain
    assert "norm " not in plain
    assert main(["inspect", saved, "--norms"]) == 0
    assert "norm " in capsys.readouterr().out
    assert main(["inspect", saved, "--depth", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < len(plain.splitlines())


def test_a_runs_folder_means_its_newest_checkpoint(saved, capsys):
    runs = Path(saved).parent
    save(runs / "older", build(), files={})
    os.rename(saved, runs / "x")
    save(runs / "run" / "c", build(), files={"tokenizer.json": (runs / "x" / "files" / "tokenizer.json").read_bytes()})
    assert main(["generate", str(runs / "run"), "-n", "2", "-p", "ab"]) == 0
    assert str(runs / "run" / "c") in capsys.readouterr().err
    assert main(["inspect", str(runs)]) == 0
    assert f"{runs / 'run' / 'c'}: " in capsys.readouterr().out


def test_a_single_file_takes_the_tokenizer_of_its_run(saved, capsys):
    folder = Path(saved).parent
    module = GPTModule(build().config)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    module.configure_model()
    (folder / "run" / "checkpoints").mkdir(parents=True)
    file = folder / "run" / "checkpoints" / "a.ckpt"
    trainer.save_checkpoint(file)
    assert main(["generate", str(file), "-n", "2", "-p", "ab"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    shutil.copy(folder / "tokenizer" / "tokenizer.json", folder / "text.tokenizer.json")
    given = {"data": {"class_path": "GPTDataModule", "init_args": {"data": str(folder / "text")}}}
    (folder / "run" / "config.yaml").write_text(json.dumps(given))
    assert main(["generate", str(file), "-n", "2", "-p", "ab"]) == 0
    assert f"reading the tokenizer of the run, {folder / 'text.tokenizer.json'}" in capsys.readouterr().err


def test_norms_of_branches_are_shown(saved, capsys):
    assert main(["inspect", saved, "--norms"]) == 0
    whole = [float(line.split("norm ")[1]) for line in capsys.readouterr().out.splitlines() if "norm " in line]
    assert main(["inspect", saved, "--norms", "--depth", "1"]) == 0
    branches = [float(line.split("norm ")[1]) for line in capsys.readouterr().out.splitlines() if "norm " in line]
    assert len(branches) < len(whole)
    assert math.hypot(*branches) == pytest.approx(math.hypot(*whole), rel=1e-4)


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_what_is_no_checkpoint_is_named(verb, tmp_path, capsys):
    assert main([verb, str(tmp_path), *(["-p", "a"] if verb == "generate" else [])]) == 2
    assert "not a finished Megalight checkpoint" in capsys.readouterr().err


def test_sampling_out_of_range_is_refused(saved, capsys):
    assert main(["generate", saved, "-p", "a", "--top-p", "1.5"]) == 2
    assert "top_p is 1.5" in capsys.readouterr().err


def test_inspect_verifies_compares_and_writes_json(saved, tmp_path, capsys):
    assert main(["inspect", saved, "--verify"]) == 0
    assert capsys.readouterr().out == "every byte is as it was saved\n"
    assert main(["inspect", saved, "--diff", saved, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["inspect", saved, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "fully_reshardable"
    file = next((tmp_path / "c" / "data").iterdir())
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    assert main(["inspect", saved, "--verify"]) == 1
    assert f"data/{file.name}: " in capsys.readouterr().out


def test_a_checkpoint_that_is_not_there_is_told_without_torch(tmp_path):
    commands = [["convert", "none", "out"], ["merge", "none", "-o", "out"], ["adapters", "none", "-o", "out"]]
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(commands), cwd=tmp_path, capture_output=True, text=True
    )
    answers, heavy = json.loads(done.stdout)
    assert heavy == []
    assert [code for code, _ in answers] == [2, 2, 2]
    assert all("none is not a finished Megalight checkpoint: nothing is there" in text for _, text in answers)
