"""Adapters trained by the strategy: every layout as one device does it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight import checkpoint
from megalight.callbacks import Adapters, CUDAGraph
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import generate, load_model
from megalight.models.gpt.module import GPTModule
from megalight.models.transforms import DoRA, LoRA
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import DataParallelOptions, MegatronStrategy, PipelineOptions, load_weights
from megalight.types import PackedSequences
from tests.parallel.graphs.tape import Tape
from tests.strategies.training import (
    ADAM,
    CLIP,
    CONFIGS,
    SEED,
    Gradients,
    Losses,
    WithData,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
    gathered,
)
from tests.support.environment import trainer
from tests.support.workers import run

LORA = {"rank": 3, "targets": ["layers.*"], "alpha": 6.0}
UPPER = {"rank": 3, "targets": ["layers.1.*"], "alpha": 6.0}
"""Layer 0 has no adapter: its pipeline stage has nothing to train."""
DEEP = replace(CONFIGS["gqa"], num_layers=4)
"""Enough layers for two chunks of two stages."""


@functools.cache
def expected(name: str, upper: bool = False) -> dict[str, Any]:
    return by_hand(CONFIGS[name], transforms=[LoRA(**(UPPER if upper else LORA))])


def train(
    name: str, lora: dict[str, Any], options: dict[str, Any], layout: dict[str, Any], packed: bool = False
) -> dict[str, Any]:
    gradients = Gradients()
    callbacks = [Adapters(**lora), gradients]
    found = fit(CONFIGS.get(name, DEEP), options=options, packed=packed, extra_callbacks=callbacks, **layout)
    return {**found, "gradients": gradients.first}


@pytest.mark.parametrize(
    ("world", "name", "upper", "layout"),
    [
        (1, "gqa", False, {}),
        pytest.param(2, "gqa", False, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param(4, "gqa", False, {"tensor_parallel": 2, "sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param(4, "mha", False, {"tensor_parallel": 4, "sequence_parallel": True}, marks=pytest.mark.full),
        (2, "tied", False, {"pipeline_parallel": 2}),
        (2, "gqa", True, {"pipeline_parallel": 2}),
        pytest.param(
            4,
            "gpt2",
            False,
            {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
            marks=pytest.mark.full,
        ),
        (2, "gqa", False, {"context_parallel": 2}),
    ],
)
def test_a_layout_trains_the_same_adapters(world: int, name: str, upper: bool, layout: dict[str, Any]) -> None:
    lora = UPPER if upper else LORA
    options = {"level": "optim"} if name != "gpt2" else {"level": "no_shard"}
    found = run(train, world, name, lora, options, {**layout, "micro_batch_size": 1}, timeout=240)[0]
    reference = expected(name, upper)
    assert_same_run(found, reference)
    assert_same_gradients(found["gradients"], reference["gradients"])
    for key, value in found["final"].items():
        assert np.array_equal(value, found["initial"][key]) is ("lora" not in key)


@pytest.mark.parametrize(
    ("layout", "level"),
    [
        ({}, "optim"),
        ({"pipeline_parallel": 2}, "optim"),
        ({"context_parallel": 2}, "optim"),
        ({}, "optim_grads_params"),
        pytest.param({"pipeline_parallel": 2, "virtual_pipeline": 1}, "optim_grads_params", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_layout_trains_the_same_magnitudes(layout: dict[str, Any], level: str) -> None:
    found = run(train, 2, "gqa", {**LORA, "dora": True}, {"level": level}, {**layout, "micro_batch_size": 1})[0]
    reference = by_hand(CONFIGS["gqa"], transforms=[DoRA(**LORA)])
    assert_same_run(found, reference)
    assert_same_gradients(found["gradients"], reference["gradients"])
    assert any("magnitude" in name for name in reference["gradients"])


@pytest.mark.parametrize("kind", [pytest.param(LoRA, marks=pytest.mark.full), DoRA])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gqa", {"tensor_parallel": 2, "sequence_parallel": True}),
        ("deep", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        pytest.param("gqa", {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("gqa", {"context_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_packed_documents(kind: type[LoRA], name: str, layout: dict[str, Any]) -> None:
    """Chunks of a pipeline too, which have adapters of their own."""
    lora = {**LORA, "dora": kind is DoRA}
    found = run(train, 2, name, lora, {}, {**layout, "micro_batch_size": 1}, True, timeout=240)[0]
    reference = by_hand(CONFIGS.get(name, DEEP), packed=True, transforms=[kind(**LORA)])
    for key, value in reference["initial"].items():
        if "magnitude" in key:  # norms of rows that tensor-parallel ranks share are sums in another order
            np.testing.assert_allclose(found["initial"][key], value, rtol=1e-14)
            found["initial"][key] = value
    assert_same_run(found, reference)
    assert_same_gradients(found["gradients"], reference["gradients"])


@pytest.mark.full
def test_magnitudes_of_a_checkpoint_go_on(tmp_path: Path) -> None:
    dora = {**LORA, "dora": True}
    whole = by_hand(CONFIGS["gqa"], 4, transforms=[DoRA(**LORA)])
    run(saving, 2, str(tmp_path), SP, None, dora)
    losses, final = run(saving, 2, str(tmp_path / "b"), PP, str(tmp_path / "step=2.ckpt"), None)[0]
    np.testing.assert_allclose(losses, whole["losses"][2:], rtol=1e-9)
    for name, value in whole["final"].items():
        assert np.linalg.norm(final[name] - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3), name
    losses, _ = run(saving, 2, str(tmp_path / "c"), FULL, None, dora)[0]
    np.testing.assert_allclose(losses, whole["losses"][:2], rtol=1e-9)


def saving(
    folder: str, layout: dict[str, Any], resume: str | None, lora: dict[str, Any] | None, weights: str | None = None
) -> tuple[list[float], dict[str, Any]]:
    """Two steps more, and the weights; without ``lora``, adapters come from the checkpoint alone."""
    strategy = MegatronStrategy(micro_batch_size=2, **layout)
    losses = Losses()
    save = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED + (weights is not None), weights=weights)
    module.steps = 6
    runner = trainer(
        strategy,
        callbacks=[losses, save, *([Adapters(**lora)] if lora else [])],
        enable_checkpointing=True,
        max_steps=4 if resume else 2,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module, ckpt_path=resume)
    return losses.losses, gathered(strategy, module)


SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2}
FULL = {"data_parallel": DataParallelOptions(level="optim_grads_params")}
"""The frozen weights of layers are sharded, too."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("adapters")
    run(saving, 2, str(folder), SP, None, LORA)
    return str(folder / "step=2.ckpt")


