from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megalight.ops import activation as activation_op
from megalight.ops import adam as adam_op
from megalight.ops import attention as attention_op
from megalight.ops import linear as wgrad
from megalight.ops import norm as norm_op
from megalight.plugins.transformer_engine import attention
from megalight.plugins.transformer_engine import kernels as activation
from megalight.types import PackedSequences
from tests.ops.checks import check_activations, check_adam, check_norms, check_weight_gradient
from tests.plugins import fakes, kernels
from tests.plugins.fakes import Fakes
from tests.plugins.test_flash_attn import LAYOUTS

WHY_NOT: dict[str, tuple[Callable[[Any], str | None], Any]] = {
    "attention": (attention.why_not, attention_op.EXAMPLE),
    "rms": (activation.rms_why_not, norm_op.EXAMPLE),
    "layer": (activation.layer_why_not, norm_op.EXAMPLE),
    "gated": (activation.gated_why_not, activation_op.EXAMPLE),
    "activation": (activation.activation_why_not, activation_op.EXAMPLE),
    "weight gradient": (activation.weight_gradient_why_not, wgrad.EXAMPLE),
    "adam": (activation.adam_why_not, adam_op.EXAMPLE),
}


class DotProductAttention(torch.nn.Module):
    """The module's arguments, rules on masks and windows, and output ``[..., H * D]``."""

    made: ClassVar[list[DotProductAttention]] = []

    def __init__(
        self, num_attention_heads: int, kv_channels: tuple[int, int], num_gqa_groups: int,
        attention_dropout: float = 0.0, softmax_scale: float | None = None, attention_type: str = "self",
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.dims, self.groups = num_attention_heads, kv_channels, num_gqa_groups
        self.dropout, self.scale, self.kind = attention_dropout, softmax_scale, attention_type
        self.made.append(self)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, qkv_format: str, attn_mask_type: str, window_size: tuple[int, int],
        cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None,
        pad_between_seqs: Any = None,
    ) -> Tensor:  # fmt: skip
        assert (q.shape[-2], k.shape[-2]) == (self.heads, self.groups)
        assert (q.shape[-1], v.shape[-1]) == self.dims
        causal = "causal" in attn_mask_type
        left, right = window_size
        assert right == 0 if causal else (left, right) == (-1, -1)
        rest = (causal, self.scale, left, right, 0.0)
        if qkv_format == "bshd":
            assert "padding" not in attn_mask_type
            assert q.ndim == 4
            assert q.shape[1] == k.shape[1] or not causal or attn_mask_type.endswith("bottom_right")
            return fakes.dense(q, k, v, *rest).flatten(2)
        assert qkv_format == "thd"
        assert attn_mask_type.startswith("padding")
        assert q.ndim == 3
        assert max_seqlen_q % 64 == max_seqlen_kv % 64 == 0
        assert pad_between_seqs is False
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_kv >= int(cu_seqlens_kv.diff().max())
        return fakes.packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, *rest).flatten(1)


def install(packages: Fakes, version: str = "2.12.0", gemm: Any = kernels.general_gemm) -> None:
    packages.add("transformer_engine", version)
    packages.add("transformer_engine.pytorch", DotProductAttention=DotProductAttention)
    packages.add("transformer_engine.pytorch.constants", TE_DType=kernels.DTYPES)
    packages.add("transformer_engine.pytorch.cpp_extensions", general_gemm=gemm)
    packages.add("transformer_engine.pytorch.optimizers", multi_tensor_applier=kernels.multi_tensor_applier)
    adams = (kernels.multi_tensor_adam, kernels.multi_tensor_adam_capturable)
    compiled = {**kernels.te_norms(), **kernels.te_activations(), **{f.__name__: f for f in adams}}
    packages.add("transformer_engine_torch", **compiled)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    monkeypatch.setattr(DotProductAttention, "made", [])
    attention._module.cache_clear()
    return Fakes(tmp_path, monkeypatch)


@pytest.fixture
def te(packages: Fakes) -> Fakes:
    install(packages)
    return packages


@pytest.mark.parametrize("name", WHY_NOT)
def test_all_serve_where_the_package_is(te: Fakes, name: str) -> None:
    why_not, spec = WHY_NOT[name]
    assert why_not(spec) is None


@pytest.mark.parametrize("name", WHY_NOT)
def test_an_old_release_is_named(packages: Fakes, name: str) -> None:
    install(packages, "1.13.0.post1")
    why_not, spec = WHY_NOT[name]
    reason = why_not(spec)
    assert "needs transformer_engine >= 2." in reason
    assert "found 1.13.0.post1" in reason
    assert "pip install" in reason


def test_each_feature_has_its_own_minimum(packages: Fakes) -> None:
    install(packages, "2.4.0")
    answers = {name: why_not(spec) for name, (why_not, spec) in WHY_NOT.items()}
    assert {name for name, reason in answers.items() if reason} == {"gated", "activation"}
    assert answers["gated"].startswith("the activation swiglu needs transformer_engine >= 2.8, found 2.4.0. Next: pip")


@pytest.mark.parametrize("name", WHY_NOT)
def test_an_absent_package_is_named(packages: Fakes, name: str) -> None:
    why_not, spec = WHY_NOT[name]
    assert "needs the package transformer_engine, which is not installed. Next: pip install" in why_not(spec)


