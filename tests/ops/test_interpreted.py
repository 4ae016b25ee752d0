"""The Triton kernels' logic, run by Triton's interpreter on the CPU, where Triton is installed and no GPU is there."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megalight.imports import has
from megalight.ops.delta_rule import reference_delta_rule
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Scheme, amax_history, amax_of
from megalight.ops.quantize.recipes import recipe
from megalight.ops.rotary import rotary_table
from megalight.ops.row_indexing import split
from megalight.types import PackedSequences
from tests.ops import checks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's own
    pytest.mark.skipif(
        not has("triton") or torch.cuda.is_available(),
        reason="needs triton, and no GPU (where the kernels run for real)",
    ),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def kernels(op: str) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    module = importlib.import_module(f"megalight.ops.{op}")
    beside = hasattr(module, "__path__") and find_spec(f"megalight.ops.{op}.triton")
    return importlib.import_module(f"megalight.ops.{op}.triton") if beside else checks.Kernels(module)


@pytest.mark.parametrize("shape", [(5, 63), (3, 2, 64), (4, 2500)])
def test_norms(shape: tuple[int, ...]) -> None:
    checks.check_norms(kernels("norm"), "cpu", torch.float32, shape)


def test_norms_add_to_main_gradients() -> None:
    checks.check_norms_main_gradients(kernels("norm"), "cpu", torch.float32, (5, 63))


@pytest.mark.parametrize(
    ("lengths", "sizes"), [([5, 1, 60, 33], (6, 3, 10, 16)), ([32, 32], (2, 1, 16, 20)), ([31, 1, 40], (2, 2, 3, 4))]
)
def test_ssd(lengths: list[int], sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("ssd")
    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(module, "PART", 16)
    checks.check_ssd(module, "cpu", torch.float32, lengths, sizes)


@pytest.mark.parametrize(("lengths", "sizes"), [([1, 1, 5, 20, 1], (4, 2, 20, 10)), ([1, 1, 1], (2, 1, 8, 16))])
def test_ssd_continued(lengths: list[int], sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("ssd")
    module = importlib.import_module("megalight.ops.ssd.continued")
    for name in ("CHUNK", "PART", "TALL"):
        monkeypatch.setattr(module, name, 16)
    monkeypatch.setattr(importlib.import_module("megalight.ops.ssd.triton"), "CHUNK", 16)
    checks.check_ssd_continued(module, "cpu", torch.float32, lengths, sizes)


def test_gradients_of_parts_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Mamba-2: the gated norm and the convolution write into the gradient of one projection's output."""
    convolution, norm = kernels("causal_conv"), kernels("gated_norm")
    monkeypatch.setattr(convolution, "STRIP", 16)
    weight, taps, y = torch.randn(24), torch.randn(20, 4), torch.randn(20, 24)
    whole = torch.randn(20, 50).requires_grad_()
    found: list[torch.Tensor] = []
    memory: list[int] = []
    for divide in (split, lambda rows, sizes: torch.split(rows, sizes, -1)):
        z, rows, dt = divide(whole * 1.0, [24, 20, 6])
        z.register_hook(lambda grad: memory.append(grad.untyped_storage().data_ptr()))
        rows.register_hook(lambda grad: memory.append(grad.untyped_storage().data_ptr()))
        out = norm.gated_norm(y, z, weight, 12, 1e-5).square().sum()
        out = out + convolution.causal_conv(rows, taps, None, torch.arange(20), True).square().sum() + dt.exp().sum()
        found.append(torch.autograd.grad(out, whole)[0])
    assert found[0].equal(found[1])
    assert memory[0] == memory[1]
    assert memory[2] != memory[3]


