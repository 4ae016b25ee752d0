"""AWQ, SmoothQuant and blocks of 4 bits, under every layout: as ModelOpt itself finds them on one device."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from megalight.callbacks import Adapters, ModelOptQuantization
from megalight.errors import ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.nn.moe import Experts
from megalight.nn.moe.config import MoEConfig
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.plugins.modelopt import Quantizers
from megalight.plugins.modelopt.layers import register_layers
from megalight.plugins.modelopt.presets import HEAD, modelopt
from megalight.strategies import MegatronStrategy
from tests.strategies.training import CONFIGS, SEED, WithData, global_batch
from tests.support.environment import trainer
from tests.support.workers import run

pytest.importorskip("modelopt")
CONFIG = replace(CONFIGS["gqa"], hidden_size=256, ffn_hidden_size=256, head_dim=64)
"""Blocks of 128 features divide each half of a row."""
MODELS = {
    "gqa": CONFIG,
    # Squares of 128 x 128 must also divide the rows of keys, of which each rank has half.
    "square": replace(CONFIG, head_dim=128),
    # both ranks hold the same keys
    "mqa": replace(CONFIG, num_kv_heads=1),
    "moe": replace(CONFIG, moe=MoEConfig(num_experts=4, ffn_hidden_size=256, pattern=(False, True))),
}
BATCHES = 2
SP = {"tensor_parallel": 2, "sequence_parallel": True}
FULLY_SHARDED = {"data_parallel": DataParallelOptions(level="optim_grads_params")}


@functools.cache
def expected(name: str, preset: str, head: bool) -> tuple[nn.Module, float]:
    """The whole model quantized by ModelOpt, and its loss."""
    register_layers()
    mtq = modelopt()
    model = GPT(MODELS[name]).double()
    initialize(model, SEED, "model.")

    def loop(root: nn.Module) -> float:
        total = count = 0.0
        with torch.no_grad():
            for step in range(BATCHES):
                batch = global_batch(step)
                mask = batch.loss_mask.reshape(-1)
                # from logits: only so ModelOpt sees the product of the output layer
                logits = root(batch.tokens.reshape(-1), batch.sequences).logits
                losses = nn.functional.cross_entropy(logits, batch.labels.reshape(-1), reduction="none")
                total, count = total + float((losses * mask).sum()), count + float(mask.sum())
        return total / count

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the output layer is left out
        config = copy.deepcopy(getattr(mtq, preset))
        config["quant_cfg"] = [rule for rule in config["quant_cfg"] if not (head and rule["quantizer_name"] in HEAD)]
        mtq.quantize(model, config, loop)
    return model, loop(model)


def validate(
    name: str, preset: str, layout: dict[str, Any], save_to: str | None, source: str | None, head: bool = False
) -> list[float]:
    """Calibrate and measure; with a ``source``, measure its model."""
    callbacks = [] if source else [ModelOptQuantization(preset, head, save_to=save_to)]
    runner = trainer(
        MegatronStrategy(**layout), callbacks=callbacks, use_distributed_sampler=False, limit_val_batches=BATCHES
    )
    module = WithData(MODELS[name], seed=SEED)
    times = 1 if source else 2
    return [runner.validate(module, ckpt_path=source, verbose=False)[0]["val_loss"] for _ in range(times)]


@pytest.mark.parametrize(
    ("name", "preset", "world", "layout"),
    [
        pytest.param("gqa", "INT4_AWQ_CFG", 2, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        ("gqa", "INT4_AWQ_CFG", 2, SP),
        pytest.param("mqa", "INT4_AWQ_CFG", 2, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("gqa", "INT4_AWQ_CFG", 4, SP | {"pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param("gqa", "INT4_AWQ_CFG", 2, {}, marks=pytest.mark.full),
        pytest.param("gqa", "W4A8_AWQ_BETA_CFG", 2, SP, marks=pytest.mark.full),
        pytest.param("gqa", "W4A8_AWQ_BETA_CFG", 2, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        ("mqa", "INT8_SMOOTHQUANT_CFG", 2, SP),
        pytest.param("gqa", "INT8_SMOOTHQUANT_CFG", 2, {"context_parallel": 2}, marks=pytest.mark.full),
        ("square", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", 2, SP),
        ("gqa", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", 2, SP),
        pytest.param("gqa", "INT4_AWQ_CFG", 2, FULLY_SHARDED, marks=pytest.mark.full),
        pytest.param("gqa", "W4A8_AWQ_BETA_CFG", 4, SP | FULLY_SHARDED, marks=pytest.mark.full),
    ],
)
def test_a_preset_finds_what_modelopt_does(
    name: str, preset: str, world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    find(name, preset, world, layout, tmp_path)


@pytest.mark.parametrize(
    ("name", "preset", "layout"),
    [
        pytest.param("gqa", "INT4_AWQ_CFG", SP, marks=pytest.mark.full),
        ("gqa", "INT8_SMOOTHQUANT_CFG", {"pipeline_parallel": 2}),
        pytest.param("gqa", "W4A8_AWQ_BETA_CFG", SP | FULLY_SHARDED, marks=pytest.mark.full),
    ],
)
def test_the_output_layer_is_searched_too(name: str, preset: str, layout: dict[str, Any], tmp_path: Path) -> None:
    found = find(name, preset, 2, layout, tmp_path, head=True)
    assert found.head.output_layer.input_quantizer.pre_quant_scale.isfinite().all()


def find(name: str, preset: str, world: int, layout: dict[str, Any], tmp_path: Path, head: bool = False) -> Any:
    """Calibrate and save; compare with the whole model in ModelOpt's hands; return what was saved."""
    wanted, loss = expected(name, preset, head)
    plain, rounded = run(validate, world, name, preset, layout, str(tmp_path / "q"), None, head, timeout=240)[0]
    # ModelOpt adds up magnitudes of batches in float32.
    close = 1e-6 if "AWQ" in preset else 1e-9
    assert rounded == pytest.approx(loss, rel=close)
    assert plain != pytest.approx(rounded, rel=1e-5)
    found = load_model(str(tmp_path / "q"))
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(wanted, kind)())
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key].to(value.dtype), value, rtol=close, atol=1e-9, msg=key)
    # the checkpoint computes the same where rows and columns are split
    again = run(validate, 2, name, preset, SP, None, str(tmp_path / "q"), timeout=240)[0][0]
    assert again == pytest.approx(rounded, rel=1e-9)
    return found


