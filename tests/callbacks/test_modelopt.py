"""Quantization by the strategy: every layout as ModelOpt itself does it to the whole model on one device."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from megalight.attachments import QUANTIZED
from megalight.callbacks import ModelOptQuantization
from megalight.callbacks.modelopt import format_change
from megalight.errors import ConfigurationError, DataError, MegalightError
from megalight.inference import load_model
from megalight.models.gpt import GPT
from megalight.models.gpt.mixer_config import LatentConfig
from megalight.nn import Linear, RMSNorm
from megalight.nn.embedding_and_head import DistillationTarget, LMHead
from megalight.nn.moe import Experts, SharedConfig
from megalight.nn.moe.config import MoEConfig
from megalight.ops.divergence import Projection
from megalight.parallel.model import ParallelModel
from megalight.parallel.transform import ModelTransform
from megalight.plugins.modelopt import Quantizers
from megalight.plugins.modelopt.layers import register_layers
from megalight.plugins.modelopt.presets import HEAD, modelopt
from megalight.plugins.modelopt.quantizers import places
from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical
from tests.strategies.training import BASE, CONFIGS, SEED, WithData, by_hand, fit, global_batch
from tests.support.environment import trainer
from tests.support.workers import run

pytest.importorskip("modelopt")
KV = "FP8_KV_CFG"
SP = {"tensor_parallel": 2, "sequence_parallel": True}
MODELS = {**CONFIGS, "moe": replace(BASE, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))}
CALIBRATION = 2
"""Batches of the sanity check."""


def rules_of(preset: str) -> dict[str, Any]:
    """ModelOpt's own reading of a preset or recipe."""
    if "/" in preset:
        found: dict[str, Any] = modelopt("recipe").load_recipe(preset).quantize.model_dump(exclude_unset=True)
        return found
    return copy.deepcopy(getattr(modelopt(), preset))


