"""A plain LightningModule with a ``peft`` model, or with two models: equal to one device, and read by ``peft``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.errors import LayoutError
from megalight.parallel.model_plans import plan_for
from megalight.parallel.styles import Row
from megalight.strategies import MegatronStrategy, load_weights
from tests.parallel.tiny_transformers import float64, loss_of, tiny
from tests.support.environment import trainer
from tests.support.workers import run

TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    model = tiny("qwen3")
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS, **options))  # type: ignore[arg-type]
    torch.manual_seed(1)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:  # starts as zero, where `A` has no gradient
            nn.init.normal_(parameter)
    return found.double()


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = adapted()

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(input_ids=ids, labels=ids).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Two(Plain):
    """Two models, of which one is inside of another module."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.one = tiny("qwen2")
        self.inner = nn.ModuleDict({"two": tiny("gpt2")})

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return loss_of(self.one, ids) + 0.5 * loss_of(self.inner["two"], ids)


def _trained(kind: type[Plain], options: dict[str, Any], path: str) -> None:
    data = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    runner = trainer(MegatronStrategy(**options), max_steps=2)
    with float64():
        runner.fit(kind(), DataLoader(data, batch_size=2))
    runner.save_checkpoint(path)


def check(kind: type[Plain], options: dict[str, Any], root: Path) -> Any:
    """Train on one device and on two, compare the weights, and return the module with those of two."""
    run(_trained, 2, kind, options, str(root / "two.ckpt"))
    run(_trained, 1, kind, {}, str(root / "one.ckpt"))
    before, one, two = kind(), kind(), kind()
    load_weights(one, str(root / "one.ckpt"))
    load_weights(two, str(root / "two.ckpt"))
    weights, theirs = dict(one.named_parameters()), dict(two.named_parameters())
    for name, start in before.named_parameters():
        assert torch.equal(start, weights[name]) is not start.requires_grad, name
        torch.testing.assert_close(theirs[name], weights[name], rtol=1e-9, atol=1e-10)
    return two


LAYOUTS: dict[str, dict[str, Any]] = {
    "shares of tokens": {"tensor_parallel": 2, "sequence_parallel": True},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "pipeline": {"pipeline_parallel": 2, "micro_batch_size": 1},
}


@pytest.mark.parametrize(
    "name", ["shares of tokens", *(pytest.param(each, marks=pytest.mark.full) for each in [*LAYOUTS][1:])]
)
def test_adapters_train_as_on_one_device_and_peft_reads_them(tmp_path: Path, name: str) -> None:
    two = check(Plain, LAYOUTS[name], tmp_path)
    two.net.save_pretrained(tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(tiny("qwen3"), str(tmp_path / "adapter"))  # type: ignore[arg-type]
    ids = torch.arange(3, 11).unsqueeze(0)
    torch.testing.assert_close(read(input_ids=ids).logits, two.net(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["shares of tokens", *(pytest.param(each, marks=pytest.mark.full) for each in ("context", "pipeline"))]
)
def test_two_models_in_a_module_train_as_on_one_device(tmp_path: Path, name: str) -> None:
    check(Two, LAYOUTS[name], tmp_path)


def test_adapters_split_with_their_layer() -> None:
    plan = plan_for(adapted())
    assert plan is not None
    layer = "base_model.model.model.layers.0.self_attn"
    assert plan.rules[f"{layer}.o_proj.base_layer"] == plan.rules[f"{layer}.o_proj.lora_A.default"] == Row()
    assert plan.rules[f"{layer}.q_proj.base_layer"] == plan.rules[f"{layer}.q_proj.lora_B.default"]


def test_adapters_of_another_kind_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"q_proj is an adapter of peft with lora_magnitude_vector.default.weight"):
        plan_for(adapted(use_dora=True))
