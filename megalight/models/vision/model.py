"""A vision transformer over the packed rows of all images, ``[P, h]``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.models.vision.config import VisionConfig
from megalight.nn import (
    MLP,
    Attention,
    Embedding,
    InnerAttention,
    LayerContext,
    LayerNorm,
    TransformerLayer,
    run_layers,
)
from megalight.nn.init import Constant, Initializer, Normal
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class Pictures:
    """The images of a micro-batch, end to end.

    Attributes:
        pixels: ``[P, patch_values]``, normalised: a patch is ``[channels, height, width]``. A row of a class token has
            any values.
        positions: ``[P]`` int64: the row of each patch in the table of positions. Class tokens have 0.
        sequences: how the rows divide into images. A row sees the other rows of its image.
        source: ``[T]`` int64: for each token, the row whose features replace it, -1 for text, or ``NEWLINE``.
    """

    pixels: Tensor
    positions: Tensor
    sequences: PackedSequences
    source: Tensor


class PatchEmbedding(nn.Module):
    """A linear layer over the pixels of a patch. Its weight has the shape of the convolution that it is elsewhere.

    Attributes:
        weight: ``[h, channels, height, width]``.
        bias: ``[h]``, or None.
    """

    def __init__(self, channels: int, size: int, hidden_size: int, *, bias: bool, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, channels, size, size))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden_size)) if bias else None)
        self.initializers: dict[str, Initializer] = {"weight": Normal(std), "bias": Constant(0.0)}

    def forward(self, pixels: Tensor) -> Tensor:
        """``[P, patch_values] -> [P, h]``."""
        return F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return f"{prod(self.weight.shape[1:])} -> {self.weight.shape[0]}, bias={self.bias is not None}"


class ClassToken(nn.Module):
    """A learned row before the patches of each image, at position 0.

    Attributes:
        weight: ``[h]``.
    """

    def __init__(self, hidden_size: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """``positions [P], hidden [P, h] -> [P, h]``."""
        return torch.where((positions == 0)[:, None], self.weight, hidden)


def build_norm(config: VisionConfig) -> LayerNorm:
    """Build a layer norm over hidden states."""
    return LayerNorm(config.hidden_size, config.norm_eps, backend=config.backends.norm)


def build_layer(config: VisionConfig) -> TransformerLayer:
    """Build a layer. All layers are the same."""
    attention = Attention(
        config.hidden_size,
        config.num_heads,
        config.num_heads,
        config.head_dim,
        InnerAttention(causal=False, dropout=config.dropout.attention, backend=config.backends.attention),
        qkv_bias=True,
        proj_bias=True,
        std=config.init.std,
        proj_std=config.residual_std,
    )
    mlp = MLP(
        config.hidden_size,
        config.ffn_hidden_size,
        config.activation,
        bias=True,
        std=config.init.std,
        down_std=config.residual_std,
        backend=config.backends.activation,
    )
    return TransformerLayer(build_norm(config), attention, build_norm(config), mlp, dropout=config.dropout.hidden)


class VisionTower(nn.Module):
    """Turns the patches of images into features. Parameters have no values until they are initialised or loaded.

    Attributes:
        patch: from pixels to hidden states.
        class_token: the row before the patches, or None.
        position: embedding of the place of a patch in its image.
        input_norm, output_norm: norms before the first and after the last layer, or None.
        layers: transformer layers in order, by index as a string.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, std = config.hidden_size, config.init.std
        self.patch = PatchEmbedding(config.channels, config.patch_size, size, bias=config.patch_bias, std=std)
        self.class_token = ClassToken(size, std) if config.class_token else None
        self.position = Embedding(config.num_rows, size, std)
        self.input_norm = build_norm(config) if config.input_norm else None
        self.layers = nn.ModuleDict({str(i): build_layer(config) for i in range(config.num_layers)})
        self.output_norm = build_norm(config) if config.output_norm else None

    def forward(self, pictures: Pictures) -> Tensor:
        """Return the features of all rows, ``[P, h]``, class tokens and padding among them."""
        # Each step is row by row, up to attention, so that any share of the rows may be elsewhere.
        hidden: Tensor = self.patch(pictures.pixels)
        if self.class_token is not None:
            hidden = self.class_token(pictures.positions, hidden)
        hidden = hidden + self.position(pictures.positions)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        hidden = run_layers(self.layers, hidden, LayerContext(pictures.sequences))
        return hidden if self.output_norm is None else self.output_norm(hidden)
