"""The configuration of a GPT: sizes and options, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal

from megalight.models.config import (
    MAX_BLOCKS,
    MAX_LAYERS,
    OR_HEAD_DIM,
    ModelConfig,
    check_heads,
    require,
    require_choice,
)
from megalight.models.gpt.mixer_config import AttentionConfig, DeltaNetConfig, LatentConfig, MambaConfig, PositionConfig
from megalight.nn.mlp import is_gated
from megalight.nn.moe import MoEConfig

MIXERS = ("attention", "latent_attention", "conv", "mamba", "gated_delta_net")
"""The mixers that a layer can have."""

SYMBOL_MIXERS = {"M": "mamba", "G": "gated_delta_net"}
"""Symbol in ``layer_pattern`` -> mixer. ``*`` stands for the attention of ``mixer_pattern``."""


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norms before attention, before the MLP, and before the head.

    Attributes:
        kind: ``rms`` or ``layer`` (with bias).
        eps: added to the mean square (``rms``) or the variance (``layer``).
        around_zero: weights of ``rms`` lie around 0, and the factor is ``1 + weight`` (Gemma).
        after: further norms of the outputs of attention and MLP, before they are added (Gemma-2).
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    around_zero: bool = False
    after: bool = False

    def __post_init__(self) -> None:
        require_choice("norm.kind", self.kind, ("rms", "layer"))
        require(
            self.kind == "rms" or not self.around_zero,
            "norm.around_zero=true with norm.kind=layer; weights around zero are of norm.kind=rms.",
        )
        require(self.eps > 0, f"norm.eps is {self.eps}; it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig:
    """Multi-token prediction (MTP, https://arxiv.org/abs/2412.19437): layers that predict tokens after the next one.

    They train with the model, and share its embedding and head. Evaluation and generation leave them out.

    Attributes:
        num_layers: number of depths. Depth ``k`` predicts the token after the next ``k`` ones.
        loss_scale: factor of the mean of their losses in the objective.
        pattern: the layers of each depth, one symbol each, in a model with a ``layer_pattern``. Empty: one layer like
            the last one of the model.
    """

    num_layers: int = 1
    loss_scale: float = 0.1
    pattern: str = ""

    def __post_init__(self) -> None:
        require(self.num_layers >= 1, f"mtp.num_layers is {self.num_layers}; it must be at least 1, or leave mtp out.")
        require(self.num_layers <= MAX_LAYERS, f"mtp.num_layers is {self.num_layers}; it must be at most {MAX_LAYERS}.")
        require(self.loss_scale > 0, f"mtp.loss_scale is {self.loss_scale}; it must be above 0, or leave mtp out.")


@dataclass(frozen=True, kw_only=True)
class GPTBackendConfig:
    """The backend of each op. ``auto`` takes the best available one (``megalight doctor --all`` lists them).

    Attributes:
        attention, norm, rotary, activation, experts, cross_entropy, conv, scan, delta_rule: a backend's name.
    """

    attention: str = "auto"
    norm: str = "auto"
    rotary: str = "auto"
    activation: str = "auto"
    experts: str = "auto"
    cross_entropy: str = "auto"
    conv: str = "auto"
    scan: str = "auto"
    delta_rule: str = "auto"


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A decoder-only language model.

    Attributes:
        num_kv_heads: number of key-value heads. 0 means as many as query heads.
        head_dim: features per head. 0 means ``hidden_size / num_heads``.
        activation: a key of :data:`megalight.nn.mlp.ACTIVATIONS`.
        mlp_bias: whether the MLP has biases.
        tie_embeddings: whether the head and the word embedding share one weight.
        embedding_multiplier: factor of the word embedding.
        mixer_pattern: the mixers of the layers, repeated over the depth: ``attention``, ``latent_attention`` (MLA),
            ``conv`` (a gated short convolution), ``mamba`` (Mamba-2) or ``gated_delta_net``. ``[conv, conv,
            attention]`` means two layers with ``conv``, then one with ``attention``.
        layer_pattern: the layers of a hybrid model, one symbol each: ``M`` (Mamba-2), ``G`` (Gated DeltaNet), ``*``
            (the attention of ``mixer_pattern``), ``-`` (MLP), ``E`` (experts). Each is a single residual sublayer.
            Empty: every layer is a mixer and an MLP.
        attention_ratio, mlp_ratio: fractions of the layers that are attention and MLP, to make ``layer_pattern``
            from; the others are Mamba-2. If both are given, their numbers must agree with it.
        mamba: sizes of Mamba-2.
        delta: sizes of Gated DeltaNet.
        latent: sizes of ``latent_attention``. It decides over the sizes of heads in place of ``head_dim``.
        conv_kernel: number of tokens that a convolution sees.
        logit_softcap: if set, logits become ``softcap * tanh(logits / softcap)``.
        moe: layers with experts in place of the MLP. None: all layers are dense.
        mtp: layers that predict tokens after the next one, during training. None: there are none.

    Raises:
        ConfigurationError: sizes do not divide, or a value is out of range.
    """

    num_kv_heads: int = 0
    head_dim: int = 0
    activation: str = "swiglu"
    mlp_bias: bool = False
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logit_softcap: float | None = None
    mixer_pattern: tuple[str, ...] = ("attention",)
    layer_pattern: str = ""
    attention_ratio: float = 0.0
    mlp_ratio: float = 0.0
    mamba: MambaConfig | None = None
    delta: DeltaNetConfig | None = None
    latent: LatentConfig | None = None
    conv_kernel: int = 3
    norm: NormConfig = field(default_factory=NormConfig)
    position: PositionConfig = field(default_factory=PositionConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEConfig | None = None
    mtp: MultiTokenConfig | None = None
    backends: GPTBackendConfig = field(default_factory=GPTBackendConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixer_pattern", tuple(self.mixer_pattern))
        require(bool(self.mixer_pattern), "mixer_pattern is empty; give one entry per layer of the pattern.")
        for mixer in self.mixer_pattern:
            require_choice("an entry of mixer_pattern", mixer, MIXERS)
        self._check_layers()
        self._settle_heads()
        self._check_positions()
        self._check_activation()
        require(
            self.logit_softcap is None or 0 < self.logit_softcap < inf,
            f"logit_softcap is {self.logit_softcap}; it must be above 0 and finite, or null.",
        )
        require(
            not (self.norm.after and self.layer_pattern),
            "norm.after=true with a layer_pattern, whose layers have no norm after them; leave one of them out.",
        )
        require(self.conv_kernel >= 2, f"conv_kernel is {self.conv_kernel}; it must be at least 2.")
        check_layer_settings(self)

    def _settle_heads(self) -> None:
        """Give heads their numbers and sizes, so that no other code need know what 0 means, and check them."""
        if self.latent is not None:
            # Before heads are derived: latent attention has sizes of its own.
            self._check_latent(self.latent)
            # Heads of latent attention have both kinds of features.
            object.__setattr__(self, "head_dim", self.latent.head_dim + self.latent.rotary_dim)
        require(
            self.latent is not None or "latent_attention" not in self.mixer_pattern,
            "mixer_pattern has latent_attention without its sizes; set latent.kv_rank and the others.",
        )
        if not self.head_dim:
            check_heads(self.hidden_size, self.num_heads, OR_HEAD_DIM)
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)
        self._require_positive("num_kv_heads", "head_dim")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; each key-value head "
            "serves the same number of query heads, so choose a divisor.",
        )

    def _check_positions(self) -> None:
        """Check what rotates queries and keys."""
        require(
            self.position.kind != "rope" or self.rotary_dim >= 2,
            f"position.fraction {self.position.fraction} of head_dim {self.head_dim} is less than two features; "
            "raise either, or choose position.kind none.",
        )
        axes = self.position.axes
        require(
            axes is None or 2 * sum(axes.sections) == self.rotary_dim,
            f"position.axes.sections are {axes and list(axes.sections)}; they must sum to {self.rotary_dim // 2}, the "
            "number of rotated pairs of a head.",
        )
        scaling = self.position.scaling
        require(
            scaling is None or scaling.kind != "ntk" or self.rotary_dim >= 4,
            f"position.scaling.kind is ntk with {self.rotary_dim} rotated features; it keeps the first of several "
            "pairs and needs at least 4.",
        )

    def _check_activation(self) -> None:
        """Check that options of experts go with the activation."""
        gated = is_gated(self.activation)
        require(
            self.activation in ("swiglu", "quick_geglu") or self.moe is None or not self.moe.fp8_input_store,
            f"moe.fp8_input_store=true with activation={self.activation!r}; it is made for swiglu and quick_geglu, "
            "whose input is twice as wide as their output. Leave it out, or choose one of these.",
        )
        require(
            gated or self.moe is None or not (self.moe.glu_offset or self.moe.clamp),
            f"moe.glu_offset and moe.clamp belong to gated activations, and activation is {self.activation!r}. Leave "
            "them out, or choose a gated one, such as quick_geglu.",
        )

    def _check_layers(self) -> None:
        """Make the pattern of a hybrid model from its ratios, and check it."""
        if self.attention_ratio or self.mlp_ratio:
            made = spread(self.num_layers, self.attention_ratio, self.mlp_ratio)
            pattern = self.layer_pattern or made
            require(
                all(pattern.count(symbol) == made.count(symbol) for symbol in "*-"),
                f"layer_pattern {pattern!r} has {pattern.count('*')} attention and {pattern.count('-')} MLP layers, "
                f"but attention_ratio={self.attention_ratio} and mlp_ratio={self.mlp_ratio} give {made.count('*')} and "
                f"{made.count('-')}. Leave out the ratios, or the pattern.",
            )
            object.__setattr__(self, "layer_pattern", pattern)
        experts = 0 if self.moe is None else self.moe.num_experts
        require(
            self.num_layers * experts <= MAX_BLOCKS,
            f"num_layers={self.num_layers} times moe.num_experts={experts} is {self.num_layers * experts}; it must be "
            f"at most {MAX_BLOCKS}.",
        )
        mixers = set(self.mixer_pattern)
        if self.layer_pattern:
            check_pattern(self.layer_pattern, self.num_layers)
            require(not self.norm.after, "norm.after has no meaning with a layer_pattern; leave one of them out.")
            require(
                len(mixers) == 1 and not mixers & {"mamba", "gated_delta_net", "conv"},
                f"mixer_pattern is {list(self.mixer_pattern)} with a layer_pattern, whose symbol * it gives a meaning; "
                "it must be one kind of attention.",
            )
            if self.mtp is not None:
                check_symbols("mtp.pattern", self.mtp.pattern)
            symbols = set(self._symbols)
            mixers = {SYMBOL_MIXERS[symbol] for symbol in symbols & SYMBOL_MIXERS.keys()}
            require(
                ("E" in symbols) == (self.moe is not None),
                f"layer_pattern {self._symbols!r} and moe disagree: set moe exactly if there are layers E.",
            )
            require(
                self.moe is None or all(self.moe.pattern),
                "moe.pattern is set with a layer_pattern, whose symbol E chooses the layers; leave moe.pattern out.",
            )
        require(
            bool(self.layer_pattern) or self.mtp is None or not self.mtp.pattern,
            f"mtp.pattern is {self.mtp and self.mtp.pattern!r} in a model without layer_pattern, whose depths have one "
            "layer like its last one; leave it out.",
        )
        require(
            ("mamba" in mixers) == (self.mamba is not None),
            "layers with Mamba-2 (M in layer_pattern, or mamba in mixer_pattern) and the setting mamba belong "
            "together; give both, or none.",
        )
        require(
            ("gated_delta_net" in mixers) == (self.delta is not None),
            "layers with Gated DeltaNet (G in layer_pattern, or gated_delta_net in mixer_pattern) and the setting "
            "delta belong together; give both, or none.",
        )

    def _check_latent(self, latent: LatentConfig) -> None:
        require(
            "latent_attention" in self.mixer_pattern,
            "latent is set, and no entry of mixer_pattern is latent_attention; add it, or leave latent out.",
        )
        require(
            "attention" not in self.mixer_pattern,
            "mixer_pattern has attention and latent_attention, whose rotary tables differ; choose one of them.",
        )
        size = latent.head_dim + latent.rotary_dim
        require(
            self.head_dim in (0, size) and self.num_kv_heads in (0, self.num_heads),
            f"head_dim is {self.head_dim} and num_kv_heads {self.num_kv_heads} with latent attention, whose heads have "
            f"latent.head_dim + latent.rotary_dim = {size} features, and where every query head has a key head. Leave "
            "both out.",
        )
        attention = self.attention
        require(
            not attention.output_gate and attention.temperature is None,
            "attention.output_gate and attention.temperature have no meaning in latent attention; leave them out.",
        )
        require(
            attention.softmax != "learnable",
            "attention.softmax is learnable with latent attention, which has no sinks; choose vanilla or off-by-one.",
        )
        require(
            not (attention.qkv_bias or attention.proj_bias or attention.qk_norm or attention.qk_l2_norm)
            and self.position.fraction == 1,
            "attention.qkv_bias, attention.proj_bias, attention.qk_norm, attention.qk_l2_norm and position.fraction "
            "have no meaning in latent attention; leave them out.",
        )

    def mixer_of(self, layer: int) -> str | None:
        """Return the name of the mixer of the layer with this index; None if the layer is a feed-forward layer."""
        # Without a pattern, every layer is like one with attention's symbol.
        symbol = self._symbols[layer] if self.layer_pattern else "*"
        attention = {"*": self.mixer_pattern[layer % len(self.mixer_pattern)]}
        return (SYMBOL_MIXERS | attention).get(symbol)

    def has_mlp(self, layer: int) -> bool:
        """Return whether the layer with this index has a feed-forward layer, dense or of experts."""
        return not self.layer_pattern or self._symbols[layer] in "-E"

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer with this index has experts."""
        if self.layer_pattern:
            return self._symbols[layer] == "E"
        # Repeated over the depth, like other patterns.
        return self.moe is not None and self.moe.pattern[layer % len(self.moe.pattern)]

    @property
    def num_sublayers(self) -> int:
        """Number of additions to the residual stream."""
        # Layers of a pattern add once each.
        return self.num_layers if self.layer_pattern else super().num_sublayers

    @property
    def num_depths(self) -> int:
        """Number of depths of multi-token prediction."""
        return 0 if self.mtp is None else self.mtp.num_layers

    @property
    def depth_layers(self) -> tuple[int, ...]:
        """Indices of the layers of a depth, as :meth:`mixer_of` takes them.

        Those of a pattern go on from the last layer. Other depths have one like that: patterns of the model end there.
        """
        count = 0 if self.mtp is None else len(self.mtp.pattern)
        return tuple(range(self.num_layers, self.num_layers + count)) or (self.num_layers - 1,)

    @property
    def _symbols(self) -> str:
        return self.layer_pattern + ("" if self.mtp is None else self.mtp.pattern)

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner width of each expert; 0 without experts."""
        return 0 if self.moe is None else self.moe.ffn_hidden_size or self.ffn_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated. It is even."""
        if self.latent is not None:
            return self.latent.rotary_dim
        # Rounded down to pairs: an odd feature has no partner.
        return int(self.head_dim * self.position.fraction) // 2 * 2


# Layer patterns of hybrid models: one symbol per layer


SYMBOLS = {"M": "Mamba-2", "G": "Gated DeltaNet", "*": "attention", "-": "MLP", "E": "experts"}
"""Symbol -> what the layer is."""


def check_symbols(name: str, pattern: str) -> None:
    """Check the symbols of a pattern.

    Raises:
        ConfigurationError: a symbol is unknown.
    """
    known = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in SYMBOLS.items())
    for place, symbol in enumerate(pattern):
        require(symbol in SYMBOLS, f"{name} has the unknown symbol {symbol!r} for layer {place}; known: {known}.")


def check_pattern(pattern: str, num_layers: int) -> None:
    """Check symbols and length of a pattern.

    Raises:
        ConfigurationError: a symbol is unknown, or the pattern is not as long as the model is deep.
    """
    check_symbols("layer_pattern", pattern)
    require(
        len(pattern) == num_layers,
        f"layer_pattern has {len(pattern)} symbols and num_layers is {num_layers}; give one symbol for each layer.",
    )


def spread(num_layers: int, attention_ratio: float, mlp_ratio: float = 0.0) -> str:
    """Return a pattern with these fractions of attention and MLP layers, spread evenly; the others are Mamba-2.

    Attention lies between equal runs of other layers, so the first and the last layer are not attention. MLP layers
    replace Mamba-2 layers, so that equal runs of these come before each.

    Raises:
        ConfigurationError: a ratio is negative, too small to give a layer, or both leave no layer for Mamba-2.
    """
    for name, ratio in (("attention_ratio", attention_ratio), ("mlp_ratio", mlp_ratio)):
        require(
            ratio == 0 or 0.5 < num_layers * ratio < num_layers,
            f"{name}={ratio} of {num_layers} layers gives none such, or no other; choose one from {1 / num_layers:.3g} "
            f"to {1 - 1 / num_layers:.3g}, or leave it out.",
        )
    # Rounded, so that the same ratio fits models of any depth.
    attention, mlp = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    require(
        attention + mlp < num_layers,
        f"attention_ratio={attention_ratio} and mlp_ratio={mlp_ratio} of {num_layers} layers; they must leave "
        "layers for Mamba-2. Lower one of them.",
    )
    pattern = ["M"] * num_layers
    # As Megatron-LM places them, so that its ratios give the same layers.
    _place(pattern, list(range(num_layers)), "*", (num_layers - attention) / (attention + 1), attention)
    # MLP layers after attention: runs are counted among the layers that are still Mamba-2.
    free = [layer for layer in range(num_layers) if pattern[layer] == "M"]
    _place(pattern, free, "-", (len(free) - mlp) / mlp if mlp else 0.0, mlp)
    return "".join(pattern)


def _place(pattern: list[str], free: list[int], symbol: str, run: float, count: int) -> None:
    """Put ``count`` symbols at free places, each after a run of ``run`` others on average."""
    # Runs are fractions: what is left of one goes into the next, so that gaps differ by one layer at most.
    left = run
    for layer in free:
        if left < 0.5 and count:
            pattern[layer], left, count = symbol, left + run, count - 1
        else:
            left -= 1


# Validation: settings that act in some layers only must reach one


ATTENTION = {"attention", "latent_attention"}
"""Mixers that attend."""


def check_layer_settings(config: GPTConfig) -> None:
    """Check that settings of attention, rotation, experts and convolutions reach a layer.

    A pattern may be longer than the model is deep: what only a mixer behind the last layer would use is not checked.

    Raises:
        ConfigurationError: one reaches none.
    """
    layers = sorted({*range(config.num_layers), *config.depth_layers})
    attending = [layer for layer in layers if config.mixer_of(layer) in ATTENTION]
    if attending:
        _check_local(config, attending)
        _check_rotated(config, attending)
    elif config.layer_pattern or not ATTENTION & set(config.mixer_pattern):
        stated = stated_of(config.attention)
        require(
            not stated,
            f"{', '.join(stated)} are set, and no layer has attention; leave them out, or give layers attention.",
        )
        require(
            config.latent is None,
            f"latent is set, and layer_pattern {config.layer_pattern!r} has no attention (*); leave latent and "
            "mixer_pattern out, or give layers attention.",
        )
    moe = config.moe
    require(
        moe is None or any(config.has_experts(layer) for layer in layers),
        f"moe.pattern gives experts from layer {moe.pattern.index(True) if moe else 0} on, and num_layers is "
        f"{config.num_layers}; change the pattern, or leave moe out.",
    )
    require(
        config.conv_kernel == type(config).conv_kernel or "conv" in config.mixer_pattern,
        f"conv_kernel is {config.conv_kernel}, and no entry of mixer_pattern is conv. Mamba-2 and Gated DeltaNet have "
        "mamba.conv_kernel and delta.conv_kernel; leave it out.",
    )


def stated_of(attention: AttentionConfig) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    default = type(attention)()
    return [
        f"attention.{field.name}"
        for field in fields(attention)
        if getattr(attention, field.name) != getattr(default, field.name)
    ]


def _check_local(config: GPTConfig, attending: list[int]) -> None:
    attention = config.attention
    local = [layer for layer in attending if attention.is_local(layer)]
    sized = "window" if attention.window is not None else "chunk"
    require(
        bool(local) or (attention.window is None and attention.chunk is None),
        f"attention.{sized} is {getattr(attention, sized)}, and attention.window_pattern "
        f"{list(attention.windowed)} gives it to no layer with attention, which are {attending}. Change the pattern, "
        f"or leave attention.{sized} out.",
    )
    require(
        config.position.local_base is None or any(config.position.rotates(layer) for layer in local),
        f"position.local_base is {config.position.local_base}, and no layer that rotates has a window or chunks; set "
        "attention.window, or leave it out.",
    )


def _check_rotated(config: GPTConfig, attending: list[int]) -> None:
    position, attention = config.position, config.attention
    rotated = [layer for layer in attending if position.rotates(layer)]
    require(
        position.kind != "rope" or bool(rotated),
        f"position.pattern {list(position.pattern)} rotates no layer with attention, which are {attending}. Change it; "
        "for no rotation at all, set position.kind=none.",
    )
    require(
        not attention.qk_l2_norm or bool(rotated),
        f"attention.qk_l2_norm=true with position.kind={position.kind}; it norms in layers that rotate. Set "
        "position.kind=rope, or choose attention.qk_norm.",
    )
    require(
        attention.temperature is None or len(rotated) < len(attending),
        "attention.temperature is set, and all layers with attention rotate; it scales queries of layers that do not. "
        "Set position.pattern or position.kind, or leave it out.",
    )
