"""Checks that a backend equals the float64 reference, forward and backward."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megalight.ops import causal_conv, gated_norm, latent_heads, quantized_weight, sum_rows, sum_terms
from megalight.ops.activation import reference_activation, reference_gated, reference_gated_pair
from megalight.ops.adam import QuantizedOutput, exponents_like, read_moment, reference_adam_step
from megalight.ops.attention import reference_attention
from megalight.ops.common import wide
from megalight.ops.cross_entropy import reference_linear_cross_entropy
from megalight.ops.delta_rule import reference_continued, reference_delta_rule
from megalight.ops.divergence import Projection, chunked
from megalight.ops.divergence.spec import DivergenceKernels, Measure
from megalight.ops.norm import (
    reference_add_layer_norm,
    reference_add_rms_norm,
    reference_layer_norm,
    reference_rms_norm,
)
from megalight.ops.parameter import collect
from megalight.ops.quantize import Quantized, Scheme, amax_of, cast
from megalight.ops.quantize.amax_history import annotated_amax, known_amax
from megalight.ops.quantize.formats import to_fp8
from megalight.ops.quantized_weight import QuantizedWeight
from megalight.ops.rotary import reference_apply_rotary, reference_rotate_qkv, rotary_table
from megalight.ops.ssd import reference_continued as reference_ssd_continued
from megalight.ops.ssd import reference_ssd
from megalight.types import PackedSequences, Pages

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}


class Kernels:
    """The functions of one backend in an op that is one file, by the names that they have where it has its own file."""

    def __init__(self, module: Any, backend: str = "triton") -> None:
        self.__dict__.update(module=module, backend=backend)

    def __getattr__(self, name: str) -> Any:
        own = f"{self.backend}_{name}"
        return getattr(self.module, own if hasattr(self.module, own) else name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialized memory is full of NaN: an element that a kernel forgets to write is found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which operations are not deterministic is of no concern here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def error(actual: Tensor, expected: Tensor, scale: float = 1e-30) -> float:
    """Relative norm of the difference; NaN and infinity never pass.

    Where ``expected`` is zero but for float64's rounding (queries that see one key), the difference is relative to
    ``scale``.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    size = float(expected.norm())
    difference = float((actual - expected).norm()) / (size if size > 1e-9 * scale else scale)
    return difference if math.isfinite(difference) else math.inf


