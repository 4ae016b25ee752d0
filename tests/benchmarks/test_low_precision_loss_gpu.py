from __future__ import annotations

import pytest

from benchmarks.low_precision_loss import SMALL, corpus, train

pytestmark = pytest.mark.gpu


def test_weights_quantized_learn_as_cast_ones_do() -> None:
    text = corpus()
    bf16, tensorwise, primary, delayed = (
        train(recipe, SMALL, 40, text, "cuda", emulate=False)["losses"]
        for recipe in ("bf16", "tensorwise", "tensorwise+primary", "delayed")
    )
    assert tensorwise != bf16
    assert primary != bf16
    for losses in (tensorwise, primary, delayed):
        assert losses[-1] < losses[0] - 1
        assert sum(losses[-10:]) == pytest.approx(sum(bf16[-10:]), rel=0.03)
