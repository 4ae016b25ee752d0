"""The Lightning data module of language-model pre-training."""

from __future__ import annotations

from megalight.data.blend import Samples
from megalight.data.corpus import Corpus
from megalight.data.gpt import Sample, SampleOptions
from megalight.data.loader import collate
from megalight.data.mixture import Data, build_split
from megalight.data.splits import split_bounds
from megalight.data.tokens.module import TokenDataModule


class GPTDataModule(TokenDataModule):
    """Token files to batches: ``[global_batch_size / data-parallel ranks, sequence_length]`` on each rank.

    Training takes ``max_steps * accumulate_grad_batches * global_batch_size`` samples when the trainer has
    ``max_steps``, repeating documents as often as that takes; otherwise an epoch is one pass over the data, in another
    order each time. Validation and test read their split once, in order, to its last token: what is missing in the
    last global batch is filled up with rows that carry no loss.

    All files are opened and checked here, before anything starts.

    Args:
        data: a data prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or
            ``{prefix: weight}``; divided into train, validation and test by ``split``.
        global_batch_size: samples of a batch over all data-parallel ranks.
        sequence_length: tokens of a sample.
        split: weights of train, validation and test, by document.
        train_data: corpora for training alone, instead of a share of ``data``.
        val_data: corpora for validation alone.
        test_data: corpora for testing alone.
        tokenizer: a ``tokenizer.json`` file or folder. By default the one that came with the data.
        vocab_size: tokens of the vocabulary, to check ids against; by default the tokenizer's. A model that has a
            ``config.vocab_size`` is checked too.
        document_mask: whether attention stays within documents, and positions restart with each.
        eod_mask_loss: whether positions whose input ends a document carry no loss.
        seed: of the order of samples.
        num_workers: processes that read, per loader; 0 reads in the training process, which mapped files make cheap.
        cache_dir: where sample indices are cached; by default ``cache`` beside the data.
        train_samples: samples of a pass over the training data, instead of what the trainer asks for.
        val_samples: at most so many validation samples.
        test_samples: at most so many test samples.

    Raises:
        DataError: missing or torn files, ids outside the vocabulary, another tokenizer than the data's, data too short
            for a sequence.
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
        document_mask: bool = False,
        eod_mask_loss: bool = False,
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
        self.options = SampleOptions(
            sequence_length=sequence_length,
            document_mask=document_mask,
            eod_id=self.eod_id,
            eod_mask_loss=eod_mask_loss,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
        )

    collate = staticmethod(collate)

    def divide(self, corpus: Corpus, split: str) -> tuple[range, range, range]:
        """Each sequence is a document."""
        return split_bounds(split, len(corpus.data))

    def build(self, name: str, num_samples: int | None) -> Samples[Sample] | None:
        """Documents end to end, cut into samples of equal length."""
        return build_split(
            self.parts[name],
            self.options,
            num_samples=num_samples,
            seed=self.seed,
            label=name,
            cache_dir=self.cache_dir,
            drop_last_partial=name == "train",
        )
