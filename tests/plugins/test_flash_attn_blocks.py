"""Blocks of ring attention by flash-attn 4, with a stand-in that has the names and shapes of its functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.ops.attention_block import EXAMPLE
from megalight.ops.attention_block.torch_kernels import reference_backward, reference_forward
from megalight.plugins import flash_attn
from megalight.types import PackedSequences
from tests.plugins import fakes
from tests.plugins.fakes import Fakes

GOOD = EXAMPLE._replace(device="cuda")


def cut(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> PackedSequences | None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    queries, keys = (PackedSequences.of_lengths(cu.diff().tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
    return replace(queries, keys=keys)


def left(window_size_left: int | None, window_size_right: int | None, causal: bool) -> int | None:
    assert window_size_left is None or (window_size_right == 0 and causal)
    return window_size_left


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: Any = None, causal: bool = False, window_size_left: Any = None,
    window_size_right: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    assert return_lse
    sequences, window = cut(cu_seqlens_q, cu_seqlens_k), left(window_size_left, window_size_right, causal)
    if sequences is None:
        return *reference_forward(q, k, v, None, causal, softmax_scale, window), None
    assert (max_seqlen_q, max_seqlen_k) == (sequences.max_length, sequences.keys.max_length)  # type: ignore[union-attr]
    out, lse = reference_forward(q[None], k[None], v[None], sequences, causal, softmax_scale, window)
    return out[0], lse[0], None  # log-sum-exps [H, T]


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: Any = None,
    causal: bool = False, window_size_left: Any = None, window_size_right: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, deterministic: bool = False,
) -> Any:  # fmt: skip
    sequences, window = cut(cu_seqlens_q, cu_seqlens_k), left(window_size_left, window_size_right, causal)
    if sequences is None:
        return reference_backward(dout, q, k, v, out, lse, None, causal, softmax_scale, window)
    rows = (t[None] for t in (dout, q, k, v, out, lse))
    return tuple(t[0] for t in reference_backward(*rows, sequences, causal, softmax_scale, window))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    packages = Fakes(tmp_path, monkeypatch)
    packages.add(flash_attn.BLOCKS_MODULE, _flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)
    return packages


LAYOUTS = {
    "dense": None,
    "packed": PackedSequences.of_lengths([3, 1, 8]),
    "keys": replace(PackedSequences.of_lengths([3, 1, 8]), keys=PackedSequences.of_lengths([5, 9, 11])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None)])
def test_arguments_mean_what_the_op_means(packages: Fakes, layout: str, causal: bool, window: int | None) -> None:
    sequences = LAYOUTS[layout]
    queries = 12 if sequences is None else sequences.num_tokens
    keys = queries if sequences is None else (sequences.keys or sequences).num_tokens
    batch = 2 if sequences is None else 1
    shapes = (batch, queries, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 8)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    options = (sequences, causal, 0.3, window)
    out, lse = flash_attn.forward(*tensors, *options)
    wanted, wanted_lse = reference_forward(*tensors, *options)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    grad = torch.randn_like(out)
    # The merged log-sum-exp is larger than the block's own.
    found = flash_attn.backward(grad, *tensors, out, lse + 0.5, *options)
    torch.testing.assert_close(found, reference_backward(grad, *tensors, wanted, wanted_lse + 0.5, *options))
    assert packages.called("_flash_attn_bwd")[1]["deterministic"] is False


def test_what_it_cannot_serve(packages: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_attn.blocks_why_not(GOOD) is None
    assert "equal key and value heads" in str(flash_attn.blocks_why_not(GOOD._replace(value_dim=64)))
    assert "serves bfloat16" in str(flash_attn.blocks_why_not(GOOD._replace(dtype=torch.float32)))
    wide = GOOD._replace(head_dim=256, value_dim=256)
    assert flash_attn.blocks_why_not(wide) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert flash_attn.blocks_why_not(wide) == "serves heads up to 128 on this device, not 256"


def test_a_release_with_other_arguments_is_told(packages: Fakes) -> None:
    def changed(q: Tensor, *, softmax_scale: Any = None) -> None: ...

    packages.add(flash_attn.BLOCKS_MODULE, _flash_attn_bwd=changed)
    assert "_flash_attn_bwd takes no causal, window_size_left" in str(flash_attn.blocks_why_not(GOOD))
