"""Formats of layers: those of ModelOpt's own search on one device, under every layout."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.callbacks import AutoQuantize, ModelOptQuantization
from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.plugins.modelopt.layers import register_layers
from megalight.plugins.modelopt.presets import modelopt
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_modelopt_search import BATCHES, FULLY_SHARDED, MODELS, int4
from tests.strategies.training import SEED, WithData, global_batch
from tests.support.environment import trainer
from tests.support.workers import run

pytest.importorskip("modelopt")
SP = {"tensor_parallel": 2, "sequence_parallel": True}
FORMATS = ("INT4_AWQ_CFG", "FP8_DEFAULT_CFG")
BITS = 7.5


def plain(name: str) -> GPT:
    model = GPT(MODELS[name]).double()
    initialize(model, SEED, "model.")
    return model


def mean_loss(root: nn.Module, step: int) -> Tensor:
    batch = global_batch(step)
    mask = batch.loss_mask.reshape(-1)
    losses: Tensor = root(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1)).losses
    return (losses * mask).sum() / mask.sum()


@functools.cache
def by_modelopt(name: str) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Scores and choices of its search."""
    register_layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, state = modelopt().auto_quantize(
            plain(name),
            constraints={"effective_bits": BITS},
            quantization_formats=list(FORMATS),
            data_loader=list(range(BATCHES)),
            forward_step=mean_loss,
            forward_backward_step=lambda root, step: mean_loss(root, step).backward(),
            disabled_layers=["*output_layer"],
            # it gives AWQ a quarter of them
            num_calib_steps=4 * BATCHES,
            num_score_steps=BATCHES,
        )
    scores, chosen = dict[str, dict[str, float]](), dict[str, str]()
    for key, found in state["candidate_stats"].items():
        path = key.removesuffix(".quant_recipe")
        names = [str(each).partition("(")[0] for each in found["formats"]]
        scores[path] = dict(zip(names, found["scores"], strict=True))
        chosen[path] = str(state["best"]["recipe"][key]).partition("(")[0].lower()
    return scores, chosen


