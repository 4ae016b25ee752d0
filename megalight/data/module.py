"""The base class of data modules that read token files: opening and checking corpora, and splits."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from megalight.data.blend import Samples
from megalight.data.corpus import Corpus, same_tokenizer
from megalight.data.mixture import Data, Mixture, Part, mix
from megalight.data.resumable.module import ResumableDataModule
from megalight.data.sizes import check_sizes
from megalight.data.splits import SPLITS
from megalight.data.taught import Store, Taught
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.first_rank import only_first

log = logging.getLogger(__name__)
log.addFilter(only_first)

OTHER_WAYS = {
    "pairs": "A loss over preference pairs is yours to write: megalight.data.corpus.Corpus.open reads them, documents "
    "of two sequences, the preferred one first. To learn the preferred answers alone, prepare rows of 'prompt' and "
    "'completion'."
}
"""What to do with data that no data module reads, by kind."""

NO_DOCUMENTS = (
    "Documents (text files, or rows) are divided whole: give a larger share of split, more documents, or data of its "
    "own by val_data or test_data."
)
"""What to do about an empty split."""


class TokenDataModule(ResumableDataModule):
    """Reads token files and yields batches of samples.

    A subclass defines how a corpus is divided (:meth:`divide`), the data set of a split (:meth:`dataset`), and how
    samples become a batch (``collate``). Samples without loss fill up the last global batch of an evaluation.

    Args:
        global_batch_size: samples of a batch over all data-parallel ranks.
        sequence_length: tokens of a sample, at most.
        data: a data prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or
            ``{prefix: weight}``. It is divided into train, validation and test by ``split``.
        split: weights of train, validation and test; documents are divided in this ratio.
        separate: data of train, validation and test, instead of ``data``.
        tokenizer: a ``tokenizer.json`` file or its folder. Default: the tokenizer that was saved with the data.
        vocab_size: size of the vocabulary, against which ids are checked. Default: the tokenizer's. If the model has
            ``config.vocab_size``, ids are checked against that too.
        seed: seed of the order of samples.
        num_workers: reader processes per loader. 0 reads in the training process.
        cache_dir: folder for cached sample indices; by default the folder ``cache`` beside the data.
        samples: upper limits of samples of each split. For training, the number of samples instead of what the trainer
            needs.

    Attributes:
        eod_id: id of the end-of-document token, or None.
        pad_id: id that means only padding, or -1.
        taught: what a frozen model made of the samples, which batches then hold; None: there is no store.

    Raises:
        DataError: a file is missing or incomplete, an id is outside the vocabulary, or the data was made with another
            tokenizer.
        ConfigurationError: neither or both of ``data`` and per-split data are given.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    units: ClassVar = "documents"
    advice: ClassVar = NO_DOCUMENTS
    kinds: ClassVar[tuple[str, ...]] = ("text",)
    """Kinds of corpora (:attr:`~megalight.data.meta.CorpusMeta.kind`) that this class reads."""
    mixed_in: ClassVar[tuple[str, ...]] = ()
    """Those of these kinds that are read only beside others."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        sequence_length: int,
        data: Data | None,
        split: str,
        separate: tuple[Data | None, Data | None, Data | None],
        tokenizer: str | None,
        vocab_size: int | None,
        seed: int,
        num_workers: int,
        cache_dir: str | None,
        samples: tuple[int | None, int | None, int | None],
    ) -> None:
        train_samples, val_samples, test_samples = samples
        check_sizes(
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            num_workers=num_workers,
            seed=seed,
            train_samples=train_samples,
            val_samples=val_samples,
            test_samples=test_samples,
        )
        super().__init__(global_batch_size=global_batch_size, seed=seed, num_workers=num_workers, samples=samples)
        self.sequence_length = sequence_length
        self.cache_dir = cache_dir
        self._corpora: dict[str, Corpus] = {}
        self.parts = self._open(data, split, dict(zip(SPLITS, separate, strict=True)))
        self._tokenizer_path = tokenizer
        self.vocab_size = vocab_size
        self.eod_id: int | None = None
        self.pad_id = -1
        self._check()
        self.taught: Store[Any] | None = None

    @abstractmethod
    def divide(self, corpus: Corpus, split: str) -> tuple[range, range, range]:
        """Return the sequences of a corpus for train, validation and test."""

    @abstractmethod
    def dataset(self, part: Part, name: str, num_samples: int | None) -> Samples[Any]:
        """Build the samples of one part of a split, which is mixed with the others.

        Args:
            part: sequences of one corpus.
            name: ``train``, ``validation`` or ``test``.
            num_samples: number of samples needed. None: one pass.
        """

    def _open(self, data: Data | None, split: str, own: dict[str, Data | None]) -> dict[str, list[Part]]:
        # Separate data need no division: each is wholly of its split.
        separate = any(value is not None for value in own.values())
        if (data is None) != separate:
            raise ConfigurationError(
                "give either data, which split divides, or some of train_data, val_data and test_data; "
                + ("neither was given." if data is None else "both were given.")
            )
        parts: dict[str, list[Part]] = {}
        for number, name in enumerate(SPLITS):
            given = own[name] if separate else data
            mixture = Mixture((), ()) if given is None else Mixture.parse(given)
            weights = mixture.weights or (None,) * len(mixture.prefixes)
            parts[name] = []
            for prefix, weight in zip(mixture.prefixes, weights, strict=True):
                if prefix not in self._corpora:
                    self._corpora[prefix] = self._open_corpus(prefix)
                corpus = self._corpora[prefix]
                sequences = range(len(corpus.data)) if separate else self.divide(corpus, split)[number]
                parts[name].append(Part(corpus, sequences, weight))
        return parts

    def _open_corpus(self, prefix: str) -> Corpus:
        corpus = Corpus.open(prefix)
        if corpus.kind not in self.kinds:
            raise DataError(
                f"{prefix} was prepared as {corpus.kind!r}; {type(self).__name__} reads data of the kinds "
                f"{', '.join(map(repr, self.kinds))}. "
                + OTHER_WAYS.get(corpus.kind, "Use the data module for such data, or prepare it again.")
            )
        return corpus

    def _check(self) -> None:
        kinds = {corpus.kind for corpus in self._corpora.values()}
        if kinds and kinds <= {*self.mixed_in}:
            main = " or ".join(repr(kind) for kind in self.kinds if kind not in self.mixed_in)
            raise DataError(
                f"{next(iter(self._corpora))} was prepared as {' and '.join(map(repr, sorted(kinds)))}, which "
                f"{type(self).__name__} only mixes in beside data of the kind {main}. Add such data, or take another "
                "data module (GPTDataModule trains on text)."
            )
        meta = same_tokenizer(self._corpora.values())
        if meta is not None:
            self.eod_id, self.pad_id = meta.eod_id, meta.pad_id
        # A tokenizer that is given wins, so the data must agree with it.
        if self._tokenizer_path is not None:
            for corpus in self._corpora.values():
                corpus.check_tokenizer(self.tokenizer)
            self.eod_id, self.pad_id = self.tokenizer.eod_id, self.tokenizer.safe_pad_id
        if self.vocab_size is None and self._tokenizer_path is not None:
            self.vocab_size = self.tokenizer.vocab_size
        elif self.vocab_size is None and meta is not None:
            self.vocab_size = meta.vocab_size
        if self.vocab_size is not None:
            self._check_vocabulary(self.vocab_size, "vocab_size" if self._tokenizer_path is None else "the tokenizer")

    def _check_vocabulary(self, vocab_size: int, owner: str) -> None:
        for corpus in self._corpora.values():
            corpus.check_vocabulary(vocab_size, owner)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data.

        Raises:
            DataError: none was given, and none was saved with the data.
        """
        if (path := self._find_tokenizer()) is not None:
            return Tokenizer.load(path)
        raise DataError("no tokenizer was saved with the data; give one with tokenizer=PATH.")

    def _find_tokenizer(self) -> str | None:
        paths = [self._tokenizer_path, *(corpus.tokenizer_path for corpus in self._corpora.values())]
        return next((path for path in paths if path is not None), None)

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files to save in every checkpoint: those of the tokenizer, if there is one."""
        return {} if self._find_tokenizer() is None else self.tokenizer.files()

    def setup(self, stage: str) -> None:
        """Build the sample indices of the splits that ``stage`` needs, or map them from the cache."""
        model_config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        vocab_size = getattr(model_config, "vocab_size", None)
        if isinstance(vocab_size, int):
            self._check_vocabulary(vocab_size, "the model")
        super().setup(stage)

    def serve(self, dataset: Samples[Any], name: str) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """Return the samples of a split, with what a frozen model made of them if that is stored."""
        if self.taught is None or not self.taught.has(name):
            return super().serve(dataset, name)
        taught: Taught[Any] = Taught(dataset, self.taught, type(self).collate, name)
        return taught, taught.collate

    def _build(self, name: str) -> Samples[Any] | None:
        dataset = mix(
            self.parts[name],
            lambda part, samples: self.dataset(part, name, samples),
            num_samples=self._train_samples if name == "train" else None,
            label=name,
            cache_dir=self.cache_dir,
        )
        if dataset is None and name == "train":
            raise DataError("the training split holds no documents; give it a larger share of split, or more data.")
        if dataset is not None:
            log.info("%s: %d samples of at most %d tokens", name, len(dataset), self.sequence_length)
        return dataset

    def training_samples(self) -> tuple[Samples[Any], int]:
        """Return the training samples, and how many of them a run reads. The first pass reads them in order."""
        if "train" not in self._datasets:
            self._datasets["train"] = self._build("train")
        dataset, limit = self._datasets["train"], self._train_samples
        assert dataset is not None
        return dataset, len(dataset) if limit is None else min(len(dataset), limit)

    def validation_samples(self) -> tuple[Samples[Any], int] | None:
        """Return the validation samples, and how many of them a run reads; None if it reads none."""
        if "validation" not in self._datasets:
            self._datasets["validation"] = self._build("validation")
        dataset, limit = self._datasets["validation"], self.samples["validation"]
        if dataset is None or limit == 0:
            return None
        return dataset, len(dataset) if limit is None else min(len(dataset), limit)

    @property
    def validates(self) -> bool:
        """Whether the run reads validation samples."""
        return self.trainer is None or bool(self.trainer.limit_val_batches)
