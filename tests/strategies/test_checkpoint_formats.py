"""Formats by name: what each can change between saving and loading, and how one becomes the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalight import checkpoint
from megalight.callbacks import EMA
from megalight.checkpoint.foreign.torch_dcp import torch_path
from megalight.checkpoint.sources import canonical
from megalight.checkpoint.view import WantedTensor, itself, stream
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.stored import open_model
from megalight.nn.moe import MoEConfig
from megalight.parallel.data_parallel import AdvancedDataParallelOptions
from megalight.strategies import CheckpointOptions, DataParallelOptions, MegatronStrategy
from tests.strategies.test_layout_changes import CONFIG, Again
from tests.strategies.training import ADAM, CLIP, SEED, Losses, WithData
from tests.support.environment import trainer
from tests.support.workers import run

AT, STEPS = 1, 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2 in small buckets": (2, {"data_parallel": DataParallelOptions(bucket_size=1000)}),
    "dp2 no_shard": (2, {"data_parallel": DataParallelOptions(level="no_shard")}),
    "dp4": (4, {}),
    "cp2": (2, {"context_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2dp2": (4, {"tensor_parallel": 2}),
    "full2": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params", optimizer_offload_fraction=0.5)}),
    "full hsdp": (4, {"data_parallel": DataParallelOptions(level="optim_grads_params", replicate=2)}),
    "full hsdp over both": (
        4,
        {
            "data_parallel": DataParallelOptions(
                level="optim_grads_params", replicate=2, advanced=AdvancedDataParallelOptions(replicate_optimizer=False)
            )
        },
    ),
    "full pp2dp2": (
        4,
        {
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "data_parallel": DataParallelOptions(level="optim_grads_params", optimizer_offload_fraction=0.5),
        },
    ),
    "full tp2dp2": (4, {"tensor_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "experts one": (1, {}),
    "experts full ep2": (2, {"expert_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "experts full ep2edp2": (
        4,
        {"expert_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")},
    ),
}
EXPERTS = replace(CONFIG, num_layers=2, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))


def _fit(
    layout: str, stop: int, path: str | None, again: str | None = None, form: str = "dp_reshardable"
) -> tuple[list[float], str]:
    """Train until ``AT`` and save to ``path`` in a format; or go on from there, and save what was loaded."""
    options = {**LAYOUTS[layout][1], **({"checkpoints": CheckpointOptions(format=form)} if stop == AT else {})}
    losses, saves = Losses(), [] if again is None else [Again(again)]
    losses.on_train_start = lambda *_: None  # type: ignore[method-assign]
    module = WithData(EXPERTS if layout.startswith("experts") else CONFIG, optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **options),
        callbacks=[EMA(0.5), losses, *saves],
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
        precision="bf16-true",
    )
    try:
        runner.fit(module, ckpt_path=None if stop == AT else path)
    except CheckpointError as error:
        return [], str(error)
    if stop == AT:
        runner.save_checkpoint(path)
    return losses.losses, ""


Save = Callable[..., str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(layout: str, form: str = "dp_reshardable") -> str:
        path = str(folder / f"{layout}-{form}.ckpt".replace(" ", "-"))
        run(_fit, LAYOUTS[layout][0], layout, AT, path, None, form)
        return path

    return save


def contents(path: str | Path) -> dict[str, torch.Tensor]:
    """Every canonical tensor of a checkpoint, whole."""
    source = canonical(checkpoint.open(path))
    kept = {name: (info.shape, getattr(torch, info.dtype)) for name, info in source.tensors.items()}
    wanted = [WantedTensor(shape, dtype, {name: itself}) for name, (shape, dtype) in kept.items()]
    return dict(zip(kept, stream(source, wanted), strict=True))


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    assert {name.partition("model.")[0] for name in before} == {
        "",
        "ema.",
        "optimizer.master.",
        "optimizer.exp_avg.",
        "optimizer.exp_avg_sq.",
    }
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


PAIRS = [
    ("dp2", ["dp2 in small buckets", "dp2 no_shard"]),
    pytest.param("tp2dp2", ["tp2"], marks=pytest.mark.full),
    pytest.param("dp2", ["one", "pp2"], marks=pytest.mark.full),
    pytest.param("dp2 no_shard", ["dp2"], marks=pytest.mark.full),
    pytest.param("one", ["dp4", "cp2", "dp2 no_shard"], marks=pytest.mark.full),
    pytest.param("pp2", ["one", "dp2"], marks=pytest.mark.full),
    pytest.param("tp2", ["tp2dp2"], marks=pytest.mark.full),
    pytest.param("cp2", ["dp4", "pp2"], marks=pytest.mark.full),
]


@pytest.mark.parametrize(("source", "layouts"), PAIRS)
def test_flat_state_goes_on_under_other_data_parallelism(
    source: str, layouts: list[str], saved: Save, tmp_path: Path
) -> None:
    path = saved(source)
    assert checkpoint.open(path).scheme == "dp_reshardable"
    before = contents(path)
    for layout in layouts:
        again = f"{tmp_path}/{layout}.ckpt"
        run(_fit, LAYOUTS[layout][0], layout, STEPS, path, again)
        assert checkpoint.open(again).scheme == "fully_reshardable"
        same(before, contents(again))


@pytest.mark.parametrize(("source", "layout"), [("dp2", "tp2"), pytest.param("tp2dp2", "one", marks=pytest.mark.full)])
def test_another_split_is_refused_with_the_way_out_which_works(
    source: str, layout: str, saved: Save, tmp_path: Path
) -> None:
    path, converted = saved(source), str(tmp_path / "converted.ckpt")
    for losses, message in run(_fit, LAYOUTS[layout][0], layout, STEPS, path):
        assert not losses
        assert f"megalight convert {path} OUTPUT --to fully_reshardable" in message
    assert main(["convert", path, converted, "--to", "fully_reshardable", "--quiet"]) == 0
    opened, original = checkpoint.open(converted), checkpoint.open(path)
    assert (opened.scheme, opened.world_size) == ("fully_reshardable", original.world_size)
    assert repr(opened.common) == repr(original.common)
    assert [opened.rank_state(rank) is None for rank in range(5)] == [rank >= opened.world_size for rank in range(5)]
    again = str(tmp_path / "again.ckpt")
    ((losses, _), *_) = run(_fit, LAYOUTS[layout][0], layout, STEPS, converted, again)
    assert len(losses) == STEPS - AT
    before = contents(path)
    same(before, contents(converted))
    same(before, contents(again))


def test_the_same_layout_resumes_bit_for_bit(saved: Save, tmp_path: Path) -> None:
    """From the flat form and from its conversion alike: random states of all ranks are kept."""
    path, converted = saved("dp2"), str(tmp_path / "converted.ckpt")
    assert main(["convert", path, converted, "--to", "fully_reshardable", "--quiet"]) == 0
    (flat, _), _ = run(_fit, 2, "dp2", STEPS, path)
    (whole, _), _ = run(_fit, 2, "dp2", STEPS, converted)
    (uninterrupted, _), _ = run(_fit, 2, "dp2", STEPS, None)
    assert flat == whole == uninterrupted[AT:]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("full2", "tp2"),
        ("experts full ep2", "experts one"),
        pytest.param("full pp2dp2", "full tp2dp2", marks=pytest.mark.full),
        pytest.param("full hsdp", "full pp2dp2", marks=pytest.mark.full),
        pytest.param("full hsdp over both", "full2", marks=pytest.mark.full),
        pytest.param("full tp2dp2", "full hsdp", marks=pytest.mark.full),
        pytest.param("experts full ep2edp2", "experts full ep2", marks=pytest.mark.full),
    ],
)
def test_full_sharding_saves_what_torch_reads_and_every_layout_resumes_from(
    layout: str, other: str, saved: Save, tmp_path: Path
) -> None:
    path = saved(layout, "fsdp_dtensor")
    assert checkpoint.open(path).scheme == "fsdp_dtensor"
    before = contents(path)
    theirs = in_torch(path, before)
    assert len(theirs["optimizer"]["state"]) == len(theirs["model"])
    for name, tensor in before.items():
        assert torch.equal(functools.reduce(dict.__getitem__, torch_path(name), theirs), tensor), name
    again = str(tmp_path / "again.ckpt")
    ((losses, message), *_) = run(_fit, LAYOUTS[other][0], other, STEPS, path, again)
    assert len(losses) == STEPS - AT, message
    same(before, contents(again))
    for number, form in enumerate(("fully_reshardable", "dp_reshardable", "fsdp_dtensor")):
        converted = str(tmp_path / f"{number}.ckpt")
        assert main(["convert", path, converted, "--to", form, "--quiet"]) == 0
        assert checkpoint.open(converted).scheme == form
        same(before, contents(converted))
        path = converted


def in_torch(path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Let torch's own DCP load tensors of these shapes, and return its nested state.

    It needs nothing of Megalight for that: see ``tests/checkpoint/foreign/test_torch_files.py``.
    """
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = torch_path(name)
        inner = state
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = torch.zeros_like(tensor)
    dcp.load(state, checkpoint_id=path)
    return state