def search(name: str, formats: tuple[str, ...], bits: float, output: str, layout: dict[str, Any]) -> Any:
    callback = AutoQuantize(formats, output, bits)
    runner = trainer(
        MegatronStrategy(**layout), callbacks=[callback], use_distributed_sampler=False, limit_val_batches=BATCHES
    )
    module = WithData(MODELS[name], seed=SEED)
    (metrics,) = runner.validate(module, verbose=False)
    return {path: (each.preset, dict(each.scores), each.numel) for path, each in callback.found.items()}, metrics


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        pytest.param("gqa", 1, {}, marks=pytest.mark.full),
        ("mqa", 2, SP),
        pytest.param("gqa", 2, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param("mqa", 2, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("gqa", 2, {"context_parallel": 2}, marks=pytest.mark.full),
        pytest.param("gqa", 2, {}, marks=pytest.mark.full),
        pytest.param("gqa", 2, FULLY_SHARDED, marks=pytest.mark.full),
        pytest.param("gqa", 4, SP | {"pipeline_parallel": 2, "virtual_pipeline": 1}, marks=pytest.mark.full),
    ],
)
def test_scores_and_choices_are_those_of_modelopt(
    name: str, world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    scores, chosen = by_modelopt(name)
    output = tmp_path / "layers.json"
    everywhere = run(search, world, name, FORMATS, BITS, str(output), layout, timeout=240)
    found, _ = everywhere[0]
    # all ranks know all layers
    assert all(each[0] == found for each in everywhere)
    assert found.keys() == scores.keys()
    for path, (_, ours, _) in found.items():
        least = float("inf")
        for key in ours:
            # ModelOpt keeps the lowest of the scores so far, in float32
            least = min(least, ours[key])
            assert least == pytest.approx(scores[path][key], rel=1e-4), (path, key)
    assert {path: each[0].lower() for path, each in found.items()} == chosen
    # every kind of choice takes part
    assert len(set(chosen.values())) > 1
    written = json.loads(output.read_text())
    assert written["layers"] == {path: each[0] for path, each in found.items()}
    assert written["effective_bits"] <= BITS


def scores_of_some(count: int, output: str) -> tuple[int, dict[str, dict[str, float]]]:
    """The passes that scored, and what they found."""
    strategy, passes = MegatronStrategy(), list[Any]()
    probe = strategy.probe
    strategy.probe = lambda batch: (passes.append(batch), probe(batch))[1]  # type: ignore[method-assign]
    callback = AutoQuantize(("FP8_DEFAULT_CFG",), output, 16.0, score_batches=count)
    runner = trainer(strategy, callbacks=[callback], use_distributed_sampler=False, limit_val_batches=BATCHES)
    runner.validate(WithData(MODELS["gqa"], seed=SEED), verbose=False)
    return len(passes), {path: dict(each.scores) for path, each in callback.found.items()}


def test_scores_are_sums_over_the_batches_asked_for(tmp_path: Path) -> None:
    (one, first), (every, whole) = (run(scores_of_some, 1, n, str(tmp_path / "f.json"))[0] for n in (1, BATCHES))
    assert (one, every) == (1, BATCHES)
    assert all(0 < first[path][name] < score for path, each in whole.items() for name, score in each.items())
    with pytest.raises(ConfigurationError, match="score_batches is 0; it must be at least 1"):
        AutoQuantize(FORMATS, tmp_path / "f.json", score_batches=0)


def stack_score_by_hand() -> float:
    """Of INT4 in the experts of a layer: rounded weights alone, so that this needs no quantizer."""
    model, rounded = plain("moe"), plain("moe")
    experts, other = (each.layers["1"].mlp.experts for each in (model, rounded))
    with torch.no_grad():
        for stack in ("up", "down"):
            weight = getattr(other, stack)
            weight.copy_(torch.stack([int4(each) for each in weight]))
            other.weigh_output = experts.weigh_output = True
    total = 0.0

    def note(_: nn.Module, arguments: Any, output: Tensor) -> None:
        with torch.no_grad():
            change = other(*arguments) - output

        def add(gradient: Tensor) -> None:
            nonlocal total
            total += float((gradient * change).square().sum())

        output.register_hook(add)

    experts.register_forward_hook(note)
    for step in range(BATCHES):
        mean_loss(model, step).backward()
    return total


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {"expert_parallel": 2}, marks=pytest.mark.full),
        (2, SP | {"expert_tensor_parallel": 2}),
        pytest.param(4, SP | {"expert_parallel": 4, "expert_tensor_parallel": 1}, marks=pytest.mark.full),
    ],
)
def test_experts_have_one_format(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    formats = ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "FP8_DEFAULT_CFG")
    wanted, _ = run(search, 1, "moe", formats, 6.0, str(tmp_path / "one.json"), {}, timeout=240)[0]
    found, _ = run(search, world, "moe", formats, 6.0, str(tmp_path / "many.json"), layout, timeout=240)[0]
    assert found.keys() == wanted.keys()
    for path, (preset, scores, numel) in wanted.items():
        assert (found[path][0], found[path][2]) == (preset, numel)
        assert found[path][1] == pytest.approx(scores, rel=1e-9), path
    experts = wanted["layers.1.mlp.experts"]
    assert experts[1][formats[0]] == pytest.approx(stack_score_by_hand(), rel=1e-9)
    assert experts[2] == 4 * 3 * 256 * 256


def quantize(layers: Any, save_to: str, layout: dict[str, Any]) -> float:
    callback = ModelOptQuantization(layers=layers, save_to=save_to)
    runner = trainer(
        MegatronStrategy(**layout), callbacks=[callback], use_distributed_sampler=False, limit_val_batches=BATCHES
    )
    module = WithData(MODELS["gqa"], seed=SEED)
    return [runner.validate(module, verbose=False)[0]["val_loss"] for _ in range(2)][1]


def reload(folder: str, layout: dict[str, Any]) -> float:
    runner = trainer(MegatronStrategy(**layout), use_distributed_sampler=False, limit_val_batches=BATCHES)
    return runner.validate(WithData(MODELS["gqa"], seed=SEED), ckpt_path=folder, verbose=False)[0]["val_loss"]


def failing(passes: str, call: int, output: str) -> dict[str, Any]:
    """Search with a layer that fails in one of the passes, and tell what is left."""
    strategy, calls = MegatronStrategy(), list[Any]()
    whole = getattr(strategy, passes)

    def fails(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) <= call:
            return whole(batch)
        # In the middle of a pass, where layers before it have formats.
        layer = strategy.parallel_model.root.get_submodule("layers.1.mlp.down")
        layer.forward = lambda *args, **kwargs: 1 / 0  # type: ignore[assignment]
        try:
            return whole(batch)
        finally:
            del layer.forward

    setattr(strategy, passes, fails)
    callback = AutoQuantize(FORMATS, output, BITS)
    runner = trainer(strategy, callbacks=[callback], use_distributed_sampler=False, limit_val_batches=BATCHES)
    with pytest.raises(ZeroDivisionError):
        runner.validate(WithData(MODELS["gqa"], seed=SEED), verbose=False)
    root = strategy.parallel_model.root
    return {
        "calls": len(calls),
        "batches": len(callback._batches),
        "watched": [bool(getattr(module, "probes", None) or module._forward_hooks) for module in root.modules()],
        "frozen": [parameter.grad is not None or not parameter.requires_grad for parameter in root.parameters()],
        "loss": mean_loss(root, 0).item(),
    }


