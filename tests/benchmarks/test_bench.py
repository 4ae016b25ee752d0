"""``megalight bench``: the whole way on a tiny CPU row; refusals; what a failing peer leaves behind."""

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench, render
from benchmarks.rows import ROWS
from megalight.cli.main import main
from megalight.cli.verbs.bench import benchmarks
from megalight.errors import ConfigurationError
from tests.support.interpreters import environment


def run(words, folder):
    assert main(["bench", *words, "--out", str(folder)]) == 0
    return json.loads((folder / f"{words[0]}.json").read_text())


@pytest.fixture
def _forked(monkeypatch):
    """Processes of rows need no time for imports."""
    for name in ("PATH", "PYTHON_EXEC"):
        monkeypatch.setenv(name, environment()[name])
    monkeypatch.setattr(sys, "executable", environment()["PYTHON_EXEC"])


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_forked")
def test_a_row_from_end_to_end(tmp_path, capsys):
    result = run(["tiny-cpu", "--steps", "2", "--peers", "hf", "mcore-te"], tmp_path)
    ours, theirs, refused = result["rows"]
    assert result["row"] == "tiny-cpu"
    assert result["command"] == "megalight bench tiny-cpu --peers hf mcore-te"
    assert (ours["peer"], theirs["peer"]) == ("megalight", "hf")
    assert refused == {"peer": "mcore-te", "refused": "megatron-core is not installed"}
    assert ours["checks"]["twin_difference"] < 1e-5
    assert ours["checks"]["twin_losses"][-1] < ours["checks"]["twin_losses"][0] - 0.03
    assert ours["checks"]["difference"] < 1e-6
    for row in (ours, theirs):
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["tokens_per_second"] == pytest.approx(256 / row["seconds"])
        assert row["tflops"] == pytest.approx(ROWS["tiny-cpu"].step.flops_per_token * 256 / row["seconds"] / 1e12)
        (spent,) = row["breakdown_by_rank"]
        assert min(spent[part] for part in ("gemm", "attention", "optimizer", "other")) > 0
        assert 0.3 < spent["accounted"] <= 1.01  # what stands before the first operator is not in it
    out = capsys.readouterr().out
    assert "| megalight | " in out
    assert "mcore-te: refused: megatron-core is not installed" in out
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-cpu.json"]
    assert set(render.collect(tmp_path)["tiny-cpu"]["peers"]) == {"megalight", "hf"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny-cpu-dp2", "tiny-cpu-tp2", "tiny-moe-cpu-ep2"])
def test_a_row_of_two_processes(name, tmp_path):
    ours, *others = run([name], tmp_path)["rows"]
    assert ours["checks"]["twin_difference"] < 1e-5
    for row in (ours, *others):
        assert len(row["breakdown_by_rank"]) == len(row["peak_gib_by_rank"]) == 2
    assert [row["peer"] for row in others] == list(ROWS[name].peers)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_forked")
def test_peers_in_one_call(tmp_path):
    """One's process group does not break the next."""
    out, row = tmp_path / "out.json", replace(ROWS["tiny-cpu-dp2"], step=ROWS["tiny-cpu-dp2"].step.but("steps=1"))
    words = bench.command(row, "megalight", out)
    words[words.index("megalight") : words.index("megalight") + 1] = ["megalight", "fsdp2", "megalight"]
    words.remove("--breakdown")  # torch's profiler and gloo do not agree on when a message ends
    assert bench.call([*words, "--unchecked"], {}, tmp_path / "log", 200.0) is None, (tmp_path / "log").read_text()
    rows = json.loads(out.read_text())["rows"]
    assert [found["peer"] for found in rows] == ["megalight", "fsdp2", "megalight"]
    assert all(found["seconds"] > 0 < found["seconds_alone"] for found in rows)


def test_wrong_losses_are_not_timed(monkeypatch):
    from benchmarks.peers import megalight

    step = ROWS["tiny-cpu"].step
    monkeypatch.setattr(megalight, "train", lambda step, steps, tick, fixed: None)
    monkeypatch.setattr(megalight, "by_hand", lambda step: [2.0])
    monkeypatch.setattr(megalight, "train", lambda step, steps, tick, fixed: tick(Reported(2.001)))
    with pytest.raises(megalight.Wrong, match=r"5\.0e-04"):
        megalight.Runner().check(step)
    monkeypatch.setattr(megalight, "train", lambda step, steps, tick, fixed: tick(Reported(float("nan"))))
    with pytest.raises(megalight.Wrong):
        megalight.Runner().check(step)


class Reported:
    """A strategy after a step."""

    def __init__(self, loss):
        self.report = self
        self.loss = loss


def test_a_failing_peer_leaves_its_words(tmp_path, monkeypatch, capsys):
    code = "import sys; print('loss of memory'); sys.exit('no room')"
    monkeypatch.setattr(bench, "command", lambda row, peer, out: [sys.executable, "-c", code])
    assert bench.run(["tiny-cpu"], out=tmp_path, peers=[]) == 1
    (row,) = json.loads((tmp_path / "tiny-cpu.json").read_text())["rows"]
    assert "no room" in row["failed"]
    assert "no room" in (tmp_path / "tiny-cpu.megalight.log").read_text()
    assert "FAILED megalight, exit code 1" in capsys.readouterr().out


def test_an_interruption_loses_one_peer(tmp_path, monkeypatch):
    """A peer that ends well and writes nothing has failed; those before an interrupted one are kept."""
    said = {"device": "CPU", "rows": [{"peer": "megalight"}]}
    plain = bench.measure

    def measure(row, peer, log, limit):
        if peer == "peft":
            raise KeyboardInterrupt
        return plain(row, peer, log, limit)

    def command(row, peer, out):
        code = f"open({str(out)!r}, 'w').write({json.dumps(said)!r})" if peer == "megalight" else "pass"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "command", command)
    with pytest.raises(KeyboardInterrupt):
        bench.bench("tiny-cpu", ROWS["tiny-cpu"], ["megalight", "hf", "peft"], tmp_path, 60.0)
    result = json.loads((tmp_path / "tiny-cpu.json").read_text())
    assert result["device"] == "CPU"
    assert result["rows"] == [{"peer": "megalight"}, {"peer": "hf", "failed": "no result was written"}]


