"""The pages for users of Megatron-LM and NeMo name keys that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megalight.cli.explain import _class_in, members
from megalight.cli.lightning import MegalightCLI
from megalight.cli.trainer import MegalightTrainer
from megalight.data.gpt.module import GPTDataModule
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from tests.source import ROOT


def rows(page: str) -> list[tuple[str, str]]:
    """Return both cells of the rows whose first cell begins with code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", text, re.MULTILINE)


ROWS = {page: rows(page) for page in ("from-megatron.md", "from-nemo.md")}
KEY = re.compile(r"`((?:trainer|model|data)(?:\.[a-z_]+)+|seed_everything|ckpt_path)`")
KEYS = {key for found in ROWS.values() for _, cell in found for key in KEY.findall(cell.partition("(")[0])}
ROOTS: dict[str, Any] = {
    "trainer.strategy": MegatronStrategy,
    "trainer": MegalightTrainer,
    "model.config": GPTConfig,
    "model": GPTModule,
    "data": GPTDataModule,
}
TOP = ("seed_everything", "ckpt_path")


def exists(key: str) -> bool:
    """Whether the key is an argument of the class that its beginning names, or of a class in its annotation."""
    if key in TOP:
        return True
    root = next((root for root in ROOTS if key.startswith(root + ".")), None)
    if root is None:
        return False
    cls: Any = ROOTS[root]
    for part in key[len(root) + 1 :].split("."):
        known = members(cls) if cls is not None else {}
        if part not in known:
            return False
        cls = _class_in(known[part])
    return True


def test_the_tables_are_found() -> None:
    assert len(ROWS["from-megatron.md"]) > 80
    assert len(ROWS["from-nemo.md"]) > 35
    assert len(KEYS) > 80


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_exists(key: str) -> None:
    assert exists(key)
    assert not exists(key + "x")


def test_top_keys_are_the_commands() -> None:
    class Parsed(MegalightCLI):
        def instantiate_classes(self) -> None:
            self.known = {action.dest for action in self._subcommand_parsers["fit"]._actions}
            raise SystemExit(0)

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except SystemExit:
                return

    assert set(TOP) <= Parsed(args=["fit", "--model=tests.cli.samples.SampleModule"]).known
