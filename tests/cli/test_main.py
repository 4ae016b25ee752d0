import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalight import __version__
from megalight.cli.main import OPTIONS, main, short_help
from megalight.cli.named_recipes import recipes
from megalight.cli.verbs import TRAINER_VERBS, VERBS, load
from megalight.cli.verbs.doctor import _print_plugins

LIGHT = [["--help"], ["--version"], *([verb, "--help"] for verb in (*TRAINER_VERBS, *VERBS))]
PROBE = """
import json, sys
from megalight.cli.main import main
codes = [main(words) for words in json.loads(sys.argv[1])]
heavy = sorted({"torch", "lightning", "numpy", "rich", "yaml"} & set(sys.modules))
print(json.dumps([codes, heavy]))
"""

HERE = str(Path(__file__).parent)


def test_help_of_light_verbs_loads_nothing_heavy():
    out = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(LIGHT)], capture_output=True, text=True, check=True
    ).stdout
    codes, heavy = json.loads(out.splitlines()[-1])
    assert codes == [0] * len(LIGHT)
    assert heavy == []


def test_overview_names_every_verb(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for verb in (*TRAINER_VERBS, *VERBS):
        assert f"  {verb} " in text


def test_the_page_for_a_bug_report(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("megalight.cli.verbs.doctor.load_plugins", lambda: {"fine": None, "broken": "no such file"})
    assert main(["--version", "--verbose"]) == 0
    printed = capsys.readouterr().out
    lines = dict(line.split("  ", 1) for line in printed.splitlines())
    found = {name.strip(): text.strip() for name, text in lines.items()}
    assert found["megalight"] == __version__
    assert found["torch"] == torch.__version__
    assert found["plugin broken"] == "no such file"
    assert found["plugin fine"] == "loaded"
    assert found["$NCCL_DEBUG"] == "INFO"
    assert "secret" not in printed
    assert len(printed.splitlines()) < 60


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megalight {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_describe_themselves_in_one_line(verb):
    assert len(load(verb).DESCRIPTION.splitlines()[0]) < 90


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_a_trainer_verb_alone_shows_what_to_type(verb, capsys):
    assert main([verb]) == 2
    text = capsys.readouterr().err
    assert f"megalight {verb} -c recipes/demo.yaml" in text
    assert len(text.splitlines()) <= 4


def test_the_example_needs_no_repository(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["fit"]) == 2
    text = capsys.readouterr().err
    prepare, recipe, run = (line.split() for line in text.splitlines()[1:-1])
    assert recipe[2] in recipes()
    assert recipe[-1] == run[3] == "mine.yaml"
    assert prepare[1] == "prepare"
    assert prepare[4] == recipes()[recipe[2]].configuration["data"]["init_args"]["data"]
    assert main(["validate"]) == 2
    assert "megalight validate -c mine.yaml --ckpt_path=last" in capsys.readouterr().err


def test_lightning_is_imported_without_transformers(tmp_path):
    """One of its metrics takes names from there."""
    for path, text in {
        "lightning/__init__.py": "",
        "lightning/pytorch.py": "from transformers import AutoModel",
        "transformers.py": "print('imported')",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    code = """
import sys, types
sys.path.insert(0, sys.argv[1])
sys.modules["megalight.cli.lightning"] = types.SimpleNamespace(run=print)
from megalight.cli.main import main
main(["--debug", "fit", "--trainer.devices=1"])
assert "lightning.pytorch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "['fit', '--trainer.devices=1']\n"


@pytest.mark.parametrize("words", [["fit", "--help"], ["--help"], ["--version"]])
def test_a_reader_that_ends_early_is_no_error(words):
    """As in ``megalight fit --help | head -3``."""
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-m", "megalight", *words], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["fitt"], ["unknown command 'fitt'", "'fit'"]),
        (["doctor", "--devise", "cpu"], ["'--devise'", "'--device'", "megalight doctor --help"]),
        (["doctor", "--dev", "cpu"], ["unknown argument '--dev'"]),
        (["prepare", "texts", "--outptu", "x"], ["unknown argument '--outptu'. Did you mean '--output'?"]),
        (["prepare", "x.txt", "-o", "y", "--tokenizer=absent", "--workers=0"], ["error: --workers is 0"]),
        (["doctor", "--device", "cpux"], ["cpux", "'cpu'"]),
        (["doctor", "--layout", "tq=2"], ["'tq'", "'tp'"]),
        (["doctor", "--layout", "tp"], ["tp has no degree in --layout; write tp=2."]),
        (["doctor", "--layout", "tp2"], ["unknown axis 'tp2'", "Write degrees, --layout tp=2,dp=4"]),
        (["doctor", "--layout", "tp=0"], ["tp='0'", "at least 1"]),
        (["doctor", "--layout", "tp=2,ep=3"], ["3"]),
        (["prepare"], ["--output"]),
        (["plot", "absent"], ["absent", "metrics.csv"]),
        (["generate", __file__, "--prompt", "x"], ["test_main.py is no checkpoint: neither a folder of Megalight nor"]),
        (["quantize", "out", "-c", "mine.yaml"], ["'-c' is an option of megalight validate", "... -- -c RECIPE"]),
        (["cache-logits", "m", "--data.seed=1", "-o", "o"], ["'--data.seed=1' is an option of megalight fit"]),
        (
            ["cache-logits", HERE, "-k4", "-o", "o"],
            ["there is nothing after --", "megalight cache-logits ... -- -c", "RECIPE"],
        ),
        (
            ["cache-logits", HERE, "-k4", "-o", "o", "--", "fit"],
            ["'fit' comes after --", "options of megalight fit alone"],
        ),
        (["cache-logits", HERE, "-k4", "-o", "o", "--", "--trainer.max_step=3"], ["unknown key 'trainer.max_step'"]),
        (
            ["cache-logits", "m", "-k4", "-o", "o", "--", "--trainer.max_steps=3"],
            ["m is not a finished", "nothing is there"],
        ),
        (["cache-logits", HERE, "-k4", "-o", __file__, "--", "--trainer.max_steps=3"], ["is a file; name a folder"]),
        (["quantize", "o", "--", "-c", "absent.yaml"], ["absent.yaml"]),
        (["bench", "tiny-cpu", "--timeout=-1"], ["--timeout is -1 seconds; it must be above 0"]),
        (["launch", "--slurm", "--", "fit", "--nodes", "2"], ["'--nodes' comes after --", "Put it before"]),
        (["launch", "--slurm", "--", "fit", "-c", "a", "--", "fit", "-c", "b"], ["several commands", "for each"]),
        (["launch", "--slurm", "--time=noon", "--", "fit"], ["--time is 'noon'", "24:00:00"]),
    ],
)
def test_errors_are_short_and_helpful(words, parts, capsys):
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "error:" in text
    assert len(text.splitlines()) <= 6
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(("verb", "end"), [("cache-logits", "teacher -- -c RECIPE ..."), ("launch", " -- fit ...")])
def test_usage_shows_what_follows_the_dashes(verb, end, capsys):
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.partition("\n\n")[0].endswith(end)


def test_doctor_shows_where_ranks_stand(capsys):
    assert main(["doctor", "--layout", "tp=2, dp=2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["3", "0", "1", "0", "1"] in rows  # rank, pp, dp, cp, tp


def doctor(capsys, *words) -> dict[str, str]:
    """Return the lines of the summary by their names."""
    assert main(["doctor", *words]) == 0
    return {line[:10].strip(): line[10:].strip() for line in capsys.readouterr().out.splitlines()}


def test_doctor_says_in_ten_lines_what_is_here(capsys, monkeypatch, tmp_path):
    """Distributions and packages differ in their names, as those of PIL and modelopt do."""
    (tmp_path / "test_oven.py").write_text("raise ImportError('a doctor imports nothing')")
    metadata = tmp_path / "bakers_tools-1.2.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bakers-tools\nVersion: 1.2.3\n")
    (metadata / "top_level.txt").write_text("test_oven\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        "megalight.cli.verbs.doctor.EXTRAS", {"test_oven": "bakery", "no_kiln": "kiln", "no_jar": "jar"}
    )
    lines = doctor(capsys, "--device=cpu")
    assert [*lines] == [
        *("verdict", "versions", "devices", "precision", "ranks talk"),
        *("ops", "plugins", "optional", "missing", "more"),
    ]
    assert lines["verdict"].startswith("ready to train on ")
    assert f"torch {torch.__version__}" in lines["versions"]
    assert f"CPU ({os.cpu_count()} cores" in lines["devices"]
    assert "gloo" in lines["ranks talk"]
    assert re.fullmatch(r"\d+ on cpu, by reference \d+, torch \d+, .*", lines["ops"])
    assert lines["optional"] == "test_oven 1.2.3"
    assert lines["missing"] == "pip install 'megalight[kiln,jar]'"


def test_doctor_is_not_satisfied_without_a_core_package(capsys, monkeypatch):
    monkeypatch.setattr("megalight.cli.verbs.doctor.CORE", ("torch", "no_such_kiln"))
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verdict    not ready: missing no_such_kiln. Next: pip install no_such_kiln"
    assert len(lines) == 10
    monkeypatch.setattr("megalight.cli.verbs.doctor.version", lambda name: None)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().out.startswith("not ready: missing torch, no_such_kiln.")


@pytest.mark.parametrize(("cuda", "part"), [(None, "built without CUDA"), ("13.0", "torch cannot use it. Next:")])
def test_doctor_sees_a_gpu_that_torch_does_not(cuda, part, capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os.path, "exists", lambda path, exists=os.path.exists: path == "/dev/nvidiactl" or exists(path))
    assert part in doctor(capsys)["verdict"]


def test_doctor_lists_backends_with_reasons(capsys):
    assert main(["doctor", "--all"]) == 0
    text = capsys.readouterr().out
    assert "attention" in text
    assert "reference" in text
    assert "needs tensors on cuda" in text
    assert "plugins" in text
    rows = [line for line in text.splitlines() if line.startswith(("apex", "flash_attn", "transformer_engine"))]
    assert len(rows) >= 5, "optional packages, and the backends of every plugin that is in the tree"
    assert "'megalight[te]'" in text, "brackets are no markup"


def test_doctor_shows_what_became_of_each_plugin(capsys, monkeypatch):
    loaded = {"cold": "RuntimeError: no oven", "idle": None, "bakery": None}
    monkeypatch.setattr("megalight.cli.verbs.doctor.load_plugins", lambda: loaded)
    reasons = [("bakery", "fast", op, "needs [flour]") for op in ("gated", "adam")]
    _print_plugins("cuda", [*reasons, ("bakery", "fast", "attention", "can serve")])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows[-4:] == [
        "cold RuntimeError: no oven",
        "idle loaded; adds no backend",
        "fast gated, adam needs [flour]",
        "fast attention can serve",
    ]


def test_prepare_writes_token_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("to be or not to be " * 200)
    words = ["prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "corpus"), "--train-tokenizer"]
    assert main([*words, "--vocab-size=262", "--workers=1", "-q"]) == 0
    assert "tokens" in capsys.readouterr().out
    assert (tmp_path / "corpus.bin").is_file()
    assert (tmp_path / "corpus.idx").is_file()


def test_prepare_names_a_missing_input(tmp_path, capsys):
    assert main(["prepare", str(tmp_path / "none"), "-o", str(tmp_path / "c"), "--train-tokenizer", "-q"]) == 2
    assert "none" in capsys.readouterr().err


def test_an_interrupted_command_ends_in_one_line(monkeypatch, capsys):
    def interrupted(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("megalight.cli.main._dispatch", interrupted)
    monkeypatch.delenv("MEGALIGHT_DEBUG", raising=False)
    assert main(["fit", "-c", "recipe.yaml"]) == 130
    assert capsys.readouterr().err == "megalight: error: interrupted.\n"


WORDS = ["--model=GPTModule", "--data=GPTDataModule"]
VALUES = {"X": "1", "N": "1", "NAME": "auto", "PRESET": "llama3_8b", "PATH": "x", "CLASS": None, "PREFIX": None}


def test_every_option_is_known_to_the_parser(tmp_path, capsys):
    """Each option, with a value of its kind, parses; ``--print_config`` then ends the command."""
    options = [option for section in OPTIONS.values() for option in section if option.startswith("--")]
    words = []
    for option in options:
        key, _, value = option.partition("=")
        if value and (given := VALUES.get(value, value)) and key not in ("--trainer.accelerator", "--trainer.strategy"):
            words.append(f"{key}={given if key != '--trainer.precision' else 'bf16-mixed'}")
    words = [word for word in words if "model.config=" not in word]
    assert len(words) > 20
    assert main(["fit", *WORDS, *words, "--data.data=x", "--print_config"]) == 0
    text = capsys.readouterr().out
    assert "lr: 1" in text


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_the_page_fits_on_a_screen(verb, capsys):
    assert main([verb, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.strip() == short_help(verb)
    assert len(page.splitlines()) < 50
    assert max(map(len, page.splitlines())) < 130
    assert ("--trainer.max_steps" in page) == (verb == "fit")
