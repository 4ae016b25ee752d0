"""Floating-point operations of what a vision-language model does, and which gradients it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from megalight.models.gpt.flops import flops_per_token as flops_of_text
from megalight.models.gpt.flops import weights_of_losses
from megalight.models.vision import flops as tower
from megalight.models.vision.flops import Passes
from megalight.models.vlm.config import VLMConfig

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
