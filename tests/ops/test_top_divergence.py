"""Divergence from the most likely tokens of a teacher: values and gradients against whole logits in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops import cross_entropy
from megalight.ops.divergence import Projection, linear_divergence, top_k
from megalight.types import TopTokens

TOKENS, ROWS, REAL, TEMPERATURE = 13, 33, 31, 1.7


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


def top_tokens(logits: Tensor, k: int) -> TopTokens:
    logs = logits.log_softmax(-1)
    chosen = logs.topk(k, -1)
    rest = logs.scatter(-1, chosen.indices, -torch.inf).logsumexp(-1)
    return TopTokens(chosen.indices.int(), chosen.values, rest)


def by_hand(student: Tensor, teacher: TopTokens, kind: str) -> Tensor:
    """Of whole logits ``[T, V]`` of the student, for each token."""
    q = student.div(TEMPERATURE).softmax(-1)
    ours = q.gather(1, teacher.ids.long())
    terms = teacher.log_probs.exp() * ((teacher.log_probs if kind == "forward_kl" else 0) - ours.log())
    if not teacher.log_rest.isfinite().any():
        return terms.sum(-1)
    outside = torch.ones_like(q).scatter(1, teacher.ids.long(), 0)
    rest = (q * outside).sum(-1)
    return terms.sum(-1) + teacher.log_rest.exp() * ((teacher.log_rest if kind == "forward_kl" else 0) - rest.log())


@pytest.mark.parametrize("kind", ["forward_kl", "cross_entropy"])
@pytest.mark.parametrize(
    ("k", "softcap", "chunk", "share"), [(4, None, None, 1.0), (9, 3.0, 5, 1.0), (REAL, None, 4, 0)]
)
def test_values_and_gradients(
    kind: str, k: int, softcap: float | None, chunk: int | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "SHARE", share)  # with 0, no logits are kept
    monkeypatch.setattr(cross_entropy, "BLOCK", 3 * ROWS)
    torch.manual_seed(0)
    leaves = [draw(TOKENS, 6), draw(ROWS, 6), draw(ROWS)]
    for leaf in leaves:
        leaf.requires_grad_()
    hidden, weight, bias = leaves
    teacher = top_tokens(draw(TOKENS, REAL) * 2, k)
    labels = torch.randint(0, REAL, (TOKENS,))
    labels[3] = -100
    scales = draw(2, TOKENS)
    found, losses = linear_divergence(
        Projection(hidden, weight, bias, softcap),
        teacher,
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
    expected = by_hand(logits, teacher, kind).masked_fill(labels < 0, 0)
    own = F.cross_entropy(logits, labels, reduction="none")
    wanted = torch.autograd.grad((expected * scales[0] + own * scales[1]).sum(), leaves)
    for value, reference in zip((found, losses, *grads), (expected, own, *wanted), strict=True):
        assert (value - reference).norm() <= 1e-12 * reference.norm()


def test_all_tokens_give_the_divergence_of_whole_logits() -> None:
    torch.manual_seed(0)
    hidden, weight, theirs = draw(5, 4).requires_grad_(), draw(7, 4), draw(5, 7)
    labels, eye = torch.arange(5), torch.eye(7, dtype=torch.double)
    found, _ = linear_divergence(Projection(hidden, weight), top_tokens(theirs, 7), labels)
    wanted, _ = linear_divergence(Projection(hidden, weight), Projection(theirs, eye), labels)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_rounded_logarithms_are_a_distribution_again() -> None:
    torch.manual_seed(0)
    hidden, weight = draw(5, 4).requires_grad_(), draw(7, 4)
    teacher = top_tokens(draw(5, 7), 3)
    shifted = TopTokens(teacher.ids, teacher.log_probs + 0.25, teacher.log_rest + 0.25)
    found, wanted = (
        linear_divergence(Projection(hidden, weight), each, torch.arange(5))[0] for each in (shifted, teacher)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_nan_of_an_ignored_token_reaches_no_loss_and_no_gradient() -> None:
    torch.manual_seed(0)
    hidden, weight, teacher = draw(6, 4), draw(7, 4), top_tokens(draw(6, 7), 3)
    labels = torch.tensor([1, -100, 2, -100, 3, 4])

    def run(student: Tensor, tokens: TopTokens) -> list[Tensor]:
        leaves = [student.clone().requires_grad_(), weight.clone().requires_grad_()]
        found, losses = linear_divergence(Projection(leaves[0], leaves[1]), tokens, labels, chunk=4)
        assert losses is not None
        return [found, losses, *torch.autograd.grad((found + losses).sum(), leaves)]

    expected = run(hidden, teacher)
    bad, logs = hidden.clone(), teacher.log_probs.clone()
    bad[1], logs[3] = torch.nan, torch.nan
    for value, reference in zip(run(bad, TopTokens(teacher.ids, logs, teacher.log_rest)), expected, strict=True):
        assert torch.equal(value, reference)
