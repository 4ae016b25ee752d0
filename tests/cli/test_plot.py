import json
import os
from types import SimpleNamespace

import pytest

from megalight.cli.main import main
from megalight.cli.verbs.plot import _lines, comparison, curves, find_logs, panels, parts_of_runs, read_runs
from megalight.errors import DataError

FIRST = "epoch,step,train_loss,val_loss,lr\n0,0,4.0,,0.1\n0,1,3.0,3.5,0.1\n0,2,9,,\n"
SECOND = "step,train_loss,tokens_per_s,grad_norm,memory_gib\n2,2.0,10,0.5,1.25\n3,1.0,30,0.4,1.5\n"


def write(folder, text, name="metrics.csv"):
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def logs(tmp_path):
    first, second = write(tmp_path / "version_0", FIRST), write(tmp_path / "version_1", SECOND)
    os.utime(first.parent, (1, 1))
    return [first, second]


def test_each_run_is_a_curve_with_its_name(logs, tmp_path):
    assert find_logs(tmp_path) == logs
    assert find_logs(logs[0]) == find_logs(logs[0].parent) == logs[:1]
    runs = read_runs([[file] for file in logs])
    assert [run.name for run in runs] == ["version_0", "version_1"]
    assert runs[0].curves["train_loss"] == ([0, 1, 2], [4.0, 3.0, 9.0])
    assert runs[1].curves["train_loss"] == ([2, 3], [2.0, 1.0])
    lines = [(label, style["color"]) for label, style, *_ in _lines(runs, ("train_loss", "val_loss"))]
    assert lines == [("version_0 train_loss", "C0"), ("version_0 val_loss", "C0"), ("version_1 train_loss", "C1")]


def test_a_resumed_run_is_joined_on_request(logs):
    (run,) = read_runs([logs])
    assert run.curves["train_loss"] == ([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0])
    assert run.curves["val_loss"] == ([1], [3.5])
    assert [style["color"] for _, style, *_ in _lines([run], ("train_loss", "val_loss"))] == ["C0", "C1"]


def test_resumed_runs_are_joined_by_their_records(logs, tmp_path):
    other = write(tmp_path / "version_2", SECOND)
    assert parts_of_runs([*logs, other]) == [[logs[0]], [logs[1]], [other]]
    # The second one goes on from a checkpoint of a run elsewhere, the third one from one of the first.
    (logs[1].parent / "run.yaml").write_text("resumed_from: /elsewhere/a.ckpt\n")
    (other.parent / "run.yaml").write_text(f"resumed_from: {logs[0].parent}/checkpoints/a.ckpt\n")
    assert parts_of_runs([*logs, other]) == [[*logs, other]]
    assert parts_of_runs([other]) == [[other]]
    (logs[1].parent / "run.yaml").write_text("not: a record\n")
    assert parts_of_runs([*logs, other]) == [[logs[0], other], [logs[1]]]


def test_names_tell_runs_apart(tmp_path):
    files = [write(tmp_path / name / "version_0", FIRST) for name in ("a", "b")]
    assert [run.name for run in read_runs([[file] for file in files])] == ["a/version_0", "b/version_0"]


def test_json_lines_are_read_too(tmp_path):
    rows = [{"step": 0, "train_loss": 2.5, "epoch": 0}, {"step": 1, "train_loss": "nan"}]
    file = write(tmp_path / "run", "".join(json.dumps(row) + "\n" for row in rows), "metrics.jsonl")
    (run,) = read_runs([find_logs(tmp_path)])
    assert run.curves["train_loss"][1][0] == 2.5
    assert list(run.curves) == ["train_loss"]
    file.write_text('{"step": 1')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1 is not JSON"):
        read_runs([[file]])


def test_panels_are_what_was_logged(logs):
    runs = read_runs([[file] for file in logs])
    assert panels(runs) == {
        "loss (nats per token)": ("train_loss", "val_loss"),
        "learning rate": ("lr",),
        "gradient norm": ("grad_norm",),
        "tokens/s": ("tokens_per_s",),
        "memory (GiB)": ("memory_gib",),
    }
    assert panels(runs, ["lr"]) == {"lr": ("lr",)}
    with pytest.raises(DataError, match=r"no run has logged 'train_los'\. Did you mean 'train_loss'\?"):
        panels(runs, ["train_los"])


