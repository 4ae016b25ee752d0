"""The data set of supervised fine-tuning (SFT): whole conversations, packed into sequences of equal length."""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megalight.data.cache import CachedDataset, build_once, cache_folder, order_of
from megalight.data.corpus import Corpus
from megalight.data.gpt.dataset import GPTSample
from megalight.data.gpt.dataset import collate as collate_text
from megalight.errors import ConfigurationError, DataError
from megalight.first_rank import only_first
from megalight.types import TokenBatch

log = logging.getLogger(__name__)
log.addFilter(only_first)

TooLong = Literal["cut_end", "cut_start", "drop", "raise"]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How conversations become rows.

    Attributes:
        sequence_length: number of tokens ``S`` of a row.
        packing: whether a row holds several conversations. If not, each has a row of its own.
        too_long: what happens with a conversation of more than ``S + 1`` tokens. ``cut_end`` keeps its start,
            ``cut_start`` its end, ``drop`` leaves it out, ``raise`` stops.
        pad_id: an id that means only padding: in text without a loss mask, labels with this id carry no loss.
        vocab_size: a row with an id at or above this raises. None: ids are not checked.

    Raises:
        ConfigurationError: ``too_long`` is none of these.
    """

    sequence_length: int
    packing: bool = True
    too_long: TooLong = "cut_end"
    pad_id: int = -1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.too_long not in get_args(TooLong):
            raise ConfigurationError(f"too_long is {self.too_long!r}; it must be one of {get_args(TooLong)}.")


class PackedDataset(CachedDataset):
    """Rows of conversations, with attention inside each and positions that restart. Each occurs whole, in one row.

    A conversation of ``n`` tokens takes ``n - 1`` positions: its last token is only a label. Documents of text without
    a loss mask are cut into pieces of ``S`` positions, of which every token counts, so that pre-training data can be
    mixed in. Every pass has the same rows, in an order of its own, which depends on the seed and the pass alone.

    Args:
        corpus: the token files, with or without a loss mask.
        documents: the sequences of this split.
        options: how rows are made.
        num_samples: number of rows needed; passes are repeated as often as this takes. None: one pass.
        label: name of the split, for the cache and for messages. Only ``train`` is shuffled.
        cache_dir: folder for cached rows; by default the folder ``cache`` beside the data.

    Attributes:
        items: ``[n, 3]`` int64: sequence, first token, and number of positions of each piece, row by row.
        bounds: ``[rows + 1]`` int64: where each row starts in ``items``.
        order: hash of everything that the order of rows depends on.

    Raises:
        DataError: no conversation can be used, or one is too long and ``too_long`` is ``raise``.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: range,
        options: PackOptions,
        *,
        num_samples: int | None = None,
        seed: int = 1234,
        label: str = "train",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.corpus = corpus
        self.options = options
        self._seed, self._label = seed, label
        self.cache_folder = cache_folder(cache_dir, corpus.data.prefix)
        lengths = corpus.data.lengths[documents.start : documents.stop]
        # All that the rows depend on: another value must find no cached rows.
        description = {
            "lengths": hashlib.blake2b(lengths.tobytes(), digest_size=16).hexdigest(),
            "documents": [documents.start, documents.stop],
            "loss_tokens": None if corpus.meta is None else corpus.meta.num_loss_tokens,
            **_losses_of_cut(corpus, documents, options),
            "seed": seed,
            # Ids of padding and of the vocabulary do not change rows.
            **{key: value for key, value in asdict(options).items() if key not in ("pad_id", "vocab_size")},
            **self.measured(),
        }
        self.order = order_of(description)
        arrays = build_once(
            self.cache_folder,
            f"{type(self).__name__}-{label}",
            description,
            lambda: self._build(documents),
        )
        self.items, self.bounds = arrays["items"], arrays["bounds"]
        self.num_rows = len(self.bounds) - 1
        # Whole passes, so that the order of each depends on its number alone.
        passes = 1 if num_samples is None else max(1, -(-num_samples // self.num_rows))
        self._length = passes * self.num_rows
        # Two passes, as loaders read ahead into the next one.
        self._permutation = lru_cache(maxsize=2)(self._permuted)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | None) -> GPTSample:
        """Return row ``index``. None gives a row without loss, which fills up a batch."""
        if index is None:
            return self._row(np.zeros((0, 3), np.int64))
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}.")
        turn, place = divmod(index, self.num_rows)
        row = int(self._permutation(turn)[place]) if self._label == "train" else place
        return self._row(self.items[self.bounds[row] : self.bounds[row + 1]])

    def _permuted(self, turn: int) -> NDArray[np.int64]:
        """Return the order of the rows in one pass."""
        return np.random.Generator(np.random.PCG64([self._seed, turn])).permutation(self.num_rows)

    def _row(self, items: NDArray[np.int64]) -> GPTSample:
        pieces: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
        for sequence, first, size in items.tolist():
            text = self.corpus.data.get(sequence, first, size + 1).astype(np.int64)
            if self.corpus.loss is not None:
                loss: NDArray[Any] = self.corpus.loss.get(sequence, first + 1, size)
            else:
                loss = (text[1:] != self.options.pad_id) & (text[1:] >= 0)
            pieces.append((text, loss))
        return make_row(pieces, self.options, self.corpus.data.prefix)

    def measured(self) -> dict[str, Any]:
        """Return what else the lengths of conversations depend on; rows of other facts are others."""
        return {}

    def pieces(self, documents: range) -> NDArray[np.int64]:
        """Return sequence, first token and number of positions of all pieces to train on, ``[n, 3]``."""
        return _pieces(self.corpus, documents, self.options, self._label)

    def _build(self, documents: range) -> dict[str, NDArray[Any]]:
        items = self.pieces(documents)
        if self.options.packing:
            # Shuffled first: which of several equally long conversations share a row should not follow the file.
            items = items[np.random.Generator(np.random.PCG64([self._seed])).permutation(len(items))]
            order, bounds = best_fit(items[:, 2], self.options.sequence_length)
            items = items[order]
        else:
            bounds = np.arange(len(items) + 1, dtype=np.int64)
        used = items[:, 2].sum() / ((len(bounds) - 1) * self.options.sequence_length)
        log.info("%s: %d pieces in %d rows, %.1f %% full", self._label, len(items), len(bounds) - 1, 100 * used)
        return {"items": items, "bounds": bounds}


