"""The image, the dev container and the files for clouds name extras, files and options that exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from megalight.cli.config_args import check_files
from megalight.cli.main import main
from tests.support.source import ROOT

CLOUD = ROOT / "examples" / "cloud"
FILES = [ROOT / "Dockerfile", ROOT / ".devcontainer" / "devcontainer.json", *sorted(CLOUD.iterdir())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r"(?:'\.|source)\[([\w,-]+)\]'", text)
    assert {*extras.split(",")} <= known.keys()
    for copied in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())


def test_files_parse() -> None:
    json.loads(FILES[1].read_text())
    assert (CLOUD / "cloud-init.yaml").read_text().startswith("#cloud-config\n")
    assert {"write_files", "runcmd"} <= yaml.safe_load((CLOUD / "cloud-init.yaml").read_text()).keys()


def test_the_task_of_skypilot_has_known_options(monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load((CLOUD / "skypilot.yaml").read_text())
    words = shlex.split(task["run"].replace("~/sky_workdir/", "").replace('"$SKYPILOT_NUM_NODES"', "1"))
    words = [
        word.replace("$SKYPILOT_NUM_GPUS_PER_NODE", "8") for word in words[words.index("fit") + 1 :] if word.strip()
    ]
    monkeypatch.chdir(ROOT)
    check_files(words)
    assert main(["fit", *words, "--print_config"]) == 0
