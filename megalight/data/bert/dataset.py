"""The data set of BERT's pre-training: pairs of segments, in order or swapped, with masked whole words."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalight.data.bert.batch import IGNORED, BertBatch
from megalight.data.cache import CachedDataset, build_once, cache_folder, order_of
from megalight.data.indexed import IndexedDataset
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError

CLASSIFY = ("[CLS]", "<s>", "<cls>")
SEPARATE = ("[SEP]", "</s>", "<sep>")
MASK = ("[MASK]", "<mask>")
OTHERS = ("[PAD]", "[UNK]", "<pad>", "<unk>", "<|pad|>", "<|endoftext|>")
"""Names of special tokens in the vocabularies of BERT, RoBERTa and ALBERT, and in those that ``prepare`` trains."""

SPACE = "Ġ"
"""The character for a space in byte-level vocabularies."""


@dataclass(frozen=True, eq=False)
class Words:
    """Arrays over a vocabulary of ``V`` ids, for masking.

    Attributes:
        classify: id of the token that begins a sample.
        separate: id of the token that ends a segment.
        mask: id of the mask token.
        inner: ``[V]`` bool: the token can continue a word.
        open: ``[V]`` bool: a word can continue after the token.
        ordinary: ids of the tokens that are not special. These can be masked, and can replace others.
        special: ``[V]`` bool: the token is special.
    """

    classify: int
    separate: int
    mask: int
    inner: NDArray[np.bool_]
    open: NDArray[np.bool_]
    ordinary: NDArray[np.int64]
    special: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words:
        """Read the vocabulary of a tokenizer.

        In WordPiece vocabularies, ``##`` marks a token that continues a word. Byte-level and SentencePiece vocabularies
        mark the space before a word instead. There, a token that begins with a letter or digit continues a word if the
        token before it ends with a letter or digit.

        Raises:
            DataError: there is no token to begin a sample, to end a segment, or to mask with.
        """
        vocabulary, size = tokenizer.vocabulary, tokenizer.vocab_size
        # In this order, so that BERT's own names win in a vocabulary that has several.
        wanted = {"begin a sample": CLASSIFY, "end a segment": SEPARATE, "stand for a masked token": MASK}
        classify, separate, mask = (_find(vocabulary, names, purpose) for purpose, names in wanted.items())
        # Ids that no token has count as special: they are never masked, and replace nothing.
        inner, opens, special = np.zeros(size, bool), np.zeros(size, bool), np.ones(size, bool)
        # One such token is enough: vocabularies of other kinds mark no continuation.
        pieces = any(token.startswith("##") for token in vocabulary)
        letter = _letter_of_bytes if any(token.startswith(SPACE) for token in vocabulary) else str.isalnum
        names = {*CLASSIFY, *SEPARATE, *MASK, *OTHERS, tokenizer.eod_token, tokenizer.pad_token}
        for token, index in vocabulary.items():
            if token in names or not token:
                continue
            special[index] = False
            inner[index] = len(token) > 2 and token.startswith("##") if pieces else letter(token[0])
            opens[index] = pieces or letter(token[-1])
        return cls(classify, separate, mask, inner, opens, np.flatnonzero(~special), special)

    def starts(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[n]`` ids to ``[n]`` bool: whether a word begins at this token."""
        # The first token begins a word, whatever came before the sample.
        found = np.ones(len(tokens), bool)
        # The token before decides as well: after a space or a sign, a letter begins a word.
        found[1:] = ~(self.inner[tokens[1:]] & self.open[tokens[:-1]])
        return found


def _find(vocabulary: Mapping[str, int], names: tuple[str, ...], purpose: str) -> int:
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise DataError(
        f"the tokenizer has no token to {purpose} ({', '.join(names)}); use BERT's tokenizer, or train one with: "
        'megalight prepare ... --train-tokenizer --special-tokens "[CLS]" "[SEP]" "[MASK]"'
    )


