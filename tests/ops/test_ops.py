from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megalight.ops import backends_of
from megalight.ops.common import cuda_why_not, triton_why_not, wide


def test_tables_name_every_backend_with_its_reason() -> None:
    for device in ("cpu", "cuda"):
        tables = backends_of(device)
        assert {"attention", "rms_norm", "gated", "rotate_qkv", "weight_gradient", "adam"} <= set(tables)
        for op, rows in tables.items():
            assert any(reason is None for _, reason in rows), op
            assert any(backend.name == "reference" for backend, _ in rows), op


def test_importing_ops_imports_no_torch() -> None:
    code = "import sys, megalight.ops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_triton_needs() -> None:
    assert "cuda" in (cuda_why_not("cpu") or "")
    assert triton_why_not("cpu", torch.bfloat16) is not None
    assert "float64" in (triton_why_not("cuda", torch.float64) or "")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_wide(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert wide(dtype) == expected
