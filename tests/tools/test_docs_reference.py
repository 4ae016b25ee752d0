"""The reference pages that are made from the code are complete."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import Logger

from megalight import callbacks
from megalight.cli.lightning import MegalightCLI
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.module import MegalightModule
from megalight.nn.moe import MoEConfig
from megalight.strategies import (
    MegatronFSDPStrategy,
    MegatronStrategy,
    MegatronTowersStrategy,
)
from megalight.types import TokenBatch
from tests.support.source import ROOT

reference = import_module("docs_reference")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    found: dict[str, str] = reference.pages()
    return found


def test_every_key_has_a_meaning(pages: dict[str, str]) -> None:
    rows = [line for text in pages.values() for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert not [row for row in rows if row.endswith("|  |")]


def test_every_callback_is_there(pages: dict[str, str]) -> None:
    assert set(re.findall(r"^## (\w+)", pages["reference/callbacks.md"], re.MULTILINE)) >= set(callbacks.__all__)


@pytest.mark.parametrize(
    "cls",
    [MegatronStrategy, MegatronFSDPStrategy, MegatronTowersStrategy],
    ids=lambda cls: cls.__name__,
)
def test_the_parser_knows_the_same_keys(cls: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        MegalightCLI(args=["fit", f"--trainer.strategy={cls.__name__}", "--print_config"])
    parsed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]
    passed = {"accelerator", "checkpoint_io", "precision_plugin", "parallel_devices", "cluster_environment"}
    assert set(parsed) - passed == set(reference.parameters(cls))


def test_nested_keys_are_entered() -> None:
    keys = [key for key, _ in reference.keys(MegatronStrategy, "trainer.strategy")]
    assert "trainer.strategy.recompute.granularity" in keys


PACKAGES = ("megalight", "megalight.strategies", "megalight.optim", "megalight.inference", "megalight.types")
HELPERS = {
    "ContextShare",
    "Totals",
    "inverse",
    "mean",
    "to_device",
    "sample",
    "BlockPool",
    "Cache",
    "ParallelGPT",
    "silence",
}
"""Public names of these packages that are for other subpackages, not for users."""


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_on_the_api_page(package: str) -> None:
    listed = re.findall(r"^::: \S+\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    module = import_module(package)
    names = getattr(module, "_MEMBERS", None) or {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith("megalight.") and not name.startswith("_")
    }
    assert len(names) > 2
    assert not set(names) - set(listed) - HELPERS


def test_words() -> None:
    assert reference._type(int | None) == "int or none"
    assert reference._plain("in ``<root>/logs``, <y>") == "in `<root>/logs`, &lt;y>"  # code is text already
    assert reference._plain("see :class:`~a.b.C` and ``x``, <y>") == "see `C` and `x`, &lt;y>"
    assert reference._first_sentence("One. Two.") == "One."


class Names(Logger):
    """Keeps the names of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    name = "names"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen |= set(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_a_run_logs_what_is_listed(tmp_path: Path) -> None:
    experts = MoEConfig(num_experts=2)
    config = GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=16, max_sequence_length=8, moe=experts)
    ids = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader([TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(2, 8))] * 3, batch_size=None)
    used: list[pl.Callback] = [
        callbacks.Throughput(peak_tflops=1.0, timers=1, stragglers=1.15, every_n_steps=1),
        callbacks.OptimizerMonitor(),
        callbacks.ExpertLoads(each=True),
    ]
    logger = Names()
    trainer = pl.Trainer(
        strategy=MegatronStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=3,
        val_check_interval=3,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        logger=logger,
        callbacks=used,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = GPTModule(config)
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)
    listed = {name for cls in (MegatronStrategy, MegalightModule, *map(type, used)) for name in reference.metrics(cls)}
    patterns = {name: re.compile(re.sub(r"<\w+>", r"[\\w/]+", name)) for name in listed}
    seen = logger.seen - {"epoch"}
    assert not [name for name in seen if not any(pattern.fullmatch(name) for pattern in patterns.values())]
    unseen = [name for name, pattern in patterns.items() if not any(pattern.fullmatch(found) for found in seen)]
    assert unseen == []


def test_what_stands_in_angle_brackets_is_shown(pages: dict[str, str]) -> None:
    cells = [part for text in pages.values() for part in re.split(r"`[^`]*`", text)]
    assert not [part for part in cells if re.search(r"<\w", part)]
    assert "&lt;image>" in pages["reference/commands.md"]
