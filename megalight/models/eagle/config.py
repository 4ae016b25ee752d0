"""The configuration of an EAGLE-3 draft model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megalight.errors import ConfigurationError
from megalight.models.config import PlainConfig, require, require_choice
from megalight.models.gpt import GPTConfig, LatentConfig, NormConfig, PositionConfig
from megalight.ops.rotary import RotaryScaling


@dataclass(frozen=True, kw_only=True)
class EagleConfig(PlainConfig):
    """A draft model: one layer like Llama's, or like Kimi's. 0 and empty mean what the base model has.

    Attributes:
        hidden_size: width of the residual stream. That of the base, whose embedding the draft reads.
        vocab_size: number of token ids of the base.
        max_sequence_length: length of the longest sequence, in tokens; at most that of the base.
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads.
        head_dim: features per head.
        ffn_hidden_size: inner width of the MLP.
        norm_eps: added to the mean square.
        rotary_base: see :class:`~megalight.models.gpt.PositionConfig`.
        rotary_scaling: likewise. None: frequencies are not scaled.
        latent: sizes of latent attention, for a layer like Kimi's; they decide over the sizes of heads. Features of a
            rotary pair are then neighbors. None: the layer is like Llama's.
        auxiliary_layers: the hidden states of the base that the draft reads, in this order: those after so many of its
            layers. Empty: after a low, the middle and a high one, ``2, L / 2, L - 3`` of ``L`` layers.
        draft_ids: the token ids that the draft predicts, in ascending order: the most frequent ones, for a small head.
            Empty: all.
        head: ``own``: the output layer is trained; ``base``: it is that of the base, and frozen.
        std: standard deviation of initial weights.

    Raises:
        ConfigurationError: a value is out of range, or does not fit the base.
    """

    hidden_size: int = 0
    vocab_size: int = 0
    max_sequence_length: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden_size: int = 0
    norm_eps: float = 1e-5
    rotary_base: float = 0.0
    rotary_scaling: RotaryScaling | None = None
    latent: LatentConfig | None = None
    auxiliary_layers: tuple[int, ...] = ()
    draft_ids: tuple[int, ...] = ()
    head: Literal["own", "base"] = "own"
    std: float = 0.02

    def __post_init__(self) -> None:
        # Recipes give lists, and a configuration must be hashable.
        for name in ("auxiliary_layers", "draft_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require(
            all(first < second for first, second in zip(self.draft_ids, self.draft_ids[1:], strict=False)),
            "draft_ids are not in ascending order, or one comes twice; sort them.",
        )
        require_choice("head", self.head, ("own", "base"))
        require(
            self.head == "own" or not self.draft_ids,
            "head=base is the output layer of the base, which predicts all ids, and draft_ids are some of them. Leave "
            "draft_ids out, or set head=own.",
        )

    def for_base(self, base: GPTConfig) -> EagleConfig:
        """Return the configuration with all sizes, for this base.

        Raises:
            ConfigurationError: a value does not fit it.
        """
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(base, name)
            require(
                ours in (0, theirs),
                f"{name} of the draft is {ours} and that of the base {theirs}; the draft reads the base's embedding, "
                "so leave it out.",
            )
        require(
            self.max_sequence_length <= base.max_sequence_length,
            f"max_sequence_length of the draft is {self.max_sequence_length} and that of the base "
            f"{base.max_sequence_length}: the draft reads hidden states of the base, which has none of longer "
            "sequences. Lower it, or leave it out.",
        )
        require(base.num_layers >= 2, "the base has one layer, and a draft reads hidden states between layers.")
        layers = self.auxiliary_layers or usual_layers(base.num_layers)
        for layer in layers:
            require(
                1 <= layer < base.num_layers,
                f"auxiliary_layers has {layer}, and the base has {base.num_layers} layers: the hidden states between "
                f"them lie after 1 to {base.num_layers - 1} layers. Choose from these.",
            )
        require(
            not self.draft_ids or (self.draft_ids[0] >= 0 and self.draft_ids[-1] < base.vocab_size),
            f"draft_ids reach from {self.draft_ids[:1]} to {self.draft_ids[-1:]}, and the base has ids from 0 to "
            f"{base.vocab_size - 1}; count them with the base's tokenizer.",
        )
        heads, latent = self.num_heads or base.num_heads, self.latent
        # Heads of latent attention have sizes of their own, and with another number of heads the base's says nothing.
        like_base = heads == base.num_heads and base.latent is None
        return replace(
            self,
            hidden_size=base.hidden_size,
            vocab_size=base.vocab_size,
            max_sequence_length=self.max_sequence_length or base.max_sequence_length,
            num_heads=heads,
            # With other heads than the base, its number of key heads may not divide them.
            num_kv_heads=heads if latent else self.num_kv_heads or (heads if self.num_heads else base.num_kv_heads),
            # Of latent attention, `latent` has all sizes.
            head_dim=0 if latent else self.head_dim or (base.head_dim if like_base else base.hidden_size // heads),
            ffn_hidden_size=self.ffn_hidden_size or base.ffn_hidden_size,
            rotary_base=self.rotary_base or base.position.base,
            auxiliary_layers=layers,
        )

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the draft predicts."""
        return len(self.draft_ids) or self.vocab_size

    @property
    def layer(self) -> GPTConfig:
        """The same sizes as those of a GPT with one layer, for its builders."""
        if not self.hidden_size:
            raise ConfigurationError("the draft has no sizes yet; call EagleConfig.for_base(base).")
        return GPTConfig(
            num_layers=1,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.draft_vocab_size,
            max_sequence_length=self.max_sequence_length,
            norm=NormConfig(eps=self.norm_eps),
            position=PositionConfig(
                base=self.rotary_base, scaling=self.rotary_scaling, interleaved=self.latent is not None
            ),
            mixer_pattern=("attention" if self.latent is None else "latent_attention",),
            latent=self.latent,
        )


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return after how many layers of the base the usual hidden states lie: low, middle, high."""
    # Serving engines assume these numbers where a draft does not state its own. In a shallow base they coincide or
    # cross, so there the first, the middle and the last but one are taken.
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    return 1, max(1, num_layers // 2), num_layers - 1
