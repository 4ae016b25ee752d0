"""Muon on one device against torch and a loop by hand; and its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import megalight
from megalight.callbacks import Adapters
from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.transforms import LoRA
from megalight.nn.canonical import parts
from megalight.nn.init import initialize
from megalight.optim import AdamConfig, Constant, GroupRule, Muon, MuonConfig
from megalight.optim.muon import QUINTIC, newton_schulz
from megalight.optim.whole_matrices import GATHER_BYTES
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.transform import ModelTransform
from megalight.plugins.precision import MegatronLowPrecision, MegatronPrecision
from megalight.strategies import DataParallelOptions, MegatronStrategy
from tests.strategies.test_experts import PLAIN
from tests.strategies.test_layout_changes import Again, contents
from tests.strategies.training import (
    BASE,
    CLIP,
    CONFIGS,
    SEED,
    WithData,
    assert_same_run,
    canonical,
    fit,
    gathered,
    global_batch,
    whole,
)
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 5
MUON = MuonConfig(lr=0.02, weight_decay=0.1, ns_dtype="float64")
CONFIG = AdamConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, muon=MUON)


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz of one matrix as its paper writes it."""
    a, b, c = QUINTIC
    x = matrix.mT if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if len(matrix) > matrix.shape[1] else x


@functools.cache
def by_hand(
    config: GPTConfig,
    heads: bool = False,
    begin: Callable[[GPT], Callable[[dict[str, Tensor]], None]] | None = None,
    transforms: tuple[ModelTransform, ...] = (),
    build: Callable[[GPTConfig], GPT] = GPT,
) -> dict[str, Any]:
    """The run of one device: torch's AdamW, and Muon matrix by matrix, expert by expert, in float64."""
    size = config.hidden_size // config.num_heads

    def step(name: str, weight: Tensor, gradient: Tensor, kept: dict[str, Any]) -> None:
        kept["momentum"] = momentum = 0.95 * kept.get("momentum", 0.0) + 0.05 * gradient
        look = 0.95 * momentum + 0.05 * gradient
        split = heads and name.split(".")[-2] in "qkv"
        update = torch.cat([_scaled(each) for each in (look.split(size) if split else [look])])
        weight.mul_(1 - MUON.lr * MUON.weight_decay).sub_(update, alpha=MUON.lr)

    return train_by_hand(config, CONFIG, step, begin, transforms, build)


