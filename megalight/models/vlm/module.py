"""Vision-language models as a LightningModule, and their FLOPs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.models.batches import skips
from megalight.models.family.module import FamilyModule
from megalight.models.gpt.flops import flops_per_token as flops_of_text
from megalight.models.gpt.flops import weights_of_losses
from megalight.models.loading import Keys
from megalight.models.module import CANONICAL_PREFIX, Carry
from megalight.models.vision import config as tower
from megalight.models.vision.config import Passes
from megalight.models.vision.model import PackedImages
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import RemoteFeatures
from megalight.models.vlm.task import check_batch, freeze
from megalight.nn.moe.router import counts_of
from megalight.optim import AdamConfig
from megalight.types import Loss


class VLMModule(FamilyModule[VLMConfig]):
    """Trains a model that reads images to predict the next token, with batches of text and images.

    Args:
        config: the model, or the name of a preset (``llava_1_5_7b``; see :mod:`megalight.models.vlm.presets`);
            None: the configuration in ``weights``.
        freeze: globs over names of parameters that are not trained, as in the optimizer's rules: ``*.tower.*``.
        Others are those of :class:`~megalight.models.family.module.FamilyModule`.

    Raises:
        ConfigurationError: a pattern of ``freeze`` matches no parameter (when the model is built).

    Attributes:
        feature_receiver: returns the features of a micro-batch, ``[P, h]``, where a tower on other ranks computes
            them; None: this model has the tower. The strategy sets it.

    The batches are :class:`~megalight.data.multimodal.batch.ImageTextBatch`.
    """

    family = "vlm"

    def __init__(
        self,
        config: VLMConfig | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
        weights_keys: Keys = "strict",
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(config, optimizer, seed, weights, weights_keys)
        self.frozen_patterns = tuple(freeze)  # `freeze` is a method of Lightning's
        self.feature_receiver: Callable[[ImageTextBatch], Tensor] | None = None
        # Of all micro-batches so far, on the host: how much work images are, and tokens without a loss spare.
        self._image_flops, self._spared_flops, self._tokens = 0.0, 0.0, 0
        self._trained = Trained()

    def build_model(self) -> nn.Module:
        """Build the whole model for one device, with frozen parameters."""
        model = super().build_model()
        freeze(model, self.frozen_patterns, CANONICAL_PREFIX)
        return model

    def check_model(self, model: nn.Module) -> None:
        """Refuse optimizer rules for parameters that the model does not have, and see what is trained."""
        super().check_model(model)
        self._trained = Trained.of(model, self.config)

    def forward_step(self, model: nn.Module, batch: ImageTextBatch, carry: Carry | None = None) -> Carry:
        """From tokens ``[b, s]`` and images, or the carry, to ``hidden [T, h]``; last chunk: to ``losses [T]``."""
        check_batch(batch)  # of evaluation and prediction, too
        sequences = batch.sequences.pad_to(self.token_multiple)
        packed_images = None
        if task.has_embedding(model):
            self.count_work(batch, skips(batch, self.token_multiple))
            packed_images = self._pack_images(batch, task.source_of(model, batch, sequences))
        return task.forward(model, batch, sequences, carry, packed_images, self.token_multiple)

    def _pack_images(self, batch: ImageTextBatch, source: Tensor) -> PackedImages | RemoteFeatures:
        images, _ = batch.parts()
        if self.feature_receiver is not None:
            return RemoteFeatures(self.feature_receiver(batch), source, images.mixtures)
        return task.pack_images(self.config, images, source, self.token_multiple)

    def count_work(self, batch: ImageTextBatch, skipped: bool) -> None:
        """Add a micro-batch to those that :meth:`flops_per_token` counts.

        Args:
            batch: the micro-batch, with its images.
            skipped: whether the language model skips tokens without a loss where it can.
        """
        images, _ = batch.parts()
        parts = tuple(rows for each in images.windows for rows in each)
        self._image_flops += flops_of_images(self.config, images.lengths, parts, self._trained)
        self._tokens += batch.tokens.numel()
        if skipped:
            spared = batch.tokens.numel() - sum(batch.row_counts)
            self._spared_flops += spared * flops_of_losses(self.config, self._trained)

    def loss_step(self, carry: Carry, batch: ImageTextBatch) -> Loss:
        """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens."""
        return task.loss(carry, batch)

    def loss_tokens(self, batch: ImageTextBatch) -> Tensor:
        """Return the sum of the loss mask.

        Raises:
            DataError: the batch has no places for images.
        """
        check_batch(batch)
        return batch.loss_mask.sum()

    def aux_loss_counts(self, batch: ImageTextBatch) -> dict[str, Tensor]:
        """Return the counts of routers' losses."""
        moe = self.config.language.moe
        return {} if moe is None else counts_of(moe.balance, batch.sequences)

    def flops_per_token(self, sequence_length: int) -> float:
        """Return operations of forward and backward per token of text, with those of the tower.

        Of frozen parts, only those that are done count: no gradients of weights, and no backward pass at all where
        nothing before is trained. Neither does what is skipped of tokens without a loss. How many rows of images and
        losses come with a token is known from the batches so far on this rank.
        """
        language = flops_per_token(self.config, sequence_length, self._trained)
        return language + (self._image_flops - self._spared_flops) / max(1, self._tokens)


