import pytest
import torch

from megalight.ops.low_rank import add_low_rank
from megalight.ops.parameter import collect

SIZES = [6, 4, 5]
WIDTH = 3


def factors(adapted, shape=(7,), dtype=torch.float64):
    torch.manual_seed(0)
    chosen = [size for size, yes in zip(SIZES, adapted, strict=True) if yes]
    y = torch.randn(*shape, sum(SIZES), dtype=dtype, requires_grad=True)
    narrow = torch.randn(*shape, WIDTH * len(chosen), dtype=dtype, requires_grad=True)
    return y, narrow, torch.randn(sum(chosen), WIDTH, dtype=dtype, requires_grad=True)


def plain(y, narrow, up, adapted):
    """Split, multiply and join."""
    chosen = [size for size, yes in zip(SIZES, adapted, strict=True) if yes]
    pairs = zip(torch.split(narrow, WIDTH, -1), torch.split(up, chosen), strict=True)
    found = []
    for part, yes in zip(torch.split(y, SIZES, -1), adapted, strict=True):
        if yes:
            few, matrix = next(pairs)
            part = part + few @ matrix.T
        found.append(part)
    return torch.cat(found, -1)


@pytest.mark.parametrize("shape", [(7,), (2, 5), (0,)])
@pytest.mark.parametrize("adapted", [(True, True, True), (False, True, False), (True, False, True)])
def test_as_split_and_joined(adapted, shape):
    y, narrow, up = inputs = factors(adapted, shape)
    base = y * 1.0
    out = add_low_rank(base, narrow, up, SIZES, adapted)
    assert out.data_ptr() == base.data_ptr()
    expected = plain(y, narrow, up, adapted)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_main_gradient_is_overwritten_then_added_to():
    adapted = (True, False, True)
    y, narrow, up = factors(adapted)
    (expected,) = torch.autograd.grad(plain(y, narrow, up, adapted).square().sum(), up)
    up = torch.nn.Parameter(up.detach())
    main_grad, ready = torch.full_like(up, torch.nan), []
    state = collect(up, main_grad, lambda: ready.append(1))
    state.untouched = True
    for times in (1, 2):
        add_low_rank(y * 1.0, narrow, up, SIZES, adapted).square().sum().backward()
        torch.testing.assert_close(main_grad, times * expected, rtol=0, atol=1e-11)
        assert up.grad is None
        assert len(ready) == times


def test_frozen_layers_get_no_gradient():
    y, narrow, up = factors((True, True, True))
    out = add_low_rank(y.detach().clone(), narrow.detach(), up, SIZES, (True, True, True))
    (grad,) = torch.autograd.grad(out.sum(), up)
    torch.testing.assert_close(grad, narrow.detach().view(7, 3, WIDTH).sum(0).repeat_interleave(torch.tensor(SIZES), 0))


def test_an_adapter_in_more_bits_than_the_output():
    adapted = (True, True, False)
    y, narrow, up = factors(adapted, dtype=torch.float32)
    half = (y.detach() * 1.0).bfloat16()
    out = add_low_rank(half.clone().requires_grad_() * 1.0, narrow, up, SIZES, adapted)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), plain(half.float(), narrow, up, adapted), rtol=0, atol=0.05)
    grads = torch.autograd.grad(out.float().sum(), (narrow, up))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]


class Viewed(torch.autograd.Function):
    """Returns a view of what it computes, as products in 8 bits do."""

    @staticmethod
    def forward(ctx, y):
        return (2 * y).view(y.shape)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_the_layer_may_return_a_view():
    adapted = (True, True, True)
    y, narrow, up = inputs = factors(adapted)
    out = add_low_rank(Viewed.apply(y), narrow, up, SIZES, adapted)
    expected = plain(2 * y, narrow, up, adapted)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_an_output_that_its_layer_saved_is_refused():
    y, narrow, up = factors((True, True, True))
    out = add_low_rank(y.exp(), narrow, up, SIZES, (True, True, True))  # exp saves what it returns
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