@pytest.mark.parametrize(
    ("passes", "call"),
    [
        ("replay", 3),  # in the second pass of AWQ
        pytest.param("replay", 0, marks=pytest.mark.full),
        pytest.param("probe", 1, marks=pytest.mark.full),
    ],
)
def test_an_error_leaves_a_model_that_rounds_nothing(passes: str, call: int, tmp_path: Path) -> None:
    found = run(failing, 1, passes, call, str(tmp_path / "formats.json"))[0]
    assert (found["calls"], found["batches"]) == (call + 1, 0)
    assert not any(found["watched"])
    assert not any(found["frozen"])
    assert found["loss"] == mean_loss(plain("gqa"), 0).item()


def test_layers_have_their_own_formats(tmp_path: Path) -> None:
    """As ModelOpt's own rules say it, in one quantized model whose checkpoint loads in another layout."""
    register_layers()
    mtq, model = modelopt(), plain("gqa")
    layers = {
        "layers.*.mlp.*": "INT8_DEFAULT_CFG",
        "layers.0.attention.qkv": "none",
        "layers.1.mlp.down": "INT4_AWQ_CFG",
    }
    (tmp_path / "layers.json").write_text(json.dumps({"layers": layers}))
    loss = run(quantize, 2, str(tmp_path / "layers.json"), str(tmp_path / "q"), SP, timeout=240)[0]
    assert run(reload, 2, str(tmp_path / "q"), {"pipeline_parallel": 2})[0] == pytest.approx(loss, rel=1e-9)
    rules = [*mtq.FP8_DEFAULT_CFG["quant_cfg"]]
    for kind in ("weight", "input"):
        (given,) = (r["cfg"] for r in mtq.INT8_DEFAULT_CFG["quant_cfg"] if r["quantizer_name"] == f"*{kind}_quantizer")
        rules += [{"quantizer_name": f"layers.*.mlp.*{kind}_quantizer", "cfg": given}]
    rules += [
        {"quantizer_name": f"{path}.*", "enable": False} for path in ("layers.0.attention.qkv", "layers.1.mlp.down")
    ]

    def loop(root: nn.Module) -> Tensor:
        with torch.no_grad():
            losses = [mean_loss(root, step) * global_batch(step).loss_mask.sum() for step in range(BATCHES)]
        return sum(losses) / sum(global_batch(step).loss_mask.sum() for step in range(BATCHES))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, loop)
        # calibrated alone: nothing else rounds meanwhile, as in our search
        alone = plain("gqa")
        down = [{"quantizer_name": "*", "enable": False}] + [
            {**rule, "quantizer_name": "layers.1.mlp.down.weight_quantizer"}
            for rule in mtq.INT4_AWQ_CFG["quant_cfg"]
            if rule.get("enable", True)
        ]
        mtq.quantize(alone, {"quant_cfg": down, "algorithm": {"method": "awq_lite", "alpha_step": 0.1}}, loop)
    model.layers["1"].mlp.down = alone.layers["1"].mlp.down
    assert loss == pytest.approx(float(loop(model)), rel=1e-6)


def refuse(build: str) -> str:
    makers: dict[str, Callable[[], Any]] = {
        "bits": lambda: AutoQuantize(["FP8_DEFAULT_CFG"], "layers.json", 4.0),
        "cuda": lambda: AutoQuantize(["NVFP4_KV_CFG"], "layers.json"),
        "none": lambda: AutoQuantize([], "layers.json"),
        "glob": lambda: ModelOptQuantization(layers={"layers.9.*": "none"}),
        "file": lambda: ModelOptQuantization(layers="missing.json"),
    }

    def validate() -> None:
        runner = trainer(MegatronStrategy(), callbacks=[makers[build]()], use_distributed_sampler=False)
        runner.validate(WithData(MODELS["gqa"], seed=SEED), verbose=False)

    with pytest.raises(ConfigurationError) as caught:
        validate()
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("bits", "the narrowest format, FP8_DEFAULT_CFG, has 8"),
        ("cuda", "on CUDA alone"),
        ("none", "give a list of presets"),
        ("glob", "'layers.9.*', which matches no linear layer"),
        ("file", "is no file with presets of layers"),
    ],
)
def test_refusals(build: str, message: str) -> None:
    assert message in run(refuse, 1, build)[0]
