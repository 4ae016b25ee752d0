"""The Lightning data module of BERT's pre-training."""

from __future__ import annotations

from megalight.data.bert.dataset import BertDataset, PairOptions, PairSample, collate
from megalight.data.bert.words import Words
from megalight.data.blend import Samples
from megalight.data.corpus import Corpus
from megalight.data.mixture import Data, Part, mix
from megalight.data.splits import split_bounds
from megalight.data.tokens.module import TokenDataModule


class BertDataModule(TokenDataModule):
    """Token files of sentences (``megalight prepare --split-sentences``) to batches of segment pairs with masked words.

    What is read when, and what a resumed run reads, is as for :class:`~megalight.data.module.GPTDataModule`. With
    ``max_steps`` every pass over the documents makes new pairs and masks; without, each epoch has the same ones in
    another order.

    Args:
        data: a data prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or
            ``{prefix: weight}``; divided into train, validation and test by ``split``.
        global_batch_size: samples of a batch over all data-parallel ranks.
        sequence_length: tokens of a sample, at most.
        split: weights of train, validation and test, by document.
        train_data: corpora for training alone, instead of a share of ``data``.
        val_data: corpora for validation alone.
        test_data: corpora for testing alone.
        tokenizer: a ``tokenizer.json`` file or folder. By default the one that came with the data. It must have tokens
            like ``[CLS]``, ``[SEP]`` and ``[MASK]``.
        vocab_size: tokens of the vocabulary, to check ids against; by default the tokenizer's. A model that has a
            ``config.vocab_size`` is checked too.
        mask_probability: part of the tokens to predict, in whole words.
        short_probability: part of the samples that are shorter than they could be.
        seed: of order, pairs and masks.
        num_workers: processes that read, per loader; 0 reads in the training process.
        cache_dir: where sample indices are cached; by default ``cache`` beside the data.
        train_samples: samples of a pass over the training data, instead of what the trainer asks for.
        val_samples: at most so many validation samples.
        test_samples: at most so many test samples.

    Raises:
        DataError: missing or torn files, ids outside the vocabulary, another tokenizer than the data's, one without
            the special tokens, data without documents of two sentences (in ``setup``).
        ConfigurationError: neither or both of ``data`` and per-split corpora.
        LayoutError: ``global_batch_size`` does not divide by the data-parallel ranks (in ``setup``).
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        sequence_length: int,
        data: Data | None = None,
        split: str = "969,30,1",
        train_data: Data | None = None,
        val_data: Data | None = None,
        test_data: Data | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        mask_probability: float = 0.15,
        short_probability: float = 0.1,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | None = None,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            data=data,
            split=split,
            separate=(train_data, val_data, test_data),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
            samples=(train_samples, val_samples, test_samples),
        )
        self.options = PairOptions(
            sequence_length=sequence_length,
            words=Words.of(self.tokenizer),
            mask_probability=mask_probability,
            short_probability=short_probability,
            eod_id=self.eod_id,
        )

    collate = staticmethod(collate)

    def divide(self, corpus: Corpus, split: str) -> tuple[range, range, range]:
        """Whole documents, each of several sequences."""
        bounds = corpus.data.documents
        first, second, third = (
            range(int(bounds[part.start]), int(bounds[part.stop])) for part in split_bounds(split, len(bounds) - 1)
        )
        return first, second, third

    def build(self, name: str, num_samples: int | None) -> Samples[PairSample] | None:
        """Runs of sentences, cut into pairs."""

        def dataset(part: Part, samples: int | None) -> BertDataset:
            return BertDataset(
                part.corpus.data,
                part.documents,
                self.options,
                num_samples=samples,
                seed=self.seed,
                label=name,
                cache_dir=self.cache_dir,
            )

        return mix(self.parts[name], dataset, num_samples=num_samples, label=name, cache_dir=self.cache_dir)
