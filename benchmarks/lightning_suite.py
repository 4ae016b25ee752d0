"""Run Lightning's own tests with MegatronStrategy in place of the default strategy, and judge each one that fails.

git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning CHECKOUT
python benchmarks/lightning_suite.py CHECKOUT --work /tmp/suite --out tests/results/lightning.md

Tests that fail run once more without the strategy: only those that pass there count. These run a third time with a
``torch.load`` that reads our folders (and a call of ``torch.save`` for each save): those that pass then only expected a
checkpoint to be one file. The rest is held
to ``KNOWN``, by the test and its message; what nobody has judged is a real difference.

Each file of tests runs in a process of its own. Its results are kept in the work folder, so that a second call goes on
where the first one stopped. The suite needs ``cloudpickle`` and ``pytest-timeout``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDERS = ["trainer", "loops", "callbacks", "checkpointing", "core", "models/test_hooks.py", "tuner"]
"""What is run, under ``tests/tests_pytorch``: all that trains, saves, logs or calls hooks."""

RESULTS, HOW = "SUITE_RESULTS", "SUITE_HOW"
"""Environment variables: the file to write to, and which of ``WAYS`` to run."""

WAYS = ("ours", "plain", "folders")
"""With our strategy; without it; with ours and a ``torch.load`` that reads folders."""

LIMIT, TEST_LIMIT = 1500, 200
"""Seconds for one file of tests, and for one test."""

ONE_FILE = "a checkpoint is expected to be one file: they pass if `torch.load` reads the folder"
KNOWN = {
    r"isinstance\(<megalight.*SingleDeviceStrategy": "asks for the class of Lightning's default strategy",
    r"precision='16-true' is not supported": "refused: `16-true`",
    r"KeyError: 'SLURM_": "SLURM's environment without its variables, which every strategy of several ranks asks for",
    r"Is a directory": "opens or writes a checkpoint as one file, by itself",
    r"Invalid cross-device link": "lets every rename fail; a checkpoint is published by a rename within its folder",
    r"test_strict_loading.*mock": "counts calls of `load_state_dict`; tensors are read straight into the parameters",
    r"'world_size' of 'MegatronStrategy'": "sets `strategy.world_size`, a property of strategies of several ranks",
    r"assign a gradient of size '\[0\]'": "calls Lightning's private loop after `fit`, when its engine is closed",
    r"is of type (builtins\.type|abc\.ABCMeta), which a checkpoint": "refused: classes in a checkpoint",
    r"the strategy is not set up, so there is no model": "refused: saving before there is a model",
    r"\[True\]: (_pickle.Unpickling|AssertionError: Model should be)": "reads a checkpoint over HTTP, as one file",
}
"""Pattern of the test and its message, as ``TEST: MESSAGE`` -> why it fails."""


# ------------------------------------------------------------------ inside pytest, as its plugin


def pytest_configure(config: Any) -> None:
    """Make MegatronStrategy what Lightning chooses where the user names no strategy."""
    config.addinivalue_line("markers", "flaky: the mark of pytest-rerunfailures, which is not needed here")
    if os.environ.get(HOW) in (None, "plain"):
        return
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    from megalight.strategies import MegatronStrategy

    choose = _AcceleratorConnector._choose_strategy

    def chosen(connector: Any) -> Any:
        strategy = choose(connector)
        alone = type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu"
        return MegatronStrategy() if alone else strategy

    _AcceleratorConnector._choose_strategy = chosen
    if os.environ[HOW] == "folders":
        read_folders()


def read_folders() -> None:
    """Let folders pass for files: where they are read, and where tests ask whether they are one and count saves."""
    import torch
    from lightning.fabric.utilities import cloud_io
    from lightning.pytorch.core import saving

    from megalight.strategies import MegatronStrategy

    load, lightnings, save, is_file = torch.load, cloud_io._load, MegatronStrategy.save_checkpoint, os.path.isfile

    def is_folder(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.exists(os.path.join(path, "manifest.json"))

    def saved(strategy: Any, entries: Any, path: Any, storage_options: Any = None) -> None:
        save(strategy, entries, path, storage_options)
        torch.save({}, io.BytesIO())  # tests count the calls

    def asked(path: Any) -> bool:
        by_test = "tests_pytorch" in sys._getframe(1).f_code.co_filename  # our own code must not be told so
        return is_file(path) or (by_test and is_folder(path))

    torch.load = lambda path, *rest, **more: as_file(path) if is_folder(path) else load(path, *rest, **more)
    cloud_io._load = lambda path, *rest, **more: as_file(path) if is_folder(path) else lightnings(path, *rest, **more)
    saving.pl_load = cloud_io._load
    os.path.isfile = asked
    MegatronStrategy.save_checkpoint = saved


def as_file(path: Any) -> dict[str, Any]:
    """Return what a single file of Lightning would hold, but for the tensors of sharded optimizers."""
    import torch

    from megalight import checkpoint
    from megalight.parallel.source import Target

    saved = checkpoint.open(path)
    entries = dict(saved.common)
    sharded, whole = entries.pop("optimizer", None), entries.pop("unsharded_optimizers", None)
    if sharded is not None:
        whole = [{"state": {}, "param_groups": [{**group["options"], "params": []} for group in sharded["groups"]]}]
    names = [name for name in saved.tensors if name.startswith("model.")]
    values = {
        name: torch.empty(saved.tensors[name].shape, dtype=getattr(torch, saved.tensors[name].dtype)) for name in names
    }
    targets = [Target(name, tuple(value.shape), (0,) * value.ndim, value) for name, value in values.items()]
    saved.fill(targets, strict=False)
    entries["state_dict"] = {name.removeprefix("model."): value for name, value in values.items()}
    return entries if whole is None else {**entries, "optimizer_states": whole}


def pytest_runtest_logreport(report: Any) -> None:
    """Write one line for each test that is over, and the reason if it failed."""
    if report.when != "call" and report.passed:
        return
    why = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr or ""))
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "why": why}) + "\n")


# ------------------------------------------------------------------ outside of pytest


def run(checkout: Path, tests: list[str], results: Path, how: str) -> dict[str, dict[str, str]]:
    """Run tests of one file in a process of its own, unless that was done before; return test -> its last record."""
    if not results.exists():
        results.parent.mkdir(parents=True, exist_ok=True)
        here = Path(__file__).resolve().parent
        paths = [here, here.parent, checkout / "tests", os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), HOW: how}
        # Written elsewhere first: a file of results means that all of it was run.
        unfinished = results.with_suffix(".unfinished")
        unfinished.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "lightning_suite", "-p", "no:cacheprovider"]
        command += ["--timeout", str(TEST_LIMIT), *tests]
        environment |= {RESULTS: str(unfinished), "CUDA_VISIBLE_DEVICES": ""}
        with results.with_suffix(".log").open("w") as output:
            try:
                code = subprocess.run(
                    command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT
                ).returncode
                # 0: all pass, 1: some fail, 5: there are none.
                if code not in (0, 1, 5):
                    sys.exit(f"{' '.join(command)} ended with {code}; see {output.name}")
            except subprocess.TimeoutExpired:
                print(f"{results.name}: stopped after {LIMIT} s", flush=True)
        unfinished.rename(results)
    return {record["test"]: record for record in map(json.loads, results.read_text().splitlines())}


def done(results: Path) -> Path:
    """Return the file that exists when the tests of a file have run in all ways that they need."""
    return results.with_suffix(".done")


def failed(records: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return test -> message of those that failed."""
    return {test: record["why"] for test, record in records.items() if record["outcome"] == "failed"}


