"""QLoRA: adapters beside weights that are stored quantized, under every layout as beside the decoded weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight import checkpoint
from megalight.callbacks import Adapters
from megalight.errors import ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.stored import held_model, save_model
from megalight.models.transforms import DoRA, LoRA, QuantizedBase
from megalight.models.transforms.quantized_base import weights_of
from megalight.models.transforms.saved import merge_checkpoint
from megalight.nn import Linear
from megalight.nn.init import initialize
from megalight.nn.moe import Experts, MoEConfig
from megalight.ops.quantized_weight import QuantizedWeight, stored_of
from megalight.parallel.data_parallel import AdvancedDataParallelOptions
from megalight.parallel.data_parallel import gather as pushes
from megalight.parallel.peers import memory
from megalight.parallel.transform import ModelTransform
from megalight.strategies import DataParallelOptions, MegatronStrategy
from megalight.types import PackedSequences
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, WithData, assert_same_gradients, by_hand
from tests.strategies.training import Gradients as Kept
from tests.support.environment import trainer
from tests.support.workers import run

LORA: dict[str, Any] = {"rank": 3, "targets": ["q", "v", "down"], "alpha": 6.0}
BLOCK = 4
WIDE = replace(CONFIGS["gqa"], ffn_hidden_size=64)
"""Blocks of 16 features divide each half of a row."""
EXPERTS = replace(WIDE, moe=MoEConfig(num_experts=4, ffn_hidden_size=32, pattern=(False, True)))


def block_of(form: str) -> int:
    return 16 if form == "nvfp4" else BLOCK


def drawn(config: GPTConfig) -> GPT:
    model = GPT(config).double()
    initialize(model, SEED, "model.")
    return model


@dataclass(frozen=True)
class Rounded(ModelTransform):
    """Writes the values into the weights, which stay plain."""

    name: ClassVar[str] = "rounded"
    by_units: ClassVar[bool] = True
    """As what stores quantized values: lengths of rows (DoRA) are those of the rounded weights."""
    form: str = "int8"

    def change(self, model: torch.nn.Module) -> None:
        """Nothing to do."""

    @torch.no_grad()
    def with_values(self, model: Any) -> None:
        for path, layer in model.root.named_modules():
            if isinstance(layer, Linear | Experts) and path.startswith("layers."):
                for weight in weights_of(layer):
                    weight.copy_(QuantizedWeight(weight, self.form, block_of(self.form)).values())


class Seen(pl.Callback):
    """Keeps the losses; weights are not read, quantized hold them."""

    reads_weights = False

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.losses.append(float(strategy.report.loss))


def train(
    folder: str,
    form: str | None,
    layout: dict[str, Any],
    base: str | None,
    resume: str | None = None,
    dora: bool = False,
) -> dict[str, Any]:
    """Two steps with quantized values, or one of the whole model without."""
    losses, gradients = Seen(), Kept()
    save = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    nvfp4 = form == "nvfp4"
    block = None if nvfp4 else BLOCK
    lora = Adapters(**LORA, base=form, block=block, save_base=False, dora=dora) if form else None
    module = WithData(WIDE if nvfp4 else CONFIGS["gqa"], optimizer=ADAM, seed=SEED, weights=base)
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **layout),
        callbacks=[losses, gradients, save, *([lora] if lora else [])],
        enable_checkpointing=True,
        max_steps=3 if resume else 2 if form else 1,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module, ckpt_path=resume)
    linears = [p for name, p in module.model.named_parameters() if ".adapter." not in name and p.ndim == 2]
    quantized = [stored_of(p) for p in linears]
    held = sum(p.untyped_storage().nbytes() for p in linears) + sum(code.nbytes for code in quantized if code)
    return {"losses": losses.losses, "gradients": gradients.first, "stored": sum(map(bool, quantized)), "bytes": held}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    run(train, 1, str(folder), None, {}, None)
    return str(folder / "step=1.ckpt")


@pytest.fixture(scope="module")
def one(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    found = run(train, 1, str(folder), "int8", {}, base)[0]
    return {**found, "folder": folder}


@pytest.mark.parametrize("kind", [LoRA, DoRA])
@pytest.mark.parametrize("config", [CONFIGS["gqa"], EXPERTS], ids=["dense", "experts"])
def test_the_run_is_that_of_the_decoded_weights(config: GPTConfig, kind: type[LoRA]) -> None:
    """torch alone: the same model with quantized values, and with the quantized values' values as plain weights."""
    for form in ("int8", "nf4", "nvfp4"):
        plain = by_hand(config, 2, transforms=[kind(**LORA), Rounded(form)])
        quantized = by_hand(config, 2, transforms=[kind(**LORA), QuantizedBase(form, block_of(form))])
        np.testing.assert_allclose(quantized["losses"], plain["losses"], rtol=1e-11)
        assert_same_gradients(quantized["gradients"], plain["gradients"])
        assert quantized["losses"] != by_hand(config, 2, transforms=[kind(**LORA)])["losses"]