def test_experts_have_a_panel_per_metric_and_a_map_per_layer(tmp_path):
    layers, metrics = (1, 3, 10), ("max_load", "min_load", "drop_rate", "aux_loss", "load_0", "load_1")
    names = [f"experts_{layer}/{metric}" for layer in layers for metric in metrics]
    text = "\n".join([",".join(["step", *names]), *(",".join([str(n), *["0.5"] * len(names)]) for n in range(3))])
    logs = [write(tmp_path / name, text) for name in ("one", "two")]
    found = panels(read_runs([logs[:1]]))
    lines = {title: names for title, names in found.items() if not title.startswith("layer ")}
    assert lines == {
        "busiest expert (choices / mean)": tuple(f"experts_{layer}/max_load" for layer in layers),
        "least busy expert (choices / mean)": tuple(f"experts_{layer}/min_load" for layer in layers),
        "dropped choices (share)": tuple(f"experts_{layer}/drop_rate" for layer in layers),
        "aux_loss, by layer": tuple(f"experts_{layer}/aux_loss" for layer in layers),
    }
    assert found["layer 10: choices of each expert / mean"] == ("experts_10/load_0", "experts_10/load_1")
    assert len(found) == 7
    assert panels(read_runs([[file] for file in logs])) == lines
    image = tmp_path / "curves.svg"
    assert main(["plot", str(logs[0]), "-o", str(image)]) == 0
    assert "choices of each expert" in image.read_text()
    # a wanted metric is a curve of each run, also that of an expert
    assert main(["plot", *map(str, logs), "--metric", "experts_3/load_1", "-o", str(image)]) == 0
    # Matplotlib writes text, or a comment beside its outlines, by settings that other tests change
    for name in ("one", "two"):
        assert f"<!-- {name} -->" in image.read_text() or f">{name}<" in image.read_text()


def test_runs_are_compared_at_their_last_common_step(logs):
    rows = [line.split() for line in comparison(read_runs([[file] for file in logs]))]
    assert rows[1] == ["version_0", "3", "9.0000", "3.5000", "-", "-"]
    assert rows[2] == ["version_1", "4", "2.0000", "-", "20", "1.50"]
    assert "train_loss at 2" in comparison(read_runs([[file] for file in logs]))[0]


def test_runs_without_a_common_step_show_their_last_losses(tmp_path):
    logs = [write(tmp_path / name, text) for name, text in (("a", FIRST), ("b", "step,train_loss\n7,0.5\n"))]
    logs.append(write(tmp_path / "c", "step,lr\n0,0.1\n"))
    title, *rows = (line.split() for line in comparison(read_runs([[file] for file in logs])))
    assert title[2:4] == ["last", "train_loss"]
    assert [row[2] for row in rows] == ["9.0000", "0.5000", "-"]


def test_results_without_training_have_no_steps(logs, tmp_path):
    runs = read_runs([[file] for file in [*logs, write(tmp_path / "checked", "step,val_loss\n0,2.5\n")]])
    assert [run.trained for run in runs] == [True, True, False]
    assert [(label, trained) for label, _, trained, _ in _lines(runs, ("val_loss",))] == [
        ("version_0", True),
        ("checked", False),
    ]
    # The losses of the others are compared at the step that they share.
    title, *rows = comparison(runs)
    assert "train_loss at 2" in title
    assert rows[2].split() == ["checked", "-", "-", "2.5000", "-", "-"]
    assert comparison(runs[2:])[1].split()[1] == "-"
    drawn = []
    axes = SimpleNamespace(
        axhline=lambda value, **_: drawn.append(value), plot=lambda steps, *_, **__: drawn.append(steps)
    )
    curves(axes, runs, ("val_loss",))
    assert drawn == [[1], 2.5]


def test_the_command_draws_and_compares(logs, tmp_path, capsys):
    image = tmp_path / "curves.svg"
    assert main(["plot", str(tmp_path), "-o", str(image)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("run")
    assert out[-1] == str(image)
    text = image.read_text()
    for part in ("learning rate", "gradient norm", "tokens/s", "memory (GiB)", "version_0 val_loss", "version_1"):
        assert part in text  # as text, or beside its outlines


def test_what_is_not_there_is_named(tmp_path):
    log = write(tmp_path / "run", "step,accuracy\n0,0.1\n")
    with pytest.raises(DataError, match=r"'train_loss'.*There are: accuracy"):
        panels(read_runs([[log]]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no metrics\.csv or metrics\.jsonl"):
        find_logs(tmp_path / "empty")


def test_images_that_cannot_be_written_are_refused(logs, tmp_path, capsys):
    for name, message in (
        ("curves.pgn", "curves.pgn ends with '.pgn', which names no format of images. Did you mean 'png'?"),
        ("curves", "curves ends with '', which names no format of images. Choose"),
        ("folder.svg", "folder.svg cannot be written (Is a directory: "),
        ("folder.svg/file/curves.svg", "curves.svg cannot be written (File exists: "),
    ):
        (tmp_path / "folder.svg").mkdir(exist_ok=True)
        (tmp_path / "folder.svg" / "file").touch()
        assert main(["plot", str(tmp_path), "-o", str(tmp_path / name)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
