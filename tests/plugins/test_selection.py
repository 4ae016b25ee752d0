"""Plugins of this repository as the registry finds them: through the entry points of the installed distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalight.callbacks import CUDAGraph
from megalight.errors import BackendError, ConfigurationError
from megalight.ops import backends_of, registries
from megalight.ops.activation import GATED
from megalight.ops.attention import ATTENTION, EXAMPLE, attention
from megalight.ops.linear.low_precision import LOW_PRECISION, LowPrecision
from megalight.optim import Adam, AdamConfig
from megalight.parallel.graphs.modules import GRAPH_BACKENDS, GraphBackend, ModuleGraphs
from megalight.plugins.precision import MegatronLowPrecision
from megalight.registry import load_plugins
from megalight.types import PackedSequences
from tests.plugins import fakes
from tests.plugins.fakes import Fakes
from tests.plugins.test_flash_attn import VERSION_2, functions

NAMES = {"apex", "flash_attn", "transformer_engine"}
BACKENDS = {
    "apex": {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "weight_gradient", "adam"},
    "flash_attn": {"attention", "attention_block", "attention_block_backward"},
    "transformer_engine": {
        "attention", "fp8_attention", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated",
        "activation", "weight_gradient", "adam",
    },
}  # fmt: skip


def test_they_are_loaded_and_bring_their_backends() -> None:
    assert {name for name, error in load_plugins().items() if error is None} >= NAMES
    for plugin, ops in BACKENDS.items():
        found = {op for op, rows in backends_of("cpu").items() for backend, _ in rows if backend.plugin == plugin}
        assert found == ops


def test_loading_them_imports_no_package() -> None:
    code = (
        "import sys; from megalight.registry import load_plugins; load_plugins();"
        "import megalight.ops as c; table = c.backends_of('cuda');"
        "assert {b.plugin for rows in table.values() for b, _ in rows if b.name in ('reference', 'triton')} == {None};"
        "assert not {'transformer_engine', 'apex', 'flash_attn', 'flash_attn_interface'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("op", sorted(BACKENDS["transformer_engine"]))
def test_auto_is_none_of_theirs(op: str) -> None:
    registry, spec = registries()[op]
    assert registry.select(spec).plugin is None
    with pytest.raises(BackendError, match=r"needs the package transformer_engine, which is not installed\. Next: pip"):
        registry.select(spec, "transformer_engine")


def test_a_name_brings_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_cuda(monkeypatch)
    packages = Fakes(tmp_path, monkeypatch)
    packages.add("flash_attn", "2.8.3", **functions(VERSION_2))
    q = torch.randn(12, 2, 8).bfloat16()
    sequences = PackedSequences.of_uniform(2, 6)
    assert ATTENTION.select(EXAMPLE._replace(head_dim=8, value_dim=8)).plugin is None
    expected = attention(q, q, q, sequences)
    assert not packages.calls, "installed, and not used"
    out = attention(q, q, q, sequences, scale=0.354, backend="flash_attn")
    assert packages.called("flash_attn_func")[1]["softmax_scale"] == 0.354
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_an_activation_that_it_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = registries()["gated"]
    with pytest.raises(BackendError, match="transformer_engine: has no gelu; it has silu, gelu_tanh, quick_gelu"):
        GATED.select(spec._replace(kind="gelu"), "transformer_engine")


def test_adam_takes_a_name() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer, _ = AdamConfig(backend="apex").build([("weight", weight)])
    with pytest.raises(BackendError, match="backend 'apex' of adam cannot serve"):
        optimizer.step()
    other = torch.nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    Adam([other], backend="reference").step()
    assert bool((other < 1).all())


def test_a_third_party_brings_products_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(LowPrecision):
        """Products of a package that we have never heard of."""

    for registry in (LOW_PRECISION, GRAPH_BACKENDS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    with pytest.raises(ConfigurationError, match="implementation='theirs'; choose one of own, transformer_engine"):
        MegatronLowPrecision(implementation="theirs")
    with pytest.raises(ConfigurationError, match="backend is 'theirs'; choose one of own, transformer_engine"):
        CUDAGraph("layer", backend="theirs")
    LOW_PRECISION.register("theirs")(Theirs)
    GRAPH_BACKENDS.register("theirs")(GraphBackend(ModuleGraphs, lambda device: f"not on {device}"))
    assert MegatronLowPrecision(implementation="theirs").kind is Theirs
    assert CUDAGraph("layer", backend="theirs").backend == "theirs"