@pytest.mark.parametrize(
    ("lengths", "sizes"), [([1, 1, 40, 20], (4, 2, 10, 20)), ([32, 32], (1, 1, 16, 40)), ([31, 1, 10], (2, 2, 20, 4))]
)
def test_delta_rule(lengths: list[int], sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("delta_rule")
    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(module, "NARROWEST", 16)
    monkeypatch.setattr(module, "VALUES", 16)
    monkeypatch.setattr(module, "PART", 16)
    checks.check_delta_rule(module, "cpu", torch.float32, lengths, sizes)
    checks.check_delta_rule_continued(module, "cpu", torch.float32, lengths, sizes)


def test_delta_rule_of_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case of the triangular system: powers of its matrix would be huge, and its inverse is small."""
    module, (q, k, v, decay, beta) = kernels("delta_rule"), checks.rule_inputs("cpu", torch.float32, 64, (1, 1, 16, 16))
    monkeypatch.setattr(module, "CHUNK", 64)
    inputs = (q, k[:1].expand_as(k).contiguous(), v, torch.zeros_like(decay), torch.ones_like(beta))
    sequences = PackedSequences.of_lengths([64])
    found = module.delta_rule(*inputs, sequences)
    exact = reference_delta_rule(*(t.double() for t in inputs), sequences)
    assert checks.error(found, exact) <= checks.TOLERANCE[torch.float32]


# A sequence may begin close before the border of a strip. Channels fill some blocks of a row, and a part of the last.
@pytest.mark.parametrize(
    ("lengths", "channels", "taps"), [([5, 1, 60, 33], 20, 4), ([64, 2], 70, 2), ([90], 3, 5), ([30, 40], 20, 4)]
)
def test_causal_conv(lengths: list[int], channels: int, taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("causal_conv")
    monkeypatch.setattr(module, "FORWARD_STRIP", 16)
    monkeypatch.setattr(module, "STRIP", 32)
    monkeypatch.setattr(module, "ROW", 16)
    checks.check_causal_conv(module, "cpu", torch.float32, lengths, channels, taps)


@pytest.mark.parametrize("sizes", [(5, 6, 4, 3), (18, 8, 6, 8)])
def test_latent_heads(sizes: tuple[int, int, int, int]) -> None:
    checks.check_latent_heads(kernels("latent_heads"), "cpu", torch.float32, *sizes)


def test_flat_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("cast_flat")
    monkeypatch.setattr(module, "BLOCK", 256)
    checks.check_cast_flat(module, "cpu", 999, interpreted=True)


def test_gradients_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("embedding")
    monkeypatch.setattr(module, "BLOCK", 64)
    checks.check_embedding_gradient(module, "cpu", torch.bfloat16, 40)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sum_terms(ranks: int) -> None:
    checks.check_sum_terms(kernels("sum_terms"), "cpu", torch.float32, torch.float32, ranks)
    checks.check_sum_terms(kernels("sum_terms"), "cpu", torch.bfloat16, torch.float32, ranks)


@pytest.mark.parametrize(("count", "size"), [(0, 5), (1, 128), (70, 130), (301, 24)])
def test_sum_rows(count: int, size: int) -> None:
    checks.check_sum_rows(kernels("sum_rows"), "cpu", torch.float32, count, size)


@pytest.mark.parametrize(("rows", "groups", "group"), [(9, 2, 63), (300, 3, 16), (3, 1, 2100)])
def test_gated_norm(rows: int, groups: int, group: int) -> None:
    checks.check_gated_norm(kernels("gated_norm"), "cpu", torch.float32, rows, groups, group)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(
    ("lengths", "keys", "causal", "window", "softcap"),
    [
        ([40, 1, 70], None, True, None, None),
        ([40, 70], None, False, None, None),
        ([90, 33], None, True, 20, None),
        ([33], None, True, 0, None),
        ([50, 64], None, True, None, 5.0),
        ([90], None, False, 20, 3.0),
        ([7, 40], [33, 90], True, 15, None),
    ],
)
def test_attention(lengths: list[int], keys: Any, causal: bool, window: Any, softcap: Any, sunk: bool) -> None:
    module, sizes = kernels("attention"), (2, 1, 24, 16) if sunk else (4, 2, 16, 16)
    checks.check_attention(module, "cpu", torch.float32, lengths, keys, causal, window, softcap, sizes, sunk)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 / 0 in rows of a program behind the last query
@pytest.mark.parametrize(
    ("batch", "lengths", "keys", "causal", "window"),
    [
        (2, None, 40, True, None),
        (2, None, 90, False, None),
        (1, None, 33, False, None),
        (1, [30, 1, 9], [30, 1, 9], True, None),
        (1, [30, 1, 9], [70, 64, 2], False, None),
        (1, [30, 10], [40, 64], True, 12),
    ],
)
def test_attention_blocks(batch: int, lengths: Any, keys: Any, causal: bool, window: int | None) -> None:
    """Of 40 queries. Keys and values lie beside one another, and are a part of their sequences."""
    from megalight.ops.attention_block.torch_kernels import reference_backward, reference_forward

    module, sequences, count = kernels("attention_block"), None, keys
    if lengths is not None:
        sequences = replace(PackedSequences.of_lengths(lengths), keys=PackedSequences.of_lengths(keys))
        count = sum(keys)
    q, both = torch.randn(batch, 50, 4, 16)[:, 10:], torch.randn(batch, count + 5, 2, 32)[:, :count]
    given = (q, both[..., :16], both[..., 16:])
    options = (sequences, causal, 0.3, window)
    found, expected = module.forward(*given, *options), reference_forward(*given, *options)
    grad = torch.randn(batch, 40, 4, 16)
    found += module.backward(grad, *given, *expected, *options)
    expected += reference_backward(grad, *given, *expected, *options)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert checks.error(one, other) < 1e-5


@pytest.mark.parametrize(
    ("lengths", "keys", "causal", "window", "softcap", "sunk"),
    [
        ([70, 1, 90], None, True, None, None, False),
        ([40, 70], None, False, None, 4.0, False),
        ([130, 33], None, True, 20, None, True),
        ([33], None, True, 0, None, False),
        ([90], None, False, 20, 3.0, False),
        ([7, 40], [33, 90], True, 15, None, False),
        ([7, 64], [99, 64], True, None, None, False),
    ],
)
def test_attention_with_heads_of_64(
    lengths: list[int], keys: Any, causal: bool, window: Any, softcap: Any, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 64 features have a kernel of their own for the gradients of keys and values."""
    module, own = kernels("attention"), importlib.import_module("megalight.ops.attention.triton_backward")
    ran = []
    monkeypatch.setattr(own, "BLOCKS", own.BLOCKS | {"ROWS": 16, "KEYS": 32})
    monkeypatch.setattr(own, "run", lambda *args, run=own.run: ran.append(True) or run(*args))
    checks.check_attention(module, "cpu", torch.float32, lengths, keys, causal, window, softcap, (4, 2, 64, 64), sunk)
    assert ran


def test_attention_chooses_the_kernel_of_keys() -> None:
    kernels("attention")
    own = importlib.import_module("megalight.ops.attention.triton_backward")
    head, odd = torch.zeros(600, 1, 64), torch.zeros(600, 1, 96)
    assert own.serves(head, head)
    assert not own.serves(odd, head)
    assert not own.serves(head, odd)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dim"), [(4, 2, 8, 8), (3, 1, 10, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(heads: int, kv_heads: int, head_dim: int, dim: int, interleaved: bool) -> None:
    checks.check_rotary(kernels("rotary"), "cpu", torch.float32, 5, heads, kv_heads, head_dim, dim, interleaved)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "sigmoid"])
