"""ExpertLoads logs the loads, drops and losses of all layers, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megalight.callbacks import ExpertLoads
from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT
from megalight.nn.aux_losses import KeptAuxLosses, collecting
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, CapacityConfig, MoEConfig, Router
from tests.strategies.training import BASE, SEED, WithData, fit, global_batch
from tests.support.workers import run

MOE = MoEConfig(
    num_experts=4,
    ffn_hidden_size=12,
    balance=BalanceConfig(seq_aux_loss=0.5, z_loss=0.25),
    capacity=CapacityConfig(factor=0.75),
)
CONFIG = replace(BASE, moe=MOE)


def _fit(options: dict[str, Any]) -> dict[str, float]:
    logged = fit(
        CONFIG,
        steps=1,
        extra_callbacks=[ExpertLoads(each=True)],
        trainer_options={"log_every_n_steps": 1},
        micro_batch_size=1,
        **options,
    )
    return {name: value for name, value in logged["metrics"].items() if name.startswith("experts_")}


def by_hand() -> dict[str, float]:
    """The choices of the first step, one micro-batch of one sequence at a time."""
    model = GPT(CONFIG).double()
    initialize(model, SEED, "model.")
    routers = {index: layer.mlp.router for index, layer in model.layers.items()}
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, value: torch.Tensor) -> None:
        sums[name] = sums.get(name, torch.zeros_like(value)) + value

    for index, router in routers.items():
        assert isinstance(router, Router)

        def hook(module: Any, args: Any, routes: Any, index: str = index) -> None:
            capacity, module.capacity = module.capacity, None
            chosen = module.forward(args[0], replace(args[1], aux_losses=KeptAuxLosses())).experts
            module.capacity = capacity
            add(f"loads {index}", torch.bincount(chosen.flatten(), minlength=4).double())
            add(f"dropped {index}", (routes.experts < 0).sum().double())

        router.register_forward_hook(hook)
    batch = global_batch(0)
    for part in batch.split(1):
        with collecting(KeptAuxLosses()) as kept:
            model(part.tokens.reshape(-1), part.sequences, labels=part.labels.reshape(-1))
        for name, value in kept.values.items():
            add(name, value.detach() / 4)
    found = {}
    for index in routers:
        loads = sums[f"loads {index}"] / sums[f"loads {index}"].mean()
        found |= {f"experts_{index}/load_{expert}": float(load) for expert, load in enumerate(loads)}
        found |= {f"experts_{index}/max_load": float(loads.max()), f"experts_{index}/min_load": float(loads.min())}
        found[f"experts_{index}/drop_rate"] = float(sums[f"dropped {index}"] / sums[f"loads {index}"].sum())
    return {**found, "seq": float(sums["router_seq_aux_loss"]) / 0.5, "z": float(sums["router_z_loss"]) / 0.25}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"expert_parallel": 2}),
        (2, {"pipeline_parallel": 2}),
    ],
)
def test_loads_of_all_layers(ranks: int, options: dict[str, Any]) -> None:
    found, expected = run(_fit, ranks, options)[0], by_hand()
    for name, short in (("seq_aux_loss", "seq"), ("z_loss", "z")):
        layers = [found.pop(f"experts_{index}/{name}") for index in range(2)]
        assert sum(layers) == pytest.approx(expected.pop(short), rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found["experts_0/drop_rate"] > 0


def test_a_model_without_experts() -> None:
    module = WithData(BASE, seed=SEED)
    with pytest.raises(ConfigurationError, match="ExpertLoads: WithData has no router"):
        ExpertLoads().on_train_start(pl.Trainer(accelerator="cpu", logger=False), module)


def test_other_strategies_count_too() -> None:
    class Plain(WithData):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([global_batch(0)], batch_size=None)  # type: ignore[arg-type]

    module = Plain(replace(CONFIG, moe=replace(MOE, capacity=None)), seed=SEED)
    runner = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        limit_val_batches=0,
        callbacks=[ExpertLoads()],
    )
    runner.fit(module)
    assert float(runner.callback_metrics["experts_0/max_load"]) >= 1
    assert float(runner.callback_metrics["experts_1/z_loss"]) > 0
