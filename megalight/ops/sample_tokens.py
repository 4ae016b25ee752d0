"""Sampling of the next tokens from logits: each row with its own temperature, top-k, top-p and min-p.

Nothing waits for the device, and all parameters of rows lie there, so sampling can be recorded. A sample is the argmax
of ``logit / temperature + g`` over the tokens that are kept, with ``g`` from the Gumbel distribution: so each token has
its probability (https://arxiv.org/abs/1611.01144). No distribution is stored, and ranks that each have some columns of
the logits need only compare their best ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.philox import draws
from megalight.registry import Backend, BackendRegistry, choose

FAILED = -1
"""The sample of a row that holds NaN or infinity, or ``-inf`` alone."""

TINY, HUGE = 1e-30, 1e30
"""The range of temperatures: the quotients of logits stay in float32."""


class SamplingRows(NamedTuple):
    """How the rows of logits are sampled, on their device.

    Attributes:
        reals: ``[3, N]`` float64: temperatures (0: the most probable token), top-p (1: all tokens), min-p (0: all).
        numbers: ``[3, N]`` int64: top-k (the size of the vocabulary or more: all), seeds, positions.
        greedy: whether all temperatures are 0, known to the host.
        filtered: whether some rows keep fewer tokens by top-k or top-p, known to the host.
    """

    reals: Tensor
    numbers: Tensor
    greedy: bool
    filtered: bool


class Cut(NamedTuple):
    """Which tokens of rows top-k and top-p keep: logits above ``least``, and equal ones up to a column.

    Attributes:
        least: ``[N]``.
        last: ``[N]`` int64.
    """

    least: Tensor
    last: Tensor


class SamplingKernels(NamedTuple):
    """The parts of :func:`sample_tokens`, of one backend.

    Attributes:
        peak: logits to the largest of each row ``[N]`` (NaN counts as infinity), and its first column ``[N]``.
        cut: logits, rows and peaks to what is kept.
        best: logits, rows, peaks, what is kept (or None), the number of the first column and of all columns (of all
            ranks) to the best score ``[N]`` and its column ``[N]``.
    """

    peak: Callable[[Tensor], tuple[Tensor, Tensor]]
    cut: Callable[[Tensor, SamplingRows, Tensor], Cut]
    best: Callable[[Tensor, SamplingRows, Tensor, Cut | None, int, int], tuple[Tensor, Tensor]]


class VocabularyRanks(NamedTuple):
    """How ranks that have some columns of the logits each agree.

    Attributes:
        first: number of this rank's first column.
        columns: number of the columns of all ranks.
        largest: the largest of all ranks' ``[N]``.
        column: the column of the largest of all ranks' scores ``[N]``; given these and their columns ``[N]``.
        combine: the log-sum-exp ``[N]`` of all ranks' columns, and the sum of all ranks' second argument.
    """

    first: int
    columns: int
    largest: Callable[[Tensor], Tensor]
    column: Callable[[Tensor, Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# In torch.


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def scaled(logits: Tensor, rows: SamplingRows, peak: Tensor) -> Tensor:
    """Return logits less their peaks, over the temperatures, float32 or float64; greedy rows are not divided."""
    temperature = rows.reals[0].clamp(TINY, HUGE).to(peak.dtype)
    # The peak goes first, or a tiny temperature would overflow.
    return (_wide(logits) - peak[:, None]) / torch.where(rows.reals[0] == 0, 1.0, temperature)[:, None]


def reference_peak(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :class:`SamplingKernels`."""
    peak, column = _wide(logits).max(-1)
    return torch.where(peak.isnan(), torch.inf, peak), column


def reference_cut(logits: Tensor, rows: SamplingRows, peak: Tensor) -> Cut:
    """See :class:`SamplingKernels`."""
    columns = logits.shape[-1]
    # Stable: of equal logits the first columns are kept.
    ordered, order = _wide(logits).sort(descending=True, stable=True)
    kept = ordered >= ordered.gather(-1, rows.numbers[0].clamp(max=columns)[:, None] - 1)
    probabilities = scaled(ordered, rows, peak).masked_fill(~kept, -torch.inf).softmax(-1)
    # Of all tokens before each one. The one that crosses the threshold is kept.
    before = probabilities.cumsum(-1) - probabilities
    top_p = rows.reals[1].to(peak.dtype)[:, None]
    kept &= (before < top_p) | (top_p >= 1)
    end = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    last = order.gather(-1, end).masked_fill(top_p >= 1, columns)
    return Cut(ordered.gather(-1, end)[:, 0], last[:, 0])


