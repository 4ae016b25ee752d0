"""Speculative decoding: a speculator guesses the next tokens of sequences, and one pass of the base checks them all.

A pass runs the newest token of a sequence and the guesses after it, and samples at each of these places as it would
without guesses. Samples are kept up to the first that differs from its guess, and that one is kept, too. Samples follow
from the seed and the position of a token, so a text does not depend on who guesses
(https://arxiv.org/abs/2211.17192, with guesses that are certain).

Guesses come from the text itself (:class:`NGramSpeculator`), from a small model (:class:`DraftSpeculator`), or from a
draft that reads hidden states of the base (:class:`EagleSpeculator`).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megalight import checkpoint
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, integer
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache, NewestTokens
from megalight.inference.draft_loop import DraftLoop
from megalight.inference.parallel import GenerativeModel, ParallelGPT, device_of, evaluating
from megalight.inference.scheduler import Request
from megalight.models.eagle import DraftModel
from megalight.models.eagle.serving_format import is_draft
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.hf_causal_lm import HFModel
from megalight.models.loading import companions_of, description, saved_model
from megalight.ops.batch_invariant import batch_invariant_mode
from megalight.types import PackedSequences, to_device


class DraftRound(NamedTuple):
    """What became of the guesses after a token.

    Attributes:
        proposed: how many there were.
        accepted: how many of them are in the text.
        complete: whether the text went on after them, or ends with the token that the base added. Otherwise its end
            cut the round short.
    """

    proposed: int
    accepted: int
    complete: bool

    @classmethod
    def of(cls, proposed: int, tokens: Sequence[int], ends: Collection[int]) -> DraftRound:
        """Return the round of so many guesses, of which all but the last of these tokens were right."""
        last = len(tokens) - 1
        end = next((place for place, token in enumerate(tokens) if token in ends), last)
        return cls(proposed, min(last, end + 1), end == last)


class DraftRounds(Counter[DraftRound]):
    """How many rounds of each kind there were. Another thread may read them."""

    @property
    def drafted(self) -> list[int]:
        """How many tokens were guessed as the first, the second and so on of their rounds."""
        return self._by_place([(round.proposed, count) for round, count in [*self.items()]])

    @property
    def accepted(self) -> list[int]:
        """How many of them were right; a guess after a wrong one is not."""
        return self._by_place([(round.accepted, count) for round, count in [*self.items()]])

    def _by_place(self, counts: Sequence[tuple[int, int]]) -> list[int]:
        longest = max((round.proposed for round in [*self]), default=0)
        return [sum(count for reached, count in counts if reached > place) for place in range(longest)]


@runtime_checkable
class Speculator(Protocol):
    """Guesses tokens on the device; on all ranks of a replica the same. The host need not know what is guessed.

    Attributes:
        num_speculative_tokens: the most that it guesses after a token.
        longest: how many tokens a sequence may have with all guesses but the last.
        loop: the loop of its draft; None: it has none.
    """

    num_speculative_tokens: int
    longest: int
    loop: DraftLoop | None

    @property
    def draft(self) -> nn.Module | None:
        """The draft; None: it has none."""

    def join(self, cache: Cache, newest: NewestTokens) -> None:
        """Guess for the sequences of an engine: what it stores, and where they are."""
        ...

    def begin(self, requests: Sequence[Request]) -> None:
        """Guess for these from now on. Of their tokens, the host knows all that have run, and the device the newest."""
        ...

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """Return guesses ``[n, k]``: row ``i`` has ``counts[i]`` of what may follow the newest token of a request.

        One that is negative stands for none, like those after it. All passes of a request are told, from
        :meth:`begin` on; its slot has blocks for all guesses, and more tokens may be stored there than have run.
        """
        ...

    def drop(self) -> None:
        """Give memory back that depends on sequences. All begin again."""
        ...


class NGramSpeculator:
    """Guesses what followed the last tokens of a sequence when they came before in it (prompt lookup). It has no model.

    Sequences lie on the device, so a pass begins before the host knows the tokens of the last one.

    Args:
        num_speculative_tokens: maximum number of guesses.
        longest: how many of the last tokens must come before; fewer serve, down to ``shortest``, if so many do not.
        shortest: at least 1.

    Raises:
        ConfigurationError: a number is no integer of at least 1, or ``shortest`` is above ``longest``.
    """

    def __init__(self, num_speculative_tokens: int = 4, *, longest: int = 3, shortest: int = 2) -> None:
        self.num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens)
        self._fewest = integer("shortest", shortest)
        self._most = integer("longest", longest, self._fewest)
        self.longest, self.loop, self.draft = sys.maxsize, None, None
        self._cache: Cache | None = None
        self._newest: NewestTokens | None = None
        # ``[slots, capacity + num_speculative_tokens + 1]``: the tokens of each slot, up to its newest one.
        self._tokens: Tensor | None = None

    def join(self, cache: Cache, newest: NewestTokens) -> None:
        """See :class:`Speculator`."""
        self._cache, self._newest, self._tokens = cache, newest, None

    def begin(self, requests: Sequence[Request]) -> None:
        """See :class:`Speculator`."""
        assert self._cache is not None and self._newest is not None
        device, entries = self._newest.device, len(self._newest.lengths)
        if self._tokens is None:
            width = self._cache.capacity + self.num_speculative_tokens + 1
            self._tokens = torch.zeros(entries, width, dtype=torch.int32, device=device)
        for request in requests:
            assert request.slot is not None
            self._tokens[request.slot, : len(request.tokens)] = to_device(request.tokens, torch.int32, device)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """See :class:`Speculator`."""
        assert self._cache is not None and self._newest is not None and self._tokens is not None
        slots = [request.slot for request in requests if request.slot is not None]
        # No sequence has more tokens before its newest one.
        bound = max(self._cache.lengths[slot] for slot in slots) + 1
        own = to_device(slots, torch.int64, self._newest.device)
        length, step = self._newest.lengths[own, None], torch.arange(self.num_speculative_tokens, device=own.device)
        self._tokens[own[:, None], length] = self._newest.tokens[own, :1].int()
        rows = self._tokens[own, :bound]
        found = self._after(rows, length)
        place = found + step
        guesses = rows.gather(1, place.clamp(max=bound - 1))
        guesses = torch.where((found > 0) & (place <= length), guesses, -1)
        # Right ones are not told again.
        self._tokens[own[:, None], length + 1 + step] = guesses
        return guesses.long()

    def _after(self, rows: Tensor, length: Tensor) -> Tensor:
        """Return the place ``[n, 1]`` of what followed the last tokens, the newest time that most of them came; or 0.

        Args:
            rows: ``[n, bound]``, tokens.
            length: ``[n, 1]``, the place of the last of them.
        """
        index = torch.arange(rows.shape[1], device=rows.device)
        same, found = index < length, torch.zeros_like(length)
        for size in range(1, self._most + 1):
            # Whether the `size` tokens up to each place are the last ones.
            last = rows.gather(1, (length - size + 1).clamp(min=0))
            earlier = rows if size == 1 else torch.nn.functional.pad(rows, (size - 1, 0), value=-1)[:, : 1 - size]
            same = same & (earlier == last)
            if size >= self._fewest:
                place = torch.where(same, index + 1, 0).amax(1, keepdim=True)
                found = torch.where(place > 0, place, found)
        return found

    def drop(self) -> None:
        """See :class:`Speculator`."""
        self._tokens = None


class DraftSpeculator:
    """Lets a small model guess, greedily.

    Args:
        model: a whole model on the device of the base. On a divided base each rank has it.
        base: the model that it serves.
        num_speculative_tokens: maximum number of guesses.
        max_sequences: that of the engine.

    Raises:
        ConfigurationError: a number is no integer of at least 1, the model has another vocabulary or reads images, or
            its layers cannot forget wrong guesses.
    """

    def __init__(
        self, model: GPT, base: GenerativeModel, num_speculative_tokens: int = 4, *, max_sequences: int = 64
    ) -> None:
        config: object = model.config
        if not isinstance(config, GPTConfig) or config.vocab_size != base.config.vocab_size:
            raise ConfigurationError(
                f"the small model has {model.config.vocab_size} tokens and the base {base.config.vocab_size}; take a "
                "model of text with the base's tokenizer."
            )
        self.num_speculative_tokens, self.draft = integer("num_speculative_tokens", num_speculative_tokens), model
        self.longest, slots = config.max_sequence_length, integer("max_sequences", max_sequences)
        blocks = BlockPool(slots, slots * -(-self.longest // 16), 16)
        self._cache = Cache(model.layers, slots, self.longest, blocks)
        if not self._cache.reversible:
            raise ConfigurationError(
                "some layers of the small model keep one state for all earlier tokens (Mamba, convolutions), which "
                "cannot forget a wrong guess; take a model of attention."
            )
        self.loop: DraftLoop | None = None
        self._lengths: Sequence[int] = ()
        self._newest: NewestTokens | None = None

    def join(self, cache: Cache, newest: NewestTokens) -> None:
        """See :class:`Speculator`."""
        self._lengths, self._newest = cache.lengths, newest
        # It comes and goes with that of the engine.
        self._cache.lie_in(cache.memory)
        self.loop = DraftLoop(self._cache, newest, self.num_speculative_tokens, self._chain, again=True)

    def begin(self, requests: Sequence[Request]) -> None:
        """See :class:`Speculator`."""
        slots, device = [request.slot for request in requests if request.slot is not None], device_of(self.draft)
        for slot in slots:
            self._cache.release(slot)
        fresh = [request.tokens for request in requests]
        ids = to_device([token for each in fresh for token in each], torch.int64, device)
        with torch.no_grad(), evaluating(self.draft):
            sequences = self._cache.extend(slots, [*map(len, fresh)], device)
            last = sequences.cu_seqlens[1:].long() - 1
            self.draft(ids, sequences, states=self._cache.states, rows=last)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """See :class:`Speculator`."""
        assert self.loop is not None
        slots = [request.slot for request in requests if request.slot is not None]
        most = {slot: self._lengths[slot] for slot in slots}
        self._cache.blocks.grow({slot: most[slot] + count for slot, count in zip(slots, counts, strict=True)})
        return self.loop.run(slots, counts, max(most.values()) + 1)

    def _chain(self, slots: Tensor, sequences: Sequence[PackedSequences]) -> list[Tensor]:
        assert self._newest is not None
        states, newest = self._cache.states, self._newest
        with torch.no_grad(), evaluating(self.draft):
            # What it has read of wrong guesses is written over, and of the last one it has read nothing.
            ids = torch.stack([newest.before[slots], newest.tokens[slots, 0]], 1).clamp(min=0)
            last = torch.arange(1, ids.numel(), 2, device=ids.device)
            found = [self.draft(ids.flatten(), sequences[0], states=states, rows=last).logits.argmax(-1)]
            for each in sequences[1:]:
                found.append(self.draft(found[-1], each, states=states).logits.argmax(-1))
        return found

    def drop(self) -> None:
        """See :class:`Speculator`."""
        if self._cache.memory is not None:
            self._cache.clear()
            return
        if self.loop is not None:
            self.loop.drop()
        self._cache.drop()


# EAGLE-3


class EagleSpeculator:
    """Lets an EAGLE-3 draft guess, which reads hidden states of the base; see :mod:`megalight.models.eagle.model`.

    The draft's layer keeps its keys and values in the blocks of the engine, beside those of the base. So it goes on
    where a prefix is shared, and after a suspend that keeps the cache. What it keeps at a place follows from the token
    after it, too. At the end of a shared block this token may be that of another sequence, which no text can tell.

    Args:
        draft: a draft that was trained for the base, on the same device and in the same dtype. On a divided base each
            rank has it whole.
        base: the model of the engine.
        num_speculative_tokens: maximum number of guesses.

    Attributes:
        layers: those that the cache of the engine must have.
        places: names of the base's modules whose outputs the draft reads.

    Raises:
        ConfigurationError: see :func:`check_draft`.
    """

    def __init__(self, draft: DraftModel, base: GenerativeModel, num_speculative_tokens: int = 4) -> None:
        check_draft(base, draft, num_speculative_tokens)
        assert not isinstance(base, HFModel)
        self.num_speculative_tokens, self.draft, self._base = num_speculative_tokens, draft, base
        self.layers: Mapping[str, nn.Module] = {"draft": draft.layer}
        self.places = [f"layers.{after - 1}" for after in draft.config.auxiliary_layers]
        self._device = device_of(base)
        self._ids = torch.tensor(draft.config.draft_ids, device=self._device)
        self.longest = sys.maxsize
        self._cache: Cache | None = None
        self.loop: DraftLoop | None = None
        self._hidden: Tensor | None = None

    def join(self, cache: Cache, newest: NewestTokens) -> None:
        """See :class:`Speculator`. The cache has :attr:`layers`."""
        self._cache = cache
        # The draft's output at the last place of each slot that the base has read.
        self._hidden = self.draft.fuse.weight.new_zeros(len(newest.lengths), self.draft.config.hidden_size)
        self.loop = DraftLoop(cache, newest, self.num_speculative_tokens, self._chain, again=False)

    def probe(self, sequences: PackedSequences) -> None:
        """Run tokens of value 0, which shows what :attr:`layers` keep."""
        count, weight = int(sequences.positions.numel()), self.draft.fuse.weight
        states = torch.zeros(count, weight.shape[1], dtype=weight.dtype, device=self._device)
        self.read(torch.zeros(count, dtype=torch.int64, device=self._device), sequences, states)

    def read(self, following: Tensor, sequences: PackedSequences, states: Tensor) -> Tensor:
        """Read what the base has read in a pass.

        Args:
            following: ``[T]``, the token after each.
            sequences: those of the pass.
            states: ``[T, n h]``, the base's hidden states at the :attr:`places`.

        Returns:
            the draft's outputs ``[T, h]``.
        """
        # A guess may be anything.
        with torch.no_grad(), evaluating(self.draft), batch_invariant_mode(False):
            return self._follow(self.draft.fuse(states), following, sequences)

    def _follow(self, hidden: Tensor, following: Tensor, sequences: PackedSequences) -> Tensor:
        assert self._cache is not None
        if isinstance(self._base, ParallelGPT):
            embedded = self._base.embed(following)
        else:
            assert self._base.embed is not None
            embedded = self._base.embed.word(following)
        return self.draft.follow(hidden, embedded, sequences, self._cache.states["draft"])

    def stand(self, slots: Tensor, hidden: Tensor) -> None:
        """Let guesses of ``slots [R]`` follow these outputs ``[R, h]`` of :meth:`read`."""
        assert self._hidden is not None
        self._hidden.index_copy_(0, slots, hidden)

    def begin(self, requests: Sequence[Request]) -> None:
        """See :class:`Speculator`. It has read what the base has."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """See :class:`Speculator`."""
        assert self._cache is not None and self.loop is not None
        slots = [request.slot for request in requests if request.slot is not None]
        return self.loop.run(slots, counts, max(self._cache.lengths[slot] for slot in slots))

    def _chain(self, slots: Tensor, sequences: Sequence[PackedSequences]) -> list[Tensor]:
        assert self._hidden is not None
        hidden = self._hidden[slots]
        with torch.no_grad(), evaluating(self.draft), evaluating(self._base):
            found = [self._top(hidden)]
            for each in sequences:
                # Its own output takes the place of the base's hidden states.
                hidden = self._follow(hidden, found[-1], each)
                found.append(self._top(hidden))
        return found

    def _top(self, hidden: Tensor) -> Tensor:
        top = self.draft.head.top(hidden)
        return self._ids[top] if len(self._ids) else top

    def drop(self) -> None:
        """See :class:`Speculator`. Its keys and values are in the cache of the engine."""


def check_draft(base: GenerativeModel, draft: DraftModel, num_speculative_tokens: int = 1) -> None:
    """Refuse a draft that was made for another base, bases that drafts cannot serve, and rounds without a guess.

    Raises:
        ConfigurationError: sizes differ, the base lacks a layer that the draft reads, is no GPT, or has experts that
            several replicas share, or ``num_speculative_tokens`` is no integer of at least 1.
    """
    config: object = base.config
    if not isinstance(config, GPTConfig):
        raise ConfigurationError(
            "the base reads images, or is a model of transformers, and drafts serve GPTs; leave the draft out."
        )
    if isinstance(base, ParallelGPT) and base.shares_experts:
        raise ConfigurationError(
            "experts of the base are on ranks of several replicas, which must run equally often, and rounds of a draft "
            "differ in number. Leave the draft out, or divide the base otherwise."
        )
    integer("num_speculative_tokens", num_speculative_tokens)
    if draft.config.for_base(config) != draft.config:
        raise ConfigurationError("the draft has no sizes yet; build it of EagleConfig.for_base(base).")


def load_draft(path: str | os.PathLike[str], base: GenerativeModel, tokenizer: Tokenizer | None = None) -> DraftModel:
    """Load a draft for a model in memory, on its device and in its dtype. Each rank of a divided base loads it whole.

    Args:
        path: a checkpoint of a draft, or a run's folder (its newest checkpoint).
        base: the model that it serves.
        tokenizer: that of the base.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete.
        ConfigurationError: it holds no draft, or the draft does not fit the base.
        DataError: the draft was trained with another tokenizer.
    """
    if is_draft(path):
        raise ConfigurationError(
            f"{path} is a draft for serving engines; make a checkpoint of it first: megalight convert {path} OUTPUT"
        )
    path = latest_checkpoint(path)
    opened = checkpoint.open(path)
    if description(opened)["family"] != "eagle":
        raise ConfigurationError(
            f"{path} holds a {description(opened)['family']} model, and a draft is of the family eagle; train one with "
            "EagleModule."
        )
    theirs = companions_of(path).get(TOKENIZER)
    if tokenizer is not None and theirs is not None:
        found = Tokenizer.from_json(theirs.decode()).identity
        if found != tokenizer.identity:
            raise DataError(
                f"the draft in {path} was trained with another tokenizer than that of its base, so ids do not mean the "
                "same to it; name the draft of this base."
            )
    weight = next(base.parameters(), None)
    dtype, device = (None, None) if weight is None else (weight.dtype, weight.device)
    if isinstance(base, ParallelGPT):
        # A stage may have no weights; the first has the embedding.
        dtype, device = base.agree(dtype), base.device
    draft = saved_model(opened, device or "cpu", dtype).root
    assert isinstance(draft, DraftModel)
    check_draft(base, draft)
    return draft.eval()
