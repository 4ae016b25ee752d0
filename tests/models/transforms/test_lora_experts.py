"""Adapters of stacked experts: the formula, merging, and every division of experts as one device trains them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.func import functional_call

from megalight import checkpoint
from megalight.callbacks import Adapters
from megalight.errors import ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.transforms import DoRA, LoRA
from megalight.models.transforms.lora import merge
from megalight.models.transforms.peft import export_adapter
from megalight.models.transforms.saved import merge_checkpoint
from megalight.nn.canonical import canonical_tensors, parts
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, MoEConfig, RouterConfig, adapters
from megalight.parallel.expert import ExpertOptions
from megalight.strategies import MegatronStrategy, PipelineOptions
from megalight.types import PackedSequences
from tests.parallel.test_apply import jitter
from tests.strategies.training import (
    ADAM,
    BASE,
    CLIP,
    SEED,
    Gradients,
    WithData,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    canonical,
    fit,
)
from tests.support.environment import trainer
from tests.support.workers import run

CONFIG = replace(
    BASE,
    num_layers=2,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        router=RouterConfig(top_k=2),
        balance=BalanceConfig(aux_loss=0.1),
    ),
)
LORA = {"rank": 3, "targets": ["layers.*"], "exclude": ["experts.up"], "alpha": 6.0}


def model_of(lora: LoRA, config: GPTConfig = CONFIG) -> GPT:
    model = GPT(config).double()
    lora.change(model)
    initialize(model, 3)
    jitter(model)
    return model


def test_each_expert_has_a_pair_of_its_own() -> None:
    model = model_of(LoRA(rank=2, targets=["experts.gate", "experts.down"], alpha=3.0))
    experts = model.layers["0"].mlp.experts
    names = {name for name, p in model.named_parameters() if p.requires_grad and "layers.0." in name}
    assert names == {f"layers.0.mlp.experts.adapters.{p}.default.{ab}" for p in ("gate", "down") for ab in "AB"}
    values = canonical_tensors(model)
    assert values["layers.1.mlp.experts.3.gate.lora_B.weight"].shape == (12, 2)
    merged = GPT(CONFIG).double()
    for name, tensor in canonical_tensors(merged).items():
        tensor.copy_(values[name])
        pair = [values.get(name.replace("weight", f"lora_{ab}.weight")) for ab in "AB"]
        if pair[0] is not None:
            assert "experts" in name
            tensor += 1.5 * pair[1] @ pair[0]
    tokens, sequences = torch.arange(12) % 7, PackedSequences.of_lengths([12])
    expected = merged(tokens, sequences).logits
    torch.testing.assert_close(model(tokens, sequences).logits, expected, rtol=1e-11, atol=1e-11)
    assert merge(model) == 2
    assert not experts.adapters
    torch.testing.assert_close(model(tokens, sequences).logits, expected, rtol=1e-11, atol=1e-11)


def test_each_expert_has_lengths_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA by the paper's formula, written with one matrix for each expert; gradients too."""
    monkeypatch.setattr(adapters, "WIDE_ELEMENTS", 3 * 12 * CONFIG.hidden_size)  # three experts at a time, of four
    dora = DoRA(rank=2, targets=["experts.gate", "experts.down"], alpha=3.0)
    model = model_of(dora)
    experts = model.layers["1"].mlp.experts
    gate, down = (experts.adapters[name].default for name in ("gate", "down"))
    assert gate.magnitude.shape == (4, 12)
    assert down.magnitude.shape == (4, CONFIG.hidden_size)
    tokens, sequences = torch.arange(12) % 7, PackedSequences.of_lengths([12])
    for name, parameter in model.named_parameters():
        if name.endswith(("default.magnitude", "default.B")):  # before training
            nn.init.zeros_(parameter)
    plain = GPT(CONFIG).double()
    for name, tensor in canonical_tensors(plain).items():
        tensor.copy_(canonical_tensors(model)[name])
    dora.with_values(SimpleNamespace(root=model))  # type: ignore[arg-type]
    # It begins as the model was.
    torch.testing.assert_close(model(tokens, sequences).logits, plain(tokens, sequences).logits)
    torch.testing.assert_close(down.magnitude, experts.down.norm(dim=2))

    for name, parameter in model.named_parameters():
        if ".default." in name:
            nn.init.normal_(parameter, std=0.2)
    values = {name: value.detach().clone() for name, value in canonical_tensors(model).items()}
    pairs = {name: value.requires_grad_() for name, value in values.items() if ".lora_" in name}
    assert sum("magnitude_vector" in name for name in pairs) == 2 * 2 * 4
    weights: dict[str, Tensor] = {}
    for name, value in values.items():
        around = name.removesuffix("weight")
        if f"{around}lora_A.weight" in pairs:
            whole = value + 1.5 * pairs[f"{around}lora_B.weight"] @ pairs[f"{around}lora_A.weight"]
            # The length has no gradient, as in the paper.
            factor = pairs[f"{around}lora_magnitude_vector.weight"] / whole.detach().norm(dim=1)
            weights[name] = factor[:, None] * whole
        elif name not in pairs:
            weights[name] = value
    stacks: dict[str, list[Tensor]] = {}
    for part in parts(plain):
        stacks.setdefault(part.parameter, []).append(weights[part.name].reshape(-1))
    shaped = {name: torch.cat(flat).view_as(plain.get_parameter(name)) for name, flat in stacks.items()}
    expected = functional_call(plain, shaped, (tokens, sequences)).logits
    found = model(tokens, sequences).logits
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    expected.square().sum().backward()
    found.square().sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = canonical(model, {name: p.grad for name, p in trained.items() if p.grad is not None})
    assert len(gradients) == len(pairs)
    for name, pair in pairs.items():
        assert pair.grad is not None
        np.testing.assert_allclose(gradients["model." + name], pair.grad, rtol=1e-9, atol=1e-9 * pair.grad.abs().max())
    assert merge(model) == 2
    torch.testing.assert_close(model(tokens, sequences).logits, expected, rtol=1e-11, atol=1e-11)