def judged(test: str, why: str) -> str | None:
    """Return why a test fails, as far as ``KNOWN`` tells."""
    return next((reason for pattern, reason in KNOWN.items() if re.search(pattern, f"{test}: {why}", re.DOTALL)), None)


def report(ran: Counter[str], differ: dict[str, tuple[str, str | None]], left_out: list[str]) -> str:
    """Return the page: counts, and each test that differs with its reason.

    Args:
        ran: numbers of tests by outcome, and those that fail without the strategy too.
        differ: test -> message and reason.
        left_out: files that were not run.
    """
    where = ", ".join(FOLDERS) + (f", but not {', '.join(left_out)}" if left_out else "")
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "torch", "pytest"))
    groups: dict[str, list[str]] = {}
    for test, (_, reason) in sorted(differ.items()):
        groups.setdefault(reason or "real differences", []).append(test)
    lines = [
        "# Lightning's own tests under MegatronStrategy",
        "",
        f"`python benchmarks/lightning_suite.py CHECKOUT`, on a CPU ({platform.machine()}): {versions}. Run: {where}.",
        "",
        f"{ran['tests']} tests: {ran['passed']} pass, {ran['skipped']} are skipped, {ran['elsewhere']} fail also "
        f"without the strategy, and {len(differ)} pass without it and fail with it:",
        "",
        "| tests | why |",
        "| --- | --- |",
        *(f"| {len(tests)} | {reason} |" for reason, tests in sorted(groups.items(), key=lambda each: -len(each[1]))),
    ]
    for reason, tests in groups.items():
        lines += ["", f"## {reason[0].upper()}{reason[1:]}", "", *(f"- `{test}`" for test in tests)]
    return "\n".join(lines) + "\n"


