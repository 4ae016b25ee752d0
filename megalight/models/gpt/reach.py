"""Settings that act in some layers only. Each must reach one, or it would do nothing without a word."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from megalight.models.config import require

if TYPE_CHECKING:
    from megalight.models.gpt.attention_config import AttentionConfig
    from megalight.models.gpt.config import GPTConfig

ATTENTION = {"attention", "latent_attention"}
"""Mixers that attend."""


def check_reach(config: GPTConfig) -> None:
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
