"""The Lightning data module of BERT's pre-training."""

from __future__ import annotations

from megalight.data.bert.dataset import BertDataset, PairOptions, Words, collate
from megalight.data.blend import BlendPart, Data
from megalight.data.corpus import SPLIT, Corpus, split_bounds
from megalight.data.module import TokenDataModule


class BertDataModule(TokenDataModule):
    """Reads token files of sentences; yields batches of segment pairs with masked words.

    Make the files with ``megalight prepare --split-sentences``. The number of samples and the position after a resume
    are as in :class:`~megalight.data.gpt.module.GPTDataModule`. If the trainer has ``max_steps``, every pass over the
    documents makes new pairs and masks. Otherwise each epoch has the same samples in another order.

    Args:
        data: a data prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or
            ``{prefix: weight}``. It is divided into train, validation and test by ``split``.
        global_batch_size: samples of a batch over all data-parallel ranks.
        sequence_length: tokens of a sample, at most.
        split: weights of train, validation and test; documents are divided in this ratio.
        train_data: data for training only, in the forms of ``data``; give it instead of ``data``.
        val_data: data for validation only.
        test_data: data for testing only.
        tokenizer: a ``tokenizer.json`` file or its folder. Default: the tokenizer that was saved with the data. It must
            have tokens like ``[CLS]``, ``[SEP]`` and ``[MASK]``.
        vocab_size: size of the vocabulary, against which ids are checked. Default: the tokenizer's. If the model has
            ``config.vocab_size``, ids are checked against that too.
        mask_probability: fraction of the tokens to predict, in whole words.
        short_probability: fraction of the samples that are made shorter than possible.
        seed: seed of the order, the pairs and the masks.
        num_workers: reader processes per loader. 0 reads in the training process.
        cache_dir: folder for cached sample indices; by default the folder ``cache`` beside the data.
        train_samples: samples of a pass over the training data, instead of the number the trainer needs.
        val_samples: upper limit of validation samples.
        test_samples: upper limit of test samples.

    Raises:
        DataError: a file is missing or incomplete, an id is outside the vocabulary, the data was made with another
            tokenizer, the tokenizer has no such special tokens, or no document has two sentences (in ``setup``).
        ConfigurationError: neither or both of ``data`` and per-split data are given.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        sequence_length: int,
        data: Data | None = None,
        split: str = SPLIT,
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
        # After the base class, which has found the tokenizer.
        self.options = PairOptions(
            sequence_length=sequence_length,
            words=Words.of(self.tokenizer),
            mask_probability=mask_probability,
            short_probability=short_probability,
            eod_id=self.eod_id,
        )

    collate = staticmethod(collate)

    def divide(self, corpus: Corpus, split: str) -> tuple[range, range, range]:
        """Divide the documents of a corpus; each has several sequences, one per sentence."""
        bounds = corpus.data.documents
        # By documents, so that both sentences of a pair are in the same split.
        first, second, third = (
            range(int(bounds[part.start]), int(bounds[part.stop])) for part in split_bounds(split, len(bounds) - 1)
        )
        return first, second, third

    def dataset(self, part: BlendPart, name: str, num_samples: int | None) -> BertDataset:
        """Divide consecutive sentences into pairs."""
        return BertDataset(
            part.corpus.data,
            part.documents,
            self.options,
            num_samples=num_samples,
            seed=self.seed,
            label=name,
            cache_dir=self.cache_dir,
        )
