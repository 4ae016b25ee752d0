"""A vision transformer over the packed rows of all images, ``[P, h]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.data.multimodal.images import Mixtures
from megalight.errors import DataError
from megalight.models.vision.config import VisionConfig
from megalight.nn import (
    MLP,
    Attention,
    Embedding,
    InnerAttention,
    LayerContext,
    LayerNorm,
    RMSNorm,
    Rotary,
    TransformerLayer,
    run_layers,
)
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.ops.common import wide
from megalight.ops.rotary import RotaryAxes
from megalight.types import PackedSequences

ROTARY, WINDOWS = "rotary", "windows"
"""Names in the context of layers: the rotary table of rows and columns, and the division into windows."""


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images of a micro-batch, end to end.

    Attributes:
        pixels: ``[P, patch_values]``, normalized: a patch is ``[channels, height, width]``. A row of a class token has
            any values.
        positions: ``[P]`` int64: the row of each patch in the table of positions. Class tokens have 0, registers the
            numbers behind the table. For images of any size ``[2, P]``: the row and the column of each patch in its
            image; with a table of positions also the rows and columns of that image, ``[4, P]``.
        sequences: how the rows divide into images. A row sees the other rows of its image.
        source: ``[T]`` int64: for each token, the row whose features replace it, -1 for text, ``NEWLINE``, or
            ``MIXED`` less the number of a mixture. Rows are counted after those have been joined that the projector
            joins.
        windows: how the rows divide into windows; None for towers without windows.
        patches: ``[P']`` int64: the rows that the projector reads, where class tokens or registers are between those
            of patches, and the data has none for them. None: all rows.
        mixtures: further rows of features, behind those of the projector. None: there are none.
        runs: where the tokens of each image are in prompts: the first one, and their number. Batches have them in their
            sequences.
    """

    pixels: Tensor
    positions: Tensor
    sequences: PackedSequences
    source: Tensor
    windows: PackedSequences | None = None
    patches: Tensor | None = None
    mixtures: Mixtures | None = None
    runs: tuple[tuple[int, int], ...] = ()


class PatchEmbedding(nn.Module):
    """A linear layer over the pixels of a patch. Its weight has the shape of the convolution that it is elsewhere.

    Attributes:
        weight: ``[h, channels, height, width]``; of a tower that also reads videos, ``[h, channels, frames, height,
            width]``. Each frame is the image then.
        bias: ``[h]``, or None.
    """

    def __init__(
        self, channels: int, size: int, hidden_size: int, *, bias: bool, std: float, frames: int | None = None
    ) -> None:
        super().__init__()
        self.frames = frames
        times = () if frames is None else (frames,)
        self.weight = nn.Parameter(torch.empty(hidden_size, channels, *times, size, size))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden_size)) if bias else None)
        self.initializers: dict[str, Initializer] = {"weight": Normal(std), "bias": ConstantInit(0.0)}

    def forward(self, pixels: Tensor) -> Tensor:
        """``[P, patch_values] -> [P, h]``."""
        if self.frames is not None:
            # Not a sum of the weights of all frames: rounded to 16 bits, it would lose what they differ by.
            colors = pixels.view(len(pixels), self.weight.shape[1], 1, -1)
            pixels = colors.expand(-1, -1, self.frames, -1).flatten(1)
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


