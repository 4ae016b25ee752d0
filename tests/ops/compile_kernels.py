"""Compiles every Triton kernel for an H200 without one: prints registers, stack and shared memory of each.

Run as ``python -m tests.ops.compile_kernels`` where Triton is installed. Kernels are compiled, not launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HALF = torch.bfloat16
SHARED_MEMORY = 232448
"""Bytes that a program may use on sm_90."""


class Driver:
    """Stands in for the CUDA driver while kernels are compiled."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
    """What stands in for a launch."""

    def launch(*args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        used = resources(compiled.asm["cubin"])
        if options.get("UNIT", 1) > 1:
            assert "ld.global.b16" not in compiled.asm["ptx"], f"{kernel.fn.__name__} {options} loads single elements"
        shared = compiled.metadata.shared
        assert shared <= SHARED_MEMORY, f"{kernel.fn.__name__} {options} needs {shared} bytes of shared memory"
        print(f"{kernel.fn.__module__}.{kernel.fn.__name__} {options}: {used}, {shared} bytes shared", flush=True)

    return launch


def through(outputs: Any) -> None:
    """Backward with random gradients."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(tensors, [torch.randn_like(t) for t in tensors])


def leaf(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def waits(address: int) -> None:
    """Kernels that wait for flags and raise them, with addresses that Triton passes in 32 or in 64 bits."""
    from megalight.parallel.peers import spin

    spin.wait((address, address + 4))
    spin.raise_flags((address,) * spin.AT_ONCE)
    spin._wait_with[(1,)](address, 3, address, address, address, 16, 10**9, WIDTH=spin.WIDEST, SLOTS=2, num_warps=1)


def main() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign, assignment]

    from megalight.ops import attention_merge as blocks
    from megalight.ops import cast_flat as flat_casts
    from megalight.ops import causal_conv as convolutions
    from megalight.ops import embedding as embeddings
    from megalight.ops import gated_norm as gated_norms
    from megalight.ops import latent_heads, linear, momentum, syrk
    from megalight.ops import quantized_weight as stored
    from megalight.ops import sample_tokens as samples
    from megalight.ops import scaled_accumulate as sums
    from megalight.ops import sum_rows as row_sums
    from megalight.ops import sum_terms as terms
    from megalight.ops.activation import KINDS
    from megalight.ops.activation import triton as activations
    from megalight.ops.adam import QuantizedOutput
    from megalight.ops.adam import triton as adam
    from megalight.ops.attention import triton as attention
    from megalight.ops.cross_entropy import triton as rows
    from megalight.ops.delta_rule import triton as rules
    from megalight.ops.divergence import KINDS as DIVERGENCES
    from megalight.ops.divergence import triton as divergences
    from megalight.ops.divergence.spec import Measure
    from megalight.ops.linear.gemv import gemv
    from megalight.ops.linear.weight_only import weight_only_product
    from megalight.ops.norm import triton as norms
    from megalight.ops.quantize import Scheme, quantize
    from megalight.ops.quantize import triton as casts
    from megalight.ops.quantized_weight import QuantizedWeight
    from megalight.ops.rotary import triton as rotary
    from megalight.ops.ssd import triton as scans
    from megalight.types import PackedSequences

    waits(1 << 20)
    waits(1 << 44)
    ones = samples.SamplingRows(torch.ones(3, 4).double(), torch.ones(3, 4, dtype=torch.int64), False, True)
    for dtype in (HALF, torch.float16, torch.float32):
        logits = torch.zeros(4, 128256, dtype=dtype)
        peak, _ = samples.triton_peak(logits)
        cut = samples.triton_cut(logits, ones, peak)
        for kept in (cut, None):
            samples.triton_best(logits, ones, peak, kept, 0, 128256)
    for size, dtype in ((63, HALF), (128, HALF), (4096, HALF), (4096, torch.float32), (14336, HALF)):
        x, weight = leaf(16, size, dtype=dtype), leaf(size, dtype=dtype)
        through(norms.rms_norm(x, weight, 1e-5))
        through(norms.layer_norm(x, weight, weight, 1e-5))
        through(norms.add_rms_norm(x, leaf(16, size, dtype=dtype), weight, 1e-5))
        through(norms.add_layer_norm(x, leaf(16, size, dtype=dtype), weight, weight, 1e-5))
        through(norms.rms_norm(x, weight, 1e-5, measure=True))
        through(norms.add_layer_norm(x, leaf(16, size, dtype=dtype), weight, weight, 1e-5, measure=True))
    for heads, kv_heads, head_dim, dim in ((32, 8, 128, 128), (5, 1, 80, 32)):
        for interleaved in (False, True):
            cos, sin = torch.randn(2, 8, dim // 2)
            packed = leaf(8, (heads + 2 * kv_heads) * head_dim)
            through(rotary.rotate_qkv(packed, heads, kv_heads, head_dim, cos, sin, interleaved))
            through(rotary.rotate_qkv(packed, heads, kv_heads, head_dim, cos, sin, interleaved, measure=True))
            through(rotary.apply_rotary(leaf(8, heads, head_dim), cos, sin, interleaved))
    for kind in KINDS:
        through(activations.gated(leaf(8, 2 * 14336), kind))
        through(activations.activation(leaf(8, 63), kind))
        through(activations.gated(leaf(8, 2 * 14336), kind, measure=True))
    # Sizes that 16 does not divide, with loads of several elements all the same.
    through(activations.gated(leaf(8, 2 * 3420), "silu"))
    through(activations.activation(leaf(8, 3420), "gelu"))
    through(activations.gated(leaf(8, 2 * 3424)[:, : 2 * 3420], "silu"))
    packed_rows = PackedSequences.of_lengths([300, 400])
    for dim, window, cap in ((128, None, None), (128, 100, None), (64, None, 30.0), (256, None, 30.0)):
        heads_of = (leaf(700, heads, dim) for heads in (8, 2, 2))
        through(attention.attention(*heads_of, packed_rows, True, None, window, cap, 0.0))
    for size, softcap in ((32000, None), (1000, 30.0)):
        logits, labels = torch.randn(8, size).to(HALF), torch.randint(0, size, (8,))
        logsumexp, target = rows.statistics(logits, labels, size, softcap)
        rows.gradient_(logits, labels, logsumexp, target, size, softcap)
        for kind in DIVERGENCES:
            measure, teacher = Measure(kind, 1.5, True, size, (softcap, softcap)), torch.randn_like(logits)
            found, target = divergences.statistics(logits, teacher, labels, measure)
            _, slopes = divergences.sums(logits, teacher, found, measure)
            divergences.gradient_(logits, teacher, labels, found, slopes, target, target, measure)
    for size, dtype in ((4096, HALF), (100, torch.float32)):
        embeddings.triton_add_rows(
            torch.zeros(40, size), torch.randint(0, 40, (64,)), torch.randn(64, size).to(dtype), False
        )
    for form in ("int8", "nf4", "fp8"):
        quantized = QuantizedWeight(torch.randn(8, 256).to(HALF), form, 64)
        stored.triton_decode(quantized.data, quantized.scales, form, HALF)
    for block in (2048, 128):
        fp8 = torch.nn.Parameter(torch.randn(64, 2048).to(HALF), requires_grad=False)
        stored.store(fp8, "fp8", block)
        for count in (1, 16, 64):
            weight_only_product(torch.randn(count, 2048).to(HALF), fp8, None)
        gemv(torch.randn(1, 2048).to(HALF), fp8, None, gate="silu")
    for lr, scale, out in ((0.1, None, None), (torch.tensor(0.1), torch.tensor(1.0), torch.empty(4096, dtype=HALF))):
        state = torch.rand(4, 4096).unbind()
        adam.adam_step(
            *state, lr=lr, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1, step=2, grad_scale=scale, out=out
        )
    quantized_of = torch.zeros(4096).to(torch.float8_e4m3fn)
    for told in (None, torch.tensor(1.0)):
        adam.adam_step(
            *torch.rand(4, 4096).unbind(), lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1, step=2,
            quantized_out=QuantizedOutput(quantized_of, Scheme("e4m3"), torch.tensor(1.0), HALF, told),
        )  # fmt: skip
    narrow = torch.rand(2, 4096).unbind(), torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    for lr, first in ((0.1, narrow[1]), (torch.tensor(0.1), torch.zeros(4096, dtype=HALF))):
        blocks_of = torch.zeros(64, dtype=torch.uint8) if first is narrow[1] else None, torch.zeros(64).byte()
        adam.adam_step(
            *narrow[0], first, narrow[2], lr=lr, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1, step=2,
            exponents=blocks_of,
        )  # fmt: skip
    for dim, dtype in ((128, HALF), (80, torch.float32)):
        out, lse = torch.randn(2, 64, 4, dim), torch.randn(2, 4, 64)
        blocks.triton_merge(out.to(dtype), lse, out.to(HALF), lse, out, lse)
    for tokens, width_out, width in ((64, 6144, 4096), (63, 500, 300)):
        main, grad_y, x = torch.zeros(width_out, width), leaf(tokens, width_out), leaf(tokens, width)
        linear.triton_weight_gradient(main, grad_y, x, tokens == 63)
    for tile in casts.MODES:
        for columns in (None, Scheme("e5m2", tile, "power")):
            casts.cast(leaf(64, 4096).detach(), Scheme("e4m3", tile), columns)
    one = torch.tensor(1.0)
    casts.cast(leaf(64, 4096).detach(), Scheme("e4m3"), Scheme("e5m2"), one, one, None, True)
    for told in (None, one):
        flat = torch.zeros(4096).to(torch.float8_e4m3fn)
        flat_casts.triton_cast_flat(flat, torch.randn(4096), Scheme("e4m3"), one, HALF, told)
    for tile in casts.MODES:
        casts.cast(leaf(64, 3420).detach(), Scheme("e4m3", tile), Scheme("e5m2", tile), width=3424)
    casts.transpose(torch.randn(512, 256).to(torch.float8_e4m3fn))
    for form, zero in (("e4m3", True), ("e5m2", False)):
        a, b = (quantize(torch.randn(64, 4096), Scheme(kind)) for kind in (form, "e4m3"))
        sums.triton_accumulate(torch.zeros(64, 64), a, b, zero)
    mixture_of_experts()
    for channels, taps, dtype in ((10240, 4, HALF), (70, 2, HALF), (2048, 3, torch.float32)):
        rows_of = leaf(256, channels, dtype=dtype), leaf(channels, taps, dtype=dtype), leaf(channels, dtype=dtype)
        for silu in (True, False):
            through(convolutions.triton_causal_conv(*rows_of, torch.arange(256), silu))
    for groups, size, dtype in ((8, 1024, HALF), (1, 8192, HALF), (1, 2048, torch.float32), (3, 100, HALF)):
        gated = leaf(64, groups * size, dtype=dtype), leaf(64, groups * size, dtype=dtype)
        through(gated_norms.triton_gated_norm(*gated, leaf(groups * size, dtype=dtype), size, 1e-5))
        through(gated_norms.triton_gated_norm(*gated, leaf(size, dtype=dtype), size, 1e-5, True))
    for summed, add in ((torch.zeros(64, 1000), False), (torch.zeros(4616, 4096, dtype=HALF), True)):
        row_sums.triton_sum_rows(torch.zeros(summed.shape[1]), summed, add)
    row_sums.triton_sum_rows(torch.zeros(6840), torch.randn(400, 6840).to(HALF), True)
    for ranks in (2, 8):
        for add in (False, True):
            own_term, *other_terms = torch.zeros(ranks, 4096, dtype=HALF)
            terms.triton_sum_terms(torch.zeros(4096), own_term, other_terms, 1, add)
    for rate, scale in ((0.1, None), (torch.tensor(0.1), torch.tensor(1.0))):
        one, half = torch.zeros(4096), torch.zeros(4096, dtype=HALF)
        momentum.triton_momentum(half, one, one, 0.9, True, scale)
        momentum.triton_decayed(one, half, rate, 0.1, half)
    for square in (None, torch.zeros(2, 1024, 1024, dtype=HALF)):
        syrk.triton_syrk(torch.zeros(2, 1024, 4096, dtype=HALF), square, 2.0, -4.0, 3.0)
    syrk.triton_syrk(torch.zeros(2, 1000, 4096, dtype=HALF), torch.zeros(2, 1000, 1000, dtype=HALF), 2.0, -4.0, 3.0)
    momentum.triton_normalized(torch.zeros(2, 768, 2048, dtype=HALF), 1e-7)
    for heads, own, shared, values in ((128, 128, 64, 128), (5, 24, 10, 20)):
        cos, sin = torch.randn(2, 8, shared // 2)
        through(latent_heads.triton_join_keys(leaf(8, heads, own + values), leaf(8, shared), own))
        for interleaved in (False, True):
            through(latent_heads.triton_rotate_tail(leaf(8, heads, own + shared), cos, sin, interleaved))
    for heads, groups, size, width in ((16, 2, 64, 128), (8, 1, 128, 128), (6, 3, 20, 100)):
        steps = torch.rand(256, heads).requires_grad_(), (-torch.rand(heads)).requires_grad_()
        keys, queries = leaf(256, groups, width), leaf(256, groups, width)
        factor = leaf(heads, dtype=torch.float32)
        through(scans.ssd(leaf(256, heads, size), *steps, keys, queries, factor, torch.arange(256)))
    packed_rows = PackedSequences.of_lengths([100, 156])
    for heads, groups, width, size in ((32, 16, 128, 128), (6, 3, 20, 100)):
        decays, rates = (torch.rand(256, heads).requires_grad_() for _ in range(2))
        keys, queries = leaf(256, groups, width), leaf(256, groups, width)
        through(rules.delta_rule(queries, keys, leaf(256, heads, size), decays, rates, packed_rows))


def mixture_of_experts() -> None:
    from megalight.ops.activation import triton as weighted
    from megalight.ops.grouped_linear import triton as products
    from megalight.ops.grouped_scaled import triton as scaled
    from megalight.ops.permute import triton as permute
    from megalight.ops.quantize import Scheme, quantize
    from megalight.ops.router import Rule
    from megalight.ops.router import triton as router
    from tests.ops.moe_checks import RULES, offsets_of

    for rule in RULES:
        for num_experts in (16, 128):
            logits, bias = leaf(64, num_experts, dtype=torch.float32), torch.randn(num_experts)
            through(router.route(logits, rule, bias if rule.score == "sigmoid" else None).probs)
    for score in ("softmax", "sigmoid"):
        sums = router.statistics(leaf(64, 60), Rule(3, score), torch.tensor([0, 7, 64]), torch.ones(64) > 0)
        through((sums.scores, sums.squares))
        through(router.statistics(leaf(64, 128, dtype=torch.float32), Rule(8, score), None, None).scores)
    for num_experts, k, size in ((8, 2, 4096), (128, 8, 2048), (60, 4, 1000)):
        experts, rows = torch.zeros(64, k, dtype=torch.int64), 64 * k
        permute.permutation(experts, num_experts, 16, None, rows)
        where = permute.permutation(experts, num_experts, 1, None, rows)
        through(permute.permute(leaf(64, size), where, leaf(64, k, dtype=torch.float32)))
        through(permute.unpermute(leaf(rows, size), where, None))
        through(permute.unpermute(leaf(rows, size), where, leaf(64, k, dtype=torch.float32)))
    for kind in ("silu", "quick_gelu", "squared_relu"):
        for size in (768, 14336, 2880):
            weights = leaf(8, dtype=torch.float32)
            through(weighted.weighted(leaf(8, 2 * size), kind, True, weights, 1.0, 7.0))
            through(weighted.weighted(leaf(8, 2 * size), kind, True, weights, 0.0, None))
            through(weighted.weighted(leaf(8, size), kind, False, weights, 0.0, None))
    for sizes in ([1024] * 2, [16] * 128):
        x, grad_y, offsets = leaf(2048, 512).detach(), leaf(2048, 768).detach(), offsets_of(sizes)
        weight = leaf(len(sizes), 768, 512).detach()
        products.product(x, weight, offsets, None, True)
        products.product(grad_y, weight, offsets, None, False)
        products.accumulate(weight, grad_y, x, offsets, None, True)
        for write in (True, False):
            products.accumulate(weight.float(), grad_y, x, offsets, None, write)
        value, gradient = Scheme("e4m3", (1, 0)), Scheme("e5m2", (1, 0))
        x_t, grad_t = scaled.columns(x, value, offsets, None), scaled.columns(grad_y, gradient, offsets, None)
        weight_t = scaled.columns(weight, value, None, torch.ones(len(sizes), 512))
        scaled.product(quantize(x, value), quantize(weight.flatten(0, 1), value), offsets, HALF, True)
        scaled.product(quantize(grad_y, gradient), weight_t, offsets, HALF, False)
        for write in (True, False):
            scaled.accumulate(weight.float(), grad_t, x_t, offsets, write)


if __name__ == "__main__":
    main()
