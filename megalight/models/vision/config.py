"""The configuration of a vision transformer, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megalight.models.config import DropoutConfig, InitConfig, require, require_choice
from megalight.models.gpt.config import GPTBackendConfig
from megalight.nn.mlp import is_gated


@dataclass(frozen=True, kw_only=True)
class AnyResConfig:
    """An image is the whole in one square, and then a grid of tiles without the borders that made it fit (LLaVA-NeXT).

    See https://llava-vl.github.io/blog/2024-01-30-llava-next and https://arxiv.org/abs/2408.03326. The tokens of the
    grid lie in its rows, and a newline ends each of them.

    Attributes:
        grids: rows and columns of tiles of each grid. An image takes the one that keeps most of its pixels, and of
            these the smallest.
        most: a grid with the features of more than 1.21 times so many tiles is shrunk to about as many, by means of
            four neighbors. 0: none is.
        alone: whether only an image that is the only one of its conversation has tiles (LLaVA-OneVision). Others are
            one square, by ``vision.resize``.

    Raises:
        ConfigurationError: a value is out of range.
    """

    grids: tuple[tuple[int, int], ...]
    most: int = 0
    alone: bool = False

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "grids", tuple(map(tuple, self.grids)))
        require(
            bool(self.grids) and all(len(grid) == 2 and min(grid) >= 1 for grid in self.grids),
            f"vision.anyres.grids is {list(self.grids)}; give at least one pair of rows and columns, such as (2, 1).",
        )
        require(self.most >= 0, f"vision.anyres.most is {self.most}; it must be at least 1, or 0.")


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Images keep their shape, and nearly their size; positions of patches are rotary, by row and column (Qwen2.5-VL).

    See https://arxiv.org/abs/2502.13923; for towers with a table instead, https://arxiv.org/abs/2502.14786 (SigLIP2).

    Attributes:
        min_pixels, max_pixels: images with fewer or more pixels are enlarged or shrunk.
        patches: images are enlarged or shrunk to nearly so many patches, and never more, in place of these limits
            (NaFlex, SigLIP2). 0: the limits hold.
        frames: how often an image occurs in a patch. Towers that also read videos have patches of several frames.
        window: side of the windows, in pixels, inside of which attention stays. 0: there are none.
        full_layers: layers without windows, whose attention spans the image.
        rotary: whether patches have rotary positions.
        base: of the rotary frequencies.
        table: side of a learned table of positions, which is laid over each image: a patch reads between its entries
            (Qwen3-VL). 0: there is none.
        table_cells: whether table and image have the same edges, and a patch that is larger than an entry reads the
            mean of those that it covers (SigLIP2). If not, the outer patches are the outer entries.

    Raises:
        ConfigurationError: a value is out of range.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patches: int = 0
    frames: int = 2
    window: int = 0
    full_layers: tuple[int, ...] = ()
    rotary: bool = True
    base: float = 10000.0
    table: int = 0
    table_cells: bool = False

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "full_layers", tuple(self.full_layers))
        require(
            1 <= self.min_pixels <= self.max_pixels,
            f"vision.dynamic.min_pixels is {self.min_pixels} and max_pixels {self.max_pixels}; they must be at least "
            "1, and in this order.",
        )
        require(self.frames >= 1, f"vision.dynamic.frames is {self.frames}; it must be at least 1.")
        require(self.window >= 0, f"vision.dynamic.window is {self.window}; it must be at least 0 pixels.")
        require(
            self.window > 0 or not self.full_layers,
            f"vision.dynamic.full_layers is {list(self.full_layers)} without a window; set vision.dynamic.window, or "
            "leave them out.",
        )
        require(self.table >= 0, f"vision.dynamic.table is {self.table}; it must be a side, or 0.")
        require(self.patches >= 0, f"vision.dynamic.patches is {self.patches}; it must be a number of patches, or 0.")
        require(
            self.table > 0 or (self.rotary and not self.table_cells),
            "vision.dynamic.table is 0 without vision.dynamic.rotary, or with table_cells; patches would have no "
            "position. Set table to the side of a table.",
        )
        require(self.base > 1, f"vision.dynamic.base is {self.base}; it must be above 1.")

    def has_window(self, layer: int) -> bool:
        """Return whether attention of the layer with this index stays inside of windows."""
        return self.window > 0 and layer not in self.full_layers


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision transformer (https://arxiv.org/abs/2010.11929), as of CLIP, for images of one size, or of any size.

    Attributes:
        num_layers: number of transformer layers. LLaVA reads features before CLIP's last layer, which is left out.
        hidden_size: width of the residual stream.
        num_heads: number of attention heads.
        ffn_hidden_size: inner width of the MLP. 0 means ``4 hidden_size``.
        image_size: height and width of an image, in pixels. 0 with ``dynamic``: images have sizes of their own.
        patch_size: height and width of a patch, in pixels.
        margin: pixels at the right and at the bottom that no patch covers, where patches do not divide an image (6 of
            SigLIP's 384, with patches of 14).
        channels: colors of a pixel.
        tiles: an image is divided into up to so many squares of ``image_size`` pixels, and the whole image follows;
            see :class:`~megalight.data.multimodal.images.ImageForm`. 1: it is one square.
        anyres: how images of any shape become squares of ``image_size`` with a grid of tiles. None: by ``tiles``.
        resize: how an image becomes this square: ``crop``, ``pad`` or ``stretch``.
        resample: what new pixels are made of: ``bicubic`` or ``bilinear`` (Gemma-3).
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS`.
        class_token: whether a learned row comes before the patches of an image.
        register_tokens: number of further learned rows of each image, which have no position and give no features
            (https://arxiv.org/abs/2309.16588; RADIO has them).
        patch_bias: whether the projection of patches has a bias.
        input_norm: whether to normalize the rows before the first layer (CLIP).
        output_norm: whether to normalize the rows after the last layer (SigLIP).
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys have an RMS norm over all heads together (InternViT).
        layer_scale: initial factors of the features that a sublayer adds to the residual stream, which are learned
            (https://arxiv.org/abs/2103.17239). None: there are none.
        norm: ``layer`` (with bias) or ``rms``.
        norm_eps: added to the variance in norms, or to the mean square.
        dynamic: how images of any size are read. None: all images have ``image_size``.
        mean, std: of each color, for pixels from 0 to 1.

    Raises:
        ConfigurationError: sizes do not divide, or a value is out of range.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int = 0
    image_size: int = 336
    patch_size: int = 14
    margin: int = 0
    channels: int = 3
    tiles: int = 1
    anyres: AnyResConfig | None = None
    resize: Literal["crop", "pad", "stretch"] = "crop"
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    activation: str = "quick_gelu"
    class_token: bool = True
    register_tokens: int = 0
    patch_bias: bool = False
    input_norm: bool = True
    output_norm: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    layer_scale: float | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    dynamic: DynamicConfig | None = None
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    init: InitConfig = field(default_factory=InitConfig)
    backends: GPTBackendConfig = field(default_factory=GPTBackendConfig)

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        for name in ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "patch_size"):
            require(getattr(self, name) >= 1, f"vision.{name} is {getattr(self, name)}; it must be at least 1.")
        require(
            self.channels in (1, 3), f"vision.channels is {self.channels}; it must be 1 (gray) or 3 (red, green, blue)."
        )
        require(
            self.hidden_size % self.num_heads == 0,
            f"vision.hidden_size {self.hidden_size} is not a multiple of vision.num_heads {self.num_heads}; change one "
            "of them.",
        )
        if self.dynamic is None:
            self._check_fixed()
        else:
            self._check_dynamic(self.dynamic)
        require(
            self.anyres is None or (self.tiles == 1 and self.dynamic is None),
            f"vision.anyres is set with vision.tiles {self.tiles} or vision.dynamic; each says how images of other "
            "shapes are read. Leave one out.",
        )
        require_choice("vision.resize", self.resize, ("crop", "pad", "stretch"))
        require_choice("vision.resample", self.resample, ("bicubic", "bilinear"))
        require(self.register_tokens >= 0, f"vision.register_tokens is {self.register_tokens}; it must be at least 0.")
        require(self.tiles >= 1, f"vision.tiles is {self.tiles}; it must be at least 1, the whole image.")
        require_choice("vision.norm", self.norm, ("layer", "rms"))
        for name in ("mean", "std"):
            values = getattr(self, name)
            require(
                len(values) == self.channels,
                f"vision.{name} has {len(values)} values for {self.channels} channels; give one for each.",
            )
        require(min(self.std) > 0, f"vision.std is {list(self.std)}; all values must be above 0.")
        require(self.norm_eps > 0, f"vision.norm_eps is {self.norm_eps}; it must be above 0.")

    def _check_fixed(self) -> None:
        require(
            self.image_size >= 1,
            f"vision.image_size is {self.image_size}; it must be at least 1. Set vision.dynamic for images of any "
            "size.",
        )
        require(
            0 <= self.margin < self.patch_size and (self.image_size - self.margin) % self.patch_size == 0,
            f"vision.image_size {self.image_size} does not divide into patches of vision.patch_size {self.patch_size} "
            f"pixels and a vision.margin of {self.margin}; choose a multiple, such as "
            f"{-(-self.image_size // self.patch_size) * self.patch_size}, or a margin of "
            f"{self.image_size % self.patch_size}.",
        )
        require(
            self.image_size >= self.patch_size,
            f"vision.image_size is {self.image_size}; it must be at least vision.patch_size {self.patch_size}.",
        )

    def _check_dynamic(self, dynamic: DynamicConfig) -> None:
        require(
            self.image_size == 0,
            f"vision.image_size is {self.image_size} with vision.dynamic; images have sizes of their own: set it to 0.",
        )
        require(self.tiles == 1, f"vision.tiles is {self.tiles} with vision.dynamic; images stay whole: set it to 1.")
        require(self.margin == 0, f"vision.margin is {self.margin} with vision.dynamic; patches cover images: set 0.")
        require(
            not self.class_token and not self.register_tokens,
            f"vision.class_token is {self.class_token} and vision.register_tokens {self.register_tokens} with "
            "vision.dynamic; rows of such images are patches alone: set them to false and 0.",
        )
        require(
            self.head_dim % 4 == 0 or not dynamic.rotary,
            f"vision.hidden_size / vision.num_heads is {self.head_dim} with vision.dynamic; rows and columns rotate "
            "one half of a head each, in pairs, so it must be a multiple of 4.",
        )
        require(
            dynamic.window % self.patch_size == 0,
            f"vision.dynamic.window is {dynamic.window} pixels, not a multiple of vision.patch_size "
            f"{self.patch_size}; change one of them.",
        )
        strange = [layer for layer in dynamic.full_layers if not 0 <= layer < self.num_layers]
        require(
            not strange,
            f"vision.dynamic.full_layers has {strange}; layers are 0 to {self.num_layers - 1}.",
        )

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden_size // self.num_heads

    @property
    def num_patches(self) -> int:
        """Patches of an image of ``image_size``."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Places of an image that have an embedding: its patches, and its class token."""
        return self.num_patches + self.class_token

    @property
    def num_rows(self) -> int:
        """Rows of an image in the tower: its patches, its class token, and its registers."""
        return self.num_positions + self.register_tokens

    @property
    def patch_values(self) -> int:
        """Numbers in a patch: colors of its pixels."""
        return self.channels * self.patch_size**2

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return self.init.residual_std(2 * self.num_layers)


