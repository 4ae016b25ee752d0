"""Every kind of GPT of ``transformers`` in ours: equal logits, losses and gradients, and the way back."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")
from tests.models import (
    test_gpt_deepseek_v2_weights,
    test_gpt_deepseek_weights,
    test_gpt_gemma_llama4,
    test_gpt_mamba_weights,
    test_gpt_moe_weights,
    test_gpt_qwen3_next_weights,
)
from tests.models.beside_transformers import assert_equal, assert_round_trip, ours_of

FILES = (
    test_gpt_moe_weights,
    test_gpt_deepseek_weights,
    test_gpt_deepseek_v2_weights,
    test_gpt_gemma_llama4,
    test_gpt_mamba_weights,
    test_gpt_qwen3_next_weights,
)
"""Each has ``MODELS``, and ``theirs(name)`` that builds one. Some have ``published``, which gives tensors the names of
published files, and ``exact``, which lets theirs compute in float64."""
KINDS = [(file, name) for file in FILES for name in file.MODELS]


@pytest.mark.parametrize(("file", "name"), KINDS, ids=[name for _, name in KINDS])
def test_a_kind_is_the_same_in_ours(
    file: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = file.theirs(name)
    ours, files = ours_of(model, tmp_path)
    if hasattr(file, "published"):
        files = file.published(files)
    # Several kinds with experts and no other marks can say the same.
    kind = model.config.model_type if file is test_gpt_moe_weights else None
    assert_round_trip(model, ours, files, kind)
    if hasattr(file, "exact"):
        file.exact(monkeypatch)
    assert_equal(model, ours, tmp_path)
