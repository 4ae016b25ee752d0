from __future__ import annotations

import pytest

from megalight.models.gpt.config import GPTBackendConfig, NormConfig
from megalight.models.gpt.mixer_config import AttentionConfig, PositionConfig
from megalight.parallel.context.attention import ContextOptions
from tests.parallel.context.parity import check, gpt_errors
from tests.support.workers import run

PACKED = (2, 21, ((3, 14, 4), (20, 1)))
ROWS = (2, 16, None)
ODD_ROWS = (3, 13, None)
VARIANTS = {
    "gqa": {"num_kv_heads": 2, "attention": AttentionConfig(qkv_bias=True)},
    "mqa_qk_norm_window": {
        "num_kv_heads": 1,
        "attention": AttentionConfig(qk_norm=True, window=3, window_pattern=(True, False), softcap=5.0),
    },
    "mqa_sinks_window": {
        "num_kv_heads": 1,
        "attention": AttentionConfig(window=3, window_pattern=(True, False), softmax="learnable"),
    },
    "gpt2": {
        "tie_embeddings": True,
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "norm": NormConfig(kind="layer"),
        "position": PositionConfig(kind="learned"),
        "max_sequence_length": 20,
    },
    "odd_heads_sdpa": {"num_heads": 3, "num_kv_heads": 3, "backends": GPTBackendConfig(attention="sdpa")},
}


@pytest.mark.parametrize(
    ("kind", "variant", "batch", "tp", "sequence_parallel", "world"),
    [
        pytest.param("all_to_all", "gqa", ROWS, 1, False, 2, marks=pytest.mark.full),
        ("all_to_all", "mqa_qk_norm_window", PACKED, 1, False, 4),
        pytest.param("all_to_all", "gpt2", PACKED, 2, True, 4, marks=pytest.mark.full),
        ("all_to_all", "gqa", ODD_ROWS, 2, True, 4),
        ("all_gather", "gqa", PACKED, 2, True, 4),
        pytest.param("all_gather", "gqa", ODD_ROWS, 1, False, 4, marks=pytest.mark.full),
        pytest.param("all_gather", "mqa_qk_norm_window", PACKED, 2, False, 4, marks=pytest.mark.full),
        ({"*layers.0.*": "all_gather"}, "gpt2", ROWS, 1, False, 2),
        pytest.param("ring", "gqa", PACKED, 2, True, 4, marks=pytest.mark.full),
        ("ring", "mqa_sinks_window", PACKED, 2, True, 4),
        ("ring", "gpt2", ODD_ROWS, 1, False, 2),
        ("auto", "odd_heads_sdpa", ROWS, 1, False, 2),
        ("all_to_all_ring", "gqa", PACKED, 1, False, 4),
        ({"*layers.1.*": "all_to_all_ring", "*": "all_gather"}, "gpt2", ODD_ROWS, 1, False, 4),
    ],
)
def test_gpt_equals_one_device(kind, variant: str, batch: tuple, tp: int, sequence_parallel: bool, world: int) -> None:
    options = ContextOptions(kind, inner=2 if "all_to_all_ring" in str(kind) else None)
    check(run(gpt_errors, world, options, tp, sequence_parallel, VARIANTS[variant], batch))


@pytest.mark.parametrize("kind", [pytest.param("all_gather", marks=pytest.mark.full), "all_to_all", "ring"])
def test_bidirectional(kind: str) -> None:
    check(run(gpt_errors, 4, ContextOptions(kind), 2, True, VARIANTS["gqa"], PACKED, False))
