"""The example of two models on ranks of their own: one process, or several under torchrun, with the same loss."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.interpreters import environment
from tests.support.source import ROOT

EXAMPLE = str(ROOT / "examples" / "bridge.py")
LEARNED = 0.1
"""Validation loss below which it has learned; untrained it is at 2.8."""


def loss(*command: str) -> float:
    run = subprocess.run(
        [*command, "--accelerator", "cpu"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    (told,) = re.findall(r"^validation loss: (.*)$", run.stdout, re.MULTILINE)
    return float(told)


@pytest.fixture(scope="module")
def one_device() -> float:
    return loss("python", EXAMPLE)


def test_it_learns(one_device: float) -> None:
    assert one_device < LEARNED


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(3, "--encoder-ranks 1", id="one encoder, two decoders"),
        pytest.param(
            4,
            "--encoder-ranks 2 --decoder-tensor-parallel 2",
            marks=pytest.mark.full,
            id="two encoders, one split decoder",
        ),
    ],
)
def test_ranks_of_their_own_give_the_same_loss(ranks: int, words: str, one_device: float) -> None:
    command = ("torchrun", "--standalone", "--nproc-per-node", str(ranks), EXAMPLE, *words.split())
    assert loss(*command) == pytest.approx(one_device, rel=1e-3)