def test_activations(kind: str) -> None:
    checks.check_activations(kernels("activation"), "cpu", torch.float32, (3, 63), kind)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_pairs(kind: str) -> None:
    kernels("activation")
    pair = importlib.import_module("megalight.ops.activation.triton")
    checks.check_gated_pair(pair.gated_pair, "cpu", torch.float32, (70, 63), kind)


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
@pytest.mark.parametrize("gates", [True, False])
def test_amax_on_the_way(kind: str, gates: bool) -> None:
    checks.check_measured(kernels("activation"), "cpu", torch.float32, kind, gates)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize(("kind", "shape"), [("silu", (37, 144)), ("sigmoid", (130, 16)), ("gelu_tanh", (16, 272))])
def test_activations_quantized(kind: str, gates: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    casts, activations = kernels("quantize"), kernels("activation")
    # the interpreter rounds to 8 bits wrongly; what comes before that is looked at
    monkeypatch.setattr(casts, "DTYPES", {"e4m3": torch.float32, "e5m2": torch.float32})
    data = importlib.import_module("megalight.ops.activation.quantized")
    checks.check_cast_activation(data, activations, casts, "cpu", torch.bfloat16, shape, kind, gates)


@pytest.mark.parametrize("shape", [(37, 4, 2, 32), (64, 2, 2, 64), (130, 8, 1, 32)])
def test_packed_gradients_quantized(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    casts, rotary = kernels("quantize"), kernels("rotary")
    monkeypatch.setattr(casts, "DTYPES", {"e4m3": torch.float32, "e5m2": torch.float32})
    data = importlib.import_module("megalight.ops.rotary.quantized")
    checks.check_cast_qkv_gradient(data, rotary, casts, "cpu", torch.bfloat16, shape)


@pytest.mark.parametrize("count", [1, 5, 4096, 9000])
def test_largest_magnitudes_are_recorded(count: int) -> None:
    kernels("quantize")
    module = importlib.import_module("megalight.ops.quantize.amax_history")
    kept, magnitudes = torch.zeros(3), torch.rand(count)
    magnitudes[count // 2] *= torch.nan if count > 1 else 1
    module.record_largest(kept[1], magnitudes)
    assert kept.tolist() == [0, magnitudes.nan_to_num(0).max(), 0]
    module.record_largest(kept[1], magnitudes / 2)
    assert kept[1] == magnitudes.nan_to_num(0).max()


@pytest.mark.parametrize("shape", [(7, 3), (3, 2, 63), (90, 100)])
def test_amax_of_norms_on_the_way(shape: tuple[int, ...]) -> None:
    checks.check_measured_norms(kernels("norm"), "cpu", torch.float32, shape)


@pytest.mark.parametrize("shape", [(4, 2, 8, 8), (3, 1, 10, 6)])
def test_amax_of_a_packed_gradient_on_the_way(shape: tuple[int, int, int, int]) -> None:
    checks.check_measured_rotary(kernels("rotary"), "cpu", torch.bfloat16, shape)


def test_amax_of_sums() -> None:
    checks.check_sums_of_measured(kernels("norm"), kernels("activation"), "cpu", torch.float32)


def test_layers_look_for_no_magnitude_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in 8 bits: of what norms, rotation and activation write, no pass looks for the largest magnitude."""
    norms, rotary, activations = kernels("norm"), kernels("rotary"), kernels("activation")
    session, hidden = Session(), 16
    x, residual, one = torch.randn(5, hidden), torch.randn(5, hidden), torch.ones(hidden)
    table = rotary_table(torch.arange(5), 8, 1e4)
    shapes = [(32, hidden), (hidden, hidden), (64, hidden), (hidden, 32)] * 2
    weights = [torch.randn(shape) / 4 for shape in shapes]
    passes: list[torch.Size] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        passes.append(x.shape)
        return amax_of(x)

    monkeypatch.setattr(amax_history, "amax_of", counted)
    found = []
    for measure in (True, False):
        passes.clear()
        inputs = [t.clone().requires_grad_() for t in (x, residual)]
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        for parameter in parameters:
            state_of(parameter).precision = LowPrecision(recipe("tensorwise"), session, emulate=True)
        stream = inputs[0] + inputs[1]
        with session.step(0):
            for qkv, proj, up, down in (parameters[:4], parameters[4:]):
                normed, stream = norms.add_rms_norm(stream, None, one, 1e-5, measure=measure)
                q, k, v = rotary.rotate_qkv(linear(normed, qkv), 2, 1, 8, *table, measure=measure)
                mixed = linear((q * k + v).flatten(1), proj)
                normed, stream = norms.add_rms_norm(mixed, stream, one, 1e-5, measure=measure)
                stream = stream + linear(activations.gated(linear(normed, up), "silu", measure=measure), down)
            stream.backward(torch.linspace(-1, 1, stream.numel()).view_as(stream))
        # without: eight weights and, of each of eight layers, input and gradient
        assert len(passes) == (8 + 2 + 1 if measure else 8 + 16)
        found.append([stream, *(t.grad for t in (*inputs, *parameters))])
    for measured, plain in zip(*found, strict=True):
        assert torch.equal(measured, plain)


@pytest.mark.parametrize("gates", [True, False])
def test_activations_of_rows_with_gaps(gates: bool) -> None:
    checks.check_gaps(kernels("activation"), "cpu", "silu", gates)


def test_activation_wider_than_a_block() -> None:
    checks.check_activations(kernels("activation"), "cpu", torch.float32, (2, 2500), "silu")


@pytest.mark.parametrize(("softcap", "bias", "padding", "chunk"), [(None, False, 0, None), (2.0, True, 3, 4)])
def test_cross_entropy(softcap: float | None, bias: bool, padding: int, chunk: int | None) -> None:
    from megalight.ops.cross_entropy import CrossEntropyKernels, chunked_cross_entropy

    module = kernels("cross_entropy")
    fn = partial(chunked_cross_entropy, CrossEntropyKernels(module.statistics, module.gradient_))
    checks.check_cross_entropy(
        fn, "cpu", torch.float32, 11, 77, 16, padding=padding, bias=bias, softcap=softcap, chunk=chunk
    )


def test_cross_entropy_rows_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("cross_entropy")
    monkeypatch.setattr(module, "STATISTICS_BLOCK", 16)
    monkeypatch.setattr(module, "GRADIENT_BLOCK", 16)
    test_cross_entropy(None, False, 0, None)


@pytest.mark.parametrize(("own", "softcap", "block"), [(True, False, 4096), (True, True, 16), (False, False, 16)])
@pytest.mark.parametrize("kind", ["forward_kl", "cross_entropy", "reverse_kl", "jensen_shannon"])
def test_divergence(kind: str, own: bool, softcap: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalight.ops.divergence.spec import DivergenceKernels

    kernels("cross_entropy")
    module = kernels("divergence")
    monkeypatch.setattr(module, "ROW_BLOCK", block)
    monkeypatch.setattr(module, "GRADIENT_BLOCK", block)
    rows = DivergenceKernels(module.statistics, module.sums, module.gradient_)
    checks.check_divergence(rows, "cpu", torch.float32, kind, (11, 77, 16), own=own, softcap=softcap)


@pytest.mark.parametrize("form", ["int8", "nf4", "nvfp4"])
def test_decode(form: str) -> None:
    checks.check_decode(kernels("quantized_weight").decode, "cpu", form, torch.float32)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
def test_adam(decoupled: bool, tensors: bool) -> None:
    step = kernels("adam").adam_step
    checks.check_adam(step, "cpu", 1500, decoupled=decoupled, tensors=tensors, out_dtype=torch.float16)


def test_adam_with_quantized_values() -> None:
    checks.check_quantized_adam(kernels("adam").adam_step, "cpu", 2050, interpreted=True)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(("first", "second"), [("bfloat16", "bfloat16"), ("float8", "float8"), ("bfloat16", "float8")])
def test_adam_with_narrow_moments(first: str, second: str, tensors: bool) -> None:
    checks.check_narrow_adam(kernels("adam").adam_step, "cpu", 1503, first, second, tensors=tensors)


def test_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megalight.ops.linear")
    small = {"BLOCK_OUT": 16, "BLOCK_IN": 32, "BLOCK_TOKENS": 16, "GROUP": 2, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(module, "TILE", small)
    checks.check_weight_gradient(module.triton_weight_gradient, "cpu", torch.float32, torch.float32, 37, 70, 50)


@pytest.mark.parametrize("write", [True, False])
def test_scaled_accumulate(write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("scaled_accumulate")
    small = {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 32, "BLOCK_TOKENS": 16, "GROUP": 2, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(module, "TILE", small)
    checks.check_scaled_accumulate(module.accumulate, "cpu", 37, 70, 48, write)


@pytest.mark.parametrize("shape", [(2, 7, 3, 8), (1, 50, 2, 12)])
@pytest.mark.parametrize("other_dtype", [torch.float32, torch.float16])
def test_attention_merge(
    shape: tuple[int, int, int, int], other_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kernels("attention_merge")
    monkeypatch.setattr(module, "BLOCK", 128)
    checks.check_merge(module.merge, "cpu", torch.float32, other_dtype, shape)


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128), (128, 128)])
@pytest.mark.parametrize("scale", ["fp32", "power"])
@pytest.mark.parametrize("shape", [(150, 144), (31, 16), (128, 256), (37, 122), (33, 257)])
def test_casts(tile: tuple[int, int], scale: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("quantize")
    # the interpreter rounds to 8 bits wrongly; what comes before that is looked at
    monkeypatch.setattr(module, "DTYPES", {"e4m3": torch.float32, "e5m2": torch.float32})
    for form in ("e4m3", "e5m2"):
        checks.check_cast(module, "cpu", *shape, Scheme(form, tile, scale), torch.bfloat16)


@pytest.mark.parametrize("shape", [(150, 144), (16, 272)])
def test_transposed_quantized_values(shape: tuple[int, int]) -> None:
    data = torch.randn(shape).to(torch.float8_e4m3fn)
    found = kernels("quantize").transpose(data)
    assert found.dtype == data.dtype
    assert torch.equal(found.view(torch.uint8), data.view(torch.uint8).t())


def test_casts_tell_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("quantize")
    monkeypatch.setattr(module, "DTYPES", {"e4m3": torch.float32, "e5m2": torch.float32})
    checks.check_told(module, "cpu", torch.bfloat16)
