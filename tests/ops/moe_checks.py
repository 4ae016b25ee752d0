"""Checks of the ops of mixture of experts: each backend against the float64 reference, in extreme routes too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalight.ops import grouped_scaled as scaled_reference
from megalight.ops.activation import weighted
from megalight.ops.grouped_scaled import accumulate, columns, reference_product
from megalight.ops.permute import most_rows, reference_permutation, reference_permute, reference_unpermute
from megalight.ops.quantize import Scheme, quantize
from megalight.ops.router import Rule, reference_route, reference_statistics
from tests.ops.checks import TOLERANCE, check, error, poisoned

RULES = [
    Rule(1, pre_softmax=True),
    Rule(1, "sigmoid"),
    Rule(3),
    Rule(4, pre_softmax=True, scale=2.5),
    Rule(4, "sigmoid", scale=0.5),
    Rule(4, "sigmoid", num_groups=4, group_top_k=2, scale=2.5),
    Rule(6, num_groups=4, group_top_k=3),
    Rule(4, pre_softmax=True, num_groups=8, group_top_k=4),
    Rule(6, pre_softmax=True, num_groups=4, group_top_k=2, group_experts=1, scale=16.0),
    Rule(2, "sigmoid", num_groups=4, group_top_k=3, group_experts=2),
]
"""For 16 experts."""

ROUTES = ("random", "one expert", "empty experts", "one token", "no tokens", "elsewhere")
"""Names of sets of routes, the extreme ones included."""


def routes(name: str, device: str = "cpu") -> tuple[Tensor, int]:
    """Return ``experts [T, k]`` and the number of experts."""
    generator = torch.Generator().manual_seed(3)
    if name == "one token":
        found, count = torch.tensor([[4, 0]]), 6
    elif name == "no tokens":
        found, count = torch.zeros(0, 2, dtype=torch.long), 4
    elif name == "one expert":
        found, count = torch.full((37, 1), 2), 5
    elif name == "empty experts":
        found, count = torch.rand(50, 3, generator=generator).argsort(-1) * 2 + 1, 7
    else:
        found, count = torch.rand(61, 8, generator=generator).argsort(-1)[:, :3], 8
        if name == "elsewhere":  # some are dropped, others belong to the experts of another rank
            found = torch.where(torch.rand(found.shape, generator=generator) < 0.3, -1, found) + 2
    return found.to(device), count


GROUPS = [(5, 0, 17, 3), (0, 0, 64), (33,), (0, 0), (16, 48, 16)]
"""Sizes of groups, the extreme ones included."""


def offsets_of(sizes: Sequence[int], device: str = "cpu") -> Tensor:
    """The ends of groups."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).int().to(device)


def check_grouped_product(
    run: Callable[..., Tensor],
    device: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    out: int,
    width: int,
    tail: int = 0,
) -> None:
    """Both directions, with sizes on the host or not; ``tail`` rows after the last group hold NaN."""
    offsets = offsets_of(sizes, device)
    weight = torch.randn(len(sizes), out, width, device=device).to(dtype)
    for transposed in (True, False):
        x = torch.randn(sum(sizes) + tail, width if transposed else out, device=device).to(dtype)
        parts = x[: sum(sizes)].double().split(list(sizes))
        factors = weight.double().mT if transposed else weight.double()
        expected = torch.cat([part @ factor for part, factor in zip(parts, factors.unbind(), strict=True)])
        x[sum(sizes) :] = torch.nan
        for known in (None, sizes) if device == "cpu" else (sizes,):
            with poisoned():
                found = run(x, weight, offsets, known, transposed)
            assert found.dtype == dtype
            assert found.shape == (len(x), factors.shape[2])
            assert error(found[: sum(sizes)], expected, 1.0) <= TOLERANCE[dtype]


