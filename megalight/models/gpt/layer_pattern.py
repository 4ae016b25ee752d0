"""Patterns of hybrid models: one symbol per layer, each a single residual sublayer."""

from __future__ import annotations

from megalight.models.config import require

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