def train_by_hand(
    config: GPTConfig,
    optimizer: AdamConfig,
    step_matrix: Callable[[str, Tensor, Tensor, dict[str, Any]], None],
    begin: Callable[[GPT], Callable[[dict[str, Tensor]], None]] | None = None,
    transforms: tuple[ModelTransform, ...] = (),
    build: Callable[[GPTConfig], GPT] = GPT,
) -> dict[str, Any]:
    """The run of one device: torch's AdamW, and ``step_matrix`` for each part of a fused weight and each expert.

    Args:
        step_matrix: gets the name, the weight, which it updates, its gradient, and what it has kept.
        begin: gets the model, and returns what is called after each step with all weights by name.
    """
    assert optimizer.whole is not None
    model = build(config).double()
    alone = ParallelModel(model, ParallelMesh(1, 0), Layout(transforms=transforms))
    initialize(model, SEED, "model.")
    alone.transform_values()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [name for name, p in named.items() if optimizer.whole.takes(name, p)]
    weights = {
        part.name: named[part.parameter].detach().view(-1)[part.start :][: int(np.prod(part.shape))].view(part.shape)
        for part in parts(model)
        if part.parameter in named
    }
    pieces = [(part, weights[part.name]) for part in parts(model) if part.parameter in matrices]
    finish = begin(model) if begin else None
    rest = [(name, p) for name, p in named.items() if name not in matrices]
    adam = torch.optim.AdamW(
        [
            {"params": [p for _, p in rest if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in rest if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
    )
    kept: dict[str, dict[str, Any]] = {part.name: {} for part, _ in pieces}
    initial, losses, norms = whole(model), [], []
    for step in range(STEPS):
        batch = global_batch(step)
        output = model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
        loss = (output.losses * batch.loss_mask.reshape(-1).double()).sum() / batch.loss_mask.sum()
        model.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        adam.step()
        gradients = canonical(model, {name: p.grad for name, p in named.items()})
        for part, weight in pieces:
            step_matrix(part.name, weight, torch.from_numpy(gradients["model." + part.name]), kept[part.name])
        if finish:
            finish(weights)
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "initial": initial, "final": whole(model)}


def _scaled(matrix: Tensor) -> Tensor:
    return orthogonalized(matrix) * 0.2 * max(matrix.shape) ** 0.5


def _rank(
    config: GPTConfig, optimizer: AdamConfig, strategy: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    return fit(config, STEPS, options, optimizer=optimizer, micro_batch_size=1, **strategy)


LAYOUTS: Sequence[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("dense", 1, {}, {"level": "optim"}),
    ("dense", 4, {"tensor_parallel": 2, "sequence_parallel": True}, {"level": "optim"}),
    ("dense", 2, {}, {"level": "no_shard"}),
    ("experts", 4, {"expert_parallel": 2}, {"level": "optim_grads"}),
    pytest.param(
        ("heads", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}, {"level": "optim"}), marks=pytest.mark.full
    ),
]
FULL = "optim_grads_params"
MORE: Sequence[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("heads", 4, {"tensor_parallel": 4}, {"level": "optim"}),
    ("tied", 4, {}, {"level": FULL, "replicate": 2}),
    ("experts", 2, {}, {"level": "optim", "optimizer_offload_fraction": 0.5}),
]
"""What the drawn layouts of test_drawn_layouts.py do not have."""
KINDS = {"experts": PLAIN, "tied": CONFIGS["tied"]}


def check(kind: str, ranks: int, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    config = KINDS.get(kind, BASE)
    optimizer = replace(CONFIG, muon=replace(MUON, head_dim=8)) if kind == "heads" else CONFIG
    found = run(_rank, ranks, config, optimizer, strategy, options, timeout=240)
    assert_same_run(found[0], by_hand(config, kind == "heads"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_as_one_device(layout: tuple[str, int, dict[str, Any], dict[str, Any]]) -> None:
    check(*layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE, ids=str)
def test_more_layouts(layout: tuple[str, int, dict[str, Any], dict[str, Any]]) -> None:
    check(*layout)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "strategy", "level"),
    [(1, {}, "optim"), (4, {"tensor_parallel": 2, "sequence_parallel": True}, "optim"), (2, {}, FULL)],
)
def test_adapters_of_a_frozen_model(ranks: int, strategy: dict[str, Any], level: str) -> None:
    lora = LoRA(rank=3, targets=("layers.*",), alpha=6.0)
    options = {"extra_callbacks": [Adapters(rank=3, targets=["layers.*"], alpha=6.0)], **strategy}
    found = run(_rank, ranks, BASE, CONFIG, options, {"level": level}, timeout=240)[0]
    assert_same_run(found, by_hand(BASE, transforms=(lora,)))
    moved = {name for name, value in found["final"].items() if not np.array_equal(value, found["initial"][name])}
    assert moved == {name for name in found["final"] if "lora" in name}


FROZEN = ("embed.word.weight", "layers.0.mlp.down.weight", "layers.1.attention.qkv.weight", "layers.1.mlp_norm.weight")


def partly_frozen(config: GPTConfig) -> GPT:
    model = GPT(config)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


class PartlyFrozen(WithData):
    def build_model(self) -> GPT:
        return partly_frozen(self.config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "strategy", "level"),
    [(2, {"tensor_parallel": 2, "sequence_parallel": True}, "optim"), (4, {"pipeline_parallel": 2}, FULL)],
)
def test_frozen_parts(ranks: int, strategy: dict[str, Any], level: str) -> None:
    options = {"module_type": PartlyFrozen, **strategy}
    found = run(_rank, ranks, BASE, CONFIG, options, {"level": level}, timeout=240)[0]
    assert_same_run(found, by_hand(BASE, build=partly_frozen))
    still = {name for name, value in found["final"].items() if np.array_equal(value, found["initial"][name])}
    parted = (f"model.layers.1.attention.{part}.weight" for part in "qkv")
    assert still == {f"model.{name}" for name in FROZEN if "qkv" not in name} | set(parted)


class OneBatch(WithData):
    """Learns one batch by heart: its loss falls with every step, and tells by how much weights have moved."""

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        batch = global_batch(0)
        return DataLoader(
            [batch.split(len(batch) // share["num_replicas"])[share["rank"]]] * self.steps, batch_size=None
        )  # type: ignore[arg-type]


def _narrow(precision: str, options: dict[str, Any], strategy: dict[str, Any]) -> dict[str, Any]:
    low = LowPrecisionOptions(emulate=True, recipe="tensorwise")
    plugin = MegatronLowPrecision(low, "bf16-true") if precision == "fp8" else MegatronPrecision(precision)
    muon = replace(MUON, ns_dtype="float64" if precision == "64-true" else "bfloat16")
    optimizer, config = replace(CONFIG, lr=1e-3, muon=muon), replace(BASE, hidden_size=64, ffn_hidden_size=64)
    trained = {"trainer_options": {"precision": None}, "precision_plugin": plugin, "module_type": OneBatch}
    return fit(config, 8, options, optimizer=optimizer, micro_batch_size=1, **trained, **strategy)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-true", "fp8"])
@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_narrow_weights_train_near_float64(precision: str, masters: str) -> None:
    expected = run(_narrow, 1, "64-true", {}, {})[0]["losses"]
    assert expected[-1] < 0.75 * expected[0]  # 0.84, if Muon updates nothing
    for ranks, strategy in ((2, {"tensor_parallel": 2}), (2, {})):
        found = run(_narrow, ranks, precision, {"level": "optim", "master_dtype": masters}, strategy)[0]["losses"]
        np.testing.assert_allclose(found, expected, rtol=0.01)


def resumed(
    strategy: dict[str, Any],
    level: str,
    steps: int,
    resume: str | None,
    save: str,
    optimizer: AdamConfig = CONFIG,
    loaded: str | None = None,
) -> dict[str, Any]:
    """Train up to ``steps``, and save there; and before the first step, if ``loaded`` is given. Returns all weights."""
    how = MegatronStrategy(micro_batch_size=1, data_parallel=DataParallelOptions(level=level), **strategy)
    module = WithData(PLAIN, optimizer=optimizer, seed=SEED)
    module.steps = STEPS
    options = {"use_distributed_sampler": False, "limit_val_batches": 0}
    callbacks = [] if loaded is None else [Again(loaded)]
    runner = trainer(how, max_steps=steps, gradient_clip_val=CLIP, callbacks=callbacks, **options)
    runner.fit(module, ckpt_path=resume)
    if steps < STEPS:
        runner.save_checkpoint(save)
    return gathered(how, module)


EXPERT_TP = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}


def goes_on(optimizer: AdamConfig, stop: int, state: set[str], expected: dict[str, Any], folder: Path) -> None:
    """Train in three layouts, one after the other. Each has loaded exactly what the one before has saved."""
    first, second, loaded = (str(folder / f"{name}.ckpt") for name in ("first", "second", "loaded"))
    run(resumed, 4, EXPERT_TP, "optim", stop, None, first, optimizer)
    run(resumed, 2, {}, FULL, 3, first, second, optimizer, loaded)
    same(first, loaded, state)
    final = run(resumed, 2, {"pipeline_parallel": 2}, "no_shard", STEPS, second, "", optimizer, loaded)[0]
    same(second, loaded, state)
    for name, value in expected["final"].items():
        error = np.linalg.norm(final[name] - value) / np.linalg.norm(value)
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


def same(saved: str, loaded: str, state: set[str]) -> None:
    before, after = contents(saved), contents(loaded)
    assert before.keys() == after.keys()
    assert {name.split(".")[1] for name in before if name.startswith("optimizer.")} == state
    for name, value in before.items():
        assert torch.equal(after[name], value), f"{name} has changed"


def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path) -> None:
    goes_on(CONFIG, 2, {"exp_avg", "exp_avg_sq", "momentum_buffer"}, by_hand(PLAIN), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("level", ["optim", FULL])
def test_a_resumed_run_is_the_same_bit_for_bit(level: str, tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    expected = run(resumed, 4, EXPERT_TP, level, STEPS, None, "")[0]
    run(resumed, 4, EXPERT_TP, level, 2, None, path)
    found = run(resumed, 4, EXPERT_TP, level, STEPS, path, "")[0]
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 8, 3), (1, 4, 4)])
def test_newton_schulz_is_that_of_its_paper(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    found = newton_schulz(matrices, dtype=torch.float64)
    torch.testing.assert_close(found, torch.stack([orthogonalized(each) for each in matrices]))
    assert not newton_schulz(torch.zeros(shape), dtype=torch.float32).any()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_equals_muon_of_torch(scale: Any, nesterov: bool) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(12, 4)), nn.Parameter(torch.randn(6, 10))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    muon = Muon([{"params": ours, "whole_matrices": True}], 0.01, scale=scale, nesterov=nesterov)
    torchs = torch.optim.Muon(theirs, 0.01, 0.1, nesterov=nesterov, adjust_lr_fn=scale)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        muon.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        # Both round to bfloat16 in each product, here of a batch.
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)