def make_row(
    pieces: Sequence[tuple[NDArray[np.int64], NDArray[Any]]], options: PackOptions, source: object
) -> GPTSample:
    """Make a row of conversations, which take ``S`` positions at most.

    Args:
        pieces: for each, its ``n + 1`` tokens, and for each of its ``n`` labels whether it counts in the loss.
        options: how rows are made.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    s = options.sequence_length
    tokens, labels, mask = np.zeros(s, np.int64), np.zeros(s, np.int64), np.zeros(s, np.float32)
    lengths: list[int] = []
    at = 0
    for text, loss in pieces:
        here = slice(at, at + len(loss))
        # Labels come from the same conversation, so no position predicts the start of the next one.
        tokens[here], labels[here], mask[here] = text[:-1], text[1:], loss
        lengths.append(len(loss))
        at += len(loss)
    # Checked here: an id above the vocabulary is an error of the device on a GPU, without a name.
    highest = max(int(tokens.max()), int(labels.max()))
    if options.vocab_size is not None and highest >= options.vocab_size:
        raise DataError(
            f"{source} holds the token id {highest}; the vocabulary has {options.vocab_size} tokens. Use the tokenizer "
            "that the data was made with, and a model with its vocabulary size."
        )
    if at < s:
        lengths.append(s - at)  # padding is a sequence of its own, so no conversation attends to it
    # Ids below 0 mark tokens without a loss in data of others; embeddings have no such rows.
    return GPTSample(np.maximum(tokens, 0), np.maximum(labels, 0), mask, tuple(lengths))


def collate(samples: Sequence[GPTSample]) -> TokenBatch:
    """Stack samples to the rows of a batch, which holds the tokens that count in the loss."""
    return collate_text(samples).with_rows()


def _losses_of_cut(corpus: Corpus, documents: range, options: PackOptions) -> dict[str, str]:
    """Return a fact about the loss masks of conversations that are cut: one that is left without a loss is left out."""
    long = np.flatnonzero(corpus.data.lengths[documents.start : documents.stop] > options.sequence_length + 1)
    if corpus.loss is None or options.too_long not in ("cut_end", "cut_start") or not len(long):
        return {}
    found = hashlib.blake2b(digest_size=16)
    for index in long.tolist():
        found.update(corpus.loss.get(documents.start + index).tobytes())
    return {"losses_of_cut": found.hexdigest()}


def _pieces(corpus: Corpus, documents: range, options: PackOptions, label: str) -> NDArray[np.int64]:
    """``[n, 3]``: sequence, first token and number of positions of all pieces to train on.

    Raises:
        DataError: there is none, or a conversation is too long and ``too_long`` is ``raise``.
    """
    s = options.sequence_length
    sequences = np.arange(documents.start, documents.stop, dtype=np.int64)
    positions = corpus.data.lengths[documents.start : documents.stop].astype(np.int64) - 1
    if corpus.loss is None:
        # Text has no beginning that must be kept: pieces of `S` positions, the last one shorter.
        counts = np.maximum(-(-positions // s), 0)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece in its text
        sizes = np.minimum(np.repeat(positions, counts) - number * s, s)
        items = np.stack([np.repeat(sequences, counts), number * s, sizes], axis=1)
    else:
        items = np.stack([sequences, np.zeros_like(sequences), positions], axis=1)
        long = np.flatnonzero(positions > s)
        if len(long) and options.too_long == "raise":
            worst = long[positions[long].argmax()]
            raise DataError(
                f"{label} split of {corpus.data.prefix}: {len(long)} conversations are too long, such as number "
                f"{sequences[worst]} with {positions[worst] + 1} tokens; sequence_length {s} takes {s + 1}. Raise "
                "sequence_length, or choose another too_long: 'cut_end', 'cut_start' or 'drop'."
            )
        if options.too_long == "cut_start":
            items[long, 1] = positions[long] - s
        items[long, 2] = s
        # A single token has nothing to predict.
        kept = positions > 0
        if options.too_long == "drop":
            kept[long] = False
        else:
            for index in long.tolist():  # a cut may leave nothing to learn
                kept[index] = corpus.loss.get(int(sequences[index]), int(items[index, 1]) + 1, s).any()
        if len(long):
            log.warning(
                "%s: %d of %d conversations have more than %d tokens: %d are cut (too_long=%r), %d are left out",
                label,
                len(long),
                len(items),
                s + 1,
                int(kept[long].sum()),
                options.too_long,
                int((~kept[long]).sum()),
            )
        items = items[kept]
    if not len(items):
        raise DataError(
            f"{label} split of {corpus.data.prefix}: no conversation can be used with sequence_length {s} and "
            f"too_long={options.too_long!r}. Raise sequence_length, or prepare more data."
        )
    return items.astype(np.int64)


def best_fit(sizes: NDArray[Any], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put each item into the fullest bin that has room for it (best-fit decreasing).

    It needs at most 11/9 of the fewest possible bins, plus one (Johnson et al., 1974). Items of equal size keep their
    order.

    Args:
        sizes: ``[n]``, each from 1 to ``capacity``.

    Returns:
        ``(items, bounds)``: the items ``[n]``, bin by bin, and ``[bins + 1]``: where each bin starts in them.

    Raises:
        DataError: an item is larger than a bin, or smaller than 1.
    """
    if len(sizes) and not 1 <= int(sizes.min()) <= int(sizes.max()) <= capacity:
        raise DataError(
            f"items have sizes from {int(sizes.min())} to {int(sizes.max())}; bins of {capacity} hold items of 1 to "
            f"{capacity}."
        )
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    chosen = np.empty(len(sizes), np.int64)
    room: list[int] = []  # the different amounts of room that bins have left, ascending: at most `capacity` of them
    bins: dict[int, list[int]] = {}  # room -> the bins that have it
    count = 0
    for place, size in enumerate(sizes[order].tolist()):
        # The smallest room that is large enough: the fullest bin.
        at = bisect_left(room, size)
        if at == len(room):
            number, left = count, capacity - size
            count += 1
        else:
            fullest = room[at]
            number, left = bins[fullest].pop(), fullest - size
            if not bins[fullest]:
                del room[at], bins[fullest]
        chosen[place] = number
        if left:
            if left not in bins:
                insort(room, left)
                bins[left] = []
            bins[left].append(number)
    # Stable, so that items of a bin keep the order of their sizes.
    by_bin = np.argsort(chosen, kind="stable")
    bounds = np.searchsorted(chosen[by_bin], np.arange(count + 1))
    return order[by_bin], bounds.astype(np.int64)
