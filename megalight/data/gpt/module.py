"""The Lightning data module of language-model pre-training."""

from __future__ import annotations

import logging
from typing import Any

from megalight.data.blend import BlendPart
from megalight.data.gpt.dataset import FIM, FillInMiddle, GPTDataset, SampleOptions, collate
from megalight.data.module import TokenDataModule
from megalight.errors import ConfigurationError
from megalight.first_rank import only_first

log = logging.getLogger(__name__)
log.addFilter(only_first)


class GPTDataModule(TokenDataModule):
    """Reads token files of documents for pre-training.

    If the trainer has ``max_steps``, training reads ``max_steps * accumulate_grad_batches * global_batch_size`` samples
    and repeats documents as often as this takes. Otherwise an epoch is one pass over the data, in a new order each
    time. Validation and test read their split once, in order, to the last token. Rows without loss fill up the last
    global batch.

    Args:
        document_mask: whether attention stays inside documents, and positions restart at each.
        eod_mask_loss: whether positions whose input is the end-of-document token carry no loss.
        fim: how often and how documents are rearranged for filling in the middle
            (:class:`~megalight.data.gpt.dataset.FIM`). None: never.
        allow_ambiguous_pad_tokens: what happens if the padding token of the tokenizer is also its end-of-document
            token, or another special token. False: labels with its id carry loss, because real tokens would lose
            theirs. True: they carry none, for data in which that id means padding. A warning says so.
        options: those of :class:`~megalight.data.module.TokenDataModule`.

    Raises, besides what :class:`~megalight.data.module.TokenDataModule` does:
        DataError: the data is too short for one sample.
    """

    def __init__(
        self,
        *,
        document_mask: bool = False,
        eod_mask_loss: bool = False,
        fim: FIM | None = None,
        allow_ambiguous_pad_tokens: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.fim = None if fim is None else FillInMiddle(fim, self.tokenizer)
        if allow_ambiguous_pad_tokens:
            # Asked for by name: the base class takes an id only if it has no other meaning.
            self.pad_id = self._ambiguous_pad_id()
        self.options = SampleOptions(
            sequence_length=self.sequence_length,
            document_mask=document_mask,
            eod_id=self.eod_id,
            eod_mask_loss=eod_mask_loss,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
        )

    collate = staticmethod(collate)

    def _ambiguous_pad_id(self) -> int:
        """Return the padding id although it has another meaning too."""
        found = self.tokenizer.pad_id
        if found is None:
            raise ConfigurationError(
                "allow_ambiguous_pad_tokens is true, but the tokenizer has no padding token; leave it out."
            )
        if self.tokenizer.safe_pad_id < 0:
            log.warning(
                "the padding token %r is also another special token, so no label with its id %d counts in the loss, "
                "real ones neither (allow_ambiguous_pad_tokens)",
                self.tokenizer.pad_token,
                found,
            )
        return found

    def dataset(self, part: BlendPart, name: str, num_samples: int | None) -> GPTDataset:
        """Lay documents end to end, and cut them into samples of equal length."""
        return GPTDataset(
            part.corpus.data,
            part.documents,
            self.options,
            num_samples=num_samples,
            seed=self.seed,
            label=name,
            cache_dir=self.cache_dir,
            # Evaluation reads the last tokens as well, in a padded sample.
            drop_last_partial=name == "train",
            fim=self.fim,
        )