@dataclass(frozen=True)
class ByModelOpt(ModelTransform):
    """ModelOpt's own ``mtq.quantize`` of the whole model."""

    name: ClassVar[str] = "by_modelopt"

    preset: str
    head: bool = False
    kv: str | None = None

    def change(self, model: nn.Module) -> None:
        pass

    def with_values(self, model: Any) -> None:
        mtq = modelopt()
        register_layers()
        config = rules_of(self.preset)
        config["quant_cfg"] = [
            rule for rule in config["quant_cfg"] if not (self.head and rule["quantizer_name"] in HEAD)
        ] + (copy.deepcopy(getattr(mtq, self.kv)["quant_cfg"]) if self.kv else [])

        def loop(root: nn.Module) -> None:
            with torch.no_grad():
                for step in range(CALIBRATION):
                    batch = global_batch(step)
                    root(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the output layer is left out
            mtq.quantize(model.root, config, loop)
        FOUND[self] = {
            name.replace("._amax", ".amax"): value.clone().numpy()
            for name, value in model.root.named_buffers()
            if name.endswith("_amax")
        }


FOUND: dict[ByModelOpt, dict[str, Any]] = {}


@functools.cache
def expected(name: str, preset: str, head: bool, kv: str | None) -> dict[str, Any]:
    transform = ByModelOpt(preset, head, kv)
    found = by_hand(MODELS[name], transforms=[transform])
    return {**found, "amax": FOUND[transform]}


class Amax(pl.Callback):
    reads_weights = False

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = amax_of(trainer.strategy.parallel_model)


def amax_of(model: ParallelModel) -> dict[str, Any]:
    named = {name: tensor for name, tensor in model.tensors().items() if name.endswith("_amax")}
    specs = {name: model.specs[name] for name in named}
    return {
        name: value.numpy() for name, value in gather_canonical(named, specs, model.mesh, sum_partial=False).items()
    }


def train(name: str, preset: str, head: bool, kv: str | None, layout: dict[str, Any]) -> dict[str, Any]:
    amax = Amax()
    callback = ModelOptQuantization(preset, head, kv)
    found = fit(
        MODELS[name],
        trainer_options={"num_sanity_val_steps": CALIBRATION, "limit_val_batches": CALIBRATION},
        extra_callbacks=[callback, amax],
        **layout,
    )
    return {**found, "amax": amax.found}


@pytest.mark.parametrize(
    ("world", "name", "preset", "head", "kv", "layout"),
    [
        pytest.param(1, "gqa", "FP8_DEFAULT_CFG", False, None, {}, marks=pytest.mark.full),
        (1, "gqa", "general/ptq/fp8_default-kv_fp8", False, None, {}),
        pytest.param(1, "gqa", "general/ptq/fp8_default-kv_fp8_cast", False, None, {}, marks=pytest.mark.full),
        (2, "gqa", "FP8_DEFAULT_CFG", True, KV, {"tensor_parallel": 2, "sequence_parallel": True}),
        (2, "gqa", "FP8_DEFAULT_CFG", True, KV, {"pipeline_parallel": 2}),
        pytest.param(
            4,
            "gqa",
            "FP8_DEFAULT_CFG",
            True,
            KV,
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(2, "gqa", "INT8_DEFAULT_CFG", False, None, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param(2, "gpt2", "INT8_DEFAULT_CFG", False, None, {}, marks=pytest.mark.full),
        pytest.param(4, "gpt2", "INT8_DEFAULT_CFG", False, None, {"tensor_parallel": 2}, marks=pytest.mark.full),
        (2, "moe", "FP8_DEFAULT_CFG", False, None, {"expert_parallel": 2}),
        pytest.param(
            2, "moe", "INT8_DEFAULT_CFG", False, None, SP | {"expert_tensor_parallel": 2}, marks=pytest.mark.full
        ),
        pytest.param(
            2, "gqa", "FP8_PER_CHANNEL_PER_TOKEN_CFG", False, KV, {"context_parallel": 2}, marks=pytest.mark.full
        ),
        # one scale for each token, of whose features ranks hold parts
        (2, "gqa", "FP8_PER_CHANNEL_PER_TOKEN_CFG", False, KV, SP),
        pytest.param(
            2,
            "moe",
            "FP8_PER_CHANNEL_PER_TOKEN_CFG",
            False,
            None,
            SP | {"expert_tensor_parallel": 2},
            marks=pytest.mark.full,
        ),
        # weights change before training begins
        (2, "gqa", "INT8_SMOOTHQUANT_CFG", False, None, SP),
        pytest.param(2, "gqa", "INT8_SMOOTHQUANT_CFG", False, None, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        # sharded parameters are gathered for calibration
        pytest.param(
            2,
            "gqa",
            "INT8_SMOOTHQUANT_CFG",
            False,
            KV,
            {"options": {"level": "optim_grads_params"}},
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            "moe",
            "FP8_DEFAULT_CFG",
            False,
            None,
            {"options": {"level": "optim_grads_params"}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_layout_finds_and_trains_what_modelopt_does(
    world: int, name: str, preset: str, head: bool, kv: str | None, layout: dict[str, Any]
) -> None:
    wanted = expected(name, preset, head, kv)
    found = run(train, world, name, preset, head, kv, layout)[0]
    assert_same_amax(found["amax"], wanted["amax"])
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-9)
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-9)
    for key, value in wanted["final"].items():
        np.testing.assert_allclose(found["final"][key], value, rtol=1e-7, atol=1e-9, err_msg=key)


def assert_same_amax(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Fused weights have rows of several canonical tensors."""
    seen = 0
    for name, value in wanted.items():
        fused = f"model.{name}"
        if fused in found:
            np.testing.assert_allclose(found[fused], value, rtol=1e-12, err_msg=name)
            seen += 1
            continue
        if "_weight_quantizers." in fused:
            # An expert's gate and up are one matrix of a stack.
            around, stack, index, _ = re.fullmatch(r"(.*)\.(\w+)_weight_quantizers\.(\d+)(\.amax)", fused).groups()
            names = [f"{around}.{index}.{stack}_weight_quantizer.amax"]
            if value.ndim:
                own = ("gate", "up") if stack == "up" else ("down",)
                names = [f"{around}.{index}.{name}.weight_quantizer.amax" for name in own]
            parts = [np.atleast_1d(found[name]) for name in names]
            np.testing.assert_allclose(np.concatenate(parts), np.atleast_1d(value), rtol=1e-12, err_msg=name)
            seen += len(parts)
            continue
        around, _, rest = fused.partition("qkv." if "qkv" in fused else "gate_up.")
        parts = [found[f"{around}{part}.{rest}"] for part in ("qkv" if "qkv" in fused else ("gate", "up"))]
        np.testing.assert_allclose(np.concatenate(parts), value, rtol=1e-12, err_msg=name)
        seen += len(parts)
    assert seen == len(found) > 8


def calibrate(folder: str, layout: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """PTQ: a validation run that calibrates and saves, and one that measures."""
    module = WithData(CONFIGS["gqa"], seed=SEED)
    runner = validator(MegatronStrategy(**layout), ModelOptQuantization(save_to=folder, measure=True))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        (plain,) = runner.validate(module, verbose=False)
    (metrics,) = runner.validate(module, verbose=False)
    if runner.is_global_zero:
        assert format_change(plain["val_loss"], metrics["val_loss"]) in printed.getvalue()
    return amax_of(runner.strategy.parallel_model), metrics["val_loss"]


class Fails(pl.Callback):
    """An error after the first batch of the first validation."""

    failed = False

    def on_validation_batch_end(self, *_: Any) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no more")


def _interrupted(preset: str, fails: bool) -> tuple[dict[str, Any], float]:
    quantization = ModelOptQuantization(preset)
    callbacks = [quantization, *([Fails()] if fails else [])]
    module = WithData(CONFIGS["gqa"], seed=SEED)
    runner = trainer(MegatronStrategy(), callbacks=callbacks, use_distributed_sampler=False)
    if fails:
        with pytest.raises(RuntimeError, match="no more"):
            runner.validate(module, verbose=False)
        assert quantization._calibration is None
        assert not quantization._batches
    runner.validate(module, verbose=False)
    (metrics,) = runner.validate(module, verbose=False)
    return amax_of(runner.strategy.parallel_model), metrics["val_loss"]


@pytest.mark.parametrize("preset", ["FP8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG"])
def test_a_calibration_that_failed_can_begin_again(preset: str) -> None:
    (amax, loss), (wanted, same) = run(_interrupted, 1, preset, True)[0], run(_interrupted, 1, preset, False)[0]
    assert_same_amax_names(amax, wanted)
    assert loss == same


def measure(folder: str, layout: dict[str, Any]) -> tuple[dict[str, Any], float]:
    runner = validator(MegatronStrategy(**layout), ModelOptQuantization())
    (metrics,) = runner.validate(WithData(CONFIGS["gqa"], seed=SEED + 1), ckpt_path=folder, verbose=False)
    return amax_of(runner.strategy.parallel_model), metrics["val_loss"]


def validator(strategy: MegatronStrategy, callback: pl.Callback) -> pl.Trainer:
    return trainer(strategy, callbacks=[callback], use_distributed_sampler=False)


def test_a_quantized_checkpoint_loads_in_another_layout_and_alone(tmp_path: Path) -> None:
    folder = str(tmp_path / "fp8")
    amax, loss = run(calibrate, 2, folder, {"tensor_parallel": 2, "sequence_parallel": True})[0]
    again, same = run(measure, 2, folder, {"pipeline_parallel": 2})[0]
    assert_same_amax_names(amax, again)
    assert same == pytest.approx(loss, rel=1e-9)
    assert "is calibrated already" in run(_again, 1, folder, str(tmp_path / "again"))[0]
    assert not (tmp_path / "again").exists()
    alone = load_model(folder)
    quantizers = {name for name, _ in alone.named_buffers() if name.endswith("_amax")}
    assert {f"model.{name}".replace("._amax", ".amax") for name in quantizers} == set(amax)


def _again(folder: str, other: str) -> str:
    runner = validator(MegatronStrategy(), ModelOptQuantization(save_to=other))
    with pytest.raises(ConfigurationError) as caught:
        runner.validate(WithData(CONFIGS["gqa"], seed=SEED), ckpt_path=folder, verbose=False)
    return str(caught.value)


class Forget(pl.Callback):
    """Forgets what the quantizers of the last pipeline stage saw, as if its layers had not been called."""

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.mesh.rank("pp") == strategy.mesh.size("pp") - 1:
            for place in places(strategy.parallel_model.root):
                place.quantizer._calibrator.reset()


def _refused(folder: str, layout: dict[str, Any], forgetful: bool, message: str) -> None:
    callbacks = [Forget()] * forgetful + [ModelOptQuantization(save_to=folder)]
    runner = trainer(MegatronStrategy(**layout), callbacks=callbacks, use_distributed_sampler=False)
    with pytest.raises(MegalightError, match=message):
        runner.validate(WithData(CONFIGS["gqa"], seed=SEED), verbose=False)


def test_calibration_that_fails_one_stage_fails_all(tmp_path: Path) -> None:
    """None of them waits for the others, and nothing is written."""
    run(_refused, 2, str(tmp_path / "fp8"), {"pipeline_parallel": 2}, True, "gave no data")
    assert not (tmp_path / "fp8").exists()


def test_a_folder_in_the_way_of_save_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "fp8" / "kept"
    kept.parent.mkdir()
    kept.touch()
    run(_refused, 2, str(kept.parent), {"tensor_parallel": 2, "sequence_parallel": True}, False, "is there already")
    assert kept.exists()


def assert_same_amax_names(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name


LATENT = {
    "latent": LatentConfig(kv_rank=16, head_dim=8, rotary_dim=4),
    "mixer_pattern": ("latent_attention",),
    "num_kv_heads": 0,
    "head_dim": 0,
}


def change(transform: Quantizers, **config: Any) -> None:
    with torch.device("meta"):
        transform.change(GPT(replace(BASE, **config)))


@pytest.mark.parametrize(
    ("transform", "config", "message"),
    [
        (Quantizers("FP8_DEFAULT"), {}, r"no preset 'FP8_DEFAULT'.*FP8_DEFAULT_CFG"),
        (Quantizers("MAMBA_MOE_NVFP4_CONSERVATIVE_CFG"), {}, "names modules of other models"),
        (Quantizers("MAMBA_MOE_FP8_CONSERVATIVE_CFG"), {}, "names modules of other models"),
        (Quantizers("NVFP4_AWQ_FULL_CFG"), {}, "calibrates by 'awq_full'"),
        (Quantizers(kv="INT8_KV"), {}, "no preset 'INT8_KV'"),
        (Quantizers(kv="NVFP4_KV_ROTATE_CFG"), {}, "kv='NVFP4_KV_ROTATE_CFG' is not supported.*FP8_KV_CFG"),
        (Quantizers("FP8_KV_CFG"), LATENT, "LatentAttention over InnerAttention, which does not keep"),
        (Quantizers("general/ptq/fp8"), {}, "library has no recipe 'general/ptq/fp8'.*fp8_default-kv_fp8"),
        (Quantizers("general/ptq/nvfp4_omlp_only-kv_fp8"), {}, "names modules of other models"),
        (Quantizers("general/speculative_decoding/eagle3"), {}, "is not one of quantization by fixed rules"),
    ],
)
def test_what_cannot_be_quantized_is_refused(transform: Quantizers, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        change(transform, **config)


def test_gates_of_shared_experts_keep_their_dtype() -> None:
    """ModelOpt leaves out ``shared_expert_gate``, which is ``shared_gate`` here."""
    shared = SharedConfig(ffn_hidden_size=12, gate=True)
    with torch.device("meta"):
        model = GPT(replace(BASE, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, shared=shared)))
    Quantizers().change(model)
    linear = {path for path, module in model.named_modules() if isinstance(module, Linear | Experts)}
    left = {path for path in linear if path.endswith(("shared_gate", "output_layer"))}
    assert len(left) == BASE.num_layers + 1
    assert QUANTIZED.get(model).keys() == linear - left


def test_a_preset_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="names no linear layer of Embedding"):
        Quantizers().change(nn.Embedding(4, 4))


def test_a_student_learns_with_its_quantized_head() -> None:
    """Calibration sees the head's inputs, and the student's own loss is that of the quantized head."""
    mtq = modelopt()
    register_layers()
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["quant_cfg"] = [rule for rule in config["quant_cfg"] if rule["quantizer_name"] not in HEAD]
    root = nn.Module()
    root.head = head = LMHead(RMSNorm(8), Linear(8, 16))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    hidden, labels = torch.randn(6, 8), torch.arange(6)
    target = DistillationTarget(Projection(torch.randn(6, 5), torch.randn(16, 5)))
    plain = head(hidden, labels)
    mtq.quantize(root, config, lambda _: head.learn(hidden, labels, target))
    _, own = head.learn(hidden, labels, target)
    assert own is not None
    assert torch.equal(own, head(hidden, labels))
    assert not torch.allclose(own, plain, rtol=1e-4)


def _without_data(how: str) -> str:
    options = {"validate": {"limit_val_batches": 0}, "fit": {"num_sanity_val_steps": 0}}.get(how, {})
    runner = trainer(MegatronStrategy(), callbacks=[ModelOptQuantization()], use_distributed_sampler=False, **options)
    module = WithData(CONFIGS["gqa"], seed=SEED)
    arguments = {"dataloaders": []} if how == "empty" else {}
    with pytest.raises((ConfigurationError, DataError)) as caught:
        getattr(runner, "validate" if how == "empty" else how)(module, **arguments)
    return str(caught.value)


def _on_a_cpu(kv: str) -> str:
    runner = validator(MegatronStrategy(), ModelOptQuantization(kv=kv))
    with pytest.raises(ConfigurationError) as caught:
        runner.validate(WithData(CONFIGS["gqa"], seed=SEED), verbose=False)
    return str(caught.value)


def test_formats_of_cuda_are_refused_on_a_cpu() -> None:
    assert "to which ModelOpt rounds on CUDA alone, and this is device 'cpu'" in run(_on_a_cpu, 1, "NVFP4_KV_CFG")[0]


def test_calibration_without_data_is_refused() -> None:
    assert "limit_val_batches is 0" in run(_without_data, 1, "validate")[0]
    assert "no validation batch" in run(_without_data, 1, "empty")[0]
    assert "num_sanity_val_steps=0" in run(_without_data, 1, "fit")[0]
