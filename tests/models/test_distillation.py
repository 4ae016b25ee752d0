"""Losses of distillation and their settings, as ModelOpt's own classes have them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from megalight import checkpoint
from megalight.errors import ConfigurationError
from megalight.models.bert.config import BertConfig
from megalight.models.distillation import DistillationLoss, LayerPair, read_modelopt
from megalight.models.distillation.distiller import Distiller
from megalight.nn import StateComparison
from megalight.ops.divergence import Projection, linear_divergence
from tests.models import vlm_samples

STUBS = {
    "megatron": [],
    "megatron.core": ["parallel_state"],
    "megatron.core.pipeline_parallel": [],
    "megatron.core.pipeline_parallel.schedules": ["get_tensor_shapes"],
    "megatron.core.transformer": ["MegatronModule", "TransformerLayer"],
    "megatron.core.utils": ["get_model_config"],
}
"""What ModelOpt's plugin imports; its losses use nothing of it on one device."""
PLUGIN = "modelopt.torch.distill.plugins.megatron"


class Module(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("modelopt.torch.distill")
    importlib.import_module("modelopt.torch.quantization.nn")
    for name, values in STUBS.items():
        stub = ModuleType(name)
        stub.__dict__.update({value: Module if value == "MegatronModule" else object() for value in values})
        monkeypatch.setitem(sys.modules, name, stub)
    sys.modules.pop(PLUGIN, None)
    yield importlib.import_module(PLUGIN)
    sys.modules.pop(PLUGIN, None)


CONFIG = SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1)
T, B = 5, 3


def states(width: int, seed: int) -> Tensor:
    return torch.randn(T, B, width, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["cosine", "mse"])
@pytest.mark.parametrize("width", [8, 6])
def test_losses_on_hidden_states_are_those_of_modelopt(plugin: Any, kind: str, width: int) -> None:
    student, teacher = states(width, 0).requires_grad_(), states(8, 1)
    ours = StateComparison(width, 8).double()
    projection: nn.Module = nn.Identity()
    if ours.projection is not None and ours.bias is not None:
        projection = nn.Linear(width, 8).double()
        with torch.no_grad():
            ours.projection.copy_(projection.weight)
            ours.bias.copy_(projection.bias)
    loss = {"cosine": plugin.HiddenStateCosineLoss, "mse": plugin.MSELoss}[kind](CONFIG, projection_layer=projection)
    wanted = loss(student, teacher)[0].T.reshape(-1)  # [b, s]
    found = ours(teacher.reshape(T * B, -1), student.reshape(T * B, -1), kind)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.arange(T * B).double()
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), [student, *projection.parameters()])
    grads = torch.autograd.grad((found * weights).sum(), [student, *ours.parameters()])
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-12)


def test_the_divergence_is_that_of_modelopt(plugin: Any) -> None:
    student, teacher = states(8, 0), states(7, 1)
    heads = [states(width, width)[:, 0].repeat(4, 1) for width in (8, 7)]
    logits, targets = student @ heads[0].T, teacher @ heads[1].T
    wanted = plugin.LogitsKLLoss(CONFIG, temperature=2.0)(logits, targets)[0].T.reshape(-1)
    rows = [state.reshape(T * B, -1) for state in (student, teacher)]
    found, _ = linear_divergence(
        Projection(rows[0], heads[0]), Projection(rows[1], heads[1]), torch.zeros(T * B).long(), temperature=2.0
    )
    # ModelOpt computes in float32.
    torch.testing.assert_close(found, wanted.to(found), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("own", "pairs"), [(False, 1), (False, 3), (True, 0), (True, 1), (True, 3)])
def test_the_balance_is_that_of_modelopt(plugin: Any, own: bool, pairs: int) -> None:
    values = torch.tensor([2.5, 0.8, *[0.3, 1.7, 0.2][:pairs]], dtype=torch.double, requires_grad=True)
    scale = 0.4 if own else 1.0
    loss = DistillationLoss(
        own=own, scale=scale, balance=True, pairs=(LayerPair(student="layers.0", teacher="layers.0"),) * pairs
    )
    hidden = loss.states(list(values[2:]), values[1])
    means = torch.stack([values[1], hidden, values[0]]).detach() / 7  # to a common factor
    found = loss.objective(values[1], hidden, values[0] if own else None, means)
    named = {f"HiddenStateCosineLoss_{n}": value for n, value in enumerate(values[2:], 1)}
    balancer = plugin.LogitsAndIntermediatesLossBalancer(kd_loss_scale=scale, skip_original_loss=not own)
    wanted = balancer({"student_loss": values[0], "LogitsKLLoss_0": values[1], **named})["kd_loss"]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    grad, other = (torch.autograd.grad(total, values)[0] for total in (found, wanted))
    torch.testing.assert_close(grad, other, rtol=1e-12, atol=0)
    if own:
        doubled = DistillationLoss(own=True, scale=2 * scale, balance=True, pairs=loss.pairs)
        assert doubled.objective(values[1], hidden, values[0], means) > found * 1.1


