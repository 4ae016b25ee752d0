"""A student learns from a teacher of its own configuration, weights and layout, as on one device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.callbacks.distillation import Distillation
from megalight.errors import ConfigurationError, DataError
from megalight.models.bert.module import BertModule
from megalight.models.distillation import Distiller
from megalight.models.gpt import GPT, GPTConfig, MambaConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.nn.moe.config import MoEConfig
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.strategies.training import BASE, SEED, assert_weights, global_batch, whole
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, LENGTH, LR = 2, 11, 1e-2
STUDENT = replace(BASE, num_layers=4)
TEACHERS = {
    "untied": replace(BASE, hidden_size=16, num_kv_heads=4, ffn_hidden_size=40, num_layers=3, logit_softcap=9.0),
    "tied": replace(BASE, hidden_size=24, tie_embeddings=True),
}
HYBRIDS = {
    "hybrid": replace(
        BASE,
        hidden_size=24,
        num_layers=5,
        layer_pattern="M*-ME",
        mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2),
        moe=MoEConfig(num_experts=4, ffn_hidden_size=12),
    ),
    # layers of two sublayers, whose mixers differ
    "mixed": replace(BASE, hidden_size=40, num_layers=4, mixer_pattern=("conv", "attention"), conv_kernel=4),
}


def teacher_of(kind: str) -> GPT:
    model = GPT({**TEACHERS, **HYBRIDS}[kind]).double()
    initialize(model, 11, "model.")
    # Larger weights: at their initial size all distributions are almost equal, and errors would hide.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):  # decay and steps of Mamba are no weights
                parameter.mul_(3)
    return model


@pytest.fixture(scope="module", params=TEACHERS)
def teacher(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / str(request.param)
    save_model(held_model("gpt", TEACHERS[request.param], teacher_of(request.param)), folder)
    return folder


class Student(GPTModule):
    def __init__(self, packed: bool = False, config: GPTConfig = STUDENT) -> None:
        super().__init__(config, seed=SEED)
        self.packed = packed

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        batches = batches_of(self.packed)
        rows = [batch.split(4 // share["num_replicas"])[share["rank"]] for batch in batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = predict_dataloader = train_dataloader


def batches_of(packed: bool) -> list[TokenBatch]:
    return [global_batch(step, length=12 if packed else LENGTH, packed=packed) for step in range(STEPS)]


def divergence_of(kind: str, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Of whole logits ``[T, V]``, for each token."""
    log_q, log_p = (logits.div(temperature).log_softmax(-1) for logits in (student, teacher))
    q, p = log_q.exp(), log_p.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_m = ((p + q) / 2).log()
    return (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2


@functools.cache
def by_hand(
    teacher: str, packed: bool, divergence: str = "forward_kl", temperature: float = 1.0, scale: float = 1.0,
    own_loss: bool = False,
) -> tuple[list[tuple[float, ...]], tuple[float, float], Mapping[str, Any]]:  # fmt: skip
    """Objectives, divergences and own losses; both after training; and weights, of torch alone."""
    student, guide = GPT(STUDENT).double(), teacher_of(teacher)
    initialize(student, SEED, "model.")
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR)

    def losses_of(batch: TokenBatch) -> tuple[Tensor, Tensor]:
        mask = batch.loss_mask.flatten()
        logits, theirs = (model(batch.tokens.flatten(), batch.sequences).logits for model in (student, guide))
        divergences = divergence_of(divergence, logits, theirs.detach(), temperature)
        own = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        return (divergences * mask).sum() / mask.sum(), (own * mask).sum() / mask.sum()

    rows = []
    for batch in batches_of(packed):
        found, own = losses_of(batch)
        loss = scale * found + (own if own_loss else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append((float(loss.detach()), float(found.detach()), float(own.detach())))
    batches = batches_of(packed)
    counts = [float(batch.loss_mask.sum()) for batch in batches]
    after = [
        sum(float(losses_of(b)[which].detach()) * n for b, n in zip(batches, counts, strict=True)) / sum(counts)
        for which in (0, 1)
    ]
    return rows, (after[0], after[1]), whole(student)


def check(
    folder: Path, layout: dict[str, Any], packed: bool, options: dict[str, Any], loss: dict[str, Any], by_torch: Any
) -> None:
    """Train a student beside its teacher, and compare everything with torch alone."""
    module = Student(packed)
    how = MegatronStrategy(micro_batch_size=1, **layout)
    rows: list[tuple[float, ...]] = []

    def keep(*_: Any) -> None:
        found = runner.callback_metrics
        names = ("train_loss", "train_divergence", *["train_own_loss"] * bool(loss.get("own_loss")))
        rows.append(tuple(float(found[name]) for name in names))

    module.on_train_batch_end = keep  # type: ignore[method-assign]
    runner = trainer(
        how,
        max_steps=STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[Distillation(folder, teacher_layout=Layout(**options), **loss)],
    )
    runner.fit(module)
    wanted_rows, after, wanted = by_torch
    np.testing.assert_allclose(rows, [row[: len(rows[0])] for row in wanted_rows], rtol=1e-9)
    found = [float(runner.callback_metrics[name]) for name in ("val_divergence", "val_loss")]
    np.testing.assert_allclose(found, after, rtol=1e-9)
    assert_weights(how, wanted)
    predicted = runner.predict(module)
    assert predicted is not None
    assert predicted[0].shape == (4 // how.mesh.dp, 12 if packed else LENGTH)
    saved = folder.parent / f"saved-{how.mesh.world_size}-{abs(hash(str((layout, options, loss))))}"
    runner.save_checkpoint(saved)
    assert not any("teacher" in name for name in checkpoint.open(saved).tensors)


SHARES = {"tensor_parallel": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_parallel": 2}
CONTEXT = {"context_parallel": 2}
INTERLEAVED = {**PIPELINE, "virtual_pipeline": 2, "recompute": RecomputeOptions(granularity="full")}
OWN = {"own_loss": True, "scale": 0.3, "temperature": 2.0}


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "layout", "packed", "options", "loss"),
    [
        pytest.param(1, {}, False, {}, {}, marks=pytest.mark.full),
        (2, SHARES, False, {**PIPELINE, "pipeline_layout": "Et|ttL"}, OWN),
        pytest.param(2, PIPELINE, True, {**SHARES}, {"divergence": "reverse_kl"}, marks=pytest.mark.full),
        pytest.param(
            2,
            {},
            False,
            {"tensor_parallel": 2},
            {"divergence": "jensen_shannon", "temperature": 0.7},
            marks=pytest.mark.full,
        ),
        pytest.param(2, CONTEXT, True, {"tensor_parallel": 2}, OWN, marks=pytest.mark.full),
        pytest.param(
            2,
            {"data_parallel": DataParallelOptions(level="optim_grads_params")},
            False,
            {},
            OWN,
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(4, {**CONTEXT, **SHARES}, False, {**PIPELINE, "pipeline_layout": "Et|ttL"}, {}), marks=pytest.mark.full
        ),
        pytest.param(
            *(4, {**SHARES, **PIPELINE}, True, {"tensor_parallel": 4, "sequence_parallel": True}, OWN),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(4, INTERLEAVED, False, {**SHARES, **PIPELINE, "pipeline_layout": "Ett|tL"}, OWN), marks=pytest.mark.full
        ),
    ],
)
def test_a_student_learns_as_on_one_device(
    teacher: Path, ranks: int, layout: Any, packed: bool, options: Any, loss: Any
) -> None:
    run(check, ranks, teacher, layout, packed, options, loss, by_hand(teacher.name, packed, **loss))


@pytest.mark.full
@pytest.mark.parametrize("teacher", ["tied"], indirect=True)
def test_the_teachers_head_may_be_its_embedding(teacher: Path) -> None:
    run(check, 2, teacher, SHARES, False, PIPELINE, {}, by_hand(teacher.name, False))


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_the_teacher_leaves_with_its_callback(teacher: Path) -> None:
    module, callback = Student(), Distillation(teacher)
    runner: Any = SimpleNamespace(callbacks=[callback])
    callback.setup(runner, module, "fit")
    assert list(module.frozen_models()) == ["teacher"]
    callback.teardown(runner, module, "fit")
    assert not module.frozen_models()
    runner.callbacks.append(Distillation(teacher, divergence="reverse_kl"))
    with pytest.raises(ConfigurationError, match="more than one Distillation"):
        callback.setup(runner, module, "fit")


def test_the_teacher_may_be_a_run_whose_checkpoints_hold_scores(tmp_path: Path) -> None:
    held = held_model("gpt", TEACHERS["tied"], teacher_of("tied"))
    for step in (1, 2):
        # As callbacks leave them in checkpoints of runs.
        scores = {"callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(1.0)}}}
        save_model(replace(held, training=scores), tmp_path / "checkpoints" / f"step={step}.ckpt")
    module, callback = Student(), Distillation(tmp_path)
    callback.attach(module)
    save_model(held, tmp_path / "checkpoints" / "step=3.ckpt")
    # On meta, as a run is checked before its processes start.
    with torch.device("meta"):
        assert list(module.frozen_models()) == ["teacher"]
    assert isinstance(callback.distiller, Distiller)
    assert callback.distiller.folder == tmp_path / "checkpoints" / "step=2.ckpt"


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_sequences_too_long_for_the_teacher_are_refused(teacher: Path) -> None:
    longest = BASE.max_sequence_length
    module = Student(config=replace(STUDENT, max_sequence_length=longest + 1))
    Distillation(teacher).attach(module)
    module.check_data(SimpleNamespace(sequence_length=longest))
    with pytest.raises(DataError, match=f"={longest + 1} is longer than max_sequence_length={longest} of the teacher"):
        module.check_data(SimpleNamespace(sequence_length=longest + 1))


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Student(config=replace(STUDENT, vocab_size=102)), {}, "has vocab_size=101, and the student has 102"),
        (Student(), {"divergence": "kl"}, "divergence='kl' is not one of forward_kl, reverse_kl, jensen_shannon"),
        (Student(), {"temperature": 0.0}, "temperature=0.0 must be positive"),
        (Student(), {"scale": float("nan")}, "scale=nan must be positive"),
        (BertModule("bert_base"), {}, "BertModule is no GPTModule"),
    ],
)
def test_what_cannot_work_is_refused(teacher: Path, module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Distillation(teacher, **options).attach(module)