class RegisterTokens(nn.Module):
    """Learned rows of each image, at the positions from ``first`` on.

    Args:
        count: of an image.
        first: how many positions patches and class token have.
        hidden_size: width.
        std: standard deviation of the initial values.

    Attributes:
        weight: ``[count, h]``.
    """

    def __init__(self, count: int, first: int, hidden_size: int, std: float) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(count, hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """``positions [P], hidden [P, h] -> [P, h]``."""
        rows = F.embedding((positions - self.first).clamp(min=0), self.weight)
        return torch.where((positions >= self.first)[:, None], rows, hidden)


class PositionTable(nn.Module):
    """A square table of learned rows that is laid over each image; patches read between its entries (bilinear).

    Args:
        side: of the table.
        hidden_size: width.
        std: standard deviation of the initial values.
        cells: whether entries and patches are cells, and table and image have the same edges. A patch that is larger
            than an entry then reads the mean of those that it covers. If not, the outer patches are the outer entries.

    Attributes:
        weight: ``[side^2, h]``.
    """

    def __init__(self, side: int, hidden_size: int, std: float, *, cells: bool = False) -> None:
        super().__init__()
        self.side = side
        self.cells = cells
        self.weight = nn.Parameter(torch.empty(side * side, hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, places: Tensor) -> Tensor:
        """``[P, 4] -> [P, h]``: row and column of each patch, and the rows and columns of its image."""
        if self.cells:
            rows, columns = (self._shares(places[:, axis], places[:, 2 + axis]) for axis in range(2))
            kind = wide(self.weight.dtype)
            shares = (rows[:, :, None] * columns[:, None, :]).flatten(1).to(kind)
            return (shares @ self.weight.to(kind)).to(self.weight.dtype)
        # The first and the last patch are at the edges of the table. In float64, so that those on entries stay there.
        last = self.side - 1
        at = places[:, :2] * last / (places[:, 2:] - 1).clamp(min=1).double()
        low = at.long()
        high, share = (low + 1).clamp(max=last), at - low
        out = torch.zeros((), dtype=self.weight.dtype, device=self.weight.device)
        for row, of_row in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for column, of_column in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                weight = (of_row * of_column).to(wide(self.weight.dtype))[:, None]
                out = out + F.embedding(row * self.side + column, self.weight) * weight
        return out.to(self.weight.dtype)

    def _shares(self, at: Tensor, count: Tensor) -> Tensor:
        """``at [P], count [P] -> [P, side]``: the share of each row of the table in the patches of a row of ``count``.

        Shares fall from the middle of a patch to 0 at a distance of a patch, or of an entry, if this is larger.
        """
        # Rows of padding are of no image, with a count of 0.
        step = self.side / count.clamp(min=1).double()
        middle = step * (at + 0.5)
        entries = torch.arange(self.side, device=at.device) + 0.5
        near = 1 - (entries - middle[:, None]).abs() / step.clamp(min=1.0)[:, None]
        near = near.clamp(min=0.0)
        return near / near.sum(1, keepdim=True)


class LayerScale(nn.Module):
    """``x * weight``, after a sublayer and before the sum with the residual stream.

    Attributes:
        weight: ``[h]``.
    """

    def __init__(self, hidden_size: int, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": ConstantInit(value)}

    def forward(self, x: Tensor) -> Tensor:
        """``[P, h] -> [P, h]``."""
        return x * self.weight


def build_norm(config: VisionConfig) -> nn.Module:
    """Build a norm over hidden states."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.hidden_size, config.norm_eps, backend=config.backends.norm)


def build_rotary(config: VisionConfig) -> Rotary | None:
    """Build the rotary embedding of rows and columns, each of which turns one half of a head's pairs."""
    if config.dynamic is None or not config.dynamic.rotary:
        return None
    pairs = config.head_dim // 4
    axes = RotaryAxes((pairs, pairs), restart=True)
    return Rotary(config.head_dim, config.dynamic.base, axes=axes, backend=config.backends.rotary)


def build_layer(config: VisionConfig, index: int) -> TransformerLayer:
    """Build the layer with this index."""
    dynamic, size, scale = config.dynamic, config.hidden_size, config.layer_scale
    # Their epsilon is no setting.
    norms = [RMSNorm(size, 1e-6, config.backends.norm) if config.qk_norm else None for _ in "qk"]
    after = [None if scale is None else LayerScale(size, scale) for _ in range(2)]
    attention = Attention(
        config.hidden_size,
        config.num_heads,
        config.num_heads,
        config.head_dim,
        InnerAttention(causal=False, dropout=config.dropout.attention, backend=config.backends.attention),
        qkv_bias=config.qkv_bias,
        proj_bias=True,
        q_norm=norms[0],
        k_norm=norms[1],
        norm_whole=True,
        rotary=None if dynamic is None or not dynamic.rotary else ROTARY,
        division=WINDOWS if dynamic is not None and dynamic.has_window(index) else None,
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
    return TransformerLayer(
        build_norm(config),
        attention,
        build_norm(config),
        mlp,
        dropout=config.dropout.hidden,
        mixer_post_norm=after[0],
        mlp_post_norm=after[1],
    )


class VisionTower(nn.Module):
    """Turns the patches of images into features. Parameters have no values until they are initialized or loaded.

    Attributes:
        patch: from pixels to hidden states.
        class_token: the row before the patches, or None.
        registers: further rows of each image, or None.
        position: embedding of the place of a patch in its image, or None.
        rotary: rotary embedding of this place, or None. It has no parameters.
        input_norm, output_norm: norms before the first and after the last layer, or None.
        layers: transformer layers in order, by index as a string.
        taps: layers whose output is returned, too, in ascending order.
    """

    def __init__(self, config: VisionConfig, taps: Sequence[int] = ()) -> None:
        super().__init__()
        self.taps = tuple(taps)
        size, std = config.hidden_size, config.init.std
        frames = None if config.dynamic is None else config.dynamic.frames
        self.patch = PatchEmbedding(
            config.channels, config.patch_size, size, bias=config.patch_bias, std=std, frames=frames
        )
        self.class_token = ClassToken(size, std) if config.class_token else None
        self.registers: RegisterTokens | None = None
        if config.register_tokens:
            self.registers = RegisterTokens(config.register_tokens, config.num_positions, size, std)
        self.position: Embedding | PositionTable | None = None
        if config.dynamic is None:
            self.position = Embedding(config.num_positions, size, std)
        elif config.dynamic.table:
            self.position = PositionTable(config.dynamic.table, size, std, cells=config.dynamic.table_cells)
        self.rotary = build_rotary(config)
        self.input_norm = build_norm(config) if config.input_norm else None
        self.layers = nn.ModuleDict({str(i): build_layer(config, i) for i in range(config.num_layers)})
        self.output_norm = build_norm(config) if config.output_norm else None

    def forward(self, packed_images: PackedImages) -> tuple[Tensor, ...]:
        """Return the features of all rows, ``[P, h]``, class tokens and padding among them; then those at the taps."""
        # Each step is row by row, up to attention, so that any share of the rows may be elsewhere.
        hidden: Tensor = self.patch(packed_images.pixels)
        if self.class_token is not None:
            hidden = self.class_token(packed_images.positions, hidden)
        if self.position is not None:
            # A row for each patch, as of hidden states.
            places = packed_images.positions.t()
            hidden = hidden + self.position(places if self.registers is None else places % self.registers.first)
        if self.registers is not None:  # which have no position
            hidden = self.registers(packed_images.positions, hidden)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        tables = {} if self.rotary is None else {ROTARY: self.rotary(packed_images.positions[:2], hidden.dtype)}
        divisions = {} if packed_images.windows is None else {WINDOWS: packed_images.windows}
        context = LayerContext(packed_images.sequences, tables, divisions=divisions)
        tapped = list[Tensor]()
        if self.taps:
            for name, layer in self.layers.items():
                hidden = run_layers({name: layer}, hidden, context)
                if int(name) in self.taps:
                    tapped.append(hidden)
        else:
            hidden = run_layers(self.layers, hidden, context)
        return (hidden if self.output_norm is None else self.output_norm(hidden)), *tapped


# Pixels


def normalized(pixels: Tensor, config: VisionConfig) -> Tensor:
    """``[P, patch_values]``, uint8 to float32, with the mean and deviation of each color; floating-point as it is.

    Raises:
        DataError: patches have another number of values than those of the tower.
    """
    if pixels.shape[1] != config.patch_values:
        raise DataError(
            f"patches have {pixels.shape[1]} values; the tower takes {config.channels} x {config.patch_size} x "
            f"{config.patch_size} = {config.patch_values}. Cut images into patches of the model's size."
        )
    if pixels.is_floating_point():
        return pixels
    # On the device of the pixels, to which they travel as bytes.
    colors = pixels.view(-1, config.channels, config.patch_size**2).float() / 255
    each = [(colors[:, i] - mean) / std for i, (mean, std) in enumerate(zip(config.mean, config.std, strict=True))]
    return torch.stack(each, 1).flatten(1)
