from __future__ import annotations

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from megalight.optim import Adam, AdamConfig, CosineDecay, GroupRule

RECIPE = """
optimizer:
  lr: 0.001
  betas: [0.9, 0.98]
  schedule:
    class_path: megalight.optim.CosineDecay
    init_args: {warmup: 2, min_ratio: 0.2}
  rules:
  - pattern: "0.*"
    lr_scale: 0.5
"""


def test_builds_optimizer_and_scheduler() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    config = AdamConfig(lr=0.1, schedule=CosineDecay(warmup=4), rules=(GroupRule("0.weight", lr_scale=0.5),))
    optimizer, scheduler = config.build(model.named_parameters(), max_steps=100)
    assert isinstance(optimizer, Adam)
    assert scheduler is not None
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.025, 0.0125, 0.0125])
    assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.05, 0.05])
    assert AdamConfig().build(model.named_parameters())[1] is None


def test_comes_from_a_recipe() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(AdamConfig, "optimizer")
    config = parser.instantiate(parser.parse_string(RECIPE)).optimizer
    assert config == AdamConfig(
        lr=0.001,
        betas=(0.9, 0.98),
        schedule=CosineDecay(warmup=2, min_ratio=0.2),
        rules=(GroupRule("0.*", lr_scale=0.5),),
    )


def test_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, scheduler = AdamConfig(lr=0.05, schedule=CosineDecay()).build(model.named_parameters(), 60)
    x = torch.randn(64, 3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()  # type: ignore[union-attr]
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