def test_variables_of_a_launcher_do_not_reach_a_row(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "4")
    code = f"import os; print(sorted(set(os.environ) & set({bench.LAUNCHED!r})))"
    assert bench.call([sys.executable, "-c", code], {}, tmp_path / "log", 30.0) is None
    assert (tmp_path / "log").read_text() == "[]\n"


def test_each_peer_runs_once():
    row = ROWS["tiny-cpu"]
    assert bench.peers_of(row, ["hf", "megalight", "fsdp2", "hf"]) == ["megalight", "hf", "fsdp2"]


def test_files_of_others_do_not_matter_to_a_row_with_another(tmp_path):
    """An aim that is another row's rate reads that row's file alone."""
    (tmp_path / "package.json").write_text("[{}]")
    (tmp_path / "half.json").write_text("{")
    row = next(row for row in ROWS.values() if row.against)
    ours = {"peer": "megalight", "seconds": 1.0, "tflops": 300.0}
    words = render.verdict(row, {"rows": [ours]}, tmp_path)
    assert f"aim {row.against[1]:g} x `{row.against[0]}`" in words


def test_what_hangs_is_ended_with_its_children(tmp_path):
    log = tmp_path / "log"  # a shell starts at once, also on a busy machine
    assert bench.call(["sh", "-c", "sh -c 'echo $$; exec sleep 1000'; true"], {}, log, 4.0) == "not done after 4 s"
    assert gone(log.read_text().strip())


def test_a_row_may_bring_variables(tmp_path, capsys):
    code = "import os; print(os.environ['ROOM'], len(os.environ) > 1)"
    assert bench.call([sys.executable, "-c", code], {"ROOM": "no gaps"}, tmp_path / "log", 30.0) is None
    assert (tmp_path / "log").read_text() == "no gaps True\n"
    assert main(["bench", "llama3-8b-cp4-128k-ring", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ")


def gone(pid):
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_commands_without_running(capsys, tmp_path):
    assert main(["bench", "llama3-8b-pp4", "8b-16l-bf16", "--dry-run", "--steps", "5", "--peers"]) == 0
    four, one = map(shlex.split, capsys.readouterr().out.splitlines())
    assert four[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert four[four.index("--layout") + 1] == "Et*8|t*9|t*9|t*6L"
    assert four[four.index("--steps") + 1] == one[one.index("--steps") + 1] == "5"
    assert Path(one[1]).name == "dense_step.py"


def test_rows_are_listed(capsys):
    assert main(["bench"]) == main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{out}" for name in ROWS)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["8b-16l-bf15"], ["'8b-16l-bf15'", "'8b-16l-bf16'"]),
        (["tiny-cpu", "--peers", "hff"], ["'hff'", "'hf'"]),
        (["tiny-cpu", "--steps", "0"], ["--steps is 0"]),
        (["--peers", "hf", "tiny-cpu"], ["--peers hf tiny-cpu leaves no row", "megalight bench ROW --peers hf"]),
        (["tiny-cpu", "--peers", "hf", "2b-24l"], ["'2b-24l' after --peers is a row"]),
        (["tiny-cpu", "--out", __file__], [f"--out {__file__} cannot be written"]),
    ],
)
def test_refusals_are_clear(words, parts, capsys):
    assert main(["bench", *words]) == 2
    text = capsys.readouterr().err
    assert all(part in text for part in parts), text


def test_too_few_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"'llama3-8b-dp4' needs 4 GPUs; this machine has 2"):
        bench.enough(bench.rows_of(["8b-16l-dp2", "llama3-8b-dp4"]))
    bench.enough(bench.rows_of(["8b-16l-dp2", "tiny-cpu-tp2"]))


def test_without_a_checkout(tmp_path):
    with pytest.raises(ConfigurationError, match="needs the repository"):
        benchmarks((tmp_path,))
