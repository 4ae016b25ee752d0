"""The short convolution: equal to its formula, within sequences alone, and continued from its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.gpt import GPTConfig
from megalight.nn import CausalConv, ShortConv
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.nn.continued import assert_continued

LENGTHS = [5, 1, 2, 9]


def by_loop(x: Tensor, weight: Tensor, lengths: list[int]) -> Tensor:
    """Token by token, sequence by sequence."""
    outputs, kernel = [], weight.shape[1]
    for part in x.split(lengths):
        for t in range(len(part)):
            seen = range(min(kernel, t + 1))
            outputs.append(torch.stack([weight[:, kernel - 1 - j] * part[t - j] for j in seen]).sum(0))
    return torch.stack(outputs)


@pytest.mark.parametrize("kernel", [2, 3, 7])
def test_equals_the_formula(kernel: int) -> None:
    torch.manual_seed(0)
    conv = CausalConv(6, kernel).double()
    initialize(conv, 1)
    x = torch.randn(sum(LENGTHS), 6, dtype=torch.float64, requires_grad=True)
    found, expected = conv(x, PackedSequences.of_lengths(LENGTHS)), by_loop(x, conv.weight, LENGTHS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * factor).sum(), [x, conv.weight]) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_another_sequence_is_never_touched() -> None:
    """Not even by what is not a number."""
    conv = CausalConv(2, 3)
    initialize(conv, 1)
    x = torch.ones(6, 2)
    x[:3] = torch.nan
    assert conv(x, PackedSequences.of_lengths([3, 3]))[3:].isfinite().all()


def test_half_types_are_summed_in_float32() -> None:
    conv = CausalConv(4, 3)
    initialize(conv, 1)
    x, sequences = torch.randn(7, 4), PackedSequences.of_lengths([7])
    half = conv.bfloat16()(x.bfloat16(), sequences)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, conv.float()(x.bfloat16().float(), sequences).bfloat16())


def test_is_continued_from_its_state() -> None:
    """Pass by pass, several tokens at a time, slots in any order and used again."""
    torch.manual_seed(0)
    mixer = ShortConv(4, 4).double()
    initialize(mixer, 1)
    passes = [([0, 1, 2], [2, 6, 1]), ([2, 0], [1, 1]), ([1, 0, 2], [3, 1, 2]), ([0], [5])]
    assert_continued(mixer, 4, 20, passes, 1e-12)


def test_bad_input_is_refused() -> None:
    conv, (share, _) = CausalConv(2, 3), PackedSequences.of_lengths([8]).zigzag(0, 2)
    with pytest.raises(LayoutError, match="a convolution needs whole sequences"):
        conv(torch.ones(4, 2), share)
    sizes = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_sequence_length": 9}
    with pytest.raises(ConfigurationError, match=r"mixer_pattern is 'convs'.*Did you mean 'conv'"):
        GPTConfig(**sizes, mixer_pattern=("attention", "convs"))
    with pytest.raises(ConfigurationError, match="mixer_pattern is empty"):
        GPTConfig(**sizes, mixer_pattern=())
    with pytest.raises(ConfigurationError, match="conv_kernel is 1"):
        GPTConfig(**sizes, conv_kernel=1)
