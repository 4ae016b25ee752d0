from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megalight.cli.config_args import ConfigArgs, config_files, find_class, members, read, written_out
from megalight.cli.lightning import MegalightCLI
from megalight.cli.main import main
from megalight.errors import ConfigurationError
from megalight.strategies import MegatronStrategy
from tests.cli.samples import SampleModule, SampleStrategy
from tests.cli.test_strategies import WORDS


def test_words_and_files_are_read_alike(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model:\n  class_path: M\n  init_args:\n    config: {size: 3}\n"
        "trainer:\n  callbacks:\n    - class_path: EMA\n      init_args: {decay: 0.5}\n"
    )
    found = ConfigArgs.read(["-c", str(file), "--trainer.max_steps=3", "--data", "D", "--flag", "--data.path", "x"])
    assert found.values == {
        "model": "M",
        "model.config.size": 3,
        "trainer.callbacks.0": "EMA",
        "trainer.callbacks.0.decay": 0.5,
        "trainer.max_steps": "3",
        "data": "D",
        "flag": "",
        "data.path": "x",
    }


def test_a_broken_file_is_left_to_the_parser(tmp_path):
    (tmp_path / "torn.yaml").write_text("a: [1,\n b: :")
    assert ConfigArgs.read(["-c", str(tmp_path / "torn.yaml"), "-c", str(tmp_path / "absent.yaml")]).values == {}


def test_members_follow_kwargs_to_base_classes():
    class Below(SampleModule):
        def __init__(self, extra: int, **kwargs):
            super().__init__(**kwargs)

    assert list(members(Below)) == ["extra", "config", "learning_rate"]
    assert list(members(SampleStrategy)) == ["tensor_parallel", "sequence_parallel"]


def test_a_value_that_begins_with_a_dot_is_no_class():
    assert find_class(".2") is None


BAD = {
    "twice.yaml": (
        b"trainer:\n  max_steps: 3\n  devices: 1\n  max_steps: 5\n",
        ["line 4", "'trainer.max_steps'", "line 2"],
    ),
    "nested.yaml": (b"a:\n- b: 1\n  b: 2\n", ["'a.0.b'"]),
    "list.yaml": (b"- a\n- b\n", ["holds a list", "mapping"]),
    "value.yaml": (b"abc\n", ["single value"]),
    "empty.yaml": (b"# nothing\n", ["is empty"]),
    "broken.yaml": (
        b"a: [1\nb: 2\n",
        ["line 2 is not valid YAML: 'b: 2': a bracket of line 1 is not closed before it."],
    ),
    "open.yaml": (b"a: [1,\n", ["line 2 is not valid YAML: expected the node content"]),
    "tab.yaml": (b"a:\n\tb: 1\n", ["line 2 is not valid YAML: 'b: 1': it begins with a tab. Indent with spaces."]),
    "left.yaml": (
        b"trainer:\n  devices: 1\n max_steps: 3\n",
        [
            "line 3",
            "'max_steps: 3': it begins in column 2, and the keys of the section that begins in line 1 in column 1.",
        ],
    ),
    "right.yaml": (
        b"a:\n  b: {c: 1}\n    d: 3\n",
        ["line 3", "'d: 3': it begins in column 5, and the keys of the section that begins in line 2 in column 3."],
    ),
    "beside.yaml": (
        b"a:\n  - b: 1\n  c: 3\n",
        ["'c: 3': it cannot stand beside the entries of the list that begins in line 2"],
    ),
    "inline.yaml": (b"a: {b: 1}}\n", ["line 1 is not valid YAML: 'a: {b: 1}}': expected <block end>, but found '}'."]),
    "blank.yaml": (
        b"a:\n  x: 1\n  b:1\n  c: 2\n",
        ["line 3", "'b:1': it has no ': '. Write key: value, with a space after"],
    ),
    "colon.yaml": (b"a\n  b: 1\n", ["line 2", "'b: 1': a key cannot stand there: the line above has a value already"]),
    "alias.yaml": (b"a: *x\n", ["line 1 is not valid YAML: 'a: *x': found undefined alias 'x'."]),
    "byte.yaml": (b"a: \x01\n", ["not valid YAML: unacceptable character"]),
    "binary.bin": (b"\x00\xff\xfe", ["not text", "byte 1"]),
    "folder": (None, ["cannot read", "folder"]),
    "absent.yaml": (b"", ["cannot read"]),
}
PROBE = """
import json, sys
from megalight.cli.main import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, sorted({"torch", "lightning", "numpy"} & set(sys.modules))]))
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "good.yaml").write_text("trainer: {max_steps: 3}\n")
    for name, (content, _) in BAD.items():
        if content is None:
            (tmp_path / name).mkdir()
        elif name != "absent.yaml":
            (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_the_bad_one_among_stacked_files_is_named(name, place, capsys):
    assert main(["fit", "-c", str(place / "good.yaml"), f"--config={place / name}"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert name in text
    for part in BAD[name][1]:
        assert part in text, text


def test_nothing_heavy_is_imported(place):
    words = json.dumps(["fit", "-c", str(place / "list.yaml")])
    out = subprocess.run([sys.executable, "-c", PROBE, words], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [2, []]


def test_anchors_and_merges_are_allowed(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {lr: 1}\none: {<<: *base, lr: 2}\n")
    assert read(str(path)) == yaml.safe_load(path.read_text()) == {"base": {"lr": 1}, "one": {"lr": 2}}


def test_a_flag_without_a_file():
    with pytest.raises(ConfigurationError, match="-c needs a file"):
        list(config_files(["--x=1", "-c"]))
    assert list(config_files(["-c", "a", "--config=b", "-x", "--config", "c"])) == ["a", "b", "c"]


@pytest.mark.parametrize("flag", [["--export_hf=out/a b"], ["--export_hf", "out/a b"]])
def test_one_more_callback(flag: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {callbacks: [{class_path: megalight.callbacks.GarbageCollection}]}")
    words = written_out("fit", [*flag, "-c", str(file)])
    cli = MegalightCLI(args=[*WORDS, *words], run=False)
    names = [type(each).__name__ for each in cli.trainer.callbacks]
    assert {"GarbageCollection", "TransformersExport"} <= set(names)
    (export,) = (each for each in cli.trainer.callbacks if type(each).__name__ == "TransformersExport")
    assert export.folder == "out/a b"


@pytest.mark.parametrize("words", [[], ["--resume.optimizer=saved"], ["--resume.optimizer", "configured"]])
def test_what_a_run_goes_on_with(words: list[str]) -> None:
    strategy = MegalightCLI(args=[*WORDS, *written_out("fit", words)], run=False).trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    assert strategy.checkpoints.resume_optimizer == ("saved" if "--resume.optimizer=saved" in words else "configured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--export_hf"], "--export_hf needs a folder"),
        (["fit", "--export_hf", "--trainer.max_steps=1"], "--export_hf needs a folder"),
        (["fit", "--export_hf=a", "--export_hf=b"], "2 times (a, b)"),
        (["validate", "--export_hf=a"], "validate trains none"),
        (["fit", "--resume.optimizer"], "--resume.optimizer needs a word"),
        (["test", "--resume.optimizer=saved"], "test has none"),
        (["fit", *WORDS, "--resume.optimizer=old"], "resume_optimizer"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_other_words_are_still_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words that the flag became pass the checks of the command."""
    assert main(["fit", f"--export_hf={tmp_path / 'out'}", "--model.wight=1"]) == 2
    assert "wight" in capsys.readouterr().err
