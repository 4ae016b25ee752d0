"""``megalight serve``: the lines of the README, and what SIGTERM does."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megalight.cli.main import main
from megalight.errors import MegalightError
from megalight.serving import AsyncLLM
from tests.support import interpreters
from tests.support.source import ROOT

pytest.importorskip("uvicorn")


def test_the_lines_of_the_page_and_a_drain(folder: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    lines = re.search(r"```bash\n(megalight serve .*?)```", page, re.DOTALL)
    assert lines is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(folder)
    script = lines[1].replace(":8000", f":{port}").replace("runs/first &", f"runs/first --port {port} --device cpu &")
    environment = {**interpreters.environment(), "SERVED": "1"}
    wait = "echo; echo $!; wait $! && echo ended: $?"
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", f"{script}\n{wait}"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        answer, process = json.loads(server.stdout.readline()), int(server.stdout.readline())
        try:
            assert answer["choices"][0]["finish_reason"] in ("stop", "length")
            assert 1 <= answer["usage"]["completion_tokens"] <= 16
            body = {"model": "first", "prompt": "user", "max_tokens": 80, "ignore_eos": True, "stream": True}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Authorization": "Bearer any"}
            )
            with urllib.request.urlopen(request, timeout=20) as stream:
                stream.readline()
                subprocess.run(["kill", "-TERM", str(process)], check=True)
                rest = stream.read()
            assert rest.endswith(b"data: [DONE]\n\n"), "the stream that runs ends by itself"
            assert server.wait(20) == 0
            assert server.stdout.read() == "ended: 0\n"
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGKILL)
                subprocess.run(["kill", "-KILL", str(process)], check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "no API key"),
        (["--max-queue", "0"], "--max-queue is 0"),
        (["--idle-timeout", "nan"], "must be at least 1"),
        (["--port", "99999"], "port"),
    ],
)
def test_what_cannot_be_served_is_told(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGALIGHT_API_KEY", raising=False)
    assert main(["serve", str(folder), "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--device", "cpu", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_server_ends_with_what_ended_its_engine(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megalight.serving.server import serve

    llm, statuses = AsyncLLM(folder, device="cpu"), []

    def fails() -> None:
        raise RuntimeError("no memory is left")

    def ask(port: int) -> None:
        body = json.dumps({"model": "small", "prompt": "a"}).encode()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=60)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)

    monkeypatch.setattr(llm.served.loop.engine, "step", fails)
    asking: list[threading.Thread] = []

    def ready(port: int) -> None:
        asking.append(threading.Thread(target=ask, args=(port,)))
        asking[0].start()

    with pytest.raises(MegalightError, match="the engine has stopped: no memory is left"):
        serve(llm, "small", port=0, ready=ready)
    asking[0].join()
    assert statuses == [503]
    assert "RuntimeError: no memory is left" in caplog.text
