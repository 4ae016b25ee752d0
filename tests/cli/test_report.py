import errno
import os

import pytest

from megalight.cli import report
from megalight.cli.report import Parser, reported, tell
from megalight.errors import DataError, LayoutError


def test_long_messages_are_cut_to_a_screen(capsys):
    tell("megalight x", "\n".join(f"line {i} " + "word " * 60 for i in range(40)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) < 140
    assert "--debug" in lines[-1]


def test_errors_that_all_ranks_share_are_told_by_rank_zero(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"), reported("megalight fit"):
        raise LayoutError("tp is 3")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("orphaned", "told"), [(False, True), (True, False)])
def test_one_ranks_own_error_is_told_unless_rank_zero_fails_too(orphaned, told, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(report, "PATIENCE_SECONDS", 0.2)
    if orphaned:  # the process that launched this one, rank 0, has gone
        monkeypatch.setattr(os, "getppid", lambda: report._PARENT + 1)
    with pytest.raises(SystemExit, match="2"), reported("megalight fit"):
        raise DataError("torn file on this node")
    assert ("megalight fit [rank 1]: error: torn file on this node" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("choose one with text_key (--text-key).", "choose one with --text-key."),
        ("append none with append_eod=False (--no-eod).", "append none with --no-eod."),
        ("the text holds it; name another one (--image-token).", None),
        ("train a tokenizer with it (--special-tokens).", None),
        ("train on all messages (--train-on all).", None),
    ],
)
def test_messages_name_the_flag_in_place_of_the_argument_alone(told, shown, capsys):
    with pytest.raises(SystemExit, match="2"), reported("megalight prepare"):
        raise DataError(told)
    assert capsys.readouterr().err == f"megalight prepare: error: {shown or told}\n"


def test_errors_that_are_not_the_users_come_with_their_traceback():
    with pytest.raises(ZeroDivisionError), reported("megalight fit", OSError):
        _ = 1 / 0


@pytest.mark.parametrize(
    ("number", "name", "text"),
    [
        (errno.ENOSPC, None, "the disk is full. Free"),
        (errno.ENOSPC, "a.bin", "the disk is full: a.bin. Free"),
        (errno.EFBIG, None, "a file is larger than this shell or the disk allows. Raise the limit (ulimit -f)"),
        (errno.EDQUOT, None, "your quota of the disk is used up. Free"),
    ],
)
def test_a_full_disk_is_told_in_words(number, name, text, capsys, monkeypatch):
    monkeypatch.delenv("MEGALIGHT_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stop, reported("megalight x", OSError):
        raise OSError(number, "no words", name)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"), [("--row=3", ""), ("--ot", " Did you mean '--out'?"), ("--hlep", " Did you mean '--help'?")]
)
def test_only_near_options_are_named(word, hint, capsys):
    parser = Parser(prog="megalight x")
    parser.add_argument("--out")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([word])
    told = capsys.readouterr().err
    assert hint in told
    assert ("Did you mean" in told) == bool(hint)