def test_a_part_that_is_zero_has_no_ratio() -> None:
    loss = DistillationLoss(own=True, balance=True, pairs=(LayerPair(student="layers.0", teacher="layers.0"),))
    zero = torch.zeros((), requires_grad=True)
    total = loss.objective(zero, zero, zero, torch.zeros(3))
    assert torch.autograd.grad(total, zero)[0].isfinite()


def settings(folder: Path, **values: Any) -> Path:
    (folder / "kd.yaml").write_text(yaml.safe_dump(values))
    return folder / "kd.yaml"


def test_settings_of_modelopt_are_read_as_they_are(plugin: Any, tmp_path: Path) -> None:
    values = {
        "logit_layers": ["output_layer", "output_layer"],
        "intermediate_layer_pairs": [
            ["decoder.layers.1", "decoder.layers.3"],
            ["decoder.layers.0.self_attention", "decoder.layers.2.self_attention", "mse"],
            ["decoder.final_layernorm", "decoder.final_layernorm", "cosine"],
        ],
        "skip_lm_loss": False,
        "kd_loss_scale": 10,
        "logit_kl_temperature": 2.0,
        "criterion": None,
    }
    plugin.DistillationConfig(**values)
    found = read_modelopt(settings(tmp_path, **values))
    assert (found.own, found.scale, found.temperature, found.balance) == (True, 10, 2.0, True)
    assert [pair.loss for pair in found.pairs] == ["cosine", "mse", "cosine"]
    default = plugin.DistillationConfig()
    plain = read_modelopt(settings(tmp_path, logit_kl_temperature=1.0))
    assert plain == DistillationLoss(temperature=default.logit_kl_temperature)
    # Without the student's own loss ModelOpt does not use the scale.
    assert read_modelopt(settings(tmp_path, kd_loss_scale=5.0)) == DistillationLoss()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_kl_topk": 64, "skip_lm": True}, "has 'logit_kl_topk', 'skip_lm', which is not supported"),
        ({"logit_layers": ["lm_head", "output_layer"]}, "write .output_layer, output_layer."),
        ({"logit_layers": None}, "logit_layers=None; logits are"),
        ({"logit_layers": 3}, "logit_layers=3; logits are"),
        ({"intermediate_layer_pairs": [["a"]]}, r"has \['a'\]; write .student's layer"),
        ({"intermediate_layer_pairs": [["a", "b", "l1"]]}, "loss='l1' is not one of cosine, mse"),
        ({"kd_loss_scale": "much"}, "kd_loss_scale='much' is no float"),
        ({"skip_lm_loss": 1}, "skip_lm_loss=1 is no bool"),
        ({"kd_loss_scale": -1.0, "skip_lm_loss": False}, "scale=-1.0 must be positive"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_modelopt(settings(tmp_path, **values))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.yaml is no YAML file"):
        read_modelopt(tmp_path / "none.yaml")
    (tmp_path / "kd.yaml").write_text("- a list")
    with pytest.raises(ConfigurationError, match="must hold keys and values"):
        read_modelopt(tmp_path / "kd.yaml")


@pytest.mark.parametrize(
    ("kind", "config"),
    [("vlm", vlm_samples.CONFIG), ("bert", BertConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=16))],
)
def test_teachers_of_other_families_are_refused(kind: str, config: Any, tmp_path: Path) -> None:
    layers = torch.zeros(8, 1, 1)
    views = {"x": checkpoint.View("x", layers.shape, [checkpoint.Box((0, 0, 0), layers)])}
    checkpoint.save(tmp_path / "c", views, common={"model": {"family": kind, "config": config.to_dict()}})
    with pytest.raises(ConfigurationError, match=f"is a {kind} model; students learn from models of the family gpt"):
        Distiller(tmp_path / "c")
