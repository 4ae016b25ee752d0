"""What one layout saved, every other layout loads: bitwise, weights and optimizer states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalight import checkpoint
from megalight.checkpoint import View
from megalight.errors import CheckpointError
from tests.checkpoint.layouts import LAYOUTS, SHAPES, STATES, Layout, Model, full
from tests.support.workers import run

NAMES = {f"model.{name}" for name in SHAPES} | {f"optimizer.{state}.{name}" for state in STATES for name in SHAPES}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def save_as(layout: Layout, directory: Path) -> None:
    model = Model(layout, rank(), filled=True)
    state = {"rank": rank(), "random": torch.get_rng_state()}
    checkpoint.save(directory / f"{LAYOUTS.index(layout)}.ckpt", model.views(), common={"step": 7}, rank_state=state)


def load_all(layout: Layout, directory: Path, numbers: list[int]) -> list[tuple[int, list[str]]]:
    wrong = []
    for number in numbers:
        model = Model(layout, rank(), filled=False)
        opened = checkpoint.open(directory / f"{number}.ckpt")
        opened.fill(checkpoint.targets_of(model.views()))
        if found := model.differs(Model(layout, rank(), filled=True)):
            wrong.append((number, found))
        own = opened.rank_state(rank())
        assert own is None if rank() >= opened.world_size else own["rank"] == rank()
    return wrong


def on(layout: Layout, job, *args):
    return run(job, layout.world, layout, *args) if layout.world > 1 else [job(layout, *args)]


@pytest.fixture(scope="module")
def saved(module_path: Path) -> Path:
    for layout in LAYOUTS:
        on(layout, save_as, module_path)
    return module_path


SOME = (1, 4, 7)
"""Distances in the list of layouts: each loads what these others saved, and is loaded by as many."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_loads_what_others_saved(layout: Layout, saved: Path) -> None:
    numbers = [(LAYOUTS.index(layout) + distance) % len(LAYOUTS) for distance in SOME]
    assert on(layout, load_all, saved, numbers) == [[]] * layout.world


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_loads_what_every_layout_saved(layout: Layout, saved: Path) -> None:
    assert on(layout, load_all, saved, list(range(len(LAYOUTS)))) == [[]] * layout.world


def test_data_files_are_plain_safetensors(saved: Path) -> None:
    from safetensors.torch import load_file

    for number in range(len(LAYOUTS)):
        opened = checkpoint.open(saved / f"{number}.ckpt")
        assert opened.tensors.keys() == NAMES
        for name, info in opened.tensors.items():
            whole = torch.full(info.shape, torch.nan, dtype=getattr(torch, info.dtype))
            for chunk in info.chunks:
                box = tuple(slice(o, o + s) for o, s in zip(chunk.offset, chunk.size, strict=True))
                whole[box] = load_file(opened.path / chunk.file)[chunk.key]
            assert torch.equal(whole, full(name))


def test_nothing_on_disk_is_a_pickle(saved: Path) -> None:
    kinds = {file.suffix for file in saved.rglob("*") if file.is_file()}
    assert kinds == {".json", ".safetensors"}


def written(layout: Layout) -> tuple[dict[str, np.ndarray], list[int]]:
    counts = {name: np.zeros(full(name).shape, int) for name in NAMES}
    shares = []
    for index in range(layout.world):
        shares.append(0)
        for name, view in Model(layout, index, filled=False).views().items():
            for box in view.boxes:
                where = tuple(slice(o, o + s) for o, s in zip(box.offset, box.data.shape, strict=True))
                counts[name][where] += box.write
                shares[-1] += box.write * box.data.nbytes
    return counts, shares


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, Layout(16, 4, "no_shard"), Layout(12, 2, "optim"), Layout(64, 1, "no_shard")], ids=str
)
def test_each_element_is_written_exactly_once(layout: Layout) -> None:
    counts, _ = written(layout)
    assert all((count == 1).all() for count in counts.values())