@pytest.mark.parametrize(("lora", "layout"), [pytest.param(LORA, PP, marks=pytest.mark.full), (None, PP), (None, FULL)])
def test_a_checkpoint_goes_on_under_another_layout(
    saved: str, tmp_path: Path, lora: dict[str, Any] | None, layout: dict[str, Any]
) -> None:
    whole = by_hand(CONFIGS["gqa"], 4, transforms=[LoRA(**LORA)])
    losses, final = run(saving, 2, str(tmp_path), layout, saved, lora)[0]
    np.testing.assert_allclose(losses, whole["losses"][2:], rtol=1e-9)
    for name, value in whole["final"].items():
        assert np.linalg.norm(final[name] - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3), name


def test_what_a_checkpoint_holds(saved: str) -> None:
    opened = checkpoint.open(saved)
    values = {**LORA, "dropout": 0.0, "rank_stabilized": False, "exclude": [], "adapter": "default"}
    assert opened.common["model"]["transforms"] == [{"name": "lora", "values": values}]
    states = {name for name in opened.tensors if name.startswith("optimizer.")}
    assert states
    assert all(".lora_" in name for name in states)


@pytest.mark.full
def test_adapters_alone_beside_their_base(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = {**LORA, "save_base": False}
    run(saving, 2, str(tmp_path), FULL, None, lora, base)
    path = str(tmp_path / "step=2.ckpt")
    assert all(".lora_" in name for name in checkpoint.open(path).tensors)
    losses, final = run(saving, 2, str(tmp_path / "b"), PP, path, lora, base)[0]
    for found, other in run(saving, 2, str(tmp_path / "c"), FULL, path, lora, base):
        np.testing.assert_allclose(found, losses, rtol=1e-9)
        for name, value in final.items():
            assert np.linalg.norm(other[name] - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3), name
    run(saving, 1, str(tmp_path / "one"), {}, None, LORA, base)
    whole = run(saving, 1, str(tmp_path / "one"), {}, str(tmp_path / "one" / "step=2.ckpt"), LORA, base)[0]
    np.testing.assert_allclose(losses, whole[0], rtol=1e-9)
    for name, value in whole[1].items():
        assert np.linalg.norm(final[name] - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3), name
    kept = expected("gqa")["initial"]  # the base: drawn from another seed than these runs' own
    assert all(np.array_equal(value, kept[name]) for name, value in final.items() if "lora" not in name)
    assert main(["merge", path, "-o", str(tmp_path / "m")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "holds only adapters; name the weights that training began with by --base" in said
    # A folder of runs stands for its newest checkpoint, as for the first argument.
    assert main(["merge", path, "-o", str(tmp_path / "m"), "--base", str(Path(base).parent)]) == 0
    assert main(["merge", path, "-o", str(tmp_path / "n"), "--base", str(tmp_path / "absent")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "absent is not a finished Megalight checkpoint: nothing is there" in said
    tokens, sequences = torch.arange(9), PackedSequences.of_lengths([4, 5])
    logits = load_model(path, base=base)(tokens, sequences).logits
    torch.testing.assert_close(load_model(tmp_path / "m")(tokens, sequences).logits, logits, rtol=1e-11, atol=1e-11)
    module = GPTModule(weights=base)
    assert module.config == CONFIGS["gqa"]
    load_weights(module, path)
    torch.testing.assert_close(module.model(tokens, sequences).logits, logits)
    with pytest.raises(CheckpointError, match=r"holds only adapters; give the module the folder"):
        load_weights(GPTModule(CONFIGS["gqa"]), path)
    with pytest.raises(CheckpointError, match="has adapters; merge them first"):
        GPTModule(CONFIGS["gqa"], weights=path).initial_weights()


def test_adapters_alone_need_weights_to_start_from() -> None:
    with pytest.raises(ConfigurationError, match=r"save_base=False.*Give the module weights to start from"):
        Adapters(rank=2, save_base=False).attach(GPTModule(CONFIGS["gqa"]))


def test_another_adapter_is_refused(saved: str) -> None:
    module = GPTModule(CONFIGS["gqa"])
    Adapters(rank=2).attach(module)
    told = r"these transforms: LoRA\(rank=3.*; this module's has: LoRA\(rank=2.*, or merge its adapters .* and begin"
    with pytest.raises(CheckpointError, match=told):
        module.check_checkpoint(checkpoint.open(saved).common)


def test_merged_adapters(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", saved, "-o", str(tmp_path / "merged")]) == 0
    assert "merged the adapters of 8 linear layers" in capsys.readouterr().out
    adapted, merged = load_model(saved), load_model(tmp_path / "merged")
    assert not any("adapter" in name for name, _ in merged.named_parameters())
    tokens, sequences = torch.arange(9), PackedSequences.of_lengths([4, 5])
    expected = adapted(tokens, sequences).logits
    torch.testing.assert_close(merged(tokens, sequences).logits, expected, rtol=1e-11, atol=1e-11)
    assert generate(adapted, [[1, 2]], max_new_tokens=5, temperature=0) == generate(
        merged, [[1, 2]], max_new_tokens=5, temperature=0
    )
    module = GPTModule(CONFIGS["gqa"])
    load_weights(module, saved)
    torch.testing.assert_close(module.model(tokens, sequences).logits, expected)
    assert main(["merge", str(tmp_path / "merged"), "-o", str(tmp_path / "again")]) == 2
    assert "has no adapters: there is nothing to merge" in " ".join(capsys.readouterr().err.split())
    module = GPTModule(CONFIGS["gqa"])
    load_weights(module, tmp_path / "merged")
    torch.testing.assert_close(module.model(tokens, sequences).logits, expected)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {**SP, "recompute": RecomputeOptions(granularity="full")}),
        pytest.param(
            2,
            {**SP, "recompute": RecomputeOptions(granularity="selective", modules=["mlp.act", "attention_norm"])},
            marks=pytest.mark.full,
        ),
        (2, {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    ],
)
def test_with_recompute_and_schedules(world: int, layout: dict[str, Any]) -> None:
    found = run(train, world, "gqa", LORA, {}, {**layout, "micro_batch_size": 1}, timeout=240)[0]
    assert_same_run(found, expected("gqa"))


def dropped(layout: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Two equal runs with dropout."""
    runs = [train("gqa", {**LORA, "dropout": 0.5}, {}, layout) for _ in range(2)]
    return runs[0]["losses"], runs[1]["losses"]


@pytest.mark.parametrize(
    ("world", "layout"), [(1, {}), pytest.param(2, SP, marks=pytest.mark.full), (2, {"tensor_parallel": 2})]
)
def test_dropout_is_deterministic(world: int, layout: dict[str, Any]) -> None:
    for first, second in run(dropped, world, {**layout, "micro_batch_size": 2}):
        assert first == second
        assert first[0] == pytest.approx(expected("gqa")["losses"][0], rel=1e-9)  # B is 0
        assert abs(first[1] - expected("gqa")["losses"][1]) > 1e-6


def test_an_unknown_target_is_refused_before_processes_start() -> None:
    strategy = MegatronStrategy(tensor_parallel=2)
    runner = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, callbacks=[Adapters(rank=2, targets=["quue"])], logger=False
    )
    with pytest.raises(ConfigurationError, match="target 'quue' of LoRA matches no linear layer of GPT"):
        runner.fit(WithData(CONFIGS["gqa"]))


def low_precision(layout: dict[str, Any]) -> dict[str, Any]:
    options = LowPrecisionOptions(recipe="tensorwise", emulate=True, reduce_amax=True)
    plugin = MegatronLowPrecision(options, "64-true")
    config = replace(CONFIGS["gqa"], hidden_size=64, ffn_hidden_size=64)
    return fit(
        config,
        extra_callbacks=[Adapters(**LORA)],
        trainer_options={"precision": None},
        precision_plugin=plugin,
        **layout,
    )


def test_frozen_weights_multiply_in_8_bits() -> None:
    one, two = (run(low_precision, n, layout)[0] for n, layout in ((1, {}), (2, SP)))
    assert_same_run(two, one)
    for key, value in one["final"].items():
        assert np.array_equal(value, one["initial"][key]) is ("lora" not in key)


def graphs(scope: Any, warmup: int, lora: dict[str, Any]) -> dict[str, Any]:
    callback = CUDAGraph(scope, warmup_steps=warmup)
    callback.recorder = Tape()
    found = fit(CONFIGS["gqa"], 4, extra_callbacks=[Adapters(**lora), callback], micro_batch_size=2)
    return {**found, "replays": callback.replays, "reasons": callback.reasons}


@pytest.mark.parametrize("scope", ["iteration", "layer"])
def test_with_graphs(scope: str) -> None:
    eager, found = (run(graphs, 1, scope, warmup, LORA)[0] for warmup in (1000, 2))
    assert found["replays"]
    assert_same_run(found, eager, 1e-13)


def test_a_layer_that_trains_nothing_is_not_recorded_alone() -> None:
    (found,) = run(graphs, 1, "layer", 2, UPPER)
    assert not found["replays"]
    assert "layers.0 must return at least one tensor" in found["reasons"][0]


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Plain is a plain LightningModule"):
        Adapters(rank=2).attach(Plain())
