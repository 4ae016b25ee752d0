"""The configuration of a vision-language model: a vision tower, a projector, a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from megalight.models.config import InitConfig, from_plain, require, require_choice, to_plain
from megalight.models.gpt.config import GPTConfig, PositionConfig
from megalight.models.vision.config import VisionConfig
from megalight.nn.mlp import is_gated


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """The layers between the tower's features and the hidden states of the language model: two, as in LLaVA-1.5.

    Attributes:
        merge: side of the squares of patches whose features are joined to one: 2 makes a fourth of the tokens
            (Qwen2.5-VL).
        norm: norm of features before they are joined, ``layer`` or ``rms``, or ``none``.
        norm_eps: added to the variance in this norm, or to the mean square.
        hidden_size: inner width. 0: that of the language model.
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS` that is not gated.
        bias: whether the layers have biases.
    """

    merge: int = 1
    norm: Literal["none", "layer", "rms"] = "none"
    norm_eps: float = 1e-6
    hidden_size: int = 0
    activation: str = "gelu"
    bias: bool = True
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        require(self.merge >= 1, f"projector.merge is {self.merge}; it must be at least 1.")
        require_choice("projector.norm", self.norm, ("none", "layer", "rms"))
        require(self.norm_eps > 0, f"projector.norm_eps is {self.norm_eps}; it must be above 0.")
        require(self.hidden_size >= 0, f"projector.hidden_size is {self.hidden_size}; it must be at least 1, or 0.")
        require(
            not is_gated(self.activation),
            f"projector.activation is {self.activation!r}, which is gated; choose one that is not, such as gelu.",
        )


@dataclass(frozen=True, kw_only=True)
class VLMConfig:
    """A language model that reads images.

    Attributes:
        language: the language model.
        vision: the tower.
        projector: what connects them.
        image_token: the id in whose places features of images come. The tokens of an image are one after the other.
        newline: whether a learned row follows the features of each image, as LLaVA-OneVision has it.

    Raises:
        ConfigurationError: the parts do not fit together, or a value is out of range.
    """

    language: GPTConfig
    vision: VisionConfig
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    image_token: int
    newline: bool = False

    def __post_init__(self) -> None:
        require(
            0 <= self.image_token < self.vocab_size,
            f"image_token is {self.image_token}; it must be an id of the vocabulary, below {self.vocab_size}.",
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
                merge == 1,
                f"projector.merge is {merge}, and images of vision.image_size have {side} x {side} patches in rows; "
                "only patches of towers with vision.dynamic are in squares. Set projector.merge to 1.",
            )
            return
        require(
            vision.dynamic.window % unit == 0,
            f"vision.dynamic.window is {vision.dynamic.window} pixels, not a multiple of projector.merge {merge} x "
            f"vision.patch_size {vision.patch_size} = {unit}; change one of them.",
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

    @property
    def image_tokens(self) -> int:
        """Tokens of an image: its patches, and a newline. Of images of any size, the fewest of one."""
        if self.vision.dynamic is not None:
            unit = self.projector.merge * self.vision.patch_size
            return -(-self.vision.dynamic.min_pixels // unit**2)
        return self.vision.num_patches + self.newline

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

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values for JSON and YAML."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from the values of :meth:`to_dict`.

        Raises:
            ConfigurationError: a key is unknown or missing, or a value is bad.
        """
        config: Self = from_plain(cls, values)
        return config
