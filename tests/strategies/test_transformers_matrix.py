"""Every kind of language model of ``transformers`` x layouts: in with equal logits, and out again unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.inference import ParallelGPT
from megalight.models.hugging_face.export import export
from megalight.models.stored import diff, open_model
from megalight.strategies import MegatronStrategy
from megalight.types import PackedSequences
from tests.models import test_gpt_deepseek_weights as deepseek
from tests.models import test_gpt_gemma_llama4 as gemma_llama4
from tests.models import test_gpt_mamba_weights as mamba
from tests.models import test_gpt_oss as oss
from tests.strategies.test_transformers_layouts import KINDS, Fixed, batch
from tests.strategies.test_transformers_layouts import LAYOUTS as DIVIDED
from tests.strategies.training import ADAM
from tests.support.environment import trainer
from tests.support.reference_gpt import relative_error
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"one": (1, {}), **DIVIDED}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def _listed(kind: str) -> Any:
    torch.manual_seed(1)
    name, options = KINDS[kind]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**options, **EAGER)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


EVEN = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}
"""Heads and layers that two ranks can divide."""

MODELS: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: _listed(kind) for kind in KINDS},  # type: ignore[misc]
    "deepseek_v3": lambda: deepseek.theirs("deepseek_v3", **EVEN),
    "kimi_k2": lambda: deepseek.theirs("kimi_like", **EVEN),
    "gpt_oss": oss.theirs,
    "gemma2": lambda: gemma_llama4.theirs("gemma2"),
    "gemma3": lambda: gemma_llama4.theirs("gemma3"),
    "llama4": lambda: gemma_llama4.theirs("scout"),
    "llama4_interleaved": lambda: gemma_llama4.theirs("maverick"),
    "mamba2": lambda: mamba.theirs("mamba2", num_hidden_layers=4),
    "mamba2_tied": lambda: mamba.theirs("mamba2_tied", num_hidden_layers=4),
    "nemotron_h": lambda: mamba.theirs("nemotron_h", hybrid_override_pattern="ME*-ME"),
}

THEIRS = {"nemotron_h": {"use_cache": False, "use_mamba_kernels": False, "time_step_min": 1e-6}}
"""Settings of their code alone, without which it computes something else, or nothing; see the tests of the kind."""


def _logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(batch().tokens).logits
    return found


def _in_and_out(layout: str, source: Path, target: Path) -> Tensor:
    """Read a folder under a layout, write it again from all ranks, and return the logits in between."""
    strategy = MegatronStrategy(**LAYOUTS[layout][1])
    runner = trainer(strategy, precision="64-true", limit_val_batches=1, use_distributed_sampler=False)
    runner.validate(Fixed(None, optimizer=ADAM, weights=source), verbose=False)
    runner.save_checkpoint(target.with_suffix(".ckpt"))
    export(open_model(target.with_suffix(".ckpt")), target)
    assert strategy.parallel_model is not None
    tokens = batch().tokens
    return ParallelGPT(strategy.parallel_model)(tokens.flatten(), PackedSequences.of_uniform(*tokens.shape)).logits


def check(kind: str, layout: str, root: Path) -> None:
    model = MODELS[kind]()
    expected = _logits_of(model)
    model.save_pretrained(root / "in")
    for logits in run(_in_and_out, LAYOUTS[layout][0], layout, root / "in", root / "out", timeout=240):
        assert relative_error(logits.view_as(expected), expected) < 1e-5
    # The bias of a router stays in float32, in which its values are exact.
    assert [each for each in diff(root / "in", root / "out") if each.relative != 0] == []
    config = transformers.AutoConfig.from_pretrained(root / "out", **EAGER, **THEIRS.get(kind, {}))
    again = type(model).from_pretrained(root / "out", config=config, dtype=torch.float64)
    assert relative_error(_logits_of(again), expected) < 1e-5


DEFAULT = (("deepseek_v3", "pp2"), ("nemotron_h", "tp2"))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in DEFAULT else pytest.mark.full)
        for kind in MODELS
        for layout in LAYOUTS
    ],
)
def test_in_and_out_with_equal_logits(kind: str, layout: str, tmp_path: Path) -> None:
    """23 kinds x 4 layouts: 92 configurations."""
    check(kind, layout, tmp_path)