@functools.cache
def expected(dora: bool = False) -> dict[str, Any]:
    return by_hand(CONFIG, 2, micro_batch_size=1, transforms=[(DoRA if dora else LoRA)(**LORA)])


def train(level: str, layout: dict[str, Any], dora: bool = False) -> dict[str, Any]:
    gradients = Gradients()
    callbacks = [Adapters(**LORA, dora=dora), gradients]
    found = fit(CONFIG, 2, {"level": level}, extra_callbacks=callbacks, micro_batch_size=1, **layout)
    return {**found, "gradients": gradients.first}


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ep": (2, "optim", {"expert_parallel": 2}),
    "etp": (2, "no_shard", {"expert_tensor_parallel": 2}),
    "ep_etp_pp": (
        4, "optim",
        {"expert_parallel": 2, "pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    ),
    "etp_zero_bubble": (
        4, "optim",
        {"expert_tensor_parallel": 2, "pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")},
    ),
    "ep_gather": (2, "optim", {"expert_parallel": 2, "expert": ExpertOptions("all_gather")}),
    "sharded": (2, "optim_grads_params", {"expert_parallel": 2}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in ("ep_gather", "ep_etp_pp", "etp_zero_bubble")))
        for name in LAYOUTS
    ],
)
def test_a_layout_trains_the_same_adapters(name: str) -> None:
    world, level, layout = LAYOUTS[name]
    found = run(train, world, level, layout, timeout=240)[0]
    assert_same_run(found, expected())
    assert_same_gradients(found["gradients"], expected()["gradients"])
    assert any("experts.3.gate.lora_A" in name for name in found["gradients"])
    for key, value in found["final"].items():
        assert np.array_equal(value, found["initial"][key]) is ("lora" not in key)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in ("ep", "etp_zero_bubble", "ep_etp_pp")))
        for name in LAYOUTS
    ],
)
def test_a_layout_trains_the_same_magnitudes(name: str) -> None:
    world, level, layout = LAYOUTS[name]
    found = run(train, world, level, layout, True, timeout=240)[0]
    for key, value in expected(True)["initial"].items():
        if "magnitude" in key:  # norms of rows that ranks share are sums in another order
            np.testing.assert_allclose(found["initial"][key], value, rtol=1e-14)
            found["initial"][key] = value
    assert_same_run(found, expected(True))
    assert_same_gradients(found["gradients"], expected(True)["gradients"])
    assert any("experts.3.down.lora_magnitude_vector" in name for name in found["gradients"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRA(rank=2, dropout=0.1), r"dropout=0\.1: adapters of experts have none"),
        (lambda: DoRA(rank=2, dropout=0.1), r"dropout=0\.1: adapters of experts have none"),
        (lambda: LoRA(rank=13), "rank=13 is larger than layers.0.mlp.experts.gate allows"),
        (lambda: LoRA(rank=2, targets=["experts.gaet"]), "matches no linear layer.*gate"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    with pytest.raises(ConfigurationError, match=message):
        make().change(model)


def test_experts_can_be_left_out() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    DoRA(rank=2, dropout=0.1, exclude=["experts.*"]).change(model)
    assert not model.layers["0"].mlp.experts.adapters


def save(folder: str, layout: dict[str, Any], base: str | None = None, dora: bool = False) -> None:
    """Train one step and save; with ``base``, adapters of that model alone."""
    module = WithData(CONFIG, optimizer=ADAM, seed=SEED, weights=base)
    save = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **layout),
        callbacks=[save, *([Adapters(**LORA, save_base=False, dora=dora)] if base else [])],
        enable_checkpointing=True,
        max_steps=1,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module)


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_checkpoint_of_adapters_alone_is_merged(dora: bool, tmp_path: Path) -> None:
    base, trained = (str(tmp_path / name / "step=1.ckpt") for name in ("base", "adapters"))
    run(save, 2, str(tmp_path / "base"), {"expert_parallel": 2})
    run(save, 2, str(tmp_path / "adapters"), {"expert_tensor_parallel": 2}, base, dora)
    stored = checkpoint.open(trained).tensors
    assert all("lora" in name for name in stored)
    assert stored["model.layers.1.mlp.experts.3.down.lora_A.weight"].shape == (3, 12)
    assert ("model.layers.1.mlp.experts.3.down.lora_magnitude_vector.weight" in stored) is dora
    merge_checkpoint(trained, tmp_path / "merged", base)
    tokens, sequences = torch.arange(12) % 7, PackedSequences.of_lengths([12])
    logits = load_model(trained, base=base)(tokens, sequences).logits
    assert not torch.equal(load_model(base)(tokens, sequences).logits, logits)
    torch.testing.assert_close(load_model(str(tmp_path / "merged"))(tokens, sequences).logits, logits)
    told = "peft has no DoRA for experts" if dora else r"experts\.0\.up has no adapter; peft adapts gate, up and down"
    with pytest.raises(ConfigurationError, match=told):
        export_adapter(trained, tmp_path / "peft")