def int4(weight: Tensor) -> Tensor:
    """``[out, in]`` rounded by blocks of 128 features."""
    blocks = weight.unflatten(1, (-1, 128))
    step = blocks.abs().amax(-1, keepdim=True) / 7
    return ((blocks / step).round().clamp(-8, 7) * step).flatten(1)


def awq_by_hand(stack: Tensor, inputs: list[Tensor]) -> Tensor:
    """AWQ's scales of the inputs of a stack ``[E, out, in]``, which all experts share: one search over all outputs."""
    seen = torch.cat(inputs).abs().mean(0)
    blocks = stack.abs().unflatten(2, (-1, 128))
    weights = (blocks / blocks.amax(-1, keepdim=True)).flatten(2).mean((0, 1))
    best: tuple[float, Tensor] | None = None
    for step in range(11):
        scales = (seen ** (step / 10) / weights ** (1 - step / 10)).clamp(1e-4, 1e4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(
            float(((x / scales) @ int4(w * scales).T - x @ w.T).square().sum())
            for w, x in zip(stack, inputs, strict=True)
        )
        if best is None or error < best[0]:
            best = error, scales
    assert best is not None
    return 1 / best[1]


@functools.cache
def experts_by_hand() -> tuple[dict[str, Tensor], Experts]:
    """Scales of the inputs of both stacks, and the stacks before."""
    model = GPT(MODELS["moe"]).double()
    initialize(model, SEED, "model.")
    experts: Any = model.layers["1"].mlp.experts
    seen: dict[str, list[list[Tensor]]] = {"up": [[], [], [], []], "down": [[], [], [], []]}

    def look(_: nn.Module, arguments: tuple[Any]) -> None:
        start = 0
        for expert, stop in enumerate(arguments[0].offsets.tolist()):
            x = arguments[0].tokens[start:stop]
            seen["up"][expert].append(x)
            gate, up = (x @ experts.up[expert].T).chunk(2, -1)
            seen["down"][expert].append(nn.functional.silu(gate) * up)
            start = stop

    experts.register_forward_pre_hook(look)
    with torch.no_grad():
        for step in range(BATCHES):
            batch = global_batch(step)
            model(batch.tokens.reshape(-1), batch.sequences)
        found = {
            name: awq_by_hand(getattr(experts, name), [torch.cat(parts) for parts in each])
            for name, each in seen.items()
        }
    return found, experts


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"expert_parallel": 2}),
        pytest.param(2, SP | {"expert_tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param(2, {"expert_parallel": 1} | FULLY_SHARDED, marks=pytest.mark.full),
        pytest.param(4, SP | {"expert_parallel": 2, "expert_tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param(2, SP | {"expert_parallel": 2, "expert_tensor_parallel": 1}, marks=pytest.mark.full),
    ],
)
def test_experts_share_the_scales_of_one_search(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    wanted, before = experts_by_hand()
    _, rounded = run(validate, world, "moe", "INT4_AWQ_CFG", layout, str(tmp_path / "q"), None, timeout=240)[0]
    found: Any = load_model(str(tmp_path / "q")).layers["1"].mlp.experts
    for stack, scales in wanted.items():
        # scales are float32
        torch.testing.assert_close(
            getattr(found, f"{stack}_input_quantizer").pre_quant_scale.double(), scales, rtol=1e-6, atol=0
        )
        weights, old = getattr(found, stack).double(), getattr(before, stack)
        torch.testing.assert_close(weights, old.detach() / scales, rtol=1e-6, atol=1e-12)
        for expert, quantizer in enumerate(getattr(found, f"{stack}_weight_quantizers")):
            limits = weights[expert].unflatten(1, (-1, 128)).abs().amax(-1)
            torch.testing.assert_close(quantizer.amax.double().view_as(limits), limits, rtol=1e-9, atol=0)
    assert run(validate, 1, "moe", "INT4_AWQ_CFG", {}, None, str(tmp_path / "q"))[0][0] == pytest.approx(
        rounded, rel=1e-9
    )


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("W4A8_AWQ_BETA_CFG", marks=pytest.mark.full),
        pytest.param("INT8_SMOOTHQUANT_CFG", marks=pytest.mark.full),
    ],
)
def test_experts_round_alike_in_every_layout(preset: str, tmp_path: Path) -> None:
    """Two roundings of each weight, and scales of inputs that are rounded too."""
    wanted = run(validate, 1, "moe", preset, {}, None, None, timeout=240)[0]
    layout = SP | {"expert_tensor_parallel": 2}
    found = run(validate, 2, "moe", preset, layout, str(tmp_path / "q"), None, timeout=240)[0]
    assert found == pytest.approx(wanted, rel=1e-9)
    again = run(validate, 2, "moe", preset, {"expert_parallel": 2}, None, str(tmp_path / "q"), timeout=240)[0]
    assert again == [pytest.approx(wanted[1], rel=1e-9)]


class Masters(pl.Callback):
    """Keeps the float32 masters and the scales of inputs when training begins."""

    reads_weights = False

    def __init__(self) -> None:
        self.found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        scales = {name: value for name, value in strategy.parallel_model.root.named_buffers() if "pre_quant" in name}
        with strategy.parallel_model.full_parameters():
            for bucket in strategy.engine.buckets:
                masters = bucket.gathered(bucket.shard.master.detach())
                for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
                    path = info.name.removesuffix(".weight")
                    if (scale := scales.get(f"{path}.input_quantizer._pre_quant_scale")) is not None:
                        master = masters[slot.start : slot.stop].view(info.parameter.shape)
                        self.found[path] = master.clone(), info.parameter.detach().clone(), scale.float()


def half(preset: str, level: Any) -> None:
    """Training in bf16: the masters, which are drawn in float32, are divided themselves."""
    masters = Masters()
    runner = trainer(
        MegatronStrategy(data_parallel=DataParallelOptions(level=level)),
        callbacks=[ModelOptQuantization(preset), masters],
        use_distributed_sampler=False,
        precision="bf16-mixed",
        num_sanity_val_steps=BATCHES,
        max_steps=1,
    )
    runner.fit(WithData(CONFIG, seed=SEED))
    drawn = GPT(CONFIG)
    initialize(drawn, SEED, "model.")
    assert len(masters.found) == 4 * CONFIG.num_layers
    for path, (master, parameter, scale) in masters.found.items():
        wanted = drawn.get_submodule(path).weight / scale
        assert master.dtype == torch.float32
        # scales are kept in the dtype of the weights, and were float32 when the weights were divided
        ratio = master / drawn.get_submodule(path).weight
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-6, atol=0)
        torch.testing.assert_close(master, wanted, rtol=1e-2, atol=0)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(master, parameter.float())