def files(root: Path, only: str) -> Iterable[Path]:
    """Return the files of tests."""
    found = [path for folder in FOLDERS for path in sorted((root / folder).rglob("test_*.py")) or [root / folder]]
    return [path for path in found if only in str(path)]


def main() -> None:
    """Run, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for results of single files")
    parser.add_argument("--only", default="", help="part of the path of test files")
    parser.add_argument("--finished", action="store_true", help="run nothing: take the files that were run")
    parser.add_argument("--out", type=Path, help="page to write")
    arguments = parser.parse_args()
    root = arguments.checkout / "tests" / "tests_pytorch"
    ran: Counter[str] = Counter()
    differ: dict[str, tuple[str, str | None]] = {}
    left_out: list[str] = []
    for path in files(root, arguments.only):
        name = str(path.relative_to(root)).replace("/", "__") + ".jsonl"
        places = {way: arguments.work / way / name for way in WAYS}
        if arguments.finished and not all(place.exists() for place in (places["ours"], done(places["ours"]))):
            left_out.append(name.removesuffix(".jsonl").replace("__", "/"))
            continue
        ours = run(arguments.checkout, [str(path)], places["ours"], "ours")
        bad = failed(ours)
        plain = run(arguments.checkout, list(bad), places["plain"], "plain") if bad else {}
        mine = {test: why for test, why in bad.items() if plain.get(test, {}).get("outcome") == "passed"}
        read = run(arguments.checkout, list(mine), places["folders"], "folders") if mine else {}
        ran.update(tests=len(ours), elsewhere=len(bad) - len(mine))
        ran.update(record["outcome"] for record in ours.values())
        for test, why in mine.items():
            short = test.partition("tests_pytorch/")[2]
            one_file = read.get(test, {}).get("outcome") == "passed"
            # What still fails with a file is judged by that message.
            told = why if one_file else read.get(test, {}).get("why", why)
            differ[short] = (told, ONE_FILE if one_file else judged(short, told))
        done(places["ours"]).touch()
        print(f"{name.removesuffix('.jsonl')}: {len(ours)} tests, {len(mine)} differ", flush=True)
    for test, (why, reason) in differ.items():
        if reason is None:
            print(f"not judged: {test}: {why[:300]}")
    if arguments.out is not None:
        arguments.out.write_text(report(ran, differ, left_out))


if __name__ == "__main__":
    main()
