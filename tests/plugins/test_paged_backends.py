"""Backends of attention to stored keys and values: our tables, lengths and options mean there what they mean here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError, ConfigurationError
from megalight.inference import DynamicEngine
from megalight.nn import attention
from megalight.ops.attention.batch_invariant import PagedAttentionOptions
from megalight.ops.paged_attention import EXAMPLE, reference_paged_attention
from megalight.plugins import flash_attn, flash_mla, flashinfer
from megalight.types import Pages
from tests.inference.test_generate import build
from tests.plugins import fakes
from tests.plugins.fakes import Fakes

GOOD = EXAMPLE._replace(device="cuda", page_size=256)
LATENT = GOOD._replace(head_dim=576, value_dim=512, page_size=64, shared=True)
QUERIES = {"decode": [1, 1, 1], "mixed": [1, 3, 4]}


def rows_of(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """The stored tokens of a sequence in blocks ``[N, page, H, D]``, one after the other."""
    page = pool.shape[1]
    return torch.stack([pool[table[place // page], place % page] for place in range(length)])[None]


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    rest = (causal, softmax_scale, *window_size, softcap)
    parts = zip(q[:, None], block_table, cache_seqlens.tolist(), strict=True)
    return torch.cat([fakes.dense(x, rows_of(k_cache, t, n), rows_of(v_cache, t, n), *rest) for x, t, n in parts])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, block_table: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    lengths = cu_seqlens_k.diff().tolist()
    assert max(lengths) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    keys, values = (
        torch.cat([rows_of(pool, t, n)[0] for t, n in zip(block_table, lengths, strict=True)]) for pool in (k, v)
    )
    return fakes.packed(q, keys, values, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, *window_size, softcap)


def get_mla_metadata(cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int) -> tuple[Tensor, Tensor]:
    return cache_seqlens.clone(), torch.tensor([num_heads_per_head_k, num_heads_k])


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
    tile_scheduler_metadata: Tensor, num_splits: Tensor, softmax_scale: float | None = None, causal: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    assert torch.equal(tile_scheduler_metadata, cache_seqlens)
    assert num_splits.tolist() == [q.shape[1] * q.shape[2], 1]
    parts = zip(q[:, None], block_table, cache_seqlens.tolist(), strict=True)
    found = []
    for x, table, length in parts:
        rows = rows_of(k_cache, table, length)
        found.append(fakes.dense(x, rows, rows[..., :head_dim_v], causal, softmax_scale, -1, -1, 0.0))
    return torch.cat(found), None


class BatchPrefillWithPagedKVCacheWrapper:
    """Notes plans, and runs the newest one."""

    plans: ClassVar[list[BatchPrefillWithPagedKVCacheWrapper]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        causal: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        self.plans.append(self)
        assert qo_indptr.dtype == paged_kv_indptr.dtype == paged_kv_indices.dtype == torch.int32
        last = paged_kv_last_page_len.tolist()
        assert min(last) >= 1
        assert max(last) <= page_size
        self.ends, self.heads = qo_indptr.tolist(), (num_qo_heads, num_kv_heads)
        self.tables = torch.tensor_split(paged_kv_indices, paged_kv_indptr[1:-1].long())
        self.lengths = [page_size * (len(t) - 1) + n for t, n in zip(self.tables, last, strict=True)]
        self.options = (causal, sm_scale, window_left, 0 if causal else -1, logits_soft_cap)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        k, v = paged_kv_cache
        assert (q.shape[1], k.shape[2]) == self.heads
        found = []
        for begin, end, table, length in zip(self.ends, self.ends[1:], self.tables, self.lengths, strict=False):
            keys, values = (rows_of(pool, table, length) for pool in (k, v))
            found.append(fakes.dense(q[None, begin:end], keys, values, *self.options)[0])
        return torch.cat(found)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    found = Fakes(tmp_path, monkeypatch)
    functions = (flash_attn_with_kvcache, flash_attn_varlen_func)
    found.add("flash_attn", "2.8.3", **{each.__name__: each for each in functions})
    found.add("flashinfer", "0.4.1", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    flashinfer._plan.cache_clear()
    BatchPrefillWithPagedKVCacheWrapper.plans.clear()
    found.add("flash_mla", None, get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)
    return found


def stored(queries: list[int], page: int, heads: int, size: int) -> tuple[Tensor, Tensor, Tensor, Pages]:
    torch.manual_seed(0)
    lengths = [length + count for length, count in zip((0, 5, 9), queries, strict=True)]
    width = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * width).view(-1, width).int()
    cu = torch.tensor([0, *torch.tensor(queries).cumsum(0)]).int()
    slots, write = torch.arange(len(lengths)), torch.zeros(sum(queries), dtype=torch.int64)
    counts = tuple(queries)
    # Bounds are no lengths: the host may know less.
    bounds = tuple(length + 2 for length in lengths)
    pages = Pages(table, torch.tensor(lengths).int(), cu, write, slots, page, counts, bounds, True)
    k, v = torch.randn(2, len(lengths) * width * page, heads, size).double()
    return torch.randn(sum(queries), 4, size).double(), k, v, pages


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize(("window", "softcap", "causal"), [(None, None, True), (3, 2.0, True), (2, None, False)])
def test_flash_attn(kind: str, window: int | None, softcap: float | None, causal: bool, packages: Fakes) -> None:
    q, k, v, pages = stored(QUERIES[kind], 4, 2, 8)
    options = PagedAttentionOptions(causal, 0.3, window, None, softcap)
    found = flash_attn.paged(q, k, v, pages, options)
    torch.testing.assert_close(found, reference_paged_attention(q, k, v, pages, options), rtol=1e-9, atol=1e-9)
    assert packages.calls[-1][0] == ("flash_attn_with_kvcache" if kind == "decode" else "flash_attn_varlen_func")


@pytest.mark.parametrize("kind", QUERIES)
def test_flash_mla(kind: str, packages: Fakes) -> None:
    q, k, _, pages = stored(QUERIES[kind], 4, 1, 12)
    options = PagedAttentionOptions(scale=0.3)
    found = flash_mla.paged(q, k, k[..., :8], pages, options)
    expected = reference_paged_attention(q, k, k[..., :8], pages, options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize(("window", "softcap", "causal"), [(None, None, True), (3, 2.0, True), (2, None, False)])
def test_flashinfer_plans_a_pass_once(
    kind: str, window: int | None, softcap: float | None, causal: bool, packages: Fakes
) -> None:
    q, k, v, pages = stored(QUERIES[kind], 4, 2, 8)
    options = PagedAttentionOptions(causal, 0.3, window, None, softcap)
    expected = reference_paged_attention(q, k, v, pages, options)
    # Lengths are read from the device where the host does not know them.
    known = replace(pages, bounds=tuple(pages.lengths.tolist()), lengths=torch.full((3,), -1), exact=True)
    for number, each in enumerate((pages, known), 1):
        for _ in range(2):
            found = flashinfer.paged(q, k, v, each, options)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert len(BatchPrefillWithPagedKVCacheWrapper.plans) == number
    others = flashinfer.paged(q, k, v, known, options._replace(scale=0.5))
    assert not torch.allclose(others, expected), "layers of another scale have a plan of their own"
    assert len({*BatchPrefillWithPagedKVCacheWrapper.plans}) == 2
    with pytest.raises(ConfigurationError, match="which a recorded step does not ask"):
        flashinfer.paged(q, k, v, replace(pages, recorded=True), options)


def test_an_engine_knows_the_lengths_that_are_planned(packages: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for fn in (reference_paged_attention, flashinfer.paged):

        def attend(q: Tensor, k: Tensor, v: Tensor, pages: Pages, fn: Any = fn, **options: Any) -> Tensor:
            assert pages.exact
            options.pop("backend")
            found: Tensor = fn(q, k, v, pages, PagedAttentionOptions(**options))
            return found

        monkeypatch.setattr(attention, "paged_attention", attend)
        engine = DynamicEngine(build(), num_blocks=20, block_size=4, step_tokens=5)
        for prompt in ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10]):
            engine.add(prompt, max_new_tokens=4, seed=0)
        texts.append([each.tokens for each in engine.run().values()])
    assert texts[0] == texts[1]
    assert len(BatchPrefillWithPagedKVCacheWrapper.plans) < 20  # for each pass, not for each layer of it


def test_what_they_cannot_do_is_named(packages: Fakes) -> None:
    assert flashinfer.why_not(GOOD) is None
    for change, reason in (
        ({"sink": True}, "has no sinks"),
        ({"chunk": True}, "has no chunks"),
        ({"quantized": True}, "reads no e4m3"),
        ({"shared": True}, "reads no latents"),
        ({"head_dim": 80, "value_dim": 80}, "needs heads of 64, 128, 256 features"),
    ):
        assert reason in str(flashinfer.why_not(GOOD._replace(**change)))
    assert flash_attn.paged_why_not(GOOD) is None
    assert flash_mla.why_not(LATENT) is None
    for change, reason in (
        ({"sink": True}, "has no sinks"),
        ({"chunk": True}, "has no chunks"),
        ({"quantized": True}, "reads no e4m3"),
        ({"shared": True}, "reads no latents"),
        ({"page_size": 16}, "multiple of 256 tokens, not 16: set block_size"),
    ):
        assert reason in str(flash_attn.paged_why_not(GOOD._replace(**change)))
    for change, reason in (
        ({"window": True}, "has no window"),
        ({"softcap": True}, "has no softcap"),
        ({"quantized": True}, "reads no e4m3"),
        ({"shared": False}, "reads latents"),
        ({"page_size": 16}, "needs blocks of 64 tokens, not 16"),
    ):
        assert reason in str(flash_mla.why_not(LATENT._replace(**change)))


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_cuda(monkeypatch)
    reason = str(flash_attn.paged_why_not(GOOD))
    assert "needs the package flash_attn, which is not installed. Next: pip install" in reason
    assert "Next: pip install git+https://github.com/deepseek-ai/FlashMLA" in str(flash_mla.why_not(LATENT))
    assert "Next: pip install flashinfer-python" in str(flashinfer.why_not(GOOD))


def test_an_engine_takes_the_blocks_of_its_backend() -> None:
    texts = []
    for backend in ("auto", "reference"):
        engine = DynamicEngine(build(), num_blocks=4, attention_backend=backend)
        assert engine.blocks.size == 16
        number = engine.add([1, 2, 3], max_new_tokens=3, seed=0)
        texts.append(engine.run()[number].tokens)
    assert texts[0] == texts[1]
    engine = DynamicEngine(build(), num_blocks=4, attention_backend="flash_attn")
    assert engine.blocks.size == 256
    engine.add([1, 2, 3], max_new_tokens=3, seed=0)
    with pytest.raises(BackendError, match="backend 'flash_attn' of paged_attention cannot serve"):
        engine.run()
    with pytest.raises(BackendError, match="has no backend 'flash'"):
        DynamicEngine(build(), num_blocks=4, attention_backend="flash")
