from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megalight.errors import BackendError, ConfigurationError
from megalight.ops import backends_of, norm, registries, use_backends
from megalight.ops.common import choose_measured
from megalight.ops.norm import reference_rms_norm


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    use_backends(**dict.fromkeys(registries(), "auto"))


def test_auto_becomes_the_named_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    spec = norm.NormSpec("cpu", x.dtype, weight.dtype, 8)
    norm.rms_norm(x, weight, 1e-5)
    assert norm.RMS_NORM.select(spec).name == "torch"
    use_backends(rms_norm="reference")
    assert norm.RMS_NORM.select(spec).fn is reference_rms_norm
    assert choose_measured(norm.RMS_NORM, spec, "auto") is reference_rms_norm, "the earlier choice is forgotten"
    assert norm.LAYER_NORM.select(spec).name == "torch"
    use_backends(rms_norm="auto")
    assert norm.RMS_NORM.select(spec).name == "torch"


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no op 'rmsnorm'; known: .*Did you mean 'rms_norm'"):
        use_backends(rmsnorm="reference")
    with pytest.raises(BackendError, match=r"rms_norm has no backend 'reverence'.*Did you mean 'reference'"):
        use_backends(rms_norm="reverence")


def test_a_backend_that_cannot_serve_is_not_replaced() -> None:
    use_backends(attention="cudnn")
    spec, example = registries()["attention"]
    with pytest.raises(BackendError, match="backend 'cudnn' of attention cannot serve"):
        spec.select(example)


def test_the_table_holds_every_op() -> None:
    table = backends_of("cpu")
    assert set(table) == set(registries())
    assert ("reference", None) in [(backend.name, reason) for backend, reason in table["adam"]]