# FLOPs, and which gradients are computed


PARTS = (".tower.", ".projector.", "")
"""What names of parameters of the tower, the projectors and the language model contain."""


@dataclass(frozen=True)
class Trained:
    """What is computed of each part in training.

    A part that is frozen has a forward pass alone if nothing before it is trained; else gradients pass through it.
    Adapters are trained, and their own products, which are small, are not counted.
    """

    tower: Passes = field(default_factory=Passes)
    projector: Passes = field(default_factory=Passes)
    language: Passes = field(default_factory=Passes)

    @classmethod
    def of(cls, model: nn.Module, config: VLMConfig) -> Trained:
        """Return what is computed of a whole model, whose frozen parameters need no gradient."""
        # Rows of a table are looked up; a tied one is the weight of the head, too.
        looked_up = () if config.language.tie_embeddings else ("embed.word.weight",)
        counted, own, some = [0] * 3, [0] * 3, [False] * 3
        for name, parameter in model.named_parameters():
            part = next(index for index, prefix in enumerate(PARTS) if prefix in name)
            some[part] |= parameter.requires_grad
            if parameter.ndim > 1 and ".lora_" not in name and name not in looked_up:
                counted[part] += parameter.numel()
                own[part] += parameter.numel() * parameter.requires_grad
        shares = [mine / max(1, every) for mine, every in zip(own, counted, strict=True)]
        return cls(
            Passes(shares[0], inputs=some[0]),
            Passes(shares[1], inputs=some[0] or some[1]),
            Passes(shares[2], inputs=any(some)),
        )


def flops_per_token(config: VLMConfig, sequence_length: int, trained: Trained | None = None) -> float:
    """Return operations of the language model per token; see :func:`megalight.models.gpt.flops.flops_per_token`."""
    passes = (trained or Trained()).language
    # Nothing is trained only where a model is measured by hand: a forward pass alone.
    return float(flops_of_text(config.language, sequence_length, passes.weights if passes.inputs else None))


def flops_of_losses(config: VLMConfig, trained: Trained | None = None) -> float:
    """Return the operations of :func:`flops_per_token` that only tokens with a loss need.

    See :func:`megalight.models.gpt.flops.weights_of_losses`. A last layer to which features of images are added
    computes all tokens.
    """
    whole_layer = config.language.num_layers <= len(config.deepstack)
    return (trained or Trained()).language.of_weights * weights_of_losses(config.language, whole_layer)


def flops_of_images(
    config: VLMConfig, lengths: Sequence[int], windows: Sequence[int] = (), trained: Trained | None = None
) -> float:
    """Return operations of forward and backward of the tower and the projector; those of their tokens are not counted.

    Args:
        config: the model.
        lengths: rows of each image.
        windows: rows of each window, for a tower with windows.
        trained: what is computed of each part. None: all gradients.
    """
    trained, own, wide = trained or Trained(), config.projector, config.language.hidden_size
    joined, inner = own.merge**2, own.hidden_size or wide
    features, size = sum(lengths) / joined, config.vision.hidden_size * (1 if own.pool else joined)
    # Gradients of its input are for the tower.
    first = Passes(trained.projector.weights, trained.tower.inputs).of_weights
    projector = first * size * (wide if own.layers == 1 else inner)
    if own.layers == 2:
        projector += trained.projector.of_weights * inner * wide
    lengths = [length + config.added_rows for length in lengths]
    projectors = 1 + len(config.deepstack)
    return tower.flops_of_images(config.vision, lengths, windows, trained.tower) + projectors * projector * features
