"""The Lightning data module of supervised fine-tuning."""

from __future__ import annotations

from typing import Any, ClassVar

from megalight.data.blend import BlendPart
from megalight.data.chat.dataset import PackedDataset, PackOptions, TooLong, collate
from megalight.data.module import TokenDataModule


class SFTDataModule(TokenDataModule):
    """Reads conversations that ``megalight prepare --chat`` wrote. Only what the assistant wrote counts in the loss.

    A row holds several whole conversations: attention stays inside each, and positions restart. The number of rows in
    a run and the position after a resume are as in :class:`~megalight.data.gpt.module.GPTDataModule`. Text without a
    loss mask may be mixed in beside conversations: all its tokens count.

    Args:
        packing: whether a row holds several conversations. If not, each has a row of its own.
        too_long: what happens with a conversation of more than ``sequence_length + 1`` tokens. ``cut_end`` keeps its
            start, ``cut_start`` its end, ``drop`` leaves it out, ``raise`` stops.
        options: those of :class:`~megalight.data.module.TokenDataModule`.

    Raises, besides what :class:`~megalight.data.module.TokenDataModule` does:
        DataError: the data holds preference pairs or is all text, or no conversation can be used.
    """

    # Text may be mixed in, so that a model keeps what it knew; preference pairs have another loss.
    kinds: ClassVar = ("chat", "text")
    mixed_in: ClassVar = ("text",)

    def __init__(
        self,
        *,
        packing: bool = True,
        too_long: TooLong = "cut_end",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.options = PackOptions(
            sequence_length=self.sequence_length,
            packing=packing,
            too_long=too_long,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
        )

    collate = staticmethod(collate)

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
