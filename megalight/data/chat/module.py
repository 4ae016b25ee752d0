"""The Lightning data module of supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar

from megalight.data.blend import BlendPart, Data
from megalight.data.chat.dataset import PackedDataset, PackOptions, TooLong, collate
from megalight.data.corpus import SPLIT, Corpus, split_bounds
from megalight.data.module import TokenDataModule


class SFTDataModule(TokenDataModule):
    """Reads conversations that ``megalight prepare --chat`` wrote. Only what the assistant wrote counts in the loss.

    A batch on each rank is ``[global_batch_size / data-parallel ranks, sequence_length]``. A row holds several whole
    conversations: attention stays inside each, and positions restart. The number of rows in a run and the position
    after a resume are as in :class:`~megalight.data.gpt.module.GPTDataModule`. Text without a loss mask may be mixed
    in beside conversations: all its tokens count.

    Args:
        data: a data prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or
            ``{prefix: weight}``. Weights are ratios of rows. It is divided into train, validation and test by
            ``split``.
        global_batch_size: rows of a batch over all data-parallel ranks.
        sequence_length: tokens of a row.
        split: weights of train, validation and test; conversations are divided in this ratio.
        train_data: data for training only, in the forms of ``data``; give it instead of ``data``.
        val_data: data for validation only.
        test_data: data for testing only.
        packing: whether a row holds several conversations. If not, each has a row of its own.
        too_long: what happens with a conversation of more than ``sequence_length + 1`` tokens. ``cut_end`` keeps its
            start, ``cut_start`` its end, ``drop`` leaves it out, ``raise`` stops.
        tokenizer: a ``tokenizer.json`` file or its folder. Default: the tokenizer that was saved with the data.
        vocab_size: size of the vocabulary, against which ids are checked. Default: the tokenizer's. If the model has
            ``config.vocab_size``, ids are checked against that too.
        seed: seed of the order of rows.
        num_workers: reader processes per loader. 0 reads in the training process, which is cheap: files are mapped.
        cache_dir: folder for cached rows; by default the folder ``cache`` beside the data.
        train_samples: rows of a pass over the training data, instead of the number the trainer needs.
        val_samples: upper limit of validation rows.
        test_samples: upper limit of test rows.

    Raises:
        DataError: a file is missing or incomplete, an id is outside the vocabulary, the data was made with another
            tokenizer, holds preference pairs or is all text, or no conversation can be used.
        ConfigurationError: neither or both of ``data`` and per-split data are given.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    # Text may be mixed in, so that a model keeps what it knew; preference pairs have another loss.
    kinds: ClassVar = ("chat", "text")
    mixed_in: ClassVar = ("text",)

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
        packing: bool = True,
        too_long: TooLong = "cut_end",
        tokenizer: str | None = None,
        vocab_size: int | None = None,
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
        self.options = PackOptions(
            sequence_length=sequence_length,
            packing=packing,
            too_long=too_long,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
        )

    collate = staticmethod(collate)

    def divide(self, corpus: Corpus, split: str) -> tuple[range, range, range]:
        """Divide the sequences of a corpus; each sequence is a conversation."""
        # Whole conversations: a part in two splits would be learned and tested at once.
        return split_bounds(split, len(corpus.data))

    def dataset(self, part: BlendPart, name: str, num_samples: int | None) -> PackedDataset:
        """Build rows of whole conversations."""
        return PackedDataset(
            part.corpus,
            part.documents,
            self.options,
            num_samples=num_samples,
            seed=self.seed,
            label=name,
            cache_dir=self.cache_dir,
        )
