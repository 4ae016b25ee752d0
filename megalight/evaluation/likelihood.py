"""Log-likelihoods of continuations, from forward passes over packed sequences.

Sequences of any lengths run packed, without padding, and the head computes logits only where a token is
scored. Continuations whose inputs are equal (the answers ``A`` to ``D`` of a question) share one sequence. A sequence
longer than a batch runs in parts, through a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import DataError, integer
from megalight.inference import Cache, ParallelGPT
from megalight.inference.generate import another
from megalight.inference.parallel import GenerativeModel, device_of, evaluating, layers_with_state
from megalight.types import PackedSequences

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Replicas:
    """The replicas of a model, of which each computes a part of the requests.

    Attributes:
        group: one rank of each replica, this one among them; None: there is a single replica.
    """

    group: ProcessGroup | None = None

    @classmethod
    def of(cls, model: GenerativeModel) -> Replicas:
        """Return the replicas of a model: the data-parallel ranks, or all ranks if each holds a whole model."""
        if isinstance(model, ParallelGPT):
            return cls(model.mesh.group("dp"))
        return cls(dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None)

    def share(self, items: Sequence[T], compute: Callable[[list[T]], list[R]]) -> list[R]:
        """Compute every item on one replica; return all results on all of them, in the order of the items.

        Neighbors go to different replicas, so items that are sorted by their length give equal work.
        """
        if self.group is None:
            return compute(list(items))
        count = dist.get_world_size(self.group)
        parts: list[list[R]] = [[] for _ in range(count)]
        dist.all_gather_object(parts, compute(list(items[dist.get_rank(self.group) :: count])), self.group)
        return [parts[place % count][place // count] for place in range(len(items))]


BATCH_TOKENS = 4096
"""Tokens of a forward pass for which nobody gave a number."""

CHUNK = 1024
"""Rows of logits that become log-probabilities at a time: their float32 copy is small beside the logits."""


class Continuation(NamedTuple):
    """Tokens to score after a context.

    Attributes:
        context: at least one token.
        tokens: at least one token.
    """

    context: Sequence[int]
    tokens: Sequence[int]


class LogLikelihood(NamedTuple):
    """The score of a continuation.

    Attributes:
        total: sum of the log-probabilities of its tokens.
        greedy: whether each of its tokens is the most likely one.
    """

    total: float
    greedy: bool


def log_likelihoods(
    model: GenerativeModel,
    continuations: Sequence[Continuation],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_length: int | None = None,
    replicas: Replicas | None = None,
) -> list[LogLikelihood]:
    """Score continuations. All ranks call this together, with the same continuations, and get the same scores.

    Args:
        model: a whole model, or this rank's part of a model.
        continuations: what to score. Too long contexts lose their first tokens.
        batch_tokens: tokens of a forward pass.
        max_length: tokens that the model reads at most. None: its ``max_sequence_length``.
        replicas: who shares the work; None: :meth:`Replicas.of` the model.

    Raises:
        DataError: a context or a continuation is empty, a continuation is longer than ``max_length``, or a token is
            outside the vocabulary.
        ConfigurationError: a number is no integer of at least 1.
    """
    integer("batch_tokens", batch_tokens)
    longest = model.config.max_sequence_length
    longest = longest if max_length is None else min(longest, integer("max_length", max_length))
    users: dict[tuple[int, ...], list[int]] = {}
    for number, (context, tokens) in enumerate(continuations):
        if not context or not 0 < len(tokens) <= longest:
            raise DataError(
                f"continuation {number} has {len(tokens)} tokens after a context of {len(context)}; both need at "
                f"least one, and a continuation has room for {longest}."
            )
        # The last token is predicted and never read.
        users.setdefault((*context, *tokens)[-longest - 1 : -1], []).append(number)
    # The longest first: if memory is too small, it is so at once.
    inputs = sorted(users, key=len, reverse=True)
    _check_tokens(continuations, model.config.vocab_size)

    def compute(own: list[tuple[int, ...]]) -> list[list[LogLikelihood]]:
        return _scores(model, own, [[continuations[each].tokens for each in users[ids]] for ids in own], batch_tokens)

    shared = (Replicas.of(model) if replicas is None else replicas).share(inputs, compute)
    found = {
        n: score
        for ids, scores in zip(inputs, shared, strict=True)
        for n, score in zip(users[ids], scores, strict=True)
    }
    return [found[number] for number in range(len(continuations))]


def _check_tokens(continuations: Sequence[Continuation], vocab_size: int) -> None:
    for each in continuations:
        for token in (*each.context, *each.tokens):
            if not 0 <= token < vocab_size:
                raise DataError(
                    f"token {token} is outside the model's vocabulary of {vocab_size}; use the tokenizer that the "
                    "model was trained with."
                )


@dataclass
class _Pass:
    """A forward pass.

    Attributes:
        targets: tokens to score: ``(i, j, place, token)`` for continuation ``j`` of input ``i``, predicted at
            ``place`` among the tokens of this pass.
        cache: the tokens before, of a sequence that runs in parts.
    """

    inputs: list[Sequence[int]] = field(default_factory=list)
    targets: list[tuple[int, int, int, int]] = field(default_factory=list)
    cache: Cache | None = None


def _scores(
    model: GenerativeModel,
    inputs: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    batch_tokens: int,
) -> list[list[LogLikelihood]]:
    """Score the continuations of each input on this replica: all but the last token of each end the input."""
    totals = [[0.0] * len(each) for each in continuations]
    greedy = [[True] * len(each) for each in continuations]
    passes = _passes(model, inputs, continuations, batch_tokens)
    coming = next(passes, None)
    while another(model, coming is not None):
        if coming is None:
            # Another replica needs the parameters or experts that this one holds.
            assert isinstance(model, ParallelGPT)
            with evaluating(model):
                model.accompany()
            continue
        values, best = _run(model, coming)
        for (i, j, _, _), value, is_best in zip(coming.targets, values, best, strict=True):
            totals[i][j] += value
            greedy[i][j] &= is_best
        coming = next(passes, None)
    return [[*map(LogLikelihood, *each)] for each in zip(totals, greedy, strict=True)]


def _passes(
    model: GenerativeModel,
    inputs: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    batch_tokens: int,
) -> Iterator[_Pass]:
    """Pack inputs into passes of ``batch_tokens``; longer ones run in parts of so many tokens."""
    packed, size = _Pass(), 0
    for i, ids in enumerate(inputs):
        targets = [
            (i, j, len(ids) - len(tokens) + k, token)
            for j, tokens in enumerate(continuations[i])
            for k, token in enumerate(tokens)
        ]
        if len(ids) > batch_tokens:
            cache = Cache(layers_with_state(model), 1, len(ids))
            for first in range(0, len(ids), batch_tokens):
                inside = [(i, j, at - first, t) for _, j, at, t in targets if first <= at < first + batch_tokens]
                yield _Pass([ids[first : first + batch_tokens]], inside, cache)
            continue
        if size + len(ids) > batch_tokens:
            yield packed
            packed, size = _Pass(), 0
        packed.inputs.append(ids)
        packed.targets += [(i, j, size + at, token) for _, j, at, token in targets]
        size += len(ids)
    if packed.inputs:
        yield packed


@torch.no_grad()
def _run(model: GenerativeModel, work: _Pass) -> tuple[list[float], list[bool]]:
    """Return for each target its log-probability, and whether it is the most likely token."""
    device, lengths = device_of(model), [*map(len, work.inputs)]
    # A part without targets still needs a row: stages send the logits of at least one.
    rows = sorted({place for _, _, place, _ in work.targets}) or [0]
    row_of = {place: row for row, place in enumerate(rows)}
    tokens = torch.tensor([token for ids in work.inputs for token in ids], device=device)
    with evaluating(model):
        if work.cache is None:
            sequences, states = PackedSequences.of_lengths(lengths, device), None
        else:
            sequences, states = work.cache.extend([0], lengths, device), work.cache.states
        logits = model(tokens, sequences, states=states, rows=torch.tensor(rows, device=device)).logits
    assert isinstance(logits, Tensor)
    # At least in float32: the sum over a vocabulary loses digits in bfloat16.
    wide = torch.promote_types(logits.dtype, torch.float32)
    normalizer = torch.cat([chunk.to(wide).logsumexp(-1) for chunk in torch.split(logits, CHUNK)])
    places = torch.tensor([row_of[place] for _, _, place, _ in work.targets], dtype=torch.long, device=device)
    wanted = torch.tensor([token for *_, token in work.targets], dtype=torch.long, device=device)
    values = logits[places, wanted].to(wide) - normalizer[places]
    best = logits.argmax(-1)[places] == wanted
    return values.tolist(), best.tolist()
