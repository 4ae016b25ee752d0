"""Give the attention of layers 8-bit products, and say which attention cannot have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.nn import Attention, InnerAttention
from megalight.ops.fp8_attention import FP8Attention, Spec, sizes_why_not

KERNELS = "transformer_engine"
"""The backend with real products, from Blackwell on. There is none of our own."""


def check_fp8_attention(layers: Mapping[str, nn.Module]) -> None:
    """Check that the attention of all layers can have 8-bit products.

    Args:
        layers: name -> layer.

    Raises:
        ConfigurationError: one cannot, or there is none.
    """
    found = 0
    for name, module in _cores(layers):
        found += 1
        reason = _why_not(module)
        if reason is not None:
            raise ConfigurationError(
                f"fp8_attention=True, and {name} {reason}; leave fp8_attention out, or leave these layers in their own "
                "dtype with first_layers and last_layers."
            )
    if not found:
        raise ConfigurationError(
            "fp8_attention=True, and no layer that multiplies in 8 bits has attention; leave it out."
        )


def give_fp8_attention(layers: Mapping[str, nn.Module], spec: Spec, *, emulate: bool) -> None:
    """Let the attention of all layers multiply in 8 bits.

    Args:
        layers: name -> layer, which :func:`check_fp8_attention` found to fit.
        spec: device, dtype and format of gradients; the rest comes from each layer.
        emulate: compute in float64 from the decoded values.

    Raises:
        ConfigurationError: as for :func:`check_fp8_attention`.
        BackendError: the device has no such products.
    """
    check_fp8_attention(layers)
    for name, module in _cores(layers):
        assert isinstance(module, Attention) and isinstance(module.inner, InnerAttention)
        inner = module.inner
        asked = spec._replace(head_dim=module.head_dim, causal=inner.causal, scale=inner.scale)
        inner.fp8 = FP8Attention(name, asked, "reference" if emulate else KERNELS)


def remove_fp8_attention(model: nn.Module) -> None:
    """Let every attention multiply in the dtype of its queries again."""
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.fp8 = None


def _cores(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that holds an attention core, with its name in the model."""
    for path, layer in layers.items():
        for name, module in layer.named_modules():
            # Whatever has a core is looked at, also kinds of attention that are unknown here: none is passed over.
            if isinstance(getattr(module, "inner", None), nn.Module) and not isinstance(module.inner, Attention):
                yield f"{path}.{name}", module


def _why_not(module: nn.Module) -> str | None:
    inner = module.inner
    if type(module) is not Attention:
        return f"is {type(module).__name__}, which has products of its own"
    if type(inner) is not InnerAttention:
        return f"attends through {type(inner).__name__}, which divides sequences over ranks or has no 8-bit form"
    for name in ("window", "chunk", "softcap", "dropout", "mutual"):
        if value := getattr(inner, name):
            return f"has {name}={value!r}, which 8-bit attention lacks"
    if inner.softmax != "vanilla":
        return f"has softmax={inner.softmax!r}, and 8-bit attention has no sinks"
    return sizes_why_not(Spec("cpu", torch.float32, module.head_dim))