# FLOPs


@dataclass(frozen=True)
class Passes:
    """What is computed of a part of a model.

    Attributes:
        weights: the share of its weights whose gradients are.
        inputs: whether gradients of inputs are, for what is before.
    """

    weights: float = 1.0
    inputs: bool = True

    @property
    def of_weights(self) -> float:
        """Operations for each weight and row: two forward, two for each gradient."""
        return 2.0 + 2.0 * self.weights + 2.0 * self.inputs

    @property
    def of_attention(self) -> float:
        """Those of the products of attention, as a multiple of the forward pass. They have no weights."""
        return 3.0 if self.inputs else 1.0


def flops_of_images(
    config: VisionConfig, lengths: Sequence[int], windows: Sequence[int] = (), passes: Passes | None = None
) -> float:
    """Return operations of forward and backward for images.

    In training, each weight counts six operations for each row: a patch or a class token. Attention counts twelve for
    each query feature and each row that it sees.

    Args:
        config: the tower.
        lengths: rows of each image.
        windows: rows of each window, for a tower with windows.
        passes: what is computed of its layers. None: all gradients.
    """
    passes = passes or Passes()
    h, dynamic, frames = config.hidden_size, config.dynamic, 1
    windowed = 0
    if dynamic is not None:
        windowed, frames = sum(map(dynamic.has_window, range(config.num_layers))), dynamic.frames
    layer = h * (4 * h + (3 if is_gated(config.activation) else 2) * config.ffn_hidden_size)
    matmul = config.num_layers * layer + frames * config.patch_values * h
    seen = (config.num_layers - windowed) * sum(rows**2 for rows in lengths) + windowed * sum(r**2 for r in windows)
    return passes.of_weights * matmul * sum(lengths) + 4.0 * passes.of_attention * h * seen
