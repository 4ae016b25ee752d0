from __future__ import annotations

import pytest
import torch

from megalight.ops.ssd import SSD, SSDSpec
from tests.ops.checks import check_ssd, check_ssd_continued

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [[512], [5, 1, 260, 333], [128, 128], [127, 1, 200]])
@pytest.mark.parametrize("sizes", [(16, 2, 64, 128), (6, 3, 20, 100), (8, 1, 128, 16), (8, 1, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_equals_the_reference(lengths: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from megalight.ops.ssd import triton

    check_ssd(triton, "cuda", dtype, lengths, sizes)


@pytest.mark.parametrize("lengths", [[1] * 9, [1, 1, 5, 260, 1, 64], [333]])
@pytest.mark.parametrize("sizes", [(16, 2, 64, 128), (6, 3, 20, 100), (8, 1, 128, 16), (8, 1, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_go_on(lengths: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from megalight.ops.ssd import continued

    check_ssd_continued(continued, "cuda", dtype, lengths, sizes)


def test_triton_is_chosen() -> None:
    assert SSD.select(SSDSpec("cuda", torch.bfloat16, 64, 128)).name == "triton"
    assert SSD.select(SSDSpec("cuda", torch.float32, 64, 128)).name == "reference"
    assert SSD.select(SSDSpec("cuda", torch.bfloat16, 256, 128)).name == "reference"
