"""A student learns from a frozen teacher of another layout on the same ranks, as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.batches import pack
from megalight.models.gpt import GPT
from megalight.models.gpt.module import GPTModule
from megalight.models.module import Carry
from megalight.nn.init import initialize
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.layout import Layout
from megalight.strategies import MegatronStrategy
from megalight.types import Loss, TokenBatch, WithResults
from tests.strategies.training import BASE, SEED, assert_weights, global_batch, whole
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, LENGTH = 2, 11
TEACHER = replace(BASE, hidden_size=16, num_kv_heads=4, ffn_hidden_size=40, num_layers=3)
TEACHER_SEED = 11
LR = 1e-2


class Logits(GPTModule):
    """A GPT that answers with logits."""

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: Carry | None = None) -> Carry:
        sequences = batch.sequences.pad_to(self.token_multiple)
        output = model(pack(batch.tokens, sequences, 0), sequences, hidden=None if carry is None else carry["hidden"])
        if output.hidden is not None:
            return {"hidden": output.hidden}
        return {"logits": output.logits[: batch.tokens.numel()]}


def divergence(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Of the student's distribution from the teacher's, ``[T, V]`` logits each, summed over the tokens that count."""
    loss = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none")
    return (loss.sum(-1) * mask.flatten()).sum()


class Student(Logits):
    def __init__(self, teacher: dict[str, Any]) -> None:
        super().__init__(BASE, seed=SEED)
        self.teacher = teacher

    def frozen_models(self) -> dict[str, FrozenModel]:
        return {"teacher": FrozenModel(task=Logits(TEACHER), seed=TEACHER_SEED, layout=Layout(**self.teacher))}

    def forward_step(self, model: nn.Module, batch: WithResults, carry: Carry | None = None) -> Carry:  # type: ignore[override]
        return super().forward_step(model, batch.batch, carry)

    def loss_step(self, carry: Carry, batch: WithResults) -> Loss:  # type: ignore[override]
        return Loss(divergence(carry["logits"], batch.results["teacher"]["logits"], batch.batch.loss_mask))

    def output_step(self, carry: Carry, batch: TokenBatch) -> Tensor:
        return carry["logits"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        batches = [global_batch(step, length=LENGTH) for step in range(STEPS)]
        rows = [batch.split(4 // share["num_replicas"])[share["rank"]] for batch in batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = predict_dataloader = train_dataloader


@functools.cache
def by_hand(device: str) -> tuple[list[float], float, dict[str, Any]]:
    """Losses, the divergence afterwards, and weights of torch alone: one device, whole batches.

    Initial values depend on the type of device.
    """
    student, teacher = GPT(BASE).double().to(device), GPT(TEACHER).double().to(device)
    initialize(student, SEED, "model.")
    initialize(teacher, TEACHER_SEED, "teacher.")
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR)

    def loss_of(batch: TokenBatch) -> Tensor:
        logits = [model(batch.tokens.flatten(), batch.sequences).logits for model in (student, teacher)]
        return divergence(logits[0], logits[1].detach(), batch.loss_mask)

    batches = [global_batch(step, length=LENGTH).to(device) for step in range(STEPS)]
    losses = []
    for batch in batches:
        loss = loss_of(batch) / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    after = float(sum(loss_of(b).detach() for b in batches) / sum(b.loss_mask.sum() for b in batches))
    return losses, after, whole(student)


def check(student: dict[str, Any], teacher: dict[str, Any], accelerator: str = "cpu") -> None:
    """Train a student beside a frozen teacher, and compare everything with torch alone."""
    module = Student(teacher)
    how = MegatronStrategy(micro_batch_size=1, **student)
    losses: list[float] = []
    module.on_train_batch_end = lambda *_: losses.append(float(how.report.loss))  # type: ignore[method-assign,union-attr]
    options = {"max_steps": STEPS, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    runner = trainer(how, accelerator=accelerator, **options)
    runner.fit(module)
    wanted_losses, after, wanted = by_hand(accelerator)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-9)
    assert float(runner.callback_metrics["val_loss"]) == pytest.approx(after, rel=1e-9)
    assert_weights(how, wanted)
    (frozen,) = how._stepper.step.frozen.values()  # type: ignore[union-attr]
    assert not frozen.model.root.training
    held = {id(parameter) for parameter in frozen.model.parameters()}
    assert held
    assert held.isdisjoint(map(id, module.parameters()))
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in frozen.model.parameters())
    assert all(piece.name.startswith("teacher.") for spec in frozen.model.specs.values() for piece in spec.pieces)
    predicted = runner.predict(module)
    assert predicted is not None
    assert predicted[0].shape == (4 // how.mesh.dp * LENGTH, BASE.vocab_size)


SHARES = {"tensor_parallel": 2, "sequence_parallel": True}
WHOLE = {"tensor_parallel": 4, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("ranks", "student", "teacher"),
    [
        (1, {}, {}),
        pytest.param(4, SHARES, {}, marks=pytest.mark.full),
        pytest.param(4, SHARES, WHOLE, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2}, {}, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2}, {"tensor_parallel": 4}, marks=pytest.mark.full),
        (4, {}, {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_layout": "Ett|tL"}),
        pytest.param(4, {**SHARES, "pipeline_parallel": 2}, {"tensor_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_a_student_learns_as_on_one_device(ranks: int, student: dict[str, Any], teacher: dict[str, Any]) -> None:
    run(check, ranks, student, teacher)


class OwnStep(Student):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        raise AssertionError("never called")


def _refused(kind: type[Student], student: dict[str, Any], teacher: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(ValueError) as caught:
        trainer(MegatronStrategy(**student), use_distributed_sampler=False).fit(kind(teacher))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("kind", "student", "teacher", "error", "message"),
    [
        (Student, {}, {"tensor_parallel": 3}, LayoutError, "world size 2 is not a multiple of"),
        (OwnStep, {}, {}, ConfigurationError, "Remove training_step, and read the results in forward_step"),
    ],
)
def test_what_cannot_work_is_refused(
    kind: type[Student], student: dict[str, Any], teacher: dict[str, Any], error: type[Exception], message: str
) -> None:
    for name, text in run(_refused, 2, kind, student, teacher):
        assert name == error.__name__
        assert message in text
