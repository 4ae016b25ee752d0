"""Vision-language models as a LightningModule."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.models.config import require
from megalight.models.family.module import FamilyModule
from megalight.models.gpt.flops import flops_per_token
from megalight.models.module import CANONICAL_PREFIX, Carry
from megalight.models.packing import IGNORED, pack
from megalight.models.saved import Keys
from megalight.models.vision.model import Pictures
from megalight.models.vision.pixels import normalised
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.flops import flops_of_images
from megalight.optim import AdamConfig
from megalight.types import Loss, PackedSequences


class VLMModule(FamilyModule[VLMConfig]):
    """Trains a model that reads images to predict the next token, with batches of text and images.

    Args:
        config: the model, or the name of a preset (``llava_1_5_7b``; see :mod:`megalight.models.vlm.presets`);
            None: the configuration in ``weights``.
        optimizer: settings of Adam, parameter groups and learning-rate schedule.
        seed: seed of the initial weights.
        weights: a checkpoint or a ``transformers`` folder to start from. None: random initial weights.
        weights_keys: what names that differ in ``weights`` mean: ``strict`` (an error), ``log``, ``ignore``; see
            :class:`~megalight.models.family.module.FamilyModule`.
        freeze: globs over names of parameters that are not trained, as in the optimizer's rules: ``*.tower.*``.

    Raises:
        ConfigurationError: a pattern of ``freeze`` matches no parameter (when the model is built).

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
        # Of all micro-batches so far, on the host: how much work images are, for each token of text.
        self._image_flops, self._tokens = 0.0, 0

    def build_model(self) -> nn.Module:
        """Build the whole model for one device, with frozen parameters."""
        model = super().build_model()
        named = {CANONICAL_PREFIX + name: parameter for name, parameter in model.named_parameters()}
        for pattern in self.frozen_patterns:
            found = fnmatch.filter(named, pattern)
            require(bool(found), f"freeze has {pattern!r}, which matches no parameter; they are {', '.join(named)}.")
            for name in found:
                # A tower without trained parameters then keeps nothing for the backward pass.
                named[name].requires_grad_(False)
        return model

    def forward_step(self, model: nn.Module, batch: ImageTextBatch, carry: Carry | None = None) -> Carry:
        """From tokens ``[b, s]`` and images, or the carry, to ``hidden [T, h]``; last chunk: to ``losses [T]``."""
        sequences = batch.sequences.pad_to(self.token_multiple)
        output = model(
            pack(batch.tokens, sequences, 0),
            sequences,
            labels=pack(batch.labels.masked_fill(batch.loss_mask == 0, IGNORED), sequences, IGNORED),
            hidden=None if carry is None else carry["hidden"],
            pictures=self._pictures(batch, sequences) if getattr(model, "embed", None) is not None else None,
        )
        return {"hidden": output.hidden} if output.losses is None else {"losses": output.losses}

    def _pictures(self, batch: ImageTextBatch, sequences: PackedSequences) -> Pictures:
        """Return the images of a micro-batch for the tower. Without any, it gets a row that no token reads.

        It gets as many rows as the projector joins to one, and padding in whole rows of features.

        So the tower runs in every micro-batch on every rank: collectives inside of it meet, and all of its parameters
        have a gradient.
        """
        images, source = batch.parts()
        config, device = self.config, batch.tokens.device
        joined = config.projector.merge**2
        parts = tuple(rows for each in images.windows for rows in each)
        self._image_flops += flops_of_images(config, images.lengths, parts)
        self._tokens += batch.tokens.numel()
        multiple = self.token_multiple * joined
        rows = PackedSequences.of_lengths(images.lengths or (joined,), device).pad_to(multiple)
        windows = None
        if config.vision.dynamic is not None and config.vision.dynamic.window:
            windows = PackedSequences.of_lengths(parts or (joined,), device).pad_to(multiple)
        missing = rows.num_tokens - len(images.pixels)
        pixels = F.pad(normalised(images.pixels, config.vision), (0, 0, 0, missing))
        return Pictures(pixels, F.pad(images.positions, (0, missing)), rows, pack(source, sequences, -1), windows)

    def loss_step(self, carry: Carry, batch: ImageTextBatch) -> Loss:
        """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens."""
        weights = batch.loss_mask.reshape(-1)
        return Loss((carry["losses"][: weights.numel()] * weights).sum())

    def loss_tokens(self, batch: ImageTextBatch) -> Tensor:
        """Return the sum of the loss mask."""
        return batch.loss_mask.sum()

    def output_step(self, carry: Carry, batch: ImageTextBatch) -> Tensor:
        """Return the cross entropy of each label in nats, ``[b, s]``. It is 0 if the loss mask is 0."""
        return carry["losses"][: batch.labels.numel()].view(batch.labels.shape)

    def flops_per_token(self, sequence_length: int) -> float:
        """Return operations of forward and backward per token of text, with those of the tower.

        How many rows of images come with a token is known from the batches so far on this rank.
        """
        language = float(flops_per_token(self.config.language, sequence_length))
        return language + self._image_flops / max(1, self._tokens)
