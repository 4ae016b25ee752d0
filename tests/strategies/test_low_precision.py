"""Training with products in 8 bits, emulated: equal over layouts where recipes allow it, and near bf16."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from megalight.errors import BackendError, ConfigurationError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.model import GPT
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.ops.common import AMAX
from megalight.ops.linear.low_precision import Session, precision_of
from megalight.ops.quantize import quantize
from megalight.ops.quantize.recipes import recipe
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import MAX_MARGIN, LowPrecisionOptions, apply_low_precision, remove_low_precision
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision, MegatronPrecision
from megalight.strategies import MegatronStrategy, PipelineOptions
from megalight.types import TokenBatch
from tests.strategies.training import ADAM, BASE, CLIP, SEED, Losses, WithData, assert_same_run, fit
from tests.support.environment import trainer
from tests.support.workers import run

CONFIG = replace(BASE, hidden_size=64, ffn_hidden_size=64, num_layers=2)
STEPS = 3


def train(options: dict[str, Any] | None, layout: dict[str, Any]) -> Any:
    """A run in every rank; None: without low precision."""
    if options is None:
        return fit(CONFIG, STEPS, **layout)
    # `fit` reads the initial weights in a callback that says it reads none, so as not to gather in every step.
    plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, primary_weights=False, **options), "64-true")
    return fit(CONFIG, STEPS, trainer_options={"precision": None}, precision_plugin=plugin, **layout)


RECIPES = [
    {"recipe": "tensorwise"},
    {"recipe": "delayed", "history": 2, "margin": 1},
    {"recipe": "rowwise"},
    {"recipe": "blockwise"},
    {"recipe": "mxfp8"},
    {"recipe": "nvfp4"},
]


@cache
def in_float64() -> Any:
    return run(train, 1, None, {})[0]


@pytest.mark.parametrize("options", RECIPES, ids=lambda options: str(options["recipe"]))
def test_trains_near_float64(options: dict[str, Any]) -> None:
    expected = in_float64()
    found = run(train, 1, options, {})[0]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-2)
    assert found["losses"] != expected["losses"]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor_parallel": 2}),
    (
        2,
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "recompute": RecomputeOptions(granularity="selective", modules=("mlp_norm", "mlp.act")),
        },
    ),
    (2, {"pipeline_parallel": 2}),
    (2, {}),
]


SPLIT = {
    name: {"recipe": name, "first_layers": 1} | ({} if name == "delayed" else {"reduce_amax": True})
    for name in ("tensorwise", "rowwise", "delayed")
}


SEEN = {"tensorwise": ("sp",), "rowwise": ("tp", "dp"), "delayed": ("sp", "pp")}
"""Recipe -> what divides its model in every test run. Whole ones have all pairs."""


@cache
def on_one_device(name: str) -> Any:
    return run(train, 1, SPLIT[name], {"micro_batch_size": 2})[0]


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        pytest.param(name, *layout, id=f"{name}-{axis}", marks=[pytest.mark.full] * (axis not in axes))
        for (name, axes), (layout, axis) in product(SEEN.items(), zip(LAYOUTS, ("tp", "sp", "pp", "dp"), strict=True))
    ],
)
def test_layouts_equal_one_device(name: str, ranks: int, layout: dict[str, Any]) -> None:
    for found in run(train, ranks, SPLIT[name], {"micro_batch_size": 2, **layout}):
        assert_same_run(found, on_one_device(name))


def test_zero_bubble_pipelines_wait_with_weight_gradients() -> None:
    options = {"recipe": "rowwise"}
    expected = run(train, 1, options, {"micro_batch_size": 1})[0]
    layout = {"micro_batch_size": 1, "pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}
    assert_same_run(run(train, 2, options, layout)[0], expected)


def _delayed(
    layout: dict[str, Any], stop: int, resume: str | None = None, save: str | None = None, config: GPTConfig = CONFIG
) -> Any:
    """Train until ``stop``, where few past steps are in the history; return losses, and the histories at the end."""
    options = LowPrecisionOptions("delayed", history=3, emulate=True)
    losses, module = Losses(), WithData(config, optimizer=ADAM, seed=SEED)
    losses.on_train_start = lambda *_: None  # type: ignore[method-assign]
    module.steps = 5
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, precision_plugin=MegatronLowPrecision(options, "64-true"), **layout),
        callbacks=[losses],
        max_steps=stop,
        precision=None,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module, ckpt_path=resume)
    if save is not None:
        runner.save_checkpoint(save)
    held = runner.strategy.run.rank_state()["magnitudes"]
    return losses.losses, dict(zip(held["names"], held["past"].tolist(), strict=True))


def test_a_resume_goes_on_with_the_scales_of_past_steps(tmp_path: Path) -> None:
    path, pipeline = str(tmp_path / "a.ckpt"), {"pipeline_parallel": 2}
    ((whole, history),) = run(_delayed, 1, {}, 5)
    run(_delayed, 1, {}, 3, None, path)
    assert run(_delayed, 1, {}, 5, path) == [(whole[3:], history)]
    # the second stage finds its histories in the file of the only rank, and then the only rank in that of the second
    for found, past in run(_delayed, 2, pipeline, 5, path):
        np.testing.assert_allclose(found, whole[3:], rtol=1e-9)
        assert past.items() <= history.items()
    run(_delayed, 2, pipeline, 3, None, path)
    ((found, past),) = run(_delayed, 1, {}, 5, path)
    np.testing.assert_allclose(found, whole[3:], rtol=1e-9)
    assert past == history


@pytest.mark.full
def test_experts_have_histories_of_their_own_under_any_layout(tmp_path: Path) -> None:
    """A run on one rank goes on with the experts divided over two, and each finds the history of its own expert."""
    config = replace(CONFIG, moe=MoEConfig(num_experts=4, ffn_hidden_size=32, pattern=(False, True)))
    path = str(tmp_path / "a.ckpt")
    ((whole, history),) = run(_delayed, 1, {}, 5, None, None, config)
    run(_delayed, 1, {}, 3, None, path, config)
    layout = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
    experts: set[str] = set()
    for found, past in run(_delayed, 2, layout, 5, path, None, config):
        np.testing.assert_allclose(found, whole[3:], rtol=1e-9)
        for name, steps in past.items():
            np.testing.assert_allclose(steps, history[name], rtol=1e-5)
        experts |= {name for name in past if "experts" in name}
    assert len(experts) == 8
    assert len({str(history[name]) for name in experts}) == 8


class Seed(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.manual_seed(5)


def rounding_seed() -> Any:
    plugin = MegatronLowPrecision(LowPrecisionOptions("nvfp4", emulate=True), "64-true")
    fit(CONFIG, 1, trainer_options={"precision": None}, extra_callbacks=[Seed()], precision_plugin=plugin)
    return plugin.session.seed


def test_stochastic_rounding_follows_the_seed_of_the_run() -> None:
    assert run(rounding_seed, 1) == [5]


@lru_cache
def losses(options: LowPrecisionOptions | None = None, steps: int = 30) -> list[float]:
    """Learning to count, each time a different stretch; weights have float32 masters."""
    network = GPT(replace(CONFIG, num_layers=2))
    initialize(network, 1, "model.")
    masters = [parameter.detach().clone().requires_grad_() for parameter in network.parameters()]
    network.bfloat16()
    session = Session() if options is None else apply_low_precision(network, options, ParallelMesh())
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        starts = torch.randint(0, 101, (8, 1), generator=generator)
        ids = (starts + torch.arange(17) * (1 + starts % 3)) % 101
        batch = TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(8, 16))
        with session.step(step):
            output = network(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
            loss = output.losses.float().mean()
            loss.backward()
        for master, parameter in zip(masters, network.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, network.parameters(), strict=True):
                parameter.copy_(master)
        found.append(float(loss.detach()))
    return found


@cache
def losses_in_bf16() -> list[float]:
    return losses()


@pytest.mark.parametrize(
    "options",
    [pytest.param(RECIPES[0], marks=pytest.mark.full), RECIPES[1], pytest.param(RECIPES[3], marks=pytest.mark.full)],
    ids=lambda options: str(options["recipe"]),
)
def test_loss_stays_within_half_a_percent_of_bf16(options: dict[str, Any]) -> None:
    expected = losses_in_bf16()
    found = losses(LowPrecisionOptions(emulate=True, **options))
    assert expected[-1] < 0.8 * expected[0]
    assert abs(np.mean(found[-10:]) / np.mean(expected[-10:]) - 1) < 5e-3
    assert found != expected


def test_which_layers_take_part() -> None:
    def marked(**options: Any) -> list[str]:
        module = model()
        apply_low_precision(module, LowPrecisionOptions(emulate=True, **options), ParallelMesh(), 4)
        return [name for name, p in module.named_parameters() if precision_of(p) is not None]

    assert marked(first_layers=1, last_layers=2, modules=("mlp.*",)) == [
        "layers.1.mlp.gate_up.weight",
        "layers.1.mlp.down.weight",
    ]
    assert len(marked()) == 16
    assert not any("head" in name or "embed" in name or "norm" in name for name in marked())


def test_who_measures_what_is_cast() -> None:
    def measuring(module: GPT) -> list[str]:
        return [name for name, part in module.named_modules() if str(getattr(part, "backend", "")).endswith(AMAX)]

    module = model(attention=AttentionConfig(qk_norm=True))
    for name, makers in (("tensorwise", ["attention_norm", "mlp_norm", "mlp.act"]), ("delayed", [])):
        apply_low_precision(module, LowPrecisionOptions(name, first_layers=3, emulate=True), ParallelMesh(), 4)
        rotation = ["rotary"] if makers else []
        assert measuring(module) == rotation + [f"layers.3.{maker}" for maker in makers]
    apply_low_precision(module, LowPrecisionOptions(emulate=True), ParallelMesh(), 4)
    remove_low_precision(module)
    assert not measuring(module)


def test_the_last_plugin_decides() -> None:
    module = model()
    marked = []
    for plugin in (
        MegatronLowPrecision(LowPrecisionOptions(emulate=True)),
        MegatronLowPrecision(LowPrecisionOptions(emulate=True, first_layers=3)),
        MegatronPrecision("bf16-mixed"),
    ):
        plugin.prepare(ParallelModel(module, ParallelMesh()))
        marked.append(sum(precision_of(parameter) is not None for parameter in module.parameters()))
    assert marked == [16, 4, 0]


def model(**changes: Any) -> GPT:
    return GPT(replace(CONFIG, num_layers=4, **changes))


@pytest.mark.parametrize(
    ("options", "changes", "error", "match"),
    [
        ({"first_layers": 2, "last_layers": 2}, {}, ConfigurationError, "leave none of 4 layers"),
        (
            {"modules": ("mlp.*", "atention.*")},
            {},
            ConfigurationError,
            "matches no linear.*attention.qkv",
        ),
        ({"emulate": False}, {}, BackendError, "emulate=True"),
        ({"emulate": False, "recipe": "mxfp8"}, {}, BackendError, "fp32 scales"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, changes: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        apply_low_precision(model(**changes), LowPrecisionOptions(**{"emulate": True, **options}), ParallelMesh(), 4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"recipe": "fp8"}, "not known; choose from tensorwise"),
        ({"recipe": "rowwise", "margin": 1}, "margin=1 does nothing"),
        ({"recipe": "blockwise", "reduce_amax": True}, "reduce_amax does nothing"),
        ({"recipe": "mxfp8", "experts_together": True}, "'mxfp8' has products of one expert only"),
        ({"history": 0}, "history=0; give a whole number, at least 1"),
        ({"recipe": "delayed", "history": 1.5}, "history=1.5; give a whole number"),
        ({"history": 99}, "history=99 does nothing for recipe 'tensorwise'"),
        ({"margin": -20}, "margin=-20; give a whole number, at least 0"),
        ({"margin": 15}, "margin=15; with more than 14"),
        ({"first_layers": -1}, "first_layers=-1; give a whole number, at least 0"),
        ({"last_layers": 0.5}, "last_layers=0.5; give a whole number"),
        ({"modules": ()}, r"modules=\(\) names no layer"),
        ({"modules": "mlp.*"}, r"modules='mlp\.\*' is one string; give a list: \['mlp\.\*'\]"),
    ],
)
def test_options_that_do_nothing_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        LowPrecisionOptions(**options)


def test_how_far_delayed_scales_look_back() -> None:
    for options, length in (({}, 16), ({"history": 3}, 3)):
        module = model()
        apply_low_precision(module, LowPrecisionOptions("delayed", emulate=True, **options), ParallelMesh())
        (found,) = {found.history.length for p in module.parameters() if (found := precision_of(p)) is not None}
        assert found == length


def test_the_largest_values_keep_their_bits_up_to_the_largest_margin() -> None:
    x = (1 + torch.arange(7) / 8).expand(16, 7)  # what e4m3 has between its largest, 1.75 * 2^8, and 2^8
    for margin, exact in ((MAX_MARGIN, True), (MAX_MARGIN + 1, False)):
        quantized = quantize(x, recipe("tensorwise").x, 2.0**margin * x.max())
        assert torch.equal(quantized.dequantize(x.dtype), x) == exact


def test_foreign_models_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Linear has none"):
        apply_low_precision(nn.Linear(16, 16), LowPrecisionOptions(emulate=True), ParallelMesh())
    plugin = MegatronLowPrecision()
    plugin.plain = True
    with pytest.raises(ConfigurationError, match="plain LightningModule"):
        plugin.prepare(ParallelModel(nn.Linear(16, 16), ParallelMesh()))
