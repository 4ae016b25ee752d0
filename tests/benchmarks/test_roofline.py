"""The roofline's terms, against figures worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.roofline import RATES, Rates, roofline
from benchmarks.step import Step

UNIT = Rates(gemm=1.0, gemm_fp8=2.0, attention=1.0, memory=1.0)
SMALL = Step(layers=3, hidden=8, ffn=20, heads=4, kv=2, vocab=50, seq=16, mbs=2, micro=5)
TOKENS = 16 * 2 * 5
HEAD = 8 * 50


def test_weights_of_a_layer_by_hand():
    projections = 8 * 8 + 2 * 8 * 4 + 8 * 8  # queries, keys and values, back
    assert SMALL.layer_weights == projections + 3 * 8 * 20
    assert SMALL.matmul_weights == 3 * SMALL.layer_weights + HEAD
    assert SMALL.weights == SMALL.matmul_weights + HEAD


def test_flops_are_those_of_the_published_rule():
    llama = Step(layers=32, vocab=128256)
    assert llama.flops_per_token / 1e9 == pytest.approx(48.25, abs=0.01)
    assert replace(llama, seq=32768).flops_per_token / 1e9 == pytest.approx(70.8, abs=0.1)
    assert replace(llama, seq=131072).flops_per_token / 1e9 == pytest.approx(148.1, abs=0.1)


def test_terms_by_hand():
    found = roofline(SMALL, UNIT)
    weights = 3 * (192 + 480) + HEAD
    assert found.products == 6 * weights * TOKENS
    assert found.attention == 6 * 3 * 8 * 16 * TOKENS
    layer = 2 * 8 * 8 + 4 * (8 + 2 * 4) + 8 * 20
    assert found.activations == 2 * (3 * layer + 8 * 8 + 3 * 50) * TOKENS
    assert found.accumulation == 8 * weights * 5
    assert found.optimizer == 38 * (weights + HEAD)
    assert found.flops == found.products + found.attention
    assert found.seconds == found.products + found.attention + found.activations + found.accumulation + found.optimizer
    assert found.tflops == pytest.approx(found.flops / found.seconds / 1e12)


def test_frozen_weights_have_no_gradient():
    found, plain = roofline(replace(SMALL, rank=2), UNIT), roofline(SMALL, UNIT)
    adapters = 3 * 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 20))
    assert found.products == (4 * (3 * (192 + 480) + HEAD) + 6 * adapters) * TOKENS
    assert found.accumulation == 8 * adapters * 5
    assert found.optimizer == 38 * adapters
    assert found.activations == plain.activations
    assert found.flops == found.products + found.attention


def test_fp8_speeds_up_the_layers_alone_and_adds_casts():
    found, plain = roofline(replace(SMALL, precision="fp8"), UNIT), roofline(SMALL, UNIT)
    assert found.products == 6 * (3 * 672 / 2 + HEAD) * TOKENS
    inputs, gradients = 8 + 8 + 8 + 20, 16 + 8 + 40 + 8
    assert found.activations - plain.activations == 3 * 4 * (inputs + gradients) * TOKENS


def test_ranks_share_what_they_share():
    whole, parts = roofline(SMALL, UNIT), roofline(replace(SMALL, tp=2, pp=3), UNIT)
    for term in ("products", "attention", "activations", "accumulation", "optimizer"):
        assert getattr(parts, term) == pytest.approx(getattr(whole, term) / 6), term
    replicas = roofline(SMALL, UNIT, replicas=3)
    assert replicas.optimizer == pytest.approx((30 / 3 + 8) * SMALL.weights)
    assert replicas.products == whole.products
    context = roofline(replace(SMALL, cp=2), UNIT)
    assert context.accumulation == whole.accumulation  # each holds all weights
    assert context.attention == whole.attention / 2


def test_the_first_row_on_an_h200():
    """8B width, 16 layers: about 1.07 s of products, 0.10 of attention, 0.11 of bytes."""
    found = roofline(Step(), RATES["NVIDIA H200"])
    assert found.products == pytest.approx(6 * 3.6203e9 * 32768 / 667e12, rel=1e-3)
    assert found.attention == pytest.approx(6 * 16 * 4096 * 4096 * 32768 / 514e12, rel=1e-6)
    assert found.tflops == pytest.approx(596, abs=2)
    assert found.record()["seconds"] == found.seconds


def test_experts_by_hand():
    step = replace(SMALL, experts=6, topk=2)
    layer = 192 + 8 * 6 + 6 * 480  # attention, router, experts
    assert step.layer_weights == layer
    active = 192 + 8 * 6 + 2 * 480
    found = roofline(step, UNIT)
    assert found.products == 6 * (3 * active + HEAD) * TOKENS
    assert found.flops == found.products + found.attention
    assert found.accumulation == 8 * (3 * layer + HEAD) * 5
    assert found.optimizer == 38 * (3 * layer + 2 * HEAD)
    plain = roofline(SMALL, UNIT)
    assert found.activations - plain.activations == 2 * 3 * (8 * 20 + 4 * 3 * 8) * TOKENS
    spread = roofline(replace(step, ep=3), UNIT, replicas=3)
    experts = 3 * 6 * 480
    assert spread.accumulation == pytest.approx(8 * (3 * layer + HEAD - experts * 2 / 3) * 5)
    assert spread.optimizer == pytest.approx(30 * step.weights / 3 + 8 * (step.weights - experts * 2 / 3))


def test_mixture_of_the_published_shapes():
    """Mixtral 8x7B has 46.7 billion parameters, of which a token passes 12.9."""
    step = Step(layers=32, experts=8)
    assert step.weights / 1e9 == pytest.approx(46.7, abs=0.05)
    assert (32 * step.active_weights + 2 * 4096 * 32000) / 1e9 == pytest.approx(12.9, abs=0.05)