def kept_mask(logits: Tensor, rows: SamplingRows, peak: Tensor, cut: Cut | None) -> Tensor:
    """Return which tokens ``[N, V]`` rows are sampled from."""
    # The largest one has a share of 1 of itself.
    kept = scaled(logits, rows, peak).exp() >= rows.reals[2].to(peak.dtype)[:, None]
    if cut is None:
        return kept
    values, least = _wide(logits), cut.least[:, None]
    column = torch.arange(logits.shape[-1], device=logits.device)
    return kept & ((values > least) | ((values == least) & (column <= cut.last[:, None])))


def reference_best(
    logits: Tensor, rows: SamplingRows, peak: Tensor, cut: Cut | None, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    """See :class:`SamplingKernels`."""
    _, seeds, positions = rows.numbers
    bits = draws(seeds, positions, columns, backend="reference")[:, first : first + logits.shape[-1]]
    # Columns behind those of the vocabulary are padding, and hold no logits.
    bits = pad(bits, (0, logits.shape[-1] - bits.shape[1]))
    # The upper 23 bits and a half: exact in float32, above 0 and below 1.
    uniform = ((bits >> 9) + 0.5) * 2.0**-23
    gumbel = -(-uniform.log()).log()
    scores = scaled(logits, rows, peak) + torch.where(rows.reals[0] == 0, 0.0, 1.0).to(peak.dtype)[:, None] * gumbel
    score, column = scores.masked_fill(~kept_mask(logits, rows, peak, cut), -torch.inf).max(-1)
    return score, column + first


def processed(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return logits ``[N, V]`` whose softmax is what rows are sampled from; those of greedy rows are not divided."""
    peak, _ = reference_peak(logits)
    kept = kept_mask(logits, rows, peak, reference_cut(logits, rows, peak) if rows.filtered else None)
    return scaled(logits, rows, peak).masked_fill(~kept, -torch.inf)


# In Triton: columns of a row over several programs, but for `cut`.

BLOCK = 1024
"""Columns at a time."""
SPAN = 8
"""Blocks of a program."""


@jit
def _values(logits: Value, column: Value, columns: Value) -> Value:
    # A zero has no sign: the order of bits is that of values.
    return tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32) + 0.0


@jit
def _peak(
    logits: Value, stride: Value, columns: Value, values: Value, places: Value, BLOCK: constexpr, SPAN: constexpr
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * SPAN * BLOCK + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = column
    for _ in range(SPAN):
        x = _values(logits + row * stride, column, columns)
        x = tl.where(x == x, x, float("inf"))
        place = tl.where(x > best, column, place)
        best = tl.maximum(best, x)
        column += BLOCK
    top = tl.max(best, 0)
    target = row * tl.num_programs(1) + part
    tl.store(values + target, top)
    tl.store(places + target, tl.min(tl.where(best == top, place, 2147483647), 0).to(tl.int64))


@jit
def _combine(values: Value, places: Value, parts: Value, value: Value, place: Value, BLOCK: constexpr) -> None:
    """Find the largest of the parts of a row, and its first column."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    x = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    at = tl.load(places + row * parts + part, mask=part < parts, other=9223372036854775807)
    top = tl.max(x, 0)
    tl.store(value + row, top)
    tl.store(place + row, tl.min(tl.where(x == top, at, 9223372036854775807), 0))


@jit
def _key(x: Value) -> Value:
    """Return bits whose order is that of floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def _weighed(logits: Value, columns: Value, key: Value, peak: Value, scale: Value, BLOCK: constexpr) -> Value:
    """Return the sum of exponentials of the columns with keys of at least ``key``."""
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = _values(logits, column, columns)
        total += tl.where((_key(x) >= key) & (column < columns), tl.exp((x - peak) * scale), 0.0)
    return tl.sum(total, 0)


@jit
def _search(
    logits: Value, columns: Value, wanted: Value, floor: Value, peak: Value, scale: Value,
    COUNT: constexpr, BITS: constexpr, BLOCK: constexpr,
) -> Value:  # fmt: skip
    """Return the largest key with a weight of at least ``wanted``: two bits in each pass."""
    key = tl.full((), 0, tl.uint32)
    for step in range(BITS // 2):
        shift = 30 - 2 * step
        low = key | (tl.full((), 1, tl.uint32) << shift)
        middle = key | (tl.full((), 2, tl.uint32) << shift)
        high = key | (tl.full((), 3, tl.uint32) << shift)
        one = tl.zeros((BLOCK,), tl.float32)
        two = tl.zeros((BLOCK,), tl.float32)
        three = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = _values(logits, column, columns)
            weight = tl.full((BLOCK,), 1.0, tl.float32) if COUNT else tl.exp((x - peak) * scale)
            own = _key(x)
            weight = tl.where((own >= floor) & (column < columns), weight, 0.0)
            one += tl.where(own >= low, weight, 0.0)
            two += tl.where(own >= middle, weight, 0.0)
            three += tl.where(own >= high, weight, 0.0)
        key = tl.where(
            tl.sum(three, 0) >= wanted,
            high,
            tl.where(tl.sum(two, 0) >= wanted, middle, tl.where(tl.sum(one, 0) >= wanted, low, key)),
        )
    # Negative values of fewer bits have ones in the others.
    if BITS < 32:
        key = tl.where(key >> 31 == 0, key | ((tl.full((), 1, tl.uint32) << (32 - BITS)) - 1), key)
    return key


@jit
def _cut(
    logits: Value, stride: Value,
    columns: Value, reals: Value, numbers: Value, peaks: Value, least: Value, last: Value,
    BITS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    logits += row * stride
    temperature = tl.load(reals + row)
    top_p = tl.load(reals + count + row).to(tl.float32)
    top_k = tl.load(numbers + row)
    peak = tl.load(peaks + row)
    scale = 1.0 / tl.where(temperature == 0, 1.0, tl.minimum(tl.maximum(temperature, 1e-30), 1e30)).to(tl.float32)
    key = tl.full((), 0, tl.uint32)
    end = columns.to(tl.int64)
    if top_k < columns:
        key = _search(logits, columns, top_k.to(tl.float32), key, peak, scale, True, BITS, BLOCK)
    if top_p < 1:
        wanted = top_p * _weighed(logits, columns, key, peak, scale, BLOCK)
        key = _search(logits, columns, wanted, key, peak, scale, False, BITS, BLOCK)
        # Of the equal ones, as many as are missing.
        missing = wanted - _weighed(logits, columns, key + 1, peak, scale, BLOCK)
        bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
        share = tl.exp((bits.to(tl.float32, bitcast=True) - peak) * scale)
        equal = tl.maximum(tl.ceil(missing / share), 1.0)
        passed = tl.zeros((), tl.float32)
        end = end * 0
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            same = (_key(_values(logits, column, columns)) == key) & (column < columns)
            number = passed + tl.cumsum(same.to(tl.float32), 0)
            end = tl.maximum(end, tl.max(tl.where(same & (number <= equal), column, 0), 0).to(tl.int64))
            passed += tl.sum(same.to(tl.float32), 0)
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    # No search: everything is kept.
    value = tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))
    tl.store(least + row, value)
    tl.store(last + row, end)


@jit
def _best(
    logits: Value, stride: Value,
    columns: Value, first: Value, groups: Value, reals: Value, numbers: Value, peaks: Value, least: Value, last: Value,
    values: Value, places: Value,
    CUT: constexpr, BLOCK: constexpr, SPAN: constexpr,
) -> None:  # fmt: skip
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    temperature = tl.load(reals + row)
    min_p = tl.load(reals + 2 * count + row).to(tl.float32)
    seed, position = tl.load(numbers + count + row), tl.load(numbers + 2 * count + row)
    peak = tl.load(peaks + row)
    divisor = tl.where(temperature == 0, 1.0, tl.minimum(tl.maximum(temperature, 1e-30), 1e30)).to(tl.float32)
    column = part * SPAN * BLOCK + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = column
    for _ in range(SPAN):
        x = _values(logits + row * stride, column, columns)
        score = (x - peak) / divisor
        kept = (tl.exp(score) >= min_p) & (column < columns)
        if CUT:
            lowest = tl.load(least + row)
            kept &= (x > lowest) | ((x == lowest) & (column <= tl.load(last + row)))
        if temperature != 0:
            # The numbers of `draws`: four of each counter, a quarter of all columns apart.
            lane = (first + column) // groups
            counter = ((first + column) % groups).to(tl.uint32)
            zero = counter * 0
            a, b, c, d = tl.philox(seed, counter, (zero + position).to(tl.uint32), zero, zero, 10)
            bits = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            score -= tl.log(-tl.log(uniform))
        score = tl.where(kept, score, float("-inf"))
        place = tl.where(score > best, column, place)
        best = tl.maximum(best, score)
        column += BLOCK
    top = tl.max(best, 0)
    target = row * tl.num_programs(1) + part
    tl.store(values + target, top)
    tl.store(places + target, (first + tl.min(tl.where(best == top, place, 2147483647), 0)).to(tl.int64))


def _parts(logits: Tensor) -> tuple[int, Tensor, Tensor]:
    parts = cdiv(logits.shape[-1], BLOCK * SPAN)
    values = torch.empty(len(logits), parts, device=logits.device)
    return parts, values, torch.empty(values.shape, dtype=torch.int64, device=logits.device)


def _combined(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    rows, parts = values.shape
    value = torch.empty(rows, device=values.device)
    place = torch.empty(rows, dtype=torch.int64, device=values.device)
    _combine[(rows,)](values, places, parts, value, place, BLOCK=1 << (parts - 1).bit_length(), num_warps=1)
    return value, place


def triton_peak(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :class:`SamplingKernels`."""
    parts, values, places = _parts(logits)
    grid = (len(logits), parts)
    _peak[grid](logits, logits.stride(0), logits.shape[1], values, places, BLOCK=BLOCK, SPAN=SPAN, num_warps=4)
    return _combined(values, places)


def triton_cut(logits: Tensor, rows: SamplingRows, peak: Tensor) -> Cut:
    """See :class:`SamplingKernels`."""
    cut = Cut(torch.empty_like(peak), torch.empty(len(peak), dtype=torch.int64, device=peak.device))
    # Floats of 16 bits have no others. Of float16, which has other ones, 19 are used.
    bits = {torch.bfloat16: 16, torch.float16: 20}.get(logits.dtype, 32)
    _cut[(len(logits),)](
        logits, logits.stride(0), logits.shape[1], rows.reals, rows.numbers, peak, *cut, BITS=bits, BLOCK=4 * BLOCK,
        num_warps=8,
    )  # fmt: skip
    return cut


def triton_best(
    logits: Tensor, rows: SamplingRows, peak: Tensor, cut: Cut | None, first: int, columns: int
) -> tuple[Tensor, Tensor]:
    """See :class:`SamplingKernels`."""
    parts, values, places = _parts(logits)
    kept = (peak, places) if cut is None else cut
    _best[(len(logits), parts)](
        logits, logits.stride(0), logits.shape[1], first, cdiv(columns, 4), rows.reals, rows.numbers, peak, *kept,
        values, places, CUT=cut is not None, BLOCK=BLOCK, SPAN=SPAN, num_warps=4,
    )  # fmt: skip
    return _combined(values, places)


class SampleSpec(NamedTuple):
    """A request to sampling: device type and dtype of the logits."""

    device: str
    dtype: torch.dtype


SAMPLE: BackendRegistry[SampleSpec, Any] = BackendRegistry("sample_tokens")
REGISTRIES: tuple[BackendRegistry[SampleSpec, Any], ...] = (SAMPLE,)
EXAMPLE = SampleSpec("cpu", torch.float32)


def _triton_why_not(spec: SampleSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


SAMPLE.register(Backend("triton", SamplingKernels(triton_peak, triton_cut, triton_best), 20, _triton_why_not))
SAMPLE.register(Backend("reference", SamplingKernels(reference_peak, reference_cut, reference_best), 0, serve_all))


def sample_tokens(
    logits: Tensor, rows: SamplingRows, *, ranks: VocabularyRanks | None = None, backend: str = "auto"
) -> Tensor:
    """Sample a token id of each row: ``[N, V] -> [N]`` int64. Rows that are not finite give :data:`FAILED`.

    A sample follows from its row, its seed and its position alone. Temperature is applied first, then top-k, top-p and
    min-p. Top-k keeps all logits that equal the ``k``-th. Top-p keeps the smallest set of the most probable tokens that
    reaches the probability, of equal ones the first. Min-p keeps those with at least this share of the largest
    probability.

    Args:
        logits: ``[N, V]``, any columns of which the last dimension is contiguous.
        rows: how each row is sampled.
        ranks: this rank has some of the columns. Rows are not filtered then.
        backend: name of a backend.
    """
    kernels = choose(SAMPLE, SampleSpec(logits.device.type, logits.dtype), backend)
    peak, column = kernels.peak(logits)
    first, columns = (0, logits.shape[-1]) if ranks is None else (ranks.first, ranks.columns)
    own, column = peak, column + first
    if ranks is not None:
        peak = ranks.largest(peak)
    if not rows.greedy:
        cut = kernels.cut(logits, rows, peak) if rows.filtered else None
        own, column = kernels.best(logits, rows, peak, cut, first, columns)
    if ranks is not None:
        column = ranks.column(own, column)
    return torch.where(peak.isfinite(), column, FAILED)