def adapters_of_experts(base: str, form: str, layout: dict[str, Any], dora: bool) -> dict[str, Any]:
    losses, gradients = Seen(), Kept()
    block = None if form == "nvfp4" else BLOCK
    adapters = Adapters(**LORA, base=form, block=block, save_base=False, dora=dora)
    module = WithData(EXPERTS, optimizer=ADAM, seed=SEED, weights=base)
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **layout),
        callbacks=[losses, gradients, adapters],
        max_steps=2,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module)
    stacks = [p for p in module.model.parameters() if p.ndim == 3 and not p.requires_grad]
    assert all(stored_of(stack) is not None for stack in stacks)
    return {"losses": losses.losses, "gradients": gradients.first, "stacks": len(stacks)}


INSIDE = {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}
SHARDED = {"data_parallel": DataParallelOptions(level="optim_grads_params")}


@pytest.mark.parametrize(
    ("world", "form", "layout", "dora"),
    [
        (2, "nvfp4", {"expert_parallel": 2}, False),
        pytest.param(2, "nf4", INSIDE, False, marks=pytest.mark.full),
        pytest.param(2, "nvfp4", INSIDE, False, marks=pytest.mark.full),
        (2, "nvfp4", SHARDED, False),
        pytest.param(2, "int8", {"expert_parallel": 2, **SHARDED}, False, marks=pytest.mark.full),
        pytest.param(4, "nvfp4", {"expert_parallel": 2, **SHARDED}, True, marks=pytest.mark.full),
        (2, "nf4", INSIDE, True),
        pytest.param(2, "int8", {"expert_parallel": 2}, True, marks=pytest.mark.full),
        pytest.param(2, "nvfp4", SHARDED, True, marks=pytest.mark.full),
        pytest.param(2, "int8", {"pipeline_parallel": 2}, True, marks=pytest.mark.full),
    ],
)
def test_experts_are_stored_under_every_layout(
    world: int, form: str, layout: dict[str, Any], dora: bool, tmp_path: Path
) -> None:
    save_model(held_model("gpt", EXPERTS, drawn(EXPERTS)), tmp_path / "base")
    wanted = by_hand(EXPERTS, 2, transforms=[(DoRA if dora else LoRA)(**LORA), Rounded(form)])
    ranks = run(adapters_of_experts, world, str(tmp_path / "base"), form, layout, dora, timeout=240)
    found = ranks[0]
    assert any(rank["stacks"] for rank in ranks)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-9)
    assert_same_gradients(found["gradients"], wanted["gradients"])


