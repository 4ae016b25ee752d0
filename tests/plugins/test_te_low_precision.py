"""Linear layers through TransformerEngine's quantizers and products, by stand-ins that check how they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError, ConfigurationError
from megalight.nn import Linear, RMSNorm
from megalight.nn.init import initialize
from megalight.ops.linear import WeightGradients, deferring, linear
from megalight.ops.linear.low_precision import LowPrecision, Session, precision_of
from megalight.ops.parameter import state_of
from megalight.ops.quantize.recipes import recipe
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import LowPrecisionOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.plugins.transformer_engine.low_precision import TransformerEngineProducts, why_not
from tests.ops.checks import error
from tests.ops.test_linear import Parameter, with_main_grad
from tests.plugins import fakes, quantizers
from tests.plugins.fakes import Fakes

TOKENS, IN, OUT = 37, 96, 64


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    found = Fakes(tmp_path, monkeypatch)
    quantizers.install(found)
    return found


def weights(name: str) -> tuple[tuple[Parameter, Session], ...]:
    """One for TransformerEngine, one for ourselves."""
    data = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = []
    for kind, options in ((TransformerEngineProducts, {}), (LowPrecision, {"emulate": True})):
        weight, session = with_main_grad(data.clone(), torch.float32), Session()
        state_of(weight).precision = kind(recipe(name), session, margin=int(name == "delayed"), **options)
        made.append((weight, session))
    return tuple(made)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@pytest.mark.parametrize("wait", [False, True])
def test_layers_equal_our_own(packages: Fakes, name: str, wait: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    found = []
    pairs = weights(name)
    data = [
        (torch.randn(1, TOKENS, IN, generator=generator), torch.randn(1, TOKENS, OUT, generator=generator) * 1e-3)
        for _ in range(3)
    ]
    bias = torch.randn(OUT).bfloat16()
    for weight, session in pairs:
        results: list[Tensor] = []
        weight.main_grad.fill_(torch.nan)
        state_of(weight).untouched = True
        for step, (x, grad_y) in enumerate(data):
            leaf, queue = x.bfloat16().requires_grad_(), WeightGradients()
            with session.step(step), deferring(queue) if wait else torch.enable_grad():
                y = linear(leaf, weight, bias)
                y.backward(grad_y.bfloat16())
                queue.run()
            assert leaf.grad is not None
            results += [y.detach(), leaf.grad]
        with torch.no_grad():
            results.append(linear(data[0][0].bfloat16(), weight))
        found.append([*results, weight.main_grad])
        assert weight.ready == 3
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert ours.shape == theirs.shape
        with_bias = number in (0, 2, 4)
        # With TransformerEngine, the product is rounded to bfloat16 before the bias is added; with ours, the sum is.
        assert error(ours, theirs) < (4e-3 if with_bias else 1e-6)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_recorded_layers_find_new_quantized_values_at_the_old_addresses(packages: Fakes, name: str) -> None:
    (weight, session), _ = weights(name)
    precision, x = precision_of(weight), torch.randn(TOKENS, IN).bfloat16()
    places, outputs = set(), []
    for step in range(3):
        with session.step(step), torch.no_grad():
            precision.refresh(weight)
            quantized = precision._quantized_weight(weight)
            places.add(tuple(part.data_ptr() for part in (*quantized.rows.tensors, *quantized.columns.tensors)))
            outputs.append(linear(x, weight))
            weight.mul_(-1.5)  # the next step has other weights
    assert len(places) == 1
    assert error(outputs[1], -1.5 * outputs[0]) < 0.1
    precision.release()
    with torch.no_grad():
        weight.mul_(0)
        assert not linear(x, weight).any()
    assert quantized.rows.dequantize().any(), "released memory is not written to"


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_spoils_no_later_step(packages: Fakes, bad: float) -> None:
    (weight, session), _ = weights("delayed")
    found = []
    for step in range(3):
        x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
        grad_y = torch.full((TOKENS, OUT), 2.0**-20).bfloat16()
        if step == 1:
            x[0, 0] = grad_y[0, 0] = bad
        with session.step(step):
            y = linear(x.requires_grad_(), weight)
            y.backward(grad_y)
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[2][1])


def test_recomputed_inputs_are_cast_in_the_backward(packages: Fakes) -> None:
    (weight, _), (other, _) = weights("tensorwise")
    x, grad_y = torch.randn(TOKENS, IN).bfloat16(), torch.randn(TOKENS, OUT).bfloat16()
    for each in (weight, other):
        precision_of(each).accumulate(each.main_grad, grad_y, x, False)
    assert error(weight.main_grad, other.main_grad) < 1e-6
    again = precision_of(weight).weight_gradient(grad_y, x, weight.main_grad)
    assert error(again, weight.main_grad) < 1e-6


def test_only_the_quantized_values_for_the_weight_gradient_are_saved(packages: Fakes) -> None:
    (weight, _), _ = weights("tensorwise")
    _, saved = precision_of(weight).product_and_cast(torch.randn(TOKENS, IN).bfloat16(), weight, None)
    rows, columns = saved.tensors[: quantizers.PARTS], saved.tensors[quantizers.PARTS :]
    assert rows == (None, None)
    assert None not in columns


def test_older_releases_keep_the_state_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_cuda(monkeypatch)
    found = Fakes(tmp_path, monkeypatch)
    quantizers.install(found, "2.4.0", "fp8")
    (weight, _), (other, _) = weights("tensorwise")
    x = torch.randn(TOKENS, IN).bfloat16()
    with torch.no_grad():
        assert error(linear(x, weight), linear(x, other)) < 1e-6
    reason = why_not("cuda", recipe("nvfp4"))
    assert reason is not None
    assert "NVFP4BlockScaling needs transformer_engine >= 2.8, found 2.4.0" in reason


def test_the_device_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs the package transformer_engine" in str(why_not("cuda", recipe("tensorwise")))
    fakes.pretend_cuda(monkeypatch)
    quantizers.install(Fakes(tmp_path, monkeypatch), able=(False, "10.0 or higher required"))
    assert why_not("cuda", recipe("mxfp8")) == "10.0 or higher required"
    assert "has no recipe 'rowwise'" in str(why_not("cuda", recipe("rowwise")))
    with pytest.raises(BackendError, match=r"10\.0 or higher required. Choose another recipe"):
        TransformerEngineProducts.check_products(torch.zeros(16, 16).bfloat16(), recipe("mxfp8"))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.ModuleDict({"norm": RMSNorm(32), "up": Linear(32, 64, bias=False)})
        self.layers = torch.nn.ModuleDict({"0": layer})


def prepared(options: LowPrecisionOptions) -> Any:
    model = Model()
    initialize(model, 1)
    model.bfloat16()
    MegatronLowPrecision(options, implementation="transformer_engine").prepare(ParallelModel(model, ParallelMesh()))
    return model


def test_the_plugin_hands_layers_over(packages: Fakes) -> None:
    model = prepared(LowPrecisionOptions(recipe="delayed", history=4))
    precision = precision_of(model.layers["0"]["up"].weight)
    assert isinstance(precision, TransformerEngineProducts)
    assert precision.history is not None
    for name in KINDS_WITH_FAKES:
        prepared(LowPrecisionOptions(recipe=name))
    with pytest.raises(BackendError, match="has no recipe 'rowwise'"):
        prepared(LowPrecisionOptions(recipe="rowwise"))


def test_nobody_measures_for_quantizers_that_do(packages: Fakes) -> None:
    model = prepared(LowPrecisionOptions())
    assert isinstance(precision_of(model.layers["0"]["up"].weight), TransformerEngineProducts)
    assert model.layers["0"]["norm"].backend == "auto"
    MegatronLowPrecision(LowPrecisionOptions(emulate=True)).prepare(ParallelModel(model, ParallelMesh()))
    assert model.layers["0"]["norm"].backend == "auto+amax"


KINDS_WITH_FAKES = ("tensorwise", "blockwise", "mxfp8", "nvfp4")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"emulate": True}, "emulate"),
        ({"primary_weights": True}, "primary_weights"),
        ({"power_of_two": True}, "power_of_two"),
        ({"recipe": "blockwise", "power_of_two": True}, "power_of_two"),
        ({"margin": 1}, "margin"),
    ],
)
def test_what_it_lacks_is_refused(packages: Fakes, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"has no {what}"):
        prepared(LowPrecisionOptions(**options))


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'transformer-engine'; choose one of own, transformer_engine"):
        MegatronLowPrecision(implementation="transformer-engine")  # type: ignore[arg-type]
