"""The Lightning data module of BERT's pre-training."""

from __future__ import annotations

from typing import Any

from megalight.data.bert.dataset import BertDataset, PairOptions, Words, collate
from megalight.data.blend import BlendPart
from megalight.data.corpus import Corpus, split_bounds
from megalight.data.module import TokenDataModule


class BertDataModule(TokenDataModule):
    """Reads token files of sentences; yields batches of segment pairs with masked words.

    Make the files with ``megalight prepare --split-sentences``. The number of samples and the position after a resume
    are as in :class:`~megalight.data.gpt.module.GPTDataModule`. If the trainer has ``max_steps``, every pass over the
    documents makes new pairs and masks. Otherwise each epoch has the same samples in another order.

    Args:
        mask_probability: fraction of the tokens to predict, in whole words.
        short_probability: fraction of the samples that are made shorter than possible.
        options: those of :class:`~megalight.data.module.TokenDataModule`.

    Raises, besides what :class:`~megalight.data.module.TokenDataModule` does:
        DataError: the tokenizer has no such special tokens, or no document has two sentences (in ``setup``).
    """

    def __init__(
        self,
        *,
        mask_probability: float = 0.15,
        short_probability: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        # After the base class, which has found the tokenizer.
        self.options = PairOptions(
            sequence_length=self.sequence_length,
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
