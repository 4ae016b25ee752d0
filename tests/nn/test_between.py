"""Products in 8 bits with scales of past steps: what lies between two of them is quantized, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.model import GPT
from megalight.nn import attention
from megalight.nn import linear as between
from megalight.nn.init import initialize
from megalight.ops.activation import quantized as quantized_activation
from megalight.ops.autograd import elided_output, elided_output_of
from megalight.ops.linear import WeightGradients, deferring
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.parameter import collect
from megalight.ops.rotary import quantized as quantized_rotary
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision, remove_low_precision
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.types import TokenBatch
from tests.strategies.training import BASE

CONFIG = replace(BASE, hidden_size=64, ffn_hidden_size=80)
OPTIONS = LowPrecisionOptions("delayed", history=2, emulate=True)
STEPS = 3
LAYERS = 2


def build(**changes: Any) -> GPT:
    model = GPT(replace(CONFIG, **changes))
    initialize(model, 1, "model.")
    return model.bfloat16()


def train(model: GPT, options: LowPrecisionOptions = OPTIONS, queue: WeightGradients | None = None) -> list[Tensor]:
    """Three steps of two micro-batches without an update; return losses, gradients and histories.

    Weight gradients wait in the ``queue`` until the input gradients of a micro-batch are done.
    """
    session = apply_low_precision(model, options, ParallelMesh())
    found = []
    for step in range(STEPS):
        with session.step(step):
            for start in (0, 7):
                ids = (torch.arange(34).view(2, 17) + start * step) % 101
                batch = TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(2, 16))
                output = model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
                with nullcontext() if queue is None else deferring(queue):
                    output.losses.float().mean().backward()
                if queue is not None:
                    assert len(queue) == 4 * LAYERS
                    queue.run()
                found.append(output.losses.detach())
    found += [parameter.grad for parameter in model.parameters()]
    histories = [cast.history for p in model.parameters() if (cast := precision_of(p)) is not None]
    return found + [history.past for history in histories if history is not None and history.past is not None]


def count(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that fills with the shapes of tensors that are not written."""
    shapes: list[tuple[int, ...]] = []

    def counted(shape: tuple[int, ...], like: Tensor, cast: Any) -> Tensor:
        shapes.append(shape)
        return elided_output(shape, like, cast)

    for module in (quantized_activation, quantized_rotary):
        monkeypatch.setattr(module, "elided_output", counted)
    return shapes


def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, everything is written."""
    for module in (between, attention):
        monkeypatch.setattr(module, "gradient_is_elided", lambda *_: False)


def recomputed(model: GPT) -> None:
    apply_recompute(model, RecomputeOptions(granularity="selective", modules=("mlp.act",)))


ALL = 2 * LAYERS * (STEPS - 1) * 3
"""Per micro-batch, layer and step after the first: the activation, its input's gradient, and that of the projection."""


@pytest.mark.parametrize(
    ("changes", "prepare", "expected"),
    [
        pytest.param({}, None, ALL, id="swiglu"),
        pytest.param({"activation": "squared_relu"}, None, ALL, id="plain"),
        pytest.param({}, recomputed, ALL * 4 // 3, id="recomputed"),
        pytest.param({"mlp_bias": True}, None, ALL // 3, id="biases of the MLP"),
        pytest.param({"ffn_hidden_size": 76}, None, ALL // 3, id="features that casts fill up"),
        pytest.param({"attention": AttentionConfig(qkv_bias=True)}, None, ALL * 2 // 3, id="bias of the projection"),
        pytest.param({"attention": AttentionConfig(qk_norm=True)}, None, ALL * 2 // 3, id="norms of heads"),
    ],
)
def test_nothing_changes(
    changes: dict[str, Any], prepare: Callable[[GPT], None] | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, found = count(monkeypatch), []
    for plain in (False, True):
        model = build(**changes)
        if prepare is not None:
            prepare(model)
        if plain:
            assert len(shapes) == expected
            written(monkeypatch)
        found.append(train(model))
    assert len(shapes) == expected
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_of_now_need_values(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = count(monkeypatch)
    train(build(), LowPrecisionOptions(recipe, emulate=True))
    assert not shapes


def hook_after_activation(model: GPT, seen: list[Tensor]) -> None:
    model.layers["0"].mlp.act.register_forward_hook(lambda module, args, out: seen.append(out))


def hook_before_down(model: GPT, seen: list[Tensor]) -> None:
    model.layers["0"].mlp.down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))


def hook_of_gradient(model: GPT, seen: list[Tensor]) -> None:
    model.layers["0"].mlp.gate_up.register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0]))


@pytest.mark.parametrize("watch", [hook_after_activation, hook_before_down, hook_of_gradient])
def test_what_a_hook_reads_is_written(
    watch: Callable[[GPT, list[Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, seen, model = count(monkeypatch), [], build()
    watch(model, seen)
    train(model)
    assert len(seen) == 2 * STEPS
    assert all(bool(x.isfinite().all()) for x in seen)
    # A hook before the second product sees the output, and not the gradient.
    assert len(shapes) == ALL - 2 * (STEPS - 1) * (1 if watch is hook_before_down else 2)


def test_weight_gradients_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, found = count(monkeypatch), []
    for queue in (WeightGradients(), None):
        model = build()
        main_grads = [torch.zeros_like(p, dtype=torch.float32) for p in model.layers.parameters()]
        for parameter, main_grad in zip(model.layers.parameters(), main_grads, strict=True):
            collect(parameter, main_grad, lambda: None)
        found.append([*train(model, queue=queue), *main_grads])
    assert len(shapes) == 2 * ALL
    for late, early in zip(*found, strict=True):
        assert (late is None and early is None) or torch.equal(late, early)


def test_layers_that_keep_their_dtype_write(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = count(monkeypatch)
    train(build(), replace(OPTIONS, modules=("mlp.down", "attention.proj")))
    assert not shapes
    model = build()
    train(model, replace(OPTIONS, modules=("mlp.gate_up",)))
    assert shapes == [(32, 160)] * (2 * LAYERS * (STEPS - 1))
    remove_low_precision(model)
    assert all(getattr(module, "fusion", None) is None for module in model.modules())


def test_an_elided_output() -> None:
    like = torch.zeros(2, dtype=torch.bfloat16)
    x = elided_output((3, 4), like, lambda *_: ((None, None), like))
    assert x.shape == (3, 4)
    assert x.dtype == like.dtype
    assert bool(x.isnan().all())
    assert x.untyped_storage().nbytes() == like.element_size()
    assert elided_output_of(x) is not None
    assert elided_output_of(x.view(12)) is None
    assert elided_output_of(like) is None
    assert not x._is_view()
    assert isinstance(nn.Identity()(x), Tensor)
    assert elided_output_of(torch.ones(1)) is None