def check_grouped_weight_gradient(
    run: Callable[..., None],
    device: str,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    sizes: Sequence[int],
    out: int,
    width: int,
    tail: int = 0,
) -> None:
    """Added to what there is; and written over it, be it not a number, for experts without rows too."""
    rows = sum(sizes)
    grad_y = torch.randn(rows + tail, out, device=device).to(dtype)
    x = torch.randn(rows + tail, width, device=device).to(dtype)
    main_grad = torch.randn(len(sizes), out, width, device=device).to(main_dtype)
    parts = zip(grad_y[:rows].double().split(list(sizes)), x[:rows].double().split(list(sizes)), strict=True)
    product = torch.stack([g.T @ r for g, r in parts])
    expected = main_grad.double() + product
    grad_y[rows:], x[rows:] = torch.nan, torch.nan
    written = torch.full_like(main_grad, torch.nan)
    for target, write in ((main_grad, False), (written, True)):
        run(target, grad_y, x, offsets_of(sizes, device), sizes, write)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5}.get(main_dtype, 8e-3)
    for found, right in ((main_grad, expected), (written, product)):
        assert error(found, right, 1.0) <= tolerance, error(found, right)


def check_scaled_products(module: Any, sizes: Sequence[int], out: int, width: int, tail: int, gradient: Any) -> None:
    """The three quantized products, with gradients in either format; ``tail`` rows after the last group hold NaN."""
    offsets, total, value = offsets_of(sizes), sum(sizes), Scheme("e4m3", (1, 0))
    weight = torch.randn(len(sizes), out, width)
    x, grad = torch.randn(total + tail, width), torch.randn(total + tail, out)
    x[total:], grad[total:] = torch.nan, torch.nan
    rows, factor = quantize(x, value), quantize(weight.flatten(0, 1), value)
    factor_t = columns(weight, value, None, None)
    for a, b, fast in ((rows, factor, True), (rows, factor, False), (quantize(grad, gradient), factor_t, False)):
        found = module.product(a, b, offsets, torch.float32, fast)
        exact = reference_product(a, b, offsets, torch.float32, fast)
        assert error(found[:total], exact[:total], 1.0) <= 1e-5
    casts = [module.columns(*given, offsets, None) for given in ((grad, gradient), (x, value))]
    for cast, given in zip(casts, ((grad, gradient), (x, value)), strict=True):
        right = columns(*given, offsets, None)
        assert torch.equal(cast.scale, right.scale)
        assert cast.data.shape == right.data.shape
        filled = 128 * sum(-(-size // 128) for size in sizes)
        # The interpreter rounds to 8 bits by cutting off.
        quantized, exact = (t.data[:, :filled].float() for t in (cast, right))
        assert (quantized - exact).norm() <= 0.15 * exact.norm()
    one = torch.rand(len(sizes), 1).add(1.0)
    for amax in (one.expand(-1, out), one * torch.linspace(1, 2, out), torch.rand(out, len(sizes)).add(1.0).t()):
        kinds = (module, scaled_reference)
        cast, right = (kind.columns(grad, gradient, offsets, amax) for kind in kinds)
        assert torch.equal(cast.scale, right.scale)
    cast, right = (kind.columns(weight, value, None, None) for kind in (module, scaled_reference))
    assert torch.equal(cast.scale, right.scale)
    assert error(cast.data.float(), right.data.float()) <= 0.15
    for start, write in ((1.0, False), (torch.nan, True)):
        found, exact = torch.full_like(weight, start), torch.full_like(weight, start)
        module.accumulate(found, *casts, offsets, write)
        accumulate(exact, *casts, offsets, write)
        assert error(found, exact, 1.0) <= 1e-5


def check_permutation(
    module: Any, device: str, name: str, alignment: int, capacity: int | None, dtype: torch.dtype, size: int = 70
) -> None:
    """The rows of all pairs; and both directions with their gradients, with probabilities and without."""
    experts, num_experts = routes(name, device)
    rows = most_rows(experts.numel(), num_experts, alignment) if capacity is None else capacity * num_experts
    where = module.permutation(experts, num_experts, alignment, capacity, rows)
    exact = reference_permutation(experts, num_experts, alignment, capacity, rows)
    for name in ("positions", "sizes", "offsets"):
        found, right = getattr(where, name), getattr(exact, name)
        assert found.dtype == right.dtype
        assert torch.equal(found, right), name
    x, grouped = (torch.randn(count, size, device=device).to(dtype) for count in (len(experts), rows))
    probs = torch.rand(experts.shape, device=device).to(dtype)
    for inputs in ((x, probs), (x,)):
        check(
            lambda x, p=None: _present(module.permute(x, where, p)),
            lambda x, p=None: _present(reference_permute(x, exact, p)),
            inputs,
        )
    for inputs in ((grouped, probs), (grouped,)):
        check(
            lambda r, p=None: module.unpermute(r, where, p),
            lambda r, p=None: reference_unpermute(r, exact, p),
            inputs,
        )


def _present(found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(t for t in found if t is not None)


def check_route(module: Any, device: str, rule: Rule, tokens: int, num_experts: int, biased: bool) -> None:
    logits = 2 * torch.randn(tokens, num_experts, device=device)
    logits[::3] = logits[::3].round()  # equal scores
    bias = torch.randn(num_experts, device=device) if biased else None
    found, exact = module.route(logits, rule, bias), reference_route(logits, rule, bias)
    same = (found.experts == exact.experts).all(-1)
    # sigmoids that differ by rounding may change places; float64 is exact enough for the values of the same experts
    assert int((~same).sum()) <= tokens // 100
    chosen = exact.experts[same]
    check(lambda x: module.route(x, rule, bias).probs, lambda x: _probs(x, rule, chosen), (logits[same],))


def _probs(logits: Tensor, rule: Rule, experts: Tensor) -> Tensor:
    """The probabilities of given experts."""
    if rule.score == "sigmoid":
        probs = logits.sigmoid().gather(1, experts)
        return rule.scale * (probs / probs.sum(-1, keepdim=True) if rule.k > 1 else probs)
    if rule.pre_softmax:
        return rule.scale * logits.softmax(-1).gather(1, experts)
    return rule.scale * logits.gather(1, experts).softmax(-1)


def check_statistics(
    module: Any, device: str, score: str, tokens: int, num_experts: int, pools: bool, masked: bool
) -> None:
    logits = torch.randn(tokens, num_experts, device=device)
    bounds = torch.tensor([0, 5, 5, 6, tokens], dtype=torch.int32, device=device) if pools else None
    mask = torch.rand(tokens, device=device) > 0.3 if masked else None
    rule = Rule(2, score)
    check(
        lambda x: (module.statistics(x, rule, bounds, mask).scores, module.statistics(x, rule, bounds, mask).squares),
        lambda x: reference_statistics(x, rule, bounds, mask)[::2],
        (logits,),
    )
    counts = module.statistics(logits, rule, bounds, mask).counts
    assert torch.equal(counts, reference_statistics(logits, rule, bounds, mask).counts)


def check_weighted(module: Any, device: str, dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    """Gates with and without weights, offset and clamp; and a plain activation with weights."""
    x = 2 * torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype)
    weights = torch.rand(shape[:-1], device=device).to(dtype)
    for offset, clamp in ((0.0, None), (1.0, 0.7)):
        for inputs in ((x, weights), (x,)):
            check(
                lambda x, w=None, offset=offset, clamp=clamp: module.weighted(x, kind, True, w, offset, clamp),
                lambda x, w=None, offset=offset, clamp=clamp: weighted(x, kind, True, w, offset, clamp),
                inputs,
            )
    check(
        lambda x, w: module.weighted(x, kind, False, w, 0.0, None),
        lambda x, w: weighted(x, kind, False, w, 0.0, None),
        (x, weights),
    )