@pytest.fixture(scope="module")
def lengths(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Magnitudes beside quantized values, on one device."""
    return run(train, 1, str(tmp_path_factory.mktemp("lengths")), "nf4", {}, base, None, True)[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, {"tensor_parallel": 2, "sequence_parallel": True}, marks=pytest.mark.full),
        (2, SHARDED),
        pytest.param(2, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tensor_parallel": 2, **SHARDED}, marks=pytest.mark.full),
    ],
)
def test_a_layout_trains_the_same_magnitudes(
    world: int, layout: dict[str, Any], base: str, lengths: dict[str, Any], tmp_path: Path
) -> None:
    found = run(train, world, str(tmp_path), "nf4", layout, base, None, True, timeout=240)[0]
    np.testing.assert_allclose(found["losses"], lengths["losses"], rtol=1e-9)
    assert_same_gradients(found["gradients"], lengths["gradients"])
    assert any("magnitude" in name for name in lengths["gradients"])
    # checkpoints of adapters beside quantized values are merged with the plain base
    path = str(tmp_path / "step=2.ckpt")
    assert merge_checkpoint(path, tmp_path / "merged", base) == 4
    tokens, sequences = torch.arange(9), PackedSequences.of_lengths([4, 5])
    logits = load_model(path, base=base)(tokens, sequences).logits
    torch.testing.assert_close(load_model(tmp_path / "merged")(tokens, sequences).logits, logits)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"tensor_parallel": 2, "sequence_parallel": True}),
        (2, {"pipeline_parallel": 2}),
        pytest.param(
            4, {"tensor_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads")}, marks=pytest.mark.full
        ),
        (2, SHARDED),
        pytest.param(4, {"tensor_parallel": 2, **SHARDED}, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2, **SHARDED}, marks=pytest.mark.full),
    ],
)
def test_a_layout_trains_the_same_adapters(
    world: int, layout: dict[str, Any], base: str, one: dict[str, Any], tmp_path: Path
) -> None:
    found = run(train, world, str(tmp_path), "int8", layout, base, timeout=240)[0]
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-9)
    assert_same_gradients(found["gradients"], one["gradients"])
    assert found["stored"] == one["stored"] // layout.get("pipeline_parallel", 1)


def test_the_second_scale_is_that_of_the_whole_weight(tmp_path: Path) -> None:
    """NVFP4 under a layout that splits rows and columns: as on one device."""
    base = str(tmp_path / "base")
    save_model(held_model("gpt", WIDE, drawn(WIDE)), base)
    one = run(train, 1, str(tmp_path / "one"), "nvfp4", {}, base)[0]
    layout = {"tensor_parallel": 2, "sequence_parallel": True}
    found = run(train, 2, str(tmp_path / "two"), "nvfp4", layout, base, timeout=240)[0]
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-9)
    assert_same_gradients(found["gradients"], one["gradients"])


def pushed(folder: str, base: str) -> dict[str, Any]:
    """Train while copy engines gather; returns the sizes of their buffers before and after some are given back, too."""
    layout = {
        "data_parallel": DataParallelOptions(
            level="optim_grads_params", advanced=AdvancedDataParallelOptions(gathers="symmetric")
        )
    }
    sizes: list[list[int]] = []
    done: list[bool] = []
    keep, gather = pushes.Pushes.keep, pushes.Pushes.gather
    earlier = list(memory._MADE)  # of other tests in this process

    def kept(self: Any, buckets: Any) -> None:
        for act in (lambda: None, lambda: keep(self, buckets)):
            act()
            sizes.append(sorted(made.capacity for made in memory._MADE if made not in earlier))

    def gathered(self: Any, bucket: Any) -> bool:
        done.append(gather(self, bucket))
        return done[-1]

    with (
        symmetric_on_cpu(),
        patch.object(pushes.Pushes, "keep", kept),
        patch.object(pushes.Pushes, "gather", gathered),
    ):
        found = train(folder, "int8", layout, base)
    return {**found, "sizes": sizes, "done": done}


def test_copy_engines_gather_quantized_values(base: str, one: dict[str, Any], tmp_path: Path) -> None:
    """The buffers of the weights that were there before are given back."""
    found = run(pushed, 2, str(tmp_path), base)[0]
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-9)
    assert_same_gradients(found["gradients"], one["gradients"])
    assert found["done"]
    assert all(found["done"]), "a unit was gathered by a collective"
    before, after = found["sizes"]
    # In turn: two for adapters, two for quantized values, two for what stays plain. The two for whole layers go.
    assert before[-2] > 2 * max(after)
    assert len(after) == 6
    assert before[:-2] == after


def test_memory_is_that_of_the_quantized_values(base: str, one: dict[str, Any]) -> None:
    whole = sum(p.numel() for n, p in load_model(base).named_parameters() if n.startswith("layers.") and p.ndim == 2)
    assert one["stored"] == 8
    outside = sum(p.nbytes for n, p in load_model(base).named_parameters() if "layers." not in n and p.ndim == 2)
    # float64 here: a code of one byte, and a scale of eight for each block
    assert one["bytes"] - outside == whole + whole // BLOCK * 8 + 8 * one["stored"]


def test_adapters_go_on_and_are_merged_with_the_plain_base(base: str, one: dict[str, Any], tmp_path: Path) -> None:
    path = str(one["folder"] / "step=1.ckpt")
    opened = checkpoint.open(path)
    assert all("lora" in name for name in opened.tensors)
    layout = {"tensor_parallel": 2, "sequence_parallel": True}
    found = run(train, 2, str(tmp_path / "on"), "int8", layout, base, str(one["folder"] / "step=1.ckpt"))[0]
    np.testing.assert_allclose(found["losses"][0], one["losses"][1], rtol=1e-9)
    assert merge_checkpoint(path, tmp_path / "merged", base) == 4  # q and v are one layer
    tokens, sequences = torch.arange(9), PackedSequences.of_lengths([4, 5])
    adapted = load_model(path, base=base)
    assert not any(stored_of(p) for p in adapted.parameters())
    merged = load_model(str(tmp_path / "merged"))
    torch.testing.assert_close(merged(tokens, sequences).logits, adapted(tokens, sequences).logits)


CASES = {
    "saved": (lambda: Adapters(2, base="int8"), "checkpoints cannot hold them. Set save_base=False"),
    "format": (lambda: Adapters(2, base="int7", save_base=False), "no format 'int7' of stored weights"),
    "alone": (lambda: Adapters(2, block=32), "block=32 is of weights that are stored quantized; set base, too"),
    "odd": (lambda: Adapters(2, base="int8", block=5, save_base=False), "^block=5 must be even and at least 2"),
    "trained": (
        lambda: QuantizedBase().change(GPT(CONFIGS["gqa"])),
        "is trained, and quantized weights have no gradient",
    ),
    "experts": (
        lambda: _change(replace(CONFIGS["gqa"], moe=MoEConfig(num_experts=2, ffn_hidden_size=6))),
        "layers.0.mlp.experts: rows of 6 features cannot be cut into blocks of 4",
    ),
    "block": (lambda: _change(CONFIGS["gqa"], block=48), "cannot be cut into blocks of 48"),
}


def _change(config: Any, block: int = BLOCK) -> None:
    with torch.device("meta"):
        model = GPT(config)
    LoRA(2).change(model)
    QuantizedBase(block=block).change(model)


@pytest.mark.parametrize("case", CASES)
def test_refusals(case: str) -> None:
    act, message = CASES[case]
    with pytest.raises(ConfigurationError, match=message):
        act()
