"""The pictures of the documentation: what a terminal shows, and images of it."""

from __future__ import annotations

import sys
from importlib import import_module
from xml.etree import ElementTree

import pytest

pictures = import_module("docs_pictures")


def test_a_terminal_shows_what_was_written_last() -> None:
    assert pictures.screen("one\r\ntwo 50%\rtwo 100%\r\n") == ["one", "two 100%", ""]
    assert pictures.screen("long line\rshort") == ["shortline"]
    assert pictures.screen("long line\r\x1b[Kshort") == ["short"]
    # a second bar below the first, which is then cleared
    assert pictures.screen("first\n\rsecond\r      \x1b[A\rFirst") == ["First", ""]
    assert pictures.screen("\x1b[1mbold\x1b[0m") == ["bold"]


def test_programs_see_the_terminal_and_its_width() -> None:
    program = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns)"
    assert pictures.screen(pictures.in_terminal([sys.executable, "-S", "-c", program], 97)) == ["True 97", ""]


def test_a_program_that_fails_is_told() -> None:
    with pytest.raises(SystemExit, match="failed with 3:\nno\r\n"):
        pictures.in_terminal([sys.executable, "-S", "-c", "print('no'); raise SystemExit(3)"], 80)


def test_an_image_holds_the_lines() -> None:
    root = ElementTree.fromstring(pictures.as_svg(["$ a < b", "  |###   |"]))
    assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")] == ["$ a < b", "  |###   |"]


def test_the_picture_of_the_page_has_what_a_bar_shows() -> None:
    text = (pictures.ASSETS / "bar.svg").read_text()
    for part in ("megalight fit -c recipes/demo.yaml", "loss=", "lr=", "grad_norm=", "left=", "tok/s="):
        assert part in text
