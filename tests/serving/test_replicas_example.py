"""The example of two replicas with a client."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megalight.inference import SamplingParams
from megalight.serving import LLM
from tests.support import interpreters
from tests.support.source import ROOT

pytest.importorskip("zmq")
pytest.importorskip("msgspec")


def test_two_replicas_and_a_client(folder: Path, tmp_path: Path) -> None:
    endpoint, prompts = f"ipc://{tmp_path}/engines", ["user: hello", "assistant: ", "naïve"]

    def start(name: str, *words: str, **options: int) -> subprocess.Popen[str]:
        command = ["python", str(ROOT / "examples" / "replicas" / f"{name}.py"), *words]
        environment = {**interpreters.environment(), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **options)  # type: ignore[call-overload, no-any-return]

    started = [start("coordinator", endpoint), *(start("replica", str(folder), endpoint) for _ in range(2))]
    try:
        client = start("client", endpoint, str(folder), *prompts, stdout=subprocess.PIPE)
        started.append(client)
        said, _ = client.communicate(timeout=100)
        assert [process.wait(30) for process in started] == [0] * 4
    finally:
        for process in started:
            process.kill()
    llm = LLM(folder, device="cpu")
    found = []
    for number, prompt in enumerate(prompts):
        ids = llm.served.words.encode(prompt)
        (output,) = llm.generate(ids, SamplingParams(), max_new_tokens=32, seed=number)
        found.append(f"{prompt!r} -> {output.text!r}")
    assert sorted(said.splitlines()) == sorted(found)