def test_each_format_becomes_each_other(saved: Save, tmp_path: Path) -> None:
    """Offline, in a row that comes back to where it began; flat state is then of weights that are not split."""
    path = saved("dp2")
    first, original = contents(path), checkpoint.open(path)
    formats = ["fsdp_dtensor", "fully_reshardable", "dp_reshardable", "fsdp_dtensor", "dp_reshardable"]
    for number, form in enumerate(formats):
        converted = str(tmp_path / f"{number}.ckpt")
        assert main(["convert", path, converted, "--to", form, "--quiet"]) == 0
        assert checkpoint.open(converted).scheme == form
        path = converted
    same(first, contents(path))
    assert sorted(checkpoint.open(path).tensors) == sorted(original.tensors)
    (flat, _), _ = run(_fit, 2, "dp2", STEPS, path)
    (uninterrupted, _), _ = run(_fit, 2, "dp2", STEPS, None)
    assert flat == uninterrupted[AT:]


def test_masters_and_averages_are_found_in_flat_state(saved: Save) -> None:
    """A model that is read from such a checkpoint in float32 gets the masters."""
    path = saved("tp2dp2")
    whole = contents(path)
    for ema, prefix in ((False, "optimizer.master."), (True, "ema.")):
        weights = open_model(path, ema=ema).weights
        name = "model.layers.1.mlp.up.weight"
        (found,) = stream(weights, [WantedTensor(tuple(weights.tensors[name].shape), torch.float32, {name: itself})])
        np.testing.assert_array_equal(found, whole[prefix + name].float())


def test_unknown_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"format='dp_reshardible'.* Did you mean 'dp_reshardable'"):
        CheckpointOptions(format="dp_reshardible")
    with pytest.raises(ConfigurationError, match=r"'fully_sharded_model_space'.*; use 'fully_reshardable'"):
        CheckpointOptions(format="fully_sharded_model_space")
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp" / ".metadata").touch()
    with pytest.raises(CheckpointError, match="save one of fsdp_dtensor again in that format"):
        checkpoint.open(tmp_path / "fsdp")
    (tmp_path / "optimizer.state").mkdir()
    (tmp_path / "optimizer.state" / ".zarray").write_text("{}")
    with pytest.raises(CheckpointError, match=r"zarr folder of an old Megatron-LM.*--ckpt-format torch_dist"):
        checkpoint.open(tmp_path)
    assert main(["convert", str(tmp_path), str(tmp_path / "a"), "--to", "fully_reshardable", "--ema"]) == 2
    assert "keeps all as it is" in capsys.readouterr().err