def as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def check(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    unused: Sequence[int] = (),
    poison: bool = True,
    sums: Sequence[int] = (),
) -> None:
    """Outputs and the gradients of all ``inputs`` equal the reference's in float64; outputs ``unused`` get none.

    ``poison`` is for kernels of our own: it changes which algorithms torch's choose. ``sums`` are inputs whose gradient
    is a sum over all tokens, of terms that cancel: they may be off by twice as much.
    """
    dtype = inputs[0].dtype
    own = [t.detach().clone().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = as_tuple(reference(*exact))
    used = [i for i in range(len(expected)) if i not in unused]
    grads = [torch.randn_like(expected[i]).to(dtype) for i in used]
    with poisoned() if poison else nullcontext():
        actual = as_tuple(fn(*own))
        torch.autograd.backward(
            [actual[i] for i in used], [g.to(actual[i].dtype) for g, i in zip(grads, used, strict=True)]
        )
    torch.autograd.backward([expected[i] for i in used], [g.double() for g in grads])
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape
        assert error(a, e) <= TOLERANCE[dtype], f"output {index}: {error(a, e)}"
    scale = math.sqrt(sum(float(g.double().norm()) ** 2 for g in grads)) or 1.0
    for index, (a, e) in enumerate(zip(own, exact, strict=True)):
        assert a.grad is not None
        assert a.grad.dtype == a.dtype
        assert e.grad is not None
        found = error(a.grad, e.grad, scale)
        assert found <= TOLERANCE[dtype] * (1 + (index in sums)), f"gradient of input {index}: {found}"


def check_ssd(
    module: Any, device: str, dtype: torch.dtype, lengths: Sequence[int], sizes: tuple[int, int, int, int]
) -> None:
    """``sizes``: heads, groups, features of a head, width of a state. Inputs are parts of wider rows, as in a model."""
    heads, groups, size, width = sizes
    tokens = sum(lengths)
    positions = PackedSequences.of_lengths(list(lengths), device).positions
    x = torch.randn(tokens, heads, size, device=device).to(dtype)
    b, c = (torch.randn(tokens, groups, width, device=device).to(dtype) for _ in range(2))
    dt, a = torch.rand(tokens, heads, device=device) * 0.2, -torch.rand(heads, device=device) * 8
    if wide(dtype) != dtype:
        # Models begin with rates from 1 on. Slower ones sum so many tokens in the gradient of `a` that its terms may
        # cancel to some hundredths, and the rounding of states to this dtype shows.
        a = a.clamp(max=-1.0)
    inputs = (x, dt, a, b, c, torch.randn(heads, device=device))

    def strided(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        rows = torch.cat([x.flatten(1), b.flatten(1), c.flatten(1)], 1)
        parts = torch.split(rows, [heads * size, groups * width, groups * width], 1)
        x, b, c = (part.view(tokens, -1, each) for part, each in zip(parts, (size, width, width), strict=True))
        out: Tensor = module.ssd(x, dt, a, b, c, d, positions, bias)
        return out

    check(strided, lambda *tensors: reference_ssd(*tensors, positions), inputs)
    # Step sizes from below 1e-3 on, where `1 + exp` loses them.
    before = (torch.randn(tokens, heads, device=device) * 3 - 4).to(dtype)
    inputs = (x, before, *inputs[2:], torch.randn(heads, device=device))
    check(strided, lambda *tensors: reference_ssd(*tensors[:6], positions, tensors[6]), inputs)


def rule_inputs(
    device: str, dtype: torch.dtype, tokens: int, sizes: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``sizes``: heads, groups, features of a key and of a value. Keys have length 1; some rates are 0 and 1."""
    heads, groups, width, size = sizes
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, groups, width, device=device), dim=-1) for _ in range(2))
    v, decay = torch.randn(tokens, heads, size, device=device), -torch.rand(tokens, heads, device=device).square()
    beta = (torch.rand(tokens, heads, device=device) * 1.4 - 0.2).clamp(0, 1)
    return q.to(dtype), k.to(dtype), v.to(dtype), decay, beta


def check_delta_rule(
    module: Any, device: str, dtype: torch.dtype, lengths: Sequence[int], sizes: tuple[int, int, int, int]
) -> None:
    """``sizes`` as in :func:`rule_inputs`. Inputs are parts of wider rows, as in a model."""
    heads, groups, width, size = sizes
    tokens, sequences = sum(lengths), PackedSequences.of_lengths(list(lengths), device)
    inputs = rule_inputs(device, dtype, tokens, sizes)

    def strided(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        packed = torch.cat([v.flatten(1), q.flatten(1), k.flatten(1)], 1)
        parts = torch.split(packed, [heads * size, groups * width, groups * width], 1)
        v, q, k = (part.view(tokens, -1, each) for part, each in zip(parts, (size, width, width), strict=True))
        out: Tensor = module.delta_rule(q, k, v, decay, beta, sequences)
        return out

    check(strided, lambda *tensors: reference_delta_rule(*tensors, sequences), inputs)


def continued_pages(device: str, lengths: Sequence[int]) -> Pages:
    """Pages of sequences with these new tokens, of which every second one has earlier tokens."""
    count = len(lengths)
    new = torch.tensor(lengths, dtype=torch.int32, device=device)
    offsets = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
    earlier = torch.arange(count, device=device) % 2 * 9
    nothing = torch.zeros(count, 1, dtype=torch.int32, device=device)
    rows = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    slots = torch.arange(count, device=device).flip(0) + 1
    known = tuple(lengths), tuple(length + 9 for length in lengths)
    return Pages(nothing, new + earlier.int(), offsets, rows, slots, 16, *known, True)


def recorded_pages(pages: Pages, tokens: int) -> Pages:
    """The same sequences in a recorded pass that has room for more: what decodes comes first, padding is the last."""
    counts, device = pages.query_lengths, pages.lengths.device
    few = pages.decodes
    places = [*range(few), *range(few + 1, len(counts) + 1)]  # of a place that decodes, no sequence has one
    queries = torch.zeros(len(counts) + 3, dtype=torch.int32, device=device)
    lengths, slots = torch.zeros_like(queries), torch.zeros(len(queries), dtype=torch.int64, device=device)
    queries[places], lengths[places], slots[places] = pages.cu_queries.diff(), pages.lengths, pages.state_slot
    queries[-1] = tokens - sum(counts)
    offsets = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
    nothing = torch.zeros(len(queries), 1, dtype=torch.int32, device=device)
    most = (1,) * (few + 1) + (tokens,) * (len(queries) - few - 1)
    rows = torch.zeros(tokens, dtype=torch.int64, device=device)
    return Pages(nothing, lengths, offsets, rows, slots, 16, most, (tokens,) * len(queries), True, recorded=True)


def check_continued(run: Any, reference: Any, inputs: Sequence[Tensor], states: Tensor, pages: Pages) -> None:
    """Outputs and states are those of the reference in float64, and other entries of the pool stay.

    In a recorded pass too, by whose first entry padding goes.
    """
    exact, tokens = states.double(), len(inputs[0])
    padded = [torch.cat([each, each[:7]]) if len(each) == tokens else each for each in inputs]
    with torch.no_grad():
        expected = reference(*(t.double() for t in inputs), exact, pages)
        for op, dtype in ((run, inputs[0].dtype), (reference, torch.float64)):
            tolerance = TOLERANCE[dtype]
            for recorded in (False, True):
                found = states.to(torch.promote_types(states.dtype, dtype), copy=True)
                given = [t.to(torch.promote_types(t.dtype, dtype)) for t in (padded if recorded else inputs)]
                y = op(*given, found, recorded_pages(pages, len(given[0])) if recorded else pages)
                assert error(y[:tokens], expected) <= tolerance, recorded
                assert error(found[1:], exact[1:]) <= tolerance, recorded
                assert recorded or torch.equal(found[0], states[0].to(found.dtype))
                assert y.dtype == dtype


def check_ssd_continued(
    module: Any, device: str, dtype: torch.dtype, lengths: Sequence[int], sizes: tuple[int, int, int, int]
) -> None:
    (heads, groups, size, width), tokens = sizes, sum(lengths)
    x = torch.randn(tokens, heads, size, device=device).to(dtype)
    b, c = (torch.randn(tokens, groups, width + 3, device=device).to(dtype)[..., :width] for _ in range(2))
    dt, a = torch.randn(tokens, heads, device=device).to(dtype) - 3, -torch.rand(heads, device=device) * 8
    d, bias = torch.randn(heads, device=device), torch.randn(heads, device=device)
    states = torch.randn(len(lengths) + 2, heads, size, width, device=device)
    pages = continued_pages(device, lengths)
    for added in (None, bias):
        steps = dt if added is not None else dt.float().exp()
        inputs = (x, steps, a, b, c, d)
        check_continued(
            lambda *given, added=added: module.ssd_continued(*given, added),
            lambda *given, added=added: reference_ssd_continued(*given, None if added is None else added.double()),
            inputs,
            states,
            pages,
        )


def check_delta_rule_continued(
    module: Any, device: str, dtype: torch.dtype, lengths: Sequence[int], sizes: tuple[int, int, int, int]
) -> None:
    heads, _, width, size = sizes
    inputs = rule_inputs(device, dtype, sum(lengths), sizes)
    states = torch.randn(len(lengths) + 2, heads, width, size, device=device)
    pages = continued_pages(device, lengths)
    check_continued(module.delta_rule_continued, reference_continued, inputs, states, pages)


def check_causal_conv(
    module: Any, device: str, dtype: torch.dtype, lengths: Sequence[int], channels: int, taps: int
) -> None:
    """The input is a part of wider rows, as in a model."""
    positions = PackedSequences.of_lengths(list(lengths), device).positions
    wider = torch.randn(sum(lengths), channels + 10, device=device).to(dtype)
    weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((channels, taps), (channels,)))
    for silu in (True, False):

        def run(fn: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = silu) -> Tensor:
            out: Tensor = fn(x[:, 3 : 3 + channels], weight, bias, positions, silu)
            return out

        own, exact = partial(run, module.causal_conv), partial(run, causal_conv.reference_causal_conv)
        check(own, exact, (wider, weight, bias))
        check(own, exact, (wider, weight))


def check_gated_norm(module: Any, device: str, dtype: torch.dtype, rows: int, groups: int, group: int) -> None:
    """The gate is a part of wider rows, as in a model; it comes before the norm, or after it."""
    size = groups * group
    y, wider = (torch.randn(rows, width, device=device).to(dtype) for width in (size, size + 9))

    def run(fn: Any, last: bool, y: Tensor, wider: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = fn(y, wider[:, 5 : 5 + size], weight, group, 1e-5, last)
        return out

    for last, features in ((False, size), (True, size), (True, group)):
        own, exact = (partial(run, fn, last) for fn in (module.gated_norm, gated_norm.reference_gated_norm))
        check(own, exact, (y, wider, torch.randn(features, device=device).to(dtype)))


def check_sum_terms(module: Any, device: str, dtype: torch.dtype, out_dtype: torch.dtype, ranks: int) -> None:
    """Terms at equal distances in one memory; each rank has its own term elsewhere, or where the sum goes."""
    size = 5001
    for place in (0, ranks - 1):  # each place is a kernel of its own
        slot, own = (
            torch.randn(ranks - 1, size + 7, device=device).to(dtype),
            torch.randn(size, device=device).to(dtype),
        )
        others = [row[:size] for row in slot]
        for add in (False, True):
            found, exact = (torch.randn(size, device=device).to(out_dtype).copy_(own) for _ in range(2))
            module.sum_terms(found, own, others, place, add)
            sum_terms.reference_sum_terms(exact, own, others, place, add)
            assert torch.equal(found, exact)
        if dtype == out_dtype:
            sum_terms.reference_sum_terms(exact, own, others, place, False)
            module.sum_terms(own, own, others, place, False)
            assert torch.equal(own, exact)


def check_sum_rows(module: Any, device: str, dtype: torch.dtype, count: int, size: int) -> None:
    """Rows of a wider matrix, summed over memory that holds anything, and then added to what is there."""
    rows = torch.randn(count, size + 3, device=device).to(dtype)[:, :size]
    found = torch.full((size,), torch.nan, device=device)
    exact = rows.double().sum(0)
    for add in (False, True, True):
        module.sum_rows(found, rows, add)
    torch.testing.assert_close(found.double(), 3 * exact, rtol=1e-5, atol=1e-5 * max(1, count) ** 0.5)
    own, of_torch = (torch.ones(size, device=device, dtype=dtype) for _ in range(2))
    module.sum_rows(own, rows, True)
    sum_rows.reference_sum_rows(of_torch, rows, True)
    torch.testing.assert_close(own, of_torch, rtol=TOLERANCE[dtype], atol=1e-5 * max(1, count) ** 0.5)
    again = torch.ones_like(own)
    module.sum_rows(again, rows, True)
    assert torch.equal(own, again)


def check_embedding_gradient(module: Any, device: str, dtype: torch.dtype, tokens: int = 150) -> None:
    """Gradients of a table with one run of many equal ids, some of them beyond the table, and gradients with gaps."""
    rows, size = 37, 70
    ids = torch.randint(0, rows + 5, (tokens,), device=device)
    ids[torch.randperm(tokens, device=device)[: tokens // 2]] = 7
    wide_grad = torch.randn(tokens, size + 6, device=device).to(dtype)
    for grad in (wide_grad[:, :size].contiguous(), wide_grad[:, 3 : size + 3]):
        inside = ids < rows
        exact = torch.zeros(rows, size, dtype=torch.float64, device=device)
        exact.index_add_(0, ids[inside], grad[inside].double())
        for main_dtype in (torch.float32, dtype):
            found = torch.full((rows, size), float("nan"), dtype=main_dtype, device=device)
            module.add_rows(found, ids, grad, True)
            assert error(found, exact) < 2 * TOLERANCE[dtype]
            assert not found[~torch.isin(torch.arange(rows, device=device), ids)].any()
            module.add_rows(found, ids, grad, False)
            assert error(found, 2 * exact) < 2 * TOLERANCE[dtype]
        module.add_rows(found, ids[:0], grad[:0], True)
        assert not found.any()


def check_cast_flat(module: Any, device: str, numel: int, interpreted: bool = False) -> None:
    """Quantized values are those of the cast of a matrix, bit by bit, and nothing beside them is written.

    Triton's interpreter rounds to narrow formats in ways of its own, so there quantized values come in float32, not yet
    rounded.
    """
    x = torch.randn(numel, device=device) * 3
    x[:2] = torch.tensor([1e3, math.nan])
    amax = torch.tensor(7.0, device=device)
    wider = (torch.float32,) if interpreted else (torch.float32, torch.bfloat16)
    for form, rounded, scale in itertools.product(("e4m3", "e5m2"), wider, ("fp32", "power")):
        scheme = Scheme(form, scale=scale)
        exact, _ = cast(x.to(rounded)[None], scheme, None, amax=amax, backend="reference")
        assert exact is not None
        memory = torch.zeros(numel + 2, device=device)
        if not interpreted:
            memory = memory.to(exact.data.dtype)
        largest = [torch.full((), least, device=device) for least in (0.0, 2e3)]
        for told in (None, *largest):
            module.cast_flat(memory[1:-1], x, scheme, amax, rounded, told)
        # NaN is no magnitude, and a larger one stays.
        assert [float(value) for value in largest] == [float(x[0].to(rounded)), 2e3]
        quantized = to_fp8(memory, scheme.format) if interpreted else memory
        assert torch.equal(quantized.float()[1:-1].nan_to_num(9e9), exact.data[0].float().nan_to_num(9e9))
        assert quantized.float()[0] == quantized.float()[-1] == 0


def check_latent_heads(
    module: Any, device: str, dtype: torch.dtype, heads: int, own: int, shared: int, values: int
) -> None:
    """Inputs are parts of wider rows, as of a fused projection."""
    cos, sin = rotary_table(torch.arange(7, device=device), shared, 100.0)
    q = torch.randn(7, heads, own + shared + 2, device=device).to(dtype)
    rows = torch.randn(7, heads, own + values + 3, device=device).to(dtype)
    key = torch.randn(7, shared + 1, device=device).to(dtype)

    def keys(fn: Any, rows: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = fn(rows[..., : own + values], key[:, 1:], own)
        return out

    check(partial(keys, module.join_keys), partial(keys, latent_heads.reference_join_keys), (rows, key))
    for interleaved in (False, True):

        def tails(fn: Any, q: Tensor, interleaved: bool = interleaved) -> Tensor:
            out: Tensor = fn(q[..., 2:], cos.to(wide(q.dtype)), sin.to(wide(q.dtype)), interleaved)
            return out

        check(partial(tails, module.rotate_tail), partial(tails, latent_heads.reference_rotate_tail), (q,))


def check_attention(
    module: Any,
    device: str,
    dtype: torch.dtype,
    lengths: Sequence[int],
    keys: Sequence[int] | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sizes: tuple[int, int, int, int],
    sunk: bool,
) -> None:
    """``sizes``: heads, key heads, features of keys, and of values. Inputs are parts of wider rows, as in a model."""
    heads, kv_heads, dim, value_dim = sizes
    sequences = PackedSequences.of_lengths(list(lengths), device)
    if keys is not None:
        sequences = replace(sequences, keys=PackedSequences.of_lengths(list(keys), device))
    seen = sequences.keys or sequences
    inputs = [torch.randn(sequences.num_tokens, heads, dim, device=device).to(dtype)]
    inputs += [torch.randn(seen.num_tokens, kv_heads, size, device=device).to(dtype) for size in (dim, value_dim)]
    inputs += [torch.randn(heads, device=device).to(dtype)] * sunk
    options = (sequences, causal, 0.3, window, softcap, 0.0)

    def strided(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        k, v = torch.cat([k, v], -1).split([dim, value_dim], -1)
        out: Tensor = module.attention(q, k, v, *options, *sink)
        return out

    reference = lambda q, k, v, *sink: reference_attention(q, k, v, *options, *sink)  # noqa: E731
    check(strided, reference, inputs, sums=[3])


def check_norms(
    module: Any, device: str, dtype: torch.dtype, shape: tuple[int, ...], weight_dtype: torch.dtype | None = None
) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) + 0.5 for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device=device).to(weight_dtype or dtype) for _ in range(2))
    eps = 1e-5
    check(lambda x, w: module.rms_norm(x, w, eps), lambda x, w: reference_rms_norm(x, w, eps), (x, weight))
    check(
        lambda x, w, b: module.layer_norm(x, w, b, eps),
        lambda x, w, b: reference_layer_norm(x, w, b, eps),
        (x, weight, bias),
    )
    check(
        lambda x, w: module.layer_norm(x, w, None, eps),
        lambda x, w: reference_layer_norm(x, w, None, eps),
        (x, weight),
    )
    for unused in ((), (1,)):
        check(
            lambda x, r, w: module.add_rms_norm(x, r, w, eps),
            lambda x, r, w: reference_add_rms_norm(x, r, w, eps),
            (x, residual, weight),
            unused,
        )
        check(
            lambda x, r, w, b: module.add_layer_norm(x, r, w, b, eps),
            lambda x, r, w, b: reference_add_layer_norm(x, r, w, b, eps),
            (x, residual, weight, bias),
            unused,
        )
        check(
            lambda x, w: module.add_rms_norm(x, None, w, eps),
            lambda x, w: reference_add_rms_norm(x, None, w, eps),
            (x, weight),
            unused,
        )


def check_norms_main_gradients(module: Any, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Norms between sublayers add their parameters' gradients to main gradients, and autograd does not visit these."""
    x, residual, grad = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    weight, bias = (torch.nn.Parameter(torch.randn(shape[-1], device=device).to(dtype)) for _ in range(2))
    plain = [t.detach().double().requires_grad_() for t in (x, residual, weight, bias)]
    reports, visits = list[str](), list[Tensor]()
    states = [
        collect(each, torch.full(shape[-1:], math.nan, device=device), partial(reports.append, name))
        for each, name in ((weight, "weight"), (bias, "bias"))
    ]
    for parameter, state in zip((weight, bias), states, strict=True):
        state.untouched = True  # the first gradient must overwrite the NaN
        parameter.register_post_accumulate_grad_hook(visits.append)  # type: ignore[no-untyped-call]
    for ours, theirs in (
        (module.add_layer_norm(x, residual, weight, bias, 1e-5), reference_add_layer_norm(*plain, 1e-5)),
        (
            module.add_rms_norm(x, None, weight, 1e-5),
            reference_add_rms_norm(plain[0], None, plain[2], 1e-5),
        ),
    ):
        (ours[0] + ours[1]).backward(grad.detach())
        (theirs[0] + theirs[1]).backward(grad.detach().double())
    assert sorted(reports) == ["bias", "weight", "weight"]
    assert not visits
    assert weight.grad is None
    assert bias.grad is None
    for state, each in zip(states, plain[2:], strict=True):
        assert state.main_grad is not None
        assert error(state.main_grad, each.grad) < TOLERANCE[dtype]
    assert error(x.grad, plain[0].grad) < TOLERANCE[dtype]
    assert error(residual.grad, plain[1].grad) < TOLERANCE[dtype]


def check_rotary(
    module: Any,
    device: str,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dim: int,
    interleaved: bool,
) -> None:
    cos, sin = rotary_table(torch.randint(0, 5000, (tokens,), device=device), dim, 10000.0)
    x = torch.randn(tokens, heads, head_dim, device=device).to(dtype)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    check(
        lambda x: module.apply_rotary(x, cos, sin, interleaved),
        lambda x: reference_apply_rotary(x, cos.double(), sin.double(), interleaved),
        (x,),
    )
    check(
        lambda x: module.rotate_qkv(x, heads, kv_heads, head_dim, cos, sin, interleaved),
        lambda x: reference_rotate_qkv(x, heads, kv_heads, head_dim, cos.double(), sin.double(), interleaved),
        (qkv,),
    )


def check_activations(module: Any, device: str, dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    x = 2 * torch.randn(*shape, device=device).to(dtype)
    wide = 2 * torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype)
    check(lambda x: module.activation(x, kind), lambda x: reference_activation(x, kind), (x,))
    check(lambda x: module.gated(x, kind), lambda x: reference_gated(x, kind), (wide,))


def check_gated_pair(
    fn: Callable[..., Tensor], device: str, dtype: torch.dtype, shape: tuple[int, ...], kind: str
) -> None:
    gate, up = (2 * torch.randn(*shape, device=device).to(dtype) for _ in range(2))
    check(lambda a, b: fn(a, b, kind), lambda a, b: reference_gated_pair(a, b, kind), (gate, up))
    # Strides of a transposed input.
    both = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (gate, up)]
    assert error(fn(*both, kind), reference_gated_pair(gate, up, kind)) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def check_cross_entropy(
    fn: Callable[..., Tensor],
    device: str,
    dtype: torch.dtype,
    tokens: int,
    size: int,
    width: int,
    *,
    padding: int = 0,
    bias: bool = False,
    softcap: float | None = None,
    chunk: int | None = None,
) -> None:
    """``fn`` has the reference's signature."""
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = (torch.randn(size + padding, width, device=device) * width**-0.5 * 2).to(dtype)
    labels = torch.randint(0, size, (tokens,), device=device)
    labels[::5] = -100
    inputs = [hidden, weight]
    if bias:
        inputs.append(torch.randn(size + padding, device=device).to(dtype))

    def run(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda h, w, b=None: function(h, w, labels, b, softcap, chunk, 0, size, None)

    check(run(fn), run(reference_linear_cross_entropy), inputs)


def check_divergence(
    rows: DivergenceKernels,
    device: str,
    dtype: torch.dtype,
    kind: str,
    sizes: tuple[int, int, int],
    *,
    own: bool,
    softcap: bool,
) -> None:
    """``sizes``: tokens, real rows of the vocabulary, width. There are three rows of padding."""
    tokens, size, width = sizes
    drawn = [torch.randn(tokens, width), torch.randn(size + 3, width) * width**-0.5]
    drawn += [torch.randn(tokens, width + 8), torch.randn(size + 3, width + 8) * width**-0.5]
    hidden, weight, theirs, layer = (tensor.to(device, dtype) for tensor in drawn)
    labels = torch.randint(0, size, (tokens,), device=device)
    labels[::5] = -100
    caps = (1.5, 3.0) if softcap else (None, None)
    measure = Measure(kind, 1.7, own, size, caps)

    def run(rows: DivergenceKernels) -> Callable[..., Any]:
        def both(hidden: Tensor, weight: Tensor) -> Any:
            student = Projection(hidden, weight, None, caps[0])
            teacher = Projection(theirs.to(hidden.dtype), layer.to(hidden.dtype), None, caps[1])
            found = chunked.linear_divergence(rows, student, teacher, labels, measure, 4, 0, None)
            return found if own else found[0]

        return both

    exact = DivergenceKernels(chunked.statistics, chunked.sums, chunked.gradient_)
    check(run(rows), run(exact), [hidden, weight])


def check_decode(fn: Callable[..., Tensor], device: str, form: str, dtype: torch.dtype) -> None:
    weight = torch.randn(70, 144, device=device).to(dtype)
    for block in (16,) if form == "nvfp4" else (2, 48, 144):
        quantized = QuantizedWeight(weight, form, block)
        # scales of `nvfp4` are products, in float32
        scales = quantized.scales if quantized.second is None else quantized.scales.float() * quantized.second
        with poisoned():
            found = fn(quantized.data, scales, form, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, quantized_weight.reference_decode(quantized.data, scales, form, dtype))


def check_adam(fn: Callable[..., None], device: str, n: int, *, tensors: bool = False, **options: Any) -> None:
    grad_dtype = options.pop("grad_dtype", torch.float32)
    dtype = options.pop("dtype", torch.float32)
    out_dtype = options.pop("out_dtype", None)
    param, exp_avg = (torch.randn(n, dtype=dtype, device=device) for _ in range(2))
    exp_avg_sq = torch.rand(n, dtype=dtype, device=device)
    grad = torch.randn(n, device=device).to(grad_dtype)
    before = grad.clone()
    scale = torch.tensor(0.25, dtype=dtype, device=device)
    settings: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    settings.update(options)
    exact = [t.double() for t in (param, grad, exp_avg, exp_avg_sq)]
    reference_adam_step(*exact, **settings, grad_scale=scale.double())
    if tensors:
        for name in ("lr", "step"):
            settings[name] = torch.tensor(float(settings[name]), device=device)
    out = None if out_dtype is None else torch.full((n,), torch.nan, dtype=out_dtype, device=device)
    fn(param, grad, exp_avg, exp_avg_sq, **settings, grad_scale=scale, out=out)
    for actual, expected in zip((param, exp_avg, exp_avg_sq), (exact[0], exact[2], exact[3]), strict=True):
        assert error(actual, expected) <= (1e-9 if dtype == torch.float64 else 3e-6)
    assert torch.equal(grad, before), "the gradient is not ours to write"
    if out is not None:
        assert torch.equal(out, param.to(out.dtype))


def check_quantized_adam(fn: Callable[..., None], device: str, n: int, interpreted: bool = False) -> None:
    """A step also writes quantized values: bit by bit those of a cast of its new values; all else is as without.

    Triton's interpreter rounds to narrow formats in ways of its own, so there quantized values come in float32, not yet
    rounded.
    """
    settings: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    amax = torch.tensor(3.0, device=device)  # some values are larger
    wider = (torch.float32,) if interpreted else (torch.float32, torch.bfloat16)
    for form, rounded, scale in itertools.product(("e4m3", "e5m2"), wider, ("fp32", "power")):
        state = [torch.randn(n, device=device) for _ in range(3)] + [torch.rand(n, device=device)]
        alone = [each.clone() for each in state]
        fn(*alone, **settings)
        scheme = Scheme(form, scale=scale)
        exact, _ = cast(alone[0].to(rounded)[None], scheme, None, amax=amax, backend="reference")
        assert exact is not None
        memory = torch.zeros(n + 2, device=device)
        if not interpreted:
            memory = memory.to(exact.data.dtype)
        place = memory[1:-1]
        largest = [torch.full((), least, device=device) for least in (0.0, 2e3)]
        for told in (None, *largest):
            quantized_out: Any = QuantizedOutput(place, scheme, amax, rounded, told)
            if interpreted:
                quantized_out = SimpleNamespace(data=place, scheme=scheme, amax=amax, rounded=rounded, largest=told)
            again = [each.clone() for each in state]
            fn(*again, **settings, quantized_out=quantized_out)
            assert all(map(torch.equal, again, alone))
        assert [float(value) for value in largest] == [float(alone[0].to(rounded).abs().max()), 2e3]
        quantized = to_fp8(memory, scheme.format) if interpreted else memory
        assert torch.equal(quantized.float()[1:-1], exact.data[0].float())
        assert quantized.float()[0] == quantized.float()[-1] == 0


def check_narrow_adam(
    fn: Callable[..., None],
    device: str,
    n: int,
    first: str,
    second: str,
    dtype: torch.dtype = torch.float32,
    tensors: bool = False,
) -> None:
    """Steps with moments in other formats than the parameters, each from where the reference came to.

    The last bit of a moment differs between kernels, and decides how it is rounded: elements may be one code apart.
    """
    kinds = {"float32": dtype, "bfloat16": torch.bfloat16, "float8": torch.uint8}
    ours, theirs = [_narrow_state(n, kinds[first], kinds[second], dtype, device) for _ in range(2)]
    for step in range(1, 6):
        settings: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        numbers: dict[str, Any] = {"lr": 1e-2, "step": step}
        grad = (torch.randn(n, device=device) * torch.logspace(-3, 0, n, device=device)).to(dtype)
        scale = torch.tensor(0.25, dtype=dtype, device=device)
        out = torch.full((n,), torch.nan, dtype=torch.float16, device=device)
        reference_adam_step(
            *theirs[:1], grad, *theirs[1:3], **settings, **numbers, exponents=theirs[3], grad_scale=scale
        )
        if tensors:
            numbers = {name: torch.tensor(float(value), device=device) for name, value in numbers.items()}
        fn(*ours[:1], grad, *ours[1:3], **settings, **numbers, exponents=ours[3], grad_scale=scale, out=out)
        assert torch.equal(out, ours[0].half())
        assert error(ours[0], theirs[0]) <= 3e-6, "the update is computed before moments are rounded"
        for number, kind in enumerate((first, second)):
            found, right = (read_moment(s[1 + number], s[3][number], bool(number)).double() for s in (ours, theirs))
            apart = {"float32": 1e-5, "bfloat16": 2**-7, "float8": (9 / 8) ** 2 - 1 if number else 1 / 8}[kind]
            least = right.abs().max() * {"float32": 1e-6, "bfloat16": 1e-6, "float8": 2**-14}[kind]
            assert ((found - right).abs() <= apart * torch.maximum(found.abs(), right.abs()) + least).all()
        for own, other in zip((*ours[:3], *ours[3]), (*theirs[:3], *theirs[3]), strict=True):
            if own is not None:
                own.copy_(other)


def _narrow_state(n: int, first: torch.dtype, second: torch.dtype, dtype: torch.dtype, device: str) -> Any:
    """Return parameters and moments, and the exponents of moments that are quantized."""
    param = torch.randn(n, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(2))
    moments = [torch.zeros(n, dtype=kind, device=device) for kind in (first, second)]
    exponents = tuple(exponents_like(each) if each.dtype == torch.uint8 else None for each in moments)
    return param, *moments, exponents


def check_weight_gradient(
    fn: Callable[[Tensor, Tensor, Tensor, bool], None],
    device: str,
    dtype: torch.dtype,
    main_dtype: torch.dtype,
    tokens: int,
    out: int,
    width: int,
) -> None:
    """Added to what there is; and written over it, be it not a number."""
    grad_y = torch.randn(tokens, out, device=device).to(dtype)
    x = torch.randn(tokens, width, device=device).to(dtype)
    main_grad = torch.randn(out, width, device=device).to(main_dtype) * tokens**0.5
    product = grad_y.double().T @ x.double()
    expected = main_grad.double() + product
    fn(main_grad, grad_y, x, False)
    written = torch.full_like(main_grad, torch.nan)
    fn(written, grad_y, x, True)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5}.get(main_dtype, 8e-3)
    for found, right in ((main_grad, expected), (written, product)):
        assert error(found, right) <= tolerance, error(found, right)


def check_merge(
    fn: Callable[..., None], device: str, dtype: torch.dtype, other_dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    """Into other tensors, and the second half of the queries in place."""
    batch, queries, heads, _ = shape
    outs = [torch.randn(shape, device=device).to(kind) for kind in (dtype, other_dtype)]
    logs = [3 * torch.randn(batch, heads, queries, device=device, dtype=wide(dtype)) for _ in range(2)]
    logs[1][..., -1] = -torch.inf
    exact_lse = torch.logaddexp(logs[0].double(), logs[1].double())
    weights = [(lse.double() - exact_lse).exp().mT[..., None] for lse in logs]
    exact = weights[0] * outs[0].double() + weights[1] * outs[1].double()
    out, lse = torch.full_like(outs[0], torch.nan, dtype=wide(dtype)), torch.full_like(logs[0], torch.nan)
    fn(outs[0], logs[0], outs[1], logs[1], out, lse)
    assert error(out, exact) <= TOLERANCE[wide(dtype)]
    assert error(lse, exact_lse) <= TOLERANCE[wide(dtype)]
    half = queries // 2
    before = outs[0].clone()
    into = outs[0][:, half:], logs[0][:, :, half:]
    fn(*into, outs[1][:, half:], logs[1][:, :, half:], *into)
    assert torch.equal(outs[0][:, :half], before[:, :half])
    assert error(outs[0][:, half:], exact[:, half:]) <= TOLERANCE[dtype]
    assert error(logs[0][:, :, half:], exact_lse[:, :, half:]) <= TOLERANCE[wide(dtype)]


def check_cast(module: Any, device: str, tokens: int, features: int, scheme: Scheme, dtype: torch.dtype) -> None:
    """Data and scales of a matrix and of its transpose, bit for bit. Data may come in float32, not yet rounded."""
    x = (torch.randn(tokens, features) * torch.logspace(-3, 3, tokens)[:, None]).to(device, dtype)
    x[tokens // 2] = 0
    expected = cast(x, scheme, scheme, fill=scheme.multiple, backend="reference")
    with poisoned():
        found = module.cast(x, scheme, scheme, width=features + -features % scheme.multiple)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.scale, theirs.scale)
        quantized = ours.data if ours.data.dtype == theirs.data.dtype else to_fp8(ours.data, scheme.format)
        assert torch.equal(quantized.view(torch.uint8), theirs.data.view(torch.uint8))


def check_scaled_accumulate(
    fn: Callable[..., None], device: str, rows: int, columns: int, tokens: int, write: bool
) -> None:
    """A sum with quantized values in float32, which matrix units of every kind multiply."""
    a, b = (
        Quantized(torch.randn(size, tokens, device=device), torch.rand(1, 1, device=device), Scheme("e4m3"))
        for size in (rows, columns)
    )
    out = torch.randn(rows, columns, device=device)
    expected = a.dequantize() @ b.dequantize().T + (0 if write else out)
    if write:
        out.fill_(torch.nan)
    fn(out, a, b, write)
    assert error(out, expected) <= 1e-5


def check_measured(module: Any, device: str, dtype: torch.dtype, kind: str, gates: bool) -> None:
    """The magnitudes that an activation finds on the way are those of what it writes, and nothing else changes."""
    fn = module.gated if gates else module.activation
    x = torch.randn(6, 5000, device=device).to(dtype)
    measured_and_not(lambda x, measure: (fn(x, kind, measure=measure),), x)
    empty = fn(x[:0], kind, measure=True)
    assert known_amax(empty) == 0


def measured_and_not(run: Callable[[Tensor, bool], tuple[Tensor, ...]], x: Tensor, told: Sequence[int] = (0,)) -> None:
    """Told magnitudes of outputs ``told`` and of the gradient of ``x`` are theirs; telling changes nothing else."""
    seen: list[Tensor] = []
    found: list[list[Tensor]] = []
    for measure in (True, False):
        leaf = x.clone().requires_grad_()
        through = leaf.view(x.shape)
        through.register_hook(seen.append)
        with poisoned():
            outputs = run(through, measure)
            grads = [torch.linspace(-1, 3, y.numel(), device=y.device).view(y.shape).to(y.dtype) for y in outputs]
            torch.autograd.backward(outputs, grads)
        assert [(annotated_amax(y) is not None) for y in outputs] == [
            measure and i in told for i in range(len(outputs))
        ]
        for y in outputs:
            assert torch.equal(known_amax(y), amax_of(y))
        assert leaf.grad is not None
        found.append([*outputs, leaf.grad])
    for measured, plain in zip(*found, strict=True):
        assert torch.equal(measured, plain)
    assert [(annotated_amax(gradient) is not None) for gradient in seen] == [True, False]
    assert torch.equal(known_amax(seen[0]), amax_of(seen[0]))
    seen[0].mul_(2)
    assert torch.equal(known_amax(seen[0]), amax_of(seen[0]))  # what was told is no longer so
    with torch.inference_mode():  # no writes are noted there, so nothing may be told
        assert not any((annotated_amax(y) is not None) for y in run(x.clone(), True))


def check_measured_norms(module: Any, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The magnitudes that norms find on the way, as :func:`check_measured`."""
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device=device).to(dtype) + 3 for _ in range(2))
    eps = 1e-5
    measured_and_not(lambda x, measure: (module.rms_norm(x, weight, eps, measure=measure),), x)
    measured_and_not(lambda x, measure: (module.layer_norm(x, weight, bias, eps, measure=measure),), x)
    measured_and_not(lambda x, measure: (module.layer_norm(x, weight, None, eps, measure=measure),), x)
    for other in (residual, None):
        measured_and_not(lambda x, m, r=other: module.add_rms_norm(x, r, weight, eps, measure=m), x)  # type: ignore[misc]
        measured_and_not(lambda x, m, r=other: module.add_layer_norm(x, r, weight, bias, eps, measure=m), x)  # type: ignore[misc]
    assert known_amax(module.rms_norm(x[:0], weight, eps, measure=True)) == 0


def check_measured_rotary(module: Any, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """The magnitude of a packed gradient that a rotation finds on the way, whichever of q, k, v it lies in."""
    heads, kv_heads, head_dim, dim = shape
    cos, sin = rotary_table(torch.randint(0, 5000, (5,), device=device), dim, 10000.0)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    for largest in range(3):

        def run(x: Tensor, measure: bool, largest: int = largest) -> tuple[Tensor, ...]:
            out = module.rotate_qkv(x, heads, kv_heads, head_dim, cos, sin, measure=measure)
            return tuple(y * (5 if index == largest else 1) for index, y in enumerate(out))

        measured_and_not(run, qkv, told=())


def check_sums_of_measured(norms: Any, activations: Any, device: str, dtype: torch.dtype) -> None:
    """Of a gradient that autograd adds up, whatever was told of its parts is not taken for the sum's."""
    x = torch.randn(37, 128, device=device).to(dtype)
    weight = torch.ones(128, device=device).to(dtype)

    def normed(x: Tensor) -> Tensor:
        y: Tensor = norms.rms_norm(x, weight, 1e-5, measure=True)
        return y

    def both(x: Tensor) -> Tensor:
        y, total = norms.add_rms_norm(x, None, weight, 1e-5, measure=True)
        return torch.cat([y, total])

    def gates(x: Tensor) -> Tensor:
        y: Tensor = activations.gated(x, "silu", measure=True)
        return y

    branches: list[Callable[[Tensor], Tensor]] = [normed, both, gates, lambda x: x * 2]
    for chosen in itertools.permutations(branches, 2):
        leaf = x.clone().requires_grad_()
        through = leaf * 1
        seen: list[Tensor] = []
        through.register_hook(lambda gradient, seen=seen: seen.append(known_amax(gradient)))  # type: ignore[misc]
        for branch in chosen:
            y = branch(through)
            y.backward(torch.randn_like(y), retain_graph=True)  # alone
        alone = len(seen)
        leaf.grad = None
        torch.stack([branch(through).float().square().sum() for branch in chosen]).sum().backward()
        assert leaf.grad is not None
        assert len(seen) == alone + 1
        assert torch.equal(seen[-1], amax_of(leaf.grad))


def check_told(module: Any, device: str, dtype: torch.dtype) -> None:
    """A cast with given magnitudes finds those that there are, and casts as one that does not look."""
    x = torch.randn(150, 272, device=device).to(dtype)
    given, scheme = torch.tensor(2.0, device=device), Scheme("e4m3")
    for rows, columns in ((scheme, scheme), (None, scheme), (scheme, None)):
        told = x.clone()
        with poisoned():
            found = module.cast(told, rows, columns, given, given, None, True)
            expected = module.cast(x, rows, columns, given, given)
        assert annotated_amax(told) is not None
        assert torch.equal(known_amax(told), amax_of(x))
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours.data.float(), theirs.data.float())


def check_gaps(module: Any, device: str, kind: str, gates: bool) -> None:
    """Activations of rows with gaps between them, and of gradients with others, are those of rows without."""
    fn, size = module.gated if gates else module.activation, 348
    x = torch.randn(7, 2 * size + 8, device=device).bfloat16()[:, : 2 * size if gates else size]
    grad_y = torch.randn(7, size + 4, device=device).bfloat16()[:, :size]
    results = []
    for gaps in (True, False):
        leaf = (x if gaps else x.contiguous()).detach().requires_grad_()
        y = fn(leaf, kind)
        y.backward(grad_y if gaps else grad_y.contiguous())
        results.append((y.detach(), leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def check_cast_activation(
    fused: Any,
    activation: Any,
    quantize: Any,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    kind: str,
    gated: bool,
) -> None:
    """A quantized activation and its gradient are those that two kernels write, one after the other, bit for bit."""
    tokens, size = shape
    x = 2 * torch.randn(tokens, size * (2 if gated else 1), device=device).to(dtype)
    grad_y = torch.randn(tokens, size, device=device).to(dtype)
    leaf = x.clone().requires_grad_()
    y = (activation.gated if gated else activation.activation)(leaf, kind)
    (grad_x,) = torch.autograd.grad(y, leaf, grad_y)
    given = torch.tensor(2.0, device=device)
    quantized, gradient = Scheme("e4m3"), Scheme("e5m2", scale="power")
    for written, run in (
        (y.detach(), lambda *schemes: fused.cast_activation(x, kind, gated, *schemes, given)),
        (grad_x, lambda *schemes: fused.cast_activation_gradient(grad_y, x, kind, gated, *schemes, given)),
    ):
        for rows, columns in ((quantized, quantized), (gradient, gradient), (None, gradient), (quantized, None)):
            check_quantized(quantize, written, rows, columns, given, run)


def check_quantized(
    quantize: Any, written: Tensor, rows: Scheme | None, columns: Scheme | None, given: Tensor, run: Callable[..., Any]
) -> None:
    """A kernel that writes quantized values alone gives the cast of what it would have written, and its magnitude."""
    expected = quantize.cast(written, rows, columns, given, given)
    with poisoned():
        found, told = run(rows, columns)
    assert torch.equal(told.max() if told.numel() else told.new_zeros(()), amax_of(written))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours.scale, theirs.scale)
            same = ours.data if ours.data.dtype == torch.float32 else ours.data.view(torch.uint8)
            assert torch.equal(
                same, theirs.data if theirs.data.dtype == torch.float32 else theirs.data.view(torch.uint8)
            )


def check_cast_qkv_gradient(
    fused: Any, rotary: Any, quantize: Any, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    """Quantized values of the gradient of a packed projection are those that two kernels write, bit for bit."""
    tokens, heads, kv_heads, head_dim = shape
    # Strided, as attention may return them.
    grads = [
        torch.randn(tokens, number + 1, head_dim, device=device).to(dtype)[:, 1:]
        for number in (heads, kv_heads, kv_heads)
    ]
    cos, sin = rotary_table(torch.arange(tokens, device=device), head_dim, 1e4)
    leaf = torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype).requires_grad_()
    (packed,) = torch.autograd.grad(rotary.rotate_qkv(leaf, heads, kv_heads, head_dim, cos, sin), leaf, grads)
    given, scheme = torch.tensor(2.0, device=device), Scheme("e5m2")
    for rows, columns in ((scheme, scheme), (None, scheme), (scheme, None)):
        run = partial(fused.cast_qkv_gradient, *grads, cos, sin, False)
        check_quantized(quantize, packed, rows, columns, given, lambda *schemes, run=run: run(*schemes, given))