def test_experts_of_a_stack_go_in_batches() -> None:
    sizes: list[int] = []

    class Watched(Muon):
        def update(self, matrices: Tensor, state: Mapping[str, Tensor]) -> Tensor:
            sizes.append(len(matrices))
            return super().update(matrices, state)

    torch.manual_seed(0)
    results = []
    gradients = [torch.randn(128, 3, 8), torch.randn(128, 3, 8)]
    for gather_bytes in (8 * 3 * 8 * 50, GATHER_BYTES):
        stacks = [nn.Parameter(torch.ones(128, 3, 8)) for _ in gradients]
        for stack, gradient in zip(stacks, gradients, strict=True):
            stack.grad = gradient.clone()
        Watched([{"params": stacks, "whole_matrices": True}], 0.1, ns_dtype="float64", gather_bytes=gather_bytes).step()
        results.append([stack.detach() for stack in stacks])
    assert sizes == [50] * 5 + [6] + [256]
    torch.testing.assert_close(results[0], results[1])


def test_names_decide_who_updates_a_parameter() -> None:
    model = GPT(PLAIN)
    optimizer, _ = CONFIG.build(model.named_parameters())
    muon = {id(p) for group in optimizer.param_groups if group["whole_matrices"] for p in group["params"]}
    taken = {name for name, p in model.named_parameters() if id(p) in muon}
    assert {name.split(".", 2)[2] for name in taken} == {
        "attention.qkv.weight", "attention.proj.weight", "mlp.gate_up.weight", "mlp.down.weight",
        "mlp.experts.up", "mlp.experts.down",
    }  # fmt: skip


