"""Commands that are forked behave as those that start an interpreter of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreters import environment


def started(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, **options)


def test_it_has_the_folder_streams_variables_and_status_of_its_caller(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['KEY'], sys.argv[1:], input()); sys.exit(7)"
    words = ["python", "-c", code, "-x", "two words"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**environment(), "KEY": "value"}, input="line\n", capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == (f"{tmp_path} value ['-x', 'two words'] line\n", 7)


def test_a_script_a_module_and_the_input(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 3\n")
    script = tmp_path / "script.py"
    script.write_text("import beside, sys\nprint(__name__, __file__, beside.NUMBER, sys.argv)\n")
    assert started("python", "-u", str(script), "1").stdout == f"__main__ {script} 3 ['{script}', '1']\n"
    assert started("python", "-m", "beside", cwd=tmp_path).returncode == 0
    assert started("python", "-", input="class A: pass\nprint(A())\n").stdout.startswith("<__main__.A object")
    assert started("megalight", "--version").stdout.startswith("megalight ")


def test_errors_are_shown() -> None:
    done = started("python", "-c", "import sys; print('first'); missing")
    assert (done.stdout, done.returncode) == ("first\n", 1)
    assert "NameError: name 'missing'" in done.stderr
    assert started("python", "-c", "raise SystemExit('reason')").stderr == "reason\n"
    assert started("python", "-c", "import os; os.kill(os.getpid(), 9)").returncode == -9


def test_its_imports_are_made() -> None:
    assert started("python", "-c", "import sys; assert 'megalight.cli.lightning' in sys.modules").returncode == 0


def test_options_of_the_interpreter_start_a_new_one() -> None:
    assert started("python", "-E", "-c", "import sys; assert 'torch' not in sys.modules").returncode == 0
    assert shutil.which("python", path=environment()["PATH"]) != sys.executable


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    code = (
        "import signal, sys\n"
        "for each in (signal.SIGTERM, signal.SIGINT): signal.signal(each, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True); signal.pause()"
    )
    with subprocess.Popen(["python", "-c", code], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.wait(60) == 5


def test_the_interpreter_of_a_killed_command_is_killed(tmp_path: Path) -> None:
    code = "import signal; print('ready', flush=True); signal.pause()"
    with subprocess.Popen(["python", "-c", code], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ""  # it ends when nobody can write any more
