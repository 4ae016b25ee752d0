"""Operations, one folder or file each: a reference in plain torch, and faster backends."""

from __future__ import annotations

import importlib

OPS = (
    "attention",
    "attention_block",
    "attention_merge",
    "fp8_attention",
    "norm",
    "rotary",
    "latent_heads",
    "activation",
    "linear",
    "embedding",
    "cross_entropy",
    "divergence",
    "adam",
    "quantize",
    "cast_flat",
    "scaled_mm",
    "scaled_accumulate",
    "router",
    "permute",
    "grouped_linear",
    "grouped_scaled",
    "causal_conv",
    "ssd",
    "delta_rule",
    "gated_norm",
    "quantized_weight",
    "sum_rows",
    "sum_terms",
)
"""Names of the modules in this folder, one per op."""


def tables(device: str) -> dict[str, list[tuple[str, str | None]]]:
    """Every op's backends for tensors on ``device`` (a device type): what ``megalight doctor --all`` prints.

    Returns:
        op -> ``(backend, why it cannot serve a typical bfloat16 request, or None)``, highest priority first.
    """
    found = {}
    for name in OPS:
        op = importlib.import_module(f"megalight.ops.{name}")
        for registry in op.REGISTRIES:
            rows = registry.table(op.EXAMPLE._replace(device=device))
            found[registry.op] = [(backend.name, reason) for backend, reason in rows]
    return found
