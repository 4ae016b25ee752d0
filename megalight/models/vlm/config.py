"""The configuration of a vision-language model: a vision tower, a projector, a language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalight.models.config import InitConfig, PlainConfig, require, require_choice
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.mixer_config import PositionConfig
from megalight.models.vision.config import VisionConfig
from megalight.nn.mlp import is_gated


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """What is between the tower's features and the hidden states of the language model: two layers, as in LLaVA-1.5.

    Attributes:
        merge: side of the squares of patches whose features become one token: 2 makes a fourth of the tokens
            (Qwen2.5-VL).
        pool: whether a token is the mean of the features of its square (Gemma-3). If not, they are joined.
        norm: ``layer`` or ``rms`` norm of features, or ``none``.
        norm_joined: whether the norm is of what a square has become. If not, of the features of each patch.
        norm_around_zero: whether the factor of an ``rms`` norm is ``1 + weight``.
        norm_eps: added to the variance in this norm, or to the mean square.
        layers: 2, or 1 without an activation.
        hidden_size: inner width of two layers. 0: that of the language model.
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS` that is not gated.
        bias: whether the layers have biases.
    """

    merge: int = 1
    pool: bool = False
    norm: Literal["none", "layer", "rms"] = "none"
    norm_joined: bool = False
    norm_around_zero: bool = False
    norm_eps: float = 1e-6
    layers: Literal[1, 2] = 2
    hidden_size: int = 0
    activation: str = "gelu"
    bias: bool = True
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        require(self.merge >= 1, f"projector.merge is {self.merge}; it must be at least 1.")
        require_choice("projector.norm", self.norm, ("none", "layer", "rms"))
        require(self.norm_eps > 0, f"projector.norm_eps is {self.norm_eps}; it must be above 0.")
        require(
            self.norm == "rms" or not self.norm_around_zero,
            f"projector.norm_around_zero is true with projector.norm {self.norm!r}; only an 'rms' norm has it.",
        )
        require(self.layers in (1, 2), f"projector.layers is {self.layers}; it must be 1 or 2.")
        require(
            self.layers == 2 or self.hidden_size == 0,
            f"projector.hidden_size is {self.hidden_size} with projector.layers 1, which has no inner width; set "
            "it to 0.",
        )
        require(self.hidden_size >= 0, f"projector.hidden_size is {self.hidden_size}; it must be at least 1, or 0.")
        require(
            not is_gated(self.activation),
            f"projector.activation is {self.activation!r}, which is gated; choose one that is not, such as gelu.",
        )


@dataclass(frozen=True, kw_only=True)
class VLMConfig(PlainConfig):
    """A language model that reads images.

    Attributes:
        language: the language model.
        vision: the tower.
        projector: what connects them.
        image_token: the id in whose places features of images come. The tokens of an image are one after the other.
        video_token: the id that stands for videos in the data of a published model. Videos are not read: tokens with
            this id are refused. None: the model has none.
        newline: whether a learned row follows the features of each image, or each line of its tiles, as
            LLaVA-OneVision has it.
        deepstack: layers of the tower, in ascending order, whose features have projectors of their own and are added
            to the output of the first layers of the language model, one each (https://arxiv.org/abs/2406.04334).
        mutual: whether the tokens of an image see each other in the language model, as in Gemma-3. Attention is causal
            otherwise.

    Raises:
        ConfigurationError: the parts do not fit together, or a value is out of range.
    """

    language: GPTConfig
    vision: VisionConfig
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    image_token: int
    video_token: int | None = None
    newline: bool = False
    mutual: bool = False
    deepstack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        object.__setattr__(self, "deepstack", tuple(self.deepstack))
        layers, least = self.vision.num_layers, self.language.num_layers
        require(
            list(self.deepstack) == sorted({layer for layer in self.deepstack if 0 <= layer < layers}),
            f"deepstack is {list(self.deepstack)}; it must have layers of the tower, 0 to {layers - 1}, in ascending "
            "order.",
        )
        require(
            len(self.deepstack) <= least,
            f"deepstack has {len(self.deepstack)} layers, and the language model {least}; each is added to another "
            "one.",
        )
        require(
            not self.deepstack or not self.language.layer_pattern,
            "deepstack is set with language.layer_pattern; features are added to transformer layers. Leave one out.",
        )
        require(
            0 <= self.image_token < self.vocab_size,
            f"image_token is {self.image_token}; it must be an id of the vocabulary, below {self.vocab_size}.",
        )
        video = self.video_token
        require(
            video is None or (video in range(self.vocab_size) and video != self.image_token),
            f"video_token is {video}; it must be an id of the vocabulary, below {self.vocab_size}, and not that of "
            f"images, {self.image_token}.",
        )
        require(
            self.language.mtp is None,
            "language.mtp is set; its depths read the embedding of later tokens, and places of images have none. "
            "Leave it out.",
        )
        require(
            self.language.position.kind != "learned",
            "language.position.kind is 'learned', and features of images have no such embedding; choose rope.",
        )
        self._check_sizes()
        if self.mutual:
            self._check_mutual()
        axes = self.position.axes
        require(
            axes is None or len(axes.sections) == 3,
            f"language.position.axes has {0 if axes is None else len(axes.sections)} sections; images have three axes: "
            "time, height and width.",
        )
        require(
            self.image_tokens <= self.max_sequence_length,
            f"an image has {self.image_tokens} tokens, and language.max_sequence_length is "
            f"{self.max_sequence_length}; raise it, or choose smaller images or larger patches.",
        )

    def _check_sizes(self) -> None:
        vision, merge = self.vision, self.projector.merge
        unit = merge * vision.patch_size
        if vision.dynamic is None:
            side = vision.image_size // vision.patch_size
            require(
                side % merge == 0,
                f"projector.merge is {merge}, and images of vision.image_size have {side} x {side} patches; it must "
                "divide the side.",
            )
            require(
                (vision.tiles == 1 and vision.anyres is None) or self.position.axes is None,
                f"vision.tiles is {vision.tiles}, or vision.anyres is set, with language.position.axes; the tokens of "
                "tiles have no rows and columns in the whole image. Set tiles to 1, and leave anyres out.",
            )
            return
        require(
            vision.dynamic.window % unit == 0,
            f"vision.dynamic.window is {vision.dynamic.window} pixels, not a multiple of projector.merge {merge} x "
            f"vision.patch_size {vision.patch_size} = {unit}; change one of them.",
        )
        patches = vision.dynamic.patches
        require(
            patches == 0 or patches >= merge**2,
            f"vision.dynamic.patches is {patches}; a token is a square of projector.merge {merge} x {merge} patches. "
            "Raise it.",
        )
        require(
            vision.dynamic.max_pixels >= unit**2,
            f"vision.dynamic.max_pixels is {vision.dynamic.max_pixels}; the smallest image has {unit} x {unit} pixels. "
            "Raise it.",
        )
        require(
            not self.newline,
            "newline is true with vision.dynamic; a newline follows images of one size. Set it to false.",
        )

    def _check_mutual(self) -> None:
        attention, longest = self.language.attention, self.language.attention.window
        plain = attention.softcap is None and attention.softmax == "vanilla" and attention.chunk is None
        require(
            plain and self.language.dropout.attention == 0,
            "mutual is true, and language.attention has a soft cap, a chunk, sinks or dropout; attention among the "
            "tokens of an image has none of these. Leave them out.",
        )
        mixers = {self.language.mixer_of(layer) for layer in range(self.language.num_layers)}
        require(
            mixers == {"attention"},
            f"mutual is true with mixers {', '.join(map(str, sorted(map(str, mixers))))}; all layers need attention.",
        )
        require(
            self.vision.dynamic is None and self.vision.anyres is None and not self.newline,
            "mutual is true with vision.dynamic, vision.anyres or newline; it is for images of one size, without a "
            "newline.",
        )
        require(
            longest is None or longest + 1 >= self.image_tokens,
            f"mutual is true, an image has {self.image_tokens} tokens, and language.attention.window is {longest}; the "
            "window must reach over an image.",
        )

    @property
    def added_rows(self) -> int:
        """Rows of an image that the tower adds to those of the data, which has patches alone then.

        Where it adds none, the data has a row for a class token.
        """
        vision = self.vision
        alone = self.projector.merge > 1 or vision.register_tokens > 0
        return vision.num_rows - vision.num_patches if alone else 0

    @property
    def image_tokens(self) -> int:
        """Tokens of an image, with a newline: the fewest that it can have, if images have sizes of their own."""
        if self.vision.dynamic is not None and self.vision.dynamic.patches:
            return 1  # of a long image that has one row
        if self.vision.dynamic is not None:
            unit = self.projector.merge * self.vision.patch_size
            return -(-self.vision.dynamic.min_pixels // unit**2)
        return self.vision.num_patches // self.projector.merge**2 + self.newline

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.language.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """Length of the longest sequence, in tokens, those of images among them."""
        return self.language.max_sequence_length

    @property
    def position(self) -> PositionConfig:
        """How the language model knows the places of tokens."""
        return self.language.position
