"""Attention through block tables equals attention to each sequence's keys, in the reference and in the kernels."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.imports import has
from megalight.inference import Cache
from megalight.models.gpt import GPT, GPTConfig, InitConfig
from megalight.nn.init import initialize
from megalight.ops.attention import attention
from megalight.ops.attention.batch_invariant import PagedAttentionOptions
from megalight.ops.paged_append import append_latents, dequantize_heads, paged_append
from megalight.ops.paged_attention import paged_attention
from megalight.ops.rotary import apply_rotary, rotary_table
from megalight.parallel.graphs.fingerprint import Inspection
from megalight.types import AttentionSpan, PackedSequences, Pages
from tests.ops.checks import TOLERANCE, error

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 3, "softcap": 1.5},
    {"chunk": 4, "scale": 0.3},
    {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])},
    {"causal": False},
]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
needs_interpreter = pytest.mark.skipif(
    not has("triton") or torch.cuda.is_available(), reason="needs triton, and no GPU (where the kernels run for real)"
)


def make_pages(queries: list[int], totals: list[int], size: int, blocks: int) -> Pages:
    """Sequences in blocks of any order; no block is used twice."""
    order = torch.randperm(blocks).tolist()
    width = -(-max(totals) // size)
    table = torch.zeros(len(totals), width + 1, dtype=torch.int32)
    for row, total in zip(table, totals, strict=True):
        for place in range(-(-total // size)):
            row[place] = order.pop()
    write = [
        int(row[place // size]) * size + place % size
        for row, count, total in zip(table, queries, totals, strict=True)
        for place in range(total - count, total)
    ]
    cu_queries = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor(totals, dtype=torch.int32)
    slots, bounds = torch.arange(len(totals)), tuple(total + 1 for total in totals)
    return Pages(table, lengths, cu_queries, torch.tensor(write), slots, size, tuple(queries), bounds, True)


def stored(pages: Pages, totals: list[int], blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A pool whose other rows are NaN, and the rows of each sequence."""
    pool = torch.full((blocks * pages.page_size, *shape), torch.nan, dtype=dtype)
    rows = pages.rows(0, totals)
    values = torch.randn(len(rows), *shape, dtype=dtype)
    pool[rows] = values
    return pool, values


def check(run: Any, queries: list[int], totals: list[int], dtype: torch.dtype, size: int = 4, **options: Any) -> None:
    torch.manual_seed(0)
    pages = make_pages(queries, totals, size, 24)
    q = torch.randn(sum(queries), 6, 20, dtype=dtype)
    (k_pool, k), (v_pool, v) = (stored(pages, totals, 24, (2, features), dtype) for features in (20, 12))
    whole = PackedSequences.of_lengths(queries)
    keys = PackedSequences.of_lengths(totals)
    described = PackedSequences(whole.lengths, whole.cu_seqlens, whole.positions, whole.uniform, keys=keys)
    if "sink" in options:
        options["sink"] = options["sink"].to(dtype)
    # The reference of attention has no runs of its own for chunks with keys, so those are cut as sequences.
    expected = attention(*(t.double() for t in (q, k, v)), described, backend="reference", **options)
    # Blocks before all that is seen may have been given to others.
    span = AttentionSpan(options.get("window"), options.get("chunk"))
    gone = [span.first(total - count) for count, total in zip(queries, totals, strict=True)]
    for pool in (k_pool, v_pool):
        pool[pages.rows(0, gone)] = torch.nan
    found = run(q, k_pool, v_pool, pages, **options)
    assert error(found, expected) <= TOLERANCE[dtype]


LENGTHS = [([1, 1, 1], [5, 1, 50]), ([1, 1, 3, 9], [9, 4, 3, 12]), ([2, 2], [7, 2])]