def test_each_has_its_rate_and_schedule() -> None:
    muon = replace(MUON, schedule=Constant(warmup=4), rules=(GroupRule("*proj*", lr_scale=0.5),))
    optimizer, scheduler = replace(CONFIG, muon=muon).build(GPT(BASE).named_parameters())
    assert scheduler is not None
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["muon/decay"] == pytest.approx(0.02 / 4)
    assert rates["muon/*proj*/decay"] == pytest.approx(0.01 / 4)
    assert rates["adam/decay"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum of Muon is 1.0"),
        ({"ns_steps": 0}, "ns_steps of Muon is 0"),
        ({"lr": float("nan")}, "lr of Muon is nan"),
        ({"scale": "rms"}, "scale of Muon is 'rms'"),
        ({"names": ("*norm*",)}, "matches '*norm*' of muon.names, and is no matrix"),
        (
            {"names": ("*.attention.*",), "adam_names": ("*qkv*",)},
            "matches '*.attention.*' of muon.names and '*qkv*' of",
        ),
        ({"names": ("*nothing*",)}, "matches none"),
        ({"adam_names": ("*",)}, "Muon updates none"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        replace(CONFIG, muon=replace(MUON, **options)).build(GPT(BASE).named_parameters())
    assert message in str(error.value)


def test_adam_beside_it_has_no_narrow_moments() -> None:
    with pytest.raises(ConfigurationError, match="exp_avg_dtype is 'float8'; beside muon"):
        replace(CONFIG, exp_avg_dtype="float8")


@pytest.mark.parametrize(
    ("options", "groups", "message"),
    [
        ({"head_dim": 5}, slice(1), r"attention\.q\.weight has 32 rows, which are no heads of 5 rows"),
        ({}, slice(None), r"norm\.weight has shape \[32\], and is no matrix, .* let a pattern of adam_names match it"),
    ],
)
def test_an_engine_refuses_what_is_no_matrix(options: dict[str, Any], groups: slice, message: str) -> None:
    model = megalight.parallelize(GPT(BASE))
    muon = replace(MUON, **options)
    optimizer, _ = replace(CONFIG, muon=muon).build(model.root.named_parameters())
    for group in optimizer.param_groups[groups]:
        group["whole_matrices"] = True
    training = megalight.Training(model, optimizer, GPTModule(BASE))
    training.forward_backward([global_batch(0)])
    with pytest.raises(ConfigurationError, match=message):
        optimizer.step()


def test_a_vector_without_an_engine_is_refused() -> None:
    vector = nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    with pytest.raises(ConfigurationError, match="is no matrix"):
        Muon([{"params": [vector], "whole_matrices": True}]).step()