@pytest.mark.parametrize(
    ("preset", "level"),
    [
        ("INT4_AWQ_CFG", "optim"),
        ("INT8_SMOOTHQUANT_CFG", "optim_grads_params"),
        pytest.param("INT4_AWQ_CFG", "no_shard", marks=pytest.mark.full),
    ],
)
def test_masters_keep_their_bits_when_weights_are_divided(preset: str, level: str) -> None:
    run(half, 2, preset, level)


def adapted() -> str:
    runner = trainer(
        MegatronStrategy(),
        callbacks=[ModelOptQuantization("INT8_SMOOTHQUANT_CFG"), Adapters(rank=2)],
        use_distributed_sampler=False,
    )
    with pytest.raises(ConfigurationError) as caught:
        runner.validate(WithData(CONFIG, seed=SEED), verbose=False)
    return str(caught.value)


def test_what_cannot_be_searched_is_refused() -> None:
    assert "has adapters that would see other inputs" in run(adapted, 1)[0]
    tied = replace(CONFIG, tie_embeddings=True)
    with torch.device("meta"), pytest.raises(ConfigurationError, match=r"head\.output_layer\.weight, which is also"):
        Quantizers("INT4_AWQ_CFG", head=True).change(GPT(tied))


def test_rows_that_blocks_do_not_divide_are_refused() -> None:
    assert "blocks of 128 features do not divide" in run(narrow, 1)[0]


def narrow() -> str:
    runner = trainer(
        MegatronStrategy(),
        callbacks=[ModelOptQuantization("INT4_BLOCKWISE_WEIGHT_ONLY_CFG")],
        use_distributed_sampler=False,
    )
    with pytest.raises(ConfigurationError) as caught:
        runner.validate(WithData(CONFIGS["gqa"], seed=SEED), verbose=False)
    return str(caught.value)