def test_replicas_share_the_writing(saved: Path) -> None:
    _, shares = written(Layout(4, 1, "no_shard"))
    assert max(shares) < 1.05 * sum(shares) / 4 + 200


def test_a_box_is_a_view_of_the_parameter() -> None:
    model = Model(Layout(4, 2, "optim"), 1, filled=True)
    memory = [*model.parameters.values(), *(t for tensors in model.states.values() for t in tensors)]
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in memory]
    for view in model.views().values():
        for box in view.boxes:
            assert any(low <= box.data.data_ptr() < high for low, high in spans)


def plain_dcp(layout: Layout, directory: Path) -> list[str]:
    import torch.distributed.checkpoint as dcp

    dcp.save(Model(layout, rank(), filled=True).views(), checkpoint_id=directory)
    model = Model(layout, rank(), filled=False)
    dcp.load(model.views(), checkpoint_id=directory)
    return model.differs(Model(layout, rank(), filled=True))


def test_views_work_with_plain_dcp(tmp_path: Path) -> None:
    assert run(plain_dcp, 2, Layout(2, 1, "no_shard"), tmp_path / "dcp") == [[], []]


def load_errors(layout: Layout, path: Path) -> list[str]:
    """Each kind of disagreement, on the last rank only: all ranks must refuse, and change nothing."""
    last = rank() == layout.world - 1
    opened = checkpoint.open(path)
    messages = []
    for kind in ("missing", "shape", "unexpected"):
        model = Model(layout, rank(), filled=False)
        views = model.views()
        if kind == "missing" and last:
            views["model.embed.words.weight"] = views["model.embed.word.weight"]
        if kind == "shape" and last:
            view = views["model.embed.word.weight"]
            views["model.embed.word.weight"] = View("model.embed.word.weight", (13, 6), view.boxes)
        if kind == "unexpected":
            del views["optimizer.exp_avg.temperature"]
        with pytest.raises(CheckpointError) as error:
            opened.fill(checkpoint.targets_of(views))
        assert not model.differs(Model(layout, rank(), filled=False)) or all_nan(model)
        messages.append(str(error.value))
    return messages


def all_nan(model: Model) -> bool:
    return all(((value == -1) | value.isnan()).all() for value in model.parameters.values())


def test_disagreements_are_refused_on_all_ranks(saved: Path) -> None:
    for missing, shape, unexpected in run(load_errors, 2, Layout(2, 2, "optim"), saved / "0.ckpt"):
        assert "'model.embed.words.weight' not in" in missing
        assert "mean 'model.embed.word.weight'" in missing
        assert all(part in shape for part in ("rank 1", "[11, 6]", "[13, 6]", "another model"))
        assert "'optimizer.exp_avg.temperature'" in unexpected


def test_a_load_may_be_partial(saved: Path) -> None:
    layout = Layout(1, 1, "no_shard")
    opened = checkpoint.open(saved / "6.ckpt")
    model = Model(layout, 0, filled=False)
    weights = {name: view for name, view in model.views().items() if name.startswith("model.")}
    opened.fill(checkpoint.targets_of(weights), prefix="model.")
    assert {name[:6] for name in model.differs(Model(layout, 0, filled=True))} == {"master", "exp_av"}
    new = View("model.new", (), weights["model.temperature"].boxes)
    filled = opened.fill(checkpoint.targets_of({**weights, "model.new": new}), strict=False)
    assert filled.missing == ("model.new",)
    assert set(filled.unexpected) == NAMES - weights.keys()


def test_values_are_converted_to_the_views_dtype(saved: Path) -> None:
    layout = Layout(1, 1, "no_shard")
    model = Model(layout, 0, filled=False)
    model.parameters = {name: value.bfloat16() for name, value in model.parameters.items()}
    weights = {name: view for name, view in model.views().items() if name.startswith("model.")}
    checkpoint.open(saved / "11.ckpt").fill(checkpoint.targets_of(weights), prefix="model.")
    for name, value in Model(layout, 0, filled=True).parameters.items():
        assert torch.equal(model.parameters[name], value.bfloat16())
