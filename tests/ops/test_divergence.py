"""Divergence of two linear layers: values and gradients against whole logits in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops import cross_entropy
from megalight.ops.divergence import KINDS, Projection, chunked, linear_divergence

TOKENS, ROWS, REAL, TEMPERATURE = 13, 33, 31, 1.7


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


def by_hand(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    log_q, log_p = ((logits / TEMPERATURE).log_softmax(-1) for logits in (student, teacher))
    if kind == "forward_kl":
        return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    if kind == "cross_entropy":
        return -(log_p.exp() * log_q).sum(-1)
    if kind == "reverse_kl":
        return F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    middle = ((log_q.exp() + log_p.exp()) / 2).log()
    both = (F.kl_div(middle, log, log_target=True, reduction="none").sum(-1) for log in (log_q, log_p))
    return torch.stack(list(both)).mean(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("softcap", "chunk", "share"), [(None, None, 1.0), (3.0, 5, 1.0), (None, 4, 0.0)])
def test_values_and_gradients(
    kind: str, softcap: float | None, chunk: int | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "SHARE", share)  # with 0, no logits are kept
    monkeypatch.setattr(cross_entropy, "BLOCK", 3 * ROWS)
    torch.manual_seed(0)
    leaves = [draw(TOKENS, 6), draw(ROWS, 6), draw(ROWS)]
    for leaf in leaves:
        leaf.requires_grad_()
    hidden, weight, bias = leaves
    theirs, layer = draw(TOKENS, 9), draw(ROWS, 9)
    labels = torch.randint(0, REAL, (TOKENS,))
    labels[3] = -100
    scales = draw(2, TOKENS)
    found, losses = linear_divergence(
        Projection(hidden, weight, bias, softcap),
        Projection(theirs, layer, None, 2.0),
        labels,
        kind=kind,
        temperature=TEMPERATURE,
        chunk=chunk,
        num_rows=REAL,
    )
    assert losses is not None
    grads = torch.autograd.grad((found * scales[0] + losses * scales[1]).sum(), leaves)
    logits = (hidden @ weight.T + bias)[:, :REAL]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    teacher = 2 * torch.tanh((theirs @ layer.T)[:, :REAL] / 2)
    expected = by_hand(kind, logits, teacher).masked_fill(labels < 0, 0)
    own = F.cross_entropy(logits, labels, reduction="none")
    wanted = torch.autograd.grad((expected * scales[0] + own * scales[1]).sum(), leaves)
    for value, reference in zip((found, losses, *grads), (expected, own, *wanted), strict=True):
        assert (value - reference).norm() <= 1e-12 * reference.norm()


def test_without_cross_entropy_the_gradient_is_that_of_the_divergence() -> None:
    torch.manual_seed(0)
    hidden, layer = draw(5, 4).requires_grad_(), draw(7, 4)
    found, losses = linear_divergence(
        Projection(hidden, layer), Projection(draw(5, 3), draw(7, 3)), torch.arange(5), own=False
    )
    assert losses is None
    same, _ = linear_divergence(Projection(hidden, layer), Projection(hidden.detach(), layer), torch.arange(5))
    assert same.abs().max() < 1e-14
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    assert gradient.abs().min() > 0
    (none,) = torch.autograd.grad(same.sum(), hidden)
    assert none.abs().max() < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_an_ignored_token_reaches_no_loss_and_no_gradient(kind: str) -> None:
    torch.manual_seed(0)
    hidden, layer, theirs, their_layer = draw(6, 4), draw(7, 4), draw(6, 3), draw(7, 3)
    labels = torch.tensor([1, -100, 2, -100, 3, 4])

    def run(student: Tensor, teacher: Tensor) -> list[Tensor]:
        leaves = [student.clone().requires_grad_(), layer.clone().requires_grad_()]
        found, losses = linear_divergence(
            Projection(leaves[0], leaves[1]), Projection(teacher, their_layer), labels, kind=kind, chunk=4
        )
        assert losses is not None
        return [found, losses, *torch.autograd.grad((found + losses).sum(), leaves)]

    expected = run(hidden, theirs)
    bad, worse = hidden.clone(), theirs.clone()
    bad[1], worse[1], worse[3] = torch.nan, torch.inf, torch.nan
    for value, reference in zip(run(bad, worse), expected, strict=True):
        assert torch.equal(value, reference)


@pytest.mark.full  # the import of modelopt takes longer than all tests of this file
def test_modelopt_computes_the_same() -> None:
    losses = pytest.importorskip("modelopt.torch.distill.losses")
    torch.manual_seed(0)
    student, teacher = draw(5, 7), draw(5, 7)
    theirs = losses.LogitsDistillationLoss(temperature=TEMPERATURE, reduction="none")(student, teacher)
    eye = torch.eye(7, dtype=torch.double)
    ours, _ = linear_divergence(
        Projection(student, eye), Projection(teacher, eye), torch.arange(5), temperature=TEMPERATURE
    )
    # its class multiplies by the square of the temperature
    assert (ours * TEMPERATURE**2 - theirs).norm() <= 1e-12 * theirs.norm()
