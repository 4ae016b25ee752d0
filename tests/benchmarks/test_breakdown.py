"""Kernels by name, and the division of a step's time among them."""

import re

import pytest

from benchmarks.breakdown import PARTS, between_flags, divide, gaps, longest, part_of, union, waits
from tests.support.source import ROOT

NAMES = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "gemm",
    "_accumulate": "gemm",
    "triton_tem_fused_mm_0": "gemm",
    "triton_tem_fused_flex_attention_2": "attention",
    "aten::addmm": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_f16_knob_7_128x128x128_4x1x1": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_f16": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "exposed",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exposed",
    "Memcpy PtoP (Device -> Device)": "exposed",
    "_step": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::NormTwoOps<float, float>>>": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": "other",
    "_forward": "other",
    "_statistics": "other",
    "Memcpy HtoD (Pinned -> Device)": "other",
    "triton_poi_fused_mul_silu_1": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_part_of_a_kernel(name):
    assert part_of(name) == NAMES[name]


def test_kernels_of_attention_say_so():
    """A kernel's name in a profile is that of its function, and ``_forward`` might be that of any op."""
    files = sorted((ROOT / "megalight" / "ops" / "attention").rglob("*.py"))
    launched = [name for file in files for name in re.findall(r"^ +(_\w+)\[", file.read_text(), re.MULTILINE)]
    assert len(launched) >= 9
    assert [name for name in launched if part_of(name) != "attention"] == []


def test_every_instant_belongs_to_one_part():
    kernels = [
        ("gemm_a", 1.0, 3.0),
        ("ncclDevKernel_AllReduce", 2.0, 5.0),  # 1 s hidden under the product, 1 under attention, 1 alone
        ("flash_fwd", 2.5, 4.0),  # half a second of it beside the product
        ("_step", 6.0, 7.0),
        ("relu", 6.5, 7.25),
        ("relu", 6.5, 7.0),  # on another stream
    ]
    found = divide(kernels, seconds=6.5)
    assert {part: found[part] for part in PARTS} == {
        "gemm": 2.0,
        "attention": 1.0,
        "optimizer": 1.0,
        "other": 0.25,
        "exposed": 1.0,
    }
    assert found["idle"] == 1.0
    assert found["step"] == 6.25 == sum(found[part] for part in PARTS) + found["idle"]
    assert found["computing"] == 4.25
    assert found["communicating"] == 3.0
    assert found["accounted"] == pytest.approx(6.25 / 6.5)


def test_nothing_ran():
    assert divide([]) == {}


def test_the_longest_are_summed_by_name():
    kernels = [("relu", 0.0, 1.0), ("_step", 1.0, 2.5), ("relu", 3.0, 4.0)]
    assert longest(kernels, 1) == [{"name": "relu", "part": "other", "calls": 2, "seconds": 2.0}]


def test_union_joins_what_touches():
    assert union([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (0.5, 0.75)]) == [(0.0, 2.0), (3.0, 4.0)]


def test_gaps_are_between_the_last_that_ends_and_the_next():
    kernels = [("relu", 0.0, 4.0), ("gemm", 1.0, 2.0), ("late", 4.5, 5.0), ("last", 8.0, 9.0)]
    assert gaps(kernels, 1) == [{"at": 5.0, "seconds": 3.0, "after": "late", "before": "last"}]
    assert gaps(kernels)[1:] == [{"at": 4.0, "seconds": 0.5, "after": "relu", "before": "late"}]
    assert gaps([]) == []


def test_waits_are_times_with_messages_alone():
    kernels = [
        ("gemm_a", 1.0, 3.0),
        ("ncclDevKernel_AllGather", 2.0, 5.0),  # half hidden; then it waits for two kernels on other streams
        ("relu", 4.0, 4.5),
        ("Memcpy PtoP (Device -> Device)", 4.25, 4.75),
        ("gemm_b", 6.0, 7.0),
        ("ncclDevKernel_AllReduce", 7.5, 9.5),  # behind the last kernel
    ]
    message = "ncclDevKernel_AllGather"
    assert waits(kernels, 1) == [{"at": 6.0, "seconds": 2.0, "message": "ncclDevKernel_AllReduce", "before": ""}]
    assert waits(kernels)[1:] == [
        {"at": 2.0, "seconds": 1.0, "message": message, "before": "relu"},
        {"at": 3.5, "seconds": 0.5, "message": message, "before": "gemm_b"},
    ]
    assert sum(wait["seconds"] for wait in waits(kernels)) == divide(kernels)["exposed"]
    assert waits([]) == []


def test_a_step_lies_between_two_flags_and_what_crosses_them_is_cut():
    kernels = [
        ("gemm_before", 0.0, 0.5),
        ("ncclDevKernel_AllGather", 0.5, 3.0),  # of the step before; it runs on under this one
        ("flag", 1.0, 1.25),
        ("gemm_a", 1.25, 4.0),
        ("flag", 4.0, 4.25),
        ("ncclDevKernel_AllGather", 3.5, 6.0),  # its rest belongs to the next step
        ("gemm_after", 4.25, 5.0),
    ]
    assert between_flags(kernels, "flag") == [
        ("ncclDevKernel_AllGather", 1.25, 3.0),
        ("gemm_a", 1.25, 4.0),
        ("ncclDevKernel_AllGather", 3.5, 4.0),
    ]
    with pytest.raises(ValueError, match="1 kernels are named 'gemm_before'"):
        between_flags(kernels, "gemm_before")