@pytest.mark.parametrize("name", WHY_NOT)
@pytest.mark.parametrize("line", ["raise OSError('libcudnn.so.9')", "raise AssertionError('torch is too old')"])
def test_a_broken_package_is_a_reason(packages: Fakes, name: str, line: str) -> None:
    packages.broken("transformer_engine", line)
    why_not, spec = WHY_NOT[name]
    reason = why_not(spec)
    assert "could not be imported" in reason
    assert line.split("'")[1] in reason


def test_a_missing_symbol_is_a_reason(te: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine_torch as kernels_module

    monkeypatch.delattr(kernels_module, "dswiglu")
    reason = activation.gated_why_not(activation_op.EXAMPLE)
    assert reason.startswith(
        "the activation swiglu: transformer_engine_torch has no dswiglu in transformer-engine 2.12.0"
    )
    assert activation.activation_why_not(activation_op.EXAMPLE) is None


def test_what_it_does_not_serve(te: Fakes) -> None:
    spec = attention_op.EXAMPLE
    assert attention.why_not(spec._replace(softcap=True)) == "has no soft cap on scores"
    assert "causal attention only" in attention.why_not(spec._replace(causal=False, window=True))
    assert "bfloat16 and float16" in attention.why_not(spec._replace(dtype=torch.float32))
    assert "up to 256" in attention.why_not(spec._replace(head_dim=320))
    assert "weight in the dtype of the input" in activation.rms_why_not(
        norm_op.EXAMPLE._replace(weight_dtype=torch.float32)
    )
    assert "not torch.float64" in activation.rms_why_not(norm_op.EXAMPLE._replace(dtype=torch.float64))
    assert activation.gated_why_not(activation_op.EXAMPLE._replace(kind="gelu")).startswith("has no gelu; it has silu")
    assert "main gradient in float32" in activation.weight_gradient_why_not(
        wgrad.EXAMPLE._replace(main_dtype=torch.float16)
    )
    assert "moments in float32" in activation.adam_why_not(adam_op.EXAMPLE._replace(dtype=torch.bfloat16))
    assert "contiguous" in activation.adam_why_not(adam_op.EXAMPLE._replace(contiguous=False))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None)])
def test_attention(te: Fakes, layout: str, causal: bool, window: int | None) -> None:
    sequences = LAYOUTS[layout]
    keys = sequences.keys or sequences
    shapes = ((sequences.num_tokens, 4, 8), (keys.num_tokens, 2, 8), (keys.num_tokens, 2, 16))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options = (sequences, causal, 0.3, window, None, 0.0)
    out = attention.attention(*tensors, *options)
    expected = attention_op.reference_attention(*tensors, *options)
    weight = torch.randn_like(expected)
    for made, wanted in zip(
        (out, *torch.autograd.grad(out, tensors, weight)),
        (expected, *torch.autograd.grad(expected, tensors, weight)),
        strict=True,
    ):
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)
    (module,) = DotProductAttention.made
    assert module.kind == ("cross" if "cached" in layout else "self")


def test_layers_of_one_kind_share_a_module(te: Fakes) -> None:
    q = torch.randn(12, 2, 8)
    sequences = PackedSequences.of_uniform(2, 6)
    for _ in range(3):
        attention.attention(q, q, q, sequences, True, None, None, None, 0.0)
    assert [module.training for module in DotProductAttention.made] == [False]
    attention.attention(q.requires_grad_(), q, q, sequences, True, None, None, None, 0.0)
    with torch.no_grad():  # the first pass of a layer that is recomputed
        attention.attention(q, q, q, sequences, True, None, None, None, 0.5)
    assert [(module.training, module.dropout) for module in DotProductAttention.made[1:]] == [(True, 0.0), (True, 0.5)]


def test_norms(te: Fakes) -> None:
    for dtype in (torch.float64, torch.float32):
        check_norms(activation, "cpu", dtype, (5, 3, 24))


@pytest.mark.parametrize("kind", activation.KINDS)
def test_activations(te: Fakes, kind: str) -> None:
    check_activations(activation, "cpu", torch.float64, (7, 5), kind)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient(te: Fakes, main_dtype: torch.dtype) -> None:
    check_weight_gradient(activation.accumulate, "cpu", torch.bfloat16, main_dtype, 63, 12, 20)
    assert "workspace" not in te.called("general_gemm")[1]


def test_older_releases_get_their_workspace(packages: Fakes) -> None:
    def general_gemm(a: Tensor, b: Tensor, workspace: str, **options: Any) -> Any:
        assert workspace == "space"
        return kernels.general_gemm(a, b, **options)

    install(packages, "2.4.0")
    packages.add("transformer_engine.pytorch.module.base", get_workspace=lambda: "space")
    import transformer_engine.pytorch.cpp_extensions as extensions

    extensions.general_gemm = general_gemm
    check_weight_gradient(activation.accumulate, "cpu", torch.bfloat16, torch.float32, 63, 12, 20)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_adam(te: Fakes, decoupled: bool, tensors: bool, out_dtype: torch.dtype | None) -> None:
    check_adam(activation.adam_step, "cpu", 103, decoupled=decoupled, tensors=tensors, out_dtype=out_dtype)
    kernel = "multi_tensor_adam_capturable" if tensors else "multi_tensor_adam"
    assert len(te.called(kernel)[0][2]) == (5 if out_dtype and not tensors else 4)


def test_adam_takes_half_gradients(te: Fakes) -> None:
    check_adam(activation.adam_step, "cpu", 103, grad_dtype=torch.bfloat16, out_dtype=torch.bfloat16)
