from __future__ import annotations

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops.cast_flat import cast_flat
from megalight.ops.quantize import Scheme, cast

SCHEME = Scheme("e4m3")


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
def test_quantized_values_are_those_of_the_matrix(rounded: torch.dtype) -> None:
    """A rank's part lies anywhere in the matrix, and its largest value is not that of the whole."""
    matrix = torch.randn(6, 50)
    amax = matrix.to(rounded).float().abs().amax()
    exact, _ = cast(matrix.to(rounded), SCHEME, None, amax=amax)
    assert exact is not None
    data, largest = torch.empty(300, dtype=torch.float8_e4m3fn), torch.zeros(())
    for part in (slice(0, 77), slice(77, 77), slice(77, 300)):
        cast_flat(data[part], matrix.view(-1)[part], SCHEME, amax, rounded, largest=largest)
    assert largest == amax
    assert torch.equal(data.view(torch.uint8), exact.data.view(torch.uint8).view(-1))


def test_a_backend_that_cannot_serve_says_why() -> None:
    with pytest.raises(BackendError, match="triton"):
        cast_flat(
            torch.empty(3, dtype=torch.uint8), torch.ones(3), SCHEME, torch.ones(()), torch.float32, backend="triton"
        )