def _letter_of_bytes(character: str) -> bool:
    """Return whether a character of a byte-level token stands for a letter, a digit, or a byte of a longer character.

    Byte-level vocabularies write bytes 0x21 to 0x7E as themselves, lower bytes (spaces and control codes) from U+0100
    on, and higher bytes as U+00A1 to U+00FF or from U+0122 on.
    """
    return character.isalnum() if character.isascii() else not 0x100 <= ord(character) <= 0x121


KEPT = 0.1
"""Fraction of the chosen tokens that stays unchanged."""

REPLACED = 0.1
"""Fraction of the chosen tokens that becomes a random token. All other chosen tokens become the mask token."""


def mask_words(
    tokens: NDArray[np.int64], words: Words, probability: float, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose whole words at random until they have the fraction ``probability`` of the tokens, and mask them.

    Special tokens are never chosen. A word that would exceed the fraction is skipped. At least one word is chosen, so
    every sample has a loss.

    Returns:
        the inputs, with 80 % of the chosen tokens masked, 10 % replaced by random tokens and 10 % unchanged; and the
        labels: the chosen tokens at their positions, -100 elsewhere.
    """
    labels = np.full(len(tokens), IGNORED, np.int64)
    chosen = _choose(tokens, words, probability, generator)
    labels[chosen] = tokens[chosen]
    # One draw decides: below 0.1 a token is replaced, below 0.2 it is kept, and else it is masked.
    fate = generator.random(len(chosen))
    hidden = tokens.copy()
    hidden[chosen[fate >= KEPT + REPLACED]] = words.mask
    random = chosen[fate < REPLACED]
    # Special tokens never replace: the model would learn to expect them inside text.
    hidden[random] = generator.choice(words.ordinary, len(random))
    return hidden, labels


def _choose(
    tokens: NDArray[np.int64], words: Words, probability: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return the positions of the chosen tokens."""
    places = np.flatnonzero(~words.special[tokens])
    if not len(places):
        return places
    word = np.cumsum(words.starts(tokens))[places]  # number of each token's word; no word goes across a special token
    # Where the number of the word changes, a word begins.
    firsts = np.flatnonzero(np.diff(word, prepend=-1))
    sizes = np.diff(firsts, append=len(places))
    wanted = max(1, round(probability * len(places)))
    taken: list[int] = []
    left = wanted
    order = generator.permutation(len(firsts))
    for index in order.tolist():
        # Too long for what is left: a later word may still fit.
        if sizes[index] <= left:
            taken.append(index)
            left -= int(sizes[index])
        if not left:
            break
    taken = taken or [int(order[0])]  # every word was too long: take one anyway
    return np.concatenate([places[firsts[k] : firsts[k] + sizes[k]] for k in sorted(taken)])


SPECIALS = 3
"""Special tokens of a sample: one before the first segment, one after each segment."""

IN_ORDER, SWAPPED = 0, 1
"""Labels of the order of two segments."""


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How sentences become samples.

    Attributes:
        sequence_length: tokens of a sample, at most.
        words: the vocabulary, as masking needs it.
        mask_probability: fraction of the tokens to predict.
        short_probability: fraction of the samples that are made shorter than possible.
        eod_id: id of the end-of-document token in the files, which samples leave out. None: there is none.
    """

    sequence_length: int
    words: Words
    mask_probability: float = 0.15
    short_probability: float = 0.1
    eod_id: int | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < SPECIALS + 2:
            raise DataError(
                f"sequence_length is {self.sequence_length}; it must be at least {SPECIALS + 2} for a pair of segments."
            )
        for name in ("mask_probability", "short_probability"):
            if not 0 <= getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1.")


@dataclass(frozen=True)
class PairSample:
    """One sample. The fields are those of :class:`~megalight.data.bert.batch.BertBatch`."""

    tokens: NDArray[np.int64]
    token_types: NDArray[np.int64]
    labels: NDArray[np.int64]
    order: int


def make_pair(sentences: Sequence[NDArray[Any]], options: PairOptions, generator: np.random.Generator) -> PairSample:
    """Make a sample from consecutive sentences: divide them into two segments, and mask whole words.

    Half of the pairs are swapped (sentence-order prediction of ALBERT, https://arxiv.org/abs/1909.11942). If there are
    too many tokens, the longer segment loses tokens at both ends at random.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    words = options.words
    middle = int(generator.integers(1, len(sentences)))
    segments = [_text(sentences[:middle], options), _text(sentences[middle:], options)]
    sizes = _fit(len(segments[0]), len(segments[1]), options.sequence_length - SPECIALS)
    for k, size in enumerate(sizes):
        # At both ends at random, so that the middle of a text is not seen more often than its ends.
        start = int(generator.binomial(len(segments[k]) - size, 0.5))
        segments[k] = segments[k][start : start + size]
    order = int(generator.integers(2))
    first, second = segments if order == IN_ORDER else segments[::-1]
    # The separator after the first segment counts to it, and the last one to the second segment.
    tokens = np.concatenate([[words.classify], first, [words.separate], second, [words.separate]])
    types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
    if tokens.max() >= len(words.special) or tokens.min() < 0:
        raise DataError(
            f"the data holds the token ids {int(tokens.min())} to {int(tokens.max())}; the vocabulary has "
            f"{len(words.special)} tokens. Use the tokenizer that the data was made with."
        )
    hidden, labels = mask_words(tokens, words, options.mask_probability, generator)
    return PairSample(hidden, types, labels, order)


def _text(sentences: Sequence[NDArray[Any]], options: PairOptions) -> NDArray[np.int64]:
    text = np.concatenate(list(sentences)).astype(np.int64)
    return text if options.eod_id is None else text[text != options.eod_id]


def _fit(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return the sizes of two segments after the longer one has lost tokens until both fit into ``limit``."""
    if first + second <= limit:
        return first, second
    # The shorter segment keeps up to half of the room.
    shorter = min(first, second, limit // 2)
    return (shorter, limit - shorter) if first < second else (limit - shorter, shorter)


def filler(words: Words) -> PairSample:
    """Return a sample without loss (an empty pair), which fills up a batch."""
    tokens = np.array([words.classify, words.separate, words.separate])
    return PairSample(tokens, np.array([0, 0, 1]), np.full(3, IGNORED), IGNORED)


class BertDataset(CachedDataset):
    """Samples of one split of a pair of token files, in shuffled order.

    All random choices in a sample depend only on the seed and the number of the sample, not on the process that reads
    it. Each pass over the documents gives new samples.

    Args:
        data: the token files, one sequence per sentence.
        sentences: the sequences of this split; they are whole documents.
        options: how samples are made.
        num_samples: number of samples needed; documents are repeated as often as this takes. None: one pass.
        seed: seed of the order, the pairs and the masks.
        label: name of the split, for the cache and for messages.
        cache_dir: folder for cached indices; by default the folder ``cache`` beside the data.

    Attributes:
        order: hash of everything that the samples depend on.

    Raises:
        DataError: no document has two sentences, or the files do not hold token ids.
    """

    def __init__(
        self,
        data: IndexedDataset,
        sentences: range,
        options: PairOptions,
        *,
        num_samples: int | None = None,
        seed: int = 1234,
        label: str = "train",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if data.dtype.kind not in "iu":
            raise DataError(f"{data.prefix} holds {data.dtype} values; token ids are integers. Prepare the data again.")
        self.data = data
        self.options = options
        self.seed = seed
        lengths = data.lengths[sentences.start : sentences.stop]
        begin, end = np.searchsorted(data.documents, [sentences.start, sentences.stop])
        documents = data.documents[begin : end + 1]
        description = {
            "lengths": hashlib.blake2b(lengths.tobytes() + documents.tobytes(), digest_size=16).hexdigest(),
            "sequence_length": options.sequence_length,
            "short_probability": options.short_probability,
            "seed": seed,
        }
        # Without the number of samples: a longer run begins with the same samples.
        facts = [description, options.mask_probability]
        self.order = order_of(facts)
        try:
            self.runs = build_once(
                cache_folder(cache_dir, data.prefix),
                f"{type(self).__name__}-{label}",
                {**description, "first": sentences.start, "samples": num_samples},
                lambda: {
                    "runs": sentences.start
                    + sample_runs(
                        lengths,
                        documents - sentences.start,
                        options.sequence_length - SPECIALS,
                        options.short_probability,
                        num_samples,
                        seed,
                    )
                },
            )["runs"]
        except DataError as error:
            raise DataError(f"{label} split of {data.prefix}: {error}") from error

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int | None) -> PairSample:
        """Return sample ``index`` in shuffled order. None gives a sample without loss, which fills up a batch."""
        if index is None:
            return filler(self.options.words)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        first, last = self.runs[index].tolist()
        # From seed and number alone: any worker makes the same sample, and a resumed run the
        # same as an unbroken one.
        generator = np.random.Generator(np.random.PCG64([self.seed, 1, index]))
        return make_pair([self.data.get(k) for k in range(first, last)], self.options, generator)


def collate(samples: Sequence[PairSample]) -> BertBatch:
    """Lay samples end to end."""
    batch = BertBatch(
        torch.from_numpy(np.concatenate([sample.tokens for sample in samples])),
        torch.from_numpy(np.concatenate([sample.token_types for sample in samples])),
        torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        torch.tensor([sample.order for sample in samples]),
        tuple(len(sample.tokens) for sample in samples),
    )
    return batch.with_rows()


Runs = NDArray[np.int64]


def runs_of(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    target: int,
    short_probability: float,
    generator: np.random.Generator,
) -> Runs:
    """``[n, 2]``: the sentences ``[first, last)`` of each sample of one pass over the documents, in order.

    A sample takes sentences until it has ``target`` tokens or, with ``short_probability``, a random number of at least
    2 tokens. It always takes at least two sentences. If a single sentence is left of a document, the last sample takes
    it too. Documents of one sentence give no sample.

    Args:
        lengths: ``[S]``: number of tokens of each sentence.
        documents: ``[D + 1]``: the first sentence of each document, then ``S``.
        target: tokens per sample.
        short_probability: fraction of samples with a random shorter target, so that the model sees all lengths.
    """
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # tokens before each sentence
    first, stop = documents[:-1], documents[1:]
    found: list[Runs] = []
    while len(first):  # vectorized over documents: each turn takes one sample from every document that has one
        live = stop - first >= 2
        first, stop = first[live], stop[live]
        short = generator.random(len(first)) < short_probability
        wanted = np.where(short, generator.integers(2, target + 1, len(first)), target)
        last = np.searchsorted(ends, ends[first] + wanted)  # first sentence boundary after enough tokens
        last = np.minimum(np.maximum(last, first + 2), stop)
        last = np.where(stop - last == 1, stop, last)  # a single sentence left over is no sample
        found.append(np.stack([first, last], axis=1))
        first = last
    runs = np.concatenate([np.zeros((0, 2), np.int64), *found])
    # In the order of the documents, whatever turn found a sample: the order is then that of the text.
    return runs[np.argsort(runs[:, 0], kind="stable")]


def sample_runs(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    target: int,
    short_probability: float,
    num_samples: int | None,
    seed: int,
) -> Runs:
    """Return the sentences of all samples, shuffled within each pass. None for ``num_samples`` means one pass.

    Raises:
        DataError: no document has two sentences.
    """
    passes: list[Runs] = []
    have = 0
    while not passes or (num_samples is not None and have < num_samples):
        generator = np.random.Generator(np.random.PCG64([seed, 0, len(passes)]))
        runs = runs_of(lengths, documents, target, short_probability, generator)
        if not len(runs):
            raise DataError(
                f"none of {len(documents) - 1} documents has two sentences, but a sample is a pair. Prepare the data "
                "with: megalight prepare ... --split-sentences"
            )
        # Shuffled within a pass, so that no document comes a second time before all have come once.
        passes.append(generator.permutation(runs))
        have += len(runs)
    return np.concatenate(passes)[:num_samples]
