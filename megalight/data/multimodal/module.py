"""The Lightning data module of conversations with images."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from megalight.data.blend import BlendPart
from megalight.data.module import TokenDataModule
from megalight.data.multimodal.dataset import ImageDataset, ImagePackOptions, collate
from megalight.data.multimodal.images import Resize
from megalight.data.multimodal.resolution import form_of
from megalight.errors import ConfigurationError, DataError


class MultimodalDataModule(TokenDataModule):
    """Reads conversations that ``megalight prepare --multimodal`` wrote. Only what the assistant wrote counts.

    A batch on each rank is an :class:`~megalight.data.multimodal.batch.ImageTextBatch` of ``[global_batch_size /
    data-parallel ranks, sequence_length]`` tokens. A row holds several whole conversations; each image in it has
    as many tokens as patches. Sizes of images and patches are those of the model. Corpora of conversations without
    images, and of text, may be mixed in. Rows, their order and the position after a resume are as in
    :class:`~megalight.data.chat.module.SFTDataModule`.

    Args:
        packing: whether a row holds several conversations. If not, each has a row of its own.
        too_long: what happens with a conversation of more than ``sequence_length + 1`` tokens: ``drop`` leaves it out,
            ``raise`` stops. None is cut: a part of an image's tokens would remain.
        resize: how an image becomes a square; see :class:`~megalight.data.multimodal.images.ImageForm`. None: as
            the model's ``vision.resize`` says. Models that read images of any size need none.
        options: those of :class:`~megalight.data.module.TokenDataModule`.

    Raises:
        DataError: as :class:`~megalight.data.chat.module.SFTDataModule`; or (in ``setup``) the model has another image
            token than the data.
        ConfigurationError: neither or both of ``data`` and per-split data are given; or the model reads no images.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    kinds: ClassVar = ("images", "chat", "text")
    mixed_in: ClassVar = ("text",)

    def __init__(
        self,
        *,
        packing: bool = True,
        too_long: Literal["drop", "raise"] = "drop",
        resize: Resize | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.packing = packing
        self.too_long = too_long
        self.resize = resize
        self.options: ImagePackOptions | None = None

    def setup(self, stage: str) -> None:
        """Take the sizes of images from the model, and build the sample indices of the splits."""
        config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        self.options = self._options(config)
        super().setup(stage)

    def _options(self, config: Any) -> ImagePackOptions:
        vision = getattr(config, "vision", None)
        if vision is None:
            raise ConfigurationError(
                f"{type(self).__name__} takes the sizes of images from the model, and this one reads no images; train "
                "a VLMModule."
            )
        for corpus in self._corpora.values():
            marker = None if corpus.meta is None else corpus.meta.image_token
            if marker is not None and marker != config.image_token:
                raise DataError(
                    f"{corpus.data.prefix} has {marker} as the token of images, and the model has "
                    f"image_token={config.image_token}; they must be equal. Set image_token, or prepare the data with "
                    "another image_token (--image-token)."
                )
        return ImagePackOptions(
            sequence_length=self.sequence_length,
            packing=self.packing,
            too_long=self.too_long,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
            form=form_of(config, self.resize),
            image_token=config.image_token,
            video_token=config.video_token,
        )

    collate = staticmethod(collate)

    def dataset(self, part: BlendPart, name: str, num_samples: int | None) -> ImageDataset:
        """Build rows of whole conversations."""
        assert self.options is not None
        return ImageDataset(
            part.corpus,
            part.documents,
            self.options,
            num_samples=num_samples,
            seed=self.seed,
            label=name,
            cache_dir=self.cache_dir,
        )
