import pytest

from megalight.cli.verbs.plot import find_logs, read_curves
from megalight.errors import DataError


def write(folder, text):
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    return folder / "metrics.csv"


def test_curves_of_a_resumed_run_are_joined(tmp_path):
    first = write(tmp_path / "version_0", "epoch,step,train_loss,val_loss,lr\n0,0,4.0,,0.1\n0,1,3.0,3.5,0.1\n0,2,9,,\n")
    second = write(tmp_path / "version_1", "step,train_loss\n2,2.0\n3,1.0\n")
    assert read_curves([first, second]) == {
        "train_loss": ([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0]),
        "val_loss": ([1], [3.5]),
    }
    assert read_curves([first], ["lr"]) == {"lr": ([0, 1], [0.1, 0.1])}
    assert set(find_logs(tmp_path)) == {first, second}
    assert find_logs(first) == find_logs(first.parent) == [first]


def test_what_is_not_there_is_named(tmp_path):
    log = write(tmp_path / "run", "step,lr\n0,0.1\n")
    with pytest.raises(DataError, match=r"no column with 'loss' in its name.*lr"):
        read_curves([log])
    with pytest.raises(DataError, match="no column 'acc'"):
        read_curves([log], ["acc"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no metrics\.csv"):
        find_logs(tmp_path / "empty")
