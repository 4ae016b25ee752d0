"""Advice for error messages: what is wrong with a layout, and which layouts work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalight.parallel.pipeline.grammar import compose
from megalight.parallel.pipeline.picture import picture


def wrong_symbols(stages: Sequence[str], num_layers: int, num_mtp: int) -> str:
    """Return why the symbols of ``stages`` do not describe a model of ``num_layers`` layers; empty if they do."""
    whole = "".join(stages)
    for symbol, name, place in (("E", "embedding", 0), ("L", "loss", -1)):
        end = "last" if place else "first"
        if whole.count(symbol) != 1:
            # One reason only, the first in reading order: the next ones are often consequences of it.
            return f"{symbol!r} ({name}) occurs {whole.count(symbol)} times. Write it once, in the {end} stage."
        if not stages[place] or stages[place][place] != symbol:
            return f"{symbol!r} ({name}) must be the {end} symbol of the {end} stage. Move it there."
    if whole.count("m") != num_mtp:
        has = f"{num_mtp}. Write {num_mtp}." if num_mtp else "none. Remove them."
        return f"it names {whole.count('m')} multi-token-prediction layers 'm', but the model has {has}"
    if num_mtp and not any("m" * num_mtp in stage for stage in stages):
        return "multi-token-prediction layers 'm' are on different stages. Put them on one stage."
    if "t" in whole[whole.find("m") :] and num_mtp:
        return "layers 't' follow multi-token-prediction layers 'm'. Put the layers first."
    if (found := whole.count("t")) != num_layers:
        much = f"{abs(found - num_layers)} too {'many' if found > num_layers else 'few'}"
        return f"it names {found} layers 't', but the model has {num_layers}: {much}."
    return ""


def instead_of_even(num_layers: int, pp: int, vpp: int, counted: int, num_mtp: int = 0) -> str:
    """Return advice for ``num_layers`` layers that do not fill the stages evenly.

    Args:
        num_layers: layers of the model.
        pp, vpp: pipeline ranks, and chunks on each.
        counted: layers, with embedding and loss if they count as layers.
        num_mtp: multi-token-prediction layers, which come on top.
    """
    stages = pp * vpp
    # Embedding and loss stay counted as they were, so that the advice changes one number only.
    low = counted // stages * stages - (counted - num_layers)
    near = [str(count) for count in (low, low + stages) if count >= stages and count != num_layers]
    ways = [f"take {' or '.join(near)} layers", *_counting(num_layers, stages)]
    return _advice(num_layers, pp, vpp, [*ways, *_ends(num_layers, pp, vpp)], num_mtp)


def instead_of_uneven(num_layers: int, pp: int, vpp: int, first: int | None, last: int | None, num_mtp: int = 0) -> str:
    """Return advice for a first and a last rank whose layers leave a rest that the others cannot share."""
    ways = [] if num_layers % (pp * vpp) else ["remove first and last, for an even split"]
    return _advice(num_layers, pp, vpp, [*ways, *_ends(num_layers, pp, vpp, first, last)], num_mtp)


def _advice(num_layers: int, pp: int, vpp: int, ways: list[str], num_mtp: int) -> str:
    """Join ``ways`` and a layout that works, with its picture."""
    # Even with embedding and loss on stages of their own, some stages would be empty.
    if num_layers + 2 < pp * vpp:
        return f"{num_layers} layers, embedding and loss fill {num_layers + 2} stages at most; lower pp or vpp."
    layout = balanced(num_layers, pp * vpp, num_mtp)
    text = ", or ".join([*ways, f"give this layout: {compose(layout)!r}"])
    return f"{text[0].upper()}{text[1:]}\n{picture(layout, pp)}"


def balanced(num_layers: int, stages: int, num_mtp: int = 0) -> tuple[str, ...]:
    """Return stages that are as equal as possible if embedding and loss count as one layer each.

    Stages with one layer less are at the ends: the embedding and the loss take time too.

    Args:
        num_layers: layers of the model.
        stages: at least 2, and at most ``num_layers + 2``.
        num_mtp: multi-token-prediction layers, which come on top.
    """
    share, more = divmod(num_layers + 2, stages)
    start = (stages - more + 1) // 2
    counts = [share + (start <= index < start + more) for index in range(stages)]
    held = ["t" * (count - (index in (0, stages - 1))) for index, count in enumerate(counts)]
    return ("E" + held[0], *held[1:-1], held[-1] + "m" * num_mtp + "L")


def _counting(num_layers: int, stages: int) -> Iterator[str]:
    """Yield advice to count the embedding or the loss as a layer, if this divides."""
    if (num_layers + 1) % stages == 0 and num_layers >= 2 * stages - 1:
        yield "count the embedding or the loss as a layer"
    if (num_layers + 2) % stages == 0 and num_layers >= 2 * stages - 2:
        yield "count the embedding and the loss as layers"


def _ends(num_layers: int, pp: int, vpp: int, first: int | None = None, last: int | None = None) -> Iterator[str]:
    """Yield numbers of layers for the first and last rank that divide, close to the given ones or to equal shares."""
    # With two ranks there is no other rank that takes a rest.
    if pp < 3 or num_layers < pp * vpp:
        return
    near = [num_layers / pp if count is None else count for count in (first, last)]
    # Eight on each side: enough to find the nearest fit, and few pairs to try.
    counts = [sorted(range(vpp, num_layers, vpp), key=lambda count: abs(count - at))[:8] for at in near]
    fits = [
        (a, b)
        for a in counts[0]
        for b in counts[1]
        if (rest := num_layers - a - b) > 0 and rest % ((pp - 2) * vpp) == 0
    ]
    if fits:
        # Of equal distances the one with fewer layers on the first rank, which holds the embedding too.
        a, b = min(fits, key=lambda pair: (abs(pair[0] - near[0]) + abs(pair[1] - near[1]), pair[0] > pair[1]))
        yield f"let the first rank hold {a} layers and the last {b}"