@pytest.mark.parametrize(("queries", "totals"), LENGTHS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference(queries: list[int], totals: list[int], options: dict[str, Any]) -> None:
    check(paged_attention, queries, totals, torch.float64, **options)


def as_recorded(pages: Pages, decodes: int, prefills: int, tokens: int) -> Pages:
    """The pages of a graph with more places for sequences, and for tokens: the last sequence is padding."""
    first = min(pages.decodes, decodes)
    place = torch.tensor([*range(first), *range(decodes, decodes + len(pages.lengths) - first)])
    count = decodes + prefills + 1
    queries = torch.zeros(count, dtype=torch.int32)
    queries[place] = pages.cu_queries.diff()
    queries[-1] = tokens - queries.sum()
    lengths, table = torch.zeros(count, dtype=torch.int32), torch.zeros(count, pages.block_table.shape[1]).int()
    lengths[place], table[place] = pages.lengths, pages.block_table
    return replace(
        pages,
        block_table=table,
        lengths=lengths,
        cu_queries=torch.cat([queries.new_zeros(1), queries.cumsum(0)]).int(),
        query_lengths=(1,) * decodes + (tokens,) * (prefills + 1),
        bounds=(max(pages.bounds) + 1,) * count,
        recorded=True,
    )


RECORDED = [([1, 1, 3, 9], [9, 4, 3, 12], (3, 3, 20)), ([1, 1, 1, 4], [9, 4, 3, 12], (1, 3, 8)), ([1], [5], (1, 2, 3))]


def check_recorded(
    run: Any, queries: list[int], totals: list[int], size: tuple[int, int, int], dtype: torch.dtype, **options: Any
) -> None:
    """What a graph computes of its places for sequences and tokens is what a pass without padding does."""

    def padded(q: Tensor, k: Tensor, v: Tensor, pages: Pages, **given: Any) -> Tensor:
        filled = torch.cat([q, torch.randn(size[2] - len(q), *q.shape[1:], dtype=q.dtype)])
        found = run(filled, k, v, as_recorded(pages, *size), **given)
        assert len(found) == size[2]
        return found[: len(q)]

    check(padded, queries, totals, dtype, **options)


@pytest.mark.parametrize(("queries", "totals", "size"), RECORDED)
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_reference_with_padding(
    queries: list[int], totals: list[int], size: tuple[int, int, int], options: dict[str, Any]
) -> None:
    check_recorded(paged_attention, queries, totals, size, torch.float64, **options)


def kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    return importlib.import_module(f"megalight.ops.{name}.triton")


@needs_interpreter
@pytest.mark.parametrize(("queries", "totals"), LENGTHS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernels(
    queries: list[int], totals: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kernels("paged_attention", monkeypatch)
    monkeypatch.setattr(module, "splits_of", lambda *_: 4)
    monkeypatch.setattr(module, "_blocks", lambda *given: (16, 16, 4, 1))

    def run(q: Tensor, k: Tensor, v: Tensor, pages: Pages, **given: Any) -> Any:
        return module.paged_attention(q, k, v, pages, PagedAttentionOptions(**given))

    check(run, queries, totals, torch.float32, **options)


# Parts of places without a sequence hold anything; what is made of them is overwritten.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@needs_interpreter
@pytest.mark.parametrize(("queries", "totals", "size"), RECORDED)
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_kernels_with_padding(
    queries: list[int],
    totals: list[int],
    size: tuple[int, int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = kernels("paged_attention", monkeypatch)
    monkeypatch.setattr(module, "splits_of", lambda *_: 4)
    monkeypatch.setattr(module, "_blocks", lambda *given: (16, 16, 4, 1))

    def run(q: Tensor, k: Tensor, v: Tensor, pages: Pages, **given: Any) -> Any:
        found = module.paged_attention(q, k, v, pages, PagedAttentionOptions(**given))
        assert not found[sum(queries) :].any()  # padding sees nothing
        return found

    check_recorded(run, queries, totals, size, torch.float32, **options)


@needs_interpreter
@pytest.mark.parametrize("queries", [[1, 1], [3, 1]])
def test_kernels_of_latents(queries: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One key head for all query heads, whose first features are the values."""
    module = kernels("paged_attention", monkeypatch)
    torch.manual_seed(0)
    totals = [40, 5]
    pages = make_pages(queries, totals, 8, 8)
    pool, _ = stored(pages, totals, 8, (1, 20), torch.float32)
    q, values = torch.randn(sum(queries), 20, 20), pool[..., :14]
    expected = paged_attention(q.double(), pool.double(), values.double(), pages)
    found = module.paged_attention(q, pool, values, pages, PagedAttentionOptions())
    assert error(found, expected) <= TOLERANCE[torch.float32]


def eight_bits(rounds: bool, append: Any, attend: Any, queries: list[int], totals: list[int], **options: Any) -> None:
    """Append to pools of e4m3 what follows stored tokens, and attend, as to the float64 values of all."""
    torch.manual_seed(0)
    pages = make_pages(queries, totals, 4, 24)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pools = [torch.zeros(96, 2, size, dtype=torch.float8_e4m3fn) for size in (20, 12)]
    scales = torch.full((96, 2), torch.nan), torch.full((96, 2), torch.nan)
    everything = [torch.randn(sum(totals), 2, size) * 10.0 ** torch.arange(-2, 0)[:, None] for size in (20, 12)]
    everything[1][0] = 0
    rows, new = pages.rows(0, totals), pages.write
    old = torch.tensor([place for place, row in enumerate(rows) if row not in new])
    own = torch.tensor([(rows == row).nonzero().item() for row in new])
    q = torch.randn(sum(queries), 6, 20)
    pages, q, pools, scales, rows = _to(device, pages, q, pools, scales, rows)
    k, v = (t.to(device, dtype) for t in everything)
    reference = importlib.import_module("megalight.ops.paged_append").reference_paged_append
    reference(q[:0], k[old], v[old], *pools, rows[old.to(device)], None, None, False, scales)
    append(q.to(dtype), k[own], v[own], *pools, pages.write, None, None, False, scales)
    wide = [dequantize_heads(pool, scale, torch.float64) for pool, scale in zip(pools, scales, strict=True)]
    for found, given in zip(wide, (k, v), strict=True):
        # 4 significant bits, from 2 ** -6 of what the largest value of the head maps to 448 of
        largest = given.double().abs().amax(-1, keepdim=True)
        within = (found[rows] - given.double()).abs() <= given.double().abs() / 16 + largest * 2**-9 / 448
        # The interpreter rounds to 8 bits wrongly.
        assert within.all() or not rounds
    q = q.to(dtype)
    expected = paged_attention(q.double(), *wide, pages, backend="reference", **options)
    assert error(attend(q, *pools, pages, scales, **options), expected) <= TOLERANCE[dtype]


def _to(device: str, pages: Pages, *rest: Any) -> Any:
    names = ("block_table", "lengths", "cu_queries", "write", "state_slot")
    moved = replace(pages, **{name: getattr(pages, name).to(device) for name in names})
    return moved, *torch.utils._pytree.tree_map(lambda t: t.to(device), rest)


EIGHT = [([1, 1, 1], [5, 1, 17], {}), ([1, 1, 3, 9], [9, 4, 3, 12], {"window": 3, "softcap": 1.5})]


@pytest.mark.parametrize(("queries", "totals", "options"), EIGHT)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_pools_of_eight_bits(
    backend: str, queries: list[int], totals: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    append, attend = (importlib.import_module(f"megalight.ops.paged_{name}") for name in ("append", "attention"))
    if backend == "triton":
        one, other = kernels("paged_append", monkeypatch), kernels("paged_attention", monkeypatch)
        monkeypatch.setattr(other, "splits_of", lambda *_: 4)
        monkeypatch.setattr(other, "_blocks", lambda *given: (16, 16, 4, 1))
        appended, attended = one.paged_append, other.paged_attention
    else:
        appended, attended = append.reference_paged_append, attend.reference_paged_attention

    def run(q: Tensor, k: Tensor, v: Tensor, pages: Pages, scales: Any, **given: Any) -> Any:
        return attended(q, k, v, pages, PagedAttentionOptions(scales=scales, **given))

    eight_bits(backend == "reference", appended, run, queries, totals, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "totals", "options"), EIGHT)
def test_pools_of_eight_bits_on_a_gpu(queries: list[int], totals: list[int], options: dict[str, Any]) -> None:
    def append(*given: Any) -> None:
        paged_append(*given[:8], interleaved=given[8], scales=given[9], backend="triton")

    def attend(q: Tensor, k: Tensor, v: Tensor, pages: Pages, scales: Any, **given: Any) -> Any:
        return paged_attention(q, k, v, pages, scales=scales, backend="triton", **given)

    eight_bits(True, append, attend, queries, totals, **options)


def latents_of_eight_bits(
    append: Any, attend: Any, queries: list[int], totals: list[int], sizes: tuple[int, int], rounds: bool, padding: Any
) -> None:
    """Append latents and rotated keys to what is stored, and attend, as to the float64 values of all."""
    torch.manual_seed(0)
    (rank, rotary), device = sizes, "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    blocks = sum(-(-total // 4) for total in totals) + 2
    pages = make_pages(queries, totals, 4, blocks)
    latents = torch.zeros(blocks * 4, rank, dtype=torch.float8_e4m3fn)
    turned, scales = torch.full((blocks * 4, rotary), torch.nan, dtype=dtype), torch.full((blocks * 4,), torch.nan)
    # Parts of one projection. Latents of one token are all 0, those of another 1,000 times as small.
    given = torch.randn(sum(totals), rank + rotary).to(dtype)
    given[0, :rank] = 0
    given[-1, :rank] /= 1000
    rows = pages.rows(0, totals)
    new = torch.isin(rows, pages.write)
    q = torch.randn(sum(queries), 20, rank + rotary).to(dtype)
    pages, q, latents, turned, scales, given, rows, new = _to(
        device, pages, q, latents, turned, scales, given, rows, new
    )
    latent, key = given.split([rank, rotary], 1)
    reference = importlib.import_module("megalight.ops.paged_append").reference_append_latents
    reference(latent[~new], key[~new], latents, turned, scales, rows[~new])
    append(latent[new], key[new], latents, turned, scales, pages.write)
    assert turned[rows].equal(key)
    found = dequantize_heads(latents, scales, torch.float64)
    # 4 significant bits, from 2 ** -6 of what the largest value of the token maps to 448 of
    exact = latent.double()
    within = (found[rows] - exact).abs() <= exact.abs() / 16 + exact.abs().amax(-1, keepdim=True) * 2**-9 / 448
    assert within.all() or not rounds
    expected = paged_attention(q.double(), torch.cat([found, turned.double()], 1)[:, None], found[:, None], pages)
    heads = latents[:, None]
    if padding:
        q, pages = torch.cat([q, q.new_ones(padding[2] - len(q), *q.shape[1:])]), as_recorded(pages, *padding)
    mixed = attend(q, heads, heads, pages, (scales[:, None],) * 2, turned[:, None])
    assert error(mixed[: sum(queries)], expected) <= TOLERANCE[dtype]
    # What 8 bits cost beside full precision: values are within 1 / 16, and half of that on average.
    pool = torch.zeros(blocks * 4, 1, rank + rotary, dtype=torch.float64, device=device)
    pool[rows, 0] = given.double()
    full = paged_attention(q.double(), pool, pool[..., :rank], pages)[: sum(queries)]
    assert error(mixed[: sum(queries)], full) < 0.05 or not rounds


LATENTS: list[tuple[list[int], list[int], Any]] = [
    ([1, 1, 1], [5, 1, 17], None),
    ([1, 1, 3, 9], [9, 4, 3, 12], None),
    ([1, 1, 3], [9, 4, 3], (3, 2, 9)),
]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(("queries", "totals", "padding"), LATENTS)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_latents_of_eight_bits(
    backend: str, queries: list[int], totals: list[int], padding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, attend = (importlib.import_module(f"megalight.ops.paged_{name}") for name in ("append", "attention"))
    if backend == "triton":
        one, other = kernels("paged_append", monkeypatch), kernels("paged_attention", monkeypatch)
        monkeypatch.setattr(other, "splits_of", lambda *_: 4)
        monkeypatch.setattr(other, "_blocks", lambda *given: (16, 16, 4, 1))
        appended, attended = one.append_latents, other.paged_attention
    else:
        appended, attended = append.reference_append_latents, attend.reference_paged_attention

    def run(q: Tensor, k: Tensor, v: Tensor, pages: Pages, scales: Any, rotary: Tensor) -> Any:
        return attended(q, k, v, pages, PagedAttentionOptions(scales=scales, rotary_pool=rotary))

    latents_of_eight_bits(appended, run, queries, totals, (18, 6), backend == "reference", padding)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "totals"), [([1, 1, 1], [5, 1, 300]), ([1, 1, 3, 200], [900, 4, 30, 333])])
@pytest.mark.parametrize("sizes", [(512, 64), (40, 8)])
def test_latents_of_eight_bits_on_a_gpu(queries: list[int], totals: list[int], sizes: tuple[int, int]) -> None:
    def append(*given: Any) -> None:
        append_latents(*given, backend="triton")

    def attend(q: Tensor, k: Tensor, v: Tensor, pages: Pages, scales: Any, rotary: Tensor) -> Tensor:
        return paged_attention(q, k, v, pages, scales=scales, rotary_pool=rotary, backend="triton")

    latents_of_eight_bits(append, attend, queries, totals, sizes, True, None)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_append_rotates_and_stores(interleaved: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # parts of one projection, of which 6 of 10 features turn
    q, k, v = torch.randn(5, 8, 10).split([4, 2, 2], 1)
    cos, sin = rotary_table(torch.arange(3, 8), 6, 10000.0)
    write = torch.tensor([7, 0, 3, 11, 4])
    run = paged_append
    if backend == "triton":
        module = kernels("paged_append", monkeypatch)
        run = lambda *given, interleaved: module.paged_append(*given, interleaved, None)  # noqa: E731
    for angles in ((cos, sin), (None, None)):
        k_pool, v_pool = torch.zeros(12, 2, 10), torch.zeros(12, 2, 10)
        found = run(q, k, v, k_pool, v_pool, write, *angles, interleaved=interleaved)
        turned = [t if angles[0] is None else apply_rotary(t, cos, sin, interleaved) for t in (q, k)]
        torch.testing.assert_close(found, turned[0])
        torch.testing.assert_close(k_pool[write], turned[1])
        assert v_pool[write].equal(v)
        others = [row for row in range(12) if row not in write]
        assert not k_pool[others].any()
        assert not v_pool[others].any()


def test_a_decode_step_waits_for_nothing_that_only_the_device_knows() -> None:
    config = GPTConfig(
        num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=61, max_sequence_length=40,
        mixer_pattern=("attention", "conv"), init=InitConfig(std=0.4),
    )  # fmt: skip
    model = GPT(config).double()
    initialize(model, 5)
    cache = Cache(model.layers, 3, 12)
    with torch.no_grad():
        model(torch.arange(14), cache.extend([0, 1, 2], [5, 2, 7], "cpu"), states=cache.states)
        sequences = cache.extend([0, 1, 2], [1, 1, 1], "cpu")
        with Inspection(torch.device("cpu")) as inspection:
            model(torch.full((3,), 3), sequences, states=cache.states)
    assert inspection.reasons == []


def test_sequences_with_pages_are_not_padded() -> None:
    with pytest.raises(DataError, match="cannot be padded"):
        Cache({}, 1, 8).extend([0], [3], "cpu").pad_to(4)
